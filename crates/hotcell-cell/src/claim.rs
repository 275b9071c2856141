//! Claims: who works in which directory of the host now.
//!
//! ```text
//! shared   a cell that writes in place      others may, too, here, above and below
//! alone    an apply or an undo              nobody else, here, above or below
//! ```
//!
//! A claim is a locked file in a place of this user's that no cell sees; it goes with its process. Locks on the
//! directories themselves would be within a guest's reach. A directory is known by its number and those above it by
//! theirs, so that it stays the same wherever it is moved or mounted. Another user's hotcells have claims of their own.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};

use crate::view::FileId;

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
    directory: FileId,
    /// One in each place; locked, and closing them lets go.
    files: Vec<(PathBuf, File)>,
}

/// Whoever is at it may be done in a moment.
const WAIT: Duration = Duration::from_secs(2);

impl Claim {
    /// Claims a directory; an error of kind `WouldBlock` if somebody else has it, or one above or below it.
    pub fn take(directory: BorrowedFd<'_>, how: Use) -> io::Result<Claim> {
        let lineage = lineage(directory)?;
        let give_up = Instant::now() + WAIT;
        loop {
            let turns = turns()?;
            if !others(&turns)?.iter().any(|other| other.excludes(&lineage, how)) {
                return Claim::write(&turns, &lineage, how);
            }
            drop(turns);
            if Instant::now() > give_up {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn write(turns: &[Turn], lineage: &[FileId], how: Use) -> io::Result<Claim> {
        let mut claim = Claim { directory: lineage[0], files: Vec::new() };
        let numbers: Vec<String> = lineage.iter().map(|(dev, ino)| format!("{dev}:{ino}")).collect();
        let text = format!("{} {}\n", how.word(), numbers.join(" "));
        for turn in turns {
            let mut random = [0u8; 8];
            rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
            let path = turn.place.join(format!("{:016x}", u64::from_ne_bytes(random)));
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
            file.try_lock().map_err(io::Error::from)?;
            let written = file.write_all(text.as_bytes());
            // Listed before it can fail: dropping the claim removes it.
            claim.files.push((path, file));
            written?;
        }
        Ok(claim)
    }

    /// Gives the claim back, and does something first if nobody else has one on the very same directory.
    pub(crate) fn last_one_out(self, work: impl FnOnce()) {
        // Where nobody can say who is the last, the work is left to the next one: what it removes may be somebody's wall.
        let Ok(turns) = turns() else { return };
        let Ok(others) = others(&turns) else { return };
        let is_ours = |other: &Other| self.files.iter().any(|(path, _)| *path == other.file);
        if !others.iter().any(|other| other.lineage[0] == self.directory && !is_ours(other)) {
            work();
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        for (path, _) in &self.files {
            // One that stays is unlocked, and the next to look removes it.
            let _harmless = fs::remove_file(path);
        }
        tidy();
    }
}

impl Use {
    fn word(self) -> &'static str {
        match self {
            Use::Shared => "shared",
            Use::Alone => "alone",
        }
    }
}

/// Takes the places of claims away if there are none; whoever comes meanwhile finds out and makes them again.
pub fn tidy() {
    for turn in turns().unwrap_or_default() {
        if others(std::slice::from_ref(&turn)).is_ok_and(|others| others.is_empty()) {
            let _harmless = fs::remove_file(turn.place.join(TURN)).and_then(|()| fs::remove_dir(&turn.place));
        }
    }
}

/// A directory and all above it, by their numbers.
fn lineage(directory: BorrowedFd<'_>) -> io::Result<Vec<FileId>> {
    let number = |directory: BorrowedFd<'_>| rustix::fs::fstat(directory).map(|stat| (stat.st_dev, stat.st_ino));
    let mut lineage = vec![number(directory)?];
    let mut at = directory.try_clone_to_owned()?;
    loop {
        // Not to be read: it may be closed to us.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        at = rustix::fs::openat(&at, "..", flags, Mode::empty())?;
        let above = number(at.as_fd())?;
        if lineage.last() == Some(&above) {
            return Ok(lineage);
        }
        lineage.push(above);
    }
}

/// A claim somebody has.
struct Other {
    file: PathBuf,
    lineage: Vec<FileId>,
    how: Use,
}

impl Other {
    fn parse(file: PathBuf, text: &str) -> Option<Other> {
        let (word, numbers) = text.trim_end().split_once(' ')?;
        let how = [Use::Shared, Use::Alone].into_iter().find(|how| how.word() == word)?;
        let number = |text: &str| {
            let (dev, ino) = text.split_once(':')?;
            Some((dev.parse().ok()?, ino.parse().ok()?))
        };
        Some(Other { file, lineage: numbers.split(' ').map(number).collect::<Option<_>>()?, how })
    }

    fn excludes(&self, lineage: &[FileId], how: Use) -> bool {
        let is_related = self.lineage.contains(&lineage[0]) || lineage.contains(&self.lineage[0]);
        is_related && (how == Use::Alone || self.how == Use::Alone)
    }
}

/// The claims of this user's that are held; what a crash left is removed. One that cannot be read may be anybody's.
fn others(turns: &[Turn]) -> io::Result<Vec<Other>> {
    let mut others = Vec::new();
    for turn in turns {
        for entry in fs::read_dir(&turn.place)? {
            let entry = entry?;
            if entry.file_name() == TURN {
                continue;
            }
            let file = match File::open(entry.path()) {
                // Given back just now.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                opened => opened?,
            };
            if file.try_lock_shared().is_ok() {
                let _gone_either_way = fs::remove_file(entry.path());
                continue;
            }
            let unreadable = || io::Error::other(format!("the claim `{}` cannot be read", entry.path().display()));
            others.push(Other::parse(entry.path(), &io::read_to_string(&file)?).ok_or_else(unreadable)?);
        }
    }
    Ok(others)
}

const TURN: &str = "turn";

/// The right to look at all claims of a place and to make one.
struct Turn {
    place: PathBuf,
    // Locked: closing it lets go.
    _file: File,
}

/// A turn in every place, always in the same order.
fn turns() -> io::Result<Vec<Turn>> {
    let (mut turns, mut refusal) = (Vec::new(), None);
    for place in places() {
        match Turn::take(place) {
            Ok(turn) => turns.push(turn),
            Err(error) => refusal = Some(error),
        }
    }
    match refusal {
        // A place that somebody else sits in: those who have another one still meet there.
        Some(error) if turns.is_empty() => Err(error),
        _ => Ok(turns),
    }
}

impl Turn {
    fn take(place: PathBuf) -> io::Result<Turn> {
        loop {
            make(&place)?;
            let path = place.join(TURN);
            let file = match OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path) {
                // Taken away by the last one in this very moment.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                opened => opened?,
            };
            file.lock()?;
            let (ours, now) = (file.metadata()?, fs::metadata(&path));
            if now.is_ok_and(|now| (now.dev(), now.ino()) == (ours.dev(), ours.ino())) {
                return Ok(Turn { place, _file: file });
            }
        }
    }
}

/// Where claims are. A user has a runtime directory in some sessions and not in others; all of them have `/tmp`.
fn places() -> Vec<PathBuf> {
    let us = rustix::process::geteuid().as_raw();
    if us == 0 && is_own(Path::new("/run")) {
        return vec!["/run/hotcell".into()];
    }
    let runtime = PathBuf::from(format!("/run/user/{us}"));
    let runtime = is_own(&runtime).then(|| runtime.join("hotcell"));
    runtime.into_iter().chain([format!("/tmp/hotcell-claims-{us}").into()]).collect()
}

fn is_own(path: &Path) -> bool {
    let us = rustix::process::geteuid().as_raw();
    fs::symlink_metadata(path).is_ok_and(|file| file.is_dir() && file.uid() == us)
}

/// Makes a directory of this user's own.
fn make(path: &Path) -> io::Result<()> {
    for _ in 0..PLACE_TRIES {
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        if is_own(path) && fs::metadata(path).is_ok_and(|file| file.mode() & 0o077 == 0) {
            return Ok(());
        }
        if fs::symlink_metadata(path).is_ok() && !is_own(path) {
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

    fn take(path: &Path, how: Use) -> io::Result<Claim> {
        Claim::take(File::open(path).expect("a directory").as_fd(), how)
    }

    #[test]
    fn alone_means_here_above_and_below() {
        let tree = tempfile::tempdir().expect("a directory");
        let (above, below) = (tree.path().to_owned(), tree.path().join("a/b"));
        fs::create_dir_all(&below).expect("made");
        let shared = take(&above, Use::Shared).expect("nobody is there");
        let second = take(&below, Use::Shared).expect("sharing is fine");
        for path in [&above, &below] {
            assert_eq!(take(path, Use::Alone).expect_err("somebody is there").kind(), io::ErrorKind::WouldBlock);
        }
        drop(second);
        let mut was_last = false;
        shared.last_one_out(|| was_last = true);
        assert!(was_last);
        let alone = take(&below, Use::Alone).expect("nobody is there any more");
        assert!(take(&above, Use::Shared).is_err());
        let elsewhere = tempfile::tempdir().expect("a directory");
        assert!(take(elsewhere.path(), Use::Alone).is_ok());
        drop(alone);
        assert!(take(&above, Use::Shared).is_ok());
    }

    #[test]
    fn a_directory_is_the_same_wherever_it_is_moved() {
        let tree = tempfile::tempdir().expect("a directory");
        let (before, after) = (tree.path().join("before"), tree.path().join("after"));
        fs::create_dir(&before).expect("made");
        let first = take(&before, Use::Shared).expect("nobody is there");
        fs::rename(&before, &after).expect("moved");
        assert!(take(&after, Use::Alone).is_err(), "it is still in use");
        let second = take(&after, Use::Shared).expect("sharing is fine");
        first.last_one_out(|| panic!("another one is in there"));
        let mut was_last = false;
        second.last_one_out(|| was_last = true);
        assert!(was_last);
    }
}
