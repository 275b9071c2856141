//! What a command needs of the disk beyond the system: its interpreter, wherever that is installed.
//!
//! ```text
//! argv[0] ─▶ found on PATH ─▶ links ─▶ `#!` line ─▶ virtual environment ─▶ grants, and additions to PATH
//! ```
//!
//! A grant is the smallest tree that makes a program work: the installation it belongs to
//! (`…/node-v20` for `…/node-v20/bin/node`), never a home directory and never a directory above one.
//!
//! **What lies in the workspace is not trusted to ask for anything.** A link, a `#!` line or a `pyvenv.cfg` there
//! may lead to an executable of an installation in one of the places where version managers put them, or that the
//! caller's own PATH leads to; to anything else it leads nowhere.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Read;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};

use crate::host::Host;

/// A path outside the system that the command needs, read-only.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Grant {
    /// A directory with all below it.
    Tree(PathBuf),
    /// One file.
    File(PathBuf),
    /// A symbolic link, made again inside.
    Link(PathBuf, PathBuf),
}

/// What was found out about a command.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Needs {
    /// Paths to grant, parents before children.
    pub grants: BTreeSet<Grant>,
    /// Directories to search before the standard ones.
    pub path: Vec<PathBuf>,
    /// Environment variables the installation is found by.
    pub env: BTreeSet<OsString>,
}

/// Why a command cannot be run.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum CommandError {
    /// No such file, or nothing of that name on the search path.
    #[error("there is no command `{}`", hotcell_base::text::shown(.0.as_bytes()))]
    NotFound(OsString),
    /// A directory.
    #[error("`{}` is a directory, not a command", hotcell_base::text::shown(.0.as_os_str().as_bytes()))]
    Directory(PathBuf),
    /// A file without permission to execute.
    #[error("`{}` may not be executed: no execute permission", hotcell_base::text::shown(.0.as_os_str().as_bytes()))]
    NotExecutable(PathBuf),
}

/// Finds a command as a shell would: by path from `base`, else by name on the search path.
pub fn find(host: &Host, command: &OsStr, base: &Path) -> Result<PathBuf, CommandError> {
    if command.as_bytes().contains(&b'/') {
        let path = normal(&base.join(command));
        return executable(&path).map(|()| path).map_err(|error| match error {
            CommandError::NotFound(_) => CommandError::NotFound(command.to_owned()),
            other => other,
        });
    }
    let mut refused = CommandError::NotFound(command.to_owned());
    for directory in host.search_path() {
        let path = directory.join(command);
        match executable(&path) {
            Ok(()) => return Ok(path),
            Err(error @ CommandError::NotExecutable(_)) => refused = error,
            Err(_) => {}
        }
    }
    Err(refused)
}

fn executable(path: &Path) -> Result<(), CommandError> {
    match fs::metadata(path) {
        Err(_) => Err(CommandError::NotFound(path.as_os_str().to_owned())),
        Ok(file) if file.is_dir() => Err(CommandError::Directory(path.to_owned())),
        Ok(file) if file.permissions().mode() & 0o111 == 0 => Err(CommandError::NotExecutable(path.to_owned())),
        Ok(_) => Ok(()),
    }
}

/// Collects needs; `inside` are paths that the cell sees anyway.
pub struct Search<'a> {
    host: &'a Host,
    inside: Vec<PathBuf>,
    seen: BTreeSet<PathBuf>,
    needs: Needs,
}

/// A chain of links and interpreters longer than this is a loop.
const CHAIN_MAX: u32 = 16;

/// Whose word a path is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Word {
    /// The caller's: the command, the search path, and what they lead to.
    Callers,
    /// The workspace's, or that of anything else the cell can see and a guest may have written.
    Workspaces,
}

/// Below the home directory, where version managers install: each entry in one of these is an installation.
const INSTALLATIONS: &[&str] = &[
    ".pyenv/versions",
    ".rbenv/versions",
    ".nodenv/versions",
    ".nvm/versions/node",
    ".asdf/installs",
    ".rustup/toolchains",
    ".sdkman/candidates",
    ".local/share/uv/python",
    ".local/share/mise/installs",
    ".local/share/fnm/node-versions",
    ".volta/tools/image",
];

