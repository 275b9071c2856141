//! What this machine can do for this user: found out by doing it.
//!
//! A whole cell is started. If a wall does not go up, that is noted, the wall is left out and the
//! next cell is started, until one stands or nothing is left to try; then each kind of workspace is
//! tried. No version number is believed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use hotcell_base::Outcome;
use serde::Serialize;

use crate::cgroup::{Group, Version};
use crate::host::Host;
use crate::limits::Limits;
use crate::plan::{Builder, Cell, Mode, PlanError};
use crate::report::Report;
use crate::run::RunError;
use crate::wall::{Standing, Wall};

/// What was found out about one thing.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// A wall, or a feature such as `workspace-cow`.
    pub name: String,
    /// What it is for.
    pub keeps: String,
    /// Whether it works.
    pub state: State,
    /// Why not, or what differs.
    pub why: Option<String>,
    /// The smallest thing that would help, with its cost where it has one.
    pub fix: Option<String>,
}

/// Whether a thing works here.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// It works, and was seen to.
    Works,
    /// It is held from outside, by watching.
    Watched,
    /// It is not needed for this user, because something else does the same.
    NotNeeded,
    /// It does not work.
    Missing,
}

/// Everything that was found out.
#[derive(Clone, Debug, Serialize)]
pub struct Diagnosis {
    /// Kernel release.
    pub kernel: String,
    /// The user who asked.
    pub uid: u32,
    /// Whether that user builds walls as root.
    pub privileged: bool,
    /// Landlock's version, 0 for none.
    pub landlock_abi: u32,
    /// The kind of cgroup tree.
    pub cgroup_version: Version,
    /// Walls and features.
    pub findings: Vec<Finding>,
    /// What is otherwise than for root.
    pub differences: Vec<&'static str>,
}

impl Diagnosis {
    /// Whether a cell with everything asked for by default can run here.
    pub fn is_sound(&self) -> bool {
        self.findings.iter().all(|finding| finding.state != State::Missing)
    }
}

/// Tries everything. `scratch` is an empty directory of the user's that may be used as a workspace.
pub fn diagnose(host: &Host, scratch: &Path) -> Diagnosis {
    let (standing, reasons) = try_walls(host);
    let mut findings: Vec<Finding> = Wall::ALL.iter().map(|wall| finding(host, *wall, &standing, &reasons)).collect();
    for (mode, name, keeps) in [
        (Mode::Ro, "workspace-ro", "a workspace that cannot be changed"),
        (Mode::Cow, "workspace-cow", "a workspace whose changes are kept apart"),
        (Mode::Rw, "workspace-rw", "a workspace that is changed in place"),
    ] {
        findings.push(try_workspace(host, scratch, mode, name, keeps, &reasons));
    }
    Diagnosis {
        kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        uid: host.uid,
        privileged: host.privileged,
        landlock_abi: host.landlock_abi,
        cgroup_version: host.cgroups.version(),
        differences: differences(host, &findings),
        findings,
    }
}

/// What an ordinary user's cells do otherwise than root's, on this machine.
fn differences(host: &Host, findings: &[Finding]) -> Vec<&'static str> {
    let mut differences = Vec::new();
    if host.privileged {
        return differences;
    }
    differences
        .push("a cell is you, in a user namespace where that means nothing; root's cells have an id nobody else has");
    if findings.iter().any(|finding| finding.name == Wall::Cgroup.name() && finding.state == State::Watched) {
        differences.push(
            "memory, processes and cpu are watched 50 times a second, so that a tree can go beyond a limit for a moment",
        );
        differences
            .push("memory that belongs to no process (memfd, System V segments and messages) does not exist inside");
    }
    differences.push("inotify instances and pipe pages are counted together with your own");
    differences.push("apply and undo need to read what they check: what is, or would be, closed to you is refused");
    differences
        .push("apply and undo own what they make: a file of somebody else's that is replaced is yours afterwards");
    differences.push("on a copy, a file of a group you are not in can be read and not changed (EOVERFLOW)");
    differences.push("selftest skips attempts that only root could make without the wall");
    differences
}

