//! What a pack keeps of the files it replaces: a copy, and the very file by another name where that can be.
//!
//! ```text
//! rollback/<id>/originals/<number>        the file itself: taking it back restores its inode
//! rollback/<id>/originals/<number>.copy   its contents, whatever a process that has it open writes to it since
//! ```

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use hotcell_cell::tree::{self, Node, Tree};
use rustix::fs::{AtFlags, CWD, Mode, OFlags};

use crate::blobs::{copy_sparse, digest};
use crate::plain;
use crate::transition::{Contents, at_first_free, names_for, set_attributes};

/// Keeps a file of the tree, which must still have these contents.
pub(crate) fn save(tree: &Tree, path: &Path, to: &Path, node: &Node) -> io::Result<()> {
    let file = tree.file(path)?;
    let (directory, name) = tree.place(path)?;
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let copy = File::from(rustix::fs::open(copy_of(to), flags, Mode::from_raw_mode(0o600))?);
    // Shared blocks where the filesystem can, bytes elsewhere.
    if rustix::fs::ioctl_ficlone(&copy, &file).is_err() {
        copy_sparse(&file, &copy)?;
    }
    if !has_contents(&copy, node)? {
        return Err(io::Error::other("a file changed while it was kept"));
    }
    set_attributes(&copy, &tree::attributes(&file));
    // Another filesystem, or a file that is not ours to link: then there is the copy.
    let is_linked = rustix::fs::linkat(&directory, name, CWD, to, AtFlags::empty()).is_ok();
    let stat = rustix::fs::fstat(&file)?;
    let is_ours = rustix::process::geteuid().is_root() || stat.st_uid == rustix::process::geteuid().as_raw();
    if !is_linked && !is_ours && stat.st_mode & 0o6000 != 0 {
        return Err(io::Error::other("a file with a set-id bit for somebody else could not be made again"));
    }
    Ok(())
}

/// A kept original: the file itself, unless it was changed since by somebody who has it under another name or open.
pub(crate) fn open(kept: &Path, node: Option<&Node>) -> io::Result<Contents> {
    let Some(node @ Node::File { mode, .. }) = node else {
        return Err(io::Error::other("no original was kept"));
    };
    if let Ok(file) = plain::open(kept)
        && file.metadata()?.mode() & 0o7777 == *mode
        && has_contents(&file, node)?
    {
        return Ok(Contents::Same(kept.to_owned()));
    }
    let copy = plain::open(&copy_of(kept))?;
    if has_contents(&copy, node)? {
        Ok(Contents::Copy(copy))
    } else {
        Err(io::Error::other("a kept original is not what its digest says"))
    }
}

/// Brings a kept original that was written to since, and has no name of its own any more, back beside its place. Where
/// it is.
pub(crate) fn rescue(tree: &Tree, kept: &Path, path: &Path, node: Option<&Node>) -> io::Result<Option<PathBuf>> {
    let file = match plain::open(kept) {
        // There is only the copy, which nobody writes to.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let has_a_name = file.metadata()?.nlink() > 1;
    let is_as_it_was = node.map_or(Ok(false), |node| has_contents(&file, node))?;
    if has_a_name || is_as_it_was {
        return Ok(None);
    }
    let link = |directory: std::os::fd::BorrowedFd<'_>, place: &std::ffi::OsStr| {
        rustix::fs::linkat(CWD, kept, directory, place, AtFlags::empty())
    };
    at_first_free(tree, names_for(path).skip(1), link).map(Some)
}

/// The number of a file that has further names.
pub(crate) fn shared_number(tree: &Tree, path: &Path) -> Option<u64> {
    let stat = tree.file(path).and_then(|file| Ok(rustix::fs::fstat(&file)?)).ok()?;
    (stat.st_nlink > 1).then_some(stat.st_ino)
}

fn has_contents(file: &File, node: &Node) -> io::Result<bool> {
    let Node::File { size, sha256: Some(wanted), .. } = node else { return Ok(false) };
    Ok(file.metadata()?.len() == *size && digest(file)? == *wanted)
}

/// Where the copy of a kept file is.
fn copy_of(kept: &Path) -> PathBuf {
    kept.with_extension("copy")
}
