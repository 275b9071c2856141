//! Limits: what a cell may use, each with a default and a least that makes sense.

use std::time::Duration;

use hotcell_base::units::show_duration;
use hotcell_base::{Bytes, Cpus};
use serde::Serialize;

/// What one run may use. Every field binds; a field at its default binds as well.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Wall-clock time until the tree is killed.
    pub time: Duration,
    /// Share of the machine's processors.
    pub cpus: Cpus,
    /// Processor time of the whole tree.
    pub cpu_time: Option<Duration>,
    /// Memory of the whole tree: its processes, the files it writes, and its share of the page cache.
    pub memory: Bytes,
    /// Processes and threads at one time.
    pub pids: u32,
    /// Open descriptors of one process.
    pub fds: u32,
    /// What is written to the workspace and to `/tmp`, home and `/dev/shm`, together.
    pub disk: Bytes,
    /// What is written to stdout and stderr, together.
    pub output: Bytes,
    /// The size of one file; none leaves it to the disk limit.
    pub file_size: Option<Bytes>,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            time: Duration::from_secs(600),
            cpus: Cpus { milli: 1000 },
            cpu_time: None,
            memory: Bytes::mib(2048),
            pids: 256,
            fds: 1024,
            disk: Bytes::mib(1024),
            output: Bytes::mib(64),
            file_size: None,
        }
    }
}

/// A limit below what any command needs to start.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("the {limit} limit {given} is less than the least that can start a command, {least}")]
pub struct LimitTooSmall {
    /// Which.
    pub limit: &'static str,
    /// What was given.
    pub given: String,
    /// The least that is accepted.
    pub least: String,
}

/// A command that is to have more than the cell it runs in.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("the {limit} limit {given} is not what the session's cell can give, {most}")]
pub struct LimitTooWide {
    /// Which.
    pub limit: &'static str,
    /// What was given.
    pub given: String,
    /// What the cell has.
    pub most: String,
}

const MEMORY_LEAST: Bytes = Bytes::mib(4);
const DISK_LEAST: Bytes = Bytes(256 << 10);
const FDS_LEAST: u32 = 16;

impl Limits {
    /// Refuses limits under which nothing could start.
    pub fn check(&self) -> Result<(), LimitTooSmall> {
        let refuse = |limit, given: String, least: String| Err(LimitTooSmall { limit, given, least });
        if self.memory < MEMORY_LEAST {
            return refuse("memory", self.memory.to_string(), MEMORY_LEAST.to_string());
        }
        if self.disk < DISK_LEAST {
            return refuse("disk", self.disk.to_string(), DISK_LEAST.to_string());
        }
        if self.fds < FDS_LEAST {
            return refuse("fds", self.fds.to_string(), FDS_LEAST.to_string());
        }
        if self.pids == 0 {
            return refuse("pids", "0".to_owned(), "1".to_owned());
        }
        Ok(())
    }

    /// Refuses limits of a command that are wider than those of its cell. The disk is the cell's, whole. Time and output
    /// are each command's own.
    pub(crate) fn within(&self, cell: &Limits) -> Result<(), LimitTooWide> {
        let unlimited = |time: Option<Duration>| time.unwrap_or(Duration::MAX);
        let file_size = |limits: &Limits| limits.file_size.unwrap_or(Bytes(u64::MAX));
        let wider = [
            ("time", self.time > cell.time),
            ("output", self.output > cell.output),
            ("cpus", self.cpus.milli > cell.cpus.milli),
            ("cpu-time", unlimited(self.cpu_time) > unlimited(cell.cpu_time)),
            ("memory", self.memory > cell.memory),
            ("pids", self.pids > cell.pids),
            ("fds", self.fds > cell.fds),
            ("disk", self.disk != cell.disk),
            ("file-size", file_size(self) > file_size(cell)),
        ];
        let Some((limit, _)) = wider.into_iter().find(|(_, is_wider)| *is_wider) else { return Ok(()) };
        let shown = |limits: &Limits| {
            let listed = limits.listed().into_iter().find(|(name, _)| *name == limit);
            listed.map(|(_, value)| value).unwrap_or_default()
        };
        Err(LimitTooWide { limit, given: shown(self), most: shown(cell) })
    }

    /// How many files and directories the disk limit allows: one for each 4 KiB, within reason.
    pub fn inodes(&self) -> u64 {
        (self.disk.0 / 4096).clamp(256, 1 << 20)
    }

    /// Name, value and flag of each limit, as `--explain` shows them.
    pub fn listed(&self) -> Vec<(&'static str, String)> {
        vec![
            ("time", show_duration(self.time)),
            ("cpus", self.cpus.to_string()),
            ("cpu-time", self.cpu_time.map_or_else(|| "none".to_owned(), show_duration)),
            ("memory", self.memory.to_string()),
            ("pids", self.pids.to_string()),
            ("fds", self.fds.to_string()),
            ("disk", format!("{}, {} files", self.disk, self.inodes())),
            ("output", self.output.to_string()),
            ("file-size", self.file_size.unwrap_or(self.disk).to_string()),
        ]
    }
}

/// A limit whose end is a run's end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Limit {
    /// Wall-clock time.
    Time,
    /// Processor time.
    CpuTime,
    /// The share of the processors, of a tree that would not be held to it.
    CpuShare,
    /// Memory.
    Memory,
    /// Processes and threads.
    Pids,
    /// Disk.
    Disk,
    /// Output.
    Output,
    /// The size of one file.
    FileSize,
}
