//! The door itself: lets a planned cell run, and records it before, while and after.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;

use hotcell_base::text::shown;
use hotcell_base::{Outcome, RunId};
use hotcell_cell::changes::{Changes, Layer};
use hotcell_cell::plan::Workspace;
use hotcell_cell::run::Traces;
use hotcell_cell::template::{Template, TemplateError};
use hotcell_cell::{Observer, Plan, RemoteEnd, Report, RunError, Session, Stdin, Stream};
use jiff::Timestamp;

use crate::diff;
use crate::home::Home;
use crate::live::{Hold, LiveCell, ProcessName};
use crate::queue::Turn;
use crate::record::{Kind, Record, RecordError, Runs, TemplateRecord, WorkspaceRecord, replace};

/// A request to run something.
#[derive(Debug, Default)]
pub struct Request {
    /// Where its input comes from.
    pub stdin: Stdin,
    /// A name to find it by.
    pub name: Option<String>,
    /// Labels to find it by.
    pub labels: std::collections::BTreeMap<String, String>,
    /// The template its plan begins from.
    pub template: Option<TemplateRecord>,
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
    /// There is no template to begin from.
    #[error("there is no template to begin from")]
    Warm {
        /// The record of the program that was to be loaded.
        record: Box<Record>,
        /// What went wrong.
        source: TemplateError,
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
        let mut admitted = self.admit(plan, &request, Kind::Run, None)?;
        let turn = Turn::wait(&self.home, remote).map_err(|source| self.never_started(&mut admitted.record, source))?;
        let mut recorder = admitted.recorder(plan, viewer)?;
        recorder.turn = Some(turn);
        let ran = plan.run_with(&admitted.group, request.stdin, &mut recorder, remote);
        drop(recorder);
        admitted.settle(ran)
    }

    /// Runs a command in a session and leaves a `runs/<id>/` of its own behind.
    pub fn exec(
        &self,
        (session, id): (&mut Session, &RunId),
        plan: &Plan,
        request: Request,
        viewer: &mut dyn Viewer,
        remote: Option<&RemoteEnd>,
    ) -> Result<(Record, Report), GateError> {
        let admitted = self.admit(plan, &request, Kind::Exec, Some(id))?;
        let mut recorder = admitted.recorder(plan, viewer)?;
        let ran = session.exec_with(plan, request.stdin, &mut recorder, remote);
        drop(recorder);
        admitted.settle(ran)
    }

    /// Loads a program to begin from, and leaves a `runs/<id>/` behind as any run does; see [`Template::warm`].
    pub(crate) fn warm(
        &self,
        plan: &Plan,
        memory: File,
        trial: &[&str],
        remote: Option<&RemoteEnd>,
    ) -> Result<Template, GateError> {
        let mut admitted = self.admit(plan, &Request::default(), Kind::Template, None)?;
        let turn = Turn::wait(&self.home, remote).map_err(|source| self.never_started(&mut admitted.record, source))?;
        let mut nobody = Nobody;
        let mut recorder = admitted.recorder(plan, &mut nobody)?;
        recorder.turn = Some(turn);
        let warmed = Template::warm_as(plan, &admitted.group, memory, trial, &mut recorder, remote);
        drop(recorder);
        admitted.record.ended_at = Some(Timestamp::now());
        match warmed {
            Ok((template, report)) => {
                admitted.record.finish(&report);
                admitted.record.error = Some("it was loaded, taken down as a template, and ended".to_owned());
                admitted.end(Ok(()))?;
                Ok(template)
            }
            Err(source) => {
                admitted.record.outcome = Some(match &source {
                    TemplateError::Ended { outcome, .. } => *outcome,
                    _ => Outcome::PlatformError,
                });
                admitted.record.error = Some(chain(&source));
                let record = Box::new(admitted.end(Ok(()))?);
                Err(GateError::Warm { record, source })
            }
        }
    }

    /// Opens a session. Its record, which has no end until it is closed, is in `runs/<id>/` as well.
    pub fn open_session(
        &self,
        plan: &Plan,
        request: &Request,
        remote: Option<&RemoteEnd>,
    ) -> Result<(Session, Admitted<'_>), GateError> {
        let mut admitted = self.admit(plan, request, Kind::Session, None)?;
        let turn = Turn::wait(&self.home, remote).map_err(|source| self.never_started(&mut admitted.record, source))?;
        let mut nobody = Nobody;
        let mut recorder = admitted.recorder(plan, &mut nobody)?;
        recorder.turn = Some(turn);
        match Session::open_as(plan.clone(), &admitted.group, &mut recorder) {
            Ok(session) => {
                drop(recorder);
                admitted.record.isolation = Some((&session.isolation()).into());
                self.runs.write(&admitted.record)?;
                Ok((session, admitted))
            }
            Err(error) => {
                drop(recorder);
                Err(admitted.settle(Err(error)).err().unwrap_or_else(|| unreachable!("it failed")))
            }
        }
    }

