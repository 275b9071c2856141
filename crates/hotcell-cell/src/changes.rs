//! What a copy-on-write workspace would change, read from the upper layer of its overlay.
//!
//! Both layers are walked by descriptor, side by side: no link of either is followed, no FIFO or device is
//! opened, and the walk ends at a fixed depth and number of entries however many there are.

use std::collections::{BTreeMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, Stat};
use serde::{Deserialize, Serialize};

use crate::control::Control;
use crate::tree::{self, DIRECTORY, Node, Tree, names};

/// How an entry of the workspace differs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Was not there before.
    Added,
    /// Has other contents or another mode.
    Modified,
    /// Is gone.
    Deleted,
    /// Is another kind of thing, such as a link instead of a file.
    TypeChanged,
}

/// One difference.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Change {
    /// Below the workspace.
    pub path: PathBuf,
    /// How it differs.
    pub kind: Kind,
    /// What the host has there.
    pub before: Option<Node>,
    /// What the cell left there, without what is stripped.
    pub after: Option<Node>,
    /// What the cell left there and nobody gets: set-id bits, extended attributes.
    pub stripped: Vec<String>,
    /// Changes of one number are names of one file.
    pub hard_link: Option<u64>,
    /// Another name of this file that was there before and is as it was.
    pub link_to: Option<PathBuf>,
    /// Whether it is a control file that the run was not allowed to touch.
    pub control: bool,
    /// Whether the host's own changed while the cell ran, so that nobody knows what the cell saw.
    pub moved: bool,
}

/// All differences, up to [`CHANGES_MAX`] entries and [`DEPTH_MAX`] levels.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Changes {
    /// Sorted by path.
    pub list: Vec<Change>,
    /// Whether there were more than are listed.
    pub truncated: bool,
}

/// How many differences are listed.
pub const CHANGES_MAX: usize = 100_000;
/// How deep is looked; two descriptors are open for each level.
pub const DEPTH_MAX: usize = 128;
/// And how many bytes their paths may have together: names are the guest's to choose.
pub const PATH_BYTES_MAX: usize = 16 << 20;
/// So many bytes of either layer are read; a file beyond that is listed as modified, without a digest.
pub const HASHED_BYTES_MAX: u64 = 4 << 30;

/// Which extended attributes the overlay keeps its marks in. A guest can write the other kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Marks {
    Trusted,
    User,
}

/// The layer that holds what a cell wrote, while it can still be read.
#[derive(Debug)]
pub struct Layer {
    tree: Tree,
}

impl Layer {
    /// Opens a file that the cell left.
    pub fn file(&self, path: &Path) -> io::Result<File> {
        self.tree.file(path)
    }
}

/// What the walk needs to know besides the layers.
pub(crate) struct Context<'a> {
    pub(crate) marks: Marks,
    pub(crate) control: &'a Control,
    /// When the run began, in seconds and nanoseconds: what changed later outside has moved.
    pub(crate) since: (i64, i64),
}

/// Lists what `upper` changes in the host's directory `lower`. If that was removed meanwhile, all that is in `upper` is
/// listed as new, and the list is known to be incomplete.
pub(crate) fn list(upper: BorrowedFd<'_>, lower: &Path, context: &Context<'_>) -> io::Result<(Changes, Layer)> {
    let upper = rustix::fs::openat(upper, ".", DIRECTORY, Mode::empty())?;
    let layer = Layer { tree: Tree::of(upper.try_clone()?) };
    let lower = match rustix::fs::open(lower, DIRECTORY, Mode::empty()) {
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => None,
        opened => Some(opened?),
    };
    let mut walk = Walk {
        context,
        changes: Changes { truncated: lower.is_none(), ..Changes::default() },
        budgets: [HASHED_BYTES_MAX; 2],
        unchanged_links: BTreeMap::new(),
        path_bytes: 0,
    };
    let mut levels = vec![Level::new(&mut walk, upper, lower, PathBuf::new(), false)?];
    while let Some(level) = levels.last_mut() {
        let Some(name) = level.names.pop() else {
            levels.pop();
            continue;
        };
        if let Some(below) = level.entry(&name, &mut walk)? {
            if levels.len() < DEPTH_MAX {
                levels.push(below);
            } else {
                walk.changes.truncated = true;
            }
        }
        if walk.is_full() {
            break;
        }
    }
    let mut changes = walk.changes;
    for change in &mut changes.list {
        change.link_to = change.hard_link.and_then(|number| walk.unchanged_links.get(&number).cloned());
    }
    changes.list.sort_unstable_by(|a, b| a.path.cmp(&b.path));
    Ok((changes, layer))
}

