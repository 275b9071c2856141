//! From one state of a tree to another: checked whole before anything is touched, each file replaced in one step, and
//! able to go back from wherever it was stopped.
//!
//! ```text
//! conflicts ─▶ stage new files beside the tree ─▶ sync ─▶ move aside ─▶ make and exchange ─▶ modes ─▶ sync
//!                                                        └── stopped here: `backward` leads to the first state ──┘
//! ```
//!
//! Applying a diff and undoing it are the same walk with the ends exchanged. Every path is reached through directories
//! that are opened one by one, never through a link and never onto another mount. Nothing is overwritten blindly: what
//! is replaced comes out by an exchange and is looked at, and if it is not what was checked, somebody saved a file
//! meanwhile: it goes back, and the walk stops. (A filesystem that cannot exchange, such as one on a network, has the
//! moment between the look and the rename.)

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use hotcell_base::text::{shown, shown_path};
use hotcell_cell::tree::{self, Node, Tree};
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, RenameFlags, Uid};

use crate::blobs::{copy_sparse, digest};

/// What a staging directory's name begins with.
pub(crate) const STAGING: &str = ".hotcell-";
/// What is moved aside is called by its number, after this.
const ASIDE: &str = "old-";
/// What is not complete yet, after this.
const DRAFT: &str = "new-";

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
    /// Extended attributes a directory gets when it is made.
    pub(crate) attributes: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Step {
    /// How large a file of this step is at most.
    fn bytes_max(&self) -> u64 {
        let size = |node: &Option<Node>| match node {
            Some(Node::File { size, .. }) => *size,
            _ => 0,
        };
        size(&self.from).max(size(&self.to))
    }

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

/// A walk that was stopped.
#[derive(Debug)]
pub(crate) struct Stopped {
    /// The steps that were begun, by number: all others are as they were.
    pub(crate) begun: BTreeSet<usize>,
    pub(crate) source: io::Error,
}

/// Everything that is not as the steps expect it.
pub(crate) fn conflicts(tree: &Tree, steps: &[Step]) -> io::Result<Vec<Conflict>> {
    let mut found = Vec::new();
    let by_path = ByPath::from_iter(steps.iter().map(|step| (step.path.as_path(), step)));
    for step in steps {
        let mut conflict = |path: PathBuf, why: String| found.push(Conflict { path, why });
        let now = match look(tree, step) {
            Err(error) if is_other_mount(&error) => {
                conflict(step.path.clone(), "is on another filesystem that is mounted there".to_owned());
                continue;
            }
            now => now?,
        };
        if matches!(step.from, Some(Node::File { sha256: None, .. })) {
            conflict(step.path.clone(), "was too large to be read, or could not be".to_owned());
            continue;
        }
        if !is_same(now.as_ref(), step.from.as_ref()) {
            let why = format!("is {}, and was {}", describe(now.as_ref()), describe(step.from.as_ref()));
            conflict(step.path.clone(), why);
            continue;
        }
        if lacks_directory(tree, &by_path, step)? {
            conflict(step.path.clone(), "has no directory to be in any more".to_owned());
        }
        for name in names_that_stay(tree, &by_path, step)? {
            let path = step.path.join(name);
            let why = match tree.node(&path, &mut 0)? {
                Some(Node::Special { .. }) => "is a pipe, socket or device, which stays, in a directory that is to go",
                _ => "is new in a directory that is to go",
            };
            conflict(path, why.to_owned());
        }
    }
    Ok(found)
}

/// What stands at a step's path, a directory only if it is of the same mount.
fn look(tree: &Tree, step: &Step) -> io::Result<Option<Node>> {
    let node = node(tree, step)?;
    if node.as_ref().is_some_and(Node::is_directory) {
        tree.directory(&step.path).map_err(about(step, "looking at"))?;
    }
    Ok(node)
}

/// What stands at a step's path. A file is read only if it can be one of the step's.
fn node(tree: &Tree, step: &Step) -> io::Result<Option<Node>> {
    tree.node(&step.path, &mut step.bytes_max()).map_err(about(step, "looking at"))
}

/// Whether a step's path is as it was before the step.
pub(crate) fn is_at_start(tree: &Tree, step: &Step) -> io::Result<bool> {
    Ok(is_same(node(tree, step)?.as_ref(), step.from.as_ref()))
}

fn is_other_mount(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::XDEV.raw_os_error())
}

