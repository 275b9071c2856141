//! A station: a spawner with all that the cells of one plan share, from which cells are raised one after the other.
//!
//! ```text
//! open: spawner, cgroups, ground ─▶ raise ─▶ run ─▶ renew ─▶ raise ─▶ …
//! ```

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hotcell_sys::id_map::user_namespace;
use hotcell_sys::program::Image;
use hotcell_sys::spawner::{Event, Fault, Line, LineEvent, Spawner, Usage};
use hotcell_sys::wire;
use rustix::event::{PollFd, PollFlags};

use super::early;
use super::placeholders::Placeholders;
use super::streams::{Input, Output, Pipes};
use super::supervisor::{Reach, Supervisor};
use super::{Observer, RemoteEnd, RunError, Stdin, Stream, fault, out_of_turn, platform};
use crate::cgroup::Group;
use crate::launch::{self, Label, Making};
use crate::plan::{ID_FIRST, Identity, Plan};
use crate::report::{Isolation, Report, Timings};
use crate::wall::Wall;

/// Slow storage may take a while to be mounted, even for a command that may not.
const WALLS_WAIT_LEAST: Duration = Duration::from_secs(30);

/// Whether something could not be sent because its reader is gone.
fn is_unheard(error: &RunError) -> bool {
    matches!(error, RunError::Platform { source, .. } if source.kind() == io::ErrorKind::BrokenPipe)
}

/// What is said of a command that was not let begin.
const NOT_CLEARED: &str = "the command was not let begin";

/// Dropped in this order: a group is removed when its processes are gone, and nothing is mounted on placeholders then.
#[derive(Debug)]
pub(crate) struct Station {
    pub(crate) spawner: Spawner,
    _placeholders: Placeholders,
    group: Guard,
    pub(crate) image: Image<Label>,
    /// What was done before it was known for which cells.
    early: Option<Image<Label>>,
    id: u32,
    /// What has become of the last cell.
    cell: Life,
}

/// Where a cell is in its life, as its spawner tells.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Life {
    /// There is none.
    Reaped,
    /// It was asked for.
    Raised,
    /// Every process of it is gone.
    Gone,
}

/// A cell that was asked for. Its walls may not stand yet.
#[derive(Debug)]
pub(crate) struct Rising {
    line: Line,
    raised: Option<Raised>,
}

impl Rising {
    /// What is held of it, once it stands.
    pub(crate) fn raised(&self) -> Option<&Raised> {
        self.raised.as_ref()
    }
}

/// What is held of a cell whose walls stand.
#[derive(Debug)]
pub(crate) struct Raised {
    pub(crate) init: OwnedFd,
    /// As long as it is not reaped, no other process has this pid.
    pub(crate) init_pid: i32,
    /// The scratch filesystem.
    pub(crate) scratch: Option<OwnedFd>,
    /// The cell's own `/proc`.
    pub(crate) proc: Option<OwnedFd>,
    /// The root of its view.
    pub(crate) root: Option<OwnedFd>,
}

impl Station {
    /// Opens a station for a plan. `name` is that of its cgroup. Nothing of it is proven before the first cell.
    pub(crate) fn open(plan: &Plan, name: &str) -> Result<Station, RunError> {
        let mut group = Guard { group: None };
        let early = early::take(plan);
        let is_begun = early.is_some();
        let (mut spawner, early) = match early {
            Some(early) => (early.spawner, Some(early.image)),
            None => (Spawner::start().map_err(platform("the cell's first process cannot be started"))?, None),
        };
        let id = ID_FIRST + spawner.pid();
        let placeholders = Placeholders::make(plan);
        let placeholders = placeholders.map_err(platform("places for decoys of control files cannot be made"))?;
        group.group = plan.cgroup(name)?;
        let owners = launch::owners(plan);
        let mut namespaces = Vec::new();
        for (uid, gid) in &owners {
            let made = user_namespace(&launch::id_map(*uid, id), &launch::id_map(*gid, id));
            namespaces.push(made.map_err(platform("a map of ids for the workspace cannot be made"))?);
        }
        let making = Making { id, group: group.group.as_ref(), is_begun, owners: &owners };
        let image = launch::cell(plan, &making).image();
        let inputs: Vec<BorrowedFd<'_>> = namespaces.iter().map(AsFd::as_fd).collect();
        spawner.prepare(&image, &inputs).map_err(platform("the program of the cell cannot be sent"))?;
        Ok(Station { spawner, _placeholders: placeholders, group, image, early, id, cell: Life::Reaped })
    }