impl Grant {
    /// Which file it is now, to be compared when it is mounted.
    pub fn identity(&self) -> Option<(u64, u64)> {
        match self {
            Grant::Tree(path) | Grant::File(path) => {
                fs::symlink_metadata(path).ok().map(|file| (file.dev(), file.ino()))
            }
            Grant::Link(..) => None,
        }
    }
}

impl<'a> Search<'a> {
    /// Starts a search.
    pub fn new(host: &'a Host, inside: Vec<PathBuf>) -> Search<'a> {
        Search { host, inside, seen: BTreeSet::new(), needs: Needs::default() }
    }

    /// What was found.
    pub fn finish(self) -> Needs {
        self.needs
    }

    /// Adds what this program needs.
    pub fn program(&mut self, path: &Path) {
        self.follow(path, Word::Callers, CHAIN_MAX);
    }

    /// Adds what the files at the top of a workspace say it will need.
    pub fn workspace(&mut self, root: &Path) {
        for name in [".venv", "venv", "env"] {
            self.virtual_environment(&root.join(name), Word::Workspaces, CHAIN_MAX);
        }
        for (marker, tool) in [
            (".python-version", "python3"),
            ("pyproject.toml", "python3"),
            ("requirements.txt", "python3"),
            ("setup.py", "python3"),
            ("package.json", "node"),
            ("Cargo.toml", "cargo"),
            ("go.mod", "go"),
            ("Gemfile", "ruby"),
        ] {
            // The name of the tool is ours and where it is found is the caller's; the workspace only says that it is one.
            if root.join(marker).exists()
                && let Ok(path) = find(self.host, OsStr::new(tool), root)
            {
                self.program(&path);
            }
        }
    }

    fn is_inside(&self, path: &Path) -> bool {
        self.inside.iter().any(|inside| path.starts_with(inside))
    }

    fn follow(&mut self, path: &Path, word: Word, chain: u32) {
        // What is not there cannot be granted; whoever executes it will say so.
        if chain == 0 || fs::symlink_metadata(path).is_err() || !self.seen.insert(path.to_owned()) {
            return;
        }
        let inside = self.is_inside(path);
        // Whatever a path inside says next, it is the workspace that says it.
        let word = if inside { Word::Workspaces } else { word };
        let visible = inside || self.host.is_system(path);
        if !visible && word == Word::Workspaces {
            return self.grant_known(path);
        }
        if let Some((link, target, rest)) = link_above(path) {
            if !visible && let Ok(text) = fs::read_link(&link) {
                self.needs.grants.insert(Grant::Link(link, text));
            }
            return self.follow(&target.join(rest), word, chain - 1);
        }
        if !visible && !self.grant(path) {
            return;
        }
        if let (Some(directory), true) = (path.parent(), is_command_directory(path)) {
            let standard = STANDARD_PATH.split(':').any(|known| Path::new(known) == directory);
            if !standard && !self.needs.path.iter().any(|known| known == directory) {
                self.needs.path.push(directory.to_owned());
            }
        }
        if let Ok(target) = fs::read_link(path) {
            let target = normal(&path.parent().unwrap_or(Path::new("/")).join(target));
            self.follow(&target, word, chain - 1);
        } else if let Some((interpreter, by_name)) = self.interpreter(path) {
            // A name is looked up on the caller's own search path.
            self.follow(&interpreter, if by_name { Word::Callers } else { word }, chain - 1);
        }
        if let Some(prefix) = path.parent().and_then(Path::parent) {
            self.virtual_environment(prefix, word, chain - 1);
        }
    }

    /// For the workspace's word: the installation a path really leads to, if somebody else made it known. Nothing
    /// on the way there counts, and nothing that is found there leads further.
    fn grant_known(&mut self, path: &Path) {
        let Ok(real) = fs::canonicalize(path) else { return };
        if self.is_inside(&real) || self.host.is_system(&real) || !self.is_known(&real) {
            return;
        }
        if let Some(prefix) = installation(&real).filter(|prefix| self.is_installation(prefix)) {
            self.needs.grants.insert(Grant::Tree(prefix.to_owned()));
        }
    }

    /// Grants the installation a program belongs to; whether it may be had at all.
    fn grant(&mut self, path: &Path) -> bool {
        let is_program = fs::metadata(path).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0);
        if !is_program {
            return false;
        }
        if self.rustup(path) {
            return true;
        }
        let grant = match (installation(path), fs::read_link(path)) {
            (Some(prefix), _) if self.is_installation(prefix) => Grant::Tree(prefix.to_owned()),
            (_, Ok(target)) => Grant::Link(path.to_owned(), target),
            _ => Grant::File(path.to_owned()),
        };
        if let Grant::Tree(prefix) = &grant {
            if prefix.join("shims").is_dir() {
                // A shim asks its manager which version to run; these tell the manager.
                self.needs.env.extend(["PYENV_VERSION", "RBENV_VERSION", "NODENV_VERSION"].map(OsString::from));
            }
            // An installation inside a granted one is there already.
            let covered = |one: &Grant| matches!(one, Grant::Tree(tree) if prefix.starts_with(tree) && tree != prefix);
            if self.needs.grants.iter().any(covered) {
                return true;
            }
        }
        self.needs.grants.insert(grant);
        true
    }

