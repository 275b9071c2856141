//! Records: what is known of each run, on disk and in `--json`.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use hotcell_base::text::{shown, shown_path};
use hotcell_base::{LeaseId, Outcome, RunId};
use hotcell_cell::changes::{Change, Changes};
use hotcell_cell::plan::Workspace;
use hotcell_cell::report::{ControlAttempt, Isolation};
use hotcell_cell::{Mode, Report, Standing};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::authority;
use crate::home::Home;
use crate::live::ProcessName;
use crate::plain;

/// So many changes are in the record; the diff has all of them.
pub const CHANGES_RECORDED_MAX: usize = 10_000;
/// And so many control files that were made, or tried to be.
pub const CONTROL_RECORDED_MAX: usize = 1_000;

/// All that is known of a run. This is `meta.json` and what `--json` prints.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Record {
    /// Its name on disk.
    pub run_id: RunId,
    /// A name given by the user.
    pub name: Option<String>,
    /// Labels given by the user.
    pub labels: BTreeMap<String, String>,
    /// The command; bytes that are no text are shown as escapes.
    pub command: Vec<String>,
    /// When the run was let in.
    pub started_at: Timestamp,
    /// When it was over.
    pub ended_at: Option<Timestamp>,
    /// How it ended; none while it runs.
    pub outcome: Option<Outcome>,
    /// The command's exit code.
    pub exit_code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// The limit that ended it.
    pub limit: Option<String>,
    /// The reason in words, where there is more to say.
    pub error: Option<String>,
    /// Wall-clock time.
    pub wall_ms: f64,
    /// Processor time of the tree.
    pub cpu_ms: f64,
    /// Most memory at one time.
    pub memory_peak_bytes: u64,
    /// Most processes and threads at one time.
    pub pids_peak: Option<u64>,
    /// Most bytes written at one time, as far as it was seen.
    pub disk_peak_bytes: u64,
    /// Read from storage.
    pub io_read_bytes: u64,
    /// Written to storage.
    pub io_write_bytes: u64,
    /// Bytes that came on stdout.
    pub stdout_bytes: u64,
    /// Bytes that came on stderr.
    pub stderr_bytes: u64,
    /// Whether some of stdout was not kept.
    pub stdout_truncated: bool,
    /// Whether some of stderr was not kept.
    pub stderr_truncated: bool,
    /// SHA-256 of everything that came on stdout.
    pub stdout_sha256: String,
    /// SHA-256 of everything that came on stderr.
    pub stderr_sha256: String,
    /// The walls.
    pub isolation: Option<IsolationRecord>,
    /// The workspace and what changed in it; mode `none` where there is no workspace.
    pub workspace: WorkspaceRecord,
    /// What it began from, if that is a template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<TemplateRecord>,
    /// Whether it is a run, a session, or a command in one.
    #[serde(default)]
    pub kind: Kind,
    /// The session it ran in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<RunId>,
    /// The lease it ran under.
    #[serde(default)]
    pub lease_id: Option<LeaseId>,
    /// What it ran for.
    #[serde(default)]
    pub intent_id: Option<String>,
    /// The attempt it was, if the caller named it.
    #[serde(default)]
    pub attempt_id: Option<String>,
    /// The digest of the policy.
    #[serde(default)]
    pub policy_digest: String,
    /// The digest of the plan.
    #[serde(default)]
    pub plan_digest: String,
    /// The ledger it is told in.
    #[serde(default)]
    pub ledger: String,
    /// Wall-clock time in seconds.
    #[serde(default)]
    pub duration_s: f64,
    /// The directory with the logs and this file.
    pub artifacts: PathBuf,
}

/// What a run began from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TemplateRecord {
    /// The program.
    pub name: String,
    /// Modules that were loaded already.
    pub imports: Vec<String>,
    /// What it draws from at random.
    pub seed: u64,
    /// SHA-256 of what was in memory.
    #[serde(default)]
    pub sha256: String,
}

