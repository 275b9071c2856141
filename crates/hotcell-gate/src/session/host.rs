//! The host's side of a session: the process that holds the cell.
//!
//! One thread runs commands, in the order they came; one accepts connections; and each connection has one that listens
//! for signals and for its end. Nothing but the first touches the cell.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use hotcell_base::text::shown;
use hotcell_base::{Outcome, RunId};
use hotcell_cell::{Plan, PlanError, Remote, RemoteEnd, Session, Stdin, Stream, remote};
use rustix::event::{PollFd, PollFlags};

use super::wire::{self, Answer, Ask, Done, ExecRequest, Refusal, Status};
use super::{Claim, Life, SessionError, Sessions, failed};
use crate::door::{Admitted, Ending, Gate, GateError, Ran, Request, Viewer};
use crate::home::Home;
use crate::permit::Permission;
use crate::record::Record;

/// How often a session that has nothing to do looks whether its cell is still there.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// How long to wait before a connection that could not be accepted is tried again.
const ACCEPT_AGAIN: Duration = Duration::from_millis(20);
/// So many connections at one time; more are closed at once.
const CONNECTIONS_MAX: usize = 128;

/// What a host leaves to whoever runs it: showing and explaining.
pub trait Edge {
    /// Shows a command's output on these two, without ever making the host wait; not for longer than somebody is there.
    fn window(&self, stdout: OwnedFd, stderr: OwnedFd, is_gone: Arc<AtomicBool>) -> Box<dyn Window>;
    /// What to try next, and the outcome, of a command that cannot be one.
    fn explain_plan(&self, error: PlanError) -> Refusal;
    /// The same, of one that could not be run.
    fn explain_gate(&self, error: GateError) -> Refusal;
}

/// Shows a command's output.
pub trait Window: Viewer + Send {
    /// Waits until everything is shown.
    fn close(self: Box<Self>);
}

/// Ends a session from elsewhere.
#[derive(Clone, Debug)]
pub struct Stopper(Arc<Shared>);

impl Stopper {
    /// Ends it, and the command that runs in it, now.
    pub fn stop(&self) {
        self.0.stop(Ending { outcome: Outcome::Killed, limit: None, error: None });
    }
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    jobs: Mutex<Sender<Job>>,
    /// The root of what exists inside.
    root: Option<OwnedFd>,
    owner: u32,
    directory: PathBuf,
    /// The host's own that the guest may write to.
    writable: Vec<PathBuf>,
    life: Life,
    born: Instant,
}

#[derive(Debug, Default)]
struct State {
    n_commands: u64,
    /// Since when nothing runs.
    idle_since: Option<Instant>,
    running: Option<(Vec<String>, Remote)>,
    n_waiting: u64,
    n_connections: usize,
    /// Why it ends.
    ending: Option<Ending>,
}

#[derive(Debug)]
enum Job {
    Exec(Box<ExecJob>),
    Stop,
}

#[derive(Debug)]
struct ExecJob {
    request: ExecRequest,
    streams: [OwnedFd; 3],
    socket: OwnedFd,
    remote: (Remote, RemoteEnd),
    progress: Arc<Progress>,
}

/// Where a command is on its way. Whoever changes it first, of its client and the host, has decided.
#[derive(Debug, Default)]
struct Progress {
    step: AtomicU8,
    /// Whether nobody is there any more to see what it writes.
    is_client_gone: Arc<AtomicBool>,
}

const WAITS: u8 = 0;
const BEGAN: u8 = 1;
const FORSAKEN: u8 = 2;

