//! Errors at the edge: the message, its causes, a hint that is a command, and an exit code.

use std::error::Error;

use hotcell_base::Outcome;
use hotcell_base::text::{shown, shown_path};
use hotcell_cell::cgroup::NoGroup;
use hotcell_cell::needs::CommandError;
use hotcell_cell::template::{SnapshotError, TemplateError};
use hotcell_cell::{HostError, PlanError, RunError, Wall};
use hotcell_gate::leases::IssueError;
use hotcell_gate::session::{Refusal, SessionError};
use hotcell_gate::{AuthorityError, DiffError, GateError, HomeError, KeysError, PackError, RecordError};
use hotcell_ledger::LedgerError;
use hotcell_store::StoreError;

/// Anything that ends a command of ours.
#[derive(Debug)]
pub(crate) enum Failure {
    Host(HostError),
    Home(HomeError),
    Plan(PlanError),
    Gate(Box<GateError>),
    Record(RecordError),
    Diff(DiffError),
    Pack(PackError),
    Session(SessionError),
    Template(TemplateError),
    Authority(Box<AuthorityError>),
    Issue(Box<IssueError>),
    /// A wrong use that the parser could not see.
    Usage {
        message: String,
        hint: String,
    },
    /// Something to be read or written at the edge.
    Io {
        message: String,
        hint: Option<String>,
        source: std::io::Error,
    },
    /// A request that was understood and refused.
    Refused {
        message: String,
        hint: String,
    },
}

/// Where a failure happened: `run` has its own codes, because most codes are its command's.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum During {
    Run,
    Other,
}

impl Failure {
    /// The message and every cause, each once.
    pub(crate) fn chain(&self) -> Vec<String> {
        let (message, mut source): (String, Option<&dyn Error>) = match self {
            Failure::Host(error) => (error.to_string(), error.source()),
            Failure::Home(error) => (error.to_string(), error.source()),
            Failure::Plan(error) => (error.to_string(), error.source()),
            Failure::Gate(error) => (error.to_string(), error.source()),
            Failure::Record(error) => (error.to_string(), error.source()),
            Failure::Diff(error) => (error.to_string(), error.source()),
            Failure::Pack(error) => (error.to_string(), error.source()),
            Failure::Session(SessionError::Refused(refusal)) => return refusal.chain.clone(),
            Failure::Session(error) => (error.to_string(), error.source()),
            Failure::Template(error) => (error.to_string(), error.source()),
            Failure::Authority(error) => (error.to_string(), error.source()),
            Failure::Issue(error) => (error.to_string(), error.source()),
            Failure::Usage { message, .. } | Failure::Refused { message, .. } => (message.clone(), None),
            Failure::Io { message, source, .. } => (message.clone(), Some(source)),
        };
        let mut chain = vec![message];
        if let Failure::Pack(error) = self {
            chain.extend(in_the_way(error));
        }
        while let Some(error) = source {
            let text = error.to_string();
            if chain.last() != Some(&text) {
                chain.push(text);
            }
            source = error.source();
        }
        chain
    }

    /// What to try next.
    pub(crate) fn hint(&self) -> Option<String> {
        Some(match self {
            Failure::Host(HostError::NoProc { .. }) => "mount it: mount -t proc proc /proc".to_owned(),
            Failure::Host(HostError::NoCwd(_)) => "change to a directory that exists: cd ~".to_owned(),
            Failure::Host(HostError::NoStaging(_)) => "make one of them: mkdir /tmp".to_owned(),
            Failure::Home(HomeError::Make { .. }) => {
                "choose a place that can be written: hotcell --home DIR …, or set HOTCELL_HOME".to_owned()
            }
            Failure::Home(HomeError::Unknown { path }) => {
                format!(
                    "if it is yours, name it: hotcell --home '{}' …; else keep runs elsewhere: HOTCELL_HOME=DIR",
                    shown_path(path)
                )
            }
            Failure::Home(HomeError::NotPrivate { path, .. }) => format!("close it: chmod 700 '{}'", shown_path(path)),
            Failure::Home(_) => "choose another place: hotcell --home DIR …, or set HOTCELL_HOME".to_owned(),
            Failure::Plan(error) => return plan_hint(error),
            Failure::Gate(error) => return gate_hint(error),
            Failure::Diff(DiffError::Record(RecordError::NotFound(_))) => "list the runs: hotcell ls".to_owned(),
            Failure::Diff(DiffError::NoCopy { .. }) => {
                "run it on a copy: hotcell run -w DIR --mode cow -- COMMAND".to_owned()
            }
            Failure::Diff(_) => "see how it ended: hotcell show RUN".to_owned(),
            Failure::Pack(error) => pack_hint(error),
            Failure::Record(RecordError::NotFound(_)) => "list the runs: hotcell ls".to_owned(),
            Failure::Record(RecordError::Ambiguous { .. }) => "give more of the id: hotcell ls".to_owned(),
            Failure::Record(RecordError::Damaged { path, .. }) => format!("look at it: less '{}'", shown_path(path)),
            Failure::Record(_) => "look at the rights there: ls -ld on that path".to_owned(),
            Failure::Session(error) => return session_hint(error),
            Failure::Template(error) => return template_hint(error),
            Failure::Authority(error) => return authority_hint(error),
            Failure::Issue(error) => return issue_hint(error),
            Failure::Usage { hint, .. } | Failure::Refused { hint, .. } => hint.clone(),
            Failure::Io { hint, .. } => return hint.clone(),
        })
    }

