//! A plan, written down as the syscalls that make it true.
//!
//! ```text
//! ground    own user namespace → private mounts → open every source → new root → all of the view
//!           that no cell changes → pivot → no capability can be had again → no new privileges
//!           → syscall filter, but for what follows                                the spawner, once
//! ahead     network, ipc, uts and time namespaces                                  the spawner, before each cell
//! init      enter the cgroups → scratch → the rest of the view → /proc → drop id, groups, capabilities
//!           → Landlock → limits → the rest of the syscall filter                  each cell
//! payload   own session → stdin, stdout, stderr → no other descriptor → working directory → execve    each command
//! orphaned  remove the cgroup                                                      the spawner, if nobody else can
//! ```
//!
//! After each wall comes a call that must fail if the wall stands. A cell is made of a copy of the ground's mounts and
//! is a child of the spawner: that no capability can be had again is proven there, once, and a child cannot but inherit
//! it, as it does the limit on core files. Everything else is proven in each cell.
//!
//! Pure: a plan has one program. Every call is labelled with the wall it builds or proves.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use hotcell_sys::program::{Addr, Arg, Expect, Program, Slot, Stage};
use hotcell_sys::wire::{INPUTS_MAX, PAYLOAD_CONTROL_FD};
use libc::{EACCES, EBADF, ENOENT, ENXIO};

use crate::cgroup::Group;
use crate::plan::{Identity, Plan};
use crate::seccomp::Part;
use crate::view::{Entry, Owner};
use crate::wall::Wall;

mod fences;
mod namespaces;
mod privilege;
mod root;

use root::Mounts;
pub(crate) use root::{DECOYS, PAGE, scratch_inodes};

/// How much longer than its limit a command may run before its cell's init ends it: room for the supervisor, whose
/// task it is.
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
    /// The cgroup of the first cell, where there is one. Those of the others have its name.
    pub(crate) group: Option<&'a Group>,
    /// Whether [`early`] was done.
    pub(crate) is_begun: bool,
    /// For each owner whose files must appear as the cell's own: the number of the descriptor of
    /// the user namespace that says so.
    pub(crate) owners: &'a [Owner],
}

/// Descriptors that come with a command: its streams, in order.
const STDIN: usize = 0;
const STDOUT: usize = 1;
const STDERR: usize = 2;
/// And, if it goes on from a template, its request and the memory it has.
const REQUEST: usize = 3;
const MEMORY: usize = 4;
/// Descriptors that come with the program of a cell: one for each owner.
pub(crate) const OWNERS_MAX: usize = INPUTS_MAX;
const AT_FDCWD: i32 = libc::AT_FDCWD;

