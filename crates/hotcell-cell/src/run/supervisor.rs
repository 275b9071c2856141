//! The loop that watches a command until its last process is gone, and the decision how it ended.
//!
//! [`Supervisor::end`] is the only way to kill. With a cell that is the command's own: the cgroup at once where there is
//! one, and always the cell's pid 1, with which the kernel ends every process of the namespace. In a session: every
//! process but pid 1, by pid 1, which nothing inside can hinder; should it not be done in time, the whole cell.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use hotcell_base::Outcome;
use hotcell_sys::program::Image;
use hotcell_sys::spawner::{Event, Line, LineEvent, Usage, os_error};
use rustix::event::{PollFd, PollFlags};
use rustix::process::Signal;
use sha2::Digest;

use super::station::{Raised, Station};
use super::streams::{CHUNK, Input, Output};
use super::{GRACE, Observer, RemoteEnd, RunError, aftermath, fault, out_of_turn, platform};
use crate::cgroup::{Group, Sample};
use crate::launch::{self, Label};
use crate::limits::{Limit, Limits};
use crate::plan::Plan;
use crate::report::{Isolation, Report, Timings};
use crate::wall::Wall;
use crate::watch::{self, DiskUse, Watch};

/// How often counters are read.
const TICK: Duration = Duration::from_millis(20);
/// Adding up what is written in place may take one part in so many of the time.
const SCAN_SHARE: u32 = 20;
/// So many exact looks in a row must find too much memory before a tree is ended for it.
const MEMORY_LOOKS: u32 = 5;
/// What a command without a cgroup may use before its share is looked at.
const CPU_BURST: Duration = Duration::from_millis(40);
/// What a stopped tree cannot come to owe by itself.
const CPU_OVERDRAFT_MAX: Duration = Duration::from_millis(500);

/// What ends with a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reach {
    /// The cell, which was made for it.
    Cell,
    /// Nothing but what it made: there may be another after it.
    Command,
}

/// How long init may take to kill what it is told to.
const KILL_WAIT: Duration = Duration::from_secs(2);

pub(super) struct Supervisor<'a> {
    plan: &'a Plan,
    /// The command's.
    image: &'a Image<Label>,
    station: &'a mut Station,
    line: &'a Line,
    cell: &'a Raised,
    reach: Reach,
    /// When the run began, in seconds and nanoseconds of the wall clock.
    since: (i64, i64),
    started: Instant,
    outputs: [Output; 2],
    input: Input,
    kept_bytes: u64,
    /// Why we are ending the run, once we are.
    ending: Option<(Outcome, Option<Limit>)>,
    /// When the whole cell is ended, if its init does not end the command.
    kill_until: Option<Instant>,
    grace_until: Option<Instant>,
    status: Option<i32>,
    usage: Option<Usage>,
    /// How long the command ran, as init measured it.
    wall: Option<Duration>,
    is_line_closed: bool,
    exec_error: Option<io::Error>,
    /// Why the command never began, if that is not its own fault.
    failure: Option<RunError>,
    peaks: Peaks,
    paused: bool,
    /// What was on the scratch filesystem before the command.
    scratch_before: DiskUse,
    scan: DiskScan,
    watch: Watch,
}