/// The steps back to where these began, from wherever they were stopped; and what somebody else changed since, which
/// is left alone with all that depends on it.
pub(crate) fn backward(tree: &Tree, steps: &[Step]) -> io::Result<(Vec<Step>, Vec<Conflict>)> {
    let (mut back, mut foreign, mut closed) = (Vec::new(), Vec::new(), Vec::new());
    for step in steps {
        let now = node(tree, step)?;
        if is_same(now.as_ref(), step.from.as_ref()) {
            // As it was, and still in the way of what is in it.
            if matches!(now, Some(Node::Directory { mode }) if mode & 0o300 != 0o300) {
                closed.push(Step { from: now, to: step.from.clone(), link_to: None, ..step.clone() });
            }
            continue;
        }
        if is_halfway(step, now.as_ref()) || is_same(now.as_ref(), step.to.as_ref()) {
            back.push(Step { from: now, to: step.from.clone(), link_to: None, ..step.clone() });
        } else {
            let why = format!("is {}, which nobody of us made", describe(now.as_ref()));
            foreign.push(Conflict { path: step.path.clone(), why });
        }
    }
    loop {
        let impossible = find_impossible(tree, &back)?;
        if impossible.is_empty() {
            break;
        }
        let paths: BTreeSet<&Path> = impossible.iter().map(|conflict| conflict.path.as_path()).collect();
        back.retain(|step| !paths.contains(step.path.as_path()));
        foreign.extend(impossible);
    }
    if !back.is_empty() {
        back.extend(closed);
        back.sort_by(|a, b| a.path.cmp(&b.path));
    }
    Ok((back, foreign))
}

/// Between the two states in a way only a walk of ours leaves: cleared and not made yet, a directory whose mode was
/// still to be set, a file that is one of the two with the mode of the other.
fn is_halfway(step: &Step, now: Option<&Node>) -> bool {
    let is_directory = |node: &Option<Node>| node.as_ref().is_some_and(Node::is_directory);
    match now {
        None => step.clears() && step.to.is_some(),
        Some(Node::Directory { .. }) => is_directory(&step.from) || is_directory(&step.to),
        Some(Node::File { sha256: now, .. }) => {
            let has = |node: &Option<Node>| matches!(node, Some(Node::File { sha256, .. }) if sha256.is_some() && sha256 == now);
            has(&step.from) || has(&step.to)
        }
        Some(_) => false,
    }
}

/// Steps that cannot be taken because of something that stays: a directory with somebody's file in it cannot go, and
/// nothing can be put where there is no directory.
fn find_impossible(tree: &Tree, back: &[Step]) -> io::Result<Vec<Conflict>> {
    let by_path = ByPath::from_iter(back.iter().map(|step| (step.path.as_path(), step)));
    let mut impossible = Vec::new();
    for step in back {
        let stays = names_that_stay(tree, &by_path, step)?;
        let why = match stays.first() {
            Some(name) => format!("cannot go: {} is in it", shown(name.as_bytes())),
            None if lacks_directory(tree, &by_path, step)? => "has no directory to be in any more".to_owned(),
            None => continue,
        };
        impossible.push(Conflict { path: step.path.clone(), why });
    }
    Ok(impossible)
}

type ByPath<'s> = BTreeMap<&'s Path, &'s Step>;

/// Whether there is and will be no directory for what a step makes.
fn lacks_directory(tree: &Tree, by_path: &ByPath<'_>, step: &Step) -> io::Result<bool> {
    let parent = step.path.parent().unwrap_or(Path::new(""));
    if step.to.is_none() || parent.as_os_str().is_empty() {
        return Ok(false);
    }
    let becomes = match by_path.get(parent) {
        Some(above) => above.to.clone(),
        None => tree.node(parent, &mut 0)?,
    };
    Ok(!becomes.as_ref().is_some_and(Node::is_directory))
}

/// What is in a directory that is to go, and does not go with it.
fn names_that_stay(tree: &Tree, by_path: &ByPath<'_>, step: &Step) -> io::Result<Vec<OsString>> {
    if !step.clears() || !step.from.as_ref().is_some_and(Node::is_directory) {
        return Ok(Vec::new());
    }
    let goes = |name: &OsString| by_path.get(step.path.join(name).as_path()).is_some_and(|step| step.clears());
    Ok(tree.names(&step.path)?.into_iter().filter(|name| !goes(name)).collect())
}

