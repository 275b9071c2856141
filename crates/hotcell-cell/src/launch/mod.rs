//! A plan, written down as the syscalls that make it true.
//!
//! ```text
//! spawner   open the cgroup the cell is born into
//! init      enter v1 cgroups → private mounts → open every source → new root → scratch → entries of
//!           the view → pivot → drop id, groups, capabilities → no new privileges → Landlock → limits
//!           → working directory → syscall filter; after each wall, a call that must fail if the wall stands
//! payload   own session → stdin, stdout, stderr → no other descriptor → execve
//! orphaned  remove the cgroup
//! ```
//!
//! Pure: a plan has one program. Every call is labelled with the wall it builds or proves.

use std::borrow::Cow;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use hotcell_sys::program::{Addr, Arg, Expect, Program, Slot, Stage};
use hotcell_sys::wire::{INPUT_FD_FIRST, INPUT_FDS_MAX, PAYLOAD_CONTROL_FD};
use libc::{EACCES, EBADF, ENOENT, ENXIO};

use crate::cgroup::Group;
use crate::plan::{Identity, Plan};
use crate::view::{Entry, Owner};
use crate::wall::Wall;

mod fences;
mod namespaces;
mod privilege;
mod root;

pub(crate) use root::{DECOYS, PAGE, scratch_inodes};

/// How much longer than its limit a cell may live before its spawner ends it: room for slow walls and
/// for the supervisor, whose task it is.
const OVERTIME: Duration = Duration::from_secs(30);

/// Which wall a call builds or proves, and what it does, for the message if it fails.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Label {
    pub(crate) wall: Wall,
    pub(crate) what: Cow<'static, str>,
}

/// What is known only when the cell is made.
pub(crate) struct Making<'a> {
    /// The id a cell started by root gets.
    pub(crate) id: u32,
    /// The cgroup, where there is one.
    pub(crate) group: Option<&'a Group>,
    /// For each owner whose files must appear as the cell's own: the number of the descriptor of
    /// the user namespace that says so.
    pub(crate) owners: &'a [Owner],
}

/// Descriptors that come with the program, in order; then one for each owner.
const STDIN_FD: i32 = INPUT_FD_FIRST;
const STDOUT_FD: i32 = INPUT_FD_FIRST + 1;
const STDERR_FD: i32 = INPUT_FD_FIRST + 2;
pub(crate) const N_STREAMS: usize = 3;
/// Descriptors for owners that come beside the image and the streams.
pub(crate) const OWNERS_MAX: usize = INPUT_FDS_MAX - 1 - N_STREAMS;
const AT_FDCWD: i32 = libc::AT_FDCWD;
/// The second process of a pid namespace.
const PAYLOAD_PID: i64 = 2;

/// Owners of the view that differ from the cell's own id, each once.
pub(crate) fn owners(plan: &Plan) -> Vec<Owner> {
    let mut owners = Vec::new();
    if plan.identity == Identity::Fresh && plan.asks_for(Wall::Root) && plan.asks_for(Wall::Id) {
        for entry in &plan.view {
            let owner = match entry {
                Entry::Bind { owner: Some(owner), .. } | Entry::Overlay { owner, .. } | Entry::Guard { owner, .. } => {
                    *owner
                }
                _ => continue,
            };
            if !owners.contains(&owner) {
                owners.push(owner);
            }
        }
    }
    owners
}

/// The id map under which `owner`'s files are `id`'s and all others stay as they are.
pub(crate) fn id_map(owner: u32, id: u32) -> String {
    let mut map = format!("{owner} {id} 1\n");
    let (low, high) = (owner.min(id), owner.max(id));
    let ranges = [(0, low), (low.saturating_add(1), high), (high.saturating_add(1), u32::MAX - 1)];
    for (first, end) in ranges.into_iter().filter(|(first, end)| first < end) {
        map.push_str(&format!("{first} {first} {}\n", end - first));
    }
    map
}

/// Writes the whole launch down.
pub(crate) fn program(plan: &Plan, making: &Making<'_>) -> Program<Label> {
    let mut out = Writer { program: Program::new(), stage: Stage::Spawner, wall: Wall::Cgroup, plan, making };
    out.spawner();
    out.program.life_max(plan.limits.time.saturating_add(OVERTIME));
    out.stage = Stage::Init;
    out.parent_death();
    out.modes();
    out.identity_maps();
    out.enter_cgroups();
    if plan.asks_for(Wall::Mount) {
        out.mounts();
    }
    out.names();
    out.prove_namespaces();
    out.drop_privilege();
    out.no_new_privs();
    out.landlock();
    // After Landlock, which opens more descriptors than the command may have.
    out.rlimits();
    out.working_directory();
    out.seccomp();
    out.stage = Stage::Payload;
    out.payload();
    out.stage = Stage::Orphaned;
    out.orphaned();
    out.program
}

