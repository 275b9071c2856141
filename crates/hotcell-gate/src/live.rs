//! Cells that are alive: who supervises them, and what to clear away if nobody does any more.
//!
//! A process is known by its pid, the moment it started and the boot it started in; a pid alone may
//! be somebody else's by now.

use std::fs;
use std::path::PathBuf;

use hotcell_base::{ExactPath, Outcome, RunId};
use hotcell_cell::run::placeholders;
use serde::{Deserialize, Serialize};

use crate::home::Home;
use crate::record::{RecordError, Runs, replace};

/// A process, named so that another can never be taken for it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ProcessName {
    /// Its pid.
    pub pid: u32,
    /// When it started, in ticks since boot.
    pub start_time: u64,
    /// Which boot.
    pub boot_id: String,
}

impl ProcessName {
    /// This process.
    pub fn own() -> ProcessName {
        let pid = std::process::id();
        ProcessName { pid, start_time: start_time(pid).unwrap_or(0), boot_id: boot_id() }
    }

    /// Whether that very process still runs.
    pub fn is_alive(&self) -> bool {
        self.boot_id == boot_id() && start_time(self.pid) == Some(self.start_time)
    }
}

fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// When a process that is not a zombie started.
fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    if fields.first() == Some(&"Z") {
        return None;
    }
    fields.get(19)?.parse().ok()
}

/// What is known of a living cell.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LiveCell {
    /// Its run.
    pub run_id: RunId,
    /// The hotcell that supervises it.
    pub supervisor: ProcessName,
    /// The cell's init as the host sees it.
    pub init_pid: Option<i32>,
    /// Its cgroup directories.
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
        replace(&LiveCell::path(home, &self.run_id), &text)
    }

    /// The living cell of a run.
    pub fn find(home: &Home, id: &RunId) -> Option<LiveCell> {
        let text = fs::read(LiveCell::path(home, id)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    pub(crate) fn forget(home: &Home, id: &RunId) {
        // A file that cannot be removed is found and judged by the next sweep.
        let _swept_later = fs::remove_file(LiveCell::path(home, id));
    }
}

/// Clears away what crashed hotcells left in this home. Their cells are gone already: a cell's
/// processes end with its supervisor. Returns the runs whose end is not known.
pub fn sweep(home: &Home) -> Vec<RunId> {
    let runs = Runs::of(home);
    let mut unknown = Vec::new();
    for entry in fs::read_dir(home.cells()).into_iter().flatten().flatten() {
        if is_stale_draft(&entry) {
            // Half a record of a hotcell that died while writing it; the whole one, if any, is beside it.
            let _swept_later = fs::remove_file(entry.path());
            continue;
        }
        let cell = fs::read(entry.path()).ok().and_then(|text| serde_json::from_slice::<LiveCell>(&text).ok());
        let Some(cell) = cell.filter(|cell| !cell.supervisor.is_alive()) else { continue };
        let removable: Vec<PathBuf> = cell.cgroups.iter().filter(|path| is_ours(path)).cloned().collect();
        if hotcell_cell::cgroup::remove_all(&removable).is_err() {
            // Still busy or not ours to remove: the file stays, and so does the task.
            continue;
        }
        let places: Vec<PathBuf> = cell.placeholders.iter().map(|path| path.0.clone()).collect();
        if !placeholders::remove(&places).is_empty() {
            // Another cell stands on them.
            continue;
        }
        if let Ok(mut record) = runs.read(&cell.run_id)
            && record.outcome.is_none()
        {
            record.outcome = Some(Outcome::Unknown);
            record.error = Some("hotcell ended before the run did; the cell was killed with it".to_owned());
            if runs.write(&record).is_err() {
                continue;
            }
            unknown.push(cell.run_id.clone());
        }
        LiveCell::forget(home, &cell.run_id);
    }
    unknown
}

/// A draft lives for a moment; one that is a minute old has no writer any more.
fn is_stale_draft(entry: &fs::DirEntry) -> bool {
    let is_draft = entry.path().extension().is_some_and(|extension| extension == "tmp");
    let age = entry.metadata().and_then(|file| file.modified()).ok().and_then(|written| written.elapsed().ok());
    is_draft && age.is_some_and(|age| age > std::time::Duration::from_secs(60))
}

/// A recorded path is only removed if it has the shape of a group we make.
fn is_ours(path: &std::path::Path) -> bool {
    path.starts_with("/sys/fs/cgroup")
        && path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("hotcell-"))
}
