//! Reports: what happened, measured outside the cell.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use hotcell_base::Outcome;
use serde::Serialize;

use crate::changes::Changes;
use crate::limits::Limit;
use crate::wall::{Standing, Wall};

/// How a run went.
#[derive(Clone, Debug)]
pub struct Report {
    /// The typed way it ended.
    pub outcome: Outcome,
    /// The command's own exit code, if it ended by itself.
    pub exit_code: Option<i32>,
    /// The signal that ended the command, ours or another.
    pub signal: Option<i32>,
    /// The limit that ended the run.
    pub limit: Option<Limit>,
    /// Why, where the outcome alone does not tell.
    pub detail: Option<String>,
    /// From the moment every wall stood until the last process was gone.
    pub wall: Duration,
    /// Processor time of the whole tree.
    pub cpu: Duration,
    /// Most memory used at one time.
    pub memory_peak_bytes: u64,
    /// Most processes and threads at one time, without the cell's own init. Not known of a command in a session that had
    /// no more than one before it.
    pub pids_peak: Option<u64>,
    /// Most bytes written to the workspace and scratch at one time, as far as it was seen.
    pub disk_peak_bytes: u64,
    /// Read from storage.
    pub io_read_bytes: u64,
    /// Written to storage.
    pub io_write_bytes: u64,
    /// What came on stdout.
    pub stdout: Captured,
    /// What came on stderr.
    pub stderr: Captured,
    /// Which walls stood.
    pub isolation: Isolation,
    /// What a copy-on-write workspace would change.
    pub changes: Option<Changes>,
    /// Control files the command made, or tried to.
    pub control: Vec<ControlAttempt>,
    /// Where the time went.
    pub timings: Timings,
}

/// What a session left.
#[derive(Clone, Default, Debug)]
pub struct Aftermath {
    /// What a copy-on-write workspace would change.
    pub changes: Option<Changes>,
    /// Control files its commands made, or tried to.
    pub control: Vec<ControlAttempt>,
}

/// A control file the command made, or tried to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ControlAttempt {
    /// Inside.
    pub path: PathBuf,
    /// Whether it was kept away from the host.
    pub blocked: bool,
}

/// The walls of a finished run.
#[derive(Clone, Debug, Serialize)]
pub struct Isolation {
    /// What kind of cell: always said, never implied.
    pub tier: &'static str,
    /// How each wall that was asked for stood.
    pub walls: BTreeMap<Wall, Standing>,
    /// The user id the command had outside.
    pub id_outside: u32,
}

/// One stream of output.
#[derive(Clone, Default, Debug)]
pub struct Captured {
    /// All bytes that came.
    pub bytes_total: u64,
    /// Whether some of them were not kept, because of the output limit.
    pub truncated: bool,
    /// SHA-256 of all bytes that came, kept or not, in hexadecimal.
    pub sha256: String,
    /// The bytes that were kept, unless an observer took them.
    pub kept: Vec<u8>,
}

impl Captured {
    /// The kept bytes as text, with replacement characters where they are none.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.kept).into_owned()
    }
}

/// Where the time of a run went.
#[derive(Clone, Copy, Default, Debug)]
pub struct Timings {
    /// Making the cgroup, starting the spawner and writing the program.
    pub prepare: Duration,
    /// Building and proving the walls.
    pub walls: Duration,
    /// The command itself.
    pub run: Duration,
    /// Reading counters, listing changes, removing the cell.
    pub collect: Duration,
}
