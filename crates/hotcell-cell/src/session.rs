//! A session: a cell that stays, and runs one command after the other.
//!
//! ```text
//! Session::open ─▶ exec ─▶ Report ─▶ exec ─▶ Report ─▶ … ─▶ close ─▶ what the workspace's copy came to
//! ```
//!
//! The walls are those of any cell and are built and proven once. Files stay from one command to the next; processes do
//! not: whatever a command leaves running is ended and counted with it, and the next one begins when it is gone. Each
//! command has limits and a report of its own.

use std::os::fd::{AsFd, BorrowedFd};

use crate::plan::{Exec, Plan};
use crate::report::{Aftermath, Isolation, Report};
use crate::run::station::{Rising, Station};
use crate::run::strays::{self, group_name};
use crate::run::{Memory, Observer, RemoteEnd, RunError, Stdin, aftermath, now};

/// A cell that stays.
#[derive(Debug)]
pub struct Session {
    plan: Plan,
    station: Station,
    cell: Rising,
    /// When it began, for whoever looks at what changed since.
    since: (i64, i64),
}

impl Session {
    /// Builds and proves a cell of a plan; see [`crate::Builder::plan_session`].
    pub fn open(plan: Plan, observer: &mut dyn Observer) -> Result<Session, RunError> {
        strays::sweep(&plan.host.cgroups);
        Session::open_as(plan, &group_name("hotcell-session"), observer)
    }

    /// The same, with a name for its cgroup that nobody else has; see [`Plan::traces`].
    pub fn open_as(plan: Plan, name: &str, observer: &mut dyn Observer) -> Result<Session, RunError> {
        let since = now();
        let mut plan = plan;
        loop {
            match Session::raise(&plan, name, observer) {
                // It was tried, it does not stand, and the caller said that it may be missing.
                Err(RunError::Wall { wall, .. }) if plan.allow_missing.contains(&wall) && plan.asks_for(wall) => {
                    plan = plan.without(wall);
                }
                raised => return raised.map(|(station, cell)| Session { plan, station, cell, since }),
            }
        }
    }

    fn raise(plan: &Plan, name: &str, observer: &mut dyn Observer) -> Result<(Station, Rising), RunError> {
        let mut station = Station::open(plan, name)?;
        station.outlive_commands()?;
        let mut cell = station.raise()?;
        station.ready(plan, &mut cell)?;
        observer.proven();
        Ok((station, cell))
    }

    /// What it was built from.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Its walls.
    pub fn isolation(&self) -> Isolation {
        self.station.isolation(&self.plan)
    }

    /// Whether it can still run commands: its init was not killed.
    pub fn is_alive(&mut self) -> bool {
        self.station.has_cell()
    }

    /// Runs a command without input and keeps its output in memory.
    ///
    /// # Errors
    /// If the command cannot be one, or the cell failed; see [`Session::is_alive`].
    pub fn exec(&mut self, exec: &Exec) -> Result<Report, ExecError> {
        let plan = self.plan.exec(exec)?;
        let mut memory = Memory::default();
        let mut report = self.exec_with(&plan, Stdin::Null, &mut memory, None)?;
        memory.give(&mut report);
        Ok(report)
    }

    /// Runs a command that [`Plan::exec`] of its plan made.
    pub fn exec_with(
        &mut self,
        plan: &Plan,
        stdin: Stdin,
        observer: &mut dyn Observer,
        remote: Option<&RemoteEnd>,
    ) -> Result<Report, RunError> {
        self.station.exec((&self.cell, &self.plan), plan, &mut Some(stdin), observer, remote)
    }

    /// The pid of its init.
    pub(crate) fn init_pid(&self) -> i32 {
        self.cell.raised().map_or(0, |raised| raised.init_pid)
    }

    /// The root of what exists inside, to copy files in and out. Paths in it are the guest's to change at any moment.
    pub fn root(&self) -> Option<BorrowedFd<'_>> {
        self.cell.raised().and_then(|raised| raised.root.as_ref()).map(AsFd::as_fd)
    }

    /// Looks at what it leaves, and ends it.
    pub fn close(self, observer: &mut dyn Observer) -> Result<Aftermath, RunError> {
        let Some(raised) = self.cell.raised() else { return Ok(Aftermath::default()) };
        let (changes, control) = aftermath::all(&self.plan, raised, self.since, observer)?;
        Ok(Aftermath { changes, control })
    }
}

/// Why a command did not run in a session.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    /// It cannot be one.
    #[error(transparent)]
    Plan(#[from] crate::plan::PlanError),
    /// The cell failed.
    #[error(transparent)]
    Run(#[from] RunError),
}
