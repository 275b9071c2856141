//! Contents kept apart from their names: files called by their SHA-256, so that equal contents are kept once and what
//! is read back is known to be what was put in.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use hotcell_cell::tree;

use crate::plain;

/// A directory of contents.
#[derive(Clone, Debug)]
pub(crate) struct Blobs {
    directory: PathBuf,
}

impl Blobs {
    /// The contents kept in this directory.
    pub(crate) fn of(directory: PathBuf) -> Blobs {
        Blobs { directory }
    }

    /// Makes the directory.
    pub(crate) fn make(&self) -> io::Result<()> {
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)
    }

    /// Keeps a file's contents, holes as holes. It must be what its digest says.
    pub(crate) fn keep(&self, from: &File, sha256: &str) -> io::Result<()> {
        let path = self.directory.join(sha256);
        if path.exists() {
            return Ok(());
        }
        let draft = self.directory.join(format!("{sha256}.tmp"));
        let to = OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(&draft)?;
        let copied = copy_sparse(from, &to).and_then(|()| digest(&to)).and_then(|copied| {
            if copied == sha256 { Ok(()) } else { Err(io::Error::other("a file changed while it was copied")) }
        });
        if let Err(error) = copied {
            // Half a copy would only take room.
            fs::remove_file(&draft)?;
            return Err(error);
        }
        fs::rename(&draft, path)
    }

    /// Opens contents by their digest.
    pub(crate) fn open(&self, sha256: &str) -> io::Result<File> {
        // A digest from a damaged manifest must not become a path.
        if sha256.len() != 64 || !sha256.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(io::Error::other("not a digest"));
        }
        plain::open(&self.directory.join(sha256))
    }

    /// Reads contents whole, up to a length.
    pub(crate) fn read(&self, sha256: &str, bytes_max: u64) -> io::Result<Vec<u8>> {
        let file = self.open(sha256)?;
        let mut contents = Vec::new();
        file.take(bytes_max).read_to_end(&mut contents)?;
        Ok(contents)
    }
}

/// Copies a file so that holes stay holes. Both end where they may.
pub(crate) fn copy_sparse(mut from: &File, mut to: &File) -> io::Result<()> {
    let size = from.metadata()?.len();
    to.set_len(size)?;
    let mut at = 0;
    while at < size {
        // A filesystem that knows no holes says that everything is data.
        let data = match rustix::fs::seek(from, rustix::fs::SeekFrom::Data(at)) {
            Ok(data) => data,
            Err(rustix::io::Errno::NXIO) => break,
            Err(_) => at,
        };
        let hole = rustix::fs::seek(from, rustix::fs::SeekFrom::Hole(data)).unwrap_or(size).min(size);
        from.seek(SeekFrom::Start(data))?;
        to.seek(SeekFrom::Start(data))?;
        let n = io::copy(&mut from.take(hole - data), &mut to)?;
        if n < hole - data {
            return Err(io::Error::other("a file became shorter while it was copied"));
        }
        at = hole;
    }
    to.flush()
}

/// The digest of a whole file.
pub(crate) fn digest(file: &File) -> io::Result<String> {
    tree::digest(file).map(|(digest, _)| digest)
}

/// Writes what is in memory of a directory's whole filesystem to storage.
pub(crate) fn sync_all(directory: &Path) -> io::Result<()> {
    Ok(rustix::fs::syncfs(File::open(directory)?)?)
}
