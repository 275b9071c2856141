//! Plans: everything about a cell, decided before anything is done.
//!
//! ```text
//! Cell::builder() … ─▶ plan(&host) ─▶ Plan ─▶ run() ─▶ Report
//! ```
//!
//! One request on one host has one plan. It can be printed (`--explain`), compared and tested
//! without privilege; what is done later has no choices left.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hotcell_base::text::shown;
use rustix::fs::FileType;
use serde::Serialize;

use crate::control::{self, Control, Decoy, Found};
use crate::host::Host;
use crate::launch;
use crate::limits::{LimitTooSmall, LimitTooWide, Limits};
use crate::needs::{self, CommandError, Grant, STANDARD_PATH, Search};
use crate::template::{Beginning, Template};
use crate::view::{self, Entry, FileId, Owner};
use crate::wall::{Standing, Wall};

/// The first uid of the range that cells started by root get their ids from. Above what systemd and
/// container engines hand out, below 2³¹, where some programs stop counting.
pub const ID_FIRST: u32 = 1_900_000_000;

/// How the workspace appears inside.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Not at all.
    None,
    /// Read-only.
    Ro,
    /// Writable inside; the host's directory stays as it is and the changes are listed.
    Cow,
    /// Writable, and changes are the host's at once.
    Rw,
}

/// A directory the command works in.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Workspace {
    /// Its path, outside and inside.
    pub path: PathBuf,
    /// How it appears inside.
    pub mode: Mode,
    /// Device and inode: what is mounted must still be what was planned.
    pub(crate) identity: FileId,
    pub(crate) owner: Owner,
    pub(crate) permissions: u32,
}

impl Workspace {
    /// Its device and inode.
    pub fn identity(&self) -> FileId {
        self.identity
    }
}

/// A further part of the host that the cell sees.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mount {
    /// Outside.
    pub source: PathBuf,
    /// Inside.
    pub target: PathBuf,
    /// Whether the cell may change it.
    pub writable: bool,
    pub(crate) directory: bool,
    pub(crate) owner: Owner,
    pub(crate) identity: FileId,
}

/// A wish for a further mount.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MountRequest {
    /// Outside.
    pub source: PathBuf,
    /// Inside, absolute.
    pub target: PathBuf,
    /// Whether the cell may change it.
    pub writable: bool,
}

/// A tree the cell may write, and its control files, which it may not.
#[derive(Clone, Debug)]
pub(crate) struct GuardedTree {
    pub(crate) source: PathBuf,
    pub(crate) target: PathBuf,
    pub(crate) owner: Owner,
    /// Whether what is written there is the host's at once.
    pub(crate) in_place: bool,
    pub(crate) control: Control,
    /// Made read-only.
    pub(crate) existing: Vec<Found>,
    /// Not there: whatever is written under these names lands in scratch. Relative.
    pub(crate) decoys: Vec<(PathBuf, Decoy)>,
}

/// Who the command is, outside.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Identity {
    /// Ourselves, in a user namespace that gives us nothing outside.
    Own {
        /// User.
        uid: u32,
        /// Group.
        gid: u32,
    },
    /// An id of its own from [`ID_FIRST`] up, which no other process has.
    Fresh,
}