type Reasons = BTreeMap<Wall, String>;

/// Starts cells until one stands, leaving out what did not.
fn try_walls(host: &Host) -> (Option<BTreeMap<Wall, Standing>>, Reasons) {
    let mut reasons = Reasons::new();
    loop {
        match attempt(host, builder(&reasons)) {
            Ok(report) => return (Some(report.isolation.walls), reasons),
            Err((Some(wall), why)) if !reasons.contains_key(&wall) => {
                reasons.insert(wall, why);
            }
            // The same wall again although it was left out, or nothing to do with a wall.
            Err((wall, why)) => {
                reasons.insert(wall.unwrap_or(Wall::Root), why);
                return (None, reasons);
            }
        }
    }
}

fn builder(reasons: &Reasons) -> Builder {
    let builder = Cell::builder().command(["/bin/sh", "-c", "exit 0"]);
    reasons.keys().fold(builder, |builder, wall| builder.omit(*wall))
}

/// Runs one small cell; the error is the wall that failed and why.
fn attempt(host: &Host, builder: Builder) -> Result<Report, (Option<Wall>, String)> {
    let plan = builder.plan(host).map_err(|error| match error {
        PlanError::Wall { wall, why } => (Some(wall), why),
        other => (None, other.to_string()),
    })?;
    let report = plan.run().map_err(|error| match error {
        RunError::Wall { wall, what, source } => {
            (Some(wall), source.map_or_else(|| format!("{what}: it succeeds"), |source| format!("{what}: {source}")))
        }
        other => (None, with_source(&other)),
    })?;
    if report.outcome == Outcome::Exited && report.exit_code == Some(0) {
        Ok(report)
    } else {
        let said = report.stderr.text();
        Err((None, format!("a shell in a cell ended as {} instead of with 0: {said}", report.outcome)))
    }
}

fn with_source(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), |source| format!("{error}: {source}"))
}

fn finding(host: &Host, wall: Wall, standing: &Option<BTreeMap<Wall, Standing>>, reasons: &Reasons) -> Finding {
    let found = standing.as_ref().and_then(|walls| walls.get(&wall).copied());
    let (state, why) = match (found, reasons.get(&wall)) {
        (_, Some(why)) => (State::Missing, Some(why.clone())),
        (Some(Standing::Proven), None) => (State::Works, None),
        (Some(Standing::Watched), None) => (State::Watched, Some(why_watched(host))),
        (Some(Standing::Missing), None) => (State::Missing, Some("left out".to_owned())),
        (None, None) if standing.is_some() => (
            State::NotNeeded,
            Some("started as root, each cell gets a real id of its own that owns nothing outside".to_owned()),
        ),
        (None, None) => (State::Missing, Some("not tried: no cell could be started".to_owned())),
    };
    // Of what was not tried nothing is known, least of all what would help.
    let fix = (found.is_some() || reasons.contains_key(&wall)) && matches!(state, State::Missing | State::Watched);
    let fix = fix.then(|| self::fix(host, wall).to_owned());
    Finding { name: wall.name().to_owned(), keeps: wall.keeps().to_owned(), state, why, fix }
}

/// Makes the group again to hear what the kernel says.
fn why_watched(host: &Host) -> String {
    match Group::create(&host.cgroups, &format!("hotcell-doctor-{}", std::process::id()), &Limits::default()) {
        Ok(group) => match group.remove() {
            Ok(()) => "the group can be made, and the cell could not be put into it".to_owned(),
            Err(error) => with_source(&error),
        },
        Err(error) => with_source(&error),
    }
}

