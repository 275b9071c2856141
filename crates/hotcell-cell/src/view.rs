//! The mount list: everything that exists inside a cell, in the order it is made.
//!
//! Pure. A view is a list of entries that can be printed and compared; `launch` turns it into calls.
//! What is not in the list does not exist inside.

use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use hotcell_base::text::shown;
use rustix::fs::FileType;

use crate::control::Decoy;
use crate::host::{Host, PathKind};
use crate::needs::Grant;
use crate::plan::{GuardedTree, Mode, Mount, Workspace};

/// One thing that exists inside a cell.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Entry {
    /// A directory of the private root.
    Directory {
        /// Where.
        path: PathBuf,
        /// Whether it belongs to the cell's user.
        own: bool,
    },
    /// A small file of the private root.
    File {
        /// Where.
        path: PathBuf,
        /// What is in it.
        contents: Vec<u8>,
    },
    /// A symbolic link.
    Link {
        /// Where.
        path: PathBuf,
        /// To what.
        target: PathBuf,
    },
    /// A part of the host.
    Bind {
        /// Outside.
        source: PathBuf,
        /// Inside.
        target: PathBuf,
        /// Whether it is a directory.
        directory: bool,
        /// Whether the cell may change it.
        writable: bool,
        /// Whether it is a device, which a mount without devices would make useless.
        device: bool,
        /// Whose files the cell's user must be able to use as its own, if anybody's.
        owner: Option<Owner>,
        /// What it must still be when it is mounted.
        identity: Option<FileId>,
    },
    /// A directory of the cell's one scratch filesystem.
    Scratch {
        /// Its name there.
        name: &'static str,
        /// Where.
        target: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// The workspace, with changes kept apart.
    Overlay {
        /// The host's directory.
        source: PathBuf,
        /// Inside.
        target: PathBuf,
        /// Whose it is.
        owner: Owner,
        /// What it must still be when it is mounted.
        identity: FileId,
    },
    /// A control file of the workspace or of a mount, which stays as it is.
    Guard {
        /// Outside.
        source: PathBuf,
        /// Inside.
        target: PathBuf,
        /// Whether it is a directory.
        directory: bool,
        /// Whose the tree is.
        owner: Owner,
        /// What it must still be when it is mounted.
        identity: FileId,
    },
    /// A control file that does not exist: what is written there lands in scratch.
    Decoy {
        /// Its number.
        number: usize,
        /// Where.
        target: PathBuf,
        /// What it is.
        kind: Decoy,
    },
    /// The processes of this cell; nothing in it can be written.
    Proc,
    /// A file or directory that is covered.
    Mask {
        /// Which.
        path: PathBuf,
        /// Whether it is a directory.
        directory: bool,
        /// Whether a cell without it must not be: something hidden on purpose.
        required: bool,
    },
}

/// A user and a group.
pub type Owner = (u32, u32);
/// A device and an inode: which file it is, whatever it is called.
pub type FileId = (u64, u64);

/// What of `/proc` tells about the machine rather than the cell, or steers it.
const MASKED: &[(&str, bool)] = &[
    ("/proc/acpi", true),
    ("/proc/asound", true),
    ("/proc/driver", true),
    ("/proc/scsi", true),
    ("/proc/config.gz", false),
    ("/proc/interrupts", false),
    ("/proc/kallsyms", false),
    ("/proc/kcore", false),
    ("/proc/key-users", false),
    ("/proc/keys", false),
    ("/proc/kmsg", false),
    ("/proc/kpagecgroup", false),
    ("/proc/kpagecount", false),
    ("/proc/kpageflags", false),
    ("/proc/latency_stats", false),
    ("/proc/sched_debug", false),
    ("/proc/sysrq-trigger", false),
    ("/proc/timer_list", false),
    ("/proc/timer_stats", false),
    ("/proc/vmallocinfo", false),
];
const DEVICES: &[&str] = &["null", "zero", "full", "random", "urandom"];
const DEVICE_LINKS: &[(&str, &str)] = &[
    ("/dev/fd", "/proc/self/fd"),
    ("/dev/stdin", "/proc/self/fd/0"),
    ("/dev/stdout", "/proc/self/fd/1"),
    ("/dev/stderr", "/proc/self/fd/2"),
];

/// What hotcell itself needs inside.
pub(crate) const OWN: &str = "/.hotcell";
/// An empty file that Landlock grants to nobody: opening it proves the fence, and files that must not be read or
/// written are covered with it.
pub(crate) const FENCE: &str = "/.hotcell/file";
/// An empty directory, with which directories are covered.
pub(crate) const NOTHING: &str = "/.hotcell/directory";

