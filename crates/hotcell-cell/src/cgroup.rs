//! The cgroup of a cell, on v1, v2 and both at once.
//!
//! ```text
//! Layout::read ─▶ Group::create (directories and limits) ─▶ the cell is born in it or enters it
//!                                                         ─▶ sample() while it runs ─▶ remove()
//! ```
//!
//! A cell's group is nested in the group hotcell itself runs in. On v2 a group that holds processes may not have
//! children with controllers, so there it is made directly below the root of the tree if that is allowed. No other
//! group is touched. On v2 the cell is cloned straight into its group. On v1 there is no such clone: init enters by writing to
//! `cgroup.procs`, which takes a lock of the whole machine and milliseconds at worst.
//!
//! Where a group with all three controllers cannot be made, there is none: limits are then held by
//! `watch`, and the report says so.

use std::cell::Cell;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hotcell_base::text::shown_path;
use serde::Serialize;

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
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
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
        let parents =
            [&self.memory_v1, &self.pids_v1, &self.cpu_v1, &self.cpuacct_v1, &self.unified, &self.unified_root];
        let mut paths: Vec<PathBuf> = parents.into_iter().flatten().map(|parent| parent.join(name)).collect();
        paths.sort_unstable();
        paths.dedup();
        paths
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

/// The group of one cell.
#[derive(Debug)]
pub struct Group {
    memory: PathBuf,
    pids: PathBuf,
    /// Every directory made for this cell.
    directories: Vec<PathBuf>,
    /// v1 directories the cell's init must enter by itself.
    enter: Vec<PathBuf>,
    /// The unified directory the cell is cloned into.
    clone_into: Option<PathBuf>,
    /// The v1 cpu group; none on v2, where one directory has all controllers.
    cpu_v1: Option<PathBuf>,
    /// Where processor time is counted on v1 alone.
    cpuacct: Option<PathBuf>,
    /// What was counted before the cell that is in it now.
    before: Sample,
    is_used_up: Cell<bool>,
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
        let mut made = Made(Vec::new());
        let group = match layout.version() {
            Version::V2 => Group::create_v2(layout, name, limits, &mut made),
            _ => Group::create_v1(layout, name, limits, &mut made),
        }?;
        made.0.clear();
        Ok(group)
    }

    fn create_v1(layout: &Layout, name: &str, limits: &Limits, made: &mut Made) -> Result<Group, NoGroup> {
        let mut sub = |parent: &Option<PathBuf>, controller| match parent {
            Some(parent) => made.directory(parent.join(name)),
            None => Err(NoGroup::NoController(controller)),
        };
        let memory = sub(&layout.memory_v1, "memory")?;
        let pids = sub(&layout.pids_v1, "pids")?;
        let cpu = sub(&layout.cpu_v1, "cpu")?;
        write(&memory, "memory.limit_in_bytes", limits.memory.0)?;
        if memory.join("memory.memsw.limit_in_bytes").exists() {
            write(&memory, "memory.memsw.limit_in_bytes", limits.memory.0)?;
        }
        write(&pids, "pids.max", pids_max(limits))?;
        write(&cpu, "cpu.cfs_period_us", PERIOD_US)?;
        write(&cpu, "cpu.cfs_quota_us", quota_us(limits))?;
        // The unified tree beside them adds one kill for all and the processor time, without any controller.
        let clone_into = layout.unified.as_ref().and_then(|parent| made.directory(parent.join(name)).ok());
        let mut enter = vec![memory.clone(), pids.clone(), cpu.clone()];
        // Where there is no unified tree, the processor time is counted by a controller of its own.
        let cpuacct = match (&clone_into, &layout.cpuacct_v1) {
            (Some(_), _) => None,
            (None, Some(parent)) => Some(made.directory(parent.join(name))?),
            (None, None) => return Err(NoGroup::NoController("cpuacct")),
        };
        enter.extend(cpuacct.clone());
        enter.sort_unstable();
        enter.dedup();
        let (before, is_used_up) = (Sample::default(), Cell::new(false));
        let (directories, cpu_v1) = (made.0.clone(), Some(cpu));
        Ok(Group { directories, enter, clone_into, cpu_v1, cpuacct, memory, pids, before, is_used_up })
    }

    fn create_v2(layout: &Layout, name: &str, limits: &Limits, made: &mut Made) -> Result<Group, NoGroup> {
        // Beside us if our own group may have children with controllers, else directly below the root of the tree.
        let parents = [layout.unified.as_deref(), layout.unified_root.as_deref()];
        let mut refusal = NoGroup::NoController("memory");
        for parent in parents.into_iter().flatten() {
            match Group::create_v2_below(parent, name, limits, made) {
                Ok(group) => return Ok(group),
                Err(error) => refusal = error,
            }
            made.remove();
        }
        Err(refusal)
    }

    fn create_v2_below(parent: &Path, name: &str, limits: &Limits, made: &mut Made) -> Result<Group, NoGroup> {
        let enabled = fs::read_to_string(parent.join("cgroup.subtree_control")).unwrap_or_default();
        for controller in ["memory", "pids", "cpu"] {
            if !enabled.split_whitespace().any(|one| one == controller) {
                write(parent, "cgroup.subtree_control", format!("+{controller}"))?;
            }
        }
        let directory = made.directory(parent.join(name))?;
        write(&directory, "memory.max", limits.memory.0)?;
        if directory.join("memory.swap.max").exists() {
            write(&directory, "memory.swap.max", 0)?;
        }
        write(&directory, "memory.oom.group", 1)?;
        write(&directory, "pids.max", pids_max(limits))?;
        write(&directory, "cpu.max", format!("{} {PERIOD_US}", quota_us(limits)))?;
        Ok(Group {
            memory: directory.clone(),
            pids: directory.clone(),
            directories: made.0.clone(),
            enter: Vec::new(),
            clone_into: Some(directory),
            cpu_v1: None,
            cpuacct: None,
            before: Sample::default(),
            is_used_up: Cell::new(false),
        })
    }

    /// The v1 directories init must enter.
    pub fn enter(&self) -> &[PathBuf] {
        &self.enter
    }

    /// The v2 directory to clone into.
    pub fn clone_into(&self) -> Option<&Path> {
        self.clone_into.as_deref()
    }

    /// Every directory of this group.
    pub fn directories(&self) -> &[PathBuf] {
        &self.directories
    }

    /// Makes it ready for another cell, when the one in it is gone: whether everything it counts from now on is that
    /// cell's. The kernel's peaks can be lowered on v1 for memory alone, so a group that had more processes than any
    /// cell must have is used up, and so is one that keeps much of what it had in memory.
    pub fn renew(&mut self) -> bool {
        if self.is_used_up.get() || self.cpu_v1.is_none() {
            return false;
        }
        let residue = || read(&self.memory, "memory.usage_in_bytes").trim().parse().unwrap_or(u64::MAX);
        if residue() > RESIDUE_MAX {
            // Pages of files that are in no cell any more; what cannot be given back shows below.
            let _as_far_as_can_be = write(&self.memory, "memory.force_empty", 0);
        }
        let is_lowered = residue() <= RESIDUE_MAX && write(&self.memory, "memory.max_usage_in_bytes", 0).is_ok();
        self.before = Sample { pids_peak: None, memory_peak: None, ..self.count() };
        let peak = read(&self.pids, "pids.peak").trim().parse::<u64>().unwrap_or(u64::MAX);
        is_lowered && peak <= N_OURS + 1
    }

    /// What the kernel has counted of the cell that is in it so far.
    pub fn sample(&self) -> Sample {
        let now = self.count();
        Sample {
            oom_kills: now.oom_kills - self.before.oom_kills.min(now.oom_kills),
            pids_refused: now.pids_refused - self.before.pids_refused.min(now.pids_refused),
            cpu_us: now.cpu_us.map(|cpu| cpu.saturating_sub(self.before.cpu_us.unwrap_or(0))),
            ..now
        }
    }

    fn count(&self) -> Sample {
        let cpu_stat = self.clone_into().map(|directory| read(directory, "cpu.stat")).unwrap_or_default();
        let (events, peak) = if self.cpu_v1.is_some() {
            (read(&self.memory, "memory.oom_control"), read(&self.memory, "memory.max_usage_in_bytes"))
        } else {
            (read(&self.memory, "memory.events"), read(&self.memory, "memory.peak"))
        };
        Sample {
            oom_kills: field(&events, "oom_kill").unwrap_or(0),
            pids_refused: field(&read(&self.pids, "pids.events"), "max").unwrap_or(0),
            memory_peak: peak.trim().parse().ok(),
            pids_peak: read(&self.pids, "pids.peak").trim().parse::<u64>().ok().map(|n| n.saturating_sub(N_OURS)),
            cpu_us: match &self.cpuacct {
                Some(directory) => read(directory, "cpuacct.usage").trim().parse::<u64>().ok().map(|ns| ns / 1000),
                None => field(&cpu_stat, "usage_usec"),
            },
        }
    }

    /// Kills every process of the group at once, where the kernel can.
    pub fn kill(&self) {
        self.is_used_up.set(true);
        // A throttled process dies only when it is its turn to run again: let it.
        let (path, value) = match &self.cpu_v1 {
            Some(cpu) => (cpu.join("cpu.cfs_quota_us"), "-1"),
            None => (self.memory.join("cpu.max"), "max"),
        };
        let _dies_later = fs::write(path, value);
        if let Some(directory) = self.clone_into() {
            // Kernels before 5.14 have no such file; the pid namespace's init is killed as well.
            let _killed_otherwise = fs::write(directory.join("cgroup.kill"), "1");
        }
    }

    /// Removes the group; its processes must be gone. What stays is named in the error.
    pub fn remove(self) -> Result<(), NoGroup> {
        remove_all(&self.directories)
    }
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
    fn directory(&mut self, path: PathBuf) -> Result<PathBuf, NoGroup> {
        match fs::create_dir(&path) {
            Ok(()) => {
                self.0.push(path.clone());
                Ok(path)
            }
            // Controllers mounted together share one directory.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && self.0.contains(&path) => Ok(path),
            Err(source) => Err(NoGroup::Refused { what: "make", path, source }),
        }
    }

    fn remove(&mut self) {
        for path in self.0.drain(..) {
            // Empty and ours; if the kernel keeps it a moment longer, the next sweep finds it.
            let _swept_later = fs::remove_dir(path);
        }
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        self.remove();
    }
}

fn write(directory: &Path, file: &str, value: impl ToString) -> Result<(), NoGroup> {
    let path = directory.join(file);
    fs::write(&path, value.to_string()).map_err(|source| NoGroup::Refused { what: "write", path, source })
}

fn read(directory: &Path, file: &str) -> String {
    fs::read_to_string(directory.join(file)).unwrap_or_default()
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
