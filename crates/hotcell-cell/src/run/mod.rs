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

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use hotcell_sys::program::Image;
use hotcell_sys::signals::EndSignals;
use hotcell_sys::spawner::{Fault, os_error};
use hotcell_sys::wire;
use rustix::event::{PollFd, PollFlags};

use crate::cgroup::{Group, NoGroup};
use crate::changes::{Changes, Layer};
use crate::launch::{self, Label};
use crate::plan::Plan;
use crate::report::Report;
use crate::wall::{Standing, Wall};

pub(crate) mod aftermath;
pub mod early;
pub mod placeholders;
pub(crate) mod station;
pub(crate) mod strays;
mod streams;
mod supervisor;

use station::Station;

/// Why a run did not happen or could not be finished.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The command was planned for another cell; see [`Plan::exec`].
    #[error("the command was planned for another cell than this one")]
    Foreign,
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
    /// Nothing that stands before anybody asks may hold places in a directory of the host.
    #[error("a pool has no cells that write in place, and this plan has a `rw` workspace or a writable mount")]
    InPlace,
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
    /// From here, copied through a pipe: a cell never holds a descriptor of a host's file. Nobody else may read from it:
    /// a supervisor that waits for what another has taken enforces nothing.
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
    /// Every wall stands and the command is about to begin.
    fn proven(&mut self) {}

    /// Output that is kept, as it comes. An error ends the run.
    fn output(&mut self, stream: Stream, bytes: &[u8]) -> io::Result<()>;

    /// What a copy-on-write workspace would change, while the files can still be read. An error ends the run.
    fn changed(&mut self, _changes: &Changes, _layer: &Layer) -> io::Result<()> {
        Ok(())
    }

    /// The last moment before the command is sent to its cell, while walls go up: what must have happened before it may
    /// run happens here. An error ends the run before it began. Asked again if the cell has to be built again.
    fn cleared(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Whether it may go on: if not, how it ends. Asked every 20 ms while it runs; before it begins, [`Observer::cleared`] is.
    fn lapsed(&mut self) -> Option<hotcell_base::Outcome> {
        None
    }

    /// Whether more can be taken now; while not, the command waits, and its limits go on.
    fn ready(&mut self) -> bool {
        true
    }
}

/// What a cell may leave on the host if everything of ours is killed at once: whoever finds it may remove it.
#[derive(Clone, Default, Debug)]
pub struct Traces {
    /// Its cgroup directories, wherever they may come to be.
    pub cgroups: Vec<std::path::PathBuf>,
    /// Places for decoys; see [`placeholders`].
    pub placeholders: Vec<std::path::PathBuf>,
}

/// Keeps output in memory.
#[derive(Default)]
pub(crate) struct Memory {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

impl Memory {
    /// Gives what was kept to whom it belongs.
    pub(crate) fn give(self, report: &mut Report) {
        report.stdout.kept = self.stdout;
        report.stderr.kept = self.stderr;
    }
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

/// What a run listens to: the other end of a [`Remote`], or the signals that ask this program to end.
#[derive(Debug)]
pub struct RemoteEnd(Source);

#[derive(Debug)]
enum Source {
    Pipe(OwnedFd),
    Signals(EndSignals),
}

/// Makes both ends.
pub fn remote() -> io::Result<(Remote, RemoteEnd)> {
    let (reader, writer) =
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC | rustix::pipe::PipeFlags::NONBLOCK)?;
    Ok((Remote(std::sync::Arc::new(writer)), RemoteEnd(Source::Pipe(reader))))
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

impl RemoteEnd {
    /// Waits until `done` has nobody left to write to it, but not longer than `most`: whether it has not. If the run is
    /// asked to end meanwhile, an error of kind `Interrupted`.
    pub fn wait_or_end(remote: Option<&RemoteEnd>, done: &impl AsFd, most: Duration) -> io::Result<bool> {
        let mut fds = vec![PollFd::new(done, PollFlags::IN)];
        fds.extend(remote.map(|remote| PollFd::new(remote, PollFlags::IN)));
        let most = rustix::event::Timespec {
            tv_sec: i64::try_from(most.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(most.subsec_nanos()),
        };
        rustix::io::retry_on_intr(|| rustix::event::poll(&mut fds, Some(&most)))?;
        let is_asked = fds.get(1).is_some_and(|remote| remote.revents().contains(PollFlags::IN));
        if is_asked {
            return Err(io::Error::new(io::ErrorKind::Interrupted, "the run was asked to end"));
        }
        Ok(!fds[0].revents().is_empty())
    }

    /// Whether it was told something that nobody has heard yet.
    pub(crate) fn is_asked(&self) -> bool {
        let mut fds = [PollFd::new(self, PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(1..)) && fds[0].revents().contains(PollFlags::IN)
    }

    /// What it was told: some of it, if it polls as readable.
    fn hear(&self) -> Vec<u8> {
        match &self.0 {
            Source::Pipe(pipe) => {
                let mut signals = [0u8; 16];
                let n = rustix::io::read(pipe, &mut signals).unwrap_or(0);
                signals[..n].to_vec()
            }
            Source::Signals(signals) => signals.wait().into_iter().collect(),
        }
    }
}

impl From<EndSignals> for RemoteEnd {
    fn from(signals: EndSignals) -> RemoteEnd {
        RemoteEnd(Source::Signals(signals))
    }
}

impl AsFd for RemoteEnd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0 {
            Source::Pipe(pipe) => pipe.as_fd(),
            Source::Signals(signals) => signals.as_fd(),
        }
    }
}

const KILL_NOW: u8 = 0;
/// How long a command that was asked to end may take.
pub const GRACE: Duration = Duration::from_secs(2);

impl Plan {
    /// Runs the command without input and keeps its output in memory.
    pub fn run(&self) -> Result<Report, RunError> {
        strays::sweep(&self.host.cgroups);
        let mut memory = Memory::default();
        let mut report = self.run_with(&strays::group_name("hotcell"), Stdin::Null, &mut memory, None)?;
        memory.give(&mut report);
        Ok(report)
    }

