//! Facts about this machine and this user, looked up once and then only read.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::cgroup;

/// What a plan needs to know of the machine it is for.
#[derive(Clone, Debug)]
pub struct Host {
    /// Effective user.
    pub uid: u32,
    /// Effective group.
    pub gid: u32,
    /// Supplementary groups other than `gid`.
    pub groups: Vec<u32>,
    /// Whether we are root with the capabilities to build walls without a user namespace.
    pub privileged: bool,
    /// Whether we are the machine's own root, and not only that of a user namespace.
    pub is_outer_root: bool,
    /// Login name, for the cell's `/etc/passwd`.
    pub user_name: String,
    /// The user's home directory, if there is a usable one.
    pub home: Option<PathBuf>,
    /// Home directories of every account.
    pub homes: Vec<PathBuf>,
    /// Where we were started.
    pub cwd: PathBuf,
    /// The environment we were started with.
    pub env: BTreeMap<OsString, OsString>,
    /// Landlock's version; 0 where there is none.
    pub landlock_abi: u32,
    /// The largest capability number.
    pub last_cap: u32,
    /// Inode numbers of our own namespaces, by their name in `/proc/self/ns`.
    pub namespaces: BTreeMap<&'static str, u64>,
    /// Device number of our root directory.
    pub root_dev: u64,
    /// Our place in the cgroup trees.
    pub cgroups: cgroup::Layout,
    /// System paths that exist here.
    pub system: Vec<SystemPath>,
    /// A directory to build the private root on.
    pub staging: PathBuf,
    /// Hard limits of this process by resource number, which a cell's may not exceed.
    pub hard_limits: BTreeMap<u32, u64>,
}

/// A path of the host's system that cells see.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SystemPath {
    /// Where it is, outside and inside.
    pub path: PathBuf,
    /// What it is.
    pub kind: PathKind,
}

/// What a path is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum PathKind {
    /// A directory.
    Directory,
    /// A file.
    File,
    /// A symbolic link to this.
    Symlink(PathBuf),
}