impl Progress {
    /// Whether it was still waiting, and now is not.
    fn decide(&self, step: u8) -> bool {
        self.step.compare_exchange(WAITS, step, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, job: Job) {
        // The receiver is gone when the session is over.
        let _over = self.jobs.lock().unwrap_or_else(PoisonError::into_inner).send(job);
    }

    /// Ends the session, for the first reason given.
    fn stop(&self, ending: Ending) {
        let mut state = self.state();
        state.ending.get_or_insert(ending);
        if let Some((_, remote)) = &state.running {
            remote.kill();
        }
        drop(state);
        self.send(Job::Stop);
    }

    fn life_left(&self) -> Duration {
        self.life.total.saturating_sub(self.born.elapsed())
    }
}

/// Hosts a session until it ends, and gives its record. `ready` is called when commands can come.
pub fn host(
    home: &Home,
    name: &str,
    plan: &Plan,
    labels: std::collections::BTreeMap<String, String>,
    life: Life,
    edge: &dyn Edge,
    ready: impl FnOnce(&Record, Stopper),
) -> Result<Record, SessionError> {
    let claim = Sessions::of(home).claim(name)?;
    let gate = Gate::open(home).map_err(Box::new)?;
    let request = Request { name: Some(name.to_owned()), labels, lasts: Some(life.total), ..Request::default() };
    let (mut session, admitted) = gate.open_session(plan, &request, None).map_err(Box::new)?;
    let id = admitted.record().run_id.clone();
    let listening = listen_at(&claim, &id, &session, life);
    let (shared, to_do) = match listening {
        Ok(listening) => listening,
        Err(error) => {
            let ending = Ending { outcome: Outcome::PlatformError, limit: None, error: Some(error.to_string()) };
            // The error that is returned says more than one of writing it down.
            let _said = admitted.close(session, &ending);
            return Err(error);
        }
    };
    ready(admitted.record(), Stopper(Arc::clone(&shared)));
    let ending = serve((home, &admitted), &mut session, &shared, &to_do, edge);
    // Nobody finds it from here on.
    drop(claim);
    Ok(admitted.close(session, &ending).map_err(Box::new)?)
}

/// Makes a session known, and has a thread accept connections.
fn listen_at(
    claim: &Claim,
    id: &RunId,
    session: &Session,
    life: Life,
) -> Result<(Arc<Shared>, Receiver<Job>), SessionError> {
    let unheard = failed("the session cannot listen");
    let (listener, address, _directory) = wire::socket(&claim.path).map_err(&unheard)?;
    let listening = rustix::net::bind(&listener, &address).and_then(|()| rustix::net::listen(&listener, 64));
    listening.map_err(|errno| unheard(errno.into()))?;
    let (jobs, to_do) = mpsc::channel();
    let root = session.root().map(|root| root.try_clone_to_owned()).transpose().map_err(&unheard)?;
    let shared = Arc::new(Shared {
        state: Mutex::new(State { idle_since: Some(Instant::now()), ..State::default() }),
        jobs: Mutex::new(jobs),
        root,
        owner: session.isolation().id_outside,
        directory: session.plan().cwd().to_owned(),
        writable: session.plan().writable().to_vec(),
        life,
        born: Instant::now(),
    });
    claim.publish(id).map_err(|error| SessionError::Gate(Box::new(error.into())))?;
    let accepting = Arc::clone(&shared);
    let spawned = thread::Builder::new().name("hotcell-accept".to_owned()).spawn(move || accept(&listener, &accepting));
    spawned.map_err(&unheard)?;
    Ok((shared, to_do))
}

/// Runs commands until the session ends: why.
fn serve(
    (home, admitted): (&Home, &Admitted<'_>),
    session: &mut Session,
    shared: &Shared,
    to_do: &Receiver<Job>,
    edge: &dyn Edge,
) -> Ending {
    loop {
        let idle_left = shared.state().idle_since.map(|since| shared.life.idle.saturating_sub(since.elapsed()));
        let wait = idle_left.unwrap_or(LOOK_EVERY).min(LOOK_EVERY).min(shared.life_left());
        match to_do.recv_timeout(wait) {
            Ok(Job::Exec(job)) => {
                shared.state().n_waiting -= 1;
                run((home, admitted), session, shared, *job, edge);
            }
            Ok(Job::Stop) | Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => unreachable!("we hold a sender"),
        }
        let mut state = shared.state();
        let timeout = |limit| Ending { outcome: Outcome::Timeout, limit: Some(limit), error: None };
        if let Some(ending) = state.ending.clone() {
            return ending;
        }
        if shared.life_left().is_zero() {
            return timeout("life");
        }
        if state.n_waiting == 0 && state.idle_since.is_some_and(|since| since.elapsed() >= shared.life.idle) {
            // Whoever comes now comes too late.
            state.ending = Some(timeout("idle"));
            return timeout("idle");
        }
        drop(state);
        if let Some(outcome) = admitted.lapsed() {
            return Ending { outcome, limit: None, error: None };
        }
        if !session.is_alive() {
            let error = Some("its first process was killed".to_owned());
            return Ending { outcome: Outcome::Killed, limit: None, error };
        }
    }
}

fn run(
    (home, admitted): (&Home, &Admitted<'_>),
    session: &mut Session,
    shared: &Shared,
    job: ExecJob,
    edge: &dyn Edge,
) {
    let ExecJob { request, streams, socket, remote: (remote, remote_end), progress } = job;
    if !progress.decide(BEGAN) {
        return;
    }
    let plan = match session.plan().exec(&request.exec(session.plan().limits())) {
        Ok(plan) => plan,
        Err(error) => {
            let _gone = wire::send(&socket, &Answer::Refused(edge.explain_plan(error)), &[]);
            return;
        }
    };
    {
        let mut state = shared.state();
        if state.ending.is_some() {
            return;
        }
        let command = brief(plan.argv());
        state.running = Some((command, remote));
        state.idle_since = None;
        state.n_commands += 1;
    }
    let [stdin, stdout, stderr] = streams;
    let window = edge.window(stdout, stderr, Arc::clone(&progress.is_client_gone));
    let mut pane = Pane { window, socket: &socket };
    let ExecRequest { name, labels, lease, attempt_id, .. } = request;
    let permission = lease.map_or(Permission::Own, |lease| Permission::Lease(lease.into_bytes()));
    let stdin = Stdin::From(stdin);
    let request = Request { stdin, name, labels, permission, attempt_id, ..Request::default() };
    // Opened for each: keys, trust and policy are what they are now.
    let ran =
        Gate::open(home).and_then(|gate| gate.exec((session, admitted), &plan, request, &mut pane, Some(&remote_end)));
    {
        let mut state = shared.state();
        state.running = None;
        state.idle_since = Some(Instant::now());
    }
    let window = pane.window;
    let (end, memory) = match ran {
        Ok(Ran { record, report }) => {
            let done = Done { record, timings_us: report.map(|report| wire::micros(&report.timings)) };
            (Answer::Ended, wire::in_memory(&done).ok())
        }
        Err(error) => (Answer::Refused(edge.explain_gate(error)), None),
    };
    // Whoever reads the output may be slow; the next command is not made to wait for that. Where no thread can be had,
    // the client sees the connection close.
    let _seen_there = thread::Builder::new().name("hotcell-end".to_owned()).spawn(move || {
        window.close();
        let fds: Vec<_> = memory.iter().map(AsFd::as_fd).collect();
        let _gone = wire::send(&socket, &end, &fds);
    });
}

/// A command as it is shown to others: not all of it, if it is long.
fn brief(argv: &[OsString]) -> Vec<String> {
    const LETTERS_MAX: usize = 1000;
    let mut left = LETTERS_MAX;
    let mut words = Vec::new();
    for argument in argv {
        let word = shown(argument.as_bytes());
        if word.len() >= left {
            words.push("…".to_owned());
            break;
        }
        left = left.saturating_sub(word.len() + 1);
        words.push(word);
    }
    words
}

/// Shows output, and says when it begins.
struct Pane<'a> {
    window: Box<dyn Window>,
    socket: &'a OwnedFd,
}

impl Viewer for Pane<'_> {
    fn started(&mut self, run: &RunId) {
        let _gone = wire::send(self.socket, &Answer::Started { run_id: run.clone() }, &[]);
    }

    fn output(&mut self, stream: Stream, bytes: &[u8]) {
        self.window.output(stream, bytes);
    }

    fn ready(&mut self) -> bool {
        self.window.ready()
    }
}

/// Accepts connections until the session's life is over.
fn accept(listener: &OwnedFd, shared: &Arc<Shared>) {
    loop {
        let left = shared.life_left();
        let wait = rustix::event::Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        let mut fds = [PollFd::new(listener, PollFlags::IN)];
        let polled = rustix::event::poll(&mut fds, Some(&wait));
        if shared.life_left().is_zero() {
            return shared.stop(Ending { outcome: Outcome::Timeout, limit: Some("life"), error: None });
        }
        if !matches!(polled, Ok(1..)) {
            continue;
        }
        let flags = rustix::net::SocketFlags::CLOEXEC;
        let Ok(socket) = rustix::net::accept_with(listener, flags) else {
            // For want of descriptors, most likely: there are more when a command has ended.
            thread::sleep(ACCEPT_AGAIN);
            continue;
        };
        if !wire::is_ours(&socket) || shared.state().n_connections >= CONNECTIONS_MAX {
            continue;
        }
        shared.state().n_connections += 1;
        let talking = Arc::clone(shared);
        let spawned = thread::Builder::new().name("hotcell-talk".to_owned()).spawn(move || {
            // Whatever went wrong, the client sees the connection close.
            let _seen_there = talk(socket, &talking);
            talking.state().n_connections -= 1;
        });
        if spawned.is_err() {
            shared.state().n_connections -= 1;
        }
    }
}

fn talk(socket: OwnedFd, shared: &Shared) -> io::Result<()> {
    let Some((ask, mut fds)) = wire::receive::<Ask>(&socket)? else { return Ok(()) };
    match ask {
        Ask::Exec if fds.len() == 4 => {
            let request = wire::from_memory(fds.remove(0))?;
            let streams = <[OwnedFd; 3]>::try_from(fds).map_err(|_| io::Error::other("three streams"))?;
            let (remote, remote_end) = remote()?;
            let progress = Arc::new(Progress::default());
            let job = ExecJob {
                request,
                streams,
                socket: socket.try_clone()?,
                remote: (remote.clone(), remote_end),
                progress: Arc::clone(&progress),
            };
            if let Some(command) = shared.state().running.as_ref().map(|(command, _)| command.clone()) {
                wire::send(&socket, &Answer::Busy { command }, &[])?;
            }
            {
                let mut state = shared.state();
                if state.ending.is_some() {
                    return Ok(());
                }
                state.n_waiting += 1;
                shared.send(Job::Exec(Box::new(job)));
            }
            listen(&socket, &remote, &progress)
        }
        Ask::Root => match &shared.root {
            Some(root) => {
                let directory = shared.directory.as_path().into();
                let writable = shared.writable.iter().map(|path| path.as_path().into()).collect();
                wire::send(&socket, &Answer::Root { owner: shared.owner, directory, writable }, &[root.as_fd()])
            }
            None => Ok(()),
        },
        Ask::Status => wire::send(&socket, &Answer::Status(status(shared)), &[]),
        // The kernel leaves out descriptors that there is no room for.
        Ask::Exec => {
            let chain = vec!["the session's host has too many files open".to_owned()];
            let hint = Some("see what runs: hotcell ls --sessions; then try again".to_owned());
            wire::send(&socket, &Answer::Refused(Refusal { chain, hint, outcome: Outcome::PlatformError }), &[])
        }
        Ask::Signal(_) => Ok(()),
    }
}

/// Passes signals on until the client is gone; then its command ends. One that has not begun never does.
fn listen(socket: &OwnedFd, remote: &Remote, progress: &Progress) -> io::Result<()> {
    while let Ok(Some((ask, _))) = wire::receive::<Ask>(socket) {
        let Ask::Signal(signal) = ask else { continue };
        if progress.decide(FORSAKEN) {
            let chain = vec!["the command was asked to end before it began".to_owned()];
            let refusal = Refusal { chain, hint: None, outcome: Outcome::Killed };
            return wire::send(socket, &Answer::Refused(refusal), &[]);
        }
        remote.signal(signal);
    }
    progress.decide(FORSAKEN);
    progress.is_client_gone.store(true, Ordering::Relaxed);
    remote.kill();
    Ok(())
}

fn status(shared: &Shared) -> Status {
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let state = shared.state();
    Status {
        n_commands: state.n_commands,
        running: state.running.as_ref().map(|(command, _)| command.clone()),
        idle_left_ms: state.idle_since.map(|since| millis(shared.life.idle.saturating_sub(since.elapsed()))),
        life_left_ms: millis(shared.life_left()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_shown_whole_or_cut_short_wherever_its_words_end() {
        let brief =
            |lengths: &[usize]| brief(&lengths.iter().map(|n| OsString::from("x".repeat(*n))).collect::<Vec<_>>());
        assert_eq!(brief(&[3, 5]), ["xxx", "xxxxx"]);
        for long in [&[999, 1][..], &[1000, 1], &[1001], &[500, 499, 1], &[0; 2000]] {
            let shown = brief(long);
            assert_eq!(shown.last().map(String::as_str), Some("…"), "{long:?}");
            assert!(shown.iter().map(|word| word.len() + 1).sum::<usize>() < 1100, "{long:?}");
        }
    }
}
