//! The door itself: lets a planned cell run under a lease, and records it before, while and after.
//!
//! ```text
//! permit ─▶ reserve ─▶ name, directory, living cell, record ─▶ told: VERIFIED, STARTED ─▶ the cell runs
//!   │ refused: told      │ made before: its result                                          │ watched: expiry, revocation
//!   ▼                    ▼                                                                   ▼
//! 126                  the stored one          told: FINISHED, TIMEOUT or KILLED ◀─ receipt ◀─ artifacts
//! ```
//!
//! What cannot be told does not run. Killed between any two steps, a run is never started twice under one attempt, and
//! whatever is not known of it is said to be unknown.

use std::cell::{Cell, RefCell};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::time::Duration;

use hotcell_authority::Refusal;
use hotcell_base::text::shown;
use hotcell_base::{LeaseId, Outcome, RunId};
use hotcell_cell::changes::{Changes, Layer};
use hotcell_cell::limits::Limit;
use hotcell_cell::plan::Workspace;
use hotcell_cell::run::Traces;
use hotcell_cell::template::{Template, TemplateError};
use hotcell_cell::{Observer, Plan, RemoteEnd, Report, RunError, Session, Stdin, Stream};
use hotcell_ledger::News;
use hotcell_store::{Reservation, Reserved};
use jiff::{SignedDuration, Timestamp};

use crate::authority::{Authority, AuthorityError};
use crate::diff;
use crate::evidence;
use crate::home::Home;
use crate::lapse::Lapse;
use crate::leases::IssueError;
use crate::live::{Hold, LiveCell, ProcessName};
use crate::permit::{Permission, Permit};
use crate::queue::Turn;
use crate::record::{Kind, Record, RecordError, Runs, TemplateRecord, WorkspaceRecord, write_new};

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
    /// Under what it is to be let in.
    pub permission: Permission,
    /// A name for the attempt: asked for again, its result is given again.
    pub attempt_id: Option<String>,
    /// How long it is to last; its time limit if none.
    pub lasts: Option<Duration>,
}

