//! Templates: a program that is loaded once, in a cell, and from which runs begin that need not load it again.
//!
//! ```text
//! Template::warm ─▶ a cell, all walls ─▶ the program loads what it will need and stops itself ─▶ Snapshot
//! Plan::from_template ─▶ run, pool, session ─▶ a new cell, all walls ─▶ its process goes on from the snapshot
//! ```
//!
//! A run has a cell of its own like any other: its own mounts, processes, limits, descriptors and seed. What it has from
//! the template is the contents of memory, each run a private copy of pages that nobody can write. So no run sees what
//! another did, and what the program was made to load had no more rights than any guest.
//!
//! The program may be any that stops itself with `SIGSTOP` when it is ready and reads its request from descriptor 3 when
//! it goes on; [`python`] is one. What is common to all runs of a template, and would not be of programs that are loaded
//! each time: where things are in memory, and whatever the program drew at random before it stopped.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hotcell_base::{ExactPath, Outcome};
use hotcell_sys::program::Slot;
use hotcell_sys::snapshot::Words;
pub use hotcell_sys::snapshot::{Snapshot, SnapshotError};
use rustix::fs::MemfdFlags;
use rustix::mount::OpenTreeFlags;
use serde::{Deserialize, Serialize};

use crate::needs;
use crate::plan::{Builder, Plan, PlanError};
use crate::report::Report;
use crate::run::strays::{self, group_name};
use crate::run::{Memory, Observer, RemoteEnd, RunError, Stdin, Stream, remote};
use crate::session::Session;
use crate::view::Entry;

/// A program that was loaded.
#[derive(Debug)]
pub struct Template {
    snapshot: Snapshot,
    memory: OwnedFd,
    /// Files it was made of, and how they were.
    sources: Vec<Source>,
}

/// A file that a template was made of.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Source {
    /// Where, outside.
    path: ExactPath,
    /// Device, inode, size and the moment it was last changed; none if it is not there outside.
    state: Option<(u64, u64, u64, i64, i64)>,
}

impl Source {
    fn of(path: &Path) -> Source {
        let state = |file: &std::fs::Metadata| (file.dev(), file.ino(), file.len(), file.ctime(), file.ctime_nsec());
        Source { path: path.into(), state: std::fs::metadata(path).ok().as_ref().map(state) }
    }

    /// Whether it is as it was.
    pub fn is_unchanged(&self) -> bool {
        Source::of(&self.path.0) == *self
    }
}

