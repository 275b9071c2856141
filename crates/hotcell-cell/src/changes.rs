//! What a copy-on-write workspace would change, read from the upper layer of its overlay.
//!
//! Both layers are walked by descriptor, side by side: no link of either is followed, no FIFO or device is
//! opened, and the walk ends at a fixed depth and number of entries however many there are.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use serde::Serialize;

/// How an entry of the workspace differs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
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
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Change {
    /// Below the workspace.
    pub path: PathBuf,
    /// How it differs.
    pub kind: Kind,
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
/// So many bytes are compared in all; a file beyond that counts as modified once it was opened for writing.
const COMPARED_BYTES_MAX: u64 = 128 << 20;

/// Which extended attributes the overlay keeps its marks in. A guest can write the other kind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Marks {
    Trusted,
    User,
}

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK).union(OFlags::CLOEXEC);

/// Lists what `upper` changes in the host's directory `lower`.
pub(crate) fn list(upper: BorrowedFd<'_>, lower: &Path, marks: Marks) -> io::Result<Changes> {
    let mut changes = Changes::default();
    let upper = rustix::fs::openat(upper, ".", DIRECTORY, Mode::empty())?;
    let lower = rustix::fs::open(lower, DIRECTORY, Mode::empty())?;
    let mut levels = vec![Level::new(upper, Some(lower), PathBuf::new(), false)?];
    let mut budget = COMPARED_BYTES_MAX;
    while let Some(level) = levels.last_mut() {
        let Some(name) = level.names.pop() else {
            levels.pop();
            continue;
        };
        let below = level.entry(&name, marks, &mut changes, &mut budget)?;
        if let Some(below) = below {
            if levels.len() < DEPTH_MAX {
                levels.push(below);
            } else {
                changes.truncated = true;
            }
        }
        if changes.list.len() > CHANGES_MAX {
            changes.list.truncate(CHANGES_MAX);
            changes.truncated = true;
            break;
        }
    }
    changes.list.sort_unstable();
    Ok(changes)
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
    fn new(upper: OwnedFd, lower: Option<OwnedFd>, path: PathBuf, opaque: bool) -> io::Result<Level> {
        let names = names(upper.as_fd())?;
        Ok(Level { upper, lower, path, opaque, names })
    }

    /// Looks at one entry; the directory below it, if it is one.
    fn entry(&self, name: &OsStr, marks: Marks, changes: &mut Changes, budget: &mut u64) -> io::Result<Option<Level>> {
        let path = self.path.join(name);
        let stat = rustix::fs::statat(&self.upper, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        let lower = self.lower.as_ref();
        let before = lower.and_then(|lower| rustix::fs::statat(lower, name, AtFlags::SYMLINK_NOFOLLOW).ok());
        let mut push = |path: &Path, kind| changes.list.push(Change { path: path.to_owned(), kind });
        if is_whiteout(&stat) {
            // Of something that was never there, it is the trace of a file made and removed.
            if before.is_some() && !self.opaque {
                push(&path, Kind::Deleted);
            }
            return Ok(None);
        }
        let existed = match (&before, lower) {
            (Some(before), Some(lower)) if FileType::from_raw_mode(before.st_mode) == kind => {
                if self.is_modified(lower, name, kind, (&stat, before), budget)? {
                    push(&path, Kind::Modified);
                }
                true
            }
            (Some(_), _) => {
                push(&path, Kind::TypeChanged);
                false
            }
            (None, _) => {
                push(&path, Kind::Added);
                false
            }
        };
        if kind != FileType::Directory {
            return Ok(None);
        }
        let upper = self.open_upper(name)?;
        let opaque = self.opaque || is_opaque(&upper, marks);
        let below = lower.filter(|_| existed).and_then(|lower| {
            let opened = rustix::fs::openat(lower, name, DIRECTORY, Mode::empty());
            // A directory of the host's that we may not read: what is gone from it cannot be told.
            changes.truncated |= opened.is_err();
            opened.ok()
        });
        if opaque && let Some(hidden) = &below {
            // It shows nothing the host has there: what was not made anew is gone.
            let made: HashSet<OsString> = names(upper.as_fd())?
                .into_iter()
                .filter(|name| {
                    rustix::fs::statat(&upper, name, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|stat| !is_whiteout(&stat))
                })
                .collect();
            let gone = names(hidden.as_fd())?.into_iter().filter(|name| !made.contains(name));
            changes.list.extend(gone.map(|name| Change { path: path.join(name), kind: Kind::Deleted }));
        }
        Level::new(upper, below, path, opaque).map(Some)
    }

    fn is_modified(
        &self,
        lower: &OwnedFd,
        name: &OsStr,
        kind: FileType,
        (stat, before): (&Stat, &Stat),
        budget: &mut u64,
    ) -> io::Result<bool> {
        if stat.st_mode & 0o7777 != before.st_mode & 0o7777 {
            return Ok(true);
        }
        Ok(match kind {
            FileType::Directory => false,
            FileType::RegularFile => stat.st_size != before.st_size || !self.same_contents(lower, name, stat, budget),
            FileType::Symlink => {
                let target = |layer: &OwnedFd| rustix::fs::readlinkat(layer, name, Vec::new());
                target(&self.upper)? != target(lower)?
            }
            // A FIFO, socket or device has nothing to compare; it is in this layer because it was made anew.
            _ => true,
        })
    }

    /// Whether a file that was opened for writing still says what the host's file says.
    fn same_contents(&self, lower: &OwnedFd, name: &OsStr, stat: &Stat, budget: &mut u64) -> bool {
        match budget.checked_sub(u64::try_from(stat.st_size).unwrap_or(u64::MAX)) {
            Some(rest) => *budget = rest,
            None => return false,
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let open = |layer: &OwnedFd| rustix::fs::openat(layer, name, flags, Mode::empty()).map(std::fs::File::from);
        let (Ok(mut new), Ok(mut old)) = (open(&self.upper), open(lower)) else { return false };
        let (mut a, mut b) = (vec![0u8; 64 << 10], vec![0u8; 64 << 10]);
        loop {
            let Ok(n) = new.read(&mut a) else { return false };
            if n == 0 {
                return true;
            }
            if old.read_exact(&mut b[..n]).is_err() || a[..n] != b[..n] {
                return false;
            }
        }
    }

    fn open_upper(&self, name: &OsStr) -> io::Result<OwnedFd> {
        Ok(match rustix::fs::openat(&self.upper, name, DIRECTORY, Mode::empty()) {
            Err(rustix::io::Errno::ACCESS) => {
                // The cell's user is ours here: it may take its own read permission away, and we give it back.
                rustix::fs::chmodat(&self.upper, name, Mode::from_raw_mode(0o700), AtFlags::empty())?;
                rustix::fs::openat(&self.upper, name, DIRECTORY, Mode::empty())?
            }
            opened => opened?,
        })
    }
}

/// The entries of a directory, up to one more than is ever listed.
fn names(directory: BorrowedFd<'_>) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(directory)? {
        let name = entry?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            names.push(OsString::from_vec(name));
        }
        if names.len() > CHANGES_MAX {
            break;
        }
    }
    Ok(names)
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
