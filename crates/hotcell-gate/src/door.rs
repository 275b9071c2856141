//! The door itself: lets a planned cell run, and records it before, while and after.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use hotcell_base::text::shown;
use hotcell_base::{Outcome, RunId};
use hotcell_cell::changes::{Changes, Layer};
use hotcell_cell::plan::Workspace;
use hotcell_cell::run::{Spawned, Traces};
use hotcell_cell::{Observer, Plan, RemoteEnd, Report, RunError, Stdin, Stream};
use jiff::Timestamp;

use crate::diff;
use crate::home::Home;
use crate::live::{Hold, LiveCell, ProcessName};
use crate::queue::Turn;
use crate::record::{Record, RecordError, Runs, WorkspaceRecord, replace};

/// A request to run something.
#[derive(Debug, Default)]
pub struct Request {
    /// Where its input comes from.
    pub stdin: Stdin,
    /// A name to find it by.
    pub name: Option<String>,
    /// Labels to find it by.
    pub labels: std::collections::BTreeMap<String, String>,
}

/// Sees a run's output as it comes.
pub trait Viewer {
    /// Every wall stands and the command is about to begin.
    fn started(&mut self, _run: &RunId) {}
    /// Output that was kept.
    fn output(&mut self, stream: Stream, bytes: &[u8]);
    /// Whether more can be shown now.
    fn ready(&mut self) -> bool {
        true
    }
}

/// Why a run was not let in or could not be finished.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// It cannot be recorded, so it does not run.
    #[error("the run cannot be recorded")]
    Record(#[from] RecordError),
    /// It ran, and how it ended cannot be recorded.
    #[error("the end of run {} cannot be recorded", record.run_id)]
    Unrecorded {
        /// What should be on record.
        record: Box<Record>,
        /// What went wrong.
        source: RecordError,
    },
    /// It did not get its turn.
    #[error("the run did not get its turn to start")]
    Turn {
        /// Its record.
        record: Box<Record>,
        /// Why not: asked to end, or the queue failed.
        source: io::Error,
    },
    /// The cell failed.
    #[error("cannot run `{command}`")]
    Run {
        /// The command.
        command: String,
        /// Its record, with outcome `platform_error`.
        record: Box<Record>,
        /// What went wrong.
        source: RunError,
    },
}

/// The door of one home.
#[derive(Clone, Debug)]
pub struct Gate {
    home: Home,
    runs: Runs,
}

impl Gate {
    /// The door of this home.
    pub fn of(home: &Home) -> Gate {
        Gate { home: home.clone(), runs: Runs::of(home) }
    }

    /// Runs a plan and leaves `runs/<id>/` behind.
    pub fn run(
        &self,
        plan: &Plan,
        request: Request,
        viewer: &mut dyn Viewer,
        remote: Option<&RemoteEnd>,
    ) -> Result<(Record, Report), GateError> {
        let mut record = self.name(plan, &request)?;
        let hold = Hold::take(&record.artifacts);
        let _hold = hold.map_err(|source| RecordError::Write { path: record.artifacts.clone(), source })?;
        let cell = Live { home: &self.home, id: record.run_id.clone() };
        let mut live = LiveCell {
            run_id: record.run_id.clone(),
            supervisor: ProcessName::own(),
            init_pid: None,
            cgroups: Vec::new(),
            placeholders: Vec::new(),
        };
        // The cell first: a record without an end and without a cell is one whose hotcell is gone.
        live.write(&self.home)?;
        self.runs.write(&record)?;
        let workspace = plan.workspace();
        let turn = Turn::wait(&self.home, remote).map_err(|source| self.never_started(&mut record, source))?;
        let recorder = Recorder::new(&self.home, &mut live, &record.artifacts, workspace, viewer);
        let mut recorder = match recorder {
            Ok(recorder) => recorder,
            Err(error) => {
                record.outcome = Some(Outcome::PlatformError);
                record.ended_at = Some(Timestamp::now());
                record.error = Some(chain(&error));
                // The error that is returned says more than one of writing it down.
                let _said = self.runs.write(&record);
                return Err(error.into());
            }
        };
        recorder.turn = Some(turn);
        let cgroup = format!("hotcell-{}", record.run_id);
        let ran = plan.run_with(&cgroup, request.stdin, &mut recorder, remote);
        drop(recorder);
        record.ended_at = Some(Timestamp::now());
        let result = match ran {
            Ok(report) => {
                record.finish(&report);
                Ok(report)
            }
            Err(error) => {
                record.outcome = Some(Outcome::PlatformError);
                record.error = Some(chain(&error));
                Err(error)
            }
        };
        if let Err(error) = self.runs.write(&record) {
            // The next start says that nobody knows how it ended; that is all that can be said.
            cell.keep();
            return Err(GateError::Unrecorded { record: Box::new(record), source: error });
        }
        // A group the kernel would not let go of yet is the next sweep's; so is its name.
        if live.cgroups.iter().any(|path| path.exists()) {
            cell.keep();
        } else {
            drop(cell);
        }
        if let Err(source) =
            replace(&record.artifacts.join("exit_code.txt"), record.exit_status().to_string().as_bytes())
        {
            return Err(GateError::Unrecorded { record: Box::new(record), source });
        }
        match result {
            Ok(report) => Ok((record, report)),
            Err(source) => {
                let command = record.command.first().cloned().unwrap_or_default();
                Err(GateError::Run { command, record: Box::new(record), source })
            }
        }
    }

