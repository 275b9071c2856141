//! The private root: every part of the host the view shows is opened, a new root is built of them and
//! of scratch, and the old one is left behind.
//!
//! What no cell can change is built once, by the spawner, in a mount namespace of its own; a cell gets a copy of that and
//! adds what is its own: scratch, `/proc`, the workspace's overlay, and whatever is mounted in those.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use hotcell_base::text::shown;
use hotcell_sys::program::{Arg, Expect, Slot};
use libc::{EEXIST, ENOENT, ENOTDIR, EPERM, EROFS};

use super::{AT_FDCWD, Label, Writer};
use crate::control::Decoy;
use crate::limits::Limits;
use crate::plan::{ID_MARK, Identity, Mode, Plan};
use crate::view::{Entry, FENCE, NOTHING, OWN};
use crate::wall::Wall;

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
const FSOPEN_CLOEXEC: u64 = 1;
const FSMOUNT_CLOEXEC: u64 = 1;
const FSCONFIG_CMD_CREATE: u64 = 6;
const MNT_DETACH: u64 = libc::MNT_DETACH as u64;

const PROC: &str = "proc";
/// Where the ground keeps what each cell mounts by itself, until `/proc` takes its place.
const SOURCES: &str = PROC;
/// Where the scratch filesystem is while a cell is built.
const SCRATCH: &str = "proc/scratch";

pub(crate) const PAGE: u64 = 4096;

/// The size of the scratch filesystem: the limit, and one block to see it met.
fn scratch_blocks(limits: &Limits) -> u64 {
    limits.disk.0.div_ceil(PAGE) + 1
}

/// Where decoys are on the scratch filesystem, each under its number.
pub(crate) const DECOYS: &str = "decoys";

/// Files of ours on the scratch filesystem: its root, tmp, var-tmp, shm, home, cwd, upper, work, what the overlay
/// makes in it, and decoys.
pub(crate) fn scratch_inodes(plan: &Plan) -> u64 {
    16 + plan.view.iter().filter(|entry| matches!(entry, Entry::Decoy { .. })).count() as u64
}

/// What is opened for a place, by that: its text, which paths would take apart each time.
type Sources<'a> = BTreeMap<&'a OsStr, Slot>;

/// What the ground leaves to each cell.
#[derive(Default)]
pub(super) struct Mounts<'a> {
    /// What each cell makes by itself.
    own: Vec<&'a Entry>,
    /// Where the source of what is mounted at a place is kept.
    kept: BTreeMap<&'a OsStr, String>,
}

/// What each cell makes by itself: what is a cell's own, or is in something that is.
struct Own<'a>(Vec<&'a Path>);

impl<'a> Own<'a> {
    fn of(view: &'a [Entry]) -> Own<'a> {
        Own(view
            .iter()
            .filter_map(|entry| match entry {
                Entry::Scratch { target, .. } | Entry::Overlay { target, .. } => Some(&**target),
                Entry::Proc => Some(Path::new("/proc")),
                _ => None,
            })
            .collect())
    }

    fn has(&self, entry: &Entry) -> bool {
        let is_below = |path: &Path| self.0.iter().any(|place| is_at_or_below(path, place));
        match entry {
            Entry::Proc | Entry::Scratch { .. } | Entry::Overlay { .. } | Entry::Decoy { .. } => true,
            // The directories themselves are places to be mounted on.
            Entry::Directory { path, .. } => path.parent().is_some_and(is_below),
            Entry::File { path, .. } | Entry::Link { path, .. } | Entry::Mask { path, .. } => is_below(path),
            Entry::Bind { target, .. } | Entry::Guard { target, .. } => is_below(target),
        }
    }
}

/// Whether a path leads to a place or to something in it. Those of a view are absolute and have no dots: their text tells.
fn is_at_or_below(path: &Path, place: &Path) -> bool {
    let rest = path.as_os_str().as_bytes().strip_prefix(place.as_os_str().as_bytes());
    rest.is_some_and(|rest| matches!(rest, [] | [b'/', ..]))
}

/// Whether an entry is one that others are covered with.
fn is_cover(entry: &Entry) -> bool {
    matches!(entry, Entry::Directory { path, .. } | Entry::File { path, .. } if path.starts_with(OWN))
}

fn is_in_proc(path: &Path) -> bool {
    path.starts_with("/proc")
}

impl<'a> Writer<'a> {
    /// The mounts of all cells of a plan.
    pub(super) fn ground_mounts(&mut self) -> Mounts<'a> {
        self.wall = Wall::Mount;
        self.call("unshare", libc::SYS_unshare, &[libc::CLONE_NEWNS.into()], Expect::Ok);
        let root = self.text("/");
        let private = libc::MS_REC | libc::MS_PRIVATE;
        self.call(
            "make mounts private",
            libc::SYS_mount,
            &[0u64.into(), root.into(), 0u64.into(), private.into(), 0u64.into()],
            Expect::Ok,
        );
        if self.plan.asks_for(Wall::Root) { self.ground_root() } else { Mounts::default() }
    }