/// What could not be found out.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// `/proc` is not mounted or not the kernel's.
    #[error("/proc is not mounted: `{path}` cannot be read")]
    NoProc {
        /// What was looked for.
        path: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// We were started in a directory that is gone.
    #[error("the working directory cannot be found")]
    NoCwd(#[source] io::Error),
    /// No directory is there to build a root on.
    #[error("none of {0} is a directory to build a cell's root on")]
    NoStaging(String),
}

/// Programs, libraries and shared data: the whole of them.
const SYSTEM_TREES: &[&str] =
    &["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store"];

/// Of `/etc`, what programs read to run at all: linker, locale, time zone, certificates, names of
/// services, and settings of interpreters. Not in it: accounts, keys, mounts, hosts, anything of a service.
const ETC: &[&str] = &[
    "alternatives",
    "bash.bashrc",
    "ca-certificates",
    "ca-certificates.conf",
    "crypto-policies",
    "debian_version",
    "default/locale",
    "fonts",
    "gai.conf",
    "host.conf",
    "inputrc",
    "java-11-openjdk",
    "java-17-openjdk",
    "java-21-openjdk",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "locale.alias",
    "locale.conf",
    "localtime",
    "magic",
    "magic.mime",
    "mime.types",
    "nsswitch.conf",
    "os-release",
    "perl",
    "pki/ca-trust",
    "pki/tls/cert.pem",
    "pki/tls/certs",
    "protocols",
    "python3",
    "python3.11",
    "python3.12",
    "python3.13",
    "services",
    "shells",
    "ssl/cert.pem",
    "ssl/certs",
    "ssl/openssl.cnf",
    "terminfo",
    "timezone",
    "xattr.conf",
    "xml",
];

const STAGING: &[&str] = &["/tmp", "/mnt", "/run", "/var", "/usr"];

/// Capabilities without which root cannot build and end a cell: chown, dac_override, kill, setgid,
/// setuid, setpcap, sys_admin.
const CAPS_NEEDED: u64 = 1 | 1 << 1 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8 | 1 << 21;

impl Host {
    /// Looks at this machine. The environment is the caller's to give: it decides where commands are
    /// searched and which locale a cell has.
    pub fn probe(env: impl IntoIterator<Item = (OsString, OsString)>) -> Result<Host, HostError> {
        let env: BTreeMap<OsString, OsString> = env.into_iter().collect();
        let status = proc_file("/proc/self/status")?;
        let uid = rustix::process::geteuid().as_raw();
        let gid = rustix::process::getegid().as_raw();
        let groups = line(&status, "Groups:").split_whitespace().filter_map(|group| group.parse().ok());
        let caps = u64::from_str_radix(line(&status, "CapEff:"), 16).unwrap_or(0);
        let last_cap = proc_file("/proc/sys/kernel/cap_last_cap").ok().and_then(|text| text.trim().parse().ok());
        let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
        let account = account(&passwd, uid);
        let accounts = passwd.lines().filter_map(|line| line.split(':').nth(5));
        let homes = accounts.map(PathBuf::from).filter(|home| home.components().count() > 1).collect();
        let id_map = proc_file("/proc/self/uid_map")?;
        let home = env.get(OsStr::new("HOME")).map(PathBuf::from).or_else(|| home_of(account.as_deref()));
        let staging = STAGING.iter().map(Path::new).find(|path| path.is_dir());
        Ok(Host {
            uid,
            gid,
            groups: groups.filter(|group| *group != gid).collect(),
            privileged: uid == 0 && caps & CAPS_NEEDED == CAPS_NEEDED && maps_fresh_ids(&id_map),
            is_outer_root: uid == 0 && id_map.split_whitespace().take(2).eq(["0", "0"]),
            user_name: account.map_or_else(|| "user".to_owned(), |fields| fields[0].to_owned()),
            home,
            homes,
            cwd: std::env::current_dir().map_err(HostError::NoCwd)?,
            env,
            landlock_abi: hotcell_sys::facts::landlock_abi(),
            last_cap: last_cap.unwrap_or(40),
            namespaces: namespaces()?,
            root_dev: fs::metadata("/").map(|root| root.dev()).unwrap_or(0),
            cgroups: cgroup::Layout::read(),
            system: system_paths(),
            staging: staging.ok_or_else(|| HostError::NoStaging(STAGING.join(", ")))?.to_owned(),
            hard_limits: hard_limits(&proc_file("/proc/self/limits")?),
        })
    }

    /// Directories that are searched for commands.
    pub fn search_path(&self) -> Vec<PathBuf> {
        let path = self.env.get(OsStr::new("PATH")).map_or_else(|| OsString::from("/usr/bin:/bin"), Clone::clone);
        std::env::split_paths(&path).filter(|directory| directory.is_absolute()).collect()
    }

    /// Whether a path is inside what every cell sees of the system.
    pub fn is_system(&self, path: &Path) -> bool {
        self.system.iter().any(|system| path.starts_with(&system.path))
    }
}

/// The home directory of this process's user by the list of accounts: for those who need nothing else of this machine.
pub fn account_home() -> Option<PathBuf> {
    let passwd = fs::read_to_string("/etc/passwd").unwrap_or_default();
    home_of(account(&passwd, rustix::process::geteuid().as_raw()).as_deref())
}

/// When a process that is not a zombie started, in ticks since boot: with its pid, that tells it from any other.
pub fn start_time(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in brackets, may hold anything.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    if fields.first() == Some(&"Z") {
        return None;
    }
    fields.get(19)?.parse().ok()
}

/// The fields of a user's line.
fn account(passwd: &str, uid: u32) -> Option<Vec<&str>> {
    let lines = passwd.lines().map(|line| line.split(':').collect::<Vec<_>>());
    lines.into_iter().find(|fields| matches!(fields[..], [_, _, id, ..] if id.parse() == Ok(uid)))
}

fn home_of(account: Option<&[&str]>) -> Option<PathBuf> {
    account.and_then(|fields| fields.get(5)).map(PathBuf::from)
}

fn proc_file(path: &'static str) -> Result<String, HostError> {
    read_proc(path).map_err(|source| HostError::NoProc { path, source })
}

/// The text of a file whose length the kernel does not tell, and which it writes anew for each read.
pub(crate) fn read_proc(path: &str) -> io::Result<String> {
    let mut text = String::with_capacity(8192);
    fs::File::open(path)?.read_to_string(&mut text)?;
    Ok(text)
}

fn line<'a>(status: &'a str, name: &str) -> &'a str {
    status.lines().find_map(|line| line.strip_prefix(name)).map_or("", str::trim)
}

