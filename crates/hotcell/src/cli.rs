//! The command line: one definition of each flag, from which help, reference and completion come.

pub(crate) mod authority;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use hotcell_base::{Bytes, Cpus, Glob, units};
use hotcell_cell::{Limits, Mode, Wall};
use hotcell_gate::session::LimitChanges;

/// Runs code that nobody trusts yet, behind walls that are proven to stand.
#[derive(Parser, Debug)]
#[command(name = "hotcell", version, arg_required_else_help = true, disable_help_subcommand = true)]
pub(crate) struct Cli {
    /// Where runs are kept [default: $HOTCELL_HOME, the nearest .hotcell/ upward, or ~/.local/share/hotcell]
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) home: Option<PathBuf>,
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Cli {
    /// Reads the command line.
    pub(crate) fn read() -> Result<Cli, clap::Error> {
        // To describe all commands takes longer than to read one. Whatever is not understood is read again by all that
        // there is, for what is said of it.
        let lean = match std::env::args_os().nth(1).as_deref().and_then(OsStr::to_str) {
            Some("run") => Lean::read(|OnlyRun::Run(args)| Command::Run(args)),
            Some("exec") => Lean::read(|OnlyExec::Exec(args)| Command::Exec(args)),
            _ => None,
        };
        lean.map_or_else(Cli::try_parse, Ok)
    }
}

/// The command line with one command and no others.
#[derive(Parser, Debug)]
struct Lean<C: Subcommand> {
    #[arg(long, global = true)]
    home: Option<PathBuf>,
    #[command(subcommand)]
    command: C,
}

impl<C: Subcommand> Lean<C> {
    fn read(command: fn(C) -> Command) -> Option<Cli> {
        let lean = Lean::try_parse().ok()?;
        Some(Cli { home: lean.home, command: command(lean.command) })
    }
}

#[derive(Subcommand, Debug)]
enum OnlyRun {
    Run(Box<RunArgs>),
}

#[derive(Subcommand, Debug)]
enum OnlyExec {
    Exec(Box<ExecArgs>),
}

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Run a command in a cell
    Run(Box<RunArgs>),
    /// Make a session: a cell that stays, for one command after the other
    Create(Box<CreateArgs>),
    /// Run a command in a session
    Exec(Box<ExecArgs>),
    /// Copy files into a session, or out of one
    Cp(CpArgs),
    /// List runs, newest first
    Ls(LsArgs),
    /// Print what a run wrote
    Logs(LogsArgs),
    /// Show all that is known of a run
    Show(ShowArgs),
    /// Remove runs with their files; a session is ended first
    Rm(RmArgs),
    /// End a run or a session
    Stop(StopArgs),
    /// Show what a copy-on-write run would change
    Diff(DiffArgs),
    /// Make a run's changes to the workspace itself, with a way back
    Apply(ApplyArgs),
    /// Take applied changes back, exactly
    Undo(UndoArgs),
    /// Leases: permission to run commands, for a while
    #[command(subcommand)]
    Lease(Box<authority::LeaseCommand>),
    /// The policy: what can be permitted at all
    #[command(subcommand)]
    Policy(authority::PolicyCommand),
    /// Keys: who signs, and who is trusted
    #[command(subcommand)]
    Key(authority::KeyCommand),
    /// The ledger: what was allowed, refused and done
    #[command(subcommand)]
    Audit(authority::AuditCommand),
    /// Receipts: signed statements of what ran
    #[command(subcommand)]
    Receipt(authority::ReceiptCommand),
    /// See how things work together, with real values
    #[command(subcommand)]
    Demo(authority::DemoCommand),
    /// Clear away what crashes left
    Gc(GcArgs),
    /// Find out what this machine can do for this user, by trying it
    Doctor(DoctorArgs),
    /// Try to get out of a cell in every known way, on this machine
    Selftest(SelftestArgs),
    /// Try one escape and say how it went, as JSON (used by the tests)
    #[command(hide = true)]
    Probe(ProbeArgs),
    /// Print the command-line reference (docs/cli.md)
    #[command(hide = true)]
    Reference,
}

