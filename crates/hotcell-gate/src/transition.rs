//! From one state of a tree to another: checked whole before anything is touched, each file replaced in one step, and
//! able to go back from wherever it was stopped.
//!
//! ```text
//! conflicts ─▶ stage new files beside the tree ─▶ sync ─▶ remove ─▶ make and rename ─▶ modes ─▶ sync
//!                                                        └── stopped here: `backward` leads to the first state ──┘
//! ```
//!
//! Applying a diff and undoing it are the same walk with the ends exchanged. Every path is reached through
//! directories that are opened one by one, so no link in the tree leads a change elsewhere.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use hotcell_base::text::shown;
use hotcell_cell::tree::{self, Node, Tree};
use rustix::fs::{AtFlags, CWD, Gid, Mode, OFlags, Uid};
use std::os::unix::ffi::OsStrExt;

use crate::blobs::{copy_sparse, digest};

/// What a staging directory's name begins with.
pub(crate) const STAGING: &str = ".hotcell-";

/// One path on its way.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    /// Its number in the pack.
    pub(crate) number: usize,
    pub(crate) path: PathBuf,
    pub(crate) from: Option<Node>,
    pub(crate) to: Option<Node>,
    /// Steps of one number become names of one file.
    pub(crate) hard_link: Option<u64>,
    /// Another name of the file it becomes, which is there and stays.
    pub(crate) link_to: Option<PathBuf>,
    /// Whether a file is made anew even if only its mode changes: it has further names, or gets them.
    pub(crate) replace: bool,
    /// Whose it becomes; else its directory's owner.
    pub(crate) owner: Option<(u32, u32)>,
}

impl Step {
    /// Whether what is there must go before anything can take its place.
    fn clears(&self) -> bool {
        match (&self.from, &self.to) {
            (Some(from), Some(to)) => from.is_directory() != to.is_directory(),
            (Some(_), None) => true,
            (None, _) => false,
        }
    }

    /// Whether a new file or link must be made, rather than a mode changed.
    pub(crate) fn replaces(&self) -> bool {
        match (&self.from, &self.to) {
            (Some(Node::File { sha256: a, .. }), Some(Node::File { sha256: b, .. })) => self.replace || a != b,
            (from, Some(Node::File { .. } | Node::Symlink { .. })) => *from != self.to,
            _ => false,
        }
    }
}

/// Where new contents come from.
pub(crate) enum Contents {
    /// Contents alone.
    New(File),
    /// A copy of a file that was in the tree, with its owner and attributes.
    Copy(File),
    /// The very file that was in the tree, by another name.
    Same(PathBuf),
}

/// A path that is not as it must be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Conflict {
    /// Which.
    pub path: PathBuf,
    /// What is wrong.
    pub why: String,
}

/// A walk from one state to another.
pub(crate) struct Transition<'a> {
    pub(crate) tree: &'a Tree,
    /// Sorted by path.
    pub(crate) steps: &'a [Step],
    /// Names the staging directory.
    pub(crate) tag: &'a str,
    pub(crate) contents: &'a dyn Fn(&Step) -> io::Result<Contents>,
}

/// Everything that is not as the steps expect it.
pub(crate) fn conflicts(tree: &Tree, steps: &[Step]) -> io::Result<Vec<Conflict>> {
    let mut found = Vec::new();
    let by_path: BTreeMap<&Path, &Step> = steps.iter().map(|step| (step.path.as_path(), step)).collect();
    for step in steps {
        let now = tree.node(&step.path, &mut u64::MAX.clone())?;
        if !is_same(now.as_ref(), step.from.as_ref()) {
            let why = format!("is {}, and was {}", describe(now.as_ref()), describe(step.from.as_ref()));
            found.push(Conflict { path: step.path.clone(), why });
            continue;
        }
        let parent = step.path.parent().unwrap_or(Path::new(""));
        if step.to.is_some() && !parent.as_os_str().is_empty() {
            let becomes = match by_path.get(parent) {
                Some(above) => above.to.clone(),
                None => tree.node(parent, &mut 0)?,
            };
            if !becomes.as_ref().is_some_and(Node::is_directory) {
                let why = "has no directory to be in any more".to_owned();
                found.push(Conflict { path: step.path.clone(), why });
            }
        }
        if step.clears() && step.from.as_ref().is_some_and(Node::is_directory) {
            let goes = |name: &OsString| by_path.get(step.path.join(name).as_path()).is_some_and(|step| step.clears());
            for name in tree.names(&step.path)?.iter().filter(|name| !goes(name)) {
                let why = "is new in a directory that is to go".to_owned();
                found.push(Conflict { path: step.path.join(name), why });
            }
        }
    }
    Ok(found)
}

