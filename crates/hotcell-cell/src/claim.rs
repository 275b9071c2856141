//! Claims: who works in which directory of the host now.
//!
//! ```text
//! shared   a cell that writes in place      others may, too, here, above and below
//! alone    an apply or an undo              nobody else, here, above or below
//! ```
//!
//! A claim is a locked file in a place of this user's that no cell sees; it goes with its process. Locks on the
//! directories themselves would be within a guest's reach. Another user's hotcells have claims of their own.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hotcell_base::exact::{hex, unhex};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// How a directory is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Use {
    /// Together with others that write there.
    Shared,
    /// By nobody else.
    Alone,
}

/// Held while it lives.
#[derive(Debug)]
pub struct Claim {
    place: PathBuf,
    path: PathBuf,
    file: PathBuf,
    // Locked: closing it lets go.
    _lock: File,
}

/// Whoever is at it may be done in a moment.
const WAIT: Duration = Duration::from_secs(2);

impl Claim {
    /// Claims a directory; an error of kind `WouldBlock` if somebody else has it, or one above or below it.
    pub fn take(path: &Path, how: Use) -> io::Result<Claim> {
        let path = fs::canonicalize(path)?;
        let give_up = Instant::now() + WAIT;
        loop {
            let (place, turn) = turn()?;
            if !others(&place)?.iter().any(|other| other.excludes(&path, how)) {
                return Claim::write(place, path, how);
            }
            drop(turn);
            if Instant::now() > give_up {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn write(place: PathBuf, path: PathBuf, how: Use) -> io::Result<Claim> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let file = place.join(format!("{}-{number}", std::process::id()));
        let mut lock = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&file)?;
        lock.try_lock().map_err(io::Error::from)?;
        let word = match how {
            Use::Shared => "shared",
            Use::Alone => "alone",
        };
        write!(lock, "{word} {}", hex(path.as_os_str().as_bytes()))?;
        Ok(Claim { place, path, file, _lock: lock })
    }

    /// Gives the claim back, and does something first if nobody else has one on the very same directory.
    pub(crate) fn last_one_out(self, work: impl FnOnce()) {
        // Without a turn nobody can say who is the last: then the work is left to the next one.
        if let Ok((_, _turn)) = turn() {
            let others = others(&self.place).unwrap_or_default();
            if !others.iter().any(|other| other.path == self.path && other.file != self.file) {
                work();
            }
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // One that stays is unlocked, and the next to look removes it.
        let _harmless = fs::remove_file(&self.file);
        tidy();
    }
}

/// Takes the place of claims away if there are none; whoever comes meanwhile finds out and makes it again.
pub fn tidy() {
    if let Ok((place, _turn)) = turn()
        && others(&place).is_ok_and(|others| others.is_empty())
    {
        let _harmless = fs::remove_file(place.join(TURN)).and_then(|()| fs::remove_dir(&place));
    }
}

/// A claim somebody has.
struct Other {
    file: PathBuf,
    path: PathBuf,
    how: Use,
}

impl Other {
    fn excludes(&self, path: &Path, how: Use) -> bool {
        let is_related = self.path.starts_with(path) || path.starts_with(&self.path);
        is_related && (how == Use::Alone || self.how == Use::Alone)
    }
}

/// The claims of this user's that are held; what a crash left is removed.
fn others(place: &Path) -> io::Result<Vec<Other>> {
    let mut others = Vec::new();
    for entry in fs::read_dir(place)?.flatten().filter(|entry| entry.file_name() != TURN) {
        let Ok(file) = File::open(entry.path()) else { continue };
        if file.try_lock_shared().is_ok() {
            let _gone_either_way = fs::remove_file(entry.path());
            continue;
        }
        let text = fs::read_to_string(entry.path()).unwrap_or_default();
        if let Some((word, path)) = text.split_once(' ')
            && let Some(path) = unhex(path)
        {
            let how = if word == "alone" { Use::Alone } else { Use::Shared };
            others.push(Other { file: entry.path(), path: OsString::from_vec(path).into(), how });
        }
    }
    Ok(others)
}

const TURN: &str = "turn";

/// The right to look at all claims and make one, and where they are.
fn turn() -> io::Result<(PathBuf, File)> {
    loop {
        let place = place()?;
        let path = place.join(TURN);
        let file = match OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path) {
            // Taken away by the last one in this very moment.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            opened => opened?,
        };
        file.lock()?;
        let (ours, now) = (file.metadata()?, fs::metadata(&path));
        if now.is_ok_and(|now| (now.dev(), now.ino()) == (ours.dev(), ours.ino())) {
            return Ok((place, file));
        }
    }
}

/// A directory of this user's own, the same for all of this user's hotcells: they must all choose alike.
fn place() -> io::Result<PathBuf> {
    let us = rustix::process::geteuid().as_raw();
    let runtime = PathBuf::from(if us == 0 { "/run".to_owned() } else { format!("/run/user/{us}") });
    let is_own = |path: &Path| fs::symlink_metadata(path).is_ok_and(|file| file.is_dir() && file.uid() == us);
    let path = if is_own(&runtime) { runtime.join("hotcell") } else { format!("/tmp/hotcell-claims-{us}").into() };
    for _ in 0..PLACE_TRIES {
        match DirBuilder::new().mode(0o700).create(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        if is_own(&path) && fs::metadata(&path).is_ok_and(|file| file.mode() & 0o077 == 0) {
            return Ok(path);
        }
        if fs::symlink_metadata(&path).is_ok_and(|file| !file.is_dir() || file.uid() != us) {
            break;
        }
        // Taken away by the last one in this very moment.
    }
    Err(io::Error::other(format!("`{}` is not a directory of this user's own", path.display())))
}

/// So many times somebody may take the place away while it is being made.
const PLACE_TRIES: u32 = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alone_means_here_above_and_below() {
        let tree = tempfile::tempdir().expect("a directory");
        let (above, below) = (tree.path().to_owned(), tree.path().join("a/b"));
        fs::create_dir_all(&below).expect("made");
        let shared = Claim::take(&above, Use::Shared).expect("nobody is there");
        let second = Claim::take(&below, Use::Shared).expect("sharing is fine");
        for path in [&above, &below] {
            assert_eq!(Claim::take(path, Use::Alone).expect_err("somebody is there").kind(), io::ErrorKind::WouldBlock);
        }
        drop(second);
        let mut was_last = false;
        shared.last_one_out(|| was_last = true);
        assert!(was_last);
        let alone = Claim::take(&below, Use::Alone).expect("nobody is there any more");
        assert!(Claim::take(&above, Use::Shared).is_err());
        let elsewhere = tempfile::tempdir().expect("a directory");
        assert!(Claim::take(elsewhere.path(), Use::Alone).is_ok());
        drop(alone);
        assert!(Claim::take(&above, Use::Shared).is_ok());
    }
}