/// How the workspace appears inside.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum ModeArg {
    /// Not at all
    None,
    /// Read-only
    Ro,
    /// Writable inside, the host's files stay as they are, changes are listed
    Cow,
    /// Writable, changes are the host's at once
    Rw,
}

impl From<ModeArg> for Mode {
    fn from(mode: ModeArg) -> Mode {
        match mode {
            ModeArg::None => Mode::None,
            ModeArg::Ro => Mode::Ro,
            ModeArg::Cow => Mode::Cow,
            ModeArg::Rw => Mode::Rw,
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) cell: CellArgs,
    #[command(flatten)]
    pub(crate) start: StartArgs,
    /// Where stdin comes from: a file, `-` for ours, `null`, the default, for nowhere
    #[arg(long, value_name = "FILE", default_value = "null", help_heading = "Files", value_parser = clap::value_parser!(OsString))]
    pub(crate) stdin: OsString,

    /// Begin from a program that is loaded already: python, or a path to one; the command is what it is given
    #[arg(long, value_name = "PROGRAM", help_heading = "Template", conflicts_with = "lease")]
    pub(crate) template: Option<String>,
    /// A module that the template has loaded
    #[arg(long, value_name = "MODULE", help_heading = "Template", requires = "template", value_delimiter = ',')]
    pub(crate) import: Vec<String>,
    /// What the program draws from at random [default: another each time]
    #[arg(long, value_name = "N", help_heading = "Template", requires = "template")]
    pub(crate) seed: Option<u64>,

    #[command(flatten)]
    pub(crate) limits: LimitArgs,
    #[command(flatten)]
    pub(crate) permission: PermissionArgs,
    #[command(flatten)]
    pub(crate) records: RecordArgs,

    /// Print the plan and run nothing
    #[arg(long, help_heading = "Output")]
    pub(crate) explain: bool,
    #[command(flatten)]
    pub(crate) output: OutputArgs,

    /// The command and its arguments
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true)]
    pub(crate) command: Vec<OsString>,
}

#[derive(Args, Debug)]
pub(crate) struct CreateArgs {
    /// What it is called
    #[arg(value_parser = name)]
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) cell: CellArgs,
    /// A program its commands will need, wherever it is installed
    #[arg(long, value_name = "PROGRAM", help_heading = "Files", value_parser = clap::value_parser!(OsString))]
    pub(crate) with: Vec<OsString>,
    #[command(flatten)]
    pub(crate) start: StartArgs,
    #[command(flatten)]
    pub(crate) limits: LimitArgs,

    /// End it when it has had no command for so long
    #[arg(long, value_name = "TIME", value_parser = units::duration, default_value = "30m", help_heading = "Life")]
    pub(crate) idle: Duration,
    /// End it after so long in any case
    #[arg(long, value_name = "TIME", value_parser = units::duration, default_value = "1d", help_heading = "Life")]
    pub(crate) life: Duration,

    /// Label to find it by
    #[arg(long, value_name = "KEY=VALUE", help_heading = "Records", value_parser = label)]
    pub(crate) label: Vec<(String, String)>,
    /// Print one JSON object
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
    /// Be the session's host, and not whoever starts it
    #[arg(long, hide = true)]
    pub(crate) as_host: bool,
}

#[derive(Args, Debug)]
pub(crate) struct ExecArgs {
    /// The session's name
    pub(crate) session: String,
    #[command(flatten)]
    pub(crate) start: StartArgs,
    /// Where stdin comes from: a file, `-` for ours, `null`, the default, for nowhere
    #[arg(long, value_name = "FILE", default_value = "null", help_heading = "Files", value_parser = clap::value_parser!(OsString))]
    pub(crate) stdin: OsString,

    #[command(flatten)]
    pub(crate) limits: ExecLimitArgs,
    #[command(flatten)]
    pub(crate) permission: PermissionArgs,
    #[command(flatten)]
    pub(crate) records: RecordArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,

    /// The command and its arguments
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true)]
    pub(crate) command: Vec<OsString>,
}