/// The steps back to where these began, from wherever they were stopped; and what somebody else changed since.
pub(crate) fn backward(tree: &Tree, steps: &[Step]) -> io::Result<(Vec<Step>, Vec<Conflict>)> {
    let (mut back, mut foreign) = (Vec::new(), Vec::new());
    for step in steps {
        let now = tree.node(&step.path, &mut u64::MAX.clone())?;
        if is_same(now.as_ref(), step.from.as_ref()) {
            continue;
        }
        let is_directory = |node: &Option<Node>| node.as_ref().is_some_and(Node::is_directory);
        // Between the two: cleared and not made yet, or a directory whose mode was still to be set.
        let halfway = match &now {
            None => step.clears() && step.to.is_some(),
            Some(Node::Directory { .. }) => is_directory(&step.from) || is_directory(&step.to),
            Some(Node::File { sha256: now, .. }) => {
                // Renamed into place, or its mode changed.
                let is = |node: &Option<Node>| matches!(node, Some(Node::File { sha256, .. }) if sha256.is_some() && sha256 == now);
                is(&step.from) || is(&step.to)
            }
            Some(_) => false,
        };
        if halfway || is_same(now.as_ref(), step.to.as_ref()) {
            back.push(Step { from: now, to: step.from.clone(), hard_link: None, link_to: None, ..step.clone() });
        } else {
            let why = format!("is {}, which nobody of us made", describe(now.as_ref()));
            foreign.push(Conflict { path: step.path.clone(), why });
        }
    }
    Ok((back, foreign))
}

fn is_same(a: Option<&Node>, b: Option<&Node>) -> bool {
    match (a, b) {
        (None, None) => true,
        (Some(a), Some(b)) => a.is_same(b),
        _ => false,
    }
}

fn describe(node: Option<&Node>) -> String {
    match node {
        None => "absent".to_owned(),
        Some(Node::File { mode, size, sha256 }) => {
            let digest = sha256.as_deref().map_or("unread", |sha256| &sha256[..sha256.len().min(12)]);
            format!("a file of {size} bytes ({digest}, mode {mode:o})")
        }
        Some(Node::Directory { mode }) => format!("a directory (mode {mode:o})"),
        Some(Node::Symlink { target }) => format!("a link to {}", shown(target.0.as_os_str().as_bytes())),
        Some(Node::Special { .. }) => "a pipe, socket or device".to_owned(),
    }
}