/// Why there is no plan.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    /// No command was given.
    #[error("no command was given")]
    NoCommand,
    /// The command cannot be run.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// A limit is too small to start anything.
    #[error(transparent)]
    Limit(#[from] LimitTooSmall),
    /// A command in a session is to have more than the session.
    #[error(transparent)]
    Wider(#[from] LimitTooWide),
    /// A path cannot be a workspace or a mount.
    #[error("{role} `{}` {problem}", shown(path.as_os_str().as_bytes()))]
    Path {
        /// What the path was to be.
        role: &'static str,
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A path cannot be looked at.
    #[error("{role} `{}` cannot be used", shown(path.as_os_str().as_bytes()))]
    Unreadable {
        /// What the path was to be.
        role: &'static str,
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A string has a NUL byte inside and cannot be given to the kernel.
    #[error("{role} `{}` has a NUL byte inside", shown(text.as_bytes()))]
    NulByte {
        /// What it was to be.
        role: &'static str,
        /// The string.
        text: OsString,
    },
    /// An environment variable's name cannot be one.
    #[error("`{}` is not a name for an environment variable", shown(.0.as_bytes()))]
    VariableName(OsString),
    /// Each owner of a mounted path needs a map of ids of its own.
    #[error("the workspace and the mounts belong to {count} different users and groups, more than {most}")]
    TooManyOwners {
        /// How many.
        count: usize,
        /// The most that is accepted.
        most: usize,
    },
    /// A wall that was asked for cannot stand here.
    #[error("the wall `{wall}` cannot stand here: {why}")]
    Wall {
        /// Which.
        wall: Wall,
        /// Why not.
        why: String,
    },
}

/// A further command in a cell that stands.
#[derive(Clone, Debug, Default)]
pub struct Exec {
    /// The command and its arguments; it is looked for inside.
    pub argv: Vec<OsString>,
    /// Variables to set, or to copy from the host's environment where there is no value.
    pub env: Vec<(OsString, Option<OsString>)>,
    /// The directory it starts in; the cell's if none.
    pub cwd: Option<PathBuf>,
    /// What it may use, which is not more than the cell may; the cell's if none.
    pub limits: Option<Limits>,
    /// What it draws from at random, if it begins from a template; the plan's if none.
    pub seed: Option<u64>,
}

/// A request for a cell. See [`Cell::builder`].
#[derive(Clone, Debug, Default)]
pub struct Builder {
    argv: Vec<OsString>,
    tools: Vec<OsString>,
    workspace: Option<(PathBuf, Mode)>,
    mounts: Vec<MountRequest>,
    env: Vec<(OsString, Option<OsString>)>,
    cwd: Option<PathBuf>,
    limits: Limits,
    require: BTreeSet<Wall>,
    allow_missing: BTreeSet<Wall>,
    omit: BTreeSet<Wall>,
    omit_rules: BTreeSet<&'static str>,
    hidden: Vec<PathBuf>,
    allow_control: Vec<PathBuf>,
}

/// One isolated execution environment.
pub struct Cell;

impl Cell {
    /// Starts a request.
    ///
    /// ```no_run
    /// use hotcell_cell::{Cell, Host, Mode};
    ///
    /// let host = Host::probe(std::env::vars_os())?;
    /// let report = Cell::builder()
    ///     .command(["python3", "-c", "print(6 * 7)"])
    ///     .workspace("/srv/project", Mode::Cow)
    ///     .plan(&host)?
    ///     .run()?;
    /// assert_eq!(report.stdout.text(), "42\n");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn builder() -> Builder {
        Builder::default()
    }
}

impl Builder {
    /// The command and its arguments.
    pub fn command<T: Into<OsString>>(mut self, argv: impl IntoIterator<Item = T>) -> Builder {
        self.argv = argv.into_iter().map(Into::into).collect();
        self
    }

    /// A further program that must be found inside, for commands that come later.
    pub fn tool(mut self, name: impl Into<OsString>) -> Builder {
        self.tools.push(name.into());
        self
    }

    /// The directory to work in, and how it appears inside.
    pub fn workspace(mut self, path: impl Into<PathBuf>, mode: Mode) -> Builder {
        self.workspace = Some((path.into(), mode));
        self
    }

    /// A further part of the host to show.
    pub fn mount(mut self, mount: MountRequest) -> Builder {
        self.mounts.push(mount);
        self
    }

    /// Sets a variable, or copies it from the host's environment if no value is given.
    pub fn env(mut self, name: impl Into<OsString>, value: Option<OsString>) -> Builder {
        self.env.push((name.into(), value));
        self
    }

    /// The directory the command starts in.
    pub fn current_dir(mut self, cwd: impl Into<PathBuf>) -> Builder {
        self.cwd = Some(cwd.into());
        self
    }

    /// What the run may use.
    pub fn limits(mut self, limits: Limits) -> Builder {
        self.limits = limits;
        self
    }

    /// Refuses the run unless this wall is enforced by the kernel; watching does not do.
    pub fn require(mut self, wall: Wall) -> Builder {
        self.require.insert(wall);
        self
    }

    /// Runs without this wall if the machine cannot have it, and says so in the report.
    pub fn allow_missing(mut self, wall: Wall) -> Builder {
        self.allow_missing.insert(wall);
        self
    }

    /// Covers a directory of the host wherever the workspace or a mount would show it: records, keys.
    pub fn hide(mut self, path: impl Into<PathBuf>) -> Builder {
        self.hidden.push(path.into());
        self
    }

    /// Lets the cell change a control file such as `.git`: relative to the workspace, or a full path inside.
    pub fn allow_control(mut self, path: impl Into<PathBuf>) -> Builder {
        self.allow_control.push(path.into());
        self
    }

    /// Leaves a wall out on purpose: the control of a test that must fail without it. The report
    /// says that it was missing.
    pub fn omit(mut self, wall: Wall) -> Builder {
        self.omit.insert(wall);
        self
    }

    /// Leaves one rule of the syscall filter out, by its name in [`crate::seccomp::refusing_rules`], on purpose, as
    /// [`Builder::omit`]. The report says that `seccomp` was missing.
    pub fn omit_rule(mut self, rule: &'static str) -> Builder {
        self.omit_rules.insert(rule);
        self
    }

    /// Whether a wall is left out on purpose: by itself, or because it stands on one that is.
    fn omits(&self, wall: Wall) -> bool {
        self.omit.contains(&wall) || wall == Wall::Root && self.omit.contains(&Wall::Mount)
    }

    /// Decides everything.
    pub fn plan(&self, host: &Host) -> Result<Plan, PlanError> {
        let command = self.argv.first().filter(|name| !name.is_empty()).ok_or(PlanError::NoCommand)?;
        self.decide(host, Some(command))
    }

    /// Decides everything about a cell whose commands come later; see [`Plan::exec`].
    pub fn plan_session(&self, host: &Host) -> Result<Plan, PlanError> {
        self.decide(host, None)
    }

    fn decide(&self, host: &Host, command: Option<&OsString>) -> Result<Plan, PlanError> {
        self.limits.check()?;
        for argument in &self.argv {
            no_nul("the argument", argument)?;
        }
        let workspace = self.workspace.as_ref().map(|(path, mode)| workspace(host, path, *mode)).transpose()?;
        let workspace = workspace.filter(|workspace| workspace.mode != Mode::None);
        let mounts = self.mounts.iter().map(|mount| check_mount(host, mount)).collect::<Result<Vec<_>, _>>()?;
        let places = workspace.iter().map(|workspace| ("the workspace", &workspace.path));
        for (role, path) in places.chain(mounts.iter().map(|mount| ("the mount", &mount.source))) {
            if self.hidden.iter().any(|hidden| path.starts_with(hidden)) {
                return Err(PlanError::Path { role, path: path.clone(), problem: "is inside hotcell's own home" });
            }
        }
        self.check_targets(host, workspace.as_ref(), &mounts)?;
        let cwd = self.working_directory(workspace.as_ref())?;

        // A command given by a relative path is looked for where it will run, or where the caller is.
        let base = if workspace.is_some() { cwd.clone() } else { host.cwd.clone() };
        let found = command.into_iter().chain(&self.tools).map(|name| self.program(host, name, &base, &mounts));
        let found = found.collect::<Result<Vec<PathBuf>, PlanError>>()?;
        let inside = workspace.iter().map(|workspace| workspace.path.clone());
        let inside: Vec<PathBuf> = inside.chain(mounts.iter().map(|mount| mount.target.clone())).collect();
        let mut search = Search::new(host, inside);
        found.iter().for_each(|program| search.program(program));
        if let Some(workspace) = &workspace {
            search.workspace(&workspace.path);
        }
        let needs = search.finish();

        let in_place = workspace.iter().filter(|workspace| workspace.mode == Mode::Rw).map(|workspace| &workspace.path);
        let mounted = mounts.iter().filter(|mount| mount.writable).map(|mount| &mount.source);
        let writable: Vec<PathBuf> = in_place.chain(mounted).cloned().collect();
        let workspaces = workspace.iter().map(|workspace| (workspace.path.clone(), workspace.mode == Mode::Rw));
        let shows = workspaces.chain(mounts.iter().map(|mount| (mount.source.clone(), mount.writable))).collect();
        let home = home(host);
        let identity = if host.privileged { Identity::Fresh } else { Identity::Own { uid: host.uid, gid: host.gid } };
        let walls = self.walls(host, !writable.is_empty())?;
        let guarded = self.guarded(host.home.as_deref(), workspace.as_ref(), &mounts)?;
        let grants: Vec<(Grant, Option<FileId>)> =
            needs.grants.into_iter().map(|grant| (grant.clone(), grant.identity())).collect();
        let entries = view::view(&view::Parts {
            host,
            home: &home,
            grants: &grants,
            workspace: workspace.as_ref(),
            mounts: &mounts,
            hidden: &self.hidden,
            guarded: &guarded,
            passwd: passwd(host, identity, &home),
            group: group(host, identity),
        });
        let env = self.environment(host, &home, &cwd, &needs.path, &needs.env)?;
        let plan = Plan {
            argv: self.argv.clone(),
            programs: found.into_iter().take(usize::from(command.is_some())).collect(),
            cwd,
            env,
            identity,
            view: entries.into(),
            workspace,
            guarded,
            writable,
            shows,
            hidden: self.hidden.clone(),
            asked: self.env.iter().map(|(name, _)| name.clone()).collect(),
            is_exec: false,
            limits: self.limits.clone(),
            walls,
            omitted_rules: self.omit_rules.clone(),
            require: self.require.clone(),
            allow_missing: self.allow_missing.clone(),
            host: Arc::new(host.clone()),
            beginning: None,
        };
        let (count, most) = (launch::owners(&plan).len(), launch::OWNERS_MAX);
        if count > most {
            return Err(PlanError::TooManyOwners { count, most });
        }
        Ok(plan)
    }

    fn program(&self, host: &Host, command: &OsStr, base: &Path, mounts: &[Mount]) -> Result<PathBuf, PlanError> {
        let path = Path::new(command);
        // What a mount brings in is found by its path inside; only the kernel can look there.
        let mounted = |path: &Path| {
            mounts.iter().find_map(|mount| {
                let below = path.strip_prefix(&mount.target).ok()?;
                Some((
                    path.to_owned(),
                    if below.as_os_str().is_empty() { mount.source.clone() } else { mount.source.join(below) },
                ))
            })
        };
        if command.as_bytes().contains(&b'/')
            && let Some((inside, outside)) = mounted(&needs::normal(&base.join(path)))
        {
            needs::find(host, outside.as_os_str(), Path::new("/")).map_err(|error| match error {
                CommandError::NotFound(_) => CommandError::NotFound(command.to_owned()),
                other => other,
            })?;
            return Ok(inside);
        }
        Ok(needs::find(host, command, base)?)
    }

    /// Refuses mounts that would cover something, or that have no place to be mounted on.
    fn check_targets(&self, host: &Host, workspace: Option<&Workspace>, mounts: &[Mount]) -> Result<(), PlanError> {
        let home = home(host);
        for (idx, mount) in mounts.iter().enumerate() {
            let target = &mount.target;
            let refuse = |problem| Err(PlanError::Path { role: "the mount", path: target.clone(), problem });
            let fixed = view::FIXED.iter().map(Path::new).chain([home.as_path()]);
            let fixed = fixed.chain(host.system.iter().map(|system| system.path.as_path()));
            let fixed = fixed.chain(workspace.map(|workspace| workspace.path.as_path()));
            if fixed.into_iter().any(|path| path.starts_with(target)) {
                return refuse("would cover a part of the cell");
            }
            if mounts[..idx].iter().any(|other| other.target.starts_with(target)) {
                return refuse("would cover another mount");
            }
            if target.starts_with(view::OWN) {
                return refuse("is a place of hotcell's own");
            }
            // Inside another tree of the host's, the place must be there: making it would change that tree.
            let places = workspace.map(|workspace| (&workspace.path, &workspace.path));
            let places = places.into_iter().chain(mounts[..idx].iter().map(|other| (&other.target, &other.source)));
            let places = places.chain(host.system.iter().map(|system| (&system.path, &system.path)));
            let innermost = places
                .filter(|(inside, _)| target.starts_with(inside))
                .max_by_key(|(inside, _)| inside.as_os_str().len());
            if let Some((inside, outside)) = innermost {
                let below = target.strip_prefix(inside).unwrap_or(Path::new(""));
                let place = outside.join(below);
                let between = place.ancestors().skip(1).take_while(|above| *above != outside.as_path());
                if between.into_iter().any(|above| above.is_symlink()) {
                    return refuse("leads through a symbolic link");
                }
                let there = fs::symlink_metadata(&place).ok().map(|file| (file.is_dir(), file.is_file()));
                if there != Some((mount.directory, !mount.directory)) {
                    return refuse("is inside another tree, which has no such place to mount it on");
                }
            }
        }
        Ok(())
    }

    fn working_directory(&self, workspace: Option<&Workspace>) -> Result<PathBuf, PlanError> {
        // Without a private root there is no empty directory to start in.
        let empty = if self.omits(Wall::Root) { "/" } else { view::EMPTY_CWD };
        let base = workspace.map_or(Path::new(empty), |workspace| &workspace.path);
        let Some(cwd) = &self.cwd else { return Ok(base.to_owned()) };
        no_nul("the working directory", cwd.as_os_str())?;
        let cwd = needs::normal(&base.join(cwd));
        let problem = |problem| PlanError::Path { role: "the working directory", path: cwd.clone(), problem };
        if let Some(workspace) = workspace
            && cwd.starts_with(&workspace.path)
            && !cwd.is_dir()
        {
            return Err(problem("is not a directory of the workspace"));
        }
        Ok(cwd)
    }

    /// Finds the control files of every tree the cell may write.
    fn guarded(
        &self,
        home: Option<&Path>,
        workspace: Option<&Workspace>,
        mounts: &[Mount],
    ) -> Result<Vec<GuardedTree>, PlanError> {
        let role = "the control file";
        let workspace = workspace.filter(|workspace| matches!(workspace.mode, Mode::Cow | Mode::Rw));
        let root = workspace.map(|workspace| (&workspace.path, &workspace.path, workspace.owner, workspace.mode));
        let mounted = mounts.iter().filter(|mount| mount.writable && mount.directory);
        let mounted = mounted.map(|mount| (&mount.source, &mount.target, mount.owner, Mode::Rw));
        let trees: Vec<_> = root.into_iter().chain(mounted).collect();
        let mut used = BTreeSet::new();
        let mut guarded = Vec::new();
        for (source, target, owner, mode) in trees {
            let unreadable = |error| PlanError::Unreadable { role, path: source.clone(), source: error };
            let refuse = |path: PathBuf, problem| Err(PlanError::Path { role, path, problem });
            let mut allowed = Vec::new();
            for path in &self.allow_control {
                let full = needs::normal(&target.join(path));
                if let Ok(below) = full.strip_prefix(target)
                    && control::is_control_file(below)
                {
                    if mode == Mode::Rw && control::is_placeholder(&source.join(below)) {
                        return refuse(source.join(below), "is guarded for another run that is still going on");
                    }
                    allowed.push(below.to_owned());
                    used.insert(path.clone());
                }
            }
            let mut control = Control::new(allowed);
            let findings = control.find(source).map_err(unreadable)?;
            if let (Mode::Rw, Some(closed)) = (mode, findings.closed.first()) {
                let problem =
                    "cannot be listed, so that control files in it cannot be guarded in place; use --mode cow";
                return refuse(source.join(closed), problem);
            }
            if mode == Mode::Rw && findings.truncated {
                return refuse(
                    source.clone(),
                    "is too large, or has too many control files, to guard them all in place; use --mode cow",
                );
            }
            let link = findings.list.iter().find(|found| mode == Mode::Rw && found.kind == FileType::Symlink);
            if let Some(found) = link {
                let problem = "is a symbolic link, which cannot be made read-only; name it with --allow-control, or use --mode cow";
                return refuse(source.join(&found.path), problem);
            }
            // In a copy, a link that is changed is a change of the copy, and is not applied; nor is what it leads to.
            let led_to = control.follow_links(source, &findings);
            let existing = findings.list.into_iter().filter(|found| found.kind != FileType::Symlink);
            let existing: Vec<Found> = existing.chain(led_to).collect();
            let is_home = home.is_some_and(|home| fs::canonicalize(home).is_ok_and(|home| home == *source));
            let decoys = if mode == Mode::Rw { control.absent(source, is_home) } else { Vec::new() };
            guarded.push(GuardedTree {
                source: source.clone(),
                target: target.clone(),
                owner,
                in_place: mode == Mode::Rw,
                control,
                existing,
                decoys,
            });
        }
        if let Some(path) = self.allow_control.iter().find(|path| !used.contains(*path)) {
            let problem = "is no control file of a workspace or mount that can be written; name the file or directory itself, such as .git";
            return Err(PlanError::Path { role, path: path.clone(), problem });
        }
        Ok(guarded)
    }

    fn walls(&self, host: &Host, writes_in_place: bool) -> Result<BTreeMap<Wall, Standing>, PlanError> {
        let mut walls = BTreeMap::new();
        for wall in Wall::ALL {
            if self.omits(wall) {
                walls.insert(wall, Standing::Missing);
                continue;
            }
            let standing = match (wall, self.obstacle(host, wall)) {
                // Root needs no user namespace: its cells get a real id that owns nothing.
                (Wall::User, _) if host.privileged && !self.require.contains(&wall) => continue,
                (_, Some(_)) if self.allow_missing.contains(&wall) => Standing::Missing,
                (_, Some(why)) => return Err(PlanError::Wall { wall, why }),
                (Wall::Disk, None) if writes_in_place => Standing::Watched,
                (_, None) => Standing::Proven,
            };
            if standing == Standing::Watched && self.require.contains(&wall) {
                let why =
                    "a writable workspace or mount is the host's own disk, where use can only be watched".to_owned();
                return Err(PlanError::Wall { wall, why });
            }
            walls.insert(wall, standing);
        }
        Ok(walls)
    }

    /// Why a wall cannot stand, as far as it can be known without trying.
    fn obstacle(&self, host: &Host, wall: Wall) -> Option<String> {
        let namespace = |name: &str, wall: &str| {
            (!host.namespaces.contains_key(name)).then(|| format!("this kernel has no {wall} namespaces"))
        };
        let landlock = |least: u32, what: &str| {
            (host.landlock_abi < least).then(|| {
                format!(
                    "{what} needs Landlock {least}, and this kernel has {}",
                    match host.landlock_abi {
                        0 => "none switched on".to_owned(),
                        abi => format!("version {abi}"),
                    }
                )
            })
        };
        match wall {
            Wall::Id if host.is_outer_root && !host.privileged => {
                Some("this is root without the capabilities to become anybody else".to_owned())
            }
            Wall::Groups if !host.privileged && !host.groups.is_empty() => Some(format!(
                "the kernel lets no ordinary user leave groups, and this user is in {} besides the first",
                host.groups.len()
            )),
            Wall::User if host.privileged => {
                Some("started as root, a cell gets a real id of its own instead of a user namespace".to_owned())
            }
            Wall::User => namespace("user", "user"),
            Wall::Mount => namespace("mnt", "mount"),
            Wall::Pid => namespace("pid", "pid"),
            Wall::Net => namespace("net", "network"),
            Wall::Ipc => namespace("ipc", "ipc"),
            Wall::Uts => namespace("uts", "uts"),
            Wall::CgroupNs => namespace("cgroup", "cgroup"),
            Wall::Time => namespace("time", "time"),
            Wall::Landlock => landlock(1, "the file fence"),
            Wall::LandlockTcp => landlock(4, "the tcp fence"),
            Wall::LandlockScope => landlock(6, "the scope fence"),
            _ => None,
        }
    }

    fn environment(
        &self,
        host: &Host,
        home: &Path,
        cwd: &Path,
        path: &[PathBuf],
        wanted: &BTreeSet<OsString>,
    ) -> Result<BTreeMap<OsString, OsString>, PlanError> {
        let mut env: BTreeMap<OsString, OsString> = BTreeMap::new();
        let copied = |name: &OsStr| {
            let text = name.to_str().unwrap_or_default();
            ENV_COPIED.contains(&text) || text.starts_with("LC_") || wanted.contains(name)
        };
        env.extend(host.env.iter().filter(|(name, _)| copied(name)).map(|(name, value)| (name.clone(), value.clone())));
        let mut search: Vec<OsString> = path.iter().map(|directory| directory.clone().into_os_string()).collect();
        search.push(STANDARD_PATH.into());
        for (name, value) in [
            ("PATH", search.join(OsStr::new(":"))),
            ("HOME", home.into()),
            ("USER", user_name(host).into()),
            ("LOGNAME", user_name(host).into()),
            ("SHELL", "/bin/sh".into()),
            ("TMPDIR", "/tmp".into()),
            ("PWD", cwd.into()),
        ] {
            env.insert(name.into(), value);
        }
        set_variables(&mut env, &self.env, host)?;
        Ok(env)
    }
}

/// Sets variables, or copies them from the host's environment where there is no value.
fn set_variables(
    env: &mut BTreeMap<OsString, OsString>,
    wanted: &[(OsString, Option<OsString>)],
    host: &Host,
) -> Result<(), PlanError> {
    for (name, value) in wanted {
        if name.is_empty() || name.as_bytes().contains(&b'=') {
            return Err(PlanError::VariableName(name.clone()));
        }
        no_nul("the variable", name)?;
        match value.as_ref().or_else(|| host.env.get(name)) {
            Some(value) => {
                no_nul("the value", value)?;
                env.insert(name.clone(), value.clone());
            }
            // Asked to copy what is not set: the cell does not have it either.
            None => {
                env.remove(name);
            }
        }
    }
    Ok(())
}

/// Variables a cell has from the host's environment: language and time zone. Everything else is set
/// by the plan, asked for by name, or not there.
const ENV_COPIED: &[&str] = &["LANG", "LANGUAGE", "TZ"];

/// A decided cell.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(crate) argv: Vec<OsString>,
    /// Where the executable may be, by its path inside: the first that can be executed is.
    pub(crate) programs: Vec<PathBuf>,
    pub(crate) cwd: PathBuf,
    pub(crate) env: BTreeMap<OsString, OsString>,
    pub(crate) identity: Identity,
    pub(crate) view: Arc<[Entry]>,
    pub(crate) workspace: Option<Workspace>,
    pub(crate) guarded: Vec<GuardedTree>,
    /// Directories and files of the host that the cell writes in place.
    pub(crate) writable: Vec<PathBuf>,
    /// Paths of the host that were asked for, and whether they are written in place.
    pub(crate) shows: Vec<(PathBuf, bool)>,
    pub(crate) hidden: Vec<PathBuf>,
    /// Variables that were asked for.
    pub(crate) asked: Vec<OsString>,
    /// Whether its command is looked for inside, when it runs.
    pub(crate) is_exec: bool,
    pub(crate) limits: Limits,
    pub(crate) walls: BTreeMap<Wall, Standing>,
    pub(crate) omitted_rules: BTreeSet<&'static str>,
    pub(crate) require: BTreeSet<Wall>,
    pub(crate) allow_missing: BTreeSet<Wall>,
    pub(crate) host: Arc<Host>,
    /// What its command goes on from, instead of being executed.
    pub(crate) beginning: Option<Beginning>,
}

impl Plan {
    /// A plan of nothing but walls, all of them: what any cell on this host has.
    pub(crate) fn of_walls(host: &Host) -> Plan {
        let identity = if host.privileged { Identity::Fresh } else { Identity::Own { uid: host.uid, gid: host.gid } };
        let is_had = |wall: &Wall| *wall != Wall::User || !host.privileged;
        Plan {
            argv: Vec::new(),
            programs: Vec::new(),
            cwd: PathBuf::new(),
            env: BTreeMap::new(),
            identity,
            view: Arc::default(),
            workspace: None,
            guarded: Vec::new(),
            writable: Vec::new(),
            limits: Limits::default(),
            walls: Wall::ALL.into_iter().filter(is_had).map(|wall| (wall, Standing::Proven)).collect(),
            shows: Vec::new(),
            hidden: Vec::new(),
            asked: Vec::new(),
            is_exec: false,
            omitted_rules: BTreeSet::new(),
            require: BTreeSet::new(),
            allow_missing: BTreeSet::new(),
            host: Arc::new(host.clone()),
            beginning: None,
        }
    }

    /// The command and its arguments.
    pub fn argv(&self) -> &[OsString] {
        &self.argv
    }

    /// The executable, by its path inside; of a cell that is to have commands later, none.
    pub fn program(&self) -> Option<&Path> {
        self.programs.first().map(|path| &**path)
    }

    /// The same plan, but that its command goes on from a template of the program it names, and reads its other arguments
    /// from its request. Whatever the program draws at random from then on, it may draw from the seed.
    pub fn from_template(mut self, template: Arc<Template>, seed: u64) -> Plan {
        self.beginning = Some(Beginning { template, seed });
        self
    }

    /// The plan of a further command in a cell of this one.
    ///
    /// # Errors
    /// If the command cannot be one, or is to have more than the cell has.
    pub fn exec(&self, exec: &Exec) -> Result<Plan, PlanError> {
        let command = exec.argv.first().filter(|name| !name.is_empty()).ok_or(PlanError::NoCommand)?;
        for argument in &exec.argv {
            no_nul("the argument", argument)?;
        }
        let mut plan = self.clone();
        plan.argv = exec.argv.clone();
        if let Some(cwd) = &exec.cwd {
            no_nul("the working directory", cwd.as_os_str())?;
            plan.cwd = needs::normal(&self.cwd.join(cwd));
            plan.env.insert("PWD".into(), plan.cwd.clone().into());
        }
        set_variables(&mut plan.env, &exec.env, &self.host)?;
        plan.asked.extend(exec.env.iter().map(|(name, _)| name.clone()));
        plan.is_exec = true;
        // What is where inside only the kernel knows, and only when it is looked for.
        plan.programs = candidates(&plan.env, &plan.cwd, command);
        if plan.programs.is_empty() {
            return Err(CommandError::NotFound(command.clone()).into());
        }
        if let (Some(beginning), Some(seed)) = (&mut plan.beginning, exec.seed) {
            beginning.seed = seed;
        }
        if let Some(limits) = &exec.limits {
            limits.check()?;
            limits.within(&self.limits)?;
            plan.limits = limits.clone();
        }
        Ok(plan)
    }

    /// The host's own directories and files that a cell may write to.
    pub fn writable(&self) -> &[PathBuf] {
        &self.writable
    }

    /// Paths of the host that were asked for as workspace or mount, without links, and whether they are written in place.
    pub fn shows(&self) -> &[(PathBuf, bool)] {
        &self.shows
    }

    /// Paths of the host that are covered wherever they would appear.
    pub fn hidden(&self) -> &[PathBuf] {
        &self.hidden
    }

    /// Variables that were asked for, by name.
    pub fn asked(&self) -> &[OsString] {
        &self.asked
    }

    /// Whether it is of a further command in a cell that stands, which has the disk that the cell has.
    pub fn is_exec(&self) -> bool {
        self.is_exec
    }

    /// What a word would be as the first of a command: the file that this plan's search finds under that name, by the
    /// real path of its directory. Of a file that is not there, what it would be called.
    pub fn find(&self, word: &OsStr) -> Option<PathBuf> {
        let found = if self.is_exec {
            candidates(&self.env, &self.cwd, word).into_iter().next()
        } else {
            needs::find(&self.host, word, &self.cwd).ok()
        };
        found.map(|path| needs::in_real_directory(&path))
    }

    /// The same plan with limits that are narrower.
    pub fn narrowed(mut self, limits: Limits) -> Result<Plan, LimitTooSmall> {
        limits.check()?;
        self.limits = limits;
        Ok(self)
    }

    /// The directory the command starts in.
    pub fn cwd(&self) -> &Path {
        &self.cwd
    }

    /// The whole environment of the command.
    pub fn env(&self) -> &BTreeMap<OsString, OsString> {
        &self.env
    }

    /// Who the command is, outside.
    pub fn identity(&self) -> Identity {
        self.identity
    }

    /// Everything that exists inside.
    pub fn view(&self) -> &[Entry] {
        &self.view
    }

    /// The workspace.
    pub fn workspace(&self) -> Option<&Workspace> {
        self.workspace.as_ref()
    }

    /// What the run may use.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// The walls that are asked for, as far as they can be known without trying.
    pub fn walls(&self) -> &BTreeMap<Wall, Standing> {
        &self.walls
    }

    /// The same plan with a wall left out, and said to be.
    pub(crate) fn without(&self, wall: Wall) -> Plan {
        let mut plan = self.clone();
        plan.walls.insert(wall, Standing::Missing);
        plan
    }

    /// Whether a wall is to stand, proven or watched.
    pub fn asks_for(&self, wall: Wall) -> bool {
        self.walls.get(&wall).is_some_and(|standing| *standing != Standing::Missing)
    }
}

/// Where a command may be, by its path inside.
fn candidates(env: &BTreeMap<OsString, OsString>, cwd: &Path, command: &OsStr) -> Vec<PathBuf> {
    if command.as_bytes().contains(&b'/') {
        return vec![cwd.join(command)];
    }
    let path = env.get(OsStr::new("PATH")).map_or(OsStr::new(STANDARD_PATH), |path| path);
    std::env::split_paths(path).filter(|directory| directory.is_absolute()).map(|at| at.join(command)).collect()
}

fn no_nul(role: &'static str, text: &OsStr) -> Result<(), PlanError> {
    if text.as_bytes().contains(&0) { Err(PlanError::NulByte { role, text: text.to_owned() }) } else { Ok(()) }
}

fn workspace(host: &Host, path: &Path, mode: Mode) -> Result<Workspace, PlanError> {
    let role = "the workspace";
    no_nul(role, path.as_os_str())?;
    let path = needs::normal(&host.cwd.join(path));
    let refuse = |problem| Err(PlanError::Path { role, path: path.clone(), problem });
    let unreadable = |source| PlanError::Unreadable { role, path: path.clone(), source };
    let file = fs::symlink_metadata(&path).map_err(unreadable)?;
    if file.is_symlink() {
        return refuse("is a symbolic link; give the directory it leads to");
    }
    if !file.is_dir() {
        return refuse("is not a directory");
    }
    // A link further up would show another path inside than the caller named; use what it leads to.
    let real = fs::canonicalize(&path).map_err(unreadable)?;
    if real.parent().is_none() {
        return refuse("is the root of the filesystem; give the directory you work in");
    }
    if host.home.as_deref().is_some_and(|home| home.starts_with(&real)) {
        return refuse("is or contains your home directory; give the directory you work in");
    }
    let system = ["/usr", "/etc", "/bin", "/sbin", "/lib", "/lib64", "/proc", "/sys", "/dev", "/boot", "/run"];
    if system.iter().any(|system| real == Path::new(system)) || real.starts_with("/proc") || real.starts_with("/sys") {
        return refuse("belongs to the system; give the directory you work in");
    }
    fs::read_dir(&real).map_err(unreadable)?;
    Ok(Workspace {
        mode,
        identity: (file.dev(), file.ino()),
        owner: (file.uid(), file.gid()),
        permissions: file.mode() & 0o777,
        path: real,
    })
}

fn check_mount(host: &Host, mount: &MountRequest) -> Result<Mount, PlanError> {
    let role = "the mount";
    no_nul(role, mount.source.as_os_str())?;
    no_nul(role, mount.target.as_os_str())?;
    let source = needs::normal(&host.cwd.join(&mount.source));
    let unreadable = |source_error| PlanError::Unreadable { role, path: source.clone(), source: source_error };
    let real = fs::canonicalize(&source).map_err(unreadable)?;
    let file = fs::metadata(&real).map_err(unreadable)?;
    let refuse = |path: &Path, problem| Err(PlanError::Path { role, path: path.to_owned(), problem });
    if file.is_dir() {
        fs::read_dir(&real).map_err(unreadable)?;
    } else if file.is_file() {
        fs::File::open(&real).map_err(unreadable)?;
    } else {
        return refuse(&real, "is neither a directory nor a file");
    }
    if real.parent().is_none() {
        return refuse(&real, "is the whole filesystem; mount the part you need");
    }
    if ["/proc", "/sys", "/dev"].iter().any(|kernel| real.starts_with(kernel)) {
        return refuse(&real, "belongs to the kernel; a cell has its own");
    }
    if !mount.target.is_absolute() {
        return refuse(&mount.target, "is not an absolute path inside the cell");
    }
    let target = needs::normal(&mount.target);
    if target.parent().is_none() || target.starts_with("/proc") || target.starts_with("/dev") {
        return refuse(&target, "is a place inside the cell that cannot be covered");
    }
    Ok(Mount {
        source: real,
        target,
        writable: mount.writable,
        directory: file.is_dir(),
        owner: (file.uid(), file.gid()),
        identity: (file.dev(), file.ino()),
    })
}

/// The home directory inside has the same path as outside, so that installations in it are found,
/// but is an empty scratch directory.
fn home(host: &Host) -> PathBuf {
    let usable = |home: &&PathBuf| {
        let kernel = ["/proc", "/sys", "/dev", "/etc"].iter().any(|path| home.starts_with(path));
        let taken =
            ["/tmp", "/var/tmp", "/var", "/run", view::EMPTY_CWD].iter().any(|path| home.as_path() == Path::new(path));
        home.is_absolute() && home.parent().is_some() && !kernel && !taken && !host.is_system(home) && home.is_dir()
    };
    host.home
        .as_ref()
        .map(|home| fs::canonicalize(home).unwrap_or_else(|_| needs::normal(home)))
        .as_ref()
        .filter(usable)
        .map_or_else(|| "/home/cell".into(), Clone::clone)
}

fn user_name(host: &Host) -> &str {
    if host.privileged { "cell" } else { &host.user_name }
}

/// `{id}` stands for the id that is only known when the cell is made.
pub(crate) const ID_MARK: &str = "{id}";

fn passwd(host: &Host, identity: Identity, home: &Path) -> String {
    let (uid, gid) = match identity {
        Identity::Own { uid, gid } => (uid.to_string(), gid.to_string()),
        Identity::Fresh => (ID_MARK.to_owned(), ID_MARK.to_owned()),
    };
    let home = home.to_str().filter(|home| !home.contains([':', '\n'])).unwrap_or("/home/cell");
    let mut text = String::new();
    for line in [
        "root:x:0:0:root:/nonexistent:/usr/sbin/nologin".to_owned(),
        format!("{}:x:{uid}:{gid}::{home}:/bin/sh", user_name(host)),
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin".to_owned(),
    ] {
        // Whoever runs this as root without privilege, or as nobody, is listed once.
        let id = line.split(':').nth(2).map(str::to_owned);
        if !text.lines().any(|other: &str| other.split(':').nth(2).map(str::to_owned) == id) {
            text.push_str(&line);
            text.push('\n');
        }
    }
    text
}

fn group(host: &Host, identity: Identity) -> String {
    let gid = match identity {
        Identity::Own { gid, .. } => gid.to_string(),
        Identity::Fresh => ID_MARK.to_owned(),
    };
    let mut text = String::from("root:x:0:\n");
    if gid != "0" && gid != "65534" {
        text.push_str(&format!("{}:x:{gid}:\n", user_name(host)));
    }
    text.push_str("nogroup:x:65534:\n");
    text
}