    /// Whether an executable, by its real path, lies where a version manager installs or is what the caller's
    /// own search path leads to.
    fn is_known(&self, real: &Path) -> bool {
        let managed = INSTALLATIONS.iter().any(|place| {
            let place = self.host.home.as_deref().map(|home| home.join(place));
            place.and_then(|place| fs::canonicalize(place).ok()).is_some_and(|place| real.starts_with(place))
        });
        let Some(name) = real.file_name() else { return false };
        // A directory of the workspace on the search path is still the workspace's.
        let own = self.host.search_path().into_iter().filter(|directory| {
            !self.is_inside(directory) && !fs::canonicalize(directory).is_ok_and(|directory| self.is_inside(&directory))
        });
        let mut found = own.filter_map(|directory| fs::canonicalize(directory.join(name)).ok());
        let is_program = fs::metadata(real).is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0);
        is_program && (managed || found.any(|one| one == real))
    }

    /// Whether a directory has the shape of an installation, and is nobody's home and no directory above one.
    fn is_installation(&self, prefix: &Path) -> bool {
        let beside = ["lib", "lib64", "libexec", "share", "versions", "pyvenv.cfg"];
        // By its name and by where that leads: a home may be a link.
        let real = fs::canonicalize(prefix).unwrap_or_else(|_| prefix.to_owned());
        let home = |home: &Path| {
            let there = fs::canonicalize(home).unwrap_or_else(|_| home.to_owned());
            home.starts_with(prefix) || there.starts_with(&real)
        };
        let somebodys = self.host.homes.iter().any(|one| home(one)) || prefix.parent() == Some(Path::new("/home"));
        let mine = self.host.home.as_deref().is_some_and(home);
        prefix.components().count() > 2
            && !mine
            && !somebodys
            && !prefix.ends_with(".local")
            && beside.iter().any(|name| prefix.join(name).exists())
    }

    /// A rustup proxy needs the proxies and the toolchains, and not the rest of `~/.cargo`, where
    /// the registry token lives.
    fn rustup(&mut self, path: &Path) -> bool {
        let home = self.host.home.clone().unwrap_or_default();
        let of = |variable: &str, default: &str| {
            self.host.env.get(OsStr::new(variable)).map_or_else(|| home.join(default), PathBuf::from)
        };
        let (bin, toolchains) = (of("CARGO_HOME", ".cargo").join("bin"), of("RUSTUP_HOME", ".rustup"));
        if path.parent() != Some(&bin) {
            return false;
        }
        self.needs.grants.insert(Grant::Tree(bin));
        if toolchains.is_dir() {
            self.needs.grants.insert(Grant::Tree(toolchains));
            self.needs.env.extend(["RUSTUP_HOME", "RUSTUP_TOOLCHAIN"].map(OsString::from));
        }
        true
    }

    /// A virtual environment is a directory of links to the interpreter it was made from.
    fn virtual_environment(&mut self, prefix: &Path, word: Word, chain: u32) {
        let Ok(config) = fs::read_to_string(prefix.join("pyvenv.cfg")) else { return };
        let word = if self.is_inside(prefix) { Word::Workspaces } else { word };
        let base = config.lines().find_map(|line| line.split_once('=').filter(|(key, _)| key.trim() == "home"));
        if let Some((_, base)) = base {
            for name in ["python3", "python"] {
                self.follow(&normal(&Path::new(base.trim()).join(name)), word, chain.saturating_sub(1));
            }
        }
    }

    /// The program a script names in its first line, and whether it is named without a path.
    fn interpreter(&self, script: &Path) -> Option<(PathBuf, bool)> {
        let mut start = Vec::new();
        // Only regular files: opening a FIFO would wait for a writer.
        fs::metadata(script).ok().filter(fs::Metadata::is_file)?;
        fs::File::open(script).ok()?.take(256).read_to_end(&mut start).ok()?;
        let line = start.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
        let mut words = line.split(|byte| matches!(byte, b' ' | b'\t')).filter(|word| !word.is_empty());
        let named = PathBuf::from(OsString::from_vec(words.next()?.to_vec()));
        if named.file_name() == Some(OsStr::new("env")) {
            let command = words.find(|word| !word.starts_with(b"-") && !word.contains(&b'='))?;
            let by_name = !command.contains(&b'/');
            return find(self.host, OsStr::from_bytes(command), Path::new("/")).ok().map(|path| (path, by_name));
        }
        named.is_absolute().then(|| (normal(&named), false))
    }
}