    /// The exit code.
    pub(crate) fn code(&self, during: During) -> u8 {
        match (during, self) {
            (During::Run, Failure::Plan(error)) => match outcome(error) {
                Outcome::NotFound => 127,
                Outcome::NotExecutable => 126,
                _ => 125,
            },
            (During::Run, Failure::Session(SessionError::Refused(Refusal { outcome, .. }))) => match outcome {
                Outcome::Killed => 137,
                Outcome::NotFound => 127,
                Outcome::NotExecutable | Outcome::PolicyDenied => 126,
                _ => 125,
            },
            (During::Run, _) if self.outcome() == Outcome::PolicyDenied => 126,
            (During::Run, _) => 125,
            (During::Other, Failure::Issue(error)) => match **error {
                IssueError::Authority(AuthorityError::Draft(_)) => 2,
                IssueError::Authority(_) => 1,
                _ => 3,
            },
            (During::Other, Failure::Authority(error)) => match **error {
                AuthorityError::Keys(KeysError::Exists(_)) => 3,
                AuthorityError::Draft(_) => 2,
                _ => 1,
            },
            (During::Other, Failure::Session(SessionError::Exists(_))) => 3,
            (During::Other, Failure::Session(SessionError::Name(_))) => 2,
            (During::Other, Failure::Usage { .. }) => 2,
            (During::Other, Failure::Refused { .. }) => 3,
            (
                During::Other,
                Failure::Pack(
                    PackError::Truncated(_)
                    | PackError::Control(_)
                    | PackError::NotControl(_)
                    | PackError::Closed(_)
                    | PackError::Needed(_)
                    | PackError::Conflicts { .. }
                    | PackError::Busy(_)
                    | PackError::Stuck { .. }
                    | PackError::NotApplied { .. },
                ),
            ) => 3,
            (During::Other, Failure::Host(_)) => 4,
            (During::Other, _) => 1,
        }
    }

    /// The outcome to report for a run that did not happen.
    pub(crate) fn outcome(&self) -> Outcome {
        match self {
            Failure::Plan(error) => outcome(error),
            Failure::Session(SessionError::Refused(refusal)) => refusal.outcome,
            Failure::Gate(error) => match **error {
                GateError::Refused { .. } | GateError::Issue(_) | GateError::TooLittle(_) => Outcome::PolicyDenied,
                GateError::Attempt { .. } => Outcome::Unknown,
                _ => Outcome::PlatformError,
            },
            _ => Outcome::PlatformError,
        }
    }
}

/// The paths that stood in the way, as many as a person reads.
fn in_the_way(error: &PackError) -> Vec<String> {
    const SHOWN_MAX: usize = 10;
    let lines: Vec<String> = match error {
        PackError::Control(paths) | PackError::Closed(paths) => paths.iter().map(shown_path).collect(),
        PackError::Conflicts { conflicts, .. }
        | PackError::Stuck { conflicts, .. }
        | PackError::Failed { saved: conflicts, .. } => {
            conflicts.iter().map(|conflict| format!("{} {}", shown_path(&conflict.path), conflict.why)).collect()
        }
        _ => Vec::new(),
    };
    let more = lines.len().saturating_sub(SHOWN_MAX);
    let rest = (more > 0).then(|| format!("and {more} more"));
    lines.into_iter().take(SHOWN_MAX).chain(rest).collect()
}