/// Why there is no template.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// There is no plan for loading it.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Its cell failed.
    #[error("the program to begin from cannot be loaded")]
    Run(#[from] RunError),
    /// It ended, or was ended, before it was ready.
    #[error("the program to begin from was not ready when it ended ({outcome}): {stderr}")]
    Ended {
        /// How.
        outcome: Outcome,
        /// What it said last.
        stderr: String,
    },
    /// It cannot be carried over.
    #[error("the program to begin from cannot be taken down")]
    Snapshot(#[from] SnapshotError),
    /// The machine failed us.
    #[error("{what}")]
    Io {
        /// What could not be done.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

/// The largest template.
const BYTES_MAX: u64 = 1 << 30;
/// So many files a template is made of at most; a program that names more cannot be kept an eye on.
const SOURCES_MAX: usize = 20_000;

/// The program of [`python`].
pub const PYTHON: &str = include_str!("python.py");

/// Arguments with which [`python`] does nothing but stop itself.
pub const PYTHON_TRIAL: &[&str] = &["-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"];

/// A request for a Python that has these modules loaded.
pub fn python(builder: Builder, program: &str, imports: &[String]) -> Builder {
    let words = [program, "-c", PYTHON].into_iter().chain(imports.iter().map(String::as_str));
    builder.command(words.map(str::to_owned))
}

impl Template {
    /// Runs a plan's command until it stops itself, and takes it down; its memory goes to the file. `trial` are arguments
    /// with which it does nothing but stop itself again: what it writes to then, every run writes to.
    pub fn warm(plan: &Plan, memory: File, trial: &[&str]) -> Result<Template, TemplateError> {
        strays::sweep(&plan.host.cgroups);
        let mut nobody = Memory::default();
        Template::warm_as(plan, &group_name("hotcell-template"), memory, trial, &mut nobody, None)
            .map(|(template, _)| template)
    }

    /// The same, with a name for its cgroup that nobody else has; see [`Plan::traces`]. Gives the report of the program
    /// that was taken down, too, which then was ended.
    pub fn warm_as(
        plan: &Plan,
        name: &str,
        memory: File,
        trial: &[&str],
        observer: &mut dyn Observer,
        remote: Option<&RemoteEnd>,
    ) -> Result<(Template, Report), TemplateError> {
        let mut session = Session::open_as(plan.clone(), name, observer)?;
        // Without walls that may be missing here.
        let plan = &session.plan().clone();
        // What it may use of memory, and the files it maps: the guest does not fill the host's disk by mapping them often.
        let most = plan.limits.memory.0.min(BYTES_MAX);
        let init = session.init_pid();
        let take = |pid| Snapshot::take(pid, init, &memory, most);
        let (snapshot, report) = at_stop(&mut session, plan, observer, remote, take)?;
        let snapshot = snapshot?;
        let said = report.stdout.kept.split(|byte| *byte == 0).filter(|path| path.starts_with(b"/"));
        let mut paths: BTreeSet<&Path> = said.map(|path| Path::new(OsStr::from_bytes(path))).collect();
        paths.extend(snapshot.files().iter().map(Path::new));
        if paths.len() > SOURCES_MAX {
            let source = io::Error::other(format!("it is made of more than {SOURCES_MAX} files"));
            return Err(failed("the program to begin from cannot be kept an eye on")(source));
        }
        // A guest's word decides about nothing that it could not see.
        let sources = paths.iter().filter_map(|path| outside(plan, path)).map(|path| Source::of(&path)).collect();
        let mut template = Template { snapshot, memory: nameless(memory), sources };
        if trial.is_empty() {
            return Ok((template, report));
        }
        let arguments = trial.iter().map(Into::into);
        let mut beginning = plan.clone();
        beginning.argv = plan.argv.iter().take(1).cloned().chain(arguments).collect();
        let copy = Template {
            snapshot: template.snapshot.clone(),
            memory: template.memory.try_clone().map_err(failed("the template cannot be tried"))?,
            sources: Vec::new(),
        };
        let beginning = beginning.from_template(Arc::new(copy), 0);
        let learn = |pid| template.snapshot.learn(pid);
        let (learnt, _) = at_stop(&mut session, &beginning, observer, remote, learn)?;
        learnt.map_err(failed("the template cannot be tried"))?;
        Ok((template, report))
    }

    /// One that was warmed before; `memory` is its file.
    pub fn load(snapshot: Snapshot, memory: File, sources: Vec<Source>) -> io::Result<Template> {
        // What lies where nothing may be executed is of use only as a copy.
        let is_noexec = rustix::fs::fstatvfs(&memory)?.f_flag.contains(rustix::fs::StatVfsMountFlags::NOEXEC);
        if !is_noexec {
            return Ok(Template { snapshot, memory: nameless(memory), sources });
        }
        let copy = File::from(rustix::fs::memfd_create("hotcell-template", MemfdFlags::CLOEXEC)?);
        io::copy(&mut &memory, &mut &copy)?;
        Ok(Template { snapshot, memory: copy.into(), sources })
    }

    /// Files it was made of: what the program says it loaded, and what is mapped.
    pub fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// All of it but the contents of its memory.
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    pub(crate) fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}

/// Where a file inside is outside, if it is the host's.
fn outside(plan: &Plan, path: &Path) -> Option<PathBuf> {
    let shown = plan.view.iter().rev().filter_map(|entry| match entry {
        Entry::Bind { source, target, device: false, .. } => Some((source, target)),
        Entry::Overlay { source, target, .. } => Some((source, target)),
        _ => None,
    });
    let below = |(source, target): (&PathBuf, &PathBuf)| Some(source.join(path.strip_prefix(target).ok()?));
    needs::normal(path).eq(path).then(|| shown.filter_map(below).next()).flatten()
}

/// What a run that begins from a template needs beside its plan.
#[derive(Clone, Debug)]
pub(crate) struct Beginning {
    pub(crate) template: Arc<Template>,
    pub(crate) seed: u64,
}

impl Beginning {
    fn text(&self, plan: &Plan) -> Text {
        let head = format!("{}\0{}\0", self.seed, plan.argv.len()).into_bytes();
        let arguments = plan.argv.iter().flat_map(|argument| [argument.as_bytes(), b"\0"].concat()).collect();
        let variable =
            |(name, value): (&OsString, &OsString)| [name.as_bytes(), b"=", value.as_bytes(), b"\0"].concat();
        Text { head, arguments, environment: plan.env.iter().flat_map(variable).collect() }
    }

    /// Where in the request, which is this descriptor, the words of a run are.
    pub(crate) fn words(&self, plan: &Plan, file: Slot) -> Words {
        let Text { head, arguments, environment } = self.text(plan);
        let [offset, n_argument_bytes, n_environment_bytes] =
            [head, arguments, environment].map(|part| part.len() as u64);
        Words { file, offset, n_argument_bytes, n_environment_bytes }
    }

    /// The request, as the program reads it from descriptor 3.
    pub(crate) fn request(&self, plan: &Plan) -> io::Result<OwnedFd> {
        let Text { head, arguments, environment } = self.text(plan);
        let text = [head, arguments, environment].concat();
        let mut memory = File::from(rustix::fs::memfd_create("hotcell-request", MemfdFlags::CLOEXEC)?);
        memory.write_all(&text)?;
        io::Seek::rewind(&mut memory)?;
        Ok(memory.into())
    }
}

/// The same file, of which `/proc/self/maps` does not tell a guest where it is, as far as we may have that.
fn nameless(file: File) -> OwnedFd {
    let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::AT_EMPTY_PATH | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    // A mount of nothing but this file, which is nowhere.
    let reopened = rustix::mount::open_tree(&file, "", clone).map_err(io::Error::from).and_then(|alone| {
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&alone));
        File::open(path)
    });
    reopened.unwrap_or(file).into()
}

/// A request: a seed and a number, so many words, and variables.
struct Text {
    head: Vec<u8>,
    arguments: Vec<u8>,
    environment: Vec<u8>,
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> TemplateError {
    move |source| TemplateError::Io { what, source }
}

/// Keeps what a command writes, for two.
struct Both<'a> {
    kept: Memory,
    other: &'a mut dyn Observer,
}

impl Observer for Both<'_> {
    fn output(&mut self, stream: Stream, bytes: &[u8]) -> io::Result<()> {
        self.kept.output(stream, bytes)?;
        self.other.output(stream, bytes)
    }
}