/// What the walk has found so far.
struct Walk<'a> {
    context: &'a Context<'a>,
    changes: Changes,
    /// Bytes that may still be read: of the host's files, and of the cell's.
    budgets: [u64; 2],
    /// Files that are as they were and have further names, by their number.
    unchanged_links: BTreeMap<u64, PathBuf>,
    path_bytes: usize,
}

impl Walk<'_> {
    fn is_full(&mut self) -> bool {
        let is_full = self.changes.list.len() > CHANGES_MAX || self.path_bytes > PATH_BYTES_MAX;
        if is_full {
            self.changes.list.truncate(CHANGES_MAX);
            self.changes.truncated = true;
        }
        is_full
    }

    fn push(&mut self, path: PathBuf, kind: Kind, before: Option<(Node, &Stat)>, after: Option<Found>) {
        self.path_bytes += path.as_os_str().len();
        let moved = before.as_ref().is_some_and(|(_, stat)| changed_at(stat) > self.context.since);
        let after = after.unwrap_or_default();
        let is_directory = after.node.as_ref().is_some_and(Node::is_directory);
        let control = self.context.control;
        let control = control.guards(&path) || !is_directory && control.leads_through(&path);
        let before = before.map(|(node, _)| node);
        let Found { node, stripped, hard_link } = after;
        let link_to = None;
        let change = Change { path, kind, before, after: node, stripped, hard_link, link_to, control, moved };
        self.changes.list.push(change);
    }

    fn before(&mut self, directory: &OwnedFd, name: &OsStr, stat: &Stat) -> io::Result<Node> {
        tree::node(directory.as_fd(), name, stat, &mut self.budgets[0])
    }

    /// The names in a directory; more than are ever listed is more than can be told.
    fn names(&mut self, directory: BorrowedFd<'_>) -> io::Result<Vec<OsString>> {
        let names = names(directory, CHANGES_MAX)?;
        self.changes.truncated |= names.len() > CHANGES_MAX;
        Ok(names)
    }

    /// Lists a thing of the host's that is gone, with all that was below it.
    fn gone(&mut self, directory: &OwnedFd, name: &OsStr, path: PathBuf, depth: usize) -> io::Result<()> {
        let Some(stat) = tree::stat(directory.as_fd(), name)? else { return Ok(()) };
        let node = self.before(directory, name, &stat)?;
        let is_directory = node.is_directory();
        self.push(path.clone(), Kind::Deleted, Some((node, &stat)), None);
        if is_directory { self.gone_below(directory, name, &path, depth + 1) } else { Ok(()) }
    }

    /// Lists all that the host has below a directory that is no directory any more.
    fn gone_below(&mut self, directory: &OwnedFd, name: &OsStr, path: &Path, depth: usize) -> io::Result<()> {
        let opened = tree::open_directory(directory.as_fd(), name);
        let (Ok(below), true) = (opened, depth < DEPTH_MAX) else {
            // One we may not read, one that another filesystem is mounted on, or too deep: what was in it cannot be told.
            self.changes.truncated = true;
            return Ok(());
        };
        for name in self.names(below.as_fd())? {
            self.gone(&below, &name, path.join(&name), depth)?;
            if self.is_full() {
                break;
            }
        }
        Ok(())
    }
}

/// When something last changed in any way, in seconds and nanoseconds. Nobody can set this back.
fn changed_at(stat: &Stat) -> (i64, i64) {
    (stat.st_ctime, i64::try_from(stat.st_ctime_nsec).unwrap_or(0))
}

/// What the cell left under a name.
#[derive(Default)]
struct Found {
    node: Option<Node>,
    stripped: Vec<String>,
    hard_link: Option<u64>,
}