fn session_hint(error: &SessionError) -> Option<String> {
    Some(match error {
        SessionError::Name(_) => {
            "a name has 1 to 64 letters, digits, dots, dashes or underscores, begins with a letter or digit, and not with `run-`"
                .to_owned()
        }
        SessionError::NotFound(name) => {
            format!("make it: hotcell create {}; see which there are: hotcell ls --sessions", shown(name))
        }
        SessionError::Exists(name) => {
            format!("use it: hotcell exec {0} -- COMMAND; or end it first: hotcell rm {0}", shown(name))
        }
        SessionError::Over(name) => format!("see how it ended: hotcell show {}", shown(name)),
        SessionError::Refused(refusal) => return refusal.hint.clone(),
        SessionError::Gate(error) => return gate_hint(error),
        SessionError::Io { .. } => "see whether it is there: hotcell ls --sessions".to_owned(),
    })
}

fn template_hint(error: &TemplateError) -> Option<String> {
    Some(match error {
        TemplateError::Plan(error) => return plan_hint(error),
        TemplateError::Run(error) => return run_hint(error),
        TemplateError::Ended { .. } => {
            "a template loads what is installed with its program, and nothing of a workspace or mount; see what it says: \
             hotcell run -- python3 -c 'import MODULE'"
                .to_owned()
        }
        TemplateError::Snapshot(SnapshotError::Threads(_)) => {
            "import the module in the program instead, or keep it from starting threads: \
             hotcell run --template python -e OPENBLAS_NUM_THREADS=1 -e OMP_NUM_THREADS=1 …"
                .to_owned()
        }
        TemplateError::Snapshot(SnapshotError::Trace { .. }) => {
            "see whether tracing is allowed here: cat /proc/sys/kernel/yama/ptrace_scope".to_owned()
        }
        TemplateError::Snapshot(_) => "import the module in the program, and not in the template".to_owned(),
        TemplateError::Io { .. } => {
            "look at the space and the rights there: df -h and ls -ld on the home's templates".to_owned()
        }
    })
}

fn gate_hint(error: &GateError) -> Option<String> {
    Some(match error {
        GateError::Record(_) | GateError::Unrecorded { .. } => {
            "look at the space and the rights there: df -h and ls -ld on that path".to_owned()
        }
        GateError::Untold { .. } => "find out what is wrong with the ledger: hotcell audit verify".to_owned(),
        GateError::Refused { source, .. } => lease_hint(source),
        GateError::Issue(error) => return issue_hint(error),
        GateError::Authority(error) => return authority_hint(error),
        GateError::Attempt { run_id, .. } => format!("see what is known of it: hotcell show {run_id}"),
        GateError::TooLittle(_) => "ask for a wider lease: hotcell lease issue --help".to_owned(),
        GateError::Turn { .. } => "start it again when fewer are starting: hotcell ls".to_owned(),
        GateError::Warm { source, .. } => return template_hint(source),
        GateError::Run { source, .. } => return run_hint(source),
    })
}

/// What to try when a lease does not hold, or does not allow it.
pub(crate) fn lease_hint(refusal: &hotcell_authority::Refusal) -> String {
    use hotcell_authority::Refusal as R;
    match refusal {
        R::NotFound => "see which there are: hotcell lease list".to_owned(),
        R::Unreadable(_) | R::Signature => "have it issued again: hotcell lease issue".to_owned(),
        R::NoTrust | R::UnknownKey(_) => {
            "see who is trusted: hotcell key list; trust somebody: hotcell key trust".to_owned()
        }
        R::Key { .. } | R::Cosignature(_) => "see who is trusted, and for what: hotcell key list".to_owned(),
        R::Future => "look at the clock: date -u".to_owned(),
        R::Limit(_) => {
            "ask for a wider one: hotcell lease issue --help; see what it grants: hotcell lease show".to_owned()
        }
        R::Expired | R::Revoked | R::Exhausted | R::PolicyDigest => "ask for another: hotcell lease issue".to_owned(),
        R::Policy(_) => "see what can be permitted: hotcell policy show".to_owned(),
        R::Audience(_) => "issue it for this home: hotcell lease issue".to_owned(),
        R::Approval(_) => "it needs another's signature; see what it says: hotcell lease show".to_owned(),
        R::Command(_) => "see what it allows: hotcell lease show, hotcell policy show".to_owned(),
        R::Path(_) | R::ReadOnly(_) | R::Env(_) => "see what it allows: hotcell lease show".to_owned(),
        R::Parent { id, .. } => format!("see what became of it: hotcell lease show {id}"),
    }
}

