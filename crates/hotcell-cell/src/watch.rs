//! Limits held from outside: by looking at every process of a cell, again and again.
//!
//! Used where no cgroup can be had, and for what is written to the host's own disk. What is seen is what the cell's
//! own `/proc` shows, which is all of its processes and nothing else. Between two looks a tree can grow, and what the
//! kernel holds for a process (socket buffers, pipes, page tables) is not seen at all; the report says `watched`.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use rustix::fs::{AtFlags, FileType, Mode, OFlags};

/// One look at a whole tree.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Look {
    /// Processes and threads without init.
    pub(crate) n_tasks: u64,
    /// Processor time seen so far.
    pub(crate) cpu: Duration,
    /// An upper bound on memory: what is shared is counted once for each process that maps it.
    pub(crate) memory_bytes: u64,
}

/// Looks at a tree, and remembers what it saw of processes that are gone.
#[derive(Default)]
pub(crate) struct Watch {
    /// Ticks of the living at the last look, by pid and start time.
    seen: BTreeMap<(String, String), u64>,
    /// Ticks of those that were seen and are gone: nobody may ever have waited for them.
    gone_ticks: u64,
    /// Processor time before it began to matter.
    before: Duration,
}

impl Watch {
    /// What was used so far does not count.
    pub(crate) fn begin(&mut self, proc: BorrowedFd<'_>) {
        self.before = self.look(proc).cpu;
    }

    /// Looks at every process once.
    pub(crate) fn look(&mut self, proc: BorrowedFd<'_>) -> Look {
        let mut look = Look::default();
        let (mut with_children, mut own) = (0, 0);
        let mut living = BTreeMap::new();
        for process in processes(proc) {
            let ticks = process.number(11) + process.number(12);
            own += ticks;
            with_children += ticks + process.number(13) + process.number(14);
            living.insert((process.pid.clone(), process.field(19).to_owned()), ticks);
            if process.pid != "1" {
                look.n_tasks += process.number(17).max(1);
                look.memory_bytes += if process.borrows_memory { 0 } else { process.resident() };
            }
        }
        for (process, ticks) in &self.seen {
            if !living.contains_key(process) {
                self.gone_ticks += ticks;
            }
        }
        self.seen = living;
        // What was waited for is in somebody's count of children; what was not is in ours, if it was seen.
        let ticks = with_children.max(own + self.gone_ticks);
        look.cpu = Duration::from_millis(ticks * 1000 / TICKS_A_SECOND).saturating_sub(self.before);
        look
    }
}

/// Memory counted so that shared pages count once: slower, for when the bound says it may be too much.
/// `files` is what the scratch filesystem holds, which mapped files must not count again.
pub(crate) fn memory_exactly(proc: BorrowedFd<'_>, files: u64) -> u64 {
    let (mut anonymous, mut shared, mut reserved) = (0, 0, 0);
    let mut seen = BTreeSet::new();
    for process in processes(proc).iter().filter(|process| process.pid != "1" && !process.borrows_memory) {
        let sums = of_any_task(process.directory.as_fd(), "smaps_rollup");
        anonymous += (kib(&sums, "Pss_Anon:") + kib(&sums, "SwapPss:")) * 1024;
        shared += kib(&sums, "Pss_Shmem:") * 1024;
        reserved += shared_anonymous(process.directory.as_fd(), &mut seen);
    }
    anonymous + reserved + files.max(shared.saturating_sub(reserved))
}

const TICKS_A_SECOND: u64 = 100;

/// A process of the cell at one look.
struct Process {
    pid: String,
    directory: OwnedFd,
    /// The fields of `stat` after the name, which may hold anything.
    fields: Vec<String>,
    status: String,
    /// Whether it runs on its parent's memory: a vfork whose exec is still to come.
    borrows_memory: bool,
}

impl Process {
    fn field(&self, at: usize) -> &str {
        self.fields.get(at).map_or("", String::as_str)
    }

    fn number(&self, at: usize) -> u64 {
        self.field(at).parse().unwrap_or(0)
    }

    /// What one process holds: its own pages, swapped ones, shared ones it maps, and all it shares anonymously.
    fn resident(&self) -> u64 {
        let kib = |field: &str| kib(&self.status, field);
        let pages = (kib("RssAnon:") + kib("RssShmem:") + kib("VmSwap:")) * 1024;
        // Shared anonymous memory can be filled and let go of without being given back: then its size counts.
        pages.max(shared_anonymous(self.directory.as_fd(), &mut BTreeSet::new()))
    }

    /// The shape of its memory: equal for two processes on the same memory.
    fn memory(&self) -> Vec<&str> {
        self.status.lines().filter(|line| line.starts_with("Vm") || line.starts_with("Rss")).collect()
    }
}

/// Every process of the cell.
fn processes(proc: BorrowedFd<'_>) -> Vec<Process> {
    let mut found: Vec<Process> = Vec::new();
    each_process(proc, |pid, directory| {
        let stat = read(directory, "stat");
        let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().map(str::to_owned).collect();
        let status = of_any_task(directory, "status");
        if let Ok(directory) = directory.try_clone_to_owned() {
            found.push(Process { pid: pid.to_owned(), directory, fields, status, borrows_memory: false });
        }
    });
    // A parent in vfork sleeps until its child has memory of its own. One such child each, no more: a guest must
    // not be able to pass copies off as one.
    let mut waiting: BTreeSet<String> =
        found.iter().filter(|process| process.field(0) == "D").map(|process| process.pid.clone()).collect();
    for idx in 0..found.len() {
        let parent = found[idx].field(1).to_owned();
        let same = found.iter().any(|one| one.pid == parent && one.memory() == found[idx].memory());
        if same && waiting.remove(&parent) {
            found[idx].borrows_memory = true;
        }
    }
    found
}

