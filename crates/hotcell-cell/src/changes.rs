//! What a copy-on-write workspace would change, read from the upper layer of its overlay.
//!
//! The layer is walked by descriptor: no link is followed, no FIFO or device is opened, and the
//! walk ends at a fixed number of entries however many there are.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
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

/// All differences, up to [`CHANGES_MAX`].
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Changes {
    /// Sorted by path.
    pub list: Vec<Change>,
    /// Whether there were more than are listed.
    pub truncated: bool,
}

/// How many differences are listed.
pub const CHANGES_MAX: usize = 100_000;
/// Files larger than this count as modified once they were opened for writing; smaller ones are compared.
const COMPARED_BYTES_MAX: u64 = 64 << 20;

/// Lists what `upper` changes in the host's directory `lower`.
pub(crate) fn list(upper: BorrowedFd<'_>, lower: &Path) -> io::Result<Changes> {
    let mut walk = Walk { changes: Changes::default(), lower };
    let upper = rustix::fs::openat(upper, ".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    walk.directory(upper, Path::new(""), true)?;
    walk.changes.list.sort_unstable();
    Ok(walk.changes)
}

struct Walk<'a> {
    changes: Changes,
    lower: &'a Path,
}

impl Walk<'_> {
    /// `merged`: whether what the host has here still shows through.
    fn directory(&mut self, upper: OwnedFd, path: &Path, merged: bool) -> io::Result<()> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&upper)? {
            let name = entry?.file_name().to_bytes().to_vec();
            if name != b"." && name != b".." {
                names.push(OsString::from_vec(name));
            }
            if names.len() > CHANGES_MAX {
                self.changes.truncated = true;
                break;
            }
        }
        if !merged && let Ok(lower) = fs::read_dir(self.lower.join(path)) {
            // An opaque directory hides everything the host has there.
            for entry in lower.flatten().filter(|entry| !names.contains(&entry.file_name())) {
                self.push(path.join(entry.file_name()), Kind::Deleted);
            }
        }
        for name in names {
            self.entry(upper.as_fd(), path.join(&name), &name, merged)?;
        }
        Ok(())
    }

    fn entry(&mut self, upper: BorrowedFd<'_>, path: PathBuf, name: &OsStr, merged: bool) -> io::Result<()> {
        let stat = rustix::fs::statat(upper, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        let before = fs::symlink_metadata(self.lower.join(&path)).ok();
        if kind == FileType::CharacterDevice && stat.st_rdev == 0 {
            // A whiteout. Of something that was never there, it is the trace of a file made and removed.
            if merged && before.is_some() {
                self.push(path, Kind::Deleted);
            }
            return Ok(());
        }
        let Some(before) = before else {
            self.push(path.clone(), Kind::Added);
            return self.below(upper, kind, name, &path, false);
        };
        if !same_kind(kind, &before.file_type()) {
            self.push(path.clone(), Kind::TypeChanged);
            return self.below(upper, kind, name, &path, false);
        }
        let same_mode = stat.st_mode & 0o7777 == before.mode() & 0o7777;
        let modified = match kind {
            FileType::Directory => !same_mode,
            FileType::RegularFile => !same_mode || !same_contents(upper, name, &stat, &self.lower.join(&path)),
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(upper, name, Vec::new())?;
                fs::read_link(self.lower.join(&path))
                    .map_or(true, |before| before.as_os_str().as_bytes() != target.to_bytes())
            }
            // A FIFO, socket or device has nothing to compare; it is in this layer because it was made anew.
            _ => true,
        };
        if modified {
            self.push(path.clone(), Kind::Modified);
        }
        self.below(upper, kind, name, &path, true)
    }

    fn below(
        &mut self,
        upper: BorrowedFd<'_>,
        kind: FileType,
        name: &OsStr,
        path: &Path,
        existed: bool,
    ) -> io::Result<()> {
        if kind != FileType::Directory || self.changes.truncated {
            return Ok(());
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = match rustix::fs::openat(upper, name, flags, Mode::empty()) {
            Err(rustix::io::Errno::ACCESS) => {
                // The cell's user is ours here: it may take its own read permission away, and we give it back.
                rustix::fs::chmodat(upper, name, Mode::from_raw_mode(0o700), AtFlags::empty())?;
                rustix::fs::openat(upper, name, flags, Mode::empty())?
            }
            opened => opened?,
        };
        let merged = existed && !is_opaque(&directory);
        self.directory(directory, path, merged)
    }

    fn push(&mut self, path: PathBuf, kind: Kind) {
        if self.changes.list.len() < CHANGES_MAX {
            self.changes.list.push(Change { path, kind });
        } else {
            self.changes.truncated = true;
        }
    }
}

/// Whether the overlay shows nothing of the host below this directory.
fn is_opaque(directory: &OwnedFd) -> bool {
    ["trusted.overlay.opaque", "user.overlay.opaque"].iter().any(|name| {
        let mut value = [0u8; 8];
        matches!(rustix::fs::fgetxattr(directory, *name, &mut value), Ok(1) if value[0] == b'y')
    })
}

fn same_kind(kind: FileType, before: &fs::FileType) -> bool {
    match kind {
        FileType::Directory => before.is_dir(),
        FileType::RegularFile => before.is_file(),
        FileType::Symlink => before.is_symlink(),
        FileType::Fifo => before.is_fifo(),
        FileType::Socket => before.is_socket(),
        _ => false,
    }
}

/// Whether a file that was opened for writing still says what the host's file says.
fn same_contents(upper: BorrowedFd<'_>, name: &OsStr, stat: &Stat, before: &Path) -> bool {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let size = u64::try_from(stat.st_size).unwrap_or(u64::MAX);
    let Ok(old) = fs::symlink_metadata(before) else { return false };
    if old.size() != size || size > COMPARED_BYTES_MAX {
        return false;
    }
    let (Ok(new), Ok(old)) = (rustix::fs::openat(upper, name, flags, Mode::empty()), fs::File::open(before)) else {
        return false;
    };
    let (mut new, mut old) = (io::BufReader::new(fs::File::from(new)), io::BufReader::new(old));
    let (mut a, mut b) = ([0u8; 16384], [0u8; 16384]);
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
