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
use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use hotcell_base::text::shown;
use hotcell_sys::program::{Addr, Arg, Expect, Program, Slot, Stage};
use hotcell_sys::wire::{INPUT_FD_FIRST, PAYLOAD_CONTROL_FD};
use libc::{EACCES, EBADF, EEXIST, EINVAL, ENETUNREACH, ENOENT, ENOTDIR, ENXIO, EPERM, EROFS};

use crate::cgroup::Group;
use crate::landlock;
use crate::limits::Limits;
use crate::plan::{ID_MARK, Identity, Mode, Plan};
use crate::seccomp;
use crate::view::{Entry, FENCE, Owner};
use crate::wall::Wall;

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

const AT_FDCWD: i32 = libc::AT_FDCWD;
const AT_EMPTY_PATH: u64 = libc::AT_EMPTY_PATH as u64;
const AT_RECURSIVE: u64 = 0x8000;
const OPEN_TREE_CLONE: u64 = 1;
const OPEN_TREE_CLOEXEC: u64 = libc::O_CLOEXEC as u64;
const MOVE_MOUNT_F_EMPTY_PATH: u64 = 4;
const MOUNT_ATTR_RDONLY: u64 = 1;
const MOUNT_ATTR_NOSUID: u64 = 2;
const MOUNT_ATTR_NODEV: u64 = 4;
const MOUNT_ATTR_NOEXEC: u64 = 8;
const MOUNT_ATTR_IDMAP: u64 = 0x10_0000;
const MNT_DETACH: u64 = libc::MNT_DETACH as u64;

/// Where the scratch filesystem is while the root is built, and the host's side of the workspace.
const SCRATCH: &str = ".scratch";
const LOWER: &str = ".lower";

