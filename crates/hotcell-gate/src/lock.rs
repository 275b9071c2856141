//! One hotcell at a time clears up in a home.
//!
//! The lock goes with its process, however that ends. Its file holds a number that every holder raises: whoever reads
//! another number than its own, because the file was replaced under it, holds nothing any more and stops.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;

use rustix::fs::FlockOperation;

use crate::home::Home;
use crate::plain;

/// Held while it lives.
pub(crate) struct HomeLock {
    // Locked: closing it lets go.
    file: File,
    path: PathBuf,
    fence: u64,
}

impl HomeLock {
    /// Takes the lock; none if another hotcell has it.
    pub(crate) fn take(home: &Home) -> io::Result<Option<HomeLock>> {
        let path = home.path().join("lock");
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let mut file = plain::open_with(&mut options, &path)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            taken => taken?,
        }
        let mut text = String::new();
        file.read_to_string(&mut text)?;
        let fence = text.trim().parse::<u64>().unwrap_or(0) + 1;
        file.seek(SeekFrom::Start(0))?;
        // As long as any number, so that no digit of an older one is left behind it.
        write!(file, "{fence:<20}")?;
        let lock = HomeLock { file, path, fence };
        // Replaced between the opening and the locking: then it is not the lock that others see.
        Ok(lock.holds().then_some(lock))
    }

    /// Whether it is still the lock that everybody else sees.
    pub(crate) fn holds(&self) -> bool {
        let number = |file: &std::fs::Metadata| (file.dev(), file.ino());
        let is_there = std::fs::symlink_metadata(&self.path).ok().as_ref().map(number)
            == self.file.metadata().ok().as_ref().map(number);
        is_there
            && plain::read(&self.path).is_ok_and(|text| String::from_utf8_lossy(&text).trim().parse() == Ok(self.fence))
    }
}