/// The smallest thing that would help.
fn fix(host: &Host, wall: Wall) -> &'static str {
    match wall {
        Wall::User | Wall::Mount | Wall::Pid | Wall::Net | Wall::Ipc | Wall::Uts | Wall::CgroupNs | Wall::Time
            if !host.privileged =>
        {
            "run as root, or have an administrator allow user namespaces (sysctl kernel.unprivileged_userns_clone=1, \
             on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0, or raise user.max_user_namespaces); the cost: every \
             program of every user can then reach kernel code that only root could reach before"
        }
        Wall::Mount | Wall::Pid | Wall::Net | Wall::Ipc | Wall::Uts | Wall::CgroupNs | Wall::Time | Wall::User => {
            "use a kernel built with this namespace, or start hotcell outside the container that forbids it"
        }
        Wall::Root => {
            "start hotcell where mounts are allowed; inside a container that covers parts of /proc, give it an uncovered one \
             (docker: --security-opt systempaths=unconfined; the cost: that container sees all of /proc)"
        }
        Wall::Landlock | Wall::LandlockTcp | Wall::LandlockScope => {
            "boot a kernel with a newer Landlock and `landlock` in its lsm= list (files 5.13, tcp 6.7, scope 6.12), or accept \
             one fence less with --allow-missing"
        }
        Wall::Cgroup if host.privileged => {
            "mount a writable cgroup tree with the memory, pids and cpu controllers (docker: --privileged or a writable /sys/fs/cgroup)"
        }
        Wall::Cgroup => {
            "run as root; until then limits are held by rlimits and by looking at every process 50 times a second"
        }
        Wall::Groups => {
            "run as root, which leaves all groups, or accept them with --allow-missing groups; the cost: of the files a cell is \
             shown, it can also read and write what these groups may"
        }
        Wall::Id | Wall::Caps => "run as root with CAP_SETUID, CAP_SETGID and CAP_SETPCAP, or as an ordinary user",
        Wall::Seccomp | Wall::NoNewPrivs => "use a kernel built with CONFIG_SECCOMP_FILTER",
        Wall::Rlimits => "raise the hard limits of the shell that starts hotcell (ulimit -H)",
        Wall::Disk | Wall::Fds | Wall::Tty => {
            "this should work everywhere: please report it with the output of hotcell doctor --json"
        }
    }
}

fn try_workspace(host: &Host, scratch: &Path, mode: Mode, name: &str, keeps: &str, reasons: &Reasons) -> Finding {
    let before = b"before\n";
    let file: PathBuf = scratch.join("file");
    let tried =
        std::fs::write(&file, before).map_err(|error| format!("the scratch directory cannot be written: {error}"));
    let tried = tried.and_then(|()| {
        let script = match mode {
            Mode::Ro => "cat file >/dev/null && ! echo after 2>/dev/null >file",
            _ => "cat file >/dev/null && echo after >file && rm file && echo after >file && mkdir d && rm -r d && mkdir d",
        };
        let builder = reasons.keys().fold(Cell::builder(), |builder, wall| builder.omit(*wall));
        attempt(host, builder.command(["/bin/sh", "-c", script]).workspace(scratch, mode)).map_err(|(_, why)| why)
    });
    let changed = std::fs::read(&file).is_ok_and(|now| now != before);
    let (state, why) = match tried {
        Err(why) => (State::Missing, Some(why)),
        Ok(_) if changed != (mode == Mode::Rw) => {
            (State::Missing, Some("the host's file is not as this mode promises".to_owned()))
        }
        Ok(_) => (State::Works, None),
    };
    let fix = (state == State::Missing).then(|| {
        match mode {
            Mode::Cow => "use a kernel with overlayfs (5.11 or newer for ordinary users), or --mode ro",
            _ => "put the workspace on a filesystem that can be shown with other owners (ext4, xfs, btrfs, tmpfs), or run as its owner",
        }
        .to_owned()
    });
    Finding { name: name.to_owned(), keeps: keeps.to_owned(), state, why, fix }
}