impl Transition<'_> {
    /// Goes from the first state to the second. An error leaves the tree between them, for [`backward`].
    pub(crate) fn perform(&self) -> io::Result<()> {
        self.clear_staging()?;
        let name = format!("{STAGING}{}", self.tag);
        rustix::fs::mkdirat(self.tree.root(), &name, Mode::from_raw_mode(0o700))?;
        let staging = self.tree.directory(Path::new(&name))?;
        let mut linked: BTreeMap<u64, usize> = BTreeMap::new();
        for step in self.steps.iter().filter(|step| step.replaces()) {
            match step.hard_link.and_then(|number| linked.get(&number)) {
                Some(first) => {
                    let (from, to) = (first.to_string(), step.number.to_string());
                    rustix::fs::linkat(&staging, &from, &staging, &to, AtFlags::empty())?;
                }
                None => {
                    self.stage(staging.as_fd(), step)?;
                    linked.extend(step.hard_link.map(|number| (number, step.number)));
                }
            }
        }
        rustix::fs::syncfs(self.tree.root())?;
        self.open_up()?;
        for step in self.steps.iter().rev().filter(|step| step.clears()) {
            let (directory, name) = self.tree.place(&step.path)?;
            let is_directory = step.from.as_ref().is_some_and(Node::is_directory);
            let flags = if is_directory { AtFlags::REMOVEDIR } else { AtFlags::empty() };
            rustix::fs::unlinkat(directory, name, flags)?;
        }
        let mut made = BTreeSet::new();
        for step in self.steps {
            let (directory, name) = match &step.to {
                Some(_) => self.tree.place(&step.path)?,
                None => continue,
            };
            match &step.to {
                Some(Node::Directory { .. }) if !step.from.as_ref().is_some_and(Node::is_directory) => {
                    rustix::fs::mkdirat(&directory, name, Mode::from_raw_mode(0o700))?;
                    own(directory.as_fd(), name.as_bytes(), step.owner.or_else(|| owner_of(directory.as_fd())))?;
                    made.insert(step.path.as_path());
                }
                Some(Node::File { mode, .. }) if !step.replaces() => {
                    rustix::fs::chmodat(&directory, name, Mode::from_raw_mode(*mode), AtFlags::empty())?;
                }
                Some(_) if step.replaces() => {
                    rustix::fs::renameat(&staging, step.number.to_string(), &directory, name)?;
                }
                _ => {}
            }
        }
        for step in self.steps.iter().rev() {
            if let Some(Node::Directory { mode }) = step.to {
                let directory = self.tree.directory(&step.path)?;
                // A new one has its set-group bit from the directory above it.
                let inherited = if made.contains(step.path.as_path()) {
                    rustix::fs::fstat(&directory)?.st_mode & 0o2000
                } else {
                    0
                };
                rustix::fs::fchmod(&directory, Mode::from_raw_mode(mode | inherited))?;
            }
        }
        self.clear_staging()?;
        Ok(rustix::fs::syncfs(self.tree.root())?)
    }

    /// Removes what an earlier walk of this tag left.
    pub(crate) fn clear_staging(&self) -> io::Result<()> {
        let name = format!("{STAGING}{}", self.tag);
        let path = Path::new(&name);
        let staging = match self.tree.directory(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            opened => opened?,
        };
        for name in self.tree.names(path)? {
            rustix::fs::unlinkat(&staging, &name, AtFlags::empty())?;
        }
        Ok(rustix::fs::unlinkat(self.tree.root(), path, AtFlags::REMOVEDIR)?)
    }

    /// Makes the new file or link of a step, complete, under its number.
    fn stage(&self, staging: BorrowedFd<'_>, step: &Step) -> io::Result<()> {
        let number = step.number.to_string();
        // The nearest directory that is there now: whoever owns that owns what is made.
        let above = step.path.ancestors().skip(1).find_map(|above| self.tree.directory(above).ok());
        let owner = step.owner.or_else(|| owner_of(above.as_ref()?.as_fd()));
        match &step.to {
            Some(Node::Symlink { target }) => {
                rustix::fs::symlinkat(&target.0, staging, &number)?;
                own(staging, number.as_bytes(), owner)
            }
            Some(Node::File { mode, sha256, .. }) => {
                if let Some(other) = &step.link_to
                    && self
                        .tree
                        .node(other, &mut u64::MAX.clone())?
                        .is_some_and(|other| Some(&other) == step.to.as_ref())
                {
                    let (directory, name) = self.tree.place(other)?;
                    return Ok(rustix::fs::linkat(&directory, name, staging, &number, AtFlags::empty())?);
                }
                let (file, attributes) = match (self.contents)(step)? {
                    Contents::Same(path) => {
                        rustix::fs::linkat(CWD, &path, staging, &number, AtFlags::empty())?;
                        return Ok(());
                    }
                    Contents::New(file) => (file, self.tree.file(&step.path).ok()),
                    Contents::Copy(file) => {
                        let attributes = file.try_clone()?;
                        (file, Some(attributes))
                    }
                };
                let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let to = File::from(rustix::fs::openat(staging, &number, flags, Mode::from_raw_mode(0o600))?);
                copy_sparse(&file, &to)?;
                if Some(digest(&to)?) != *sha256 {
                    return Err(io::Error::other("kept contents are not what their digest says"));
                }
                own(staging, number.as_bytes(), owner)?;
                if let Some(attributes) = attributes {
                    copy_attributes(&attributes, &to);
                }
                Ok(rustix::fs::fchmod(&to, Mode::from_raw_mode(*mode))?)
            }
            _ => Ok(()),
        }
    }

    /// Lets us work in directories whose owner took that right from themselves. Their modes are set at the end.
    fn open_up(&self) -> io::Result<()> {
        if rustix::process::geteuid().is_root() {
            return Ok(());
        }
        for step in self.steps {
            if let Some(Node::Directory { mode }) = step.from
                && mode & 0o700 != 0o700
            {
                let (directory, name) = self.tree.place(&step.path)?;
                rustix::fs::chmodat(&directory, name, Mode::from_raw_mode(mode | 0o700), AtFlags::empty())?;
            }
        }
        Ok(())
    }
}