/// The size of shared anonymous mappings, each once in a tree.
fn shared_anonymous(process: BorrowedFd<'_>, seen: &mut BTreeSet<String>) -> u64 {
    let mut bytes = 0;
    for line in of_any_task(process, "maps").lines().filter(|line| line.ends_with("/dev/zero (deleted)")) {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let Some((first, last)) = fields.first().and_then(|range| range.split_once('-')) else { continue };
        let number = |text: &str| u64::from_str_radix(text, 16).unwrap_or(0);
        // The part of the object that is mapped here: offset and inode name it.
        let part = format!("{} {}", fields.get(2).unwrap_or(&""), fields.get(4).unwrap_or(&""));
        if seen.insert(part) {
            bytes += number(last).saturating_sub(number(first));
        }
    }
    bytes
}

/// A file of a process, from any of its threads: the first one may have ended before the others.
fn of_any_task(process: BorrowedFd<'_>, name: &str) -> String {
    // Of a thread that ended, the files are empty or say nothing of memory.
    let tells = |text: &str| match name {
        "maps" => !text.is_empty(),
        _ => text.lines().any(|line| line.starts_with("Rss")),
    };
    let text = read(process, name);
    if tells(&text) {
        return text;
    }
    let Ok(tasks) = rustix::fs::openat(process, "task", DIRECTORY, Mode::empty()) else { return text };
    let Ok(entries) = rustix::fs::Dir::read_from(&tasks) else { return text };
    for entry in entries.flatten() {
        if let Ok(task) = rustix::fs::openat(&tasks, entry.file_name(), DIRECTORY, Mode::empty()) {
            let other = read(task.as_fd(), name);
            if tells(&other) {
                return other;
            }
        }
    }
    text
}

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

fn each_process(proc: BorrowedFd<'_>, mut visit: impl FnMut(&str, BorrowedFd<'_>)) {
    let Ok(listing) = rustix::fs::openat(proc, ".", DIRECTORY, Mode::empty()) else { return };
    let Ok(entries) = rustix::fs::Dir::read_from(&listing) else { return };
    for entry in entries.flatten() {
        let Ok(pid) = entry.file_name().to_str() else { continue };
        if pid.bytes().all(|byte| byte.is_ascii_digit())
            && let Ok(process) = rustix::fs::openat(proc, pid, DIRECTORY, Mode::empty())
        {
            visit(pid, process.as_fd());
        }
    }
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
    /// Directories that could not be looked at: too deep, or closed to us.
    pub(crate) n_hidden: u64,
}

/// Adds up trees and files without following links, and what the cell's processes hold open of them after
/// removing its name.
pub(crate) fn disk_use(roots: &[PathBuf], proc: Option<BorrowedFd<'_>>) -> DiskUse {
    let mut sum = DiskUse::default();
    let mut devices = BTreeSet::new();
    for root in roots {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let Ok(root) = rustix::fs::open(root, flags, Mode::empty()) else { continue };
        let Ok(stat) = rustix::fs::fstat(&root) else { continue };
        devices.insert(stat.st_dev);
        sum.bytes += u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            add_directory(&root, &mut sum, DEPTH_MAX);
        }
    }
    if let Some(proc) = proc {
        let mut seen = BTreeSet::new();
        each_process(proc, |_, process| add_nameless(process, &devices, &mut seen, &mut sum));
    }
    sum
}

/// One descriptor is open for each level.
const DEPTH_MAX: u32 = 200;

fn add_directory(directory: &OwnedFd, sum: &mut DiskUse, depth: u32) {
    let Ok(entries) = rustix::fs::Dir::read_from(directory) else {
        sum.n_hidden += 1;
        return;
    };
    for entry in entries.flatten() {
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name == "." || name == ".." {
            continue;
        }
        let Ok(stat) = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
        sum.n_files += 1;
        sum.bytes += u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            match rustix::fs::openat(directory, name, DIRECTORY, Mode::empty()) {
                Ok(below) if depth > 0 => add_directory(&below, sum, depth - 1),
                // Gone since it was looked at, or something else by now, is not hidden.
                Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR | rustix::io::Errno::LOOP) => {}
                _ => sum.n_hidden += 1,
            }
        }
    }
}

/// Files without a name that a process of the cell holds open on these devices, each once.
fn add_nameless(process: BorrowedFd<'_>, devices: &BTreeSet<u64>, seen: &mut BTreeSet<u64>, sum: &mut DiskUse) {
    // Of each thread: they need not share their descriptors, and the first may have ended.
    let Ok(tasks) = rustix::fs::openat(process, "task", DIRECTORY, Mode::empty()) else { return };
    let Ok(threads) = rustix::fs::Dir::read_from(&tasks) else { return };
    for thread in threads.flatten() {
        let Ok(thread) = rustix::fs::openat(&tasks, thread.file_name(), DIRECTORY, Mode::empty()) else { continue };
        add_nameless_of(thread.as_fd(), devices, seen, sum);
    }
}

fn add_nameless_of(thread: BorrowedFd<'_>, devices: &BTreeSet<u64>, seen: &mut BTreeSet<u64>, sum: &mut DiskUse) {
    let Ok(fds) = rustix::fs::openat(thread, "fd", DIRECTORY, Mode::empty()) else { return };
    let Ok(entries) = rustix::fs::Dir::read_from(&fds) else { return };
    for entry in entries.flatten() {
        let Ok(stat) = rustix::fs::statat(&fds, entry.file_name(), AtFlags::empty()) else { continue };
        if stat.st_nlink == 0 && devices.contains(&stat.st_dev) && seen.insert(stat.st_ino) {
            sum.n_files += 1;
            sum.bytes += u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        }
    }
}