/// The first directory above a path that is a link, where it leads, and what of the path comes after it.
fn link_above(path: &Path) -> Option<(PathBuf, PathBuf, PathBuf)> {
    let mut above: Vec<&Path> = path.ancestors().skip(1).collect();
    above.reverse();
    let link =
        above.into_iter().find(|directory| fs::symlink_metadata(directory).is_ok_and(|file| file.is_symlink()))?;
    let target = normal(&link.parent()?.join(fs::read_link(link).ok()?));
    Some((link.to_owned(), target, path.strip_prefix(link).ok()?.to_owned()))
}

/// What every cell searches for commands.
pub const STANDARD_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The tree a program was installed with: what its `bin` is in.
fn installation(path: &Path) -> Option<&Path> {
    if is_command_directory(path) { path.parent()?.parent() } else { None }
}

fn is_command_directory(path: &Path) -> bool {
    let directory = path.parent().and_then(Path::file_name).map(OsStr::as_bytes);
    matches!(directory, Some(b"bin" | b"sbin" | b"libexec" | b"shims"))
}

/// A path whose directory has no links in it; the file itself may be one, and goes by its own name.
pub fn in_real_directory(path: &Path) -> PathBuf {
    let real = path.parent().and_then(|directory| fs::canonicalize(directory).ok());
    match (real, path.file_name()) {
        (Some(directory), Some(name)) => directory.join(name),
        _ => normal(path),
    }
}