    /// Puts a run on record before anything of it is made.
    fn admit(
        &self,
        plan: &Plan,
        request: &Request,
        kind: Kind,
        session: Option<&RunId>,
    ) -> Result<Admitted<'_>, GateError> {
        let mut record = self.name(plan, request)?;
        record.kind = kind;
        record.session = session.cloned();
        let hold = Hold::take(&record.artifacts);
        let hold = hold.map_err(|source| RecordError::Write { path: record.artifacts.clone(), source })?;
        let group = format!("hotcell-{}", record.run_id);
        // A command in a session leaves nothing that is not the session's.
        let traces = if kind == Kind::Exec { Traces::default() } else { plan.traces(&group) };
        let live = LiveCell {
            run_id: record.run_id.clone(),
            supervisor: ProcessName::own(),
            cgroups: traces.cgroups,
            placeholders: traces.placeholders.iter().map(|path| path.as_path().into()).collect(),
        };
        let cell = Live { home: &self.home, id: record.run_id.clone() };
        // The cell first: a record without an end and without a cell is one whose hotcell is gone.
        live.write(&self.home)?;
        self.runs.write(&record)?;
        Ok(Admitted { gate: self, record, group, live, cell, _hold: hold })
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
            pids_peak: None,
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
            template: request.template.clone(),
            kind: Kind::Run,
            session: None,
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

/// A run that is on record, and has no end yet.
#[derive(Debug)]
pub struct Admitted<'a> {
    gate: &'a Gate,
    record: Record,
    /// The name of its cgroup.
    group: String,
    live: LiveCell,
    cell: Live<'a>,
    _hold: Hold,
}

impl Admitted<'_> {
    /// What is known of it so far.
    pub fn record(&self) -> &Record {
        &self.record
    }

    fn recorder<'a>(&'a self, plan: &'a Plan, viewer: &'a mut dyn Viewer) -> Result<Recorder<'a>, RecordError> {
        let made = Recorder::new(&self.record, plan.workspace(), viewer);
        if let Err(error) = &made {
            let mut record = self.record.clone();
            record.outcome = Some(Outcome::PlatformError);
            record.ended_at = Some(Timestamp::now());
            record.error = Some(chain(error));
            // The error that is returned says more than one of writing it down.
            let _said = self.gate.runs.write(&record);
        }
        made
    }

    /// Puts on record how a session ended, and what it left.
    pub fn close(mut self, session: Session, ending: &Ending) -> Result<Record, GateError> {
        let plan = session.plan().clone();
        let mut nobody = Nobody;
        let mut recorder = self.recorder(&plan, &mut nobody)?;
        let left = session.close(&mut recorder);
        drop(recorder);
        self.record.ended_at = Some(Timestamp::now());
        let wall = Timestamp::now().duration_since(self.record.started_at);
        self.record.wall_ms = wall.as_secs_f64() * 1e3;
        self.record.outcome = Some(ending.outcome);
        self.record.limit = ending.limit.map(str::to_owned);
        self.record.error.clone_from(&ending.error);
        match &left {
            Ok(left) => self.record.workspace.left(left.changes.as_ref(), &left.control),
            Err(error) => self.record.error = Some(chain(error)),
        }
        self.end(left.map(|_| ()))
    }

    /// Puts on record how it ended.
    fn settle(mut self, ran: Result<Report, RunError>) -> Result<(Record, Report), GateError> {
        self.record.ended_at = Some(Timestamp::now());
        match &ran {
            Ok(report) => self.record.finish(report),
            Err(error) => {
                self.record.outcome = Some(Outcome::PlatformError);
                self.record.error = Some(chain(error));
            }
        }
        let mut report = None;
        let record = self.end(ran.map(|ran| report = Some(ran)))?;
        Ok((record, report.unwrap_or_else(|| unreachable!("it ran"))))
    }

    fn end(self, ran: Result<(), RunError>) -> Result<Record, GateError> {
        let Admitted { gate, record, live, cell, .. } = self;
        if let Err(error) = gate.runs.write(&record) {
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
        let status = record.exit_status().to_string();
        if let Err(source) = replace(&record.artifacts.join("exit_code.txt"), status.as_bytes()) {
            return Err(GateError::Unrecorded { record: Box::new(record), source });
        }
        match ran {
            Ok(()) => Ok(record),
            Err(source) => {
                let command = record.command.first().cloned().unwrap_or_default();
                Err(GateError::Run { command, record: Box::new(record), source })
            }
        }
    }
}

/// How a session ended.
#[derive(Clone, Debug)]
pub struct Ending {
    /// In a word.
    pub outcome: Outcome,
    /// The limit that ended it: `idle` or `life`.
    pub limit: Option<&'static str>,
    /// In words, where there is more to say.
    pub error: Option<String>,
}

/// Sees nothing.
struct Nobody;

impl Viewer for Nobody {
    fn output(&mut self, _: Stream, _: &[u8]) {}
}

/// Random bits, for a name or a seed.
pub fn random() -> u64 {
    let mut random = [0u8; 8];
    let taken = rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty());
    // The kernel gives eight bytes at once or is older than any that can run a cell.
    assert_eq!(taken, Ok(random.len()), "the kernel has random bits");
    u64::from_ne_bytes(random)
}

/// Forgets a living cell when its run is over, however it ends.
#[derive(Debug)]
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
    record: &'a Record,
    workspace: Option<&'a Workspace>,
    stdout: File,
    stderr: File,
    viewer: &'a mut dyn Viewer,
    /// Held until the cell stands.
    turn: Option<Turn>,
}

impl<'a> Recorder<'a> {
    fn new(
        record: &'a Record,
        workspace: Option<&'a Workspace>,
        viewer: &'a mut dyn Viewer,
    ) -> Result<Recorder<'a>, RecordError> {
        let log = |name: &str| {
            let path = record.artifacts.join(name);
            File::options().append(true).create(true).open(&path).map_err(|source| RecordError::Write { path, source })
        };
        let (stdout, stderr) = (log("stdout.log")?, log("stderr.log")?);
        Ok(Recorder { record, workspace, stdout, stderr, viewer, turn: None })
    }
}

impl Observer for Recorder<'_> {
    fn proven(&mut self) {
        self.turn = None;
        self.viewer.started(&self.record.run_id);
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
            Some(workspace) => diff::keep(&self.record.artifacts, &self.record.run_id, workspace, changes, layer),
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
