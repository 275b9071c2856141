//! What the tests share: cells with the probe inside, and a home that is gone afterwards.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use hotcell_cell::{Builder, Cell, Host, Plan, PlanError, Report, Wall};
use serde_json::Value;

/// The program under test: where the test runner has put it, else where it was built.
pub(crate) static HOTCELL: LazyLock<String> = LazyLock::new(|| {
    std::env::var("NEXTEST_BIN_EXE_hotcell").unwrap_or_else(|_| env!("CARGO_BIN_EXE_hotcell").to_owned())
});

/// Walls that keep a process from what it may do outside, besides the one a control is about.
pub(crate) const PRIVILEGE: &[Wall] = &[Wall::Id, Wall::Caps, Wall::Groups];
pub(crate) const FILES: &[Wall] = &[Wall::Root, Wall::Landlock];

pub(crate) fn host() -> Host {
    Host::probe(std::env::vars_os()).expect("this machine can be looked at")
}

pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Says by name what this machine or user cannot test; `./test` prints the list.
pub(crate) fn skip(what: &str) {
    use std::io::Write;
    writeln!(std::io::stderr(), "SKIPPED: {what}").expect("stderr");
    if let Some(list) = std::env::var_os("HOTCELL_SKIPPED_LIST") {
        let list = std::fs::OpenOptions::new().append(true).open(list);
        list.and_then(|mut list| writeln!(list, "SKIPPED: {what}")).expect("the list of what was skipped");
    }
}

pub(crate) fn omit(builder: Builder, walls: &[Wall]) -> Builder {
    walls.iter().fold(builder, |builder, wall| builder.omit(*wall))
}

pub(crate) fn run(builder: Builder) -> Report {
    run_on(&host(), builder)
}

/// Whether whoever runs the tests has groups, which no ordinary user can leave: one wall less for all tests.
pub(crate) fn cannot_leave_groups(host: &Host) -> bool {
    !host.privileged && !host.groups.is_empty()
}

pub(crate) fn plan_on(host: &Host, builder: Builder) -> Result<Plan, PlanError> {
    allowing(host, builder).plan(host)
}

/// A user who is in groups accepts that they stay.
pub(crate) fn allowing(host: &Host, builder: Builder) -> Builder {
    if cannot_leave_groups(host) { builder.allow_missing(Wall::Groups) } else { builder }
}

pub(crate) fn run_on(host: &Host, builder: Builder) -> Report {
    let plan = plan_on(host, builder).unwrap_or_else(|error| panic!("no plan: {error}"));
    plan.run().unwrap_or_else(|error| panic!("no run: {error}: {:?}", std::error::Error::source(&error)))
}

/// The command line of a probe.
pub(crate) fn probe_argv<T: Into<OsString>>(attempt: &str, args: impl IntoIterator<Item = T>) -> Vec<OsString> {
    let start: [OsString; 3] = [HOTCELL.as_str().into(), "probe".into(), attempt.into()];
    start.into_iter().chain(args.into_iter().map(Into::into)).collect()
}

/// What the kernel answered to each try.
#[derive(Debug)]
pub(crate) struct Tries(Vec<(String, String, i64)>);

impl Tries {
    pub(crate) fn of(stdout: &[u8]) -> Tries {
        let text = String::from_utf8_lossy(stdout);
        let value: Value = serde_json::from_str(text.trim()).unwrap_or_else(|_| panic!("no verdicts: {text:?}"));
        let tries = value["tries"].as_array().expect("tries").iter();
        let field = |one: &Value, name: &str| one[name].as_str().expect("text").to_owned();
        Tries(
            tries.map(|one| (field(one, "try"), field(one, "result"), one["errno"].as_i64().expect("errno"))).collect(),
        )
    }

    /// Every try met a wall.
    #[track_caller]
    pub(crate) fn all_refused(&self) {
        assert!(!self.0.is_empty(), "nothing was tried");
        let through: Vec<_> = self.0.iter().filter(|(_, result, _)| result != "refused").collect();
        assert!(through.is_empty(), "ESCAPED: {through:?}");
    }

    /// No try met a wall: the control of the same tries inside.
    #[track_caller]
    pub(crate) fn all_through(&self) {
        assert!(!self.0.is_empty(), "nothing was tried");
        let stopped: Vec<_> = self.0.iter().filter(|(_, result, _)| result == "refused").collect();
        assert!(stopped.is_empty(), "VOID, refused without the wall: {stopped:?}");
    }
}

/// Runs a probe in a whole cell.
#[track_caller]
pub(crate) fn walled<T: Into<OsString>>(attempt: &str, args: impl IntoIterator<Item = T>) -> Tries {
    tries(Cell::builder(), attempt, args)
}

