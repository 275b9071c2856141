//! Walls: the isolation mechanisms of a cell, by name.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// One isolation mechanism.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Wall {
    /// An unprivileged id outside, with no way back.
    Id,
    /// No supplementary groups.
    Groups,
    /// Own user namespace.
    User,
    /// Own mount namespace.
    Mount,
    /// Own pid namespace.
    Pid,
    /// Own network namespace, with nothing in it.
    Net,
    /// Own System V and POSIX queue namespace.
    Ipc,
    /// Own host name.
    Uts,
    /// Own view of the cgroup tree.
    CgroupNs,
    /// Own time namespace.
    Time,
    /// A private root instead of the host's filesystem.
    Root,
    /// No capability in any set.
    Caps,
    /// Nothing executed can gain privilege.
    NoNewPrivs,
    /// The syscall filter.
    Seccomp,
    /// A second fence around files.
    Landlock,
    /// A second fence around TCP.
    LandlockTcp,
    /// No signals and no abstract sockets out of the cell.
    LandlockScope,
    /// Per-process limits.
    Rlimits,
    /// Limits on the whole tree.
    Cgroup,
    /// The cap on what is written.
    Disk,
    /// No inherited descriptor.
    Fds,
    /// No controlling terminal.
    Tty,
}

impl Wall {
    /// All walls, in the order they are shown.
    pub const ALL: [Wall; 22] = [
        Wall::Id,
        Wall::Groups,
        Wall::User,
        Wall::Mount,
        Wall::Pid,
        Wall::Net,
        Wall::Ipc,
        Wall::Uts,
        Wall::CgroupNs,
        Wall::Time,
        Wall::Root,
        Wall::Caps,
        Wall::NoNewPrivs,
        Wall::Seccomp,
        Wall::Landlock,
        Wall::LandlockTcp,
        Wall::LandlockScope,
        Wall::Rlimits,
        Wall::Cgroup,
        Wall::Disk,
        Wall::Fds,
        Wall::Tty,
    ];

    /// The name used on the command line, in JSON and in messages.
    pub fn name(self) -> &'static str {
        match self {
            Wall::Id => "id",
            Wall::Groups => "groups",
            Wall::User => "user",
            Wall::Mount => "mount",
            Wall::Pid => "pid",
            Wall::Net => "net",
            Wall::Ipc => "ipc",
            Wall::Uts => "uts",
            Wall::CgroupNs => "cgroup-ns",
            Wall::Time => "time",
            Wall::Root => "root",
            Wall::Caps => "caps",
            Wall::NoNewPrivs => "no-new-privs",
            Wall::Seccomp => "seccomp",
            Wall::Landlock => "landlock",
            Wall::LandlockTcp => "landlock-tcp",
            Wall::LandlockScope => "landlock-scope",
            Wall::Rlimits => "rlimits",
            Wall::Cgroup => "cgroup",
            Wall::Disk => "disk",
            Wall::Fds => "fds",
            Wall::Tty => "tty",
        }
    }

    /// What it keeps out, in one line.
    pub fn keeps(self) -> &'static str {
        match self {
            Wall::Id => "an unprivileged id outside, with no way back",
            Wall::Groups => "no supplementary groups",
            Wall::User => "own user namespace: capabilities inside mean nothing outside",
            Wall::Mount => "own mounts: nothing mounted inside shows outside",
            Wall::Pid => "own processes: no other can be seen or signalled, all die with the first",
            Wall::Net => "own network with nothing in it: no interface, no route",
            Wall::Ipc => "own shared memory, semaphores and queues",
            Wall::Uts => "own host name",
            Wall::CgroupNs => "own view of the cgroup tree",
            Wall::Time => "own clocks' namespace",
            Wall::Root => "a private root: only what was granted exists",
            Wall::Caps => "no capability in any set",
            Wall::NoNewPrivs => "nothing executed gains privilege",
            Wall::Seccomp => "a syscall allowlist",
            Wall::Landlock => "a second fence around files",
            Wall::LandlockTcp => "a second fence around tcp",
            Wall::LandlockScope => "no signal and no abstract socket out of the cell",
            Wall::Rlimits => "per-process limits",
            Wall::Cgroup => "limits on memory, processes and cpu of the whole tree",
            Wall::Disk => "a cap on what is written",
            Wall::Fds => "no inherited descriptor above 2",
            Wall::Tty => "no terminal",
        }
    }
}

impl fmt::Display for Wall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for Wall {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// A name that is no wall's.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("there is no wall `{0}`")]
pub struct NoSuchWall(pub String);

impl FromStr for Wall {
    type Err = NoSuchWall;

    fn from_str(name: &str) -> Result<Wall, NoSuchWall> {
        Wall::ALL.into_iter().find(|wall| wall.name() == name).ok_or_else(|| NoSuchWall(name.to_owned()))
    }
}

/// How a wall stood during a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    /// Enforced by the kernel, and tried from inside before the command began.
    Proven,
    /// Held from outside, by looking at the whole tree every few milliseconds.
    Watched,
    /// Not there, by explicit request or because this kind of user cannot have it.
    Missing,
}

impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Standing::Proven => "proven",
            Standing::Watched => "watched",
            Standing::Missing => "missing",
        })
    }
}