#[derive(Args, Debug)]
pub(crate) struct CpArgs {
    /// A path, or SESSION:PATH
    #[arg(value_name = "FROM", value_parser = clap::value_parser!(OsString))]
    pub(crate) from: OsString,
    /// A path, or SESSION:PATH
    #[arg(value_name = "TO", value_parser = clap::value_parser!(OsString))]
    pub(crate) to: OsString,
    /// Print what was copied as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// What a cell is built of.
#[derive(Args, Debug)]
pub(crate) struct CellArgs {
    /// Directory to work in; it appears inside at its own path
    #[arg(long, short = 'w', value_name = "DIR", help_heading = "Files")]
    pub(crate) workspace: Option<PathBuf>,
    /// How the workspace appears inside [default: cow]
    #[arg(long, value_enum, value_name = "MODE", help_heading = "Files", requires = "workspace")]
    pub(crate) mode: Option<ModeArg>,
    /// Show a further path of the host inside: writable, or read-only with :ro
    #[arg(long, value_name = "SRC:DST[:ro]", help_heading = "Files", value_parser = clap::value_parser!(OsString))]
    pub(crate) mount: Vec<OsString>,
    /// Let the command change this control file, such as .git, which is read-only otherwise
    #[arg(long, value_name = "PATH", help_heading = "Files")]
    pub(crate) allow_control: Vec<PathBuf>,