    pub(crate) fn group(&self) -> Option<&Group> {
        self.group.group.as_ref()
    }

    /// Who must be able to open a command's streams again by name, if that is not who we are.
    fn owner(&self, plan: &Plan) -> Option<u32> {
        (plan.identity == Identity::Fresh && plan.asks_for(Wall::Id)).then_some(self.id)
    }

    /// Reaps a cell that is gone: what its whole tree used.
    pub(crate) fn reap(&mut self) -> Result<Usage, RunError> {
        let failed = platform("the cell cannot be reaped");
        self.spawner.reap().map_err(&failed)?;
        match self.spawner.next_event().map_err(&failed)? {
            Some(Event::Reaped(usage)) => {
                self.cell = Life::Reaped;
                Ok(usage)
            }
            _ => Err(out_of_turn()),
        }
    }

    /// Takes down that the spawner said the cell is gone.
    pub(crate) fn note_gone(&mut self) {
        self.cell = Life::Gone;
    }

    /// Waits until the last cell, whose command has ended, is gone and reaped; then there can be another.
    fn settle(&mut self) -> Result<(), RunError> {
        while self.cell == Life::Raised {
            match self.spawner.next_event().map_err(platform("the cell's first process cannot be heard"))? {
                Some(Event::Gone) => self.cell = Life::Gone,
                _ => return Err(out_of_turn()),
            }
        }
        if self.cell == Life::Gone {
            self.reap()?;
        }
        Ok(())
    }

    /// Makes way for another cell, whose counters are its own.
    pub(crate) fn renew(&mut self) -> Result<(), RunError> {
        self.settle()?;
        self.group.group.as_mut().map_or(Ok(()), Group::renew).map_err(RunError::Cgroup)
    }

    /// Has the next cell outlive its commands.
    pub(crate) fn outlive_commands(&self) -> Result<(), RunError> {
        self.group().map_or(Ok(()), Group::outlive_commands).map_err(RunError::Cgroup)
    }