/// A path without `.` and `..`, worked out on the text alone, as the kernel would without links.
pub fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                normal.pop();
            }
            part => normal.push(part),
        }
    }
    normal
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    struct World(tempfile::TempDir);

    impl World {
        fn new() -> World {
            World(tempfile::tempdir().expect("a temporary directory"))
        }

        fn script(&self, name: &str, text: &str) -> PathBuf {
            let path = self.0.path().join(name);
            fs::create_dir_all(path.parent().expect("a parent")).expect("directories");
            fs::write(&path, text).expect("written");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
            path
        }

        /// Needs of a program, with this world as the home directory and its root cut off.
        fn needs(&self, program: &Path) -> String {
            let home = self.0.path().to_owned();
            let env = [("HOME", home.clone().into_os_string()), ("PATH", "/usr/bin:/bin".into())];
            let host = Host::probe(env.map(|(key, value)| (key.into(), value))).expect("this machine");
            let mut search = Search::new(&host, Vec::new());
            search.program(program);
            let needs = search.finish();
            format!("{:?} path {:?}", needs.grants, needs.path).replace(home.to_str().expect("utf-8"), "~")
        }
    }

    #[test]
    fn an_installation_is_granted_whole_and_nothing_above_it() {
        let world = World::new();
        let node = world.script("n/v20/bin/node", "ELF");
        world.script("n/v20/lib/x", "");
        assert_eq!(world.needs(&node), r#"{Tree("~/n/v20")} path ["~/n/v20/bin"]"#);
    }

    #[test]
    fn a_program_in_the_home_itself_is_granted_alone() {
        let world = World::new();
        let tool = world.script("bin/tool", "#!/bin/sh\n");
        assert_eq!(world.needs(&tool), r#"{File("~/bin/tool")} path ["~/bin"]"#);
        let local = world.script(".local/bin/tool", "#!/bin/sh\n");
        assert_eq!(world.needs(&local), r#"{File("~/.local/bin/tool")} path ["~/.local/bin"]"#);
    }

    #[test]
    fn links_scripts_and_virtual_environments_lead_to_their_interpreter() {
        let world = World::new();
        world.script("py/3.11/bin/python3", "ELF");
        world.script("py/3.11/lib/x", "");
        let venv = world.0.path().join("apps/v");
        fs::create_dir_all(venv.join("bin")).expect("directories");
        symlink(world.0.path().join("py/3.11/bin/python3"), venv.join("bin/python")).expect("a link");
        fs::write(venv.join("pyvenv.cfg"), format!("home = {}/py/3.11/bin\n", world.0.path().display())).expect("cfg");
        let tool = world.script("apps/v/bin/tool", &format!("#!{}/bin/python\n", venv.display()));
        let link = world.0.path().join(".local/bin/tool");
        fs::create_dir_all(link.parent().expect("a parent")).expect("directories");
        symlink(&tool, &link).expect("a link");
        let needs = world.needs(&link);
        assert!(needs.contains(r#"Tree("~/apps/v"), Tree("~/py/3.11")"#), "{needs}");
        assert!(needs.contains(r#"Link("~/.local/bin/tool", "~/apps/v/bin/tool")"#), "{needs}");
    }

    #[test]
    fn rustup_shows_toolchains_and_never_the_registry_token() {
        let world = World::new();
        let cargo = world.script(".cargo/bin/cargo", "ELF");
        fs::write(world.0.path().join(".cargo/credentials.toml"), "token").expect("written");
        fs::create_dir(world.0.path().join(".rustup")).expect("a directory");
        assert_eq!(world.needs(&cargo), r#"{Tree("~/.cargo/bin"), Tree("~/.rustup")} path ["~/.cargo/bin"]"#);
    }

    #[test]
    fn an_installation_behind_a_link_is_granted_with_the_link() {
        let world = World::new();
        let tool = world.script("sdk/2.0/bin/tool", "ELF");
        world.script("sdk/2.0/lib/x", "");
        symlink("2.0", world.0.path().join("sdk/current")).expect("a link");
        let needs = world.needs(&world.0.path().join("sdk/current/bin/tool"));
        assert!(needs.contains(r#"Tree("~/sdk/2.0"), Link("~/sdk/current", "2.0")"#), "{needs}");
        assert!(tool.exists());
    }

    #[test]
    fn a_workspace_cannot_ask_for_what_is_not_an_interpreter_somebody_installed() {
        let world = World::new();
        let home = world.0.path();
        let secret = world.script(".ssh/id", "key");
        world.script("other/bin/tool", "ELF");
        world.script("other/lib/x", "");
        world.script("ws/.venv/pyvenv.cfg", &format!("home = {}/ws/e\n", home.display()));
        fs::create_dir_all(home.join("ws/e")).expect("directories");
        let grants = |target: &Path| {
            let link = home.join("ws/e/python3");
            if link.symlink_metadata().is_ok() {
                fs::remove_file(&link).expect("removed");
            }
            symlink(target, &link).expect("a link");
            let script = world.script("ws/run.sh", &format!("#!{}\n", target.display()));
            let env = [("HOME", home.as_os_str().to_owned()), ("PATH", "/usr/bin:/bin".into())];
            let host = Host::probe(env.map(|(key, value)| (key.into(), value))).expect("this machine");
            let mut search = Search::new(&host, vec![home.join("ws")]);
            search.workspace(&home.join("ws"));
            search.program(&script);
            search.finish().grants
        };
        for wish in [secret, home.join("other/bin/tool"), "/etc/gshadow".into(), home.join(".ssh")] {
            assert_eq!(grants(&wish), BTreeSet::new(), "{}", wish.display());
        }
        // The control: an interpreter where a version manager puts it.
        let python = world.script(".pyenv/versions/3.11/bin/python3", "ELF");
        world.script(".pyenv/versions/3.11/lib/x", "");
        assert_eq!(grants(&python), BTreeSet::from([Grant::Tree(home.join(".pyenv/versions/3.11"))]));
    }

    #[test]
    fn a_loop_of_links_ends() {
        let world = World::new();
        let (a, b) = (world.0.path().join("a"), world.0.path().join("b"));
        symlink(&a, &b).expect("a link");
        symlink(&b, &a).expect("a link");
        world.needs(&a);
    }
}