fn owner_of(directory: BorrowedFd<'_>) -> Option<(u32, u32)> {
    rustix::fs::fstat(directory).ok().map(|stat| (stat.st_uid, stat.st_gid))
}

/// Gives a thing to its owner. Who is not root owns what it makes, and may at most choose a group it is in.
fn own(directory: BorrowedFd<'_>, name: &[u8], owner: Option<(u32, u32)>) -> io::Result<()> {
    let Some((uid, gid)) = owner else { return Ok(()) };
    let is_root = rustix::process::geteuid().is_root();
    let uid = is_root.then(|| Uid::from_raw(uid));
    match rustix::fs::chownat(directory, name, uid, Some(Gid::from_raw(gid)), AtFlags::SYMLINK_NOFOLLOW) {
        Err(rustix::io::Errno::PERM) if !is_root => Ok(()),
        owned => Ok(owned?),
    }
}

/// Copies extended attributes, as far as we may read and set them.
pub(crate) fn copy_attributes(from: &File, to: &File) {
    for (name, value) in tree::attributes(from) {
        // A label only the machine may give, or a filesystem without attributes.
        let _as_far_as_we_may = rustix::fs::fsetxattr(to, &name[..], &value, rustix::fs::XattrFlags::empty());
    }
}

/// Keeps a file of the tree for later: by another name where that can be, and as a copy where that cannot be or would
/// not do. Whether the file itself is kept.
pub(crate) fn save(tree: &Tree, path: &Path, to: &Path) -> io::Result<bool> {
    let file = tree.file(path)?;
    let (directory, name): (OwnedFd, _) = tree.place(path)?;
    // A file with other names can be changed through them: then only a copy keeps what it is now.
    let is_alone = rustix::fs::fstat(&file)?.st_nlink == 1;
    let is_same = rustix::fs::linkat(&directory, name, CWD, to, AtFlags::empty()).is_ok();
    if !(is_same && is_alone) {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let copy = File::from(rustix::fs::open(copy_of(to), flags, Mode::from_raw_mode(0o600))?);
        copy_sparse(&file, &copy)?;
        copy_attributes(&file, &copy);
    }
    Ok(is_same)
}

/// Where the copy of a kept file is.
pub(crate) fn copy_of(kept: &Path) -> PathBuf {
    kept.with_extension("copy")
}

/// Whether the file at a path has further names.
pub(crate) fn has_other_names(tree: &Tree, path: &Path) -> bool {
    tree.file(path).and_then(|file| Ok(rustix::fs::fstat(&file)?.st_nlink)).is_ok_and(|n| n > 1)
}