/// What a view is made from.
pub(crate) struct Parts<'a> {
    pub(crate) host: &'a Host,
    pub(crate) home: &'a Path,
    pub(crate) grants: &'a [(Grant, Option<FileId>)],
    pub(crate) workspace: Option<&'a Workspace>,
    pub(crate) mounts: &'a [Mount],
    pub(crate) hidden: &'a [PathBuf],
    pub(crate) guarded: &'a [GuardedTree],
    pub(crate) passwd: String,
    pub(crate) group: String,
}

/// Lists everything inside a cell.
pub(crate) fn view(parts: &Parts<'_>) -> Vec<Entry> {
    let mut view = View { entries: Vec::new(), home: parts.home };
    view.file(FENCE, b"");
    view.directory(NOTHING, false);
    for system in &parts.host.system {
        match &system.kind {
            PathKind::Symlink(target) => view.link(&system.path, target),
            kind => {
                let directory = *kind == PathKind::Directory;
                view.bind(&system.path, &system.path, Bind { directory, ..Bind::default() });
            }
        }
    }
    view.file("/etc/passwd", parts.passwd.as_bytes());
    view.file("/etc/group", parts.group.as_bytes());
    view.file("/etc/hosts", b"127.0.0.1 localhost cell\n::1 localhost cell\n");
    view.file("/etc/hostname", b"cell\n");
    for device in DEVICES {
        let path = Path::new("/dev").join(device);
        view.parents(&path);
        view.entries.push(Entry::Bind {
            source: path.clone(),
            target: path,
            directory: false,
            writable: true,
            device: true,
            owner: None,
            identity: None,
        });
    }
    for (path, target) in DEVICE_LINKS {
        view.link(Path::new(path), Path::new(target));
    }
    view.directory("/proc", false);
    view.entries.push(Entry::Proc);
    view.entries.extend(MASKED.iter().map(|(path, directory)| Entry::Mask {
        path: path.into(),
        directory: *directory,
        required: false,
    }));
    view.directory("/run", false);
    view.link(Path::new("/var/run"), Path::new("/run"));
    view.scratch("tmp", "/tmp", 0o1777);
    view.scratch("var-tmp", "/var/tmp", 0o1777);
    view.scratch("shm", "/dev/shm", 0o1777);
    view.scratch("home", parts.home, 0o700);
    if parts.workspace.is_none() {
        view.scratch("cwd", EMPTY_CWD, 0o755);
    }
    for (grant, identity) in parts.grants {
        match grant {
            Grant::Tree(path) => {
                view.bind(path, path, Bind { directory: true, identity: *identity, ..Bind::default() })
            }
            Grant::File(path) => view.bind(path, path, Bind { identity: *identity, ..Bind::default() }),
            Grant::Link(path, target) => view.link(path, target),
        }
    }
    if let Some(workspace) = parts.workspace {
        let path = &workspace.path;
        match workspace.mode {
            Mode::None => {}
            Mode::Ro | Mode::Rw => view.bind(
                path,
                path,
                Bind {
                    directory: true,
                    writable: workspace.mode == Mode::Rw,
                    owner: Some(workspace.owner),
                    identity: Some(workspace.identity),
                },
            ),
            Mode::Cow => {
                view.directory(path, false);
                let (source, target) = (path.clone(), path.clone());
                let (owner, identity) = (workspace.owner, workspace.identity);
                view.entries.push(Entry::Overlay { source, target, owner, identity });
            }
        }
    }
    for mount in parts.mounts {
        let Mount { directory, writable, .. } = *mount;
        let (owner, identity) = (Some(mount.owner), Some(mount.identity));
        view.bind(&mount.source, &mount.target, Bind { directory, writable, owner, identity });
    }
    view.guard(parts.guarded);
    let granted = parts.grants.iter().filter_map(|(grant, _)| match grant {
        Grant::Tree(path) => Some((path, path)),
        _ => None,
    });
    let workspace = parts.workspace.iter().map(|workspace| (&workspace.path, &workspace.path));
    let mounted = parts.mounts.iter().map(|mount| (&mount.source, &mount.target));
    let system = parts.host.system.iter().map(|system| (&system.path, &system.path));
    for (source, target) in system.chain(granted).chain(workspace).chain(mounted) {
        for below in parts.hidden.iter().filter_map(|hidden| hidden.strip_prefix(source).ok()) {
            let directory = !source.join(below).is_file();
            view.entries.push(Entry::Mask { path: target.join(below), directory, required: true });
        }
    }
    view.entries
}

