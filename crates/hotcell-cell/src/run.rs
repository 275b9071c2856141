//! The supervisor: starts a planned cell, watches it, ends it, and reports.
//!
//! ```text
//! prepare (cgroup, spawner, program) ─▶ walls (built and proven by the stub) ─▶ run ─▶ collect
//!                                                                              │
//!      one loop over: control socket, stdout, stderr, stdin, remote, tick ◀────┘
//! ```
//!
//! The loop never blocks on anything but its own poll, so a limit is enforced whatever the command
//! does and however slowly its output is taken. To kill is to kill the cell's pid 1 and its cgroup:
//! the kernel ends every process with it, and the run is over only when they are gone.
//!
//! Not here: files and names of runs (`hotcell-gate`), what to do about the outcome (the caller).

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use hotcell_base::Outcome;
use hotcell_sys::program::Image;
use hotcell_sys::spawner::{Event, Spawner, Usage, os_error};
use hotcell_sys::wire;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::OFlags;
use rustix::process::Signal;
use sha2::{Digest, Sha256};

use crate::cgroup::{Group, NoGroup, Sample};
use crate::changes::{self, Changes};
use crate::launch::{self, Label, Making};
use crate::limits::{Limit, Limits};
use crate::plan::{ID_FIRST, Identity, Mode, Plan};
use crate::report::{Captured, Isolation, Report, Timings};
use crate::wall::{Standing, Wall};
use crate::watch::{self, DiskUse};

