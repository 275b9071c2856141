//! What attempts are made with: a directory of the selftest's own, cells, and the probe's answers.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use hotcell_cell::pool::{Ahead, Pool};
use hotcell_cell::template::{Template, TemplateError};
use hotcell_cell::{Builder, Cell, Host, Limits, Mode, Observer, Plan, Report, RunError, Session, Stdin, Stream, Wall};
use hotcell_gate::live::ProcessName;
use serde_json::Value;

use super::verdict::Missing;
use crate::cli::CellsArg;
use crate::error::Failure;

/// Without these a process of root's is root.
pub(super) const PRIVILEGE: &[Wall] = &[Wall::Id, Wall::Caps, Wall::Groups];

/// Where cells begin.
const HERE: &str = "here";

/// Words as arguments.
pub(super) fn words(words: &[&str]) -> Vec<OsString> {
    words.iter().map(Into::into).collect()
}

/// A cell with walls left out.
pub(super) fn omit(builder: Builder, walls: &[Wall]) -> Builder {
    walls.iter().fold(builder, |builder, wall| builder.omit(*wall))
}

/// The selftest's own place, gone when it is dropped.
pub(super) struct Bench {
    pub(super) host: Host,
    directory: PathBuf,
    /// Left out of every cell that should be whole.
    missing: Option<Missing>,
    accepted: Vec<Wall>,
    cells: CellsArg,
    /// The probe, loaded, for cells that are to go on from it.
    template: Option<Arc<Template>>,
}

impl Bench {
    pub(super) fn new(host: &Host, missing: Option<Missing>, cells: CellsArg) -> Result<Bench, Failure> {
        let us = ProcessName::own();
        let directory = std::env::temp_dir().join(format!("hotcell-selftest-{}", us.file_name()));
        let accepted = crate::run::always_allowed_missing()?;
        let mut bench = Bench { host: host.clone(), directory, missing, accepted, cells, template: None };
        bench.prepare().map_err(|source| Failure::Io {
            message: format!("cannot use `{}`", bench.directory.display()),
            hint: Some("give it another place: TMPDIR=DIR hotcell selftest".to_owned()),
            source,
        })?;
        // A place where nothing can be executed would make every attempt look refused.
        let runs = Command::new(bench.probe()).arg("--version").output();
        if let Some(source) = runs.err() {
            return Err(Failure::Io {
                message: format!("nothing can be executed in `{}`", bench.directory.display()),
                hint: Some("give it another place: TMPDIR=DIR hotcell selftest".to_owned()),
                source,
            });
        }
        // On a machine where no cell stands there is nothing to try.
        bench.bare().command(["/bin/true"]).plan(host)?.run().map_err(|source| Failure::Refused {
            message: format!("no cell stands here: {source}"),
            hint: "see why and what would help: hotcell doctor".to_owned(),
        })?;
        if cells == CellsArg::Template {
            let argv = bench.probe_argv::<&str>(crate::probe::FROM_TEMPLATE, &[]);
            let plan = bench.bare().command(argv).plan(host)?;
            let memory = File::options().read(true).write(true).create_new(true).open(bench.path("memory"));
            let memory = memory.map_err(|source| TemplateError::Io { what: "the probe cannot be loaded", source })?;
            bench.template = Some(Arc::new(Template::warm(&plan, memory, &[])?));
        }
        Ok(bench)
    }

    /// Everybody may look in, so that a control fails at nothing but the wall.
    fn prepare(&self) -> io::Result<()> {
        fs::create_dir(&self.directory)?;
        fs::set_permissions(&self.directory, fs::Permissions::from_mode(0o755))?;
        // A copy: where this program is installed, a cell's user may not get to.
        fs::copy("/proc/self/exe", self.probe())?;
        fs::set_permissions(self.probe(), fs::Permissions::from_mode(0o755))?;
        self.file("secret", "selftest\n")?;
        self.fresh();
        Ok(())
    }