pub(crate) fn issue_hint(error: &IssueError) -> Option<String> {
    Some(match error {
        IssueError::Beyond(_) | IssueError::NoCapability(_) => {
            "see what can be permitted: hotcell policy show; change it in policy.toml of the home".to_owned()
        }
        IssueError::Wider { parent, .. } => format!("see what it may grant: hotcell lease show {parent}"),
        IssueError::Parent(refusal) => lease_hint(refusal),
        IssueError::Authority(error) => return authority_hint(error),
    })
}

pub(crate) fn authority_hint(error: &AuthorityError) -> Option<String> {
    Some(match error {
        AuthorityError::Keys(KeysError::NotPrivate { path, .. }) => {
            format!("close it: chmod 600 '{}'", shown_path(path))
        }
        AuthorityError::Keys(KeysError::Exists(_)) => "put another in its place: hotcell key rotate".to_owned(),
        AuthorityError::Keys(KeysError::Trust { .. }) => "see who is trusted: hotcell key list".to_owned(),
        AuthorityError::Keys(_) => "look at the keys of the home: ls -l on its keys and trust.json".to_owned(),
        AuthorityError::Unreadable { path, .. } => format!("look at it: ls -l '{}'", shown_path(path)),
        AuthorityError::Policy { .. } => "see what is wrong with it: hotcell policy check".to_owned(),
        AuthorityError::Ledger(LedgerError::Io { .. }) => {
            "look at the space and the rights in the home: df -h and ls -ld on its ledger".to_owned()
        }
        AuthorityError::Ledger(_) => {
            "find out what was changed: hotcell audit verify; accept the loss: hotcell audit recover --yes".to_owned()
        }
        AuthorityError::Store(StoreError::Newer { .. }) => "use the newer hotcell that made it".to_owned(),
        AuthorityError::Store(_) => "it is made of the ledger: move hotcell.db away, and it is made again".to_owned(),
        AuthorityError::Draft(_) => "see how it is asked for: hotcell lease issue --help".to_owned(),
        AuthorityError::Keep(_) => {
            "look at the space and the rights in the home: df -h and ls -ld on its leases".to_owned()
        }
    })
}

fn pack_hint(error: &PackError) -> String {
    match error {
        PackError::Truncated(_) => "run it again in a smaller part of the tree: hotcell run -w DIR …".to_owned(),
        PackError::Control(paths) => {
            let first = paths.first().map_or_else(String::new, shown_path);
            let each = if paths.len() > 1 { ", and so for each" } else { "" };
            format!(
                "leave it out: hotcell apply RUN --except '{first}'; or, having read it: --allow-control '{first}'{each}"
            )
        }
        PackError::Closed(paths) => {
            let first = paths.first().map_or_else(String::new, shown_path);
            format!("leave it out: hotcell apply RUN --except '{first}'")
        }
        PackError::Needed(_) => "lead the tree back first: hotcell gc --yes".to_owned(),
        PackError::NotControl(_) => "see which ones there are: hotcell diff --stat on that run".to_owned(),
        PackError::Conflicts { .. } => {
            "look at each of them: put it back to what it was, or leave it out and run again on the tree as it is now"
                .to_owned()
        }
        PackError::Busy(_) => "try again when it is over: hotcell ls".to_owned(),
        PackError::NotFound(_) => "the id is what hotcell apply printed; or give the run: hotcell ls".to_owned(),
        PackError::NotApplied { .. } => "see all of them: hotcell undo --list".to_owned(),
        PackError::Stuck { pack, .. } => {
            format!(
                "move what is yours out of the way and try again: hotcell undo {pack}; its originals are in rollback/{pack}/originals of the home"
            )
        }
        PackError::Tree { .. } => "see what is there: ls -ld on that path".to_owned(),
        PackError::Failed { source, .. } if !is_about_storage(source) => {
            "see who works there, and try again: hotcell ls".to_owned()
        }
        PackError::Failed { .. } | PackError::Record(_) => {
            "look at the space and the rights there: df -h and ls -ld on that path".to_owned()
        }
        PackError::Halfway { .. } => "mend what the cause names, then: hotcell gc --yes".to_owned(),
    }
}

fn outcome(error: &PlanError) -> Outcome {
    match error {
        PlanError::Command(CommandError::NotFound(_)) => Outcome::NotFound,
        PlanError::Command(_) => Outcome::NotExecutable,
        _ => Outcome::PlatformError,
    }
}

