//! The command line of Hotcell: parses, calls, renders, exits. Everything else is in the libraries.

mod audit;
mod changes;
mod cli;
mod cp;
mod demo;
mod diff;
mod doctor;
mod error;
mod explain;
mod gc;
mod keys;
mod lease;
mod policy;
mod probe;
mod receipt;
mod reference;
mod run;
mod runs;
mod screen;
mod selftest;
mod sessions;
mod tee;
mod template;
mod witness;

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::ExitCode;

use hotcell_cell::{Host, HostError, host};
use hotcell_gate::Home;

use crate::cli::{Cli, Command};
use crate::error::{During, Failure};

fn main() -> ExitCode {
    let cli = match Cli::read() {
        Ok(cli) => cli,
        Err(error) => return ExitCode::from(usage(&error)),
    };
    keep_keys_out_of_dumps();
    let code = match &cli.command {
        Command::Run(args) => run::run(args, cli.home.clone()),
        Command::Exec(args) => sessions::exec(args, cli.home.clone()),
        _ => match others(&cli) {
            Ok(code) => code,
            Err(failure) => {
                report(&failure);
                failure.code(During::Other)
            }
        },
    };
    ExitCode::from(code)
}

/// Keys are in the memory of this process; should it crash, they are in no core file. A limit of one byte is less than any core has,
/// and is the one that also keeps the kernel from handing a core to a program.
fn keep_keys_out_of_dumps() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Core).maximum;
    let limit = Rlimit { current: Some(maximum.map_or(1, |most| most.min(1))), maximum };
    // It can always be lowered.
    let _lowered = setrlimit(Resource::Core, limit);
}

fn others(cli: &Cli) -> Result<u8, Failure> {
    match &cli.command {
        Command::Reference => return Ok(u8::from(screen::data(&reference::reference()).is_err())),
        Command::Probe(args) => return probe::probe(args),
        _ => {}
    }
    if let Command::Create(args) = &cli.command {
        return sessions::create(args, cli.home.clone());
    }
    let host = Host::probe(std::env::vars_os())?;
    if let Command::Selftest(args) = &cli.command {
        return selftest::selftest(&host, args);
    }
    let home = HomePlace::find(cli.home.clone())?.open()?;
    match &cli.command {
        Command::Ls(args) if args.sessions => sessions::ls(&home, args)?,
        Command::Ls(args) => runs::ls(&home, args)?,
        Command::Cp(args) => cp::cp(&home, args)?,
        Command::Logs(args) => runs::logs(&home, args)?,
        Command::Show(args) => runs::show(&home, args)?,
        Command::Rm(args) => runs::rm(&home, args)?,
        Command::Stop(args) => runs::stop(&home, args)?,
        Command::Diff(args) => diff::diff(&home, args)?,
        Command::Apply(args) => changes::apply(&home, args)?,
        Command::Undo(args) => changes::undo(&home, args)?,
        Command::Lease(command) => return lease::lease(&host, &home, command),
        Command::Policy(command) => return policy::policy(&host, &home, command),
        Command::Key(command) => return keys::key(&home, command),
        Command::Audit(command) => return audit::audit(&host, &home, command),
        Command::Receipt(command) => return receipt::receipt(&home, command),
        Command::Demo(command) => return demo::demo(&host, &home, command),
        Command::Gc(args) => return gc::gc(&home, args),
        Command::Doctor(args) => return doctor::doctor(&host, home.path(), args),
        Command::Run(_)
        | Command::Exec(_)
        | Command::Create(_)
        | Command::Probe(_)
        | Command::Selftest(_)
        | Command::Reference => {
            unreachable!("handled by the caller")
        }
    }
    Ok(0)
}

/// Prints what the parser says. Help is an answer; a wrong flag of `run` must not look like the
/// command's own exit code.
fn usage(error: &clap::Error) -> u8 {
    let printed = error.print();
    if !error.use_stderr() {
        return u8::from(printed.is_err());
    }
    let is_run = std::env::args_os().skip(1).find(|argument| !argument.as_encoded_bytes().starts_with(b"-"));
    if is_run.is_some_and(|word| word == "run" || word == "exec") { 125 } else { 2 }
}

/// Prints a failure with its causes and what to try next.
fn report(failure: &Failure) {
    let chain = failure.chain();
    let mut text = String::new();
    for (idx, link) in chain.iter().enumerate() {
        text.push_str(if idx == 0 { "error: " } else { "\n  cause: " });
        text.push_str(link);
    }
    if let Some(hint) = failure.hint() {
        text.push_str("\nhint: ");
        text.push_str(&hint);
    }
    screen::note(&text);
}

/// Where runs are kept.
pub(crate) struct HomePlace {
    pub(crate) path: PathBuf,
    /// Found above the working directory, and not named by anybody.
    is_discovered: bool,
    /// Where discovered homes that are the user's own are written down.
    known: Option<PathBuf>,
}

impl HomePlace {
    /// `--home`, `HOTCELL_HOME`, the nearest `.hotcell/` upward, or the user's data directory.
    pub(crate) fn find(flag: Option<PathBuf>) -> Result<HomePlace, Failure> {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let cwd = std::env::current_dir().map_err(HostError::NoCwd)?;
        // A sticky one is the place of a decoy, for as long as a cell runs there.
        let is_home = |path: &PathBuf| path.metadata().is_ok_and(|file| file.is_dir() && file.mode() & 0o1000 == 0);
        let upward = || cwd.ancestors().map(|directory| directory.join(".hotcell")).find(is_home);
        // The specification says to ignore a relative one.
        let base = variable("XDG_DATA_HOME").filter(|path| path.is_absolute());
        let of_user = || std::env::var_os("HOME").map(PathBuf::from).or_else(host::account_home);
        let base = base.or_else(|| of_user().filter(|home| home.is_dir()).map(|home| home.join(".local/share")));
        let known = base.as_ref().map(|base| base.join("hotcell-homes"));
        let named = flag.or_else(|| variable("HOTCELL_HOME")).map(|path| cwd.join(path));
        if let Some(path) = named {
            return Ok(HomePlace { path, is_discovered: false, known });
        }
        if let Some(path) = upward() {
            return Ok(HomePlace { path, is_discovered: true, known });
        }
        let path = base.map(|base| base.join("hotcell")).ok_or_else(|| Failure::Usage {
            message: "there is no home directory to keep runs in".to_owned(),
            hint: "say where: hotcell --home DIR …, or set HOTCELL_HOME".to_owned(),
        })?;
        Ok(HomePlace { path, is_discovered: false, known })
    }

    pub(crate) fn open(&self) -> Result<Home, Failure> {
        Ok(if self.is_discovered {
            Home::discover(&self.path, self.known.as_deref())?
        } else {
            Home::open(&self.path)?
        })
    }
}

/// Milliseconds as a person reads them.
fn show_ms(ms: f64) -> String {
    if ms >= 1000.0 { format!("{:.2} s", ms / 1000.0) } else { format!("{ms:.1} ms") }
}
