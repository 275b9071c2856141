//! What stands at a path below a directory, read without following a link or opening anything that could make us wait.
//!
//! Every step is a name in a directory that is already open, so a path of any length works and nothing that is swapped
//! on the way leads elsewhere.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Component, Path, PathBuf};

use hotcell_base::ExactPath;
use hotcell_base::exact::hex;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// One thing in a tree.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Node {
    /// A regular file.
    File {
        /// Permissions, with set-id and sticky bits.
        mode: u32,
        /// Its length.
        size: u64,
        /// SHA-256 of its contents in hexadecimal; none if it was too large to read or could not be.
        sha256: Option<String>,
    },
    /// A directory.
    Directory {
        /// Permissions, with set-id and sticky bits.
        mode: u32,
    },
    /// A symbolic link.
    Symlink {
        /// What it says.
        target: ExactPath,
    },
    /// Something that is no data.
    Special {
        /// What it is.
        what: Special,
        /// Permissions.
        mode: u32,
    },
}

/// Kinds of things that are no data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Special {
    /// A named pipe.
    Fifo,
    /// A socket.
    Socket,
    /// A device.
    Device,
}

impl Node {
    /// Whether both are known to be the same. What could not be read is the same as nothing. A directory takes its
    /// set-group bit from the one above it, so that bit tells nothing.
    pub fn is_same(&self, other: &Node) -> bool {
        match (self, other) {
            (Node::File { sha256: None, .. }, _) => false,
            (Node::Directory { mode: a }, Node::Directory { mode: b }) => a & !SETGID == b & !SETGID,
            (a, b) => a == b,
        }
    }

    /// Whether both are things of one kind.
    pub fn is_alike(&self, other: &Node) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }

    /// Whether it is a directory.
    pub fn is_directory(&self) -> bool {
        matches!(self, Node::Directory { .. })
    }
}

const SETGID: u32 = 0o2000;

/// Opening a directory: never through a link.
pub(crate) const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK).union(OFlags::CLOEXEC);

/// A directory to look below.
#[derive(Debug)]
pub struct Tree {
    root: OwnedFd,
}

impl Tree {
    /// Opens a directory; the path itself may lead through links, what is asked for below may not.
    pub fn open(path: &Path) -> io::Result<Tree> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Tree { root: rustix::fs::open(path, flags, Mode::empty())? })
    }

    /// Looks below a directory that is open.
    pub fn of(root: OwnedFd) -> Tree {
        Tree { root }
    }

    /// Looks below a directory that is open and stays open.
    pub fn of_directory(directory: BorrowedFd<'_>) -> io::Result<Tree> {
        Ok(Tree { root: directory.try_clone_to_owned()? })
    }

    /// The directory itself.
    pub fn root(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    /// A directory below, on the same mount: another filesystem that is mounted there is `EXDEV`.
    pub fn directory(&self, path: &Path) -> io::Result<OwnedFd> {
        let mut at = self.root.try_clone()?;
        for part in path.components() {
            let Component::Normal(name) = part else { return Err(io::ErrorKind::InvalidInput.into()) };
            at = open_directory(at.as_fd(), name)?;
        }
        Ok(at)
    }

    /// The directory that holds a path, and the name in it.
    pub fn place<'p>(&self, path: &'p Path) -> io::Result<(OwnedFd, &'p OsStr)> {
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        Ok((self.directory(path.parent().unwrap_or(Path::new("")))?, name))
    }

    /// What stands at a path; none if nothing does. Files are hashed while `budget` bytes last.
    pub fn node(&self, path: &Path, budget: &mut u64) -> io::Result<Option<Node>> {
        let place = self.place(path);
        let (directory, name) = match place {
            Err(error) if is_absence(&error) => return Ok(None),
            place => place?,
        };
        let Some(stat) = stat(directory.as_fd(), name)? else { return Ok(None) };
        node(directory.as_fd(), name, &stat, budget).map(Some)
    }

    /// Opens a file for reading. Anything but a regular file is refused.
    pub fn file(&self, path: &Path) -> io::Result<File> {
        let (directory, name) = self.place(path)?;
        open_file(directory.as_fd(), name)
    }

    /// The names in a directory, sorted.
    pub fn names(&self, path: &Path) -> io::Result<Vec<OsString>> {
        let mut names = names(self.directory(path)?.as_fd(), usize::MAX)?;
        names.sort_unstable();
        Ok(names)
    }
}