/// Runs a probe in a cell without some walls: the control.
#[track_caller]
pub(crate) fn without<T: Into<OsString>>(walls: &[&[Wall]], attempt: &str, args: impl IntoIterator<Item = T>) -> Tries {
    tries(omit(Cell::builder(), &walls.concat()), attempt, args)
}

#[track_caller]
pub(crate) fn tries<T: Into<OsString>>(builder: Builder, attempt: &str, args: impl IntoIterator<Item = T>) -> Tries {
    let report = run(builder.env("HOTCELL_PROBE", Some("yes".into())).command(probe_argv(attempt, args)));
    assert_eq!(report.exit_code, Some(0), "the probe failed: {} {}", report.outcome, report.stderr.text());
    Tries::of(&report.stdout.kept)
}

/// A directory of this test's own, with a home for hotcell in it.
pub(crate) struct Bench {
    directory: tempfile::TempDir,
}

impl Drop for Bench {
    fn drop(&mut self) {
        // Guests close directories; a test that fails must not leave them behind.
        open_up(self.directory.path());
    }
}

/// Lets a directory be removed with all that is in it.
pub(crate) fn open_up(directory: &Path) {
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    if std::fs::set_permissions(directory, mode).is_ok() {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                open_up(&entry.path());
            }
        }
    }
}

impl Bench {
    pub(crate) fn new() -> Bench {
        let directory = tempfile::Builder::new().prefix("hotcell-test-").tempdir().expect("a temporary directory");
        Bench { directory }
    }

    /// As [`Bench::new`], on a directory of this test's own that is gone afterwards.
    pub(crate) fn on(directory: tempfile::TempDir) -> Bench {
        Bench { directory }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(path.parent().expect("a parent")).expect("directories");
        std::fs::write(&path, text).expect("written");
        path
    }

    pub(crate) fn dir(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        std::fs::create_dir_all(&path).expect("directories");
        path
    }

    /// The command line, with a home of its own.
    pub(crate) fn hotcell<T: AsRef<std::ffi::OsStr>>(&self, args: impl IntoIterator<Item = T>) -> Command {
        let mut command = self.command(HOTCELL.as_str());
        command.current_dir(self.directory.path()).args(args);
        command
    }

    /// Another program that will start hotcell.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("HOTCELL_HOME", self.path("home"));
        if cannot_leave_groups(&host()) {
            command.env("HOTCELL_ALLOW_MISSING", "groups");
        }
        command
    }

    pub(crate) fn output<T: AsRef<std::ffi::OsStr>>(&self, args: impl IntoIterator<Item = T>) -> Output {
        self.hotcell(args).output().expect("hotcell runs")
    }

    /// `run --json`, parsed, with the exit code.
    pub(crate) fn json<T: AsRef<std::ffi::OsStr>>(&self, args: impl IntoIterator<Item = T>) -> (Value, i32) {
        let start = ["run", "--json"].map(OsString::from);
        let output = self.output(start.into_iter().chain(args.into_iter().map(|one| one.as_ref().to_owned())));
        let value = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|_| panic!("no JSON: {} {}", text(&output.stdout), text(&output.stderr)));
        (value, output.status.code().unwrap_or(-1))
    }
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Waits for a condition, for as long as a loaded machine may need.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let give_up = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < give_up, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Pids of processes that have this word among their arguments, other than hotcell itself.
pub(crate) fn processes_with(word: &str) -> Vec<i32> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").expect("/proc").flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let mut words = line.split(|byte| *byte == 0);
        let ours = words.next().is_some_and(|program| program == HOTCELL.as_bytes());
        if !ours && words.any(|argument| argument == word.as_bytes()) {
            found.push(pid);
        }
    }
    found
}

/// Pids of processes that work in this directory: spawners, which have no arguments to know them by.
pub(crate) fn processes_in(directory: &Path) -> Vec<i32> {
    let directory = directory.canonicalize().expect("a directory");
    let here = |pid: &i32| std::fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd == directory);
    let pids = std::fs::read_dir("/proc").expect("/proc").flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok()).filter(here).collect()
}

/// A word no other test uses.
pub(crate) fn token() -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("token-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Directories below a cgroup tree whose name has this word.
pub(crate) fn cgroups_with(word: &str) -> Vec<PathBuf> {
    fn walk(directory: &Path, word: &str, depth: u32, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if entry.file_name().to_string_lossy().contains(word) {
                    found.push(entry.path());
                } else if depth > 0 {
                    walk(&entry.path(), word, depth - 1, found);
                }
            }
        }
    }
    let mut found = Vec::new();
    walk(Path::new("/sys/fs/cgroup"), word, 6, &mut found);
    found
}

/// Sees nothing of a run.
pub(crate) struct Nobody;

impl hotcell_cell::Observer for Nobody {
    fn output(&mut self, _: hotcell_cell::Stream, _: &[u8]) -> std::io::Result<()> {
        Ok(())
    }
}