impl<'a> Supervisor<'a> {
    /// Takes a cell over at the moment every wall stands.
    #[allow(clippy::too_many_arguments)] // One of each; a struct of them would be named once.
    pub(super) fn new(
        plan: &'a Plan,
        image: &'a Image<Label>,
        station: &'a mut Station,
        (line, cell, reach): (&'a Line, &'a Raised, Reach),
        since: (i64, i64),
        outputs: [Output; 2],
        input: Input,
    ) -> Supervisor<'a> {
        // What was used in the cell before this command is not its.
        let is_watched = station.group().is_none() && reach == Reach::Command;
        let mut watch = Watch::default();
        if let Some(proc) = cell.proc.as_ref().filter(|_| is_watched) {
            watch.begin(proc.as_fd());
        }
        let mut supervisor = Supervisor {
            plan,
            image,
            station,
            line,
            cell,
            reach,
            since,
            started: Instant::now(),
            outputs,
            input,
            kept_bytes: 0,
            ending: None,
            kill_until: None,
            grace_until: None,
            status: None,
            usage: None,
            wall: None,
            is_line_closed: false,
            exec_error: None,
            failure: None,
            peaks: Peaks::default(),
            paused: false,
            scratch_before: DiskUse::default(),
            scan: DiskScan::new(plan),
            watch,
        };
        if reach == Reach::Command {
            supervisor.scratch_before = supervisor.scratch_use();
        }
        supervisor
    }

    /// How long the command ran; of one that was killed with its cell, as long as we saw it run.
    pub(super) fn elapsed(&self) -> Duration {
        self.wall.unwrap_or_else(|| self.started.elapsed())
    }

    /// Runs until every process of the cell is gone.
    pub(super) fn supervise(
        &mut self,
        observer: &mut dyn Observer,
        remote: Option<&RemoteEnd>,
    ) -> Result<(), RunError> {
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
            if self.kill_until.is_some_and(|until| now >= until) {
                self.end_cell();
            }
            if now >= next_tick {
                if self.ending.is_none()
                    && let Some(outcome) = observer.lapsed()
                {
                    self.end(outcome, None);
                }
                self.tick();
                next_tick = Instant::now() + TICK;
            }
            let deadline_now = Some(deadline).filter(|_| self.ending.is_none());
            let wake = [Some(next_tick), deadline_now, self.grace_until, self.kill_until];
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
            let is_over = ready.line && self.line()?;
            if is_over || ready.control && self.control()? {
                // All writers are gone: what is left in the pipes is all there will be.
                for idx in 0..2 {
                    self.drain(idx, observer, true)?;
                }
                return self.failure.take().map_or(Ok(()), Err);
            }
        }
    }

    fn poll(&self, wake: Instant, take_output: bool, remote: Option<&RemoteEnd>) -> Result<Ready, RunError> {
        let (control, line) = (self.station.spawner.as_pollable(), self.line.as_pollable());
        let mut fds = vec![PollFd::new(&control, PollFlags::IN)];
        let mut whose = vec![Whose::Control];
        // Init says nothing more once it is gone.
        if !self.is_line_closed {
            fds.push(PollFd::new(&line, PollFlags::IN));
            whose.push(Whose::Line);
        }
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
            fds.push(PollFd::new(remote, PollFlags::IN));
            whose.push(Whose::Remote);
        }
        let wait = wake.saturating_duration_since(Instant::now());
        let wait = rustix::event::Timespec {
            tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(wait.subsec_nanos()),
        };
        match rustix::event::poll(&mut fds, Some(&wait)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(platform("waiting for the cell failed")(error.into())),
        }
        let mut ready = Ready::default();
        for (fd, whose) in fds.iter().zip(whose) {
            if !fd.revents().is_empty() {
                match whose {
                    Whose::Control => ready.control = true,
                    Whose::Line => ready.line = true,
                    Whose::Output(idx) => ready.outputs[idx] = true,
                    Whose::Input => ready.input = true,
                    // A remote nobody holds any more polls as closed for ever: it has nothing to say.
                    Whose::Remote => ready.remote = fd.revents().contains(PollFlags::IN),
                }
            }
        }
        Ok(ready)
    }

    /// Hears the cell's init; true when the command ended, and all that it left.
    fn line(&mut self) -> Result<bool, RunError> {
        match self.line.next_event().map_err(platform("the cell's first process cannot be heard"))? {
            Some(LineEvent::Ended { status, n_left, usage, wall }) => {
                self.status = Some(status);
                self.usage = Some(usage);
                self.wall = Some(wall);
                // While we were stopped, init looked at the clock for us.
                if status & 0x7f == libc::SIGKILL && wall > self.plan.limits.time {
                    self.ending.get_or_insert((Outcome::Timeout, Some(Limit::Time)));
                }
                // The command itself was one more.
                self.peaks.pids = self.peaks.pids.max(n_left + 1);
                Ok(true)
            }
            Some(LineEvent::CommandFault(found)) => {
                let is_exec = self.image.label(found.op).is_some_and(|(_, label)| label.what == launch::EXEC);
                // Either way its process ends, which init tells next.
                if is_exec {
                    self.exec_error = Some(os_error(found.answer));
                } else {
                    self.failure = Some(fault(self.plan, self.image, found));
                }
                Ok(false)
            }
            Some(LineEvent::Fault(found)) => Err(self.station.fault(self.plan, found)),
            Some(LineEvent::Ready(_)) => Err(out_of_turn()),
            // Killed; its spawner tells.
            None => {
                self.is_line_closed = true;
                Ok(false)
            }
        }
    }

    /// Hears the spawner; true when the last process is gone.
    fn control(&mut self) -> Result<bool, RunError> {
        match self.station.spawner.next_event().map_err(platform("the cell's first process cannot be heard"))? {
            Some(Event::Gone) => {
                // What init said before it went is on the line.
                while !self.is_line_closed && self.status.is_none() {
                    self.line()?;
                }
                self.station.note_gone();
                Ok(true)
            }
            Some(Event::Fault(found)) => Err(self.station.fault(self.plan, found)),
            Some(Event::Spawned { .. } | Event::Reaped(_)) => Err(out_of_turn()),
            None => {
                let source = io::Error::other("it was killed from outside, and the cell with it");
                Err(platform("the cell's spawner is gone")(source))
            }
        }
    }

    fn remote(&mut self, remote: Option<&RemoteEnd>) {
        for signal in remote.into_iter().flat_map(RemoteEnd::hear) {
            let is_named = Signal::from_named_raw(i32::from(signal)).is_some();
            match (is_named, self.grace_until) {
                (true, None) => {
                    self.resume();
                    // Init passes it on to the command's process group.
                    let _gone = self.line.signal(signal);
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
        // What the killed used is not added to anybody's count: look before they are gone.
        if self.station.group().is_none() {
            let look = self.cell.proc.as_ref().map(|proc| self.watch.look(proc.as_fd()));
            self.peaks.add(look);
        }
        if self.reach == Reach::Command && self.line.kill().is_ok() {
            if let Some(group) = self.station.group() {
                group.release();
            }
            self.kill_until.get_or_insert_with(|| Instant::now() + KILL_WAIT);
            return;
        }
        self.end_cell();
    }

    /// Leaves a command that cannot be watched any more: nothing of it is there when another one comes.
    pub(super) fn abandon(&mut self) {
        let give_up = Instant::now() + KILL_WAIT;
        let is_over = |this: &Self| this.status.is_some() || this.is_line_closed;
        while !is_over(self) && self.line.kill().is_ok() && Instant::now() < give_up {
            let line = self.line.as_pollable();
            let mut fds = [PollFd::new(&line, PollFlags::IN)];
            let wait = rustix::event::Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
            if matches!(rustix::event::poll(&mut fds, Some(&wait)), Ok(1..)) && self.line().is_err() {
                break;
            }
        }
        if self.status.is_none() {
            self.end_cell();
        }
    }

    /// Ends every process of the cell, its init first.
    fn end_cell(&mut self) {
        self.kill_until = None;
        if let Some(group) = self.station.group() {
            group.kill();
        }
        // Gone already is as good as killed; either way the spawner tells.
        let _gone = rustix::process::pidfd_send_signal(&self.cell.init, Signal::KILL);
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
        if let Some(group) = self.station.group() {
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
        let Some(proc) = &self.cell.proc else { return };
        let limits = &self.plan.limits;
        let look = self.watch.look(proc.as_fd());
        let files = self.scratch_use().bytes;
        let mut memory = look.memory_bytes + files;
        // A vfork between two reads makes one memory look like two, for less than a look takes.
        for again in 0..MEMORY_LOOKS {
            if memory <= limits.memory.0 {
                break;
            }
            if again > 0 {
                std::thread::sleep(Duration::from_millis(1));
            }
            memory = memory.min(watch::memory_exactly(proc.as_fd(), files));
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
        if look.cpu > earned + CPU_OVERDRAFT_MAX {
            // Stopped again and again and still running: it wakes itself by a timer.
            return self.end(Outcome::Timeout, Some(Limit::CpuShare));
        }
        if look.cpu > earned {
            self.paused = self.line.pause().is_ok();
        } else {
            self.resume();
        }
    }

    fn resume(&mut self) {
        if std::mem::take(&mut self.paused) {
            let _gone = self.line.resume();
        }
    }

    /// What the cell holds on its scratch filesystem.
    fn scratch_use(&self) -> DiskUse {
        let Some(Ok(stat)) = self.cell.scratch.as_ref().map(rustix::fs::fstatvfs) else { return DiskUse::default() };
        DiskUse {
            bytes: stat.f_blocks.saturating_sub(stat.f_bfree) * stat.f_frsize,
            n_files: stat.f_files.saturating_sub(stat.f_ffree).saturating_sub(launch::scratch_inodes(self.plan)),
            n_hidden: 0,
        }
    }

    fn disk_exceeded(&mut self) -> bool {
        let proc = self.cell.proc.as_ref().map(AsFd::as_fd);
        let workspace = self.scan.growth(self.plan, proc);
        let scratch = self.scratch_use();
        let (bytes, n_files) = (scratch.bytes + workspace.bytes, scratch.n_files + workspace.n_files);
        self.peaks.disk = self.peaks.disk.max(bytes);
        let limits = &self.plan.limits;
        let most = limits.disk.0.div_ceil(launch::PAGE) * launch::PAGE;
        // Who finds it full is not who filled it.
        let before = &self.scratch_before;
        let has_too_many =
            bytes > most && bytes > before.bytes || n_files > limits.inodes() && n_files > before.n_files;
        self.plan.asks_for(Wall::Disk) && (has_too_many || workspace.n_hidden > 0)
    }

    /// Reads the last numbers, reaps, and decides the outcome.
    pub(super) fn collect(mut self, isolation: Isolation, observer: &mut dyn Observer) -> Result<Report, RunError> {
        let sample = self.station.group().map(Group::sample_at_end);
        self.scan.next = Instant::now();
        let disk_exceeded = self.disk_exceeded();
        let usage = match self.usage {
            Some(usage) => usage,
            // Init was killed before it could say; the kernel has counted for it.
            None => self.station.reap()?,
        };
        // What a session leaves is looked at when it ends.
        let (changes, control) = match self.reach {
            Reach::Cell => aftermath::all(self.plan, self.cell, self.since, observer)?,
            Reach::Command => (None, Vec::new()),
        };
        let (outcome, limit) = self.outcome(sample.as_ref(), disk_exceeded);
        let is_hidden = limit == Some(Limit::Disk) && self.scan.hides_something();
        let detail = match &self.exec_error {
            Some(error) => Some(format!("executing it failed: {error}")),
            None if is_hidden => Some("a directory it wrote was closed, or is too deep, to be measured".to_owned()),
            None => None,
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
            pids_peak: match sample {
                Some(sample) => sample.pids_peak.map(|peak| peak.max(1)),
                None => Some(self.peaks.pids.max(1)),
            },
            disk_peak_bytes: self.peaks.disk,
            io_read_bytes: u64::try_from(usage.read_blocks).unwrap_or(0) * 512,
            io_write_bytes: u64::try_from(usage.written_blocks).unwrap_or(0) * 512,
            stdout: stdout.captured(),
            stderr: stderr.captured(),
            isolation,
            changes,
            control,
            timings: Timings::default(),
        };
        Ok(report)
    }

    fn outcome(&self, sample: Option<&Sample>, disk_exceeded: bool) -> (Outcome, Option<Limit>) {
        if let Some((outcome, limit)) = self.ending {
            return (outcome, limit);
        }
        if let Some(error) = &self.exec_error {
            let outcome = match error.raw_os_error() {
                Some(libc::ENOENT | libc::ENOTDIR) => Outcome::NotFound,
                Some(libc::EACCES | libc::ENOEXEC | libc::EISDIR | libc::ELIBBAD | libc::EINVAL | libc::ELOOP) => {
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
        if self.station.group().is_none()
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
            Some(status) if status & 0x7f == libc::SIGXFSZ => {
                // Unless it was given, the limit on one file is the disk's.
                let limit = if self.plan.limits.file_size.is_some() { Limit::FileSize } else { Limit::Disk };
                (Outcome::Disk, Some(limit))
            }
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
        let before = watched.then(|| watch::disk_use(&plan.writable, None));
        DiskScan { before, now: before.unwrap_or_default(), next: Instant::now() }
    }

    /// Whether there are directories that cannot be looked at and could be before the run.
    fn hides_something(&self) -> bool {
        self.before.is_some_and(|before| self.now.n_hidden > before.n_hidden)
    }

    /// Bytes and files more than before the run.
    fn growth(&mut self, plan: &Plan, proc: Option<BorrowedFd<'_>>) -> DiskUse {
        let Some(before) = self.before else { return DiskUse::default() };
        let now = Instant::now();
        if now >= self.next {
            self.now = watch::disk_use(&plan.writable, proc);
            self.next = Instant::now() + now.elapsed() * SCAN_SHARE;
        }
        DiskUse {
            bytes: self.now.bytes.saturating_sub(before.bytes),
            n_files: self.now.n_files.saturating_sub(before.n_files),
            // What the caller's own tree hid before is no fault of the guest's.
            n_hidden: self.now.n_hidden.saturating_sub(before.n_hidden),
        }
    }
}

#[derive(Default)]
struct Ready {
    control: bool,
    line: bool,
    outputs: [bool; 2],
    input: bool,
    remote: bool,
}

enum Whose {
    Control,
    Line,
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