/// What a record is of.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A command in a cell of its own.
    #[default]
    Run,
    /// A cell that stays.
    Session,
    /// A command in one that stays.
    Exec,
    /// A program that was loaded for others to begin from.
    Template,
}

/// The walls of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct IsolationRecord {
    /// The kind of cell.
    pub tier: String,
    /// How each wall stood: `proven`, `watched` or `missing`.
    pub walls: BTreeMap<String, String>,
    /// The user id outside.
    pub id_outside: u32,
}

/// The workspace of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct WorkspaceRecord {
    /// Where it is.
    pub path: Option<String>,
    /// How it appeared inside.
    pub mode: String,
    /// What a copy-on-write run would change.
    pub changed: Vec<ChangeRecord>,
    /// How many changes are known; the diff has all of them.
    #[serde(default)]
    pub changed_count: u64,
    /// Whether more changed than is listed here.
    pub changed_truncated: bool,
    /// Whether more changed than is known at all. Such a diff is not applied.
    #[serde(default)]
    pub changed_unknown: bool,
    /// Control files the command made, or tried to.
    #[serde(default)]
    pub control_attempts: Vec<ControlRecord>,
}

/// A control file the command made, or tried to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ControlRecord {
    /// Inside; bytes that are no text are shown as escapes.
    pub path: String,
    /// Whether it was kept away from the host.
    pub blocked: bool,
}

/// One difference of the workspace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeRecord {
    /// Below the workspace; bytes that are no text are shown as escapes.
    pub path: String,
    /// `added`, `modified`, `deleted` or `type_changed`.
    pub kind: String,
}

impl Record {
    /// The exit status of a run, as `hotcell run` passes it on and `exit_code.txt` keeps it.
    pub fn exit_status(&self) -> u8 {
        let signalled = |signal: i32| u8::try_from(128 + signal).unwrap_or(255);
        match self.outcome {
            Some(Outcome::Exited) => self.exit_code.and_then(|code| u8::try_from(code).ok()).unwrap_or(255),
            Some(Outcome::Signaled) => signalled(self.signal.unwrap_or(9)),
            Some(Outcome::Timeout) => 124,
            Some(Outcome::PolicyDenied | Outcome::NotExecutable) => 126,
            Some(Outcome::NotFound) => 127,
            Some(
                Outcome::Oom
                | Outcome::Pids
                | Outcome::Disk
                | Outcome::OutputLimit
                | Outcome::Killed
                | Outcome::LeaseExpired
                | Outcome::LeaseRevoked,
            ) => 137,
            Some(Outcome::PlatformError | Outcome::Unknown) | None => 125,
        }
    }

    pub(crate) fn finish(&mut self, report: &Report) {
        let ms = |time: std::time::Duration| (time.as_secs_f64() * 1e6).round() / 1e3;
        self.outcome = Some(report.outcome);
        self.exit_code = report.exit_code;
        self.signal = report.signal;
        self.limit = report.limit.map(word);
        self.error = report.detail.clone();
        self.wall_ms = ms(report.wall);
        self.duration_s = self.wall_ms / 1e3;
        self.cpu_ms = ms(report.cpu);
        self.memory_peak_bytes = report.memory_peak_bytes;
        self.pids_peak = report.pids_peak;
        self.disk_peak_bytes = report.disk_peak_bytes;
        self.io_read_bytes = report.io_read_bytes;
        self.io_write_bytes = report.io_write_bytes;
        self.stdout_bytes = report.stdout.bytes_total;
        self.stderr_bytes = report.stderr.bytes_total;
        self.stdout_truncated = report.stdout.truncated;
        self.stderr_truncated = report.stderr.truncated;
        self.stdout_sha256 = report.stdout.sha256.clone();
        self.stderr_sha256 = report.stderr.sha256.clone();
        self.isolation = Some((&report.isolation).into());
        self.workspace.left(report.changes.as_ref(), &report.control);
    }