/// Opens a directory in another one: no link, and nothing that is mounted there.
pub(crate) fn open_directory(directory: BorrowedFd<'_>, name: &OsStr) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::NO_XDEV | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    Ok(rustix::fs::openat2(directory, name, DIRECTORY, Mode::empty(), resolve)?)
}

/// Whether nothing is there: no such name, or what should be a directory is none, or is a link.
fn is_absence(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENOTDIR | libc::ELOOP))
}

pub(crate) fn stat(directory: BorrowedFd<'_>, name: &OsStr) -> io::Result<Option<Stat>> {
    match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat)),
        Err(rustix::io::Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Describes what was found under a name.
pub(crate) fn node(directory: BorrowedFd<'_>, name: &OsStr, stat: &Stat, budget: &mut u64) -> io::Result<Node> {
    let mode = stat.st_mode & 0o7777;
    Ok(match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {
            let size = u64::try_from(stat.st_size).unwrap_or(0);
            let sha256 = match budget.checked_sub(size) {
                Some(rest) => {
                    *budget = rest;
                    // A file we may not read is not known, which is enough to treat it as different from everything.
                    open_file(directory, name).and_then(|file| digest_of(&file, size)).ok()
                }
                None => None,
            };
            Node::File { mode, size, sha256 }
        }
        FileType::Directory => Node::Directory { mode },
        FileType::Symlink => {
            let target = rustix::fs::readlinkat(directory, name, Vec::new())?.into_bytes();
            Node::Symlink { target: ExactPath(PathBuf::from(OsString::from_vec(target))) }
        }
        FileType::Fifo => Node::Special { what: Special::Fifo, mode },
        FileType::Socket => Node::Special { what: Special::Socket, mode },
        _ => Node::Special { what: Special::Device, mode },
    })
}

/// Opens a regular file for reading. Anything else is not opened at all: whoever waits at a FIFO must not notice us.
pub(crate) fn open_file(directory: BorrowedFd<'_>, name: &OsStr) -> io::Result<File> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let found = rustix::fs::openat(directory, name, flags, Mode::empty())?;
    if FileType::from_raw_mode(rustix::fs::fstat(&found)?.st_mode) != FileType::RegularFile {
        return Err(io::Error::other("it is not a regular file"));
    }
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(File::from(rustix::fs::open(format!("/proc/self/fd/{}", found.as_raw_fd()), flags, Mode::empty())?))
}

/// The digest of a file that has this length; an error if it has another.
fn digest_of(file: &File, size: u64) -> io::Result<String> {
    let (digest, n_read) = digest(file)?;
    if n_read == size { Ok(digest) } else { Err(io::Error::other("it changed while it was read")) }
}

/// The SHA-256 of a file from its beginning, in hexadecimal, and its length.
pub fn digest(mut file: &File) -> io::Result<(String, u64)> {
    file.seek(SeekFrom::Start(0))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0u8; 64 << 10];
    let mut n_read = 0;
    loop {
        let n = file.read(&mut buffer)?;
        if n == 0 {
            return Ok((hex(&hash.finalize()), n_read));
        }
        n_read += n as u64;
        hash.update(&buffer[..n]);
    }
}

/// The extended attributes of a file, as far as they can be read.
pub fn attributes(file: &File) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut list = vec![0u8; 64 << 10];
    let Ok(n) = rustix::fs::flistxattr(file, &mut list) else { return Vec::new() };
    let mut value = vec![0u8; 64 << 10];
    let names = list[..n].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    names
        .filter_map(|name| {
            let n = rustix::fs::fgetxattr(file, name, &mut value).ok()?;
            Some((name.to_vec(), value[..n].to_vec()))
        })
        .collect()
}

/// The entries of a directory, up to one more than `most`.
pub(crate) fn names(directory: BorrowedFd<'_>, most: usize) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in rustix::fs::Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(OsStr::from_bytes(name).to_owned());
        }
        if names.len() > most {
            break;
        }
    }
    Ok(names)
}