    /// Refuse unless this wall is enforced by the kernel
    #[arg(long, value_name = "WALL", help_heading = "Walls", value_parser = wall)]
    pub(crate) require: Vec<Wall>,
    /// Run without this wall if the machine cannot have it, and say so in the report
    #[arg(long, value_name = "WALL", help_heading = "Walls", value_parser = wall)]
    pub(crate) allow_missing: Vec<Wall>,
}

/// How a command begins.
#[derive(Args, Debug)]
pub(crate) struct StartArgs {
    /// Directory the command starts in [default: the workspace, else an empty one]
    #[arg(long = "directory", short = 'C', value_name = "DIR", help_heading = "Files")]
    pub(crate) directory: Option<PathBuf>,
    /// Set a variable, or pass the host's value on
    #[arg(long, short = 'e', value_name = "NAME[=VALUE]", help_heading = "Files", value_parser = clap::value_parser!(OsString))]
    pub(crate) env: Vec<OsString>,
}

#[derive(Args, Debug)]
pub(crate) struct LimitArgs {
    /// Wall-clock time [default: 10m]
    #[arg(long, value_name = "TIME", value_parser = units::duration, help_heading = "Limits")]
    pub(crate) time: Option<Duration>,
    /// Share of the processors [default: 1]
    #[arg(long, value_name = "N", help_heading = "Limits")]
    pub(crate) cpus: Option<Cpus>,
    /// Processor time of the whole tree [default: none]
    #[arg(long, value_name = "TIME", value_parser = units::duration, help_heading = "Limits")]
    pub(crate) cpu_time: Option<Duration>,
    /// Memory of the whole tree, with the files it writes [default: 2GiB]
    #[arg(long, value_name = "SIZE", help_heading = "Limits")]
    pub(crate) memory: Option<Bytes>,
    /// Processes and threads at one time [default: 256]
    #[arg(long, value_name = "N", help_heading = "Limits")]
    pub(crate) pids: Option<u32>,
    /// Open descriptors of one process [default: 1024]
    #[arg(long, value_name = "N", help_heading = "Limits")]
    pub(crate) fds: Option<u32>,
    /// What is written to the workspace and to scratch, together [default: 1GiB]
    #[arg(long, value_name = "SIZE", help_heading = "Limits")]
    pub(crate) disk: Option<Bytes>,
    /// What is written to stdout and stderr, together [default: 64MiB]
    #[arg(long, value_name = "SIZE", help_heading = "Limits")]
    pub(crate) output: Option<Bytes>,
    /// Size of one file [default: the disk limit]
    #[arg(long, value_name = "SIZE", help_heading = "Limits")]
    pub(crate) file_size: Option<Bytes>,
}

/// Limits of a command in a session: as the session's are, or narrower.
#[derive(Args, Debug)]
pub(crate) struct ExecLimitArgs {
    /// Wall-clock time [default, and at most: the session's, as for all of these]
    #[arg(long, value_name = "TIME", value_parser = units::duration, help_heading = "Limits")]
    time: Option<Duration>,
    /// Share of the processors
    #[arg(long, value_name = "N", help_heading = "Limits")]
    cpus: Option<Cpus>,
    /// Processor time of the whole tree
    #[arg(long, value_name = "TIME", value_parser = units::duration, help_heading = "Limits")]
    cpu_time: Option<Duration>,
    /// Memory of the whole tree, with all files the session holds
    #[arg(long, value_name = "SIZE", help_heading = "Limits")]
    memory: Option<Bytes>,
    /// Processes and threads at one time
    #[arg(long, value_name = "N", help_heading = "Limits")]
    pids: Option<u32>,
    /// Open descriptors of one process
    #[arg(long, value_name = "N", help_heading = "Limits")]
    fds: Option<u32>,
    /// What is written to stdout and stderr, together
    #[arg(long, value_name = "SIZE", help_heading = "Limits")]
    output: Option<Bytes>,
    /// Size of one file
    #[arg(long, value_name = "SIZE", help_heading = "Limits")]
    file_size: Option<Bytes>,
}

#[derive(Args, Debug)]
pub(crate) struct RecordArgs {
    /// Name to find the run by
    #[arg(long, value_name = "NAME", help_heading = "Records", value_parser = name)]
    pub(crate) name: Option<String>,
    /// Label to find the run by
    #[arg(long, value_name = "KEY=VALUE", help_heading = "Records", value_parser = label)]
    pub(crate) label: Vec<(String, String)>,
}

/// Under what a run is let in.
#[derive(Args, Debug)]
pub(crate) struct PermissionArgs {
    /// The lease to run under: a file or an id [default: one of its own, by your key, from the policy]
    #[arg(long, value_name = "FILE|ID", help_heading = "Permission")]
    pub(crate) lease: Option<String>,
    /// A name for this attempt: given again, its stored result is given again, and nothing runs twice
    #[arg(long, value_name = "ID", help_heading = "Permission", value_parser = attempt)]
    pub(crate) attempt_id: Option<String>,
}

#[derive(Args, Debug)]
pub(crate) struct OutputArgs {
    /// Print one JSON object on stdout instead of the command's output
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
    /// Print nothing but the command's own output
    #[arg(long, short = 'q', help_heading = "Output", conflicts_with = "verbose")]
    pub(crate) quiet: bool,
    /// Print where the time went
    #[arg(long, short = 'v', action = ArgAction::SetTrue, help_heading = "Output")]
    pub(crate) verbose: bool,
}

impl StartArgs {
    /// Variables to set, or to pass on.
    pub(crate) fn variables(&self) -> Vec<(OsString, Option<OsString>)> {
        self.env
            .iter()
            .map(|variable| {
                split_at(variable, b'=').map_or((variable.clone(), None), |(name, value)| (name, Some(value)))
            })
            .collect()
    }
}

fn split_at(text: &OsStr, byte: u8) -> Option<(OsString, OsString)> {
    let at = text.as_bytes().iter().position(|one| *one == byte)?;
    let (left, right) = text.as_bytes().split_at(at);
    Some((OsString::from_vec(left.to_vec()), OsString::from_vec(right[1..].to_vec())))
}

impl ExecLimitArgs {
    /// Only those that were given.
    pub(crate) fn changes(&self) -> LimitChanges {
        LimitChanges {
            time: self.time,
            cpus_milli: self.cpus.map(|cpus| cpus.milli),
            cpu_time: self.cpu_time,
            memory: self.memory.map(|size| size.0),
            pids: self.pids,
            fds: self.fds,
            output: self.output.map(|size| size.0),
            file_size: self.file_size.map(|size| size.0),
        }
    }
}

impl LimitArgs {
    /// The limits, each from its flag or its default.
    pub(crate) fn limits(&self) -> Limits {
        let default = Limits::default();
        Limits {
            time: self.time.unwrap_or(default.time),
            cpus: self.cpus.unwrap_or(default.cpus),
            cpu_time: self.cpu_time.or(default.cpu_time),
            memory: self.memory.unwrap_or(default.memory),
            pids: self.pids.unwrap_or(default.pids),
            fds: self.fds.unwrap_or(default.fds),
            disk: self.disk.unwrap_or(default.disk),
            output: self.output.unwrap_or(default.output),
            file_size: self.file_size.or(default.file_size),
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct LsArgs {
    /// Only runs with this label
    #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
    pub(crate) label: Vec<(String, String)>,
    /// Only runs that ended so: exited, timeout, oom, lease_revoked …, or running
    #[arg(long, value_name = "OUTCOME", value_parser = outcome)]
    pub(crate) outcome: Option<String>,
    /// Only runs that began then or later: a time, or how long ago (2h, 3d)
    #[arg(long, value_name = "TIME", value_parser = since)]
    pub(crate) since: Option<jiff::Timestamp>,
    /// Only runs under this lease
    #[arg(long, value_name = "ID")]
    pub(crate) lease: Option<hotcell_base::LeaseId>,
    /// Only sessions that are there, and how they are doing
    #[arg(long, conflicts_with_all = ["label", "outcome", "since", "lease"])]
    pub(crate) sessions: bool,
    /// At most so many
    #[arg(long, short = 'n', value_name = "N", default_value_t = 20)]
    pub(crate) limit: usize,
    /// Print a JSON array
    #[arg(long)]
    pub(crate) json: bool,
}

impl LsArgs {
    /// Whether not all runs are asked for.
    pub(crate) fn is_filtered(&self) -> bool {
        !self.label.is_empty() || self.outcome.is_some() || self.since.is_some() || self.lease.is_some()
    }
}

#[derive(Args, Debug)]
pub(crate) struct LogsArgs {
    /// Id, unique part of an id, or name
    pub(crate) run: String,
    /// Go on until the run is over
    #[arg(long, short = 'f')]
    pub(crate) follow: bool,
    /// Only stdout
    #[arg(long, conflicts_with = "stderr")]
    pub(crate) stdout: bool,
    /// Only stderr
    #[arg(long)]
    pub(crate) stderr: bool,
}

#[derive(Args, Debug)]
pub(crate) struct ShowArgs {
    /// Id, unique part of an id, or name
    pub(crate) run: String,
    /// Print the record as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct RmArgs {
    /// Ids, unique parts of ids, or names
    #[arg(required_unless_present = "all")]
    pub(crate) run: Vec<String>,
    /// Every run that is over
    #[arg(long, requires = "yes")]
    pub(crate) all: bool,
    /// Really: with --all
    #[arg(long)]
    pub(crate) yes: bool,
}

#[derive(Args, Debug)]
pub(crate) struct StopArgs {
    /// Id, unique part of an id, or name
    pub(crate) run: String,
}

#[derive(Args, Debug)]
pub(crate) struct DiffArgs {
    /// Id, unique part of an id, or name
    pub(crate) run: String,
    /// Only the number of lines, by file
    #[arg(long, conflicts_with = "json")]
    pub(crate) stat: bool,
    /// Print every difference as JSON, with digests and modes
    #[arg(long)]
    pub(crate) json: bool,
    /// Only paths that match: `src`, `*.rs`, `**/test_*`
    #[arg(long, value_name = "GLOB")]
    pub(crate) only: Vec<Glob>,
}

#[derive(Args, Debug)]
pub(crate) struct ApplyArgs {
    /// Id, unique part of an id, or name
    pub(crate) run: String,
    /// Only paths that match: `src`, `*.rs`, `**/test_*`
    #[arg(long, value_name = "GLOB")]
    pub(crate) only: Vec<Glob>,
    /// No paths that match
    #[arg(long, value_name = "GLOB")]
    pub(crate) except: Vec<Glob>,
    /// Also this control file, such as .git
    #[arg(long, value_name = "PATH")]
    pub(crate) allow_control: Vec<PathBuf>,
    /// Print the rollback pack as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct UndoArgs {
    /// What `apply` printed, or the run it came from
    #[arg(value_name = "ID", required_unless_present = "list")]
    pub(crate) id: Option<String>,
    /// List what was applied, newest first
    #[arg(long, conflicts_with = "id")]
    pub(crate) list: bool,
    /// Give the way back up: remove what is kept for it, and change nothing
    #[arg(long, requires = "id")]
    pub(crate) forget: bool,
    /// Print the rollback pack as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct GcArgs {
    /// Really; without it, only say what would go
    #[arg(long)]
    pub(crate) yes: bool,
    /// Print the list as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct DoctorArgs {
    /// Print the findings as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct SelftestArgs {
    /// Print the verdicts as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Only these: A1, A12.init, or a whole section such as C
    #[arg(long, value_name = "ID", num_args = 1..)]
    pub(crate) only: Vec<String>,
    /// Leave this wall, or seccomp:RULE, out of every cell: the verdicts must turn red
    #[arg(long, value_name = "WALL")]
    pub(crate) without: Option<String>,
    /// How the cells come to be that attempts are made in
    #[arg(long, value_enum, value_name = "HOW", default_value = "run")]
    pub(crate) cells: CellsArg,
    /// List the attempts and make none
    #[arg(long)]
    pub(crate) list: bool,
}

/// How a cell comes to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum CellsArg {
    /// Each from nothing, as by `hotcell run`
    Run,
    /// Each when it is asked for, from what a pool has ready; what writes in place is run on its own
    OnDemand,
    /// Each before it is asked for, by a pool; what writes in place is run on its own
    Pool,
    /// Each for more than one command, as by `hotcell create`
    Session,
    /// Each from nothing, for a probe that is loaded already; other programs are run as they are
    Template,
}

#[derive(Args, Debug)]
pub(crate) struct ProbeArgs {
    /// Which attempt
    pub(crate) attempt: String,
    /// What it needs to know
    #[arg(allow_hyphen_values = true)]
    pub(crate) args: Vec<OsString>,
}

pub(crate) fn wall(name: &str) -> Result<Wall, String> {
    name.parse::<Wall>().map_err(|error| {
        let names: Vec<&str> = Wall::ALL.iter().map(|wall| wall.name()).collect();
        format!("{error}; the walls are {}", names.join(", "))
    })
}

/// The name of an attempt: something a person or a program can say again.
fn attempt(text: &str) -> Result<String, String> {
    let is_fine = |letter: char| !letter.is_control() && !letter.is_whitespace();
    if (1..=200).contains(&text.len()) && text.chars().all(is_fine) {
        Ok(text.to_owned())
    } else {
        Err("a name of 1 to 200 letters without spaces".to_owned())
    }
}

/// An outcome, or that there is none yet.
fn outcome(text: &str) -> Result<String, String> {
    let is_one = |outcome: &hotcell_base::Outcome| outcome.name() == text;
    if text == "running" || hotcell_base::Outcome::ALL.iter().any(is_one) {
        return Ok(text.to_owned());
    }
    let names: Vec<&str> = hotcell_base::Outcome::ALL.iter().map(|outcome| outcome.name()).collect();
    Err(format!("one of running, {}", names.join(", ")))
}

/// A time, or how long ago.
fn since(text: &str) -> Result<jiff::Timestamp, String> {
    if let Ok(time) = text.parse() {
        return Ok(time);
    }
    let ago =
        units::duration(text).map_err(|_| "a time such as 2026-11-15T08:00:00Z, or how long ago: 2h".to_owned())?;
    let ago = jiff::SignedDuration::try_from(ago).map_err(|error| error.to_string())?;
    jiff::Timestamp::now().checked_sub(ago).map_err(|error| error.to_string())
}

fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("a label is written key=value".to_owned()),
    }
}

fn name(text: &str) -> Result<String, String> {
    let fine = |letter: char| letter.is_alphanumeric() || "._-".contains(letter);
    if text.is_empty() || text.len() > 64 || !text.chars().all(fine) || text.starts_with('-') {
        return Err("a name has 1 to 64 letters, digits, dots, dashes or underscores".to_owned());
    }
    Ok(text.to_owned())
}