    /// Walls that were not proven, by name.
    pub fn weak_walls(&self) -> Vec<(&str, &str)> {
        let walls = self.isolation.iter().flat_map(|isolation| &isolation.walls);
        let proven = Standing::Proven.to_string();
        walls.filter(|(_, standing)| **standing != proven).map(|(wall, standing)| (&**wall, &**standing)).collect()
    }
}

impl WorkspaceRecord {
    pub(crate) fn of(workspace: Option<&Workspace>) -> WorkspaceRecord {
        WorkspaceRecord {
            path: workspace.map(|workspace| shown(workspace.path.as_os_str().as_bytes())),
            mode: word(workspace.map_or(Mode::None, |workspace| workspace.mode)),
            changed: Vec::new(),
            changed_count: 0,
            changed_truncated: false,
            changed_unknown: false,
            control_attempts: Vec::new(),
        }
    }
}

impl WorkspaceRecord {
    /// Takes down what was left in it.
    pub(crate) fn left(&mut self, changes: Option<&Changes>, control: &[ControlAttempt]) {
        if let Some(changes) = changes {
            self.changed = changes.list.iter().take(CHANGES_RECORDED_MAX).map(ChangeRecord::of).collect();
            self.changed_count = changes.list.len() as u64;
            self.changed_unknown = changes.truncated;
            self.changed_truncated = changes.truncated || changes.list.len() > CHANGES_RECORDED_MAX;
        }
        let attempt = |attempt: &ControlAttempt| ControlRecord {
            path: shown(attempt.path.as_os_str().as_bytes()),
            blocked: attempt.blocked,
        };
        self.control_attempts = control.iter().take(CONTROL_RECORDED_MAX).map(attempt).collect();
    }
}

impl From<&Isolation> for IsolationRecord {
    fn from(isolation: &Isolation) -> IsolationRecord {
        let walls = isolation.walls.iter();
        IsolationRecord {
            tier: isolation.tier.to_owned(),
            walls: walls.map(|(wall, standing)| (wall.name().to_owned(), standing.to_string())).collect(),
            id_outside: isolation.id_outside,
        }
    }
}

impl ChangeRecord {
    fn of(change: &Change) -> ChangeRecord {
        ChangeRecord { path: shown(change.path.as_os_str().as_bytes()), kind: word(change.kind) }
    }
}

/// The word a plain enum is written as.
fn word(value: impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(word)) => word,
        _ => unreachable!("the enums of a record are written as words"),
    }
}

/// The records of a home.
#[derive(Clone, Debug)]
pub struct Runs {
    home: Home,
    directory: PathBuf,
}

