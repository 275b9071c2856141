//! The cgroup of a cell, on v1, v2 and both at once.
//!
//! ```text
//! Layout::read ─▶ Group::create (directories and limits) ─▶ the cell is born in it or enters it
//!                                                         ─▶ sample() while it runs ─▶ remove()
//! ```
//!
//! A cell's group is nested in the group hotcell itself runs in. On v2 a group that holds processes may not have
//! children with controllers, so there it is made directly below the root of the tree if that is allowed. No other
//! group is touched. On v2 the cell is cloned straight into its group. On v1 there is no such clone: init enters by itself,
//! through descriptors that come with the order to make the cell.
//!
//! Where a group with all three controllers cannot be made, there is none: limits are then held by
//! `watch`, and the report says so.

use std::cell::Cell;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hotcell_base::Bytes;
use hotcell_base::text::shown_path;
use serde::Serialize;

use crate::host::read_proc;
use crate::limits::Limits;

/// Where this process sits in each cgroup hierarchy.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Layout {
    memory_v1: Option<PathBuf>,
    pids_v1: Option<PathBuf>,
    cpu_v1: Option<PathBuf>,
    cpuacct_v1: Option<PathBuf>,
    unified: Option<PathBuf>,
    unified_root: Option<PathBuf>,
}

/// Which kind of cgroup tree a machine has.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Version {
    /// One unified tree.
    V2,
    /// A tree for each controller.
    V1,
    /// Controllers in trees of their own, and a unified tree beside them.
    Hybrid,
    /// None is mounted.
    None,
}

impl Layout {
    /// Reads where this process is.
    pub fn read() -> Layout {
        let mounts = read_proc("/proc/self/mountinfo").unwrap_or_default();
        let groups = read_proc("/proc/self/cgroup").unwrap_or_default();
        Layout::parse(&mounts, &groups)
    }

    /// The pure part of [`Layout::read`].
    pub fn parse(mountinfo: &str, self_cgroup: &str) -> Layout {
        let mut layout = Layout::default();
        for line in mountinfo.lines() {
            let Some((left, right)) = line.split_once(" - ") else { continue };
            let (left, right): (Vec<_>, Vec<_>) = (left.split(' ').collect(), right.split(' ').collect());
            let (&[_, _, _, root, point, ..], &[kind, _, options, ..]) = (&left[..], &right[..]) else { continue };
            let own = |controller: &str| own_directory(self_cgroup, controller, root, point);
            match kind {
                "cgroup2" => {
                    layout.unified = layout.unified.or_else(|| own(""));
                    layout.unified_root.get_or_insert_with(|| PathBuf::from(point));
                }
                "cgroup" => {
                    for option in options.split(',') {
                        match option {
                            "memory" => layout.memory_v1 = own(option),
                            "pids" => layout.pids_v1 = own(option),
                            "cpu" => layout.cpu_v1 = own(option),
                            "cpuacct" => layout.cpuacct_v1 = own(option),
                            _ => {}
                        }
                    }
                }
                _ => {}
            }
        }
        layout
    }

    /// Every directory that a group of this name may consist of.
    pub fn candidates(&self, name: &str) -> Vec<PathBuf> {
        self.parents().into_iter().map(|parent| parent.join(name)).collect()
    }

    /// Every directory that groups may be made in.
    pub(crate) fn parents(&self) -> Vec<&Path> {
        let parents =
            [&self.memory_v1, &self.pids_v1, &self.cpu_v1, &self.cpuacct_v1, &self.unified, &self.unified_root];
        let mut parents: Vec<&Path> = parents.into_iter().flatten().map(|parent| &**parent).collect();
        parents.sort_unstable();
        parents.dedup();
        parents
    }