    pub(super) fn is_root(&self) -> bool {
        self.host.privileged
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// The program that makes attempts.
    pub(super) fn probe(&self) -> PathBuf {
        self.path("probe")
    }

    /// A file of the host's that no cell is given.
    pub(super) fn secret(&self) -> PathBuf {
        self.path("secret")
    }

    pub(super) fn file(&self, name: &str, text: &str) -> io::Result<PathBuf> {
        let path = self.path(name);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::write(&path, text)?;
        Ok(path)
    }

    /// Empties the place where attempts begin.
    pub(super) fn fresh(&self) {
        self.dir(HERE);
    }

    /// An empty directory that any user may write to.
    pub(super) fn dir(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        open_up(&path);
        // Made again by each attempt that wants it; an error shows when it is used.
        let _fresh = fs::remove_dir_all(&path);
        let _made =
            fs::create_dir_all(&path).and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o777)));
        path
    }

    /// A cell with every wall, but for what `--without` takes out of it.
    pub(super) fn whole(&self) -> Builder {
        match &self.missing {
            Some(missing) => missing.of(self.bare()),
            None => self.bare(),
        }
    }

    /// A cell for a control: with every wall until the control takes some out. Where it begins is a place of the
    /// selftest's own, also without a private root: attempts write to relative paths and to nothing else.
    pub(super) fn bare(&self) -> Builder {
        let builder = Cell::builder().env("HOTCELL_PROBE", Some("yes".into())).workspace(self.path(HERE), Mode::Cow);
        self.accepted.iter().fold(builder, |builder, wall| builder.allow_missing(*wall))
    }

    pub(super) fn probe_argv<T: AsRef<OsStr>>(&self, kind: &str, args: &[T]) -> Vec<OsString> {
        let start = [self.probe().into_os_string(), "probe".into(), kind.into()];
        start.into_iter().chain(args.iter().map(|one| one.as_ref().to_owned())).collect()
    }

    /// Runs a cell.
    pub(super) fn run(&self, builder: Builder) -> Result<Report, String> {
        let plan = builder.plan(&self.host).map_err(|error| format!("no plan: {error}"))?;
        self.run_plan(plan).map_err(|error| format!("the cell did not stand: {error}"))
    }

    fn run_plan(&self, plan: Plan) -> Result<Report, RunError> {
        let pooled = |plan: &Plan, ahead| Pool::open(plan.clone(), 1, ahead).and_then(|pool| pool.run());
        let ran = match self.cells {
            CellsArg::Run => plan.run(),
            CellsArg::OnDemand => pooled(&plan, Ahead::Station),
            CellsArg::Pool => pooled(&plan, Ahead::Cell),
            CellsArg::Session => in_session(plan.clone()),
            CellsArg::Template => {
                let is_probe = plan.program() == Some(&self.probe());
                match self.template.as_ref().filter(|_| is_probe) {
                    Some(template) => plan.clone().from_template(Arc::clone(template), 0).run(),
                    None => plan.run(),
                }
            }
        };
        match ran {
            // What writes in place has a cell of its own in any case.
            Err(RunError::InPlace) => plan.run(),
            ran => ran,
        }
    }

    /// Runs the probe under limits; how it ended.
    pub(super) fn act<T: AsRef<OsStr>>(
        &self,
        builder: Builder,
        limits: Limits,
        kind: &str,
        args: &[T],
    ) -> Result<Report, String> {
        self.run(builder.limits(limits).command(self.probe_argv(kind, args)))
    }

    /// Runs the probe; what the kernel answered.
    pub(super) fn tries<T: AsRef<OsStr>>(&self, builder: Builder, kind: &str, args: &[T]) -> Result<Tries, String> {
        let report = self.run(builder.command(self.probe_argv(kind, args)))?;
        if report.exit_code != Some(0) {
            return Err(format!("the probe ended as {}: {}", report.outcome, report.stderr.text().trim()));
        }
        Tries::of(&report.stdout.kept)
    }

    /// Runs the probe without any cell.
    pub(super) fn outside<T: AsRef<OsStr>>(&self, kind: &str, args: &[T]) -> Command {
        let argv = self.probe_argv(kind, args);
        let mut command = Command::new(&argv[0]);
        command.args(&argv[1..]).env("HOTCELL_PROBE", "yes");
        command
    }

    /// Hotcell itself, with a home of its own.
    pub(super) fn hotcell(&self, home: &Path, args: &[&str]) -> Command {
        let mut command = Command::new(self.probe());
        let accepted: Vec<&str> = self.accepted.iter().map(|wall| wall.name()).collect();
        command.env("HOTCELL_HOME", home).env("HOTCELL_ALLOW_MISSING", accepted.join(",")).args(args);
        command
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        open_up(&self.directory);
        // What is left is named after this process, and `hotcell gc` finds it.
        let _found_later = fs::remove_dir_all(&self.directory);
    }
}