/// One directory of the upper layer, and what the host has at the same place, if that still counts.
struct Level {
    upper: OwnedFd,
    lower: Option<OwnedFd>,
    path: PathBuf,
    /// Whether nothing of the host shows through here or below: the overlay marks only the topmost such directory.
    opaque: bool,
    names: Vec<OsString>,
}

impl Level {
    fn new(
        walk: &mut Walk<'_>,
        upper: OwnedFd,
        lower: Option<OwnedFd>,
        path: PathBuf,
        opaque: bool,
    ) -> io::Result<Level> {
        let names = walk.names(upper.as_fd())?;
        Ok(Level { upper, lower, path, opaque, names })
    }

    fn depth(&self) -> usize {
        self.path.components().count()
    }

    /// Looks at one entry; the directory below it, if it is one.
    fn entry(&self, name: &OsStr, walk: &mut Walk<'_>) -> io::Result<Option<Level>> {
        let path = self.path.join(name);
        let stat = rustix::fs::statat(&self.upper, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let lower = self.lower.as_ref();
        let before = match lower {
            Some(lower) => tree::stat(lower.as_fd(), name).ok().flatten(),
            None => None,
        };
        if is_whiteout(&stat) {
            // Of something that was never there, it is the trace of a file made and removed.
            if let (Some(lower), Some(_), false) = (lower, &before, self.opaque) {
                walk.gone(lower, name, path, self.depth())?;
            }
            return Ok(None);
        }
        let after = self.found(name, &stat, before.as_ref(), walk)?;
        let is_directory = after.node.as_ref().is_some_and(Node::is_directory);
        let mut existed = false;
        match (lower, &before, &after.node) {
            (Some(lower), Some(stat), Some(node)) => {
                let old = walk.before(lower, name, stat)?;
                existed = old.is_alike(node);
                let was_directory = old.is_directory();
                if !existed {
                    walk.push(path.clone(), Kind::TypeChanged, Some((old, stat)), Some(after));
                    if was_directory {
                        walk.gone_below(lower, name, &path, self.depth() + 1)?;
                    }
                } else if !node.is_same(&old) || !after.stripped.is_empty() {
                    walk.push(path.clone(), Kind::Modified, Some((old, stat)), Some(after));
                } else if let Some(number) = after.hard_link {
                    walk.unchanged_links.insert(number, path.clone());
                }
            }
            _ => walk.push(path.clone(), Kind::Added, None, Some(after)),
        }
        if !is_directory {
            return Ok(None);
        }
        let upper = open_own(&self.upper, name)?;
        let opaque = self.opaque || is_opaque(&upper, walk.context.marks);
        let below = lower.filter(|_| existed).and_then(|lower| {
            let opened = tree::open_directory(lower.as_fd(), name);
            // One of the host's that we may not read, or another mount: what is gone from it cannot be told.
            walk.changes.truncated |= opened.is_err();
            opened.ok()
        });
        if opaque && let Some(hidden) = &below {
            // It shows nothing the host has there: what was not made anew is gone.
            let made: HashSet<OsString> = walk
                .names(upper.as_fd())?
                .into_iter()
                .filter(|name| {
                    rustix::fs::statat(&upper, name, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|stat| !is_whiteout(&stat))
                })
                .collect();
            for name in walk.names(hidden.as_fd())?.into_iter().filter(|name| !made.contains(name)) {
                walk.gone(hidden, &name, path.join(&name), self.depth() + 1)?;
            }
        }
        Level::new(walk, upper, below, path, opaque).map(Some)
    }

    /// Describes what the cell left, without what nobody gets.
    fn found(&self, name: &OsStr, stat: &Stat, before: Option<&Stat>, walk: &mut Walk<'_>) -> io::Result<Found> {
        let lower = self.lower.as_ref();
        let mut stripped = Vec::new();
        let kind = FileType::from_raw_mode(stat.st_mode);
        if matches!(kind, FileType::RegularFile | FileType::Directory) {
            let own = tree::attributes(&readable(&self.upper, name, stat)?);
            // The host's own is opened only if it is of a kind that nobody waits at.
            let old = before.filter(|before| FileType::from_raw_mode(before.st_mode) == kind);
            let old = lower.filter(|_| old.is_some()).and_then(|lower| readable_as_it_is(lower, name));
            let hosts = old.map(|file| tree::attributes(&file)).unwrap_or_default();
            // What the host's file has was copied along with it.
            let new = own.iter().filter(|attribute| !is_overlays(&attribute.0) && !hosts.contains(attribute));
            let mut names: Vec<&[u8]> = new.map(|(name, _)| name.as_slice()).collect();
            // A power the host's file had: other contents do not get it.
            let has = |list: &[(Vec<u8>, Vec<u8>)]| list.iter().any(|(name, _)| name == CAPABILITY);
            if has(&hosts) && !has(&own) {
                names.push(CAPABILITY);
            }
            stripped.extend(names.iter().map(|name| format!("xattr {}", hotcell_base::text::shown(name))));
        }
        let mut node = tree::node(self.upper.as_fd(), name, stat, &mut walk.budgets[1])?;
        if let Node::File { mode, .. } = &mut node {
            for (bit, word) in [(0o4000, "setuid"), (0o2000, "setgid"), (0o1000, "sticky")] {
                if *mode & bit != 0 {
                    stripped.push(word.to_owned());
                    *mode &= !bit;
                }
            }
        }
        if let Node::Directory { mode } = &mut node {
            if *mode & 0o4000 != 0 {
                stripped.push("setuid".to_owned());
            }
            *mode &= 0o3777;
        }
        let hard_link = (kind == FileType::RegularFile && stat.st_nlink > 1).then_some(stat.st_ino);
        Ok(Found { node: Some(node), stripped, hard_link })
    }
}

/// Opens a directory the cell made.
fn open_own(layer: &OwnedFd, name: &OsStr) -> io::Result<OwnedFd> {
    let stat = rustix::fs::statat(layer, name, AtFlags::SYMLINK_NOFOLLOW)?;
    readable(layer, name, &stat)?;
    Ok(rustix::fs::openat(layer, name, DIRECTORY, Mode::empty())?)
}

/// Opens a file or directory the cell made. The cell's user is ours here: it may take its own read permission away,
/// and we give it back.
fn readable(layer: &OwnedFd, name: &OsStr, stat: &Stat) -> io::Result<File> {
    // A directory that can be listed and not entered tells no more than names.
    let can_enter = FileType::from_raw_mode(stat.st_mode) != FileType::Directory || stat.st_mode & 0o100 != 0;
    match readable_as_it_is(layer, name) {
        Some(file) if can_enter => Ok(file),
        _ => {
            let mode = Mode::from_raw_mode(stat.st_mode & 0o777 | 0o700);
            rustix::fs::chmodat(layer, name, mode, AtFlags::empty())?;
            readable_as_it_is(layer, name).ok_or_else(|| io::Error::other("it cannot be opened"))
        }
    }
}

fn readable_as_it_is(layer: &OwnedFd, name: &OsStr) -> Option<File> {
    use rustix::fs::OFlags;
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    rustix::fs::openat(layer, name, flags, Mode::empty()).ok().map(File::from)
}

/// The attribute that gives whoever executes a file a power.
const CAPABILITY: &[u8] = b"security.capability";

/// Whether an attribute is the overlay's own. A guest that sets one by such a name has it stripped all the same.
fn is_overlays(name: &[u8]) -> bool {
    name.starts_with(b"trusted.overlay.") || name.starts_with(b"user.overlay.")
}

/// The overlay's mark for "not there any more".
fn is_whiteout(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && stat.st_rdev == 0
}

/// Whether the overlay shows nothing of the host below this directory.
fn is_opaque(directory: &OwnedFd, marks: Marks) -> bool {
    let name = match marks {
        Marks::Trusted => "trusted.overlay.opaque",
        Marks::User => "user.overlay.opaque",
    };
    let mut value = [0u8; 8];
    matches!(rustix::fs::fgetxattr(directory, name, &mut value), Ok(1) if value[0] == b'y')
}