/// Why a run did not happen or could not be finished.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// A wall did not go up, or did not hold when it was tried.
    #[error("the wall `{wall}` does not stand: {what}")]
    Wall {
        /// Which.
        wall: Wall,
        /// The step that failed.
        what: String,
        /// What the kernel said; none if a call succeeded that must not.
        source: Option<io::Error>,
    },
    /// The required cgroup cannot be had.
    #[error("the wall `cgroup` cannot stand here")]
    Cgroup(#[source] NoGroup),
    /// The working directory is not there inside.
    #[error("the working directory `{path}` is not there inside the cell")]
    WorkingDirectory {
        /// Which.
        path: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// The machine failed us.
    #[error("{what}")]
    Platform {
        /// What could not be done.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

/// Where a command's input comes from.
#[derive(Debug, Default)]
pub enum Stdin {
    /// Nowhere: it ends at once.
    #[default]
    Null,
    /// From here, copied through a pipe: a cell never holds a descriptor of a host's file.
    From(OwnedFd),
}

/// Which of the two streams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Sees a run as it happens.
pub trait Observer {
    /// The cell exists: whoever finds these after a crash may remove them.
    fn spawned(&mut self, _cell: &Spawned<'_>) -> io::Result<()> {
        Ok(())
    }

    /// Every wall stands and the command is about to begin.
    fn proven(&mut self) {}

    /// Output that is kept, as it comes. An error ends the run.
    fn output(&mut self, stream: Stream, bytes: &[u8]) -> io::Result<()>;

    /// Whether more can be taken now; while not, the command waits, and its limits go on.
    fn ready(&mut self) -> bool {
        true
    }
}

/// A cell that just came to be.
#[derive(Debug)]
pub struct Spawned<'a> {
    /// The spawner's pid.
    pub spawner_pid: u32,
    /// The pid of the cell's init.
    pub init_pid: i32,
    /// Its cgroup directories.
    pub cgroups: &'a [std::path::PathBuf],
}

/// Keeps output in memory.
#[derive(Default)]
struct Memory {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

impl Observer for Memory {
    fn output(&mut self, stream: Stream, bytes: &[u8]) -> io::Result<()> {
        match stream {
            Stream::Stdout => self.stdout.extend_from_slice(bytes),
            Stream::Stderr => self.stderr.extend_from_slice(bytes),
        }
        Ok(())
    }
}

/// Steers a run from elsewhere: another thread, a signal handler.
#[derive(Clone, Debug)]
pub struct Remote(std::sync::Arc<OwnedFd>);

/// The end of a [`Remote`] that a run listens to.
#[derive(Debug)]
pub struct RemoteEnd(OwnedFd);

/// Makes both ends.
pub fn remote() -> io::Result<(Remote, RemoteEnd)> {
    let (reader, writer) =
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC | rustix::pipe::PipeFlags::NONBLOCK)?;
    Ok((Remote(std::sync::Arc::new(writer)), RemoteEnd(reader)))
}

impl Remote {
    /// Passes a signal on to the command; if it has not ended [`GRACE`] later, it is killed. A second signal kills at once.
    pub fn signal(&self, signal: u8) {
        // A full pipe holds more signals than any run needs; a closed one means the run is over.
        let _over = rustix::io::write(&*self.0, &[signal]);
    }

    /// Ends the run now.
    pub fn kill(&self) {
        self.signal(KILL_NOW);
    }
}

const KILL_NOW: u8 = 0;
/// How long a command that was asked to end may take.
pub const GRACE: Duration = Duration::from_secs(2);
/// How often counters are read.
const TICK: Duration = Duration::from_millis(20);
/// Adding up what is written in place may take one part in so many of the time.
const SCAN_SHARE: u32 = 20;

impl Plan {
    /// Runs the command without input and keeps its output in memory.
    pub fn run(&self) -> Result<Report, RunError> {
        let mut memory = Memory::default();
        let mut report = self.run_with("hotcell", Stdin::Null, &mut memory, None)?;
        report.stdout.kept = memory.stdout;
        report.stderr.kept = memory.stderr;
        Ok(report)
    }

    /// Runs the command. `name` begins the name of its cgroup.
    pub fn run_with(
        &self,
        name: &str,
        stdin: Stdin,
        observer: &mut dyn Observer,
        remote: Option<&RemoteEnd>,
    ) -> Result<Report, RunError> {
        let begun = Instant::now();
        let mut spawner = Spawner::start().map_err(platform("the cell's first process cannot be started"))?;
        let id = ID_FIRST + spawner.pid();
        let cgroup = self.cgroup(&format!("{name}-{}", spawner.pid()))?;
        let mut cell = Guard { group: cgroup };

        let mut namespaces = Vec::new();
        for (uid, gid) in launch::owners(self) {
            let made = spawner.user_namespace(&launch::id_map(uid, id), &launch::id_map(gid, id));
            namespaces.push(made.map_err(platform("a map of ids for the workspace cannot be made"))?);
        }
        let pipes = Pipes::new().map_err(platform("pipes cannot be made"))?;
        let owners = launch::owners(self);
        let image = launch::program(self, &Making { id, group: cell.group.as_ref(), owners: &owners }).image();
        let mut inputs: Vec<BorrowedFd<'_>> = pipes.theirs.iter().map(AsFd::as_fd).collect();
        inputs.extend(namespaces.iter().map(AsFd::as_fd));
        spawner.launch(&image, &inputs).map_err(platform("the program of the cell cannot be sent"))?;
        drop(inputs);
        let prepare = begun.elapsed();

        let raised = Instant::now();
        let (init_pid, init, mut exports) = self.wait_for_walls(&mut spawner, &image, cell.group.as_ref(), observer)?;
        drop(namespaces);
        let (proc, scratch) = (exports.pop(), exports.pop());
        let id_outside = match self.identity {
            _ if !self.asks_for(Wall::Id) => self.host.uid,
            Identity::Own { uid, .. } => uid,
            Identity::Fresh => id,
        };
        let isolation = Isolation { tier: "process", walls: self.standing(cell.group.as_ref()), id_outside };
        observer.proven();
        let walls = raised.elapsed();

        let Pipes { ours: [stdin_pipe, stdout, stderr], theirs } = pipes;
        drop(theirs);
        let mut supervisor = Supervisor {
            plan: self,
            spawner,
            image: &image,
            init,
            init_pid,
            group: cell.group.as_ref(),
            proc,
            scratch,
            started: Instant::now(),
            outputs: [Output::new(Stream::Stdout, stdout), Output::new(Stream::Stderr, stderr)],
            input: Input::new(stdin, stdin_pipe),
            kept_bytes: 0,
            ending: None,
            grace_until: None,
            status: None,
            exec_error: None,
            peaks: Peaks::default(),
            paused: false,
            scan: DiskScan::new(self),
        };
        supervisor.supervise(observer, remote)?;
        let run = supervisor.started.elapsed();
        let collecting = Instant::now();
        let (mut report, changes) = supervisor.collect(isolation)?;
        report.changes = changes;
        if let Some(group) = cell.group.take() {
            group.remove().map_err(RunError::Cgroup)?;
        }
        report.wall = run;
        report.timings = Timings { prepare, walls, run, collect: collecting.elapsed() };
        Ok(report)
    }

    fn cgroup(&self, name: &str) -> Result<Option<Group>, RunError> {
        if !self.asks_for(Wall::Cgroup) {
            return Ok(None);
        }
        match Group::create(&self.host.cgroups, name, &self.limits) {
            Ok(group) => Ok(Some(group)),
            Err(error) if self.require.contains(&Wall::Cgroup) => Err(RunError::Cgroup(error)),
            // Held by rlimits and by watching; the report says so.
            Err(_) => Ok(None),
        }
    }

    fn standing(&self, group: Option<&Group>) -> BTreeMap<Wall, Standing> {
        let mut walls = self.walls.clone();
        if self.asks_for(Wall::Cgroup) && group.is_none() {
            walls.insert(Wall::Cgroup, Standing::Watched);
        }
        walls
    }

    /// Waits until every wall stands or one did not.
    fn wait_for_walls(
        &self,
        spawner: &mut Spawner,
        image: &Image<Label>,
        group: Option<&Group>,
        observer: &mut dyn Observer,
    ) -> Result<(i32, OwnedFd, Vec<OwnedFd>), RunError> {
        let mut init = None;
        loop {
            match spawner.next_event().map_err(platform("the cell's first process cannot be heard"))? {
                Some(Event::Spawned { pid, pidfd }) => {
                    let cgroups = group.map(Group::directories).unwrap_or_default();
                    let spawned = Spawned { spawner_pid: spawner.pid(), init_pid: pid, cgroups };
                    observer.spawned(&spawned).map_err(platform("the cell cannot be recorded"))?;
                    init = Some((pid, pidfd));
                }
                Some(Event::Ready(exports)) => match init {
                    Some((pid, pidfd)) => return Ok((pid, pidfd, exports)),
                    None => return Err(out_of_turn()),
                },
                Some(Event::Fault { op, answer }) => return Err(fault(self, image, op, answer)),
                Some(Event::Gone | Event::Ended { .. } | Event::Reaped(_)) | None => return Err(out_of_turn()),
            }
        }
    }
}

fn out_of_turn() -> RunError {
    let source = io::Error::other("it ended before the walls stood");
    RunError::Platform { what: "the cell's first process failed", source }
}

fn platform(what: &'static str) -> impl Fn(io::Error) -> RunError {
    move |source| RunError::Platform { what, source }
}

/// The error for a call that did not answer as it must.
fn fault(plan: &Plan, image: &Image<Label>, op: u64, answer: i64) -> RunError {
    let source = (answer < 0).then(|| os_error(answer));
    let Some((_, label)) = image.label(op) else {
        let (wall, what) = match op {
            wire::OP_CLONE => (clone_wall(plan), "clone3 with new namespaces"),
            wire::OP_FORK => (Wall::Rlimits, "fork of the command's process"),
            _ => (Wall::Root, "mapping the program"),
        };
        return RunError::Wall { wall, what: what.to_owned(), source };
    };
    if label.what == launch::CHDIR {
        let path = hotcell_base::text::shown(std::os::unix::ffi::OsStrExt::as_bytes(plan.cwd.as_os_str()));
        return RunError::WorkingDirectory { path, source: os_error(answer) };
    }
    RunError::Wall { wall: label.wall, what: label.what.clone().into_owned(), source }
}

/// The wall to name when the clone as a whole is refused.
fn clone_wall(plan: &Plan) -> Wall {
    if plan.asks_for(Wall::User) { Wall::User } else { Wall::Mount }
}

/// Removes the cgroup of a run that did not get to its end. Declared before the spawner is dropped,
/// so that the cell is gone by then.
struct Guard {
    group: Option<Group>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(group) = self.group.take() {
            group.kill();
            // What cannot be removed now is found by the next sweep.
            let _swept_later = group.remove();
        }
    }
}

/// The three pipes of a run: our ends (write, read, read) and the cell's.
struct Pipes {
    ours: [OwnedFd; 3],
    theirs: [OwnedFd; 3],
}

impl Pipes {
    fn new() -> io::Result<Pipes> {
        let pipe = || rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC);
        let (stdin_read, stdin_write) = pipe()?;
        let (stdout_read, stdout_write) = pipe()?;
        let (stderr_read, stderr_write) = pipe()?;
        // Only our ends: the flag belongs to the open pipe, and a command expects its own to block.
        for fd in [&stdin_write, &stdout_read, &stderr_read] {
            rustix::fs::fcntl_setfl(fd, rustix::fs::fcntl_getfl(fd)? | OFlags::NONBLOCK)?;
        }
        Ok(Pipes { ours: [stdin_write, stdout_read, stderr_read], theirs: [stdin_read, stdout_write, stderr_write] })
    }
}