struct Writer<'a> {
    program: Program<Label>,
    stage: Stage,
    wall: Wall,
    plan: &'a Plan,
    making: &'a Making<'a>,
}

impl Writer<'_> {
    fn call(&mut self, what: impl Into<Cow<'static, str>>, number: i64, args: &[Arg], expect: Expect) {
        let label = Label { wall: self.wall, what: what.into() };
        self.program.call(self.stage, label, number, args, expect).ignore();
    }

    fn call_keep(&mut self, what: impl Into<Cow<'static, str>>, number: i64, args: &[Arg]) -> Slot {
        let label = Label { wall: self.wall, what: what.into() };
        self.program.call(self.stage, label, number, args, Expect::Ok).keep()
    }

    fn text(&mut self, text: impl AsRef<[u8]>) -> Addr {
        self.program.text(text)
    }

    fn close(&mut self, fd: Slot) {
        self.call("close", libc::SYS_close, &[fd.into()], Expect::Ok);
    }

    fn write_file(&mut self, path: &str, contents: &[u8], create: bool) {
        let at = self.text(path);
        let flags = libc::O_WRONLY | libc::O_CLOEXEC | if create { libc::O_CREAT | libc::O_EXCL } else { 0 };
        let fd = self.call_keep(
            format!("open {path}"),
            libc::SYS_openat,
            &[AT_FDCWD.into(), at.into(), flags.into(), 0o644.into()],
        );
        let data = self.program.data(contents);
        let len = contents.len() as u64;
        let all = i64::try_from(len).expect("small files only");
        self.call(format!("write {path}"), libc::SYS_write, &[fd.into(), data.into(), len.into()], Expect::Is(all));
        self.close(fd);
    }

    fn spawner(&mut self) {
        self.program.clone_flags(self.clone_flags());
        if let Some(directory) = self.making.group.and_then(Group::clone_into) {
            let path = self.text(directory.as_os_str().as_bytes());
            let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
            let fd = self.call_keep("open the cgroup", libc::SYS_openat, &[AT_FDCWD.into(), path.into(), flags.into()]);
            self.program.clone_into_cgroup(fd);
        }
    }

    fn clone_flags(&self) -> u64 {
        let namespaces = [
            (Wall::User, libc::CLONE_NEWUSER),
            (Wall::Mount, libc::CLONE_NEWNS),
            (Wall::Pid, libc::CLONE_NEWPID),
            (Wall::Net, libc::CLONE_NEWNET),
            (Wall::Ipc, libc::CLONE_NEWIPC),
            (Wall::Uts, libc::CLONE_NEWUTS),
            (Wall::Time, 0x80),
        ];
        let asked = namespaces.iter().filter(|(wall, _)| self.plan.asks_for(*wall));
        asked.fold(0, |flags, (_, flag)| flags | i64::from(*flag).cast_unsigned())
    }

    fn orphaned(&mut self) {
        self.wall = Wall::Cgroup;
        for directory in self.making.group.map(Group::directories).unwrap_or_default() {
            let path = self.text(directory.as_os_str().as_bytes());
            self.call("remove the cgroup", libc::SYS_rmdir, &[path.into()], Expect::OkOr(&[libc::EBUSY, ENOENT]));
        }
    }

    fn identity_maps(&mut self) {
        self.wall = Wall::User;
        if let (Identity::Own { uid, gid }, true) = (self.plan.identity, self.plan.asks_for(Wall::User)) {
            // Only who cannot change groups may map one without help.
            self.write_file("/proc/self/setgroups", b"deny", false);
            self.write_file("/proc/self/gid_map", format!("{gid} {gid} 1").as_bytes(), false);
            self.write_file("/proc/self/uid_map", format!("{uid} {uid} 1").as_bytes(), false);
        }
    }

    /// A cell dies with its spawner, which dies with its supervisor.
    fn parent_death(&mut self) {
        self.wall = Wall::Pid;
        let signal = libc::SIGKILL;
        self.call("die with the spawner", libc::SYS_prctl, &[libc::PR_SET_PDEATHSIG.into(), signal.into()], Expect::Ok);
    }

    /// The mode of what the walls are made of, and of what the command makes, is ours to say, whatever the caller's is.
    fn modes(&mut self) {
        self.wall = Wall::Root;
        self.call("set the mode of new files", libc::SYS_umask, &[0o022.into()], Expect::Ok);
    }

    fn enter_cgroups(&mut self) {
        self.wall = Wall::Cgroup;
        for directory in self.making.group.map(Group::enter).unwrap_or_default() {
            let Some(procs) = directory.join("cgroup.procs").to_str().map(str::to_owned) else { continue };
            self.write_file(&procs, b"0", false);
        }
        self.prove_cgroups();
        self.wall = Wall::CgroupNs;
        if self.plan.asks_for(Wall::CgroupNs) {
            // Only now: the namespace's root is the group its maker is in.
            self.call("unshare", libc::SYS_unshare, &[libc::CLONE_NEWCGROUP.into()], Expect::Ok);
        }
    }

    /// The group was made for this cell, so whoever is in it is this process.
    fn prove_cgroups(&mut self) {
        let Some(group) = self.making.group else { return };
        let directories = group.enter().iter().map(PathBuf::as_path).chain(group.clone_into());
        for directory in directories {
            let path = self.text(directory.join("cgroup.procs").as_os_str().as_bytes());
            let flags = libc::O_RDONLY | libc::O_CLOEXEC;
            let fd = self.call_keep(
                "open the group's list",
                libc::SYS_openat,
                &[AT_FDCWD.into(), path.into(), flags.into()],
            );
            let (found, expected) = (self.program.room(16), self.text("1\n"));
            self.call("read the group's list", libc::SYS_read, &[fd.into(), found.into(), 16u64.into()], Expect::Ok);
            if self.plan.asks_for(Wall::Pid) {
                let label = Label { wall: Wall::Cgroup, what: "proof: in the group, and alone".into() };
                self.program.compare(self.stage, label, found, expected, 3, true);
            }
            self.close(fd);
        }
    }

    fn payload(&mut self) {
        self.wall = Wall::Tty;
        if self.plan.asks_for(Wall::Tty) {
            self.call("own session", libc::SYS_setsid, &[], Expect::Ok);
        }
        self.wall = Wall::Fds;
        for (to, from, name) in [(0, STDIN_FD, "stdin"), (1, STDOUT_FD, "stdout"), (2, STDERR_FD, "stderr")] {
            let args = [from.into(), to.into(), 0.into()];
            self.call(format!("give {name}"), libc::SYS_dup3, &args, Expect::Ok);
        }
        if self.plan.asks_for(Wall::Fds) {
            self.close_descriptors();
        }
        if self.plan.asks_for(Wall::Tty) {
            self.prove_no_terminal();
        }
        self.wall = Wall::Root;
        let program = self.text(self.plan.program.as_os_str().as_bytes());
        let argv = self.program.texts(self.plan.argv.iter().map(|argument| argument.as_bytes()));
        let env: Vec<Vec<u8>> =
            self.plan.env.iter().map(|(name, value)| [name.as_bytes(), b"=", value.as_bytes()].concat()).collect();
        let env = self.program.texts(&env);
        self.call(EXEC, libc::SYS_execve, &[program.into(), argv.into(), env.into()], Expect::Ok);
    }
}