/// Runs a plan's command as the only one of a session.
fn in_session(plan: Plan) -> Result<Report, RunError> {
    let mut kept = Kept::default();
    let mut session = Session::open(plan, &mut kept)?;
    let plan = session.plan().clone();
    let mut report = session.exec_with(&plan, Stdin::Null, &mut kept, None)?;
    [report.stdout.kept, report.stderr.kept] = std::mem::take(&mut kept.streams);
    let left = session.close(&mut kept)?;
    (report.changes, report.control) = (left.changes, left.control);
    Ok(report)
}

/// Keeps output in memory.
#[derive(Default)]
struct Kept {
    streams: [Vec<u8>; 2],
}

impl Observer for Kept {
    fn output(&mut self, stream: Stream, bytes: &[u8]) -> io::Result<()> {
        self.streams[usize::from(stream == Stream::Stderr)].extend_from_slice(bytes);
        Ok(())
    }
}

/// Attempts close directories to see whether we get in; ours are ours to open again.
fn open_up(directory: &Path) {
    let _as_far_as_we_may = fs::set_permissions(directory, fs::Permissions::from_mode(0o700));
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            open_up(&entry.path());
        }
    }
}

/// What the kernel answered to each try.
pub(super) struct Tries(Vec<(String, String, i64)>);

/// The kernel has no such call, or no such kind of socket, at all: its control means nothing.
const UNKNOWN: &[i64] = &[38, 93, 97];

impl Tries {
    pub(super) fn of(stdout: &[u8]) -> Result<Tries, String> {
        let none = || format!("the probe said nothing: {}", String::from_utf8_lossy(stdout).trim());
        let value: Value = serde_json::from_slice(stdout).map_err(|_| none())?;
        let tries = value["tries"].as_array().filter(|tries| !tries.is_empty()).ok_or_else(none)?;
        let field = |one: &Value, name: &str| one[name].as_str().unwrap_or_default().to_owned();
        Ok(Tries(
            tries
                .iter()
                .map(|one| (field(one, "try"), field(one, "result"), one["errno"].as_i64().unwrap_or(0)))
                .collect(),
        ))
    }

    /// What got through, if anything did.
    pub(super) fn through(&self) -> Option<String> {
        let through: Vec<&str> =
            self.0.iter().filter(|(_, result, _)| result != "refused").map(|(name, ..)| name.as_str()).collect();
        (!through.is_empty()).then(|| format!("got through: {}", through.join(", ")))
    }

    /// As [`Tries::through`], where this answer is as good as a refusal.
    pub(super) fn through_but(mut self, errno: i64) -> Option<String> {
        self.0.retain(|(.., found)| *found != errno);
        self.through()
    }

    /// What did not succeed.
    pub(super) fn not_done(&self) -> Option<String> {
        let failed = self.0.iter().filter(|(_, result, _)| result != "done");
        let failed: Vec<String> = failed.map(|(name, _, errno)| format!("{name} ({errno})")).collect();
        (!failed.is_empty()).then(|| format!("failed without the wall too: {}", failed.join(", ")))
    }

    /// Calls this kernel does not have, which nobody can try here.
    pub(super) fn unknown(&self) -> Option<String> {
        let unknown: Vec<&str> =
            self.0.iter().filter(|(.., errno)| UNKNOWN.contains(errno)).map(|(name, ..)| name.as_str()).collect();
        (!unknown.is_empty()).then(|| format!("not tried, this kernel has none: {}", unknown.join(", ")))
    }

    /// What was refused although nothing stood in its way. Calls this kernel does not have are passed over, unless it
    /// has none of them.
    pub(super) fn refused_without(&self) -> Option<String> {
        let known: Vec<_> = self.0.iter().filter(|(.., errno)| !UNKNOWN.contains(errno)).collect();
        if known.is_empty() {
            return Some("this kernel has none of these calls".to_owned());
        }
        let refused: Vec<String> = known
            .iter()
            .filter(|(_, result, _)| result == "refused")
            .map(|(name, _, errno)| format!("{name} ({errno})"))
            .collect();
        (!refused.is_empty()).then(|| format!("refused without the wall too: {}", refused.join(", ")))
    }
}