/// Whether the ids that cells of root's get exist here: in a user namespace of somebody's they may not.
fn maps_fresh_ids(id_map: &str) -> bool {
    let last = crate::plan::ID_FIRST + (1 << 22);
    id_map.lines().any(|line| {
        let numbers: Vec<u64> = line.split_whitespace().filter_map(|number| number.parse().ok()).collect();
        matches!(numbers[..], [first, _, count] if first <= u64::from(crate::plan::ID_FIRST) && first + count > u64::from(last))
    })
}

/// The rows of `/proc/self/limits`, by the numbers the kernel gives them.
fn hard_limits(limits: &str) -> BTreeMap<u32, u64> {
    let rows = [
        ("Max open files", libc::RLIMIT_NOFILE),
        ("Max processes", libc::RLIMIT_NPROC),
        ("Max file size", libc::RLIMIT_FSIZE),
        ("Max cpu time", libc::RLIMIT_CPU),
        ("Max core file size", libc::RLIMIT_CORE),
        ("Max locked memory", libc::RLIMIT_MEMLOCK),
        ("Max msgqueue size", libc::RLIMIT_MSGQUEUE),
        ("Max pending signals", libc::RLIMIT_SIGPENDING),
        ("Max realtime priority", libc::RLIMIT_RTPRIO),
        ("Max nice priority", libc::RLIMIT_NICE),
    ];
    let hard = |name: &str| {
        let row = limits.lines().find_map(|line| line.strip_prefix(name))?;
        row.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    rows.into_iter().filter_map(|(name, resource)| Some((resource, hard(name)?))).collect()
}

fn namespaces() -> Result<BTreeMap<&'static str, u64>, HostError> {
    let names = ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup", "time"];
    let mut found = BTreeMap::new();
    for name in names {
        match fs::metadata(format!("/proc/self/ns/{name}")) {
            Ok(file) => {
                found.insert(name, file.ino());
            }
            // A kernel without this kind; asking for it will say so.
            Err(error) if error.kind() == io::ErrorKind::NotFound && Path::new("/proc/self").exists() => {}
            Err(source) => return Err(HostError::NoProc { path: "/proc/self/ns", source }),
        }
    }
    Ok(found)
}

fn system_paths() -> Vec<SystemPath> {
    let trees = SYSTEM_TREES.iter().map(PathBuf::from);
    let etc = ETC.iter().map(|name| Path::new("/etc").join(name));
    trees.chain(etc).filter_map(|path| path_kind(&path).map(|kind| SystemPath { path, kind })).collect()
}

/// What a path is, without following it.
pub(crate) fn path_kind(path: &Path) -> Option<PathKind> {
    let file = fs::symlink_metadata(path).ok()?.file_type();
    if file.is_symlink() {
        fs::read_link(path).ok().map(PathKind::Symlink)
    } else if file.is_dir() {
        Some(PathKind::Directory)
    } else {
        file.is_file().then_some(PathKind::File)
    }
}