fn plan_hint(error: &PlanError) -> Option<String> {
    Some(match error {
        PlanError::NoCommand => "give one after --: hotcell run -- echo hello".to_owned(),
        PlanError::Command(CommandError::NotFound(name)) => {
            let name = shown(std::os::unix::ffi::OsStrExt::as_bytes(name.as_os_str()));
            format!("look for it: command -v '{name}'; a file of your project is found with --workspace DIR")
        }
        PlanError::Command(CommandError::Directory(_)) => "give a program: hotcell run -- ls DIR".to_owned(),
        PlanError::Command(CommandError::NotExecutable(path)) => {
            format!("make it executable: chmod +x '{}'", shown_path(path))
        }
        PlanError::Limit(limit) => {
            format!("give more: hotcell run --{} {} …", limit.limit, limit.least.replace(' ', ""))
        }
        PlanError::Path { .. } => "see what is there: ls -ld on that path".to_owned(),
        PlanError::Unreadable { source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
            "see what is there: ls -ld on the directory above it".to_owned()
        }
        PlanError::Unreadable { .. } => "see who may read it: ls -ld on that path".to_owned(),
        PlanError::NulByte { .. } => "remove the NUL byte: no program can be given one".to_owned(),
        PlanError::TooManyOwners { .. } => "mount fewer paths of different owners".to_owned(),
        PlanError::VariableName(_) => "write it NAME=VALUE: -e LANG=C".to_owned(),
        PlanError::Wall { wall, .. } => wall_hint(*wall),
        PlanError::Wider(_) => {
            "ask for less, or make a session that has more: hotcell create --help, under Limits".to_owned()
        }
    })
}

fn run_hint(error: &RunError) -> Option<String> {
    Some(match error {
        RunError::Wall { source: Some(source), .. }
            if source.raw_os_error() == Some(rustix::io::Errno::MFILE.raw_os_error()) =>
        {
            "let it open more files: ulimit -n 1024".to_owned()
        }
        RunError::Wall { wall, .. } => wall_hint(*wall),
        RunError::Cgroup(NoGroup::Full { .. }) => {
            "remove files in /tmp and /dev/shm of the cell, or give the command more memory".to_owned()
        }
        RunError::Cgroup(_) => wall_hint(Wall::Cgroup),
        RunError::WorkingDirectory { .. } => "give one that exists inside: -C /tmp".to_owned(),
        RunError::Foreign => "plan it for the session or pool it runs in: Plan::exec".to_owned(),
        RunError::InPlace => "run it without a pool: hotcell run".to_owned(),
        RunError::Platform { source, .. } if is_about_storage(source) => {
            "look at the space and the rights in the home: df -h and ls -ld on it".to_owned()
        }
        RunError::Platform { .. } => "see what this machine can do: hotcell doctor".to_owned(),
    })
}

/// Whether a disk is full, or cannot be written.
fn is_about_storage(error: &std::io::Error) -> bool {
    use std::io::ErrorKind;
    let kinds =
        [ErrorKind::StorageFull, ErrorKind::ReadOnlyFilesystem, ErrorKind::QuotaExceeded, ErrorKind::FileTooLarge];
    let mut cause: Option<&dyn Error> = Some(error);
    while let Some(one) = cause {
        if one.downcast_ref::<std::io::Error>().is_some_and(|error| kinds.contains(&error.kind())) {
            return true;
        }
        // A wrapped error keeps its cause behind itself.
        cause = match one.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref) {
            Some(inner) => Some(inner),
            None => one.source(),
        };
    }
    false
}

fn wall_hint(wall: Wall) -> String {
    format!(
        "see why and what would help: hotcell doctor; or, knowing what it costs: hotcell run --allow-missing {wall} …"
    )
}

macro_rules! from {
    ($($error:ty => $variant:expr),* $(,)?) => {
        $(impl From<$error> for Failure {
            fn from(error: $error) -> Failure {
                $variant(error)
            }
        })*
    };
}

from! {
    HostError => Failure::Host,
    HomeError => Failure::Home,
    PlanError => Failure::Plan,
    RecordError => Failure::Record,
    DiffError => Failure::Diff,
    PackError => Failure::Pack,
    SessionError => Failure::Session,
    TemplateError => Failure::Template,
    AuthorityError => |error| Failure::Authority(Box::new(error)),
    IssueError => |error| Failure::Issue(Box::new(error)),
    GateError => |error| Failure::Gate(Box::new(error)),
}