/// Owners of the view that differ from the cell's own id, each once.
pub(crate) fn owners(plan: &Plan) -> Vec<Owner> {
    let mut owners = Vec::new();
    if plan.identity == Identity::Fresh && plan.asks_for(Wall::Root) && plan.asks_for(Wall::Id) {
        for entry in &plan.view {
            let owner = match entry {
                Entry::Bind { owner: Some(owner), .. } | Entry::Overlay { owner, .. } => *owner,
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
    out.stage = Stage::Init;
    out.identity_maps();
    out.parent_death();
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
    // ---- small words -----------------------------------------------------------------------------

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

    fn mount(&mut self, kind: &str, target: &str, flags: u64, options: &str) {
        let (source, at, kind_at) = (self.text(kind), self.text(target), self.text(kind));
        let data = if options.is_empty() { Arg::from(0u64) } else { self.text(options).into() };
        self.call(
            format!("mount {kind} at {target}"),
            libc::SYS_mount,
            &[source.into(), at.into(), kind_at.into(), flags.into(), data],
            Expect::Ok,
        );
    }

    fn unmount(&mut self, target: &str) {
        let at = self.text(target);
        self.call(format!("unmount {target}"), libc::SYS_umount2, &[at.into(), MNT_DETACH.into()], Expect::Ok);
    }

    fn set_attributes(&mut self, what: String, fd: Arg, path: &str, flags: u64, set: u64, namespace: Option<i32>) {
        let at = self.text(path);
        let namespace = namespace.map_or(0, |fd| u64::from(fd.cast_unsigned()));
        let attributes = self.program.words(&[set, 0, 0, namespace]);
        self.call(
            what,
            libc::SYS_mount_setattr,
            &[fd, at.into(), flags.into(), attributes.into(), 32u64.into()],
            Expect::Ok,
        );
    }

    fn move_mount(&mut self, from: Slot, target: &str) {
        let (empty, at) = (self.text(""), self.text(target));
        self.call(
            format!("attach {target}"),
            libc::SYS_move_mount,
            &[from.into(), empty.into(), AT_FDCWD.into(), at.into(), MOVE_MOUNT_F_EMPTY_PATH.into()],
            Expect::Ok,
        );
    }

    // ---- spawner ---------------------------------------------------------------------------------

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

    // ---- init: identity and cgroup ----------------------------------------------------------------

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

    // ---- init: mounts ------------------------------------------------------------------------------

    fn mounts(&mut self) {
        self.wall = Wall::Mount;
        let root = self.text("/");
        let private = libc::MS_REC | libc::MS_PRIVATE;
        self.call(
            "make mounts private",
            libc::SYS_mount,
            &[0u64.into(), root.into(), 0u64.into(), private.into(), 0u64.into()],
            Expect::Ok,
        );
        if self.plan.asks_for(Wall::Root) {
            self.private_root();
        }
    }

    fn private_root(&mut self) {
        self.wall = Wall::Root;
        let sources = self.open_sources();
        let staging = self.plan.host.staging.to_str().expect("one of our own constants").to_owned();
        // From here on the host's own directory of this name is out of sight; every source is open already.
        self.mount("tmpfs", &staging, libc::MS_NOSUID | libc::MS_NODEV, "mode=0755,size=4m,nr_inodes=4096");
        let at = self.text(&staging);
        self.call("enter the new root", libc::SYS_chdir, &[at.into()], Expect::Ok);
        self.scratch();
        for entry in &self.plan.view {
            self.entry(entry, &sources);
        }
        self.export();
        self.wall = Wall::Root;
        self.unmount(SCRATCH);
        let scratch = self.text(SCRATCH);
        self.call("remove the scratch's place", libc::SYS_rmdir, &[scratch.into()], Expect::Ok);
        let dot = self.text(".");
        self.call("pivot", libc::SYS_pivot_root, &[dot.into(), dot.into()], Expect::Ok);
        self.call("leave the old root", libc::SYS_umount2, &[dot.into(), MNT_DETACH.into()], Expect::Ok);
        let root = self.text("/");
        self.call("chdir /", libc::SYS_chdir, &[root.into()], Expect::Ok);
        let read_only = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV;
        self.set_attributes("make the root read-only".to_owned(), AT_FDCWD.into(), "/", 0, read_only, None);
        self.prove_root();
    }

    /// Clones every part of the host the view shows, each with its final attributes, while the
    /// host's own paths still mean what the plan meant.
    fn open_sources(&mut self) -> BTreeMap<PathBuf, Slot> {
        let mut sources = BTreeMap::new();
        for entry in &self.plan.view {
            let (source, target, writable, device, owner, directory) = match entry {
                Entry::Bind { source, target, writable, device, owner, directory } => {
                    (source, target, *writable, *device, *owner, *directory)
                }
                Entry::Overlay { source, target, owner } => (source, target, false, false, Some(*owner), true),
                _ => continue,
            };
            let at = self.text(source.as_os_str().as_bytes());
            let name = shown(source.as_os_str().as_bytes());
            let flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE | libc::AT_SYMLINK_NOFOLLOW as u64;
            let fd = self.call_keep(
                format!("open {name}"),
                libc::SYS_open_tree,
                &[AT_FDCWD.into(), at.into(), flags.into()],
            );
            if let Some(workspace) = &self.plan.workspace
                && workspace.path == *source
            {
                self.same_file(fd, workspace.identity, &name);
            }
            let namespace = owner.and_then(|owner| self.making.owners.iter().position(|one| *one == owner));
            if let Some(idx) = namespace {
                let number = INPUT_FD_FIRST + i32::try_from(N_STREAMS + idx).expect("few owners");
                let what = format!("show {name} as the cell's own");
                self.set_attributes(what, fd.into(), "", AT_EMPTY_PATH | AT_RECURSIVE, MOUNT_ATTR_IDMAP, Some(number));
            }
            let mut set = MOUNT_ATTR_NOSUID;
            if !writable || device {
                set |= MOUNT_ATTR_RDONLY;
            }
            set |= if device { MOUNT_ATTR_NOEXEC } else { MOUNT_ATTR_NODEV };
            // A bound file may be a device by another name; only directories are searched below.
            let below = if directory { AT_RECURSIVE } else { 0 };
            self.set_attributes(format!("restrict {name}"), fd.into(), "", AT_EMPTY_PATH | below, set, None);
            sources.insert(target.clone(), fd);
        }
        sources
    }

    /// Stops the launch if what was opened is not what was planned.
    fn same_file(&mut self, fd: Slot, (dev, ino): (u64, u64), name: &str) {
        let (empty, statx) = (self.text(""), self.program.room(256));
        let mask = libc::STATX_INO;
        self.call(
            format!("look at {name}"),
            libc::SYS_statx,
            &[fd.into(), empty.into(), AT_EMPTY_PATH.into(), u64::from(mask).into(), statx.into()],
            Expect::Ok,
        );
        let label = |what: &str| Label { wall: Wall::Root, what: format!("{what} of {name} as planned").into() };
        let ino = self.program.words(&[ino]);
        // struct statx: inode at byte 32, device as two u32 at byte 136.
        self.program.compare(self.stage, label("inode"), statx.offset(32), ino, 8, true);
        let mut device = libc::major(dev).to_ne_bytes().to_vec();
        device.extend_from_slice(&libc::minor(dev).to_ne_bytes());
        let device = self.program.data(&device);
        self.program.compare(self.stage, label("device"), statx.offset(136), device, 8, true);
    }

    /// One filesystem for everything the cell writes, so that one number caps it all.
    fn scratch(&mut self) {
        self.wall = Wall::Disk;
        let at = self.text(SCRATCH);
        self.call("make the scratch's place", libc::SYS_mkdir, &[at.into(), 0o700.into()], Expect::Ok);
        let limits = &self.plan.limits;
        // One block and one file more than allowed: whoever uses them has met the limit, and is seen.
        let options = if self.plan.asks_for(Wall::Disk) {
            let (blocks, inodes) = (scratch_blocks(limits), limits.inodes() + SCRATCH_INODES + 1);
            format!("mode=0711,size={},nr_inodes={inodes}", blocks * PAGE)
        } else {
            "mode=0711,size=0,nr_inodes=0".to_owned()
        };
        self.mount("tmpfs", SCRATCH, libc::MS_NOSUID | libc::MS_NODEV, &options);
        if self.plan.workspace.as_ref().is_some_and(|workspace| workspace.mode == Mode::Cow) {
            let permissions = self.plan.workspace.as_ref().map_or(0o755, |workspace| workspace.permissions);
            self.scratch_directory("upper", permissions | 0o700);
            self.scratch_directory("work", 0o700);
        }
    }

    fn scratch_directory(&mut self, name: &str, mode: u32) -> String {
        let path = format!("{SCRATCH}/{name}");
        let at = self.text(&path);
        self.call(format!("make {path}"), libc::SYS_mkdir, &[at.into(), 0o700.into()], Expect::Ok);
        self.own(&path);
        let mode = u64::from(mode);
        self.call(format!("chmod {path}"), libc::SYS_chmod, &[at.into(), mode.into()], Expect::Ok);
        path
    }

    /// Gives a path of the new root to the cell's user.
    fn own(&mut self, path: &str) {
        if let Some(id) = self.fresh_id() {
            let at = self.text(path);
            self.call(format!("chown {path}"), libc::SYS_chown, &[at.into(), id.into(), id.into()], Expect::Ok);
        }
    }

    fn fresh_id(&self) -> Option<u64> {
        (self.plan.identity == Identity::Fresh && self.plan.asks_for(Wall::Id)).then_some(u64::from(self.making.id))
    }

    fn entry(&mut self, entry: &Entry, sources: &BTreeMap<PathBuf, Slot>) {
        self.wall = Wall::Root;
        match entry {
            Entry::Directory { path, own } => {
                let (path, _) = self.inside(path);
                let at = self.text(&path);
                let what = format!("make {}", shown(&path));
                self.call(what, libc::SYS_mkdir, &[at.into(), 0o755.into()], Expect::OkOr(&[EEXIST]));
                if *own && let Some(id) = self.fresh_id() {
                    self.call(
                        "chown",
                        libc::SYS_lchown,
                        &[at.into(), id.into(), id.into()],
                        Expect::OkOr(&[EROFS, EPERM]),
                    );
                }
            }
            Entry::File { path, contents } => {
                let path = path.to_str().expect("our own names").trim_start_matches('/').to_owned();
                let id = self.making.id.to_string();
                let contents = String::from_utf8_lossy(contents).replace(ID_MARK, &id);
                self.write_file(&path, contents.as_bytes(), true);
            }
            Entry::Link { path, target } => {
                let (path, _) = self.inside(path);
                let (from, to) = (self.text(target.as_os_str().as_bytes()), self.text(&path));
                let what = format!("link {}", shown(&path));
                self.call(what, libc::SYS_symlink, &[from.into(), to.into()], Expect::OkOr(&[EEXIST]));
            }
            Entry::Bind { target, directory, .. } => {
                let (path, name) = self.inside(target);
                if !directory {
                    let at = self.text(&path);
                    let args = [at.into(), u64::from(libc::S_IFREG | 0o644).into(), 0.into()];
                    // The place may be there already, in a tree that was attached before.
                    self.call(format!("make {name}"), libc::SYS_mknod, &args, Expect::OkOr(&[EEXIST]));
                }
                self.attach(sources, target, &path, &name);
            }
            Entry::Scratch { name, target, mode } => {
                self.wall = Wall::Disk;
                let made = self.scratch_directory(name, *mode);
                let (path, name) = self.inside(target);
                let from = self.text(&made);
                let flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC;
                let args = [AT_FDCWD.into(), from.into(), flags.into()];
                let fd = self.call_keep(format!("open the scratch of {name}"), libc::SYS_open_tree, &args);
                let at = self.text(&path);
                self.attach_at(fd, at, name);
            }
            Entry::Overlay { target, .. } => {
                let (path, name) = self.inside(target);
                let lower = self.text(LOWER);
                self.call("make the lower place", libc::SYS_mkdir, &[lower.into(), 0o755.into()], Expect::Ok);
                if let Some(source) = sources.get(target) {
                    self.move_mount(*source, LOWER);
                }
                // No colon, comma or backslash of a host path ever reaches these options.
                let mut options = format!("lowerdir={LOWER},upperdir={SCRATCH}/upper,workdir={SCRATCH}/work");
                if self.plan.identity != Identity::Fresh {
                    options.push_str(",userxattr");
                }
                let (kind, at, options) = (self.text("overlay"), self.text(&path), self.text(options));
                let flags = libc::MS_NOSUID | libc::MS_NODEV;
                self.call(
                    format!("mount overlay at {name}"),
                    libc::SYS_mount,
                    &[kind.into(), at.into(), kind.into(), flags.into(), options.into()],
                    Expect::Ok,
                );
                self.unmount(LOWER);
                self.call("remove the lower place", libc::SYS_rmdir, &[lower.into()], Expect::Ok);
            }
            // Without a pid namespace, a control, there is nothing it could show.
            Entry::Proc if !self.plan.asks_for(Wall::Pid) => {}
            Entry::Proc => {
                self.wall = Wall::Pid;
                let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
                // Before the old root goes: the kernel lets an ordinary user mount only what it still sees.
                self.mount("proc", "proc", flags, "");
            }
            Entry::ReadOnly { path } => {
                let (path, name) = self.inside(path);
                let at = self.text(&path);
                let flags = libc::MS_BIND | libc::MS_REC;
                let args = [at.into(), at.into(), 0u64.into(), flags.into()];
                self.call(format!("bind {name}"), libc::SYS_mount, &args, Expect::OkOr(&[ENOENT]));
                let set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;
                let attributes = self.program.words(&[set, 0, 0, 0]);
                self.call(
                    format!("make {name} read-only"),
                    libc::SYS_mount_setattr,
                    &[AT_FDCWD.into(), at.into(), AT_RECURSIVE.into(), attributes.into(), 32u64.into()],
                    Expect::OkOr(&[ENOENT]),
                );
            }
            Entry::Mask { path, directory } => {
                let (path, name) = self.inside(path);
                let at = self.text(&path);
                let (source, kind, flags) = if *directory {
                    let tmpfs = self.text("tmpfs");
                    let flags = libc::MS_RDONLY | libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
                    (tmpfs, tmpfs.into(), flags)
                } else {
                    (self.text("dev/null"), Arg::from(0u64), libc::MS_BIND)
                };
                let args = [source.into(), at.into(), kind, flags.into(), 0u64.into()];
                self.call(format!("cover {name}"), libc::SYS_mount, &args, Expect::OkOr(&[ENOENT, ENOTDIR]));
            }
        }
    }

    fn attach(&mut self, sources: &BTreeMap<PathBuf, Slot>, target: &Path, path: &[u8], name: &str) {
        if let Some(source) = sources.get(target) {
            let at = self.text(path);
            self.attach_at(*source, at, name.to_owned());
        }
    }

    fn attach_at(&mut self, from: Slot, at: Addr, name: String) {
        let empty = self.text("");
        self.call(
            format!("attach {name}"),
            libc::SYS_move_mount,
            &[from.into(), empty.into(), AT_FDCWD.into(), at.into(), MOVE_MOUNT_F_EMPTY_PATH.into()],
            Expect::Ok,
        );
    }

    /// A path inside, as it is reached while the new root is the working directory; and its name to show.
    fn inside(&self, path: &Path) -> (Vec<u8>, String) {
        let bytes = path.as_os_str().as_bytes();
        (bytes.strip_prefix(b"/").unwrap_or(bytes).to_vec(), shown(bytes))
    }

    /// Keeps hold of the scratch filesystem and of the cell's processes for the supervisor.
    fn export(&mut self) {
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
        for path in [SCRATCH, "proc"] {
            let at = self.text(path);
            let args = [AT_FDCWD.into(), at.into(), flags.into()];
            let fd = self.call_keep(format!("open {path}"), libc::SYS_openat, &args);
            self.program.export(fd);
        }
    }

    fn prove_root(&mut self) {
        self.wall = Wall::Root;
        let (root, stat) = (self.text("/"), self.program.room(144));
        self.call("look at /", libc::SYS_stat, &[root.into(), stat.into()], Expect::Ok);
        let host = self.program.words(&[self.plan.host.root_dev]);
        let label = Label { wall: Wall::Root, what: "proof: / is not the host's".into() };
        // struct stat: device at byte 0.
        self.program.compare(self.stage, label, stat, host, 8, false);
        let probe = self.text("/.probe");
        self.call("proof: / is read-only", libc::SYS_mkdir, &[probe.into(), 0o755.into()], Expect::Fails(&[EROFS]));
        let shadow = self.text("/etc/shadow");
        self.call(
            "proof: /etc/shadow is absent",
            libc::SYS_access,
            &[shadow.into(), 0.into()],
            Expect::Fails(&[ENOENT]),
        );
        self.wall = Wall::Disk;
        if !self.plan.asks_for(Wall::Disk) {
            return;
        }
        let (tmp, statfs) = (self.text("/tmp"), self.program.room(120));
        self.call("look at /tmp", libc::SYS_statfs, &[tmp.into(), statfs.into()], Expect::Ok);
        let blocks = self.program.words(&[scratch_blocks(&self.plan.limits)]);
        let label = Label { wall: Wall::Disk, what: "proof: /tmp has the disk limit's size".into() };
        // struct statfs: blocks at byte 16.
        self.program.compare(self.stage, label, statfs.offset(16), blocks, 8, true);
    }

    // ---- init: namespaces --------------------------------------------------------------------------

    fn names(&mut self) {
        self.wall = Wall::Uts;
        if self.plan.asks_for(Wall::Uts) {
            let name = self.text(HOST_NAME);
            let len = HOST_NAME.len() as u64;
            self.call("set the host name", libc::SYS_sethostname, &[name.into(), len.into()], Expect::Ok);
            let domain = self.text("");
            self.call("clear the domain name", libc::SYS_setdomainname, &[domain.into(), 0u64.into()], Expect::Ok);
        }
    }

    /// Each namespace must be another than the one hotcell is in.
    fn prove_namespaces(&mut self) {
        let proc = self.plan.asks_for(Wall::Pid) || !self.plan.asks_for(Wall::Root);
        for (wall, name) in [
            (Wall::User, "user"),
            (Wall::Mount, "mnt"),
            (Wall::Pid, "pid"),
            (Wall::Net, "net"),
            (Wall::Ipc, "ipc"),
            (Wall::Uts, "uts"),
            (Wall::CgroupNs, "cgroup"),
            (Wall::Time, "time"),
        ] {
            let Some(host) = self.plan.host.namespaces.get(name).filter(|_| self.plan.asks_for(wall) && proc) else {
                continue;
            };
            self.wall = wall;
            let (path, stat) = (self.text(format!("/proc/self/ns/{name}")), self.program.room(144));
            self.call(format!("look at the {name} namespace"), libc::SYS_stat, &[path.into(), stat.into()], Expect::Ok);
            let host = self.program.words(&[*host]);
            let label = Label { wall, what: format!("proof: own {name} namespace").into() };
            // struct stat: inode at byte 8.
            self.program.compare(self.stage, label, stat.offset(8), host, 8, false);
        }
        if self.plan.asks_for(Wall::Pid) {
            self.wall = Wall::Pid;
            self.call("proof: first process", libc::SYS_getpid, &[], Expect::Is(1));
            self.call("proof: no parent in sight", libc::SYS_getppid, &[], Expect::Is(0));
        }
        if self.plan.asks_for(Wall::Uts) {
            self.wall = Wall::Uts;
            let (names, name) = (self.program.room(390), self.text(HOST_NAME));
            self.call("ask for the host name", libc::SYS_uname, &[names.into()], Expect::Ok);
            let label = Label { wall: Wall::Uts, what: "proof: own host name".into() };
            // struct utsname: 65 bytes a field, the node name is the second.
            self.program.compare(self.stage, label, names.offset(65), name, HOST_NAME.len() as u64 + 1, true);
        }
        if self.plan.asks_for(Wall::Net) {
            self.wall = Wall::Net;
            let udp = [libc::AF_INET.into(), (libc::SOCK_DGRAM | libc::SOCK_CLOEXEC).into(), 0.into()];
            let fd = self.call_keep("make a udp socket", libc::SYS_socket, &udp);
            let anybody = self.program.data(&inet_address([192, 0, 2, 1], 9));
            let args = [fd.into(), anybody.into(), 16u64.into()];
            self.call("proof: no route to anybody", libc::SYS_connect, &args, Expect::Fails(&[ENETUNREACH]));
            self.close(fd);
        }
    }

    // ---- init: privilege ---------------------------------------------------------------------------

    fn drop_privilege(&mut self) {
        let last_cap = self.plan.host.last_cap;
        if self.plan.asks_for(Wall::Caps) {
            self.wall = Wall::Caps;
            let none = libc::PR_CAP_AMBIENT_CLEAR_ALL;
            let args = [libc::PR_CAP_AMBIENT.into(), none.into(), 0.into(), 0.into(), 0.into()];
            self.call("clear ambient capabilities", libc::SYS_prctl, &args, Expect::Ok);
            for cap in 0..=last_cap {
                let args = [libc::PR_CAPBSET_DROP.into(), u64::from(cap).into()];
                self.call(format!("drop capability {cap} for good"), libc::SYS_prctl, &args, Expect::Ok);
            }
            // noroot, no_setuid_fixup, no_cap_ambient_raise, each with its lock; keep_caps off and locked.
            let args = [libc::PR_SET_SECUREBITS.into(), 0xefu64.into()];
            self.call("lock the secure bits", libc::SYS_prctl, &args, Expect::Ok);
        }
        if !self.plan.asks_for(Wall::Caps) {
            self.keep_capabilities();
        }
        if self.plan.identity == Identity::Fresh {
            if self.plan.asks_for(Wall::Groups) {
                self.wall = Wall::Groups;
                self.call("leave all groups", libc::SYS_setgroups, &[0.into(), 0u64.into()], Expect::Ok);
            }
            if let Some(id) = self.fresh_id() {
                self.wall = Wall::Id;
                let id = Arg::from(id);
                self.call("change group", libc::SYS_setresgid, &[id, id, id], Expect::Ok);
                self.call("change user", libc::SYS_setresuid, &[id, id, id], Expect::Ok);
            }
        }
        if self.plan.asks_for(Wall::Caps) {
            self.wall = Wall::Caps;
            let header = self.program.words(&[CAPABILITY_VERSION_3]);
            let none = self.program.words(&[0, 0, 0]);
            self.call("drop all capabilities", libc::SYS_capset, &[header.into(), none.into()], Expect::Ok);
            let (found, zero) = (self.program.words(&[u64::MAX; 3]), none);
            self.call("read the capabilities", libc::SYS_capget, &[header.into(), found.into()], Expect::Ok);
            let label = Label { wall: Wall::Caps, what: "proof: no capability left".into() };
            self.program.compare(self.stage, label, found, zero, 24, true);
            for cap in 0..=last_cap {
                let args = [libc::PR_CAPBSET_READ.into(), u64::from(cap).into()];
                self.call(format!("proof: capability {cap} is gone for good"), libc::SYS_prctl, &args, Expect::Is(0));
            }
            let (tmpfs, at) = (self.text("tmpfs"), self.text("/"));
            let args = [tmpfs.into(), at.into(), tmpfs.into(), 0u64.into(), 0u64.into()];
            self.call("proof: cannot mount", libc::SYS_mount, &args, Expect::Fails(&[EPERM]));
        }
        // A change of id forgets both of these.
        self.parent_death();
        self.call(
            "let nobody read this process",
            libc::SYS_prctl,
            &[libc::PR_SET_DUMPABLE.into(), 0.into()],
            Expect::Ok,
        );
        if self.plan.asks_for(Wall::Id) {
            self.wall = Wall::Id;
            let uid = match self.plan.identity {
                Identity::Own { uid, .. } => uid,
                Identity::Fresh => self.making.id,
            };
            self.call("proof: the id is the cell's", libc::SYS_getuid, &[], Expect::Is(i64::from(uid)));
            if self.plan.asks_for(Wall::Caps) && uid != 0 {
                let args = [0.into(), 0.into(), 0.into()];
                self.call("proof: no way back to root", libc::SYS_setresuid, &args, Expect::Fails(&[EPERM, EINVAL]));
            }
        }
        if self.plan.asks_for(Wall::Groups) {
            self.wall = Wall::Groups;
            self.call("proof: no group left", libc::SYS_getgroups, &[0.into(), 0u64.into()], Expect::Is(0));
        }
    }

    /// For a control, where the wall is left out: an ordinary user's exec would drop them by itself.
    fn keep_capabilities(&mut self) {
        self.wall = Wall::Caps;
        let last_cap = self.plan.host.last_cap;
        let header = self.program.words(&[CAPABILITY_VERSION_3]);
        let found = self.program.room(24);
        self.call("read the capabilities", libc::SYS_capget, &[header.into(), found.into()], Expect::Ok);
        let all = (1u64 << (last_cap + 1)) - 1;
        // Two rows of effective, permitted, inheritable; capabilities root does not have stay away.
        let (low, high) = (all & 0xffff_ffff, all >> 32);
        let rows = [low | low << 32, low | high << 32, high | high << 32];
        let wanted = self.program.words(&rows);
        let missing = Expect::OkOr(&[EPERM]);
        self.call("make them inheritable", libc::SYS_capset, &[header.into(), wanted.into()], missing);
        for cap in 0..=last_cap {
            let raise = libc::PR_CAP_AMBIENT_RAISE;
            let args = [libc::PR_CAP_AMBIENT.into(), raise.into(), u64::from(cap).into(), 0.into(), 0.into()];
            self.call("keep a capability", libc::SYS_prctl, &args, missing);
        }
    }

    fn rlimits(&mut self) {
        self.wall = Wall::Rlimits;
        if !self.plan.asks_for(Wall::Rlimits) {
            return;
        }
        let limits = &self.plan.limits;
        let cpu_s = limits.cpu_time.map_or(libc::RLIM_INFINITY, |time| time.as_secs() + 1);
        for (resource, name, value) in [
            (libc::RLIMIT_NOFILE, "descriptors", u64::from(limits.fds)),
            // Counted for each user, and no process but this cell's has its id in its namespace. One more for
            // init, and one more so that the cgroup's limit or the watch is met first and tells.
            (libc::RLIMIT_NPROC, "processes", u64::from(limits.pids) + 2),
            // By default one block more than the disk limit, which is then met first and tells.
            (libc::RLIMIT_FSIZE, "file size", limits.file_size.map_or(limits.disk.0 + PAGE, |size| size.0)),
            (libc::RLIMIT_CPU, "cpu time", cpu_s),
            // One, not zero: at zero the kernel still starts a core handler of the host.
            (libc::RLIMIT_CORE, "core size", 1),
            (libc::RLIMIT_MEMLOCK, "locked memory", MEMLOCK_BYTES),
            (libc::RLIMIT_MSGQUEUE, "queue bytes", MSGQUEUE_BYTES),
            (libc::RLIMIT_RTPRIO, "real-time priority", 0),
            (libc::RLIMIT_NICE, "nice", 0),
        ] {
            let given = self.program.words(&[value, value]);
            let found = self.program.room(16);
            let set = [0.into(), u64::from(resource).into(), given.into(), 0u64.into()];
            self.call(format!("limit {name}"), libc::SYS_prlimit64, &set, Expect::Ok);
            let get = [0.into(), u64::from(resource).into(), 0u64.into(), found.into()];
            self.call(format!("read the limit on {name}"), libc::SYS_prlimit64, &get, Expect::Ok);
            let label = Label { wall: Wall::Rlimits, what: format!("proof: {name} limited").into() };
            self.program.compare(self.stage, label, found, given, 16, true);
        }
    }

    fn no_new_privs(&mut self) {
        self.wall = Wall::NoNewPrivs;
        if self.plan.asks_for(Wall::NoNewPrivs) {
            let args = [libc::PR_SET_NO_NEW_PRIVS.into(), 1.into(), 0.into(), 0.into(), 0.into()];
            self.call("give up new privileges", libc::SYS_prctl, &args, Expect::Ok);
            let args = [libc::PR_GET_NO_NEW_PRIVS.into(), 0.into(), 0.into(), 0.into(), 0.into()];
            self.call("proof: no new privileges", libc::SYS_prctl, &args, Expect::Is(1));
        }
    }

    // ---- init: Landlock and the filter -------------------------------------------------------------

    fn landlock(&mut self) {
        let (files, tcp, scope) = (
            self.plan.asks_for(Wall::Landlock),
            self.plan.asks_for(Wall::LandlockTcp),
            self.plan.asks_for(Wall::LandlockScope),
        );
        if !(files || tcp || scope) {
            return;
        }
        self.wall = Wall::Landlock;
        let abi = self.plan.host.landlock_abi;
        // Where there is no private root, as in a control, the file fence has nothing to follow.
        let files = files && self.plan.asks_for(Wall::Root);
        let outsider = (scope && self.plan.asks_for(Wall::Net)).then(|| self.abstract_listener());
        self.wall = Wall::Landlock;
        let attributes = landlock::attributes(abi, files, tcp, scope);
        let (at, size) = (self.program.words(&attributes), attributes.len() as u64 * 8);
        let args = [at.into(), size.into(), 0.into()];
        let ruleset = self.call_keep("make a ruleset", libc::SYS_landlock_create_ruleset, &args);
        if files {
            for rule in landlock::rules(&self.plan.view, abi) {
                let path = self.text(rule.path.as_os_str().as_bytes());
                let name = shown(rule.path.as_os_str().as_bytes());
                let attr = self.program.words(&[rule.access, 0]);
                let flags = libc::O_PATH | libc::O_CLOEXEC;
                let args = [AT_FDCWD.into(), path.into(), flags.into()];
                let label = Label { wall: self.wall, what: format!("open {name}").into() };
                let added = self.program.call(self.stage, label, libc::SYS_openat, &args, Expect::Ok);
                // struct landlock_path_beneath_attr: the descriptor follows the rights.
                added.keep_int_at(attr.offset(8));
                let args = [ruleset.into(), 1.into(), attr.into(), 0.into()];
                self.call(format!("grant {name}"), libc::SYS_landlock_add_rule, &args, Expect::Ok);
            }
        }
        self.call("raise the fence", libc::SYS_landlock_restrict_self, &[ruleset.into(), 0.into()], Expect::Ok);
        if files {
            let fence = self.text(FENCE);
            let args = [AT_FDCWD.into(), fence.into(), libc::O_RDONLY.into()];
            self.call("proof: what is not granted cannot be read", libc::SYS_openat, &args, Expect::Fails(&[EACCES]));
        }
        if tcp {
            self.wall = Wall::LandlockTcp;
            let kind = [libc::AF_INET.into(), (libc::SOCK_STREAM | libc::SOCK_CLOEXEC).into(), 0.into()];
            let fd = self.call_keep("make a tcp socket", libc::SYS_socket, &kind);
            let local = self.program.data(&inet_address([127, 0, 0, 1], 9));
            let args = [fd.into(), local.into(), 16u64.into()];
            self.call("proof: no tcp", libc::SYS_connect, &args, Expect::Fails(&[EACCES]));
            self.close(fd);
        }
        if let Some((listener, address, len)) = outsider {
            self.wall = Wall::LandlockScope;
            let kind = [libc::AF_UNIX.into(), (libc::SOCK_STREAM | libc::SOCK_CLOEXEC).into(), 0.into()];
            let fd = self.call_keep("make a unix socket", libc::SYS_socket, &kind);
            let args = [fd.into(), address.into(), len.into()];
            self.call("proof: no abstract socket from before", libc::SYS_connect, &args, Expect::Fails(&[EPERM]));
            self.close(fd);
            self.close(listener);
        }
    }

    /// An abstract socket made before the fence: reaching it afterwards would mean there is none.
    fn abstract_listener(&mut self) -> (Slot, Addr, u64) {
        self.wall = Wall::LandlockScope;
        let kind = [libc::AF_UNIX.into(), (libc::SOCK_STREAM | libc::SOCK_CLOEXEC).into(), 0.into()];
        let fd = self.call_keep("make a unix socket", libc::SYS_socket, &kind);
        let mut address = family(libc::AF_UNIX);
        address.extend_from_slice(b"\0hotcell-proof");
        let (at, len) = (self.program.data(&address), address.len() as u64);
        self.call("bind an abstract socket", libc::SYS_bind, &[fd.into(), at.into(), len.into()], Expect::Ok);
        self.call("listen", libc::SYS_listen, &[fd.into(), 1.into()], Expect::Ok);
        (fd, at, len)
    }

    /// The command inherits it from init; a wrong one is found before anything of the command runs.
    fn working_directory(&mut self) {
        self.wall = Wall::Root;
        let cwd = self.text(self.plan.cwd.as_os_str().as_bytes());
        self.call(CHDIR, libc::SYS_chdir, &[cwd.into()], Expect::Ok);
    }

    fn seccomp(&mut self) {
        self.wall = Wall::Seccomp;
        if !self.plan.asks_for(Wall::Seccomp) {
            return;
        }
        let code = seccomp::filter(&self.plan.seccomp);
        let mut bytes = Vec::with_capacity(code.len() * 8);
        for instruction in &code {
            bytes.extend_from_slice(&instruction.code.to_ne_bytes());
            bytes.extend_from_slice(&[instruction.jt, instruction.jf]);
            bytes.extend_from_slice(&instruction.k.to_ne_bytes());
        }
        let filter = self.program.data(&bytes);
        // struct sock_fprog: the length in two bytes, then a pointer.
        let program = self.program.words(&[code.len() as u64, filter.value()]);
        let set_mode_filter = 1;
        let args = [set_mode_filter.into(), 0.into(), program.into()];
        self.call("install the filter", libc::SYS_seccomp, &args, Expect::Ok);
        let filtered = 2;
        self.call("proof: filtered", libc::SYS_prctl, &[libc::PR_GET_SECCOMP.into()], Expect::Is(filtered));
        if !self.plan.seccomp.omit.iter().any(|rule| rule == "namespaces") {
            // Without a filter, unsharing nothing succeeds for anybody.
            self.call("proof: a listed call is refused", libc::SYS_unshare, &[0.into()], Expect::Fails(&[EPERM]));
        }
    }

    // ---- payload -----------------------------------------------------------------------------------

    fn payload(&mut self) {
        self.wall = Wall::Tty;
        self.call("own session", libc::SYS_setsid, &[], Expect::Ok);
        self.wall = Wall::Fds;
        for (to, from, name) in [(0, STDIN_FD, "stdin"), (1, STDOUT_FD, "stdout"), (2, STDERR_FD, "stderr")] {
            let args = [from.into(), to.into(), 0.into()];
            self.call(format!("give {name}"), libc::SYS_dup3, &args, Expect::Ok);
        }
        // Everything else goes now, but for the control socket, which goes when the command begins.
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
        self.wall = Wall::Tty;
        let tty = self.text("/dev/tty");
        let args = [AT_FDCWD.into(), tty.into(), libc::O_RDWR.into()];
        self.call("proof: no terminal", libc::SYS_openat, &args, Expect::Fails(&[ENOENT, ENXIO, EACCES]));
        self.wall = Wall::Root;
        self.call("set the mode of new files", libc::SYS_umask, &[0o022.into()], Expect::Ok);
        let program = self.text(self.plan.program.as_os_str().as_bytes());
        let argv = self.program.texts(self.plan.argv.iter().map(|argument| argument.as_bytes()));
        let env: Vec<Vec<u8>> =
            self.plan.env.iter().map(|(name, value)| [name.as_bytes(), b"=", value.as_bytes()].concat()).collect();
        let env = self.program.texts(&env);
        self.call(EXEC, libc::SYS_execve, &[program.into(), argv.into(), env.into()], Expect::Ok);
    }
}

/// The label of the call whose failure is the request's.
pub(crate) const CHDIR: &str = "enter the working directory";

/// The label of the last call: its failure is the command's, not a wall's.
pub(crate) const EXEC: &str = "execute the command";

pub(crate) const PAGE: u64 = 4096;

/// The size of the scratch filesystem: the limit, and one block to see it met.
fn scratch_blocks(limits: &Limits) -> u64 {
    limits.disk.0.div_ceil(PAGE) + 1
}

/// Directories of ours on the scratch filesystem: its root, tmp, var-tmp, shm, home, cwd, upper, work
/// and what the overlay makes in it.
pub(crate) const SCRATCH_INODES: u64 = 16;
const HOST_NAME: &str = "cell";
const CAPABILITY_VERSION_3: u64 = 0x2008_0522;
const MEMLOCK_BYTES: u64 = 8 << 20;
const MSGQUEUE_BYTES: u64 = 819_200;

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
