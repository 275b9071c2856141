//! A station: a spawner with all that the cells of one plan share, from which cells are raised one after the other.
//!
//! ```text
//! open: spawner, cgroups, template ─▶ raise ─▶ Line, RunningCell ─▶ … ─▶ settle ─▶ raise ─▶ …
//! ```

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use hotcell_sys::program::Image;
use hotcell_sys::spawner::{Event, Line, LineEvent, Spawner, Usage};
use rustix::event::{PollFd, PollFlags};

use super::placeholders::Placeholders;
use super::{Observer, RemoteEnd, RunError, Spawned, Traces, fault, out_of_turn, platform};
use crate::cgroup::Group;
use crate::launch::{self, Label, Making};
use crate::plan::{ID_FIRST, Identity, Plan};
use crate::wall::Wall;

/// Slow storage may take a while to be mounted, even for a command that may not.
const WALLS_WAIT_LEAST: Duration = Duration::from_secs(30);

/// Dropped in this order: a group is removed when its processes are gone, and nothing is mounted on placeholders then.
pub(super) struct Station {
    pub(super) spawner: Spawner,
    _placeholders: Placeholders,
    group: Guard,
    pub(super) image: Image<Label>,
    pub(super) id: u32,
}

/// A cell whose walls stand.
pub(super) struct Raised {
    pub(super) init: OwnedFd,
    /// The scratch filesystem.
    pub(super) scratch: Option<OwnedFd>,
    /// The cell's own `/proc`.
    pub(super) proc: Option<OwnedFd>,
}

impl Station {
    /// Opens a station for a plan. `name` begins the name of its cgroup. Nothing of it is proven before the first cell.
    pub(super) fn open(plan: &Plan, name: &str, observer: &mut dyn Observer) -> Result<Station, RunError> {
        let mut group = Guard { group: None };
        let mut spawner = Spawner::start().map_err(platform("the cell's first process cannot be started"))?;
        let id = ID_FIRST + spawner.pid();
        let group_name = format!("{name}-{}", spawner.pid());
        let candidates = plan.host.cgroups.candidates(&group_name);
        let traces = Traces { cgroups: &candidates, placeholders: &plan.placeholders() };
        observer.preparing(&traces).map_err(platform("the cell cannot be recorded"))?;
        let placeholders = Placeholders::make(plan);
        let placeholders = placeholders.map_err(platform("places for decoys of control files cannot be made"))?;
        group.group = plan.cgroup(&group_name)?;
        let owners = launch::owners(plan);
        let mut namespaces = Vec::new();
        for (uid, gid) in &owners {
            let made = spawner.user_namespace(&launch::id_map(*uid, id), &launch::id_map(*gid, id));
            namespaces.push(made.map_err(platform("a map of ids for the workspace cannot be made"))?);
        }
        let making = Making { spawner: spawner.pid(), id, group: group.group.as_ref(), owners: &owners };
        let image = launch::cell(plan, &making).image();
        let inputs: Vec<BorrowedFd<'_>> = namespaces.iter().map(AsFd::as_fd).collect();
        spawner.prepare(&image, &inputs).map_err(platform("the program of the cell cannot be sent"))?;
        Ok(Station { spawner, _placeholders: placeholders, group, image, id })
    }

    pub(super) fn group(&self) -> Option<&Group> {
        self.group.group.as_ref()
    }

    /// Who must be able to open a command's streams again by name, if that is not who we are.
    pub(super) fn owner(&self, plan: &Plan) -> Option<u32> {
        (plan.identity == Identity::Fresh && plan.asks_for(Wall::Id)).then_some(self.id)
    }

    /// A plan's command, as the last one of its cell.
    pub(super) fn command(&self, plan: &Plan) -> Image<Label> {
        let making = Making { spawner: self.spawner.pid(), id: self.id, group: None, owners: &[] };
        let mut program = launch::command(plan, &making);
        program.last();
        program.image()
    }

    /// Reaps a cell that is gone: what its whole tree used.
    pub(super) fn reap(&mut self) -> Result<Usage, RunError> {
        let failed = platform("the cell cannot be reaped");
        self.spawner.reap().map_err(&failed)?;
        match self.spawner.next_event().map_err(&failed)? {
            Some(Event::Reaped(usage)) => Ok(usage),
            _ => Err(out_of_turn()),
        }
    }

    /// Has a cell made. Commands can be sent to it at once: they begin when its walls stand.
    pub(super) fn raise(&mut self) -> Result<Line, RunError> {
        self.spawner.raise().map_err(platform("a cell cannot be asked for"))
    }

    /// Why a cell's init never was, or is gone, without a word.
    fn why_not(&mut self, plan: &Plan) -> RunError {
        loop {
            match self.spawner.next_event() {
                Ok(Some(Event::Spawned { .. })) => {}
                Ok(Some(Event::Fault(found))) => return fault(plan, &self.image, found),
                _ => return out_of_turn(),
            }
        }
    }

    /// Waits until every wall stands or one did not.
    pub(super) fn wait(
        &mut self,
        plan: &Plan,
        line: &Line,
        observer: &mut dyn Observer,
        remote: Option<&RemoteEnd>,
    ) -> Result<Raised, RunError> {
        let unheard = platform("the cell's first process cannot be heard");
        let deadline = Instant::now() + plan.limits.time.max(WALLS_WAIT_LEAST);
        let (mut init, mut exports) = (None, None);
        while init.is_none() || exports.is_none() {
            let cell = exports.is_none().then_some(line);
            let (from_spawner, from_cell) = await_event(&self.spawner, cell, deadline, remote)?;
            if from_cell {
                match line.next_event().map_err(&unheard)? {
                    Some(LineEvent::Ready(fds)) => exports = Some(fds),
                    Some(LineEvent::Fault(found)) => return Err(fault(plan, &self.image, found)),
                    Some(LineEvent::CommandFault(_) | LineEvent::Ended { .. }) => return Err(out_of_turn()),
                    // The spawner says why, if it could.
                    None => return Err(self.why_not(plan)),
                }
            }
            // Once both have said what is waited for, whatever else they say is for whoever supervises the command.
            if from_spawner && (init.is_none() || exports.is_none()) {
                match self.spawner.next_event().map_err(&unheard)? {
                    Some(Event::Spawned { pid, pidfd }) => {
                        let cgroups = self.group().map(Group::directories).unwrap_or_default();
                        let spawned = Spawned { spawner_pid: self.spawner.pid(), init_pid: pid, cgroups };
                        observer.spawned(&spawned).map_err(platform("the cell cannot be recorded"))?;
                        init = Some(pidfd);
                    }
                    Some(Event::Fault(found)) => return Err(fault(plan, &self.image, found)),
                    // Init says why, if it could.
                    Some(Event::Gone | Event::Reaped(_)) | None => match line.next_event().map_err(&unheard)? {
                        Some(LineEvent::Fault(found)) => return Err(fault(plan, &self.image, found)),
                        _ => return Err(out_of_turn()),
                    },
                }
            }
        }
        let mut exports = exports.unwrap_or_default();
        let (proc, scratch) = (exports.pop(), exports.pop());
        let init = init.ok_or_else(out_of_turn)?;
        Ok(Raised { init, scratch, proc })
    }
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
    let remote = remote.map(|remote| remote.0.as_fd());
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