    /// Whether the cell is still there.
    pub(crate) fn has_cell(&mut self) -> bool {
        let control = self.spawner.as_pollable();
        let mut fds = [PollFd::new(&control, PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        // A spawner that has something to say now says that the cell is gone, or is gone itself.
        if self.cell == Life::Raised && !matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(0)) {
            self.cell = Life::Gone;
        }
        self.cell == Life::Raised
    }

    /// Has a cell made. Commands can be sent to it at once: they begin when its walls stand.
    pub(crate) fn raise(&mut self) -> Result<Rising, RunError> {
        let doors = self.group.group.as_ref().map(Group::doors).unwrap_or_default();
        let line = self.spawner.raise(doors).map_err(platform("a cell cannot be asked for"))?;
        self.cell = Life::Raised;
        Ok(Rising { line, raised: None })
    }

    /// Waits until a cell is ready for its command.
    pub(crate) fn ready(&mut self, plan: &Plan, rising: &mut Rising) -> Result<(), RunError> {
        rising.raised = Some(self.wait(plan, &rising.line, None)?);
        Ok(())
    }

    /// Runs a plan's command in a cell, as its last; input is taken once its walls stand.
    pub(crate) fn run(
        &mut self,
        (cell, of): (Rising, &Plan),
        plan: &Plan,
        stdin: &mut Option<Stdin>,
        observer: &mut dyn Observer,
        remote: Option<&RemoteEnd>,
        (begun, since): (Instant, (i64, i64)),
    ) -> Result<Report, RunError> {
        refuse_foreign(of, plan)?;
        let Rising { line, raised } = cell;
        if let Some(group) = self.group.group.as_mut().filter(|_| plan.limits != of.limits) {
            group.limit(&plan.limits).map_err(RunError::Cgroup)?;
        }
        let mut command = launch::command(plan, of);
        command.last();
        let command = command.image();
        observer.cleared().map_err(platform(NOT_CLEARED))?;
        let pipes = match self.send(plan, &line, &command) {
            // Nobody is there to read it: what the cell itself says of that is the reason.
            Err(unsent) if raised.is_none() && is_unheard(&unsent) => {
                return Err(self.wait(of, &line, remote).err().unwrap_or(unsent));
            }
            sent => sent?,
        };
        let prepare = begun.elapsed();

        let raising = Instant::now();
        let raised = match raised {
            Some(raised) => raised,
            None => self.wait(of, &line, remote)?,
        };
        observer.proven();
        let walls = raising.elapsed();
        let held = (&line, &raised, Reach::Cell);
        let mut report = self.supervise(plan, &command, held, pipes, stdin, observer, remote, since)?;
        (report.timings.prepare, report.timings.walls) = (prepare, walls);
        Ok(report)
    }

    /// Runs a command in a cell that stands, and that has more to come.
    pub(crate) fn exec(
        &mut self,
        (cell, of): (&Rising, &Plan),
        plan: &Plan,
        stdin: &mut Option<Stdin>,
        observer: &mut dyn Observer,
        remote: Option<&RemoteEnd>,
    ) -> Result<Report, RunError> {
        refuse_foreign(of, plan)?;
        let begun = Instant::now();
        if let Some(group) = &mut self.group.group {
            group.begin(&plan.limits).map_err(RunError::Cgroup)?;
        }
        let Some(raised) = &cell.raised else { return Err(out_of_turn()) };
        let command = launch::command(plan, of).image();
        observer.cleared().map_err(platform(NOT_CLEARED))?;
        let pipes = self.send(plan, &cell.line, &command)?;
        observer.proven();
        let prepare = begun.elapsed();
        let held = (&cell.line, raised, Reach::Command);
        let mut report = self.supervise(plan, &command, held, pipes, stdin, observer, remote, super::now())?;
        report.timings.prepare = prepare;
        Ok(report)
    }

    /// Sends a command to a cell; it begins when the walls stand.
    fn send(&self, plan: &Plan, line: &Line, command: &Image<Label>) -> Result<Pipes, RunError> {
        let pipes = Pipes::new(self.owner(plan)).map_err(platform("pipes cannot be made"))?;
        let beginning = plan.beginning.as_ref();
        let request = beginning.map(|beginning| beginning.request(plan)).transpose();
        let request = request.map_err(platform("the request cannot be written"))?;
        let mut inputs: Vec<BorrowedFd<'_>> = pipes.theirs.iter().chain(&request).map(AsFd::as_fd).collect();
        inputs.extend(beginning.map(|beginning| beginning.template.memory()));
        line.run(command, &inputs).map_err(platform("the command cannot be sent"))?;
        drop(inputs);
        Ok(pipes)
    }

    #[allow(clippy::too_many_arguments)] // One of each; a struct of them would be named once.
    fn supervise(
        &mut self,
        plan: &Plan,
        command: &Image<Label>,
        held: (&Line, &Raised, Reach),
        pipes: Pipes,
        stdin: &mut Option<Stdin>,
        observer: &mut dyn Observer,
        remote: Option<&RemoteEnd>,
        since: (i64, i64),
    ) -> Result<Report, RunError> {
        let isolation = self.isolation(plan);
        let Pipes { ours: [stdin_pipe, stdout, stderr], theirs } = pipes;
        drop(theirs);
        let outputs = [Output::new(Stream::Stdout, stdout), Output::new(Stream::Stderr, stderr)];
        let input = Input::new(stdin.take().unwrap_or_default(), stdin_pipe);
        let mut supervisor = Supervisor::new(plan, command, self, held, since, outputs, input);
        if let Err(error) = supervisor.supervise(observer, remote) {
            supervisor.abandon();
            return Err(error);
        }
        let run = supervisor.elapsed();
        let collecting = Instant::now();
        let mut report = supervisor.collect(isolation, observer)?;
        report.wall = run;
        report.timings = Timings { run, collect: collecting.elapsed(), ..Timings::default() };
        Ok(report)
    }

    /// The walls of a cell of this station.
    pub(crate) fn isolation(&self, plan: &Plan) -> Isolation {
        let id_outside = match plan.identity {
            _ if !plan.asks_for(Wall::Id) => plan.host.uid,
            Identity::Own { uid, .. } => uid,
            Identity::Fresh => self.id,
        };
        Isolation { tier: "process", walls: plan.standing(self.group()), id_outside }
    }

    /// The error for a call of a cell's, or of its spawner's, that did not answer as it must.
    pub(crate) fn fault(&self, plan: &Plan, found: Fault) -> RunError {
        match &self.early {
            Some(early) if found.op & wire::OP_EARLY != 0 && found.op >> 33 == 0 => {
                fault(plan, early, Fault { op: found.op & !wire::OP_EARLY, ..found })
            }
            _ => fault(plan, &self.image, found),
        }
    }

    /// Why a cell's init never was, or is gone, without a word.
    fn why_not(&mut self, plan: &Plan) -> RunError {
        loop {
            match self.spawner.next_event() {
                Ok(Some(Event::Spawned { .. })) => {}
                Ok(Some(Event::Fault(found))) => return self.fault(plan, found),
                _ => return out_of_turn(),
            }
        }
    }

    /// Waits until every wall stands or one did not.
    pub(crate) fn wait(&mut self, plan: &Plan, line: &Line, remote: Option<&RemoteEnd>) -> Result<Raised, RunError> {
        let unheard = platform("the cell's first process cannot be heard");
        let deadline = Instant::now() + plan.limits.time.max(WALLS_WAIT_LEAST);
        let (mut init, mut exports) = (None, None);
        while init.is_none() || exports.is_none() {
            let cell = exports.is_none().then_some(line);
            let (from_spawner, from_cell) = await_event(&self.spawner, cell, deadline, remote)?;
            if from_cell {
                match line.next_event().map_err(&unheard)? {
                    Some(LineEvent::Ready(fds)) => exports = Some(fds),
                    Some(LineEvent::Fault(found)) => return Err(self.fault(plan, found)),
                    Some(LineEvent::CommandFault(_) | LineEvent::Ended { .. }) => return Err(out_of_turn()),
                    // The spawner says why, if it could.
                    None => return Err(self.why_not(plan)),
                }
            }
            // Once both have said what is waited for, whatever else they say is for whoever supervises the command.
            if from_spawner && (init.is_none() || exports.is_none()) {
                match self.spawner.next_event().map_err(&unheard)? {
                    Some(Event::Spawned { pid, pidfd }) => init = Some((pid, pidfd)),
                    Some(Event::Fault(found)) => return Err(self.fault(plan, found)),
                    // Init says why, if it could.
                    Some(Event::Gone | Event::Reaped(_)) | None => match line.next_event().map_err(&unheard)? {
                        Some(LineEvent::Fault(found)) => return Err(self.fault(plan, found)),
                        _ => return Err(out_of_turn()),
                    },
                }
            }
        }
        let mut exports = exports.unwrap_or_default();
        let (root, proc, scratch) = (exports.pop(), exports.pop(), exports.pop());
        let (init_pid, init) = init.ok_or_else(out_of_turn)?;
        Ok(Raised { init, init_pid, scratch, proc, root })
    }
}

/// Refuses a command that was planned for another cell: its report would claim walls that do not stand here.
fn refuse_foreign(cell: &Plan, command: &Plan) -> Result<(), RunError> {
    let is_same = Arc::ptr_eq(&cell.view, &command.view) && cell.walls == command.walls;
    if is_same { Ok(()) } else { Err(RunError::Foreign) }
}

/// Waits for the spawner or the cell to say something, unless the caller or the clock ends the run first: which did.
fn await_event(
    spawner: &Spawner,
    line: Option<&Line>,
    deadline: Instant,
    remote: Option<&RemoteEnd>,
) -> Result<(bool, bool), RunError> {
    let control = spawner.as_pollable();
    let cell = line.map(Line::as_pollable);
    let remote = remote.map(AsFd::as_fd);
    // A place for each: one that is not there is one that says nothing.
    let places = [Some(&control), cell.as_ref(), remote.as_ref()];
    let mut fds: Vec<PollFd<'_>> = places.into_iter().flatten().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let wait = deadline.saturating_duration_since(Instant::now());
    let wait = rustix::event::Timespec {
        tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(wait.subsec_nanos()),
    };
    let n = rustix::io::retry_on_intr(|| rustix::event::poll(&mut fds, Some(&wait)))
        .map_err(|errno| platform("waiting for the cell failed")(errno.into()))?;
    let mut events = fds.iter().map(PollFd::revents);
    let mut next =
        |is_there: bool| if is_there { events.next().unwrap_or(PollFlags::empty()) } else { PollFlags::empty() };
    let (from_spawner, from_cell) = (!next(true).is_empty(), !next(cell.is_some()).is_empty());
    let is_asked = next(remote.is_some()).contains(PollFlags::IN);
    let given_up = match n {
        0 => Some("they took longer than the time limit"),
        _ if !from_spawner && !from_cell && is_asked => Some("the run was asked to end"),
        _ => None,
    };
    match given_up {
        Some(why) => Err(platform("the walls did not go up")(io::Error::other(why))),
        None => Ok((from_spawner, from_cell)),
    }
}

/// Removes the cgroup of a station when its processes are gone.
#[derive(Debug)]
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
