//! A pool: stations of one plan that are kept open, so that a run waits for nothing that could be done before.
//!
//! ```text
//!            ┌──── ready ◀──── keeper: renew (or open anew), raise ◀────┐
//! run ──────▶│ a station, and in it a cell that stands ─▶ command ─▶ report ────┤ back to the keeper
//! ```
//!
//! A cell is used once: what a command leaves in it is gone with it, and the next one is made from the ground again.
//! Keepers are threads; when the pool is dropped they end, and every cell with them. A process that is killed takes its
//! spawners, and they their cells and groups, with it.

use std::collections::VecDeque;
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::plan::{Exec, Plan};
use crate::report::Report;
use crate::run::station::{Rising, Station};
use crate::run::strays::{self, group_name};
use crate::run::{Memory, Observer, RemoteEnd, RunError, Stdin, now};
use crate::session::ExecError;

/// What is done before anybody asks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ahead {
    /// The spawner, its groups, its ground and its next namespaces. A cell is raised on demand.
    Station,
    /// And a cell, whose walls stand and are proven.
    Cell,
}

/// What a pool has done.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Counters {
    /// Runs that found a station ready.
    pub hits: u64,
    /// Runs that had to wait for one.
    pub waits: u64,
    /// Stations that were used again.
    pub renewed: u64,
    /// Stations that were opened.
    pub opened: u64,
}

/// Stations of one plan.
#[derive(Debug)]
pub struct Pool {
    plan: Arc<Plan>,
    shared: Arc<Shared>,
    /// Where used stations go; none while it is being dropped.
    used: Option<Sender<Option<Station>>>,
    keepers: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Whether nothing is made ready any more.
    is_closing: AtomicBool,
    ready: Mutex<Ready>,
    came: Condvar,
    hits: AtomicU64,
    waits: AtomicU64,
    renewed: AtomicU64,
    opened: AtomicU64,
}

#[derive(Debug, Default)]
struct Ready {
    stations: VecDeque<(Station, Option<Rising>)>,
    /// Why stations could not be made ready, one for each that is missing.
    failures: Vec<RunError>,
}