/// Runs a command until it stops itself, does something with it then, and ends it: what came of it, and its report.
fn at_stop<T: Send>(
    session: &mut Session,
    plan: &Plan,
    observer: &mut dyn Observer,
    asked: Option<&RemoteEnd>,
    act: impl FnOnce(i32) -> T + Send,
) -> Result<(T, Report), TemplateError> {
    const LOOK_EVERY: Duration = Duration::from_millis(1);
    let init = session.init_pid();
    let (remote, remote_end) = remote().map_err(failed("a pipe cannot be made"))?;
    let mut output = Both { kept: Memory::default(), other: observer };
    let is_over = AtomicBool::new(false);
    let (report, acted) = std::thread::scope(|scope| {
        let acting = scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                if let Some(pid) = stopped_child(init) {
                    let acted = act(pid);
                    // It is of no further use.
                    remote.kill();
                    return Some(acted);
                }
                if asked.is_some_and(RemoteEnd::is_asked) {
                    remote.kill();
                    return None;
                }
                std::thread::sleep(LOOK_EVERY);
            }
            None
        });
        let report = session.exec_with(plan, Stdin::Null, &mut output, Some(&remote_end));
        is_over.store(true, Ordering::Relaxed);
        (report, acting.join())
    });
    let mut report = report?;
    output.kept.give(&mut report);
    match acted.unwrap_or_else(|panic| std::panic::resume_unwind(panic)) {
        Some(acted) => Ok((acted, report)),
        None => {
            let stderr = report.stderr.text();
            let last = stderr.lines().last().unwrap_or("it said nothing").to_owned();
            Err(TemplateError::Ended { outcome: report.outcome, stderr: last })
        }
    }
}

/// A child of this process that stands still.
fn stopped_child(parent: i32) -> Option<i32> {
    let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).ok()?;
    let pids = children.split_ascii_whitespace().filter_map(|pid| pid.parse().ok());
    pids.into_iter().find(|pid: &i32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('T'))
    })
}