pub(crate) fn is_same(a: Option<&Node>, b: Option<&Node>) -> bool {
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
            // One of another size was not read to find out that it differs.
            let digest = sha256.as_deref().map(|sha256| format!("{}, ", &sha256[..sha256.len().min(12)]));
            format!("a file of {size} bytes ({}mode {mode:o})", digest.unwrap_or_default())
        }
        Some(Node::Directory { mode }) => format!("a directory (mode {mode:o})"),
        Some(Node::Symlink { target }) => format!("a link to {}", shown(target.0.as_os_str().as_bytes())),
        Some(Node::Special { .. }) => "a pipe, socket or device".to_owned(),
    }
}

impl Transition<'_> {
    /// Goes from the first state to the second; what somebody wrote to meanwhile, and where it is kept. An error leaves
    /// the tree between the two, for [`backward`].
    pub(crate) fn perform(&self) -> Result<Vec<Conflict>, Stopped> {
        let mut begun = BTreeSet::new();
        match self.walk(&mut begun) {
            Ok(saved) => Ok(saved),
            Err(source) => Err(Stopped { begun, source }),
        }
    }

    fn walk(&self, begun: &mut BTreeSet<usize>) -> io::Result<Vec<Conflict>> {
        let staging = self.stage_all()?;
        rustix::fs::syncfs(self.tree.root())?;
        self.open_up(begun)?;
        self.clear(staging.as_fd(), begun)?;
        let made = self.make(staging.as_fd(), begun)?;
        self.set_modes(&made, begun)?;
        drop(staging);
        let saved = settle(self.tree, self.steps, self.tag)?;
        rustix::fs::syncfs(self.tree.root())?;
        Ok(saved)
    }

    fn staging_name(&self) -> String {
        format!("{STAGING}{}", self.tag)
    }

    /// Makes every new file, complete, in a directory beside them.
    fn stage_all(&self) -> io::Result<std::os::fd::OwnedFd> {
        let name = self.staging_name();
        rustix::fs::mkdirat(self.tree.root(), &name, Mode::from_raw_mode(0o700))?;
        let staging = self.tree.directory(Path::new(&name))?;
        // What the tree gives to new files of its own, it does not give to those that only pass through here.
        for attribute in ["system.posix_acl_default", "system.posix_acl_access"] {
            let _none_to_begin_with = rustix::fs::fremovexattr(&staging, attribute);
        }
        let mut linked: BTreeMap<u64, usize> = BTreeMap::new();
        for step in self.steps.iter().filter(|step| step.replaces()) {
            match step.hard_link.and_then(|number| linked.get(&number)) {
                Some(first) => {
                    let (from, to) = (first.to_string(), step.number.to_string());
                    rustix::fs::linkat(&staging, &from, &staging, &to, AtFlags::empty())?;
                }
                None => {
                    self.stage(staging.as_fd(), step).map_err(about(step, "staging"))?;
                    linked.extend(step.hard_link.map(|number| (number, step.number)));
                }
            }
        }
        Ok(staging)
    }

    /// Makes the new file or link of a step under its number.
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
                    && self.tree.node(other, &mut step.bytes_max())?.as_ref() == step.to.as_ref()
                {
                    let (directory, name) = self.tree.place(other)?;
                    return Ok(rustix::fs::linkat(&directory, name, staging, &number, AtFlags::empty())?);
                }
                let (file, attributes) = match (self.contents)(step)? {
                    Contents::Same(path) => {
                        return Ok(rustix::fs::linkat(CWD, &path, staging, &number, AtFlags::empty())?);
                    }
                    Contents::New(file) => {
                        // New contents under an old name: they keep what says who may use it, and nothing that
                        // gives them a power.
                        let kept = self.tree.file(&step.path).map(|old| tree::attributes(&old)).unwrap_or_default();
                        (file, kept.into_iter().filter(|(name, _)| is_harmless(name)).collect())
                    }
                    Contents::Copy(file) => {
                        let attributes: Vec<_> = tree::attributes(&file);
                        (file, attributes)
                    }
                };
                let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
                let draft = format!("{DRAFT}{number}");
                let to = File::from(rustix::fs::openat(staging, &draft, flags, Mode::from_raw_mode(0o600))?);
                copy_sparse(&file, &to)?;
                if Some(digest(&to)?) != *sha256 {
                    return Err(io::Error::other("kept contents are not what their digest says"));
                }
                own(staging, draft.as_bytes(), owner)?;
                let stat = rustix::fs::fstat(&to)?;
                if mode & 0o6000 != 0 && owner.is_some_and(|owner| owner != (stat.st_uid, stat.st_gid)) {
                    return Err(io::Error::other("its set-id bit is for its owner, who we are not"));
                }
                set_attributes(&to, &attributes);
                rustix::fs::fchmod(&to, Mode::from_raw_mode(*mode))?;
                // Complete, it gets its number: whatever is found under a number is somebody's whole file.
                Ok(rustix::fs::renameat(staging, &draft, staging, &number)?)
            }
            _ => Ok(()),
        }
    }

    /// Lets us work in directories whose owner took that right from themselves. Their modes are set at the end.
    fn open_up(&self, begun: &mut BTreeSet<usize>) -> io::Result<()> {
        if rustix::process::geteuid().is_root() {
            return Ok(());
        }
        for step in self.steps {
            if let Some(Node::Directory { mode }) = step.from
                && mode & 0o700 != 0o700
            {
                begun.insert(step.number);
                let (directory, name) = self.tree.place(&step.path)?;
                set_mode(directory.as_fd(), name, FileType::Directory, mode | 0o700)?;
            }
        }
        Ok(())
    }

    /// Moves what must go out of the way, deepest first.
    fn clear(&self, staging: BorrowedFd<'_>, begun: &mut BTreeSet<usize>) -> io::Result<()> {
        for step in self.steps.iter().rev().filter(|step| step.clears()) {
            let (directory, name) = self.tree.place(&step.path).map_err(about(step, "finding"))?;
            if step.from.as_ref().is_some_and(Node::is_directory) {
                begun.insert(step.number);
                rustix::fs::unlinkat(directory, name, AtFlags::REMOVEDIR).map_err(about(step, "removing"))?;
                continue;
            }
            let aside = format!("{ASIDE}{}", step.number);
            let moved = rustix::fs::renameat(&directory, name, staging, &aside);
            moved.map_err(about(step, "moving aside"))?;
            begun.insert(step.number);
            if !is_same(at(staging, &aside, step)?.as_ref(), step.from.as_ref()) {
                // Somebody's newest version: back to its place, or beside what is there by now.
                let kept = rescue(self.tree, staging, &aside, &step.path)?;
                begun.remove(&step.number);
                return Err(if kept == step.path {
                    saved_meanwhile(&step.path)
                } else {
                    let (path, kept) = (shown_path(&step.path), shown_path(&kept));
                    io::Error::other(format!(
                        "`{path}` was changed by somebody else meanwhile; that is kept as `{kept}`"
                    ))
                });
            }
        }
        Ok(())
    }

    /// Makes directories and puts files in their places; the directories that are new.
    fn make(&self, staging: BorrowedFd<'_>, begun: &mut BTreeSet<usize>) -> io::Result<BTreeSet<&Path>> {
        let mut made = BTreeSet::new();
        for step in self.steps.iter().filter(|step| step.to.is_some()) {
            let (directory, name) = self.tree.place(&step.path).map_err(about(step, "finding"))?;
            match &step.to {
                Some(Node::Directory { .. }) if !step.from.as_ref().is_some_and(Node::is_directory) => {
                    let made_it = rustix::fs::mkdirat(&directory, name, Mode::from_raw_mode(0o700));
                    made_it.map_err(about(step, "making"))?;
                    begun.insert(step.number);
                    made.insert(step.path.as_path());
                    own(directory.as_fd(), name.as_bytes(), step.owner.or_else(|| owner_of(directory.as_fd())))?;
                    set_attributes(&File::from(self.tree.directory(&step.path)?), &step.attributes);
                }
                Some(Node::File { mode, .. }) if !step.replaces() => {
                    if !is_at_start(self.tree, step)? {
                        return Err(saved_meanwhile(&step.path));
                    }
                    begun.insert(step.number);
                    let set = set_mode(directory.as_fd(), name, FileType::RegularFile, *mode);
                    set.map_err(about(step, "setting the mode of"))?;
                }
                Some(_) if step.replaces() => self.place(staging, step, directory.as_fd(), name, begun)?,
                _ => {}
            }
        }
        Ok(made)
    }

    /// Puts a staged file in its place, and nobody else's work out of it.
    fn place(
        &self,
        staging: BorrowedFd<'_>,
        step: &Step,
        directory: BorrowedFd<'_>,
        name: &OsStr,
        begun: &mut BTreeSet<usize>,
    ) -> io::Result<()> {
        let staged = step.number.to_string();
        let is_empty = step.from.is_none() || step.clears();
        let flags = if is_empty { RenameFlags::NOREPLACE } else { RenameFlags::EXCHANGE };
        match rustix::fs::renameat_with(staging, &staged, directory, name, flags) {
            Ok(()) => {}
            // A filesystem that has neither: a link takes nobody's place, and for the rest, look and rename at once.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) if is_empty => {
                match rustix::fs::linkat(staging, &staged, directory, name, AtFlags::empty()) {
                    Err(rustix::io::Errno::EXIST) => return Err(saved_meanwhile(&step.path)),
                    linked => linked?,
                }
                begun.insert(step.number);
                return Ok(rustix::fs::unlinkat(staging, &staged, AtFlags::empty())?);
            }
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
                if !is_at_start(self.tree, step)? {
                    return Err(saved_meanwhile(&step.path));
                }
                rustix::fs::renameat(staging, &staged, directory, name)?;
                begun.insert(step.number);
                return Ok(());
            }
            Err(rustix::io::Errno::EXIST | rustix::io::Errno::NOENT) => return Err(saved_meanwhile(&step.path)),
            Err(errno) => return Err(errno.into()),
        }
        begun.insert(step.number);
        if !is_empty && !is_same(at(staging, &staged, step)?.as_ref(), step.from.as_ref()) {
            rustix::fs::renameat_with(staging, &staged, directory, name, RenameFlags::EXCHANGE)?;
            begun.remove(&step.number);
            return Err(saved_meanwhile(&step.path));
        }
        Ok(())
    }

    fn set_modes(&self, made: &BTreeSet<&Path>, begun: &mut BTreeSet<usize>) -> io::Result<()> {
        for step in self.steps.iter().rev() {
            if let Some(Node::Directory { mode }) = step.to {
                begun.insert(step.number);
                let directory = self.tree.directory(&step.path).map_err(about(step, "finding"))?;
                // A new one has its set-group bit from the directory above it; one that was there has its own.
                let is_new = made.contains(step.path.as_path()) && step.owner.is_none();
                let inherited = if is_new { rustix::fs::fstat(&directory)?.st_mode & 0o2000 } else { 0 };
                rustix::fs::fchmod(&directory, Mode::from_raw_mode(mode | inherited))?;
            }
        }
        Ok(())
    }
}