/// One stream that comes out.
struct Output {
    stream: Stream,
    pipe: Option<OwnedFd>,
    total: u64,
    truncated: bool,
    hash: Sha256,
}

impl Output {
    fn new(stream: Stream, pipe: OwnedFd) -> Output {
        Output { stream, pipe: Some(pipe), total: 0, truncated: false, hash: Sha256::new() }
    }

    fn captured(&self) -> Captured {
        let sha256 = self.hash.clone().finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Captured { bytes_total: self.total, truncated: self.truncated, sha256, kept: Vec::new() }
    }
}

/// What goes in.
struct Input {
    source: Option<OwnedFd>,
    pipe: Option<OwnedFd>,
    pending: Vec<u8>,
}

impl Input {
    fn new(stdin: Stdin, pipe: OwnedFd) -> Input {
        match stdin {
            Stdin::Null => Input { source: None, pipe: None, pending: Vec::new() },
            Stdin::From(source) => Input { source: Some(source), pipe: Some(pipe), pending: Vec::new() },
        }
    }

    /// Moves what can be moved without waiting; the descriptor polled was ready.
    fn pump(&mut self) {
        if self.pending.is_empty()
            && let Some(source) = &self.source
        {
            let mut buffer = vec![0; CHUNK];
            match rustix::io::read(source, &mut buffer) {
                Ok(0) => self.source = None,
                Ok(n) => {
                    buffer.truncate(n);
                    self.pending = buffer;
                }
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
                // A source that cannot be read any more has ended.
                Err(_) => self.source = None,
            }
        }
        if let (Some(pipe), false) = (&self.pipe, self.pending.is_empty()) {
            match rustix::io::write(pipe, &self.pending) {
                Ok(n) => {
                    self.pending.drain(..n);
                }
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
                // The command closed its stdin; the rest is not wanted.
                Err(_) => self.close(),
            }
        }
        if self.source.is_none() && self.pending.is_empty() {
            self.close();
        }
    }