impl Shared {
    fn ready(&self) -> MutexGuard<'_, Ready> {
        // Whoever panicked while it held the list had not changed it yet, or was done.
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pool {
    /// Keeps so many stations of a plan open. What is written in place has its own rules for as long as a cell stands,
    /// and is no plan for a pool. A wall that may be missing and does not stand is an error here.
    ///
    /// # Errors
    /// If the first station cannot be opened, or its first cell does not stand.
    pub fn open(plan: Plan, size: usize, ahead: Ahead) -> Result<Pool, RunError> {
        if !plan.writable.is_empty() {
            return Err(RunError::InPlace);
        }
        strays::sweep(&plan.host.cgroups);
        let plan = Arc::new(plan);
        let shared = Arc::new(Shared::default());
        // Here, so that whoever opens a pool hears why it cannot be had.
        let mut first = open(&plan, &shared)?;
        let rising = raise(&plan, &mut first, ahead)?;
        shared.ready().stations.push_back((first, rising));
        let (used, to_keep) = mpsc::channel();
        for _ in 1..size.max(1) {
            let _listens = used.send(None);
        }
        let to_keep = Arc::new(Mutex::new(to_keep));
        let mut pool = Pool { plan, shared, used: Some(used), keepers: Vec::new() };
        // Each waits for the kernel most of the time.
        let n_keepers = std::thread::available_parallelism().map_or(1, NonZero::get).min(size.max(1));
        for _ in 0..n_keepers {
            let (plan, shared, to_keep) = (Arc::clone(&pool.plan), Arc::clone(&pool.shared), Arc::clone(&to_keep));
            let next = move || to_keep.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let keeper = std::thread::Builder::new().name("hotcell-pool".to_owned()).spawn(move || {
                while let Ok(station) = next() {
                    keep(&plan, &shared, station, ahead);
                }
            });
            let failed = |source| RunError::Platform { what: "the keeper of a pool cannot be started", source };
            pool.keepers.push(keeper.map_err(failed)?);
        }
        Ok(pool)
    }

    /// What it has done so far.
    pub fn counters(&self) -> Counters {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Shared { hits, waits, renewed, opened, .. } = &*self.shared;
        Counters { hits: read(hits), waits: read(waits), renewed: read(renewed), opened: read(opened) }
    }

    /// Runs the plan's command without input and keeps its output in memory.
    pub fn run(&self) -> Result<Report, RunError> {
        let mut memory = Memory::default();
        let mut report = self.run_with(Stdin::Null, &mut memory, None)?;
        memory.give(&mut report);
        Ok(report)
    }

    /// Runs another command than the plan's in a cell of its own, without input, and keeps its output in memory.
    ///
    /// # Errors
    /// If the command cannot be one, or its cell failed.
    pub fn exec(&self, exec: &Exec) -> Result<Report, ExecError> {
        let plan = self.plan.exec(exec)?;
        let mut memory = Memory::default();
        let mut report = self.exec_with(&plan, Stdin::Null, &mut memory, None)?;
        memory.give(&mut report);
        Ok(report)
    }

    /// Runs the plan's command in a cell of its own. Waits while all stations are in use.
    pub fn run_with(
        &self,
        stdin: Stdin,
        observer: &mut dyn Observer,
        remote: Option<&RemoteEnd>,
    ) -> Result<Report, RunError> {
        self.exec_with(&self.plan, stdin, observer, remote)
    }

    /// Runs a command that [`Plan::exec`] of the pool's plan made, in a cell of its own.
    pub fn exec_with(
        &self,
        plan: &Plan,
        stdin: Stdin,
        observer: &mut dyn Observer,
        remote: Option<&RemoteEnd>,
    ) -> Result<Report, RunError> {
        let times = (Instant::now(), now());
        let (mut station, rising) = self.take()?;
        // However this ends, something comes back.
        let mut back = Back { pool: self, station: None };
        let ran = match rising {
            Some(rising) => Ok(rising),
            None => station.raise(),
        }
        .and_then(|rising| station.run((rising, &self.plan), plan, &mut Some(stdin), observer, remote, times));
        // One that failed is not used again.
        back.station = ran.is_ok().then_some(station);
        ran
    }

    /// Hands a station, or the lack of one, to a keeper.
    fn keep(&self, station: Option<Station>) {
        if let Some(used) = &self.used {
            let _listens = used.send(station);
        }
    }

    fn take(&self) -> Result<(Station, Option<Rising>), RunError> {
        let mut ready = self.shared.ready();
        let counter = if ready.stations.is_empty() { &self.shared.waits } else { &self.shared.hits };
        counter.fetch_add(1, Ordering::Relaxed);
        loop {
            let failure = ready.failures.pop();
            if failure.is_some() {
                // It is tried again, whoever hears of it.
                self.keep(None);
            }
            if let Some(found) = ready.stations.pop_front() {
                return Ok(found);
            }
            if let Some(failure) = failure {
                return Err(failure);
            }
            ready = self.shared.came.wait(ready).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Gives back what was taken.
struct Back<'a> {
    pool: &'a Pool,
    station: Option<Station>,
}

impl Drop for Back<'_> {
    fn drop(&mut self) {
        self.pool.keep(self.station.take());
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.is_closing.store(true, Ordering::Relaxed);
        self.used = None;
        for keeper in self.keepers.drain(..) {
            // A keeper that panicked has ended, too.
            let _ended = keeper.join();
        }
    }
}

/// Makes a station ready again, or opens another in its place.
fn keep(plan: &Plan, shared: &Shared, station: Option<Station>, ahead: Ahead) {
    if shared.is_closing.load(Ordering::Relaxed) {
        return;
    }
    let again = station.and_then(|mut station| station.renew().is_ok().then_some(station));
    let made = match again {
        Some(station) => {
            shared.renewed.fetch_add(1, Ordering::Relaxed);
            Ok(station)
        }
        None => open(plan, shared),
    };
    let made = made.and_then(|mut station| raise(plan, &mut station, ahead).map(|rising| (station, rising)));
    let mut ready = shared.ready();
    match made {
        Ok(made) => ready.stations.push_back(made),
        Err(failure) => ready.failures.push(failure),
    }
    drop(ready);
    shared.came.notify_one();
}

fn open(plan: &Plan, shared: &Shared) -> Result<Station, RunError> {
    shared.opened.fetch_add(1, Ordering::Relaxed);
    Station::open(plan, &group_name("hotcell-pool"))
}

fn raise(plan: &Plan, station: &mut Station, ahead: Ahead) -> Result<Option<Rising>, RunError> {
    match ahead {
        Ahead::Station => Ok(None),
        Ahead::Cell => {
            let mut rising = station.raise()?;
            station.ready(plan, &mut rising)?;
            Ok(Some(rising))
        }
    }
}