    /// What a cell of this plan may leave, if its cgroup has this name.
    pub fn traces(&self, name: &str) -> Traces {
        Traces { cgroups: self.host.cgroups.candidates(name), placeholders: self.placeholders() }
    }

    /// Runs the command. `name` is that of its cgroup, and nobody else's.
    pub fn run_with(
        &self,
        name: &str,
        stdin: Stdin,
        observer: &mut dyn Observer,
        remote: Option<&RemoteEnd>,
    ) -> Result<Report, RunError> {
        let mut stdin = Some(stdin);
        let mut plan = Cow::Borrowed(self);
        loop {
            match plan.attempt(name, &mut stdin, observer, remote) {
                // It was tried, it does not stand, and the caller said that it may be missing.
                Err(RunError::Wall { wall, .. }) if plan.allow_missing.contains(&wall) && plan.asks_for(wall) => {
                    plan = Cow::Owned(plan.without(wall));
                }
                result => return result,
            }
        }
    }

    /// Runs the command once every wall stands; input is taken only then.
    fn attempt(
        &self,
        name: &str,
        stdin: &mut Option<Stdin>,
        observer: &mut dyn Observer,
        remote: Option<&RemoteEnd>,
    ) -> Result<Report, RunError> {
        let begun = Instant::now();
        let since = now();
        let mut station = Station::open(self, name)?;
        let cell = station.raise()?;
        let mut report = station.run((cell, self), self, stdin, observer, remote, (begun, since))?;
        let removing = Instant::now();
        // The cell is gone; a directory the kernel keeps a moment longer is left to the next sweep.
        drop(station);
        report.timings.collect += removing.elapsed();
        Ok(report)
    }

    /// Where a cell of this plan puts decoys.
    fn placeholders(&self) -> Vec<std::path::PathBuf> {
        let trees = self.guarded.iter();
        trees.flat_map(|tree| tree.decoys.iter().map(|(path, _)| tree.source.join(path))).collect()
    }

    fn cgroup(&self, name: &str) -> Result<Option<Group>, RunError> {
        if !self.asks_for(Wall::Cgroup) {
            return Ok(None);
        }
        match Group::create(&self.host.cgroups, name, &self.limits) {
            Ok(group) => Ok(Some(group)),
            Err(error) if self.require.contains(&Wall::Cgroup) => Err(RunError::Cgroup(error)),
            // Another has this name: that is a mistake of the caller's, and nothing to live with.
            Err(error @ NoGroup::Refused { .. }) if error.is_taken() => Err(RunError::Cgroup(error)),
            // Held by rlimits and by watching; the report says so.
            Err(_) => Ok(None),
        }
    }

    fn standing(&self, group: Option<&Group>) -> BTreeMap<Wall, Standing> {
        let mut walls = self.walls.clone();
        if self.asks_for(Wall::Cgroup) && group.is_none() {
            walls.insert(Wall::Cgroup, Standing::Watched);
        }
        if !self.omitted_rules.is_empty() {
            walls.insert(Wall::Seccomp, Standing::Missing);
        }
        walls
    }
}

/// The wall clock, in seconds and nanoseconds.
pub(crate) fn now() -> (i64, i64) {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    (now.tv_sec, now.tv_nsec)
}

fn out_of_turn() -> RunError {
    let source = io::Error::other("it ended before the walls stood");
    RunError::Platform { what: "the cell's first process failed", source }
}

fn platform(what: &'static str) -> impl Fn(io::Error) -> RunError {
    move |source| RunError::Platform { what, source }
}

/// The error for a call that did not answer as it must.
fn fault(plan: &Plan, image: &Image<Label>, Fault { op, answer }: Fault) -> RunError {
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
    if label.what == launch::GO_ON {
        let source = source.unwrap_or_else(|| io::Error::other("a call that must not succeed did"));
        return RunError::Platform { what: "the command cannot go on from its template", source };
    }
    RunError::Wall { wall: label.wall, what: label.what.clone().into_owned(), source }
}

/// The wall to name when the clone as a whole is refused.
fn clone_wall(plan: &Plan) -> Wall {
    if plan.asks_for(Wall::Pid) { Wall::Pid } else { Wall::Mount }
}