    fn close(&mut self) {
        *self = Input { source: None, pipe: None, pending: Vec::new() };
    }

    fn pollable(&self) -> Option<PollFd<'_>> {
        if self.pending.is_empty() {
            self.source.as_ref().map(|source| PollFd::new(source, PollFlags::IN))
        } else {
            self.pipe.as_ref().map(|pipe| PollFd::new(pipe, PollFlags::OUT))
        }
    }
}

const CHUNK: usize = 64 << 10;

#[derive(Default)]
struct Peaks {
    memory: u64,
    pids: u64,
    disk: u64,
    cpu: Duration,
}

impl Peaks {
    fn add(&mut self, look: Option<watch::Look>) {
        if let Some(look) = look {
            self.pids = self.pids.max(look.n_tasks);
            self.cpu = self.cpu.max(look.cpu);
        }
    }
}

/// Adds up what is written in place now and then, never taking more than its share of time.
struct DiskScan {
    before: Option<DiskUse>,
    now: DiskUse,
    next: Instant,
}

impl DiskScan {
    fn new(plan: &Plan) -> DiskScan {
        let watched = !plan.writable.is_empty() && plan.asks_for(Wall::Disk);
        let before = watched.then(|| watch::disk_use(&plan.writable));
        DiskScan { before, now: before.unwrap_or_default(), next: Instant::now() }
    }

