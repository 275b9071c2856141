//! The private root: every part of the host the view shows is opened, a new root is built of them and
//! of scratch, and the old one is left behind.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use hotcell_base::text::shown;
use hotcell_sys::program::{Addr, Arg, Expect, Slot};
use hotcell_sys::wire::INPUT_FD_FIRST;
use libc::{EEXIST, ENOENT, ENOTDIR, EPERM, EROFS};

use super::{AT_FDCWD, Label, N_STREAMS, Writer};
use crate::control::Decoy;
use crate::limits::Limits;
use crate::plan::{ID_MARK, Identity, Mode, Plan};
use crate::view::{Entry, FENCE};
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
const MNT_DETACH: u64 = libc::MNT_DETACH as u64;

/// Where the scratch filesystem is while the root is built, and the host's side of the workspace.
const SCRATCH: &str = ".scratch";
const LOWER: &str = ".lower";

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

impl Writer<'_> {
    pub(super) fn mounts(&mut self) {
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
        // Before the old root goes: the kernel lets an ordinary user mount only what it still sees.
        self.proc();
        // Now, and not when all is in place: from here on there is nothing but the new root, whatever a path, a
        // link in it or `..` says.
        self.wall = Wall::Root;
        let dot = self.text(".");
        self.call("pivot", libc::SYS_pivot_root, &[dot.into(), dot.into()], Expect::Ok);
        self.call("leave the old root", libc::SYS_umount2, &[dot.into(), MNT_DETACH.into()], Expect::Ok);
        self.scratch();
        for entry in &self.plan.view {
            self.entry(entry, &sources);
        }
        self.export();
        self.wall = Wall::Root;
        self.unmount(SCRATCH);
        let scratch = self.text(SCRATCH);
        self.call("remove the scratch's place", libc::SYS_rmdir, &[scratch.into()], Expect::Ok);
        let root = self.text("/");
        self.call("chdir /", libc::SYS_chdir, &[root.into()], Expect::Ok);
        let read_only = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV;
        self.set_attributes("make the root read-only".to_owned(), AT_FDCWD.into(), "/", 0, read_only, None);
        self.prove_root();
    }

    fn proc(&mut self) {
        self.wall = Wall::Pid;
        let at = self.text("proc");
        self.call("make /proc", libc::SYS_mkdir, &[at.into(), 0o755.into()], Expect::Ok);
        // Without a pid namespace, a control, there is nothing it could show.
        if self.plan.asks_for(Wall::Pid) {
            self.mount("proc", "proc", libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC, "");
        }
    }

    /// Clones every part of the host the view shows, each with its final attributes, while the
    /// host's own paths still mean what the plan meant.
    fn open_sources(&mut self) -> BTreeMap<PathBuf, Slot> {
        let mut sources = BTreeMap::new();
        for entry in &self.plan.view {
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
                if let Some(source) = sources.get(target) {
                    self.attach(*source, &path, &name);
                }
            }
            Entry::Scratch { name, target, mode } => {
                self.wall = Wall::Disk;
                let made = self.scratch_directory(name, *mode);
                self.attach_scratch(&made, target);
            }
            Entry::Overlay { target, .. } => {
                let (path, name) = self.inside(target);
                let lower = self.text(LOWER);
                self.call("make the lower place", libc::SYS_mkdir, &[lower.into(), 0o755.into()], Expect::Ok);
                if let Some(source) = sources.get(target) {
                    self.attach(*source, LOWER.as_bytes(), LOWER);
                }
                // No colon, comma or backslash of a host path ever reaches these options.
                let mut options = format!("lowerdir={LOWER},upperdir={SCRATCH}/upper,workdir={SCRATCH}/work");
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
                self.unmount(LOWER);
                self.call("remove the lower place", libc::SYS_rmdir, &[lower.into()], Expect::Ok);
            }
            Entry::Guard { target, .. } => {
                let (path, name) = self.inside(target);
                if let Some(source) = sources.get(target) {
                    self.attach(*source, &path, &name);
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
            // Mounted before everything else.
            Entry::Proc => {}
            Entry::ReadOnly { path } => {
                let (path, name) = self.inside(path);
                let at = self.text(&path);
                let flags = libc::MS_BIND | libc::MS_REC;
                let args = [at.into(), at.into(), 0u64.into(), flags.into()];
                let expect = Expect::OkOr(&[ENOENT]);
                self.call(format!("bind {name}"), libc::SYS_mount, &args, expect);
                self.read_only(at, &name, expect);
            }
            Entry::Mask { path, directory, required } => {
                let (path, name) = self.inside(path);
                let at = self.text(&path);
                let (source, kind, flags) = if *directory {
                    let tmpfs = self.text("tmpfs");
                    let flags = libc::MS_RDONLY | libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
                    (tmpfs, tmpfs.into(), flags)
                } else {
                    (self.text(FENCE.trim_start_matches('/')), Arg::from(0u64), libc::MS_BIND)
                };
                let args = [source.into(), at.into(), kind, flags.into(), 0u64.into()];
                // What this kernel does not have need not be covered; what is hidden on purpose must be.
                let expect = if *required { Expect::Ok } else { Expect::OkOr(&[ENOENT, ENOTDIR]) };
                self.call(format!("cover {name}"), libc::SYS_mount, &args, expect);
                if !directory {
                    self.read_only(at, &name, expect);
                }
            }
        }
    }

    fn read_only(&mut self, at: Addr, name: &str, expect: Expect) {
        let set = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC;
        let attributes = self.program.words(&[set, 0, 0, 0]);
        self.call(
            format!("make {name} read-only"),
            libc::SYS_mount_setattr,
            &[AT_FDCWD.into(), at.into(), AT_RECURSIVE.into(), attributes.into(), 32u64.into()],
            expect,
        );
    }

    fn attach(&mut self, from: Slot, path: &[u8], name: &str) {
        let (empty, at) = (self.text(""), self.text(path));
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
}