    /// Ends a run that did not get its turn.
    fn never_started(&self, record: &mut Record, source: io::Error) -> GateError {
        let asked = source.kind() == io::ErrorKind::Interrupted;
        record.outcome = Some(if asked { Outcome::Killed } else { Outcome::PlatformError });
        record.ended_at = Some(Timestamp::now());
        record.error = Some(format!("it did not get its turn to start: {source}"));
        // The error that is returned says more than one of writing it down.
        let _said = self.runs.write(record);
        GateError::Turn { record: Box::new(record.clone()), source }
    }

    /// Names the run and makes its directory.
    fn name(&self, plan: &Plan, request: &Request) -> Result<Record, RecordError> {
        let started_at = Timestamp::now();
        let (run_id, artifacts) = self.new_directory(started_at)?;
        Ok(Record {
            run_id,
            name: request.name.clone(),
            labels: request.labels.clone(),
            command: plan.argv().iter().map(|argument| shown(argument.as_bytes())).collect(),
            started_at,
            ended_at: None,
            outcome: None,
            exit_code: None,
            signal: None,
            limit: None,
            error: None,
            wall_ms: 0.0,
            cpu_ms: 0.0,
            memory_peak_bytes: 0,
            pids_peak: 0,
            disk_peak_bytes: 0,
            io_read_bytes: 0,
            io_write_bytes: 0,
            stdout_bytes: 0,
            stderr_bytes: 0,
            stdout_truncated: false,
            stderr_truncated: false,
            stdout_sha256: String::new(),
            stderr_sha256: String::new(),
            isolation: None,
            workspace: WorkspaceRecord::of(plan.workspace()),
            artifacts,
        })
    }

    fn new_directory(&self, now: Timestamp) -> Result<(RunId, PathBuf), RecordError> {
        let second = now.strftime("%Y%m%d-%H%M%S").to_string();
        loop {
            let id = RunId::new(&second, random());
            let path = self.runs.directory(&id);
            match fs::DirBuilder::new().mode(0o700).create(&path) {
                Ok(()) => return Ok((id, path)),
                // Another run of this second drew the same letters: draw again.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(source) => return Err(RecordError::Write { path, source }),
            }
        }
    }
}

/// Random bits for a name.
pub(crate) fn random() -> u64 {
    let mut random = [0u8; 8];
    let taken = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty());
    // The kernel gives eight bytes at once or is older than any that can run a cell.
    assert_eq!(taken, Ok(random.len()), "the kernel has random bits");
    u64::from_ne_bytes(random)
}

/// Forgets a living cell when its run is over, however it ends.
struct Live<'a> {
    home: &'a Home,
    id: RunId,
}

impl Live<'_> {
    /// Leaves it on record.
    fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Live<'_> {
    fn drop(&mut self) {
        LiveCell::forget(self.home, &self.id);
    }
}

/// Writes the logs.
struct Recorder<'a> {
    home: &'a Home,
    live: &'a mut LiveCell,
    artifacts: &'a Path,
    workspace: Option<&'a Workspace>,
    stdout: File,
    stderr: File,
    viewer: &'a mut dyn Viewer,
    /// Held until the cell stands.
    turn: Option<Turn>,
}

impl<'a> Recorder<'a> {
    fn new(
        home: &'a Home,
        live: &'a mut LiveCell,
        artifacts: &'a Path,
        workspace: Option<&'a Workspace>,
        viewer: &'a mut dyn Viewer,
    ) -> Result<Recorder<'a>, RecordError> {
        let log = |name: &str| {
            let path = artifacts.join(name);
            File::create(&path).map_err(|source| RecordError::Write { path, source })
        };
        let (stdout, stderr) = (log("stdout.log")?, log("stderr.log")?);
        Ok(Recorder { home, live, artifacts, workspace, stdout, stderr, viewer, turn: None })
    }
}

impl Observer for Recorder<'_> {
    fn preparing(&mut self, traces: &Traces<'_>) -> io::Result<()> {
        self.live.cgroups = traces.cgroups.to_vec();
        self.live.placeholders = traces.placeholders.iter().map(|path| path.as_path().into()).collect();
        self.live.write(self.home).map_err(io::Error::other)
    }

    fn spawned(&mut self, cell: &Spawned<'_>) -> io::Result<()> {
        self.live.init_pid = Some(cell.init_pid);
        self.live.cgroups = cell.cgroups.to_vec();
        self.live.write(self.home).map_err(io::Error::other)
    }

    fn proven(&mut self) {
        self.turn = None;
        self.viewer.started(&self.live.run_id);
    }

    fn output(&mut self, stream: Stream, bytes: &[u8]) -> io::Result<()> {
        match stream {
            Stream::Stdout => self.stdout.write_all(bytes)?,
            Stream::Stderr => self.stderr.write_all(bytes)?,
        }
        self.viewer.output(stream, bytes);
        Ok(())
    }

    fn changed(&mut self, changes: &Changes, layer: &Layer) -> io::Result<()> {
        match self.workspace {
            Some(workspace) => diff::keep(self.artifacts, &self.live.run_id, workspace, changes, layer),
            None => Ok(()),
        }
    }

    fn ready(&mut self) -> bool {
        self.viewer.ready()
    }
}

/// An error and its causes on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