    /// Bytes and files more than before the run.
    fn growth(&mut self, plan: &Plan) -> DiskUse {
        let Some(before) = self.before else { return DiskUse::default() };
        let now = Instant::now();
        if now >= self.next {
            self.now = watch::disk_use(&plan.writable);
            self.next = Instant::now() + now.elapsed() * SCAN_SHARE;
        }
        DiskUse {
            bytes: self.now.bytes.saturating_sub(before.bytes),
            n_files: self.now.n_files.saturating_sub(before.n_files),
        }
    }
}

struct Supervisor<'a> {
    plan: &'a Plan,
    spawner: Spawner,
    image: &'a Image<Label>,
    init: OwnedFd,
    init_pid: i32,
    group: Option<&'a Group>,
    proc: Option<OwnedFd>,
    scratch: Option<OwnedFd>,
    started: Instant,
    outputs: [Output; 2],
    input: Input,
    kept_bytes: u64,
    /// Why we are ending the run, once we are.
    ending: Option<(Outcome, Option<Limit>)>,
    grace_until: Option<Instant>,
    status: Option<i32>,
    exec_error: Option<io::Error>,
    peaks: Peaks,
    paused: bool,
    scan: DiskScan,
}

impl Supervisor<'_> {
    /// Runs until every process of the cell is gone.
    fn supervise(&mut self, observer: &mut dyn Observer, remote: Option<&RemoteEnd>) -> Result<(), RunError> {
        let mut next_tick = self.started + TICK / 4;
        let deadline = self.started + self.plan.limits.time;
        loop {
            let now = Instant::now();
            if now >= deadline {
                self.end(Outcome::Timeout, Some(Limit::Time));
            }
            if self.grace_until.is_some_and(|until| now >= until) {
                self.end(Outcome::Killed, None);
            }
            if now >= next_tick {
                self.tick();
                next_tick = Instant::now() + TICK;
            }
            let wake = [Some(next_tick), Some(deadline).filter(|_| self.ending.is_none()), self.grace_until];
            let wake = wake.into_iter().flatten().min().unwrap_or(next_tick);
            let ready = self.poll(wake, observer.ready(), remote)?;
            if ready.remote {
                self.remote(remote);
            }
            for idx in 0..2 {
                if ready.outputs[idx] {
                    self.drain(idx, observer, false)?;
                }
            }
            if ready.input {
                self.input.pump();
            }
            if ready.control && self.control()? {
                // All writers are gone: what is left in the pipes is all there will be.
                for idx in 0..2 {
                    self.drain(idx, observer, true)?;
                }
                return Ok(());
            }
        }
    }

    fn poll(&self, wake: Instant, take_output: bool, remote: Option<&RemoteEnd>) -> Result<Ready, RunError> {
        let control = self.spawner.as_pollable();
        let mut fds = vec![PollFd::new(&control, PollFlags::IN)];
        let mut whose = vec![Whose::Control];
        for (idx, output) in self.outputs.iter().enumerate() {
            if let Some(pipe) = output.pipe.as_ref().filter(|_| take_output) {
                fds.push(PollFd::new(pipe, PollFlags::IN));
                whose.push(Whose::Output(idx));
            }
        }
        if let Some(input) = self.input.pollable() {
            fds.push(input);
            whose.push(Whose::Input);
        }
        if let Some(remote) = remote {
            fds.push(PollFd::new(&remote.0, PollFlags::IN));
            whose.push(Whose::Remote);
        }
        let early = self.spawner.has_early_event();
        let wait = if early { Duration::ZERO } else { wake.saturating_duration_since(Instant::now()) };
        let wait = rustix::event::Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(wait.subsec_nanos()),
        };
        match rustix::event::poll(&mut fds, Some(&wait)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(platform("waiting for the cell failed")(error.into())),
        }
        let mut ready = Ready { control: early, ..Ready::default() };
        for (fd, whose) in fds.iter().zip(whose) {
            if !fd.revents().is_empty() {
                match whose {
                    Whose::Control => ready.control = true,
                    Whose::Output(idx) => ready.outputs[idx] = true,
                    Whose::Input => ready.input = true,
                    // A remote nobody holds any more polls as closed for ever: it has nothing to say.
                    Whose::Remote => ready.remote = fd.revents().contains(PollFlags::IN),
                }
            }
        }
        Ok(ready)
    }

    /// Handles one event; true when the last process is gone.
    fn control(&mut self) -> Result<bool, RunError> {
        match self.spawner.next_event().map_err(platform("the cell's first process cannot be heard"))? {
            Some(Event::Ended { status, n_left }) => {
                self.status = Some(status);
                // The command itself was one more.
                self.peaks.pids = self.peaks.pids.max(n_left + 1);
            }
            Some(Event::Gone) => return Ok(true),
            Some(Event::Fault { op, answer }) => {
                let exec = self.image.label(op).is_some_and(|(_, label)| label.what == launch::EXEC);
                if !exec {
                    return Err(fault(self.plan, self.image, op, answer));
                }
                self.exec_error = Some(os_error(answer));
            }
            Some(Event::Spawned { .. } | Event::Ready(_) | Event::Reaped(_)) => return Err(out_of_turn()),
            // The spawner was killed from outside; its cell died with it.
            None => return Err(out_of_turn()),
        }
        Ok(false)
    }

    fn remote(&mut self, remote: Option<&RemoteEnd>) {
        let mut signals = [0u8; 16];
        let Some(Ok(n)) = remote.map(|remote| rustix::io::read(&remote.0, &mut signals)) else { return };
        for signal in &signals[..n] {
            let named = Signal::from_named_raw(i32::from(*signal));
            match (named, self.grace_until) {
                (Some(signal), None) => {
                    self.resume();
                    // Init passes it on to the command's process group.
                    let _gone = rustix::process::pidfd_send_signal(&self.init, signal);
                    self.grace_until = Some(Instant::now() + GRACE);
                }
                _ => self.end(Outcome::Killed, None),
            }
        }
    }

    /// Ends the run, for the first reason given.
    fn end(&mut self, outcome: Outcome, limit: Option<Limit>) {
        if self.ending.is_none() {
            self.ending = Some((outcome, limit));
            self.grace_until = None;
        }
        match self.group {
            Some(group) => group.kill(),
            // What the killed used is not added to anybody's count: look before they are gone.
            None => self.peaks.add(self.proc.as_ref().map(|proc| watch::look(proc.as_fd()))),
        }
        // Gone already is as good as killed; either way the spawner tells.
        let _gone = rustix::process::pidfd_send_signal(&self.init, Signal::KILL);
    }

    /// Takes what came on a stream. `all`: until its end, for when nobody writes any more.
    fn drain(&mut self, idx: usize, observer: &mut dyn Observer, all: bool) -> Result<(), RunError> {
        let limit = self.plan.limits.output.0;
        let mut buffer = vec![0; CHUNK];
        loop {
            let output = &mut self.outputs[idx];
            let Some(pipe) = &output.pipe else { return Ok(()) };
            let n = match rustix::io::read(pipe, &mut buffer) {
                Ok(0) => {
                    output.pipe = None;
                    return Ok(());
                }
                Ok(n) => n,
                Err(rustix::io::Errno::INTR) => continue,
                Err(_) => return Ok(()),
            };
            let bytes = &buffer[..n];
            output.total += n as u64;
            output.hash.update(bytes);
            let room = usize::try_from(limit.saturating_sub(self.kept_bytes)).unwrap_or(usize::MAX);
            let kept = &bytes[..n.min(room)];
            self.kept_bytes += kept.len() as u64;
            output.truncated |= kept.len() < n;
            let stream = output.stream;
            if !kept.is_empty() {
                observer.output(stream, kept).map_err(platform("the output cannot be recorded"))?;
            }
            if kept.len() < n {
                self.end(Outcome::OutputLimit, Some(Limit::Output));
            }
            if !all {
                return Ok(());
            }
        }
    }

    /// Reads the counters and ends the run if one is over its limit.
    fn tick(&mut self) {
        if self.ending.is_some() {
            return;
        }
        let limits = &self.plan.limits;
        if let Some(group) = self.group {
            let sample = group.sample();
            if let Some((outcome, limit)) = exceeded(&sample, limits) {
                return self.end(outcome, Some(limit));
            }
        } else if self.plan.asks_for(Wall::Cgroup) {
            self.look();
        }
        if self.disk_exceeded() {
            self.end(Outcome::Disk, Some(Limit::Disk));
        }
    }

    /// The watch where there is no cgroup.
    fn look(&mut self) {
        let Some(proc) = &self.proc else { return };
        let limits = &self.plan.limits;
        let look = watch::look(proc.as_fd());
        let files = self.scratch_use().bytes;
        let mut memory = look.memory_bytes + files;
        if memory > limits.memory.0 {
            memory = watch::memory_exactly(proc.as_fd(), files);
        }
        self.peaks.memory = self.peaks.memory.max(memory);
        self.peaks.add(Some(look));
        if memory > limits.memory.0 {
            return self.end(Outcome::Oom, Some(Limit::Memory));
        }
        if look.n_tasks > u64::from(limits.pids) {
            return self.end(Outcome::Pids, Some(Limit::Pids));
        }
        if limits.cpu_time.is_some_and(|most| look.cpu > most) {
            return self.end(Outcome::Timeout, Some(Limit::CpuTime));
        }
        // The share: whoever is ahead of it waits until it has caught up.
        let earned = self.started.elapsed() * limits.cpus.milli / 1000 + CPU_BURST;
        if look.cpu > earned && !self.paused {
            self.paused = rustix::process::pidfd_send_signal(&self.init, Signal::TSTP).is_ok();
        } else if look.cpu <= earned {
            self.resume();
        }
    }

    fn resume(&mut self) {
        if std::mem::take(&mut self.paused) {
            let _gone = rustix::process::pidfd_send_signal(&self.init, Signal::CONT);
        }
    }

    /// What the cell holds on its scratch filesystem.
    fn scratch_use(&self) -> DiskUse {
        let Some(Ok(stat)) = self.scratch.as_ref().map(rustix::fs::fstatvfs) else { return DiskUse::default() };
        DiskUse {
            bytes: stat.f_blocks.saturating_sub(stat.f_bfree) * stat.f_frsize,
            n_files: stat.f_files.saturating_sub(stat.f_ffree).saturating_sub(launch::SCRATCH_INODES),
        }
    }

    fn disk_exceeded(&mut self) -> bool {
        let (scratch, workspace) = (self.scratch_use(), self.scan.growth(self.plan));
        let (bytes, n_files) = (scratch.bytes + workspace.bytes, scratch.n_files + workspace.n_files);
        self.peaks.disk = self.peaks.disk.max(bytes);
        let limits = &self.plan.limits;
        let most = limits.disk.0.div_ceil(launch::PAGE) * launch::PAGE;
        self.plan.asks_for(Wall::Disk) && (bytes > most || n_files > limits.inodes())
    }

    /// Reads the last numbers, reaps, and decides the outcome.
    fn collect(mut self, isolation: Isolation) -> Result<(Report, Option<Changes>), RunError> {
        let io = fs::read_to_string(format!("/proc/{}/io", self.init_pid)).unwrap_or_default();
        let sample = self.group.map(Group::sample);
        self.scan.next = Instant::now();
        let disk_exceeded = self.disk_exceeded();
        self.spawner.reap().map_err(platform("the cell cannot be reaped"))?;
        let usage = match self.spawner.next_event().map_err(platform("the cell cannot be reaped"))? {
            Some(Event::Reaped(usage)) => usage,
            _ => return Err(out_of_turn()),
        };
        let changes = self.changes()?;
        let (outcome, limit) = self.outcome(sample.as_ref(), disk_exceeded);
        let detail = self.exec_error.as_ref().map(|error| format!("executing it failed: {error}"));
        let counter = |name: &str| {
            let line = io.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
            line.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
        };
        let resident = u64::try_from(usage.resident_max_kib).unwrap_or(0) * 1024;
        let [stdout, stderr] = &self.outputs;
        let report = Report {
            outcome,
            exit_code: self.status.filter(|_| outcome == Outcome::Exited).map(|status| status >> 8 & 0xff),
            signal: self
                .status
                .map(|status| status & 0x7f)
                .filter(|signal| *signal != 0)
                .or_else(|| self.ending.map(|_| libc::SIGKILL)),
            limit,
            detail,
            wall: Duration::ZERO,
            cpu: cpu_time(&usage, sample.as_ref()).max(self.peaks.cpu),
            memory_peak_bytes: sample.and_then(|sample| sample.memory_peak).unwrap_or(self.peaks.memory.max(resident)),
            pids_peak: sample
                .and_then(|sample| sample.pids_peak)
                .map_or(self.peaks.pids.max(1), |n| n.saturating_sub(1)),
            disk_peak_bytes: self.peaks.disk,
            io_read_bytes: counter("read_bytes"),
            io_write_bytes: counter("write_bytes"),
            stdout: stdout.captured(),
            stderr: stderr.captured(),
            isolation,
            changes: None,
            timings: Timings::default(),
        };
        Ok((report, changes))
    }

    fn changes(&self) -> Result<Option<Changes>, RunError> {
        let workspace = self.plan.workspace.as_ref().filter(|workspace| workspace.mode == Mode::Cow);
        let (Some(workspace), Some(scratch)) = (workspace, &self.scratch) else { return Ok(None) };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let upper = rustix::fs::openat(scratch, "upper", flags, rustix::fs::Mode::empty());
        let listed = upper.map_err(io::Error::from).and_then(|upper| changes::list(upper.as_fd(), &workspace.path));
        Ok(Some(listed.map_err(platform("the changes of the workspace cannot be listed"))?))
    }

    fn outcome(&self, sample: Option<&Sample>, disk_exceeded: bool) -> (Outcome, Option<Limit>) {
        if let Some((outcome, limit)) = self.ending {
            return (outcome, limit);
        }
        if let Some(error) = &self.exec_error {
            let outcome = match error.raw_os_error() {
                Some(libc::ENOENT | libc::ENOTDIR) => Outcome::NotFound,
                Some(libc::EACCES | libc::ENOEXEC | libc::EISDIR | libc::ELIBBAD | libc::EINVAL) => {
                    Outcome::NotExecutable
                }
                _ => Outcome::PlatformError,
            };
            return (outcome, None);
        }
        if let Some((outcome, limit)) = sample.and_then(|sample| exceeded(sample, &self.plan.limits)) {
            return (outcome, Some(limit));
        }
        // Without a cgroup, a command that met the limit may have ended before it was looked at.
        if self.group.is_none()
            && self.plan.asks_for(Wall::Cgroup)
            && self.peaks.pids > u64::from(self.plan.limits.pids)
        {
            return (Outcome::Pids, Some(Limit::Pids));
        }
        if disk_exceeded {
            return (Outcome::Disk, Some(Limit::Disk));
        }
        match self.status {
            Some(status) if status & 0x7f == 0 => (Outcome::Exited, None),
            Some(status) if status & 0x7f == libc::SIGXFSZ => (Outcome::Disk, Some(Limit::FileSize)),
            // The kernel's own enforcement of the cpu-time limit on one process.
            Some(status) if status & 0x7f == libc::SIGXCPU && self.plan.limits.cpu_time.is_some() => {
                (Outcome::Timeout, Some(Limit::CpuTime))
            }
            Some(_) => (Outcome::Signaled, None),
            // Somebody outside killed the cell's init.
            None => (Outcome::Killed, None),
        }
    }
}

/// What a command without a cgroup may use before its share is looked at.
const CPU_BURST: Duration = Duration::from_millis(40);

#[derive(Default)]
struct Ready {
    control: bool,
    outputs: [bool; 2],
    input: bool,
    remote: bool,
}

enum Whose {
    Control,
    Output(usize),
    Input,
    Remote,
}

fn exceeded(sample: &Sample, limits: &Limits) -> Option<(Outcome, Limit)> {
    if sample.oom_kills > 0 {
        return Some((Outcome::Oom, Limit::Memory));
    }
    if sample.pids_refused > 0 {
        return Some((Outcome::Pids, Limit::Pids));
    }
    let used = sample.cpu_us.map(Duration::from_micros);
    match (used, limits.cpu_time) {
        (Some(used), Some(most)) if used > most => Some((Outcome::Timeout, Limit::CpuTime)),
        _ => None,
    }
}

fn cpu_time(usage: &Usage, sample: Option<&Sample>) -> Duration {
    let counted = u64::try_from(usage.user_us + usage.system_us).unwrap_or(0);
    Duration::from_micros(sample.and_then(|sample| sample.cpu_us).unwrap_or(counted))
}