    fn ground_root(&mut self) -> Mounts<'a> {
        self.wall = Wall::Root;
        let sources = self.open_sources();
        let staging = self.plan.host.staging.to_str().expect("one of our own constants").to_owned();
        // From here on the host's own directory of this name is out of sight; every source is open already.
        self.mount("tmpfs", &staging, libc::MS_NOSUID | libc::MS_NODEV, "mode=0755,size=4m,nr_inodes=4096");
        let at = self.text(&staging);
        self.call("enter the new root", libc::SYS_chdir, &[at.into()], Expect::Ok);
        let at = self.text(PROC);
        self.call("make /proc", libc::SYS_mkdir, &[at.into(), 0o755.into()], Expect::Ok);
        let places = Own::of(&self.plan.view);
        let (own, shared): (Vec<&Entry>, Vec<&Entry>) = self.plan.view.iter().partition(|entry| places.has(entry));
        let mounts = self.keep_sources(own, &sources);
        // Now, and not when all is in place: from here on there is nothing but the new root, whatever a path, a
        // link in it or `..` says.
        self.wall = Wall::Root;
        let dot = self.text(".");
        self.call("pivot", libc::SYS_pivot_root, &[dot.into(), dot.into()], Expect::Ok);
        self.call("leave the old root", libc::SYS_umount2, &[dot.into(), MNT_DETACH.into()], Expect::Ok);
        let (covers, others): (Vec<&Entry>, Vec<&Entry>) = shared.into_iter().partition(|entry| is_cover(entry));
        for entry in covers {
            self.entry(entry, &sources, &mounts);
        }
        // What others are covered with is a mount of its own, and so are its copies.
        let own = self.text(OWN);
        let args = [own.into(), own.into(), 0u64.into(), libc::MS_BIND.into(), 0u64.into()];
        self.call("bind the covers", libc::SYS_mount, &args, Expect::Ok);
        let set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;
        self.set_attributes("make the covers read-only".to_owned(), AT_FDCWD.into(), OWN, 0, set);
        for entry in others {
            self.entry(entry, &sources, &mounts);
        }
        self.wall = Wall::Root;
        let root = self.text("/");
        self.call("chdir /", libc::SYS_chdir, &[root.into()], Expect::Ok);
        let read_only = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV;
        self.set_attributes("make the root read-only".to_owned(), AT_FDCWD.into(), "/", 0, read_only);
        mounts
    }

    /// Puts aside what each cell mounts by itself: once the old root is gone, there is no other way to it.
    fn keep_sources(&mut self, own: Vec<&'a Entry>, sources: &Sources<'_>) -> Mounts<'a> {
        let kept: Vec<(&OsStr, bool)> = own
            .iter()
            .filter_map(|entry| match entry {
                Entry::Bind { target, directory, .. } | Entry::Guard { target, directory, .. } => {
                    Some((target.as_os_str(), *directory))
                }
                Entry::Overlay { target, .. } => Some((target.as_os_str(), true)),
                _ => None,
            })
            .collect();
        let mut mounts = Mounts { own, kept: BTreeMap::new() };
        self.mount("tmpfs", SOURCES, libc::MS_NOSUID | libc::MS_NODEV, "mode=0700,size=1m,nr_inodes=1024");
        let scratch = self.text(SCRATCH);
        self.call("make the scratch's place", libc::SYS_mkdir, &[scratch.into(), 0o700.into()], Expect::Ok);
        for (number, (target, directory)) in kept.into_iter().enumerate() {
            let place = format!("{SOURCES}/{number}");
            let at = self.text(&place);
            if directory {
                self.call(format!("make {place}"), libc::SYS_mkdir, &[at.into(), 0o700.into()], Expect::Ok);
            } else {
                let args = [at.into(), u64::from(libc::S_IFREG).into(), 0.into()];
                self.call(format!("make {place}"), libc::SYS_mknod, &args, Expect::Ok);
            }
            if let Some(source) = sources.get(target) {
                self.attach(*source, place.as_bytes(), &place);
            }
            mounts.kept.insert(target, place);
        }
        // The kernel lets an ordinary user mount only a `/proc` of which it still sees another.
        if matches!(self.plan.identity, Identity::Own { .. }) && self.plan.asks_for(Wall::Pid) {
            self.wall = Wall::Pid;
            let place = format!("{SOURCES}/{PROC}");
            let (from, at) = (self.text("/proc"), self.text(&place));
            self.call(format!("make {place}"), libc::SYS_mkdir, &[at.into(), 0o700.into()], Expect::Ok);
            let flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE;
            let args = [AT_FDCWD.into(), from.into(), flags.into()];
            let fd = self.call_keep("open /proc", libc::SYS_open_tree, &args);
            self.attach(fd, place.as_bytes(), &place);
        }
        mounts
    }

    /// What is a cell's own.
    pub(super) fn cell_mounts(&mut self, mounts: &Mounts<'_>) {
        let own = &mounts.own;
        let is_in_proc = |entry: &&&Entry| match entry {
            Entry::Mask { path, .. } => is_in_proc(path),
            _ => false,
        };
        self.scratch();
        for entry in own.iter().filter(|entry| !is_in_proc(entry)) {
            self.entry(entry, &Sources::new(), mounts);
        }
        self.export(SCRATCH);
        // Without a pid namespace, a control, there is nothing it could show.
        if self.plan.asks_for(Wall::Pid) {
            let proc = self.make_proc();
            // From here on the sources are out of everybody's reach: nobody inside can take a mount away. To unmount them
            // would be to wait for every processor.
            self.attach(proc, PROC.as_bytes(), PROC);
        } else {
            self.wall = Wall::Root;
            self.unmount(SOURCES);
        }
        for entry in own.iter().filter(is_in_proc) {
            self.entry(entry, &Sources::new(), mounts);
        }
        self.export(PROC);
        self.export("/");
        self.prove_root();
    }

    /// A `/proc` of this pid namespace that is nowhere yet.
    fn make_proc(&mut self) -> Slot {
        self.wall = Wall::Pid;
        let kind = self.text("proc");
        let context = self.call_keep("open a proc filesystem", libc::SYS_fsopen, &[kind.into(), FSOPEN_CLOEXEC.into()]);
        let args = [context.into(), FSCONFIG_CMD_CREATE.into(), 0u64.into(), 0u64.into(), 0.into()];
        self.call("make a proc filesystem", libc::SYS_fsconfig, &args, Expect::Ok);
        let attributes = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;
        let args = [context.into(), FSMOUNT_CLOEXEC.into(), attributes.into()];
        self.call_keep("mount a proc filesystem", libc::SYS_fsmount, &args)
    }

    /// Clones every part of the host the view shows, each with its final attributes, while the
    /// host's own paths still mean what the plan meant.
    fn open_sources(&mut self) -> Sources<'a> {
        let mut sources = Sources::new();
        for entry in self.plan.view.iter() {
            let (source, target, writable, device, owner, directory) = match entry {
                Entry::Bind { source, target, writable, device, owner, directory, .. } => {
                    (source, target, *writable, *device, *owner, *directory)
                }
                Entry::Overlay { source, target, owner, .. } => (source, target, false, false, Some(*owner), true),
                Entry::Guard { source, target, owner, directory, .. } => {
                    (source, target, false, false, Some(*owner), *directory)
                }
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
            if let Entry::Bind { identity: Some(identity), .. }
            | Entry::Overlay { identity, .. }
            | Entry::Guard { identity, .. } = entry
            {
                self.same_file(fd, *identity, &name);
            }
            let namespace = owner.and_then(|owner| self.making.owners.iter().position(|one| *one == owner));
            if let Some(idx) = namespace {
                self.map_ids(fd, idx, &name);
            }
            let mut set = MOUNT_ATTR_NOSUID;
            if !writable || device {
                set |= MOUNT_ATTR_RDONLY;
            }
            set |= if device { MOUNT_ATTR_NOEXEC } else { MOUNT_ATTR_NODEV };
            // A bound file may be a device by another name; only directories are searched below.
            let below = if directory { AT_RECURSIVE } else { 0 };
            self.set_attributes(format!("restrict {name}"), fd.into(), "", AT_EMPTY_PATH | below, set);
            sources.insert(target.as_os_str(), fd);
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

    /// Shows an owner's files as the cell's own.
    fn map_ids(&mut self, fd: Slot, owner: usize, name: &str) {
        let (empty, attributes) = (self.text(""), self.program.words(&[MOUNT_ATTR_IDMAP, 0, 0, 0]));
        let label = Label { wall: self.wall, what: "take the map of ids".into() };
        let namespace = self.program.input(owner);
        // struct mount_attr: the descriptor of the namespace is its last field.
        self.program
            .call(self.stage, label, libc::SYS_dup, &[namespace.into()], Expect::Ok)
            .keep_int_at(attributes.offset(24));
        let flags = AT_EMPTY_PATH | AT_RECURSIVE;
        let args = [fd.into(), empty.into(), flags.into(), attributes.into(), 32u64.into()];
        self.call(format!("show {name} as the cell's own"), libc::SYS_mount_setattr, &args, Expect::Ok);
    }

    /// One filesystem for everything the cell writes, so that one number caps it all.
    fn scratch(&mut self) {
        self.wall = Wall::Disk;
        let limits = &self.plan.limits;
        // One block and one file more than allowed: whoever uses them has met the limit, and is seen.
        let options = if self.plan.asks_for(Wall::Disk) {
            let (blocks, inodes) = (scratch_blocks(limits), limits.inodes() + scratch_inodes(self.plan) + 1);
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
        if self.plan.view.iter().any(|entry| matches!(entry, Entry::Decoy { .. })) {
            self.scratch_directory(DECOYS, 0o711);
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

    fn scratch_file(&mut self, name: &str, mode: u32) -> String {
        let path = format!("{SCRATCH}/{name}");
        let at = self.text(&path);
        let args = [at.into(), u64::from(mode).into(), 0.into()];
        self.call(format!("make {path}"), libc::SYS_mknod, &args, Expect::Ok);
        self.own(&path);
        path
    }

    /// Shows a part of the scratch filesystem inside.
    fn attach_scratch(&mut self, made: &str, target: &Path) {
        let (path, name) = self.inside(target);
        let from = self.text(made);
        let flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC;
        let args = [AT_FDCWD.into(), from.into(), flags.into()];
        let fd = self.call_keep(format!("open the scratch of {name}"), libc::SYS_open_tree, &args);
        self.attach(fd, &path, &name);
    }

    /// Gives a path of the new root to the cell's user.
    fn own(&mut self, path: &str) {
        if let Some(id) = self.fresh_id() {
            let at = self.text(path);
            self.call(format!("chown {path}"), libc::SYS_chown, &[at.into(), id.into(), id.into()], Expect::Ok);
        }
    }

    pub(super) fn fresh_id(&self) -> Option<u64> {
        (self.plan.identity == Identity::Fresh && self.plan.asks_for(Wall::Id)).then_some(u64::from(self.making.id))
    }

    /// What is to be mounted at a place: opened for it already, or kept by the ground.
    fn source(&mut self, target: &Path, sources: &Sources<'_>, mounts: &Mounts<'_>) -> Option<Slot> {
        if let Some(source) = sources.get(target.as_os_str()) {
            return Some(*source);
        }
        let place = self.text(mounts.kept.get(target.as_os_str())?);
        let flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE;
        let args = [AT_FDCWD.into(), place.into(), flags.into()];
        let name = shown(target.as_os_str().as_bytes());
        Some(self.call_keep(format!("open what is for {name}"), libc::SYS_open_tree, &args))
    }

    fn entry(&mut self, entry: &Entry, sources: &Sources<'_>, mounts: &Mounts<'_>) {
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
                if let Some(source) = self.source(target, sources, mounts) {
                    self.attach(source, &path, &name);
                }
            }
            Entry::Scratch { name, target, mode } => {
                self.wall = Wall::Disk;
                let made = self.scratch_directory(name, *mode);
                self.attach_scratch(&made, target);
            }
            Entry::Overlay { target, .. } => {
                let (path, name) = self.inside(target);
                let Some(lower) = mounts.kept.get(target.as_os_str()) else { return };
                // No colon, comma or backslash of a host path ever reaches these options.
                let mut options = format!("lowerdir={lower},upperdir={SCRATCH}/upper,workdir={SCRATCH}/work");
                // Whatever this kernel does by default: a directory that is renamed is copied, and so is a file whose
                // mode changes. The change list knows nothing else.
                options.push_str(match self.plan.identity {
                    Identity::Fresh => ",redirect_dir=off,metacopy=off,index=off",
                    Identity::Own { .. } => ",userxattr",
                });
                let (kind, at, options) = (self.text("overlay"), self.text(&path), self.text(options));
                let flags = libc::MS_NOSUID | libc::MS_NODEV;
                self.call(
                    format!("mount overlay at {name}"),
                    libc::SYS_mount,
                    &[kind.into(), at.into(), kind.into(), flags.into(), options.into()],
                    Expect::Ok,
                );
            }
            Entry::Guard { target, .. } => {
                let (path, name) = self.inside(target);
                if let Some(source) = self.source(target, sources, mounts) {
                    self.attach(source, &path, &name);
                }
            }
            Entry::Decoy { number, target, kind } => {
                let made = format!("{DECOYS}/{number}");
                let made = match kind {
                    Decoy::Directory => self.scratch_directory(&made, 0o755),
                    Decoy::File => self.scratch_file(&made, libc::S_IFREG | 0o644),
                    Decoy::Closed => self.scratch_file(&made, libc::S_IFSOCK),
                };
                self.attach_scratch(&made, target);
            }
            // Mounted between what is on scratch and what is in it.
            Entry::Proc => {}
            Entry::Mask { path, directory, required } => {
                let (path, name) = self.inside(path);
                let at = self.text(&path);
                let cover = self.text(if *directory { NOTHING } else { FENCE });
                let args = [cover.into(), at.into(), 0u64.into(), libc::MS_BIND.into(), 0u64.into()];
                // What this kernel does not have need not be covered; what is hidden on purpose must be.
                let expect = if *required { Expect::Ok } else { Expect::OkOr(&[ENOENT, ENOTDIR]) };
                self.call(format!("cover {name}"), libc::SYS_mount, &args, expect);
            }
        }
    }

    fn attach(&mut self, from: Slot, path: &[u8], name: &str) {
        let (empty, at) = (self.text(""), self.text(path));
        self.call(
            format!("attach {name}"),
            libc::SYS_move_mount,
            &[from.into(), empty.into(), AT_FDCWD.into(), at.into(), MOVE_MOUNT_F_EMPTY_PATH.into()],
            Expect::Ok,
        );
        // There are many of these, and few descriptors.
        self.close(from);
    }

    /// A path inside, as it is reached while the new root is the working directory; and its name to show.
    fn inside(&self, path: &Path) -> (Vec<u8>, String) {
        let bytes = path.as_os_str().as_bytes();
        (bytes.strip_prefix(b"/").unwrap_or(bytes).to_vec(), shown(bytes))
    }

    /// Keeps hold of a mount for the supervisor.
    fn export(&mut self, path: &str) {
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
        let at = self.text(path);
        let args = [AT_FDCWD.into(), at.into(), flags.into()];
        let fd = self.call_keep(format!("open {path}"), libc::SYS_openat, &args);
        self.program.export(fd);
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

    fn set_attributes(&mut self, what: String, fd: Arg, path: &str, flags: u64, set: u64) {
        let (at, attributes) = (self.text(path), self.program.words(&[set, 0, 0, 0]));
        let args = [fd, at.into(), flags.into(), attributes.into(), 32u64.into()];
        self.call(what, libc::SYS_mount_setattr, &args, Expect::Ok);
    }
}