impl Writer<'_> {
    /// Everything else goes now, but for the control socket, which goes when the command begins.
    fn close_descriptors(&mut self) {
        self.wall = Wall::Fds;
        let kept = PAYLOAD_CONTROL_FD;
        for (first, last) in [(3, kept - 1), (kept + 1, i32::MAX)] {
            let args = [first.into(), last.into(), 0.into()];
            self.call("close all other descriptors", libc::SYS_close_range, &args, Expect::Ok);
        }
        let close_on_exec = i64::from(libc::FD_CLOEXEC);
        let get_flags = |fd: i32| [fd.into(), libc::F_GETFD.into()];
        self.call("proof: no other descriptor", libc::SYS_fcntl, &get_flags(3), Expect::Fails(&[EBADF]));
        self.call("proof: none above", libc::SYS_fcntl, &get_flags(kept + 1), Expect::Fails(&[EBADF]));
        self.call("proof: ours closes", libc::SYS_fcntl, &get_flags(kept), Expect::Is(close_on_exec));
    }

    fn prove_no_terminal(&mut self) {
        self.wall = Wall::Tty;
        if self.plan.asks_for(Wall::Pid) {
            // A session's first process has no terminal until it opens one, and there is none to open.
            self.call("proof: first of its session", libc::SYS_getsid, &[0.into()], Expect::Is(PAYLOAD_PID));
        }
        let tty = self.text("/dev/tty");
        let args = [AT_FDCWD.into(), tty.into(), libc::O_RDWR.into()];
        self.call("proof: no terminal", libc::SYS_openat, &args, Expect::Fails(&[ENOENT, ENXIO, EACCES]));
    }
}

/// The label of the call whose failure is the request's.
pub(crate) const CHDIR: &str = "enter the working directory";

/// The label of the last call: its failure is the command's, not a wall's.
pub(crate) const EXEC: &str = "execute the command";

/// The start of every socket address.
fn family(family: i32) -> Vec<u8> {
    u16::try_from(family).expect("families are small").to_ne_bytes().to_vec()
}

fn inet_address(host: [u8; 4], port: u16) -> Vec<u8> {
    let mut address = family(libc::AF_INET);
    address.extend_from_slice(&port.to_be_bytes());
    address.extend_from_slice(&host);
    address.resize(16, 0);
    address
}