/// Clears away the staging directory of a walk. What is in it is a state of one of the steps, and is in the tree or kept
/// elsewhere; anything else is a file that somebody saved or wrote to in the very moment it was replaced. It is never
/// removed: it goes back to its place, or beside it under another name.
pub(crate) fn settle(tree: &Tree, steps: &[Step], tag: &str) -> io::Result<Vec<Conflict>> {
    let name = format!("{STAGING}{tag}");
    let staging = match tree.directory(Path::new(&name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        opened => opened?,
    };
    let by_number: BTreeMap<usize, &Step> = steps.iter().map(|step| (step.number, step)).collect();
    let mut saved = Vec::new();
    for entry in tree.names(Path::new(&name))? {
        let text = entry.to_string_lossy();
        let number = text.strip_prefix(ASIDE).unwrap_or(&text).parse::<usize>().ok();
        let is_state = |step: &Step| {
            let found = at(staging.as_fd(), &text, step)?;
            // Nothing of ours in here is a directory.
            let is_ours = !found.as_ref().is_some_and(Node::is_directory);
            Ok::<bool, io::Error>(
                is_ours && (is_same(found.as_ref(), step.from.as_ref()) || is_same(found.as_ref(), step.to.as_ref())),
            )
        };
        match number.and_then(|number| by_number.get(&number)) {
            Some(step) if !is_state(step)? => {
                let kept = shown_path(&rescue(tree, staging.as_fd(), &text, &step.path)?);
                let why = format!("was written to meanwhile, and is kept as `{kept}`");
                saved.push(Conflict { path: step.path.clone(), why });
            }
            None if !text.starts_with(DRAFT) => {
                let why = "is not of ours, and was left there".to_owned();
                saved.push(Conflict { path: Path::new(&name).join(&entry), why });
            }
            _ => rustix::fs::unlinkat(&staging, &entry, AtFlags::empty())?,
        }
    }
    match rustix::fs::unlinkat(tree.root(), &name, AtFlags::REMOVEDIR) {
        // Something was left there, and said.
        Err(rustix::io::Errno::NOTEMPTY) => Ok(saved),
        removed => removed.map(|()| saved).map_err(io::Error::from),
    }
}

/// Moves what somebody saved from a directory into the tree: to its place if nothing is there, else beside it. Where it
/// is now.
fn rescue(tree: &Tree, from: BorrowedFd<'_>, name: &str, path: &Path) -> io::Result<PathBuf> {
    at_first_free(tree, names_for(path), |directory, place| {
        match rustix::fs::renameat_with(from, name, directory, place, RenameFlags::NOREPLACE) {
            // A filesystem that would replace; a link does not.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {
                rustix::fs::linkat(from, name, directory, place, AtFlags::empty())?;
                rustix::fs::unlinkat(from, name, AtFlags::empty())
            }
            renamed => renamed,
        }
    })
}

