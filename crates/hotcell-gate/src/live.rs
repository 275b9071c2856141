//! Cells that are alive: who supervises them, and what to clear away if nobody does any more.
//!
//! A process is known by its pid, the moment it started and the boot it started in; a pid alone may
//! be somebody else's by now.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use hotcell_base::{ExactPath, RunId};
use hotcell_cell::host::start_time;
use serde::{Deserialize, Serialize};

use crate::home::Home;
use crate::plain;
use crate::record::{RecordError, replace, replace_durably};

/// A process, named so that another can never be taken for it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ProcessName {
    /// Its pid.
    pub pid: u32,
    /// When it started, in ticks since boot.
    pub start_time: u64,
    /// Which boot.
    pub boot_id: String,
    /// The pid namespace in which this is its pid: seen from another one, it may be anybody.
    #[serde(default)]
    pub pid_namespace: u64,
}

impl ProcessName {
    /// This process.
    pub fn own() -> ProcessName {
        static OWN: OnceLock<ProcessName> = OnceLock::new();
        let own = OWN.get_or_init(|| {
            let pid = std::process::id();
            let pid_namespace = fs::metadata("/proc/self/ns/pid").map(|file| file.ino()).unwrap_or(0);
            ProcessName { pid, start_time: start_time(pid).unwrap_or(0), boot_id: boot_id(), pid_namespace }
        });
        own.clone()
    }

    /// The process in a file's name: `<pid>-<start time>-<pid namespace>`.
    pub fn file_name(&self) -> String {
        format!("{}-{}-{}", self.pid, self.start_time, self.pid_namespace)
    }

    /// A process of this boot, from a file's name.
    pub(crate) fn parse(text: &str) -> Option<ProcessName> {
        let numbers: Vec<u64> = text.split('-').map(|part| part.parse().ok()).collect::<Option<_>>()?;
        let [pid, start_time, pid_namespace] = numbers[..] else { return None };
        Some(ProcessName { pid: u32::try_from(pid).ok()?, start_time, pid_namespace, ..ProcessName::own() })
    }

    /// Whether that very process still runs. Of one in another pid namespace nobody can say that it does not.
    pub fn is_alive(&self) -> bool {
        self.boot_id == boot_id() && (self.is_foreign() || start_time(self.pid) == Some(self.start_time))
    }

    /// As [`ProcessName::is_alive`], where that process holds a lock on this directory while it lives: that is seen
    /// from any pid namespace.
    pub fn is_alive_in(&self, directory: &Path) -> bool {
        self.is_alive() && (!self.is_foreign() || Hold::is_held(directory))
    }

    fn is_foreign(&self) -> bool {
        self.pid_namespace != 0 && self.pid_namespace != ProcessName::own().pid_namespace
    }
}

/// A lock on a directory of the home, which says that whoever works with it lives. It goes with its process.
#[derive(Debug)]
pub(crate) struct Hold {
    // Locked: closing it lets go.
    _directory: File,
}

impl Hold {
    /// Takes it; an error of kind `WouldBlock` if somebody has it.
    pub(crate) fn take(directory: &Path) -> io::Result<Hold> {
        let directory = File::open(directory)?;
        directory.try_lock().map_err(io::Error::from)?;
        Ok(Hold { _directory: directory })
    }

    pub(crate) fn is_held(directory: &Path) -> bool {
        let taken = File::open(directory).map(|directory| directory.try_lock_shared());
        matches!(taken, Ok(Err(fs::TryLockError::WouldBlock)))
    }
}

pub(crate) fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// What is known of a living cell.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LiveCell {
    /// Its run.
    pub run_id: RunId,
    /// The hotcell that supervises it.
    pub supervisor: ProcessName,
    /// The directories its cgroup may consist of.
    pub cgroups: Vec<PathBuf>,
    /// Places for decoys of control files in directories it writes.
    #[serde(default)]
    pub placeholders: Vec<ExactPath>,
}

impl LiveCell {
    fn path(home: &Home, id: &RunId) -> PathBuf {
        home.cells().join(format!("{id}.json"))
    }

    pub(crate) fn write(&self, home: &Home) -> Result<(), RecordError> {
        let text = serde_json::to_vec_pretty(self).expect("plain data");
        let path = LiveCell::path(home, &self.run_id);
        // Placeholders stay on the disk; a power cut must not take the word of them away alone.
        if self.placeholders.is_empty() { replace(&path, &text) } else { replace_durably(&path, &text) }
    }

    /// Whether its hotcell lives.
    pub fn is_alive(&self, home: &Home) -> bool {
        self.supervisor.is_alive_in(&home.runs().join(self.run_id.as_str()))
    }

    /// The living cell of a run.
    pub fn find(home: &Home, id: &RunId) -> Option<LiveCell> {
        LiveCell::read(&LiveCell::path(home, id))
    }

    /// Reads a record of a living cell; nothing but a regular file of a sane size is one.
    pub(crate) fn read(path: &Path) -> Option<LiveCell> {
        let file = plain::open(path).ok()?;
        let mut text = Vec::new();
        file.take(1 << 20).read_to_end(&mut text).ok()?;
        serde_json::from_slice(&text).ok()
    }

    pub(crate) fn forget(home: &Home, id: &RunId) {
        // A file that cannot be removed is found and judged by the next sweep.
        let _swept_later = fs::remove_file(LiveCell::path(home, id));
    }
}