/// Owners of the view that differ from the cell's own id, each once.
pub(crate) fn owners(plan: &Plan) -> Vec<Owner> {
    let mut owners = Vec::new();
    if plan.identity == Identity::Fresh && plan.asks_for(Wall::Root) && plan.asks_for(Wall::Id) {
        for entry in plan.view.iter() {
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

/// Writes down how cells of a plan are made.
pub(crate) fn cell(plan: &Plan, making: &Making<'_>) -> Program<Label> {
    let mut out = Writer::new(Program::cell(), Stage::Ground, plan, making);
    out.modes();
    out.open_above();
    if !making.is_begun {
        out.user_namespace();
    }
    let mounts = if plan.asks_for(Wall::Mount) { out.ground_mounts() } else { Mounts::default() };
    out.give_up_capabilities();
    out.no_new_privs();
    out.core_limit();
    out.seccomp(Part::Ground);
    out.stage = Stage::Ahead;
    out.namespaces();
    if making.is_begun {
        out.program.ahead_is_done();
    }
    out.clone_flags();
    out.stage = Stage::Init;
    out.parent_death();
    out.enter_cgroups();
    if plan.asks_for(Wall::Root) && plan.asks_for(Wall::Mount) {
        out.cell_mounts(&mounts);
    }
    out.prove_namespaces();
    out.drop_privilege();
    out.prove_no_new_privs();
    out.landlock();
    // After Landlock, which opens more descriptors than the command may have.
    out.rlimits();
    out.working_directory();
    out.seccomp(Part::Cell);
    out.stage = Stage::Orphaned;
    out.orphaned();
    out.program
}

/// Writes down what any cell needs first, whatever else there will be in it: the user namespace it is in, if any, and
/// the namespaces of its own that take long to make.
pub(crate) fn early(plan: &Plan) -> Program<Label> {
    let making = Making { id: 0, group: None, is_begun: false, owners: &[] };
    let mut out = Writer::new(Program::cell(), Stage::Ground, plan, &making);
    out.user_namespace();
    out.namespaces();
    out.program
}

/// Writes down how a plan's command is run in a cell of it, or of a plan that it is an exec of.
pub(crate) fn command(plan: &Plan, cell: &Plan) -> Program<Label> {
    // A command makes nothing of the cell.
    let making = Making { id: 0, group: None, is_begun: false, owners: &[] };
    let mut out = Writer::new(Program::command(), Stage::Payload, plan, &making);
    out.program.life_max(plan.limits.time.saturating_add(OVERTIME));
    if plan.limits != cell.limits {
        out.rlimits();
    }
    out.payload();
    out.program
}

struct Writer<'a> {
    program: Program<Label>,
    stage: Stage,
    wall: Wall,
    plan: &'a Plan,
    making: &'a Making<'a>,
    /// Of each cgroup directory, the one above it.
    above: BTreeMap<PathBuf, Slot>,
}

impl<'a> Writer<'a> {
    fn new(program: Program<Label>, stage: Stage, plan: &'a Plan, making: &'a Making<'a>) -> Writer<'a> {
        Writer { program, stage, wall: Wall::Cgroup, plan, making, above: BTreeMap::new() }
    }

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

    /// What a cell is cloned with: its own processes and its own copy of the ground's mounts.
    fn clone_flags(&mut self) {
        let namespaces = [(Wall::Mount, libc::CLONE_NEWNS), (Wall::Pid, libc::CLONE_NEWPID)];
        let asked = namespaces.iter().filter(|(wall, _)| self.plan.asks_for(*wall));
        self.program.clone_flags(asked.fold(0, |flags, (_, flag)| flags | i64::from(*flag).cast_unsigned()));
    }

    fn orphaned(&mut self) {
        self.wall = Wall::Cgroup;
        let Some(group) = self.making.group else { return };
        // Not by a path: that is out of the spawner's sight.
        for directory in group.directories() {
            let (Some(name), Some(above)) = (directory.file_name(), self.above.get(directory).copied()) else {
                continue;
            };
            let name = self.text(name.as_bytes());
            let args = [above.into(), name.into(), libc::AT_REMOVEDIR.into()];
            self.call("remove the cgroup", libc::SYS_unlinkat, &args, Expect::OkOr(&[libc::EBUSY, ENOENT]));
        }
    }

    /// A cell of an ordinary user's lives in a user namespace that its spawner made: there, walls can be built.
    fn user_namespace(&mut self) {
        self.wall = Wall::User;
        if let (Identity::Own { uid, gid }, true) = (self.plan.identity, self.plan.asks_for(Wall::User)) {
            self.call("unshare", libc::SYS_unshare, &[libc::CLONE_NEWUSER.into()], Expect::Ok);
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

    /// Opens what the groups are in, while it is in sight, for whoever must remove them.
    fn open_above(&mut self) {
        self.wall = Wall::Cgroup;
        let Some(group) = self.making.group else { return };
        for directory in group.directories() {
            let Some(parent) = directory.parent() else { continue };
            let path = self.text(parent.as_os_str().as_bytes());
            let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_CLOEXEC;
            let args = [AT_FDCWD.into(), path.into(), flags.into()];
            let above = self.call_keep("open the group above", libc::SYS_openat, &args);
            self.above.insert(directory.clone(), above);
        }
    }

    /// The group was made for this process, so whoever is in it is this process.
    fn prove_alone(&mut self, list: Slot) {
        let (found, expected) = (self.program.room(16), self.text("1\n"));
        let args = [list.into(), found.into(), 16u64.into(), 0u64.into()];
        self.call("read the group's list", libc::SYS_pread64, &args, Expect::Ok);
        let label = Label { wall: Wall::Cgroup, what: "proof: in the group, and alone".into() };
        self.program.compare(self.stage, label, found, expected, 3, true);
    }

    /// Init enters the v1 groups. Only a single thread that moves itself, by `tasks` and as `0`, does so without a lock of
    /// the whole machine. It is born into the unified one. The spawner itself stays out of them: what it does for the
    /// next cell is not charged to this one.
    fn enter_cgroups(&mut self) {
        self.wall = Wall::Cgroup;
        if let Some(ways_in) = self.making.group.map(Group::ways_in) {
            let mut lists = Vec::new();
            for number in 0..ways_in.n_entered {
                let tasks = self.program.cell_input(2 * number);
                let zero = self.program.data(b"0");
                let args = [tasks.into(), zero.into(), 1u64.into()];
                self.call("enter the group", libc::SYS_write, &args, Expect::Is(1));
                lists.push(self.program.cell_input(2 * number + 1));
            }
            if ways_in.is_born_into {
                let directory = self.program.cell_input(2 * ways_in.n_entered);
                self.program.clone_into_cgroup(directory);
                lists.push(self.program.cell_input(2 * ways_in.n_entered + 1));
            }
            if self.plan.asks_for(Wall::Pid) {
                for list in lists {
                    self.prove_alone(list);
                }
            }
        }
        self.wall = Wall::CgroupNs;
        if self.plan.asks_for(Wall::CgroupNs) {
            // Only now: the namespace's root is the group its maker is in.
            self.call("unshare", libc::SYS_unshare, &[libc::CLONE_NEWCGROUP.into()], Expect::Ok);
        }
    }

    /// In a cell, to find out before anything of a command runs; and again by each command.
    fn working_directory(&mut self) {
        self.wall = Wall::Root;
        let cwd = self.text(self.plan.cwd.as_os_str().as_bytes());
        self.call(CHDIR, libc::SYS_chdir, &[cwd.into()], Expect::Ok);
    }

    fn payload(&mut self) {
        self.wall = Wall::Tty;
        if self.plan.asks_for(Wall::Tty) {
            self.call("own session", libc::SYS_setsid, &[], Expect::Ok);
        }
        self.wall = Wall::Fds;
        for (to, from, name) in [(0, STDIN, "stdin"), (1, STDOUT, "stdout"), (2, STDERR, "stderr")] {
            let args = [self.program.input(from).into(), to.into(), 0.into()];
            self.call(format!("give {name}"), libc::SYS_dup3, &args, Expect::Ok);
        }
        let beginning = self.plan.beginning.as_ref();
        if beginning.is_some() {
            let args = [self.program.input(REQUEST).into(), 3.into(), 0.into()];
            self.call("give the request", libc::SYS_dup3, &args, Expect::Ok);
        } else if self.plan.asks_for(Wall::Fds) {
            self.close_descriptors();
        } else {
            // A control: what is open is inherited.
            for input in [STDIN, STDOUT, STDERR] {
                let args = [self.program.input(input).into(), libc::F_SETFD.into(), 0.into()];
                self.call("leave it open", libc::SYS_fcntl, &args, Expect::OkOr(&[EBADF]));
            }
        }
        if self.plan.asks_for(Wall::Tty) {
            self.prove_no_terminal();
        }
        self.wall = Wall::Root;
        self.working_directory();
        if let Some(beginning) = beginning {
            let label = Label { wall: Wall::Fds, what: GO_ON.into() };
            let memory = self.program.input(MEMORY);
            let words = beginning.words(self.plan, self.program.input(REQUEST));
            // Of all descriptors, the streams and the request stay; but not in a control.
            let first_closed = self.plan.asks_for(Wall::Fds).then_some(4);
            beginning.template.snapshot().restore(&mut self.program, &label, memory, &words, first_closed);
            return;
        }
        let argv = self.program.texts(self.plan.argv.iter().map(|argument| argument.as_bytes()));
        let env: Vec<Vec<u8>> =
            self.plan.env.iter().map(|(name, value)| [name.as_bytes(), b"=", value.as_bytes()].concat()).collect();
        let env = self.program.texts(&env);
        for (idx, program) in self.plan.programs.iter().enumerate() {
            let program = self.text(program.as_os_str().as_bytes());
            let is_last = idx + 1 == self.plan.programs.len();
            let expect = if is_last { Expect::Ok } else { Expect::OkOr(&[ENOENT, libc::ENOTDIR, EACCES]) };
            self.call(EXEC, libc::SYS_execve, &[program.into(), argv.into(), env.into()], expect);
        }
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
            let session = self.call_keep("ask for the session", libc::SYS_getsid, &[0.into()]);
            let process = self.call_keep("ask for the process", libc::SYS_getpid, &[]);
            let label = Label { wall: Wall::Tty, what: "proof: first of its session".into() };
            self.program.compare_answers(self.stage, label, session, process);
        }
        let tty = self.text("/dev/tty");
        let args = [AT_FDCWD.into(), tty.into(), libc::O_RDWR.into()];
        self.call("proof: no terminal", libc::SYS_openat, &args, Expect::Fails(&[ENOENT, ENXIO, EACCES]));
    }
}

/// The label of the call whose failure is the request's.
pub(crate) const CHDIR: &str = "enter the working directory";

/// The label of all calls by which a process goes on from a template: their failure is no wall's.
pub(crate) const GO_ON: &str = "go on from the template";

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