/// Puts something under the first of these names that is free.
pub(crate) fn at_first_free(
    tree: &Tree,
    candidates: impl Iterator<Item = PathBuf>,
    put: impl Fn(BorrowedFd<'_>, &OsStr) -> rustix::io::Result<()>,
) -> io::Result<PathBuf> {
    for candidate in candidates {
        // Its directory may be gone, too: then one at the top will do.
        let Ok((directory, place)) = tree.place(&candidate) else { continue };
        match put(directory.as_fd(), place) {
            Ok(()) => return Ok(candidate),
            Err(rustix::io::Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Err(io::Error::other("there is no place for what somebody saved"))
}

/// A path, names beside it, and names at the top of the tree.
pub(crate) fn names_for(path: &Path) -> impl Iterator<Item = PathBuf> {
    const NAME_BYTES_MAX: usize = 255;
    let name = path.file_name().unwrap_or_default().as_bytes().to_owned();
    let numbered = move |number: u32| {
        let end = format!(".hotcell-saved-{number}");
        let kept = name.len().min(NAME_BYTES_MAX - end.len());
        OsString::from_vec([&name[..kept], end.as_bytes()].concat())
    };
    let parent = path.parent().unwrap_or(Path::new("")).to_owned();
    let (beside, top) = (numbered.clone(), numbered);
    [path.to_owned()]
        .into_iter()
        .chain((1..1000).map(move |number| parent.join(beside(number))))
        .chain((1..1000).map(move |number| PathBuf::from(top(number))))
}

/// Says what failed.
fn about<E: Into<io::Error>>(step: &Step, what: &'static str) -> impl FnOnce(E) -> io::Error {
    let path = shown_path(&step.path);
    move |error| {
        let error = error.into();
        io::Error::new(error.kind(), format!("{what} `{path}` failed: {error}"))
    }
}

fn saved_meanwhile(path: &Path) -> io::Error {
    io::Error::other(format!("`{}` was changed by somebody else meanwhile", shown_path(path)))
}

/// What stands under a name of a directory that is open. A file is read only if it can be one of the step's.
fn at(directory: BorrowedFd<'_>, name: &str, step: &Step) -> io::Result<Option<Node>> {
    Tree::of_directory(directory)?.node(Path::new(name), &mut step.bytes_max())
}

/// Sets the mode of a thing of this kind, and of nothing a link leads to.
fn set_mode(directory: BorrowedFd<'_>, name: &OsStr, kind: FileType, mode: u32) -> io::Result<()> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(directory, name, flags, Mode::empty())?;
    if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != kind {
        return Err(io::Error::other("it is another kind of thing meanwhile"));
    }
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(rustix::fs::chmod(path, Mode::from_raw_mode(mode))?)
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

/// Attributes that say who may use a file, not what it may do.
fn is_harmless(name: &[u8]) -> bool {
    name.starts_with(b"user.") || name.starts_with(b"system.posix_acl_") || name == b"security.selinux"
}

/// Sets extended attributes, as far as we may.
pub(crate) fn set_attributes(to: &File, attributes: &[(Vec<u8>, Vec<u8>)]) {
    for (name, value) in attributes {
        // A label only the machine may give, or a filesystem without attributes.
        let _as_far_as_we_may = rustix::fs::fsetxattr(to, &name[..], value, rustix::fs::XattrFlags::empty());
    }
}