/// Why a record cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// No run matches.
    #[error("there is no run `{}`", shown(.0))]
    NotFound(String),
    /// More than one run matches.
    #[error("`{}` may be any of {count} runs, {first} among them", shown(name))]
    Ambiguous {
        /// What was asked for.
        name: String,
        /// How many match.
        count: usize,
        /// One of them.
        first: RunId,
    },
    /// A record cannot be read.
    #[error("cannot read `{}`", shown_path(path))]
    Read {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// What runs are called cannot be looked up.
    #[error("runs cannot be looked up")]
    Store(#[source] Box<hotcell_store::StoreError>),
    /// A record is not one of ours, or is damaged.
    #[error("`{}` is not a record of a run", shown_path(path))]
    Damaged {
        /// Which.
        path: PathBuf,
        /// What is wrong in it.
        source: serde_json::Error,
    },
    /// A record cannot be written.
    #[error("cannot write `{}`", shown_path(path))]
    Write {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

impl RecordError {
    /// Whether there is none, and not one that cannot be read.
    pub(crate) fn is_absence(&self) -> bool {
        matches!(self, RecordError::Read { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

impl Runs {
    /// The records of this home.
    pub fn of(home: &Home) -> Runs {
        Runs { home: home.clone(), directory: home.runs() }
    }

    /// Where a run's files are.
    pub fn directory(&self, id: &RunId) -> PathBuf {
        self.directory.join(id.as_str())
    }

    /// The run with this id, this unique part of an id, or this name (the newest of that name).
    pub fn find(&self, name: &str) -> Result<Record, RecordError> {
        let not_found = || RecordError::NotFound(name.to_owned());
        let read = |id: &RunId| match self.read(id) {
            Err(error) if error.is_absence() => Err(not_found()),
            found => found,
        };
        if let Ok(id) = name.parse::<RunId>() {
            return read(&id);
        }
        let named = authority::store(&self.home).and_then(|store| store.newest_named(name));
        let named = named.map_err(|source| RecordError::Store(Box::new(source)))?;
        if let Some(id) = named.and_then(|id| id.parse().ok()) {
            return read(&id);
        }
        let ids = if name.len() >= 3 { self.ids()? } else { Vec::new() };
        let matches: Vec<&RunId> = ids.iter().filter(|id| id.as_str().contains(name)).collect();
        match matches[..] {
            [] => Err(not_found()),
            [one] => read(one),
            [first, ..] => {
                Err(RecordError::Ambiguous { name: name.to_owned(), count: matches.len(), first: first.clone() })
            }
        }
    }

    /// Removes a run with all its files.
    pub fn remove(&self, id: &RunId) -> Result<(), RecordError> {
        let path = self.directory(id);
        fs::remove_dir_all(&path).map_err(|source| RecordError::Write { path, source })
    }

    /// Every run there are files of, in no order.
    pub fn ids(&self) -> Result<Vec<RunId>, RecordError> {
        let unreadable = |source| RecordError::Read { path: self.directory.clone(), source };
        let entries = fs::read_dir(&self.directory).map_err(unreadable)?;
        Ok(entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect())
    }

    /// What is on record of a run.
    pub fn read(&self, id: &RunId) -> Result<Record, RecordError> {
        let path = self.directory(id).join("meta.json");
        let text = plain::read(&path).map_err(|source| RecordError::Read { path: path.clone(), source })?;
        serde_json::from_slice(&text).map_err(|source| RecordError::Damaged { path, source })
    }

    /// Writes a record so that a reader sees the old one or the new one, never a part; and gives its text.
    pub(crate) fn write(&self, record: &Record) -> Result<Vec<u8>, RecordError> {
        let directory = self.directory(&record.run_id);
        let mut text = serde_json::to_vec_pretty(record).expect("a record is plain data");
        text.push(b'\n');
        replace(&directory.join("meta.json"), &text)?;
        Ok(text)
    }
}

/// Makes a file that nobody looks at before something else says that it is there.
pub(crate) fn write_new(path: &Path, contents: &[u8]) -> Result<(), RecordError> {
    fs::write(path, contents).map_err(|source| RecordError::Write { path: path.to_owned(), source })
}

/// Replaces a file in one step.
pub(crate) fn replace(path: &Path, contents: &[u8]) -> Result<(), RecordError> {
    write_beside(path, contents, false).map_err(|source| RecordError::Write { path: path.to_owned(), source })
}

/// Replaces a file in one step that a power cut does not take back.
pub(crate) fn replace_durably(path: &Path, contents: &[u8]) -> Result<(), RecordError> {
    write_beside(path, contents, true).map_err(|source| RecordError::Write { path: path.to_owned(), source })
}

fn write_beside(path: &Path, contents: &[u8], durably: bool) -> io::Result<()> {
    // The draft says whose it is: left by a crash, it is known to be nobody's.
    let us = ProcessName::own();
    let draft = path.with_extension(format!("{}.tmp", us.file_name()));
    let mut file = fs::File::create(&draft)?;
    file.write_all(contents)?;
    if durably {
        file.sync_all()?;
    }
    fs::rename(&draft, path)?;
    match path.parent() {
        Some(directory) if durably => fs::File::open(directory)?.sync_all(),
        _ => Ok(()),
    }
}