/// Places of the private root that nothing may cover.
pub(crate) const FIXED: &[&str] = &[
    OWN,
    EMPTY_CWD,
    "/dev",
    "/etc/group",
    "/etc/hostname",
    "/etc/hosts",
    "/etc/passwd",
    "/proc",
    "/run",
    "/tmp",
    "/var/run",
    "/var/tmp",
];

/// The working directory of a cell without a workspace.
pub(crate) const EMPTY_CWD: &str = "/cell";

struct View<'a> {
    entries: Vec<Entry>,
    home: &'a Path,
}

impl View<'_> {
    /// Makes the directories above a path that are not there yet.
    fn parents(&mut self, path: &Path) {
        if let Some(parent) = path.parent().filter(|parent| parent.parent().is_some()) {
            self.directory(parent, parent.starts_with(self.home) && parent != self.home);
        }
    }

    fn directory(&mut self, path: impl AsRef<Path>, own: bool) {
        let path = path.as_ref();
        // Their text tells, and is compared for many.
        let is_same = |other: &Path| other.as_os_str() == path.as_os_str();
        let there = |entry: &Entry| match entry {
            Entry::Directory { path: made, .. } => is_same(made),
            // What a link, a bind or the overlay leads to has directories of its own.
            Entry::Bind { target, directory: true, .. } | Entry::Overlay { target, .. } => is_same(target),
            Entry::Scratch { target, .. } => is_same(target),
            _ => false,
        };
        if !self.entries.iter().any(there) {
            self.parents(path);
            self.entries.push(Entry::Directory { path: path.to_owned(), own });
        }
    }

    fn file(&mut self, path: &str, contents: &[u8]) {
        self.parents(Path::new(path));
        self.entries.push(Entry::File { path: path.into(), contents: contents.to_vec() });
    }

    fn link(&mut self, path: &Path, target: &Path) {
        self.parents(path);
        self.entries.push(Entry::Link { path: path.to_owned(), target: target.to_owned() });
    }

    fn scratch(&mut self, name: &'static str, target: impl AsRef<Path>, mode: u32) {
        self.directory(target.as_ref(), false);
        self.entries.push(Entry::Scratch { name, target: target.as_ref().to_owned(), mode });
    }

    /// Covers control files. The places are there: no directory is made on the way.
    fn guard(&mut self, trees: &[GuardedTree]) {
        let mut number = 0;
        for tree in trees {
            for found in &tree.existing {
                self.entries.push(Entry::Guard {
                    source: tree.source.join(&found.path),
                    target: tree.target.join(&found.path),
                    directory: found.kind == FileType::Directory,
                    owner: tree.owner,
                    identity: found.identity,
                });
            }
            for (path, kind) in &tree.decoys {
                self.entries.push(Entry::Decoy { number, target: tree.target.join(path), kind: *kind });
                number += 1;
            }
        }
    }

    fn bind(&mut self, source: &Path, target: &Path, bind: Bind) {
        let Bind { directory, writable, owner, identity } = bind;
        if directory {
            self.directory(target, false);
        } else {
            self.parents(target);
        }
        let (source, target) = (source.to_owned(), target.to_owned());
        self.entries.push(Entry::Bind { source, target, directory, writable, device: false, owner, identity });
    }
}

/// How a part of the host is shown; by default a file, read-only, as it is.
#[derive(Default)]
struct Bind {
    directory: bool,
    writable: bool,
    owner: Option<Owner>,
    identity: Option<FileId>,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let show = |path: &Path| shown(path.as_os_str().as_bytes());
        match self {
            Entry::Directory { path, .. } => write!(f, "dir      {}", show(path)),
            Entry::File { path, .. } => write!(f, "file     {}", show(path)),
            Entry::Link { path, target } => write!(f, "link     {} -> {}", show(path), show(target)),
            Entry::Bind { source, target, writable, device, .. } => {
                let kind = match (device, writable) {
                    (true, _) => "device  ",
                    (_, true) => "rw      ",
                    (_, false) => "ro      ",
                };
                write!(f, "{kind} {}", show(target))?;
                if source == target { Ok(()) } else { write!(f, " from {}", show(source)) }
            }
            Entry::Scratch { target, .. } => write!(f, "scratch  {}", show(target)),
            Entry::Overlay { target, .. } => write!(f, "cow      {}", show(target)),
            Entry::Guard { target, .. } => write!(f, "guarded  {}", show(target)),
            Entry::Decoy { target, .. } => write!(f, "decoy    {}", show(target)),
            Entry::Proc => write!(f, "proc     /proc"),
            Entry::Mask { path, .. } => write!(f, "masked   {}", show(path)),
        }
    }
}