/// What came of a request.
#[derive(Debug)]
pub struct Ran {
    /// What is on record.
    pub record: Record,
    /// What was measured; none if this attempt was made before, and nothing ran now.
    pub report: Option<Report>,
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
    /// No lease allows it.
    #[error("`{command}` is refused")]
    Refused {
        /// The command.
        command: String,
        /// Why.
        source: Refusal,
    },
    /// It could not issue itself a lease.
    #[error("the run cannot have a lease of its own")]
    Issue(#[from] IssueError),
    /// Nothing can be permitted here.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// The attempt was made before, and is not over or was another.
    #[error("the attempt `{}` was made before, by {run_id}: {problem}", shown(attempt_id))]
    Attempt {
        /// Which.
        attempt_id: String,
        /// By which run.
        run_id: RunId,
        /// What keeps its result away.
        problem: &'static str,
    },
    /// The lease does not leave enough to run anything.
    #[error("the lease leaves too little to run it")]
    TooLittle(#[from] hotcell_cell::limits::LimitTooSmall),
    /// It ran, and how it ended cannot be told to the ledger.
    #[error("the end of run {} cannot be told", record.run_id)]
    Untold {
        /// What is on record.
        record: Box<Record>,
        /// What went wrong.
        source: AuthorityError,
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
#[derive(Debug)]
pub struct Gate {
    home: Home,
    runs: Runs,
    authority: Authority,
}

impl Gate {
    /// Opens the door of this home.
    pub fn open(home: &Home) -> Result<Gate, GateError> {
        Ok(Gate { home: home.clone(), runs: Runs::of(home), authority: Authority::open(home)? })
    }

    /// Who permits.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Runs a plan and leaves `runs/<id>/` behind.
    pub fn run(
        &self,
        plan: &Plan,
        request: Request,
        viewer: &mut dyn Viewer,
        remote: Option<&RemoteEnd>,
    ) -> Result<Ran, GateError> {
        let (admitted, plan) = match self.admit(plan, &request, Kind::Run, None)? {
            Entry::Now(admitted, plan) => (admitted, plan),
            Entry::Before(record) => return Ok(Ran { record: *record, report: None }),
        };
        let (admitted, turn) = admitted.in_turn(remote)?;
        let mut recorder = match admitted.recorder(&plan, viewer) {
            Ok(recorder) => recorder,
            Err(error) => return Err(admitted.unrecordable(error)),
        };
        recorder.turn = Some(turn);
        let ran = plan.run_with(&admitted.group, request.stdin, &mut recorder, remote);
        match recorder.refused.take() {
            Some(error) => Err(admitted.unmade(error)),
            None => admitted.settle(ran),
        }
    }

    /// Runs a command in a session and leaves a `runs/<id>/` of its own behind.
    pub fn exec(
        &self,
        (session, opened): (&mut Session, &Admitted<'_>),
        plan: &Plan,
        request: Request,
        viewer: &mut dyn Viewer,
        remote: Option<&RemoteEnd>,
    ) -> Result<Ran, GateError> {
        let (admitted, plan) = match self.admit(plan, &request, Kind::Exec, Some(opened))? {
            Entry::Now(admitted, plan) => (admitted, plan),
            Entry::Before(record) => return Ok(Ran { record: *record, report: None }),
        };
        let mut recorder = match admitted.recorder(&plan, viewer) {
            Ok(recorder) => recorder,
            Err(error) => return Err(admitted.unrecordable(error)),
        };
        let ran = session.exec_with(&plan, request.stdin, &mut recorder, remote);
        match recorder.refused.take() {
            Some(error) => Err(admitted.unmade(error)),
            None => admitted.settle(ran),
        }
    }

    /// Loads a program to begin from, and leaves a `runs/<id>/` behind as any run does; see [`Template::warm`].
    pub(crate) fn warm(
        &self,
        plan: &Plan,
        memory: File,
        trial: &[&str],
        remote: Option<&RemoteEnd>,
    ) -> Result<Template, GateError> {
        let (admitted, plan) = self.admit(plan, &Request::default(), Kind::Template, None)?.now();
        let (mut admitted, turn) = admitted.in_turn(remote)?;
        let mut nobody = Nobody;
        let mut recorder = match admitted.recorder(&plan, &mut nobody) {
            Ok(recorder) => recorder,
            Err(error) => return Err(admitted.unrecordable(error)),
        };
        recorder.turn = Some(turn);
        // It has no command to be sent: what it loads begins with its cell.
        let warmed = match admitted.open() {
            Ok(()) => Template::warm_as(&plan, &admitted.group, memory, trial, &mut recorder, remote),
            Err(error) => return Err(admitted.unmade(error)),
        };
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
        let (admitted, plan) = self.admit(plan, request, Kind::Session, None)?.now();
        let (mut admitted, turn) = admitted.in_turn(remote)?;
        let mut nobody = Nobody;
        let mut recorder = match admitted.recorder(&plan, &mut nobody) {
            Ok(recorder) => recorder,
            Err(error) => return Err(admitted.unrecordable(error)),
        };
        recorder.turn = Some(turn);
        // Its commands come later, each told by itself.
        let opened = match admitted.open() {
            Ok(()) => Session::open_as((*plan).clone(), &admitted.group, &mut recorder),
            Err(error) => return Err(admitted.unmade(error)),
        };
        match opened {
            Ok(session) => {
                admitted.record.isolation = Some((&session.isolation()).into());
                self.runs.write(&admitted.record)?;
                Ok((session, *admitted))
            }
            Err(error) => Err(admitted.settle(Err(error)).err().unwrap_or_else(|| unreachable!("it failed"))),
        }
    }

    /// Lets a run in: it has a lease, a name and a place. It is put on record and told by [`Admitted::open`].
    fn admit(
        &self,
        plan: &Plan,
        request: &Request,
        kind: Kind,
        session: Option<&Admitted<'_>>,
    ) -> Result<Entry<'_>, GateError> {
        let lasts = request.lasts.unwrap_or(plan.limits().time);
        let lasts = SignedDuration::try_from(lasts).unwrap_or(SignedDuration::MAX);
        let permit = self.authority.permit(plan, &request.permission, lasts)?;
        let (plan, lapse) = Lapse::of(&self.home, &permit, plan.clone(), session)?;
        let mut record = self.name(&plan, request)?;
        record.kind = kind;
        record.session = session.map(|session| session.record.run_id.clone());
        let lease = permit.lease.lease();
        record.lease_id = Some(lease.lease_id.clone());
        record.intent_id.clone_from(&lease.intent_id);
        record.policy_digest.clone_from(&lease.policy_digest);
        record.plan_digest = evidence::plan_digest(&plan);
        record.ledger = self.authority.here().home.clone().unwrap_or_default();
        let request_digest = evidence::request_digest(&plan);
        if let Some(before) = self.reserve(&mut record, request, &permit, &request_digest)? {
            return Ok(Entry::Before(Box::new(before)));
        }
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
        let mut news = permit.news.clone();
        news.push(evidence::started(&record, &plan, &permit, &request_digest));
        let opening = Opening { news: RefCell::new(news), told: Cell::new(None) };
        let admitted = Admitted { gate: self, record, group, live, cell, permit, lapse, opening, _hold: hold };
        Ok(Entry::Now(Box::new(admitted), Box::new(plan)))
    }

    /// Takes one run of the lease, and the attempt's name; if that attempt was made before, what came of it.
    fn reserve(
        &self,
        record: &mut Record,
        request: &Request,
        permit: &Permit,
        digest: &str,
    ) -> Result<Option<Record>, GateError> {
        record.attempt_id.clone_from(&request.attempt_id);
        // A lease that was made for this run alone is used by it alone.
        if permit.is_own && request.attempt_id.is_none() {
            return Ok(None);
        }
        let unmade = |error: GateError| {
            let _gone = fs::remove_dir_all(&record.artifacts);
            error
        };
        let mut leases: Vec<(LeaseId, u32)> = Vec::new();
        if !permit.is_own {
            let lease = permit.lease.lease();
            leases.push((lease.lease_id.clone(), lease.limits.runs_max));
            leases.extend(permit.lease.ancestors().iter().map(|(id, runs_max)| (id.clone(), *runs_max)));
        }
        let wanted = Reservation {
            run_id: &record.run_id,
            attempt_id: request.attempt_id.as_deref(),
            digest,
            leases: &leases,
            now: record.started_at,
        };
        let reserved = self.authority.with_store(|store| store.reserve(&wanted));
        let reserved = reserved.map_err(GateError::from).map_err(unmade)?;
        let refuse = |refusal| {
            let asked = serde_json::json!({ "command": hotcell_ledger::redact::command(&record.command) });
            self.deny(&permit.text, refusal, &asked, &record.command)
        };
        match reserved {
            Reserved::New => Ok(None),
            Reserved::Exhausted(_) => Err(unmade(refuse(Refusal::Exhausted))),
            Reserved::Revoked(_) => Err(unmade(refuse(Refusal::Revoked))),
            Reserved::Before { run_id, digest: before } => {
                let attempt_id = request.attempt_id.clone().unwrap_or_default();
                let problem = |problem| unmade(GateError::Attempt { attempt_id, run_id: run_id.clone(), problem });
                if before != digest {
                    return Err(problem("it was of something else"));
                }
                let stored = self.runs.read(&run_id);
                match stored {
                    Ok(stored) if stored.outcome.is_some() => {
                        let _gone = fs::remove_dir_all(&record.artifacts);
                        Ok(Some(stored))
                    }
                    _ if LiveCell::find(&self.home, &run_id).is_some_and(|cell| cell.is_alive(&self.home)) => {
                        Err(problem("it is still running"))
                    }
                    _ => Err(problem("nobody knows how it ended")),
                }
            }
        }
    }

    /// Tells that a command was refused. That it could not be told would be the worse news.
    fn deny(&self, lease: &[u8], refusal: Refusal, asked: &serde_json::Value, command: &[String]) -> GateError {
        let checked = Err(refusal);
        let told = self.authority.tell(vec![crate::leases::checked_news(lease, &checked, asked)]);
        match (told, checked) {
            (Err(error), _) => error.into(),
            (Ok(_), Err(source)) => {
                GateError::Refused { command: command.first().cloned().unwrap_or_default(), source }
            }
            (Ok(_), Ok(_)) => unreachable!("it was refused"),
        }
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
            lease_id: None,
            intent_id: None,
            attempt_id: None,
            policy_digest: String::new(),
            plan_digest: String::new(),
            ledger: String::new(),
            duration_s: 0.0,
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
    permit: Permit,
    lapse: Lapse,
    opening: Opening,
    _hold: Hold,
}

/// What is told of a run before its command may begin.
#[derive(Debug)]
struct Opening {
    news: RefCell<Vec<News>>,
    /// The last entry of it, once it was told.
    told: Cell<Option<u64>>,
}

/// How a request is let in.
enum Entry<'a> {
    /// To run now, by this plan.
    Now(Box<Admitted<'a>>, Box<Plan>),
    /// It ran before.
    Before(Box<Record>),
}

impl<'a> Entry<'a> {
    /// For what has no attempt's name, and so never was before.
    fn now(self) -> (Box<Admitted<'a>>, Box<Plan>) {
        match self {
            Entry::Now(admitted, plan) => (admitted, plan),
            Entry::Before(_) => unreachable!("an attempt without a name is new"),
        }
    }
}

impl Admitted<'_> {
    /// What is known of it so far.
    pub fn record(&self) -> &Record {
        &self.record
    }

    pub(crate) fn lapse(&self) -> &Lapse {
        &self.lapse
    }

    /// Its lease, and those it was made of, if they were revoked or are over: how it ends.
    pub fn lapsed(&self) -> Option<Outcome> {
        self.lapse.check()
    }

    /// Puts it on record and tells the ledger, once. When this returns, neither can be taken back. Whoever waited for a turn
    /// may have lost the lease meanwhile.
    fn open(&self) -> Result<(), GateError> {
        if self.opening.told.get().is_none() {
            if let Some(refusal) = self.lapse.refusal() {
                let asked = serde_json::json!({ "command": hotcell_ledger::redact::command(&self.record.command) });
                return Err(self.gate.deny(&self.permit.text, refusal, &asked, &self.record.command));
            }
            self.gate.runs.write(&self.record)?;
            let head = self.gate.authority.tell(self.opening.news.take())?;
            self.opening.told.set(Some(head.seq));
        }
        Ok(())
    }

    fn recorder<'a>(&'a self, plan: &'a Plan, viewer: &'a mut dyn Viewer) -> Result<Recorder<'a>, RecordError> {
        Recorder::new(self, plan.workspace(), viewer)
    }

    /// Undoes what was made for a run that was not let begin: nothing is left of it but what was told.
    fn unmade(self, error: GateError) -> GateError {
        let Admitted { record, cell, .. } = self;
        let _gone = fs::remove_dir_all(&record.artifacts);
        drop(cell);
        error
    }

    /// Ends a run whose output cannot be kept before it began.
    fn unrecordable(mut self, error: RecordError) -> GateError {
        self.record.outcome = Some(Outcome::PlatformError);
        self.record.ended_at = Some(Timestamp::now());
        self.record.error = Some(chain(&error));
        // The error that is returned says more than one of writing it down.
        let _said = self.end(Ok(()));
        error.into()
    }

    /// Waits for its turn to start.
    fn in_turn(self: Box<Self>, remote: Option<&RemoteEnd>) -> Result<(Box<Self>, Turn), GateError> {
        match Turn::wait(&self.gate.home, remote) {
            Ok(turn) => Ok((self, turn)),
            Err(source) => Err(self.never_started(source)),
        }
    }

    /// Ends a run that did not get its turn.
    fn never_started(mut self, source: io::Error) -> GateError {
        let asked = source.kind() == io::ErrorKind::Interrupted;
        self.record.outcome = Some(if asked { Outcome::Killed } else { Outcome::PlatformError });
        self.record.ended_at = Some(Timestamp::now());
        self.record.error = Some(format!("it did not get its turn to start: {source}"));
        let record = Box::new(self.record.clone());
        // The error that is returned says more than one of writing it down.
        let _said = self.end(Ok(()));
        GateError::Turn { record, source }
    }

    /// Puts on record how a session ended, and what it left.
    pub fn close(mut self, session: Session, ending: &Ending) -> Result<Record, GateError> {
        let plan = session.plan().clone();
        let mut nobody = Nobody;
        let mut recorder = match self.recorder(&plan, &mut nobody) {
            Ok(recorder) => recorder,
            Err(error) => return Err(self.unrecordable(error)),
        };
        let left = session.close(&mut recorder);
        drop(recorder);
        self.record.ended_at = Some(Timestamp::now());
        let wall = Timestamp::now().duration_since(self.record.started_at);
        self.record.wall_ms = (wall.as_secs_f64() * 1e6).round() / 1e3;
        self.record.duration_s = self.record.wall_ms / 1e3;
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
    fn settle(mut self, ran: Result<Report, RunError>) -> Result<Ran, GateError> {
        self.record.ended_at = Some(Timestamp::now());
        match &ran {
            Ok(report) => {
                self.record.finish(report);
                if self.lapse.shortened && report.outcome == Outcome::Timeout && report.limit == Some(Limit::Time) {
                    self.record.outcome = Some(Outcome::LeaseExpired);
                    self.record.limit = None;
                }
            }
            Err(error) => {
                self.record.outcome = Some(Outcome::PlatformError);
                self.record.error = Some(chain(error));
            }
        }
        let mut report = None;
        let record = self.end(ran.map(|ran| report = Some(ran)))?;
        Ok(Ran { record, report })
    }

    fn end(self, ran: Result<(), RunError>) -> Result<Record, GateError> {
        let Admitted { gate, record, live, cell, permit, opening, .. } = self;
        let key = &gate.authority.ring().key;
        let written = gate.runs.write(&record).and_then(|meta| {
            write_new(&record.artifacts.join("exit_code.txt"), record.exit_status().to_string().as_bytes())?;
            let receipt = evidence::receipt(&record, &meta, &permit.text, opening.told.get(), key).to_text();
            write_new(&record.artifacts.join("receipt.json"), &receipt)?;
            Ok(receipt)
        });
        let receipt = match written {
            Ok(receipt) => hotcell_authority::digest(&receipt),
            Err(source) => {
                // The next start says that nobody knows how it ended; that is all that can be said.
                cell.keep();
                return Err(GateError::Unrecorded { record: Box::new(record), source });
            }
        };
        // One that failed before its command could begin has both to be told.
        let mut news = opening.news.take();
        news.extend(evidence::ended(&record, Some(&receipt), false));
        if let Err(source) = gate.authority.tell(news) {
            // The next start tells it.
            cell.keep();
            return Err(GateError::Untold { record: Box::new(record), source });
        }
        // A group the kernel would not let go of yet is the next sweep's; so is its name.
        if live.cgroups.iter().any(|path| path.exists()) {
            cell.keep();
        } else {
            drop(cell);
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
    admitted: &'a Admitted<'a>,
    workspace: Option<&'a Workspace>,
    stdout: File,
    stderr: File,
    viewer: &'a mut dyn Viewer,
    /// Held until the cell stands.
    turn: Option<Turn>,
    /// Why it was not let begin.
    refused: Option<GateError>,
}

impl<'a> Recorder<'a> {
    fn new(
        admitted: &'a Admitted<'a>,
        workspace: Option<&'a Workspace>,
        viewer: &'a mut dyn Viewer,
    ) -> Result<Recorder<'a>, RecordError> {
        let log = |name: &str| {
            let path = admitted.record.artifacts.join(name);
            File::options().append(true).create(true).open(&path).map_err(|source| RecordError::Write { path, source })
        };
        let (stdout, stderr) = (log("stdout.log")?, log("stderr.log")?);
        Ok(Recorder { admitted, workspace, stdout, stderr, viewer, turn: None, refused: None })
    }
}

impl Observer for Recorder<'_> {
    fn proven(&mut self) {
        self.turn = None;
        self.viewer.started(&self.admitted.record.run_id);
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
            Some(workspace) => {
                let record = &self.admitted.record;
                diff::keep(&record.artifacts, &record.run_id, workspace, changes, layer)
            }
            None => Ok(()),
        }
    }

    fn cleared(&mut self) -> io::Result<()> {
        self.admitted.open().map_err(|error| {
            let text = chain(&error);
            self.refused = Some(error);
            io::Error::other(text)
        })
    }

    fn lapsed(&mut self) -> Option<Outcome> {
        self.admitted.lapse.check()
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