    /// Which kind of tree this is.
    pub fn version(&self) -> Version {
        let v1 = self.memory_v1.is_some() || self.pids_v1.is_some() || self.cpu_v1.is_some();
        match (v1, self.unified.is_some()) {
            (true, true) => Version::Hybrid,
            (true, false) => Version::V1,
            (false, true) => Version::V2,
            (false, false) => Version::None,
        }
    }
}

/// The directory of our own group: what `/proc/self/cgroup` says, seen through one mount.
fn own_directory(self_cgroup: &str, controller: &str, root: &str, point: &str) -> Option<PathBuf> {
    let path = self_cgroup.lines().find_map(|line| {
        let mut parts = line.splitn(3, ':');
        let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
        controllers.split(',').any(|one| one == controller).then_some(path)
    })?;
    // A bind mount or a cgroup namespace shows only what is below `root`.
    let below = if root == "/" { path } else { path.strip_prefix(root)? };
    Some(Path::new(point).join(below.trim_start_matches('/')))
}

/// Why there is no group.
#[derive(Debug, thiserror::Error)]
pub enum NoGroup {
    /// No tree has the controller.
    #[error("the {0} controller is not mounted here")]
    NoController(&'static str),
    /// What is in it takes more than it may.
    #[error("its files and pages take {used} of memory already, and the limit would be {limit}")]
    Full {
        /// What is taken.
        used: Bytes,
        /// What may be.
        limit: Bytes,
    },
    /// The tree does not let us.
    #[error("cannot {what} `{}`", shown_path(path))]
    Refused {
        /// What was tried.
        what: &'static str,
        /// On which file or directory.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

impl NoGroup {
    /// Whether there is one of this name already.
    pub(crate) fn is_taken(&self) -> bool {
        matches!(self, NoGroup::Refused { source, .. } if source.kind() == io::ErrorKind::AlreadyExists)
    }
}

/// The group of one cell.
#[derive(Debug)]
pub struct Group {
    place: Place,
    /// Those it was made with, and those that hold now.
    limits: Limits,
    limits_now: Limits,
    /// Every directory made for this cell.
    directories: Vec<PathBuf>,
    /// The unified directory, which the cell is cloned into.
    unified: Option<PathBuf>,
    /// What the cell's init needs to be in it; see [`Group::doors`].
    doors: Vec<OwnedFd>,
    counters: Counters,
    /// What was counted before what is in it now.
    before: Sample,
    /// What was counted when the last command ended.
    last: Cell<Option<Sample>>,
    is_used_up: Cell<bool>,
    is_released: Cell<bool>,
}

/// Where a group is.
#[derive(Clone, Debug)]
enum Place {
    /// A directory for each controller.
    V1 { memory: PathBuf, pids: PathBuf, cpu: PathBuf, cpuacct: Option<PathBuf> },
    /// One for all.
    V2 { directory: PathBuf },
}

/// How a cell's init comes into a group: in the order of [`Group::doors`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Doors {
    /// So many v1 groups, for each its `tasks` and its list.
    pub(crate) n_entered: usize,
    /// Whether the unified directory and its list follow.
    pub(crate) is_born_into: bool,
}

/// What the kernel counts about a group right now.
#[derive(Clone, Copy, Default, Debug)]
pub struct Sample {
    /// Processes the kernel killed for want of memory.
    pub oom_kills: u64,
    /// Times a process or thread was refused.
    pub pids_refused: u64,
    /// Most memory used at one time.
    pub memory_peak: Option<u64>,
    /// Most processes and threads of the command at one time.
    pub pids_peak: Option<u64>,
    /// Processor time used.
    pub cpu_us: Option<u64>,
}

impl Group {
    /// Makes a group named `name` with these limits, or nothing at all.
    pub fn create(layout: &Layout, name: &str, limits: &Limits) -> Result<Group, NoGroup> {
        match layout.version() {
            Version::V2 => Group::create_v2(layout, name, limits),
            _ => Group::create_v1(layout, name, limits),
        }
    }

    fn create_v1(layout: &Layout, name: &str, limits: &Limits) -> Result<Group, NoGroup> {
        let sub = |parent: &Option<PathBuf>, controller| match parent {
            Some(parent) => Ok(parent.join(name)),
            None => Err(NoGroup::NoController(controller)),
        };
        let unified = layout.unified.as_ref().map(|parent| parent.join(name));
        let place = Place::V1 {
            memory: sub(&layout.memory_v1, "memory")?,
            pids: sub(&layout.pids_v1, "pids")?,
            cpu: sub(&layout.cpu_v1, "cpu")?,
            // Where there is no unified tree, the processor time is counted by a controller of its own.
            cpuacct: if unified.is_none() { Some(sub(&layout.cpuacct_v1, "cpuacct")?) } else { None },
        };
        match Group::make(place.clone(), unified.clone(), limits) {
            // The unified tree beside them adds one kill for all and the processor time, and may be closed to us.
            Err(NoGroup::Refused { path, .. }) if unified.is_some_and(|unified| path.starts_with(unified)) => {
                let Place::V1 { memory, pids, cpu, .. } = place else { unreachable!("made above") };
                let cpuacct = Some(sub(&layout.cpuacct_v1, "cpuacct")?);
                Group::make(Place::V1 { memory, pids, cpu, cpuacct }, None, limits)
            }
            made => made,
        }
    }

    fn create_v2(layout: &Layout, name: &str, limits: &Limits) -> Result<Group, NoGroup> {
        // Beside us if our own group may have children with controllers, else directly below the root of the tree.
        let parents = [layout.unified.as_deref(), layout.unified_root.as_deref()];
        let mut refusal = NoGroup::NoController("memory");
        for parent in parents.into_iter().flatten() {
            let made = enable_controllers(parent).and_then(|()| {
                let directory = parent.join(name);
                Group::make(Place::V2 { directory: directory.clone() }, Some(directory), limits)
            });
            match made {
                Ok(group) => return Ok(group),
                Err(error) => refusal = error,
            }
        }
        Err(refusal)
    }

    /// Makes the directories and sets the limits, or leaves nothing.
    fn make(place: Place, unified: Option<PathBuf>, limits: &Limits) -> Result<Group, NoGroup> {
        let mut made = Made(Vec::new());
        for directory in place.controlled().into_iter().chain(unified.as_deref()) {
            made.directory(directory)?;
        }
        place.limit(limits)?;
        if let Place::V2 { directory } = &place {
            // One for all.
            write(directory, "memory.oom.group", 1)?;
        }
        let doors = doors(&place, unified.as_deref())?;
        let counters = Counters::open(&place, unified.as_deref());
        let directories = std::mem::take(&mut made.0);
        let (limits_now, limits) = (limits.clone(), limits.clone());
        let (before, is_used_up, is_released) = (Sample::default(), Cell::new(false), Cell::new(false));
        Ok(Group {
            place,
            limits,
            limits_now,
            directories,
            unified,
            doors,
            counters,
            before,
            last: Cell::new(None),
            is_used_up,
            is_released,
        })
    }

    /// What a cell's init needs: of each v1 group `tasks` to enter it and the list to see itself in it; then the unified
    /// directory to be born into and its list.
    pub(crate) fn doors(&self) -> &[OwnedFd] {
        &self.doors
    }

    /// What is behind the doors.
    pub(crate) fn ways_in(&self) -> Doors {
        let n_entered = self.place.entered().len();
        Doors { n_entered, is_born_into: self.unified.is_some() }
    }

    /// Every directory of this group.
    pub fn directories(&self) -> &[PathBuf] {
        &self.directories
    }

    /// Makes it ready for another cell, when the one in it is gone: everything it counts from now on is that cell's. The
    /// kernel's peaks can be lowered on v1 for memory alone, so a group that had more processes than any cell must
    /// have is made anew, and so is one that keeps much of what it had in memory.
    pub(crate) fn renew(&mut self) -> Result<(), NoGroup> {
        if self.can_go_on() {
            return Ok(());
        }
        remove_all(&self.directories)?;
        *self = Group::make(self.place.clone(), self.unified.clone(), &self.limits)?;
        Ok(())
    }

    fn can_go_on(&mut self) -> bool {
        let Place::V1 { memory, .. } = &self.place else { return false };
        if self.is_used_up.get() || self.limits_now != self.limits {
            return false;
        }
        let has_residue = |this: &Self| this.counters.usage().is_none_or(|usage| usage > RESIDUE_MAX);
        if has_residue(self) {
            // Pages of files that are in no cell any more; what cannot be given back shows below.
            let _as_far_as_can_be = write(memory, "memory.force_empty", 0);
        }
        let is_lowered = !has_residue(self) && self.counters.lower_memory_peak();
        let now = self.counters.read();
        self.before = Sample { pids_peak: None, memory_peak: None, ..now };
        is_lowered && now.pids_peak.is_some_and(|peak| peak <= 1)
    }

    /// Makes it ready for another command of the cell that is in it: what is counted from now on is that command's, as
    /// far as the kernel lets peaks be lowered, and its limits hold.
    pub(crate) fn begin(&mut self, limits: &Limits) -> Result<(), NoGroup> {
        self.limit(limits)?;
        let is_lowered = self.counters.lower_memory_peak();
        // Since the last one ended, nobody but init has run.
        let now = self.last.take().unwrap_or_else(|| self.counters.read());
        self.before = Sample { memory_peak: now.memory_peak.filter(|_| !is_lowered), ..now };
        Ok(())
    }

    /// Sets other limits, until the next cell.
    pub(crate) fn limit(&mut self, limits: &Limits) -> Result<(), NoGroup> {
        if self.is_released.get() || self.limits_now != *limits {
            let used = self.counters.usage();
            if let (Place::V2 { .. }, Some(used)) = (&self.place, used.filter(|used| *used > limits.memory.0)) {
                // There, whoever holds it would be killed for it: init.
                return Err(NoGroup::Full { used: Bytes(used), limit: limits.memory });
            }
            // Until all of them hold, it is not known which do.
            self.is_released.set(true);
            self.place.limit(limits).map_err(|error| match (error, used) {
                (NoGroup::Refused { source, .. }, Some(used)) if source.raw_os_error() == Some(libc::EBUSY) => {
                    NoGroup::Full { used: Bytes(used), limit: limits.memory }
                }
                (error, _) => error,
            })?;
            self.is_released.set(false);
            self.limits_now = limits.clone();
        }
        Ok(())
    }

    /// Has a lack of memory end what needs it, and not the whole cell: its init outlives its commands.
    pub(crate) fn outlive_commands(&self) -> Result<(), NoGroup> {
        match &self.place {
            Place::V1 { .. } => Ok(()),
            Place::V2 { directory } => write(directory, "memory.oom.group", 0),
        }
    }

    /// What the kernel has counted so far of the cell that is in it, or of its command. A peak that is not above an
    /// earlier one is not known.
    pub fn sample(&self) -> Sample {
        self.since_before(self.counters.read())
    }

    /// The same when a command has ended: where the next one begins.
    pub(crate) fn sample_at_end(&self) -> Sample {
        let now = self.counters.read();
        self.last.set(Some(now));
        self.since_before(now)
    }

    fn since_before(&self, now: Sample) -> Sample {
        let risen = |now: Option<u64>, before: Option<u64>| now.filter(|now| before.is_none_or(|before| *now > before));
        Sample {
            memory_peak: risen(now.memory_peak, self.before.memory_peak),
            pids_peak: risen(now.pids_peak, self.before.pids_peak),
            oom_kills: now.oom_kills - self.before.oom_kills.min(now.oom_kills),
            pids_refused: now.pids_refused - self.before.pids_refused.min(now.pids_refused),
            cpu_us: now.cpu_us.map(|cpu| cpu.saturating_sub(self.before.cpu_us.unwrap_or(0))),
        }
    }

    /// Lets throttled processes run, until the next command: they die only when it is their turn to.
    pub(crate) fn release(&self) {
        self.is_released.set(true);
        let (path, value) = match &self.place {
            Place::V1 { cpu, .. } => (cpu.join("cpu.cfs_quota_us"), "-1"),
            Place::V2 { directory } => (directory.join("cpu.max"), "max"),
        };
        let _dies_later = fs::write(path, value);
    }

    /// Kills every process of the group at once, where the kernel can.
    pub fn kill(&self) {
        self.is_used_up.set(true);
        self.release();
        if let Some(directory) = &self.unified {
            // Kernels before 5.14 have no such file; the pid namespace's init is killed as well.
            let _killed_otherwise = fs::write(directory.join("cgroup.kill"), "1");
        }
    }

    /// Removes the group; its processes must be gone. What stays is named in the error.
    pub fn remove(self) -> Result<(), NoGroup> {
        remove_all(&self.directories)
    }
}

impl Place {
    /// The directories that have controllers.
    fn controlled(&self) -> Vec<&Path> {
        match self {
            Place::V1 { memory, pids, cpu, cpuacct } => [Some(memory), Some(pids), Some(cpu), cpuacct.as_ref()]
                .into_iter()
                .flatten()
                .map(|path| &**path)
                .collect(),
            Place::V2 { directory } => vec![directory],
        }
    }

    /// The v1 directories the cell's init must enter by itself, each once.
    fn entered(&self) -> Vec<&Path> {
        match self {
            Place::V1 { .. } => {
                let mut entered = self.controlled();
                entered.sort_unstable();
                entered.dedup();
                entered
            }
            Place::V2 { .. } => Vec::new(),
        }
    }

    fn limit(&self, limits: &Limits) -> Result<(), NoGroup> {
        match self {
            Place::V1 { memory, pids, cpu, .. } => {
                // The limit with swap may never be the lower one: lowering begins with the other, raising with this.
                let raised = write_if_there(memory, "memory.memsw.limit_in_bytes", limits.memory.0);
                write(memory, "memory.limit_in_bytes", limits.memory.0)?;
                raised.or_else(|_| write_if_there(memory, "memory.memsw.limit_in_bytes", limits.memory.0))?;
                write(pids, "pids.max", pids_max(limits))?;
                // The period is the kernel's default, which is a tenth of a second.
                write(cpu, "cpu.cfs_quota_us", quota_us(limits))
            }
            Place::V2 { directory } => {
                write(directory, "memory.max", limits.memory.0)?;
                write_if_there(directory, "memory.swap.max", 0)?;
                write(directory, "pids.max", pids_max(limits))?;
                write(directory, "cpu.max", format!("{} {PERIOD_US}", quota_us(limits)))
            }
        }
    }
}

fn enable_controllers(parent: &Path) -> Result<(), NoGroup> {
    let enabled = fs::read_to_string(parent.join("cgroup.subtree_control")).unwrap_or_default();
    for controller in ["memory", "pids", "cpu"] {
        if !enabled.split_whitespace().any(|one| one == controller) {
            write(parent, "cgroup.subtree_control", format!("+{controller}"))?;
        }
    }
    Ok(())
}

fn doors(place: &Place, unified: Option<&Path>) -> Result<Vec<OwnedFd>, NoGroup> {
    let open = |path: PathBuf, write: bool| match File::options().read(!write).write(write).open(&path) {
        Ok(file) => Ok(OwnedFd::from(file)),
        Err(source) => Err(NoGroup::Refused { what: "open", path, source }),
    };
    let mut doors = Vec::new();
    for directory in place.entered() {
        doors.push(open(directory.join("tasks"), true)?);
        doors.push(open(directory.join("cgroup.procs"), false)?);
    }
    if let Some(directory) = unified {
        doors.push(open(directory.to_owned(), false)?);
        doors.push(open(directory.join("cgroup.procs"), false)?);
    }
    Ok(doors)
}

/// The files that a group's numbers are read from, kept open: they are read after every run, and while it runs.
#[derive(Debug)]
struct Counters {
    memory_events: Option<File>,
    memory_peak: Option<File>,
    memory_usage: Option<File>,
    pids_events: Option<File>,
    pids_peak: Option<File>,
    cpu_stat: Option<File>,
    cpuacct_usage: Option<File>,
}

impl Counters {
    fn open(place: &Place, unified: Option<&Path>) -> Counters {
        let open = |directory: &Path, name: &str| File::open(directory.join(name)).ok();
        let cpu_stat = unified.and_then(|directory| open(directory, "cpu.stat"));
        match place {
            Place::V1 { memory, pids, cpuacct, .. } => Counters {
                memory_events: open(memory, "memory.oom_control"),
                // Writing to it lowers it.
                memory_peak: File::options().read(true).write(true).open(memory.join("memory.max_usage_in_bytes")).ok(),
                memory_usage: open(memory, "memory.usage_in_bytes"),
                pids_events: open(pids, "pids.events"),
                pids_peak: open(pids, "pids.peak"),
                cpu_stat,
                cpuacct_usage: cpuacct.as_ref().and_then(|directory| open(directory, "cpuacct.usage")),
            },
            Place::V2 { directory } => Counters {
                memory_events: open(directory, "memory.events"),
                // Since Linux 6.12, writing to it lowers what this descriptor reads.
                memory_peak: File::options()
                    .read(true)
                    .write(true)
                    .open(directory.join("memory.peak"))
                    .ok()
                    .or_else(|| open(directory, "memory.peak")),
                memory_usage: open(directory, "memory.current"),
                pids_events: open(directory, "pids.events"),
                pids_peak: open(directory, "pids.peak"),
                cpu_stat,
                cpuacct_usage: None,
            },
        }
    }

    fn read(&self) -> Sample {
        let text = |file: &Option<File>| file.as_ref().map(pread).unwrap_or_default();
        let number = |file: &Option<File>| text(file).trim().parse::<u64>().ok();
        Sample {
            oom_kills: field(&text(&self.memory_events), "oom_kill").unwrap_or(0),
            pids_refused: field(&text(&self.pids_events), "max").unwrap_or(0),
            memory_peak: number(&self.memory_peak),
            pids_peak: number(&self.pids_peak).map(|n| n.saturating_sub(N_OURS)),
            cpu_us: match &self.cpuacct_usage {
                Some(_) => number(&self.cpuacct_usage).map(|ns| ns / 1000),
                None => field(&text(&self.cpu_stat), "usage_usec"),
            },
        }
    }

    /// What the group holds in memory now.
    fn usage(&self) -> Option<u64> {
        self.memory_usage.as_ref().and_then(|file| pread(file).trim().parse().ok())
    }

    fn lower_memory_peak(&self) -> bool {
        self.memory_peak.as_ref().is_some_and(|file| file.write_at(b"0", 0).is_ok())
    }
}

/// A counter's file, from its start.
fn pread(file: &File) -> String {
    let mut bytes = [0; 4096];
    // A group that is gone counts nothing.
    let n = file.read_at(&mut bytes, 0).unwrap_or(0);
    String::from_utf8_lossy(&bytes[..n]).into_owned()
}

/// Removes empty groups. A group stays busy for a moment after its last process is reaped.
pub fn remove_all(directories: &[PathBuf]) -> Result<(), NoGroup> {
    let mut result = Ok(());
    for directory in directories {
        let give_up = Instant::now() + Duration::from_secs(2);
        loop {
            match fs::remove_dir(directory) {
                Ok(()) => break,
                Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < give_up => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(source) => {
                    result = Err(NoGroup::Refused { what: "remove", path: directory.clone(), source });
                    break;
                }
            }
        }
    }
    result
}

const PERIOD_US: u64 = 100_000;
/// What an earlier cell may have left in a group that is used again.
const RESIDUE_MAX: u64 = 1 << 20;

fn quota_us(limits: &Limits) -> u64 {
    u64::from(limits.cpus.milli) * PERIOD_US / 1000
}

/// The cell's own init is one process more than the command may have.
fn pids_max(limits: &Limits) -> u64 {
    u64::from(limits.pids) + N_OURS
}

/// The cell's init.
const N_OURS: u64 = 1;

/// Directories made so far; removed again unless the group was finished.
struct Made(Vec<PathBuf>);

impl Made {
    fn directory(&mut self, path: &Path) -> Result<(), NoGroup> {
        match fs::create_dir(path) {
            Ok(()) => {
                self.0.push(path.to_owned());
                Ok(())
            }
            // Controllers mounted together share one directory.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && self.0.iter().any(|made| made == path) => {
                Ok(())
            }
            Err(source) => Err(NoGroup::Refused { what: "make", path: path.to_owned(), source }),
        }
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        for path in self.0.drain(..) {
            // Empty and ours; if the kernel keeps it a moment longer, the next sweep finds it.
            let _swept_later = fs::remove_dir(path);
        }
    }
}

fn write(directory: &Path, file: &str, value: impl ToString) -> Result<(), NoGroup> {
    let path = directory.join(file);
    let written =
        File::options().write(true).open(&path).and_then(|mut file| file.write_all(value.to_string().as_bytes()));
    written.map_err(|source| NoGroup::Refused { what: "write", path, source })
}

fn write_if_there(directory: &Path, file: &str, value: impl ToString) -> Result<(), NoGroup> {
    match write(directory, file, value) {
        Err(NoGroup::Refused { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(()),
        written => written,
    }
}

fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hybrid_tree_nests_in_our_own_groups() {
        let mounts = "\
            32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n\
            35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n\
            39 31 0:36 / /sys/fs/cgroup/pids rw,relatime - cgroup cgroup rw,pids\n\
            41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n";
        let groups = "8:pids:/\n4:memory:/job/abc\n1:cpu:/\n0::/\n";
        let layout = Layout::parse(mounts, groups);
        assert_eq!(layout.version(), Version::Hybrid);
        assert_eq!(layout.memory_v1.as_deref(), Some(Path::new("/sys/fs/cgroup/memory/job/abc")));
        assert_eq!(layout.unified.as_deref(), Some(Path::new("/sys/fs/cgroup/unified/")));
    }

    #[test]
    fn controllers_mounted_together_and_v2_alone_are_understood() {
        let together = "1 2 0:1 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n";
        let layout = Layout::parse(together, "3:cpu,cpuacct:/user.slice\n");
        assert_eq!(layout.cpu_v1.as_deref(), Some(Path::new("/sys/fs/cgroup/cpu,cpuacct/user.slice")));
        assert_eq!(layout.version(), Version::V1);
        let v2 = Layout::parse("1 2 0:1 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n", "0::/user.slice/a.scope\n");
        assert_eq!(v2.version(), Version::V2);
        assert_eq!(v2.unified.as_deref(), Some(Path::new("/sys/fs/cgroup/user.slice/a.scope")));
    }

    #[test]
    fn a_tree_seen_through_a_bind_mount_or_not_at_all() {
        let bound = "1 2 0:1 /docker/x /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n";
        assert_eq!(
            Layout::parse(bound, "3:pids:/docker/x/y\n").pids_v1.as_deref(),
            Some(Path::new("/sys/fs/cgroup/pids/y"))
        );
        assert_eq!(Layout::parse("", "0::/\n").version(), Version::None);
    }
}
