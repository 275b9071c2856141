//! Limits held from outside: by looking at every process of a cell, again and again.
//!
//! Used where no cgroup can be had. What is seen is what the cell's own `/proc` shows, which is all
//! of its processes and nothing else. Between two looks a tree can grow; the report says `watched`.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use rustix::fs::{AtFlags, Mode, OFlags};

/// One look at a whole tree.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Look {
    /// Processes and threads without init.
    pub(crate) n_tasks: u64,
    /// Processor time, of the living and of those they waited for.
    pub(crate) cpu: Duration,
    /// An upper bound on memory: what is shared is counted once for each process that maps it.
    pub(crate) memory_bytes: u64,
}

/// Looks at every process once.
pub(crate) fn look(proc: BorrowedFd<'_>) -> Look {
    let mut look = Look::default();
    let mut memfds = BTreeSet::new();
    each_process(proc, |pid, process| {
        let stat = read(process, "stat");
        // The name in brackets may hold anything; the fields follow the last bracket.
        let fields: Vec<&str> = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
        let ticks: u64 = [11, 12, 13, 14].iter().filter_map(|at| fields.get(*at)?.parse::<u64>().ok()).sum();
        look.cpu += Duration::from_millis(ticks * 1000 / TICKS_A_SECOND);
        if pid == "1" {
            return;
        }
        look.n_tasks += fields.get(17).and_then(|n| n.parse::<u64>().ok()).unwrap_or(1);
        let status = read(process, "status");
        look.memory_bytes += (kib(&status, "RssAnon:") + kib(&status, "RssShmem:")) * 1024;
        look.memory_bytes += memory_files(process, &mut memfds);
    });
    look
}

/// Memory counted so that shared pages count once: slower, for when the bound says it may be too much.
/// `files` is what the scratch filesystem holds, which mapped files must not count again.
pub(crate) fn memory_exactly(proc: BorrowedFd<'_>, files: u64) -> u64 {
    let (mut anonymous, mut shared, mut written) = (0, 0, 0);
    let mut memfds = BTreeSet::new();
    each_process(proc, |pid, process| {
        if pid != "1" {
            let sums = read(process, "smaps_rollup");
            anonymous += kib(&sums, "Pss_Anon:") * 1024;
            shared += kib(&sums, "Pss_Shmem:") * 1024;
            written += memory_files(process, &mut memfds);
        }
    });
    anonymous + (files + written).max(shared)
}

const TICKS_A_SECOND: u64 = 100;

fn each_process(proc: BorrowedFd<'_>, mut visit: impl FnMut(&str, BorrowedFd<'_>)) {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(listing) = rustix::fs::openat(proc, ".", flags, Mode::empty()) else { return };
    let Ok(entries) = rustix::fs::Dir::read_from(&listing) else { return };
    for entry in entries.flatten() {
        let Ok(pid) = entry.file_name().to_str() else { continue };
        if pid.bytes().all(|byte| byte.is_ascii_digit())
            && let Ok(process) = rustix::fs::openat(proc, pid, flags, Mode::empty())
        {
            visit(pid, process.as_fd());
        }
    }
}

/// Bytes held by memory files this process has open, each file once in a tree.
fn memory_files(process: BorrowedFd<'_>, seen: &mut BTreeSet<u64>) -> u64 {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(fds) = rustix::fs::openat(process, "fd", flags, Mode::empty()) else { return 0 };
    let Ok(entries) = rustix::fs::Dir::read_from(&fds) else { return 0 };
    let mut bytes = 0;
    for entry in entries.flatten() {
        let is_memory = rustix::fs::readlinkat(&fds, entry.file_name(), Vec::new())
            .is_ok_and(|target| target.to_bytes().starts_with(b"/memfd:"));
        if is_memory
            && let Ok(stat) = rustix::fs::statat(&fds, entry.file_name(), AtFlags::empty())
            && seen.insert(stat.st_ino)
        {
            bytes += u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        }
    }
    bytes
}

fn read(directory: BorrowedFd<'_>, name: &str) -> String {
    let mut text = Vec::new();
    if let Ok(file) = rustix::fs::openat(directory, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) {
        // A process that ended since the listing reads as nothing.
        let _gone = File::from(file).read_to_end(&mut text);
    }
    String::from_utf8_lossy(&text).into_owned()
}

fn kib(text: &str, field: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(field));
    line.and_then(|value| value.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// What is used on the host's disk.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct DiskUse {
    pub(crate) bytes: u64,
    pub(crate) n_files: u64,
}

/// Adds up trees and files, without following links or leaving their filesystems.
pub(crate) fn disk_use(roots: &[PathBuf]) -> DiskUse {
    let mut sum = DiskUse::default();
    for root in roots {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(root) = rustix::fs::open(root, flags, Mode::empty()) else { continue };
        let Ok(stat) = rustix::fs::fstat(&root) else { continue };
        sum.bytes += u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        add_directory(&root, stat.st_dev, &mut sum, DEPTH_MAX);
    }
    sum
}

/// One descriptor is open for each level.
const DEPTH_MAX: u32 = 200;

fn add_directory(directory: &OwnedFd, device: u64, sum: &mut DiskUse, depth: u32) {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let Ok(entries) = rustix::fs::Dir::read_from(directory) else { return };
    for entry in entries.flatten() {
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name == "." || name == ".." {
            continue;
        }
        let Ok(stat) = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
        if stat.st_dev != device {
            continue;
        }
        sum.n_files += 1;
        sum.bytes += u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        if depth > 0
            && entry.file_type() == rustix::fs::FileType::Directory
            && let Ok(below) = rustix::fs::openat(directory, name, flags, Mode::empty())
        {
            add_directory(&below, device, sum, depth - 1);
        }
    }
}
