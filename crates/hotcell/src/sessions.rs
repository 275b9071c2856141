//! `create`, `exec` and `ls --sessions`: cells that stay.

use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hotcell_base::Outcome;
use hotcell_base::units::show_duration;
use hotcell_cell::{Exec, Host, PlanError, Stdin};
use hotcell_gate::session::{
    self, Client, Edge, ExecRequest, Life, Refusal, SessionError, Sessions, Stopper, Told, Window,
};
use hotcell_gate::{Authority, GateError, Home, Record};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::cli::{CreateArgs, ExecArgs, LsArgs};
use crate::error::{During, Failure};
use crate::tee::Tee;
use crate::{run, runs, screen};

/// What a host tells whoever started it.
#[derive(Serialize, Deserialize)]
enum Word {
    Ready(Box<Record>),
    Refused { refusal: Refusal, code: u8 },
}

/// Starts a host for a session and waits until commands can come.
pub(crate) fn create(args: &CreateArgs, home: Option<PathBuf>) -> Result<u8, Failure> {
    if args.as_host {
        return Ok(be_host(args, home));
    }
    let failed = |source| Failure::Io {
        message: "the session's host cannot be started".to_owned(),
        hint: Some("see what this machine can do: hotcell doctor".to_owned()),
        source,
    };
    let mut command = Command::new("/proc/self/exe");
    std::os::unix::process::CommandExt::arg0(&mut command, "hotcell");
    // Before anything that could end the flags.
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    let at = words.iter().position(|word| word == "create").map_or(words.len(), |at| at + 1);
    command.args(&words[..at]).arg("--as-host").args(&words[at..]);
    let spawned = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let mut child = spawned.map_err(failed)?;
    let mut text = String::new();
    let mut stdout = child.stdout.take().expect("it was piped");
    stdout.read_to_string(&mut text).map_err(failed)?;
    match serde_json::from_str(&text) {
        Ok(Word::Ready(record)) => {
            if args.json {
                let text = serde_json::to_string_pretty(&record).expect("a record is plain data");
                screen::answer(format!("{text}\n"))?;
            } else {
                let walls = record.isolation.iter().flat_map(|isolation| isolation.walls.keys());
                let walls: Vec<&str> = walls.map(String::as_str).collect();
                screen::note(&format!("created  {}  {}  walls: {}", args.name, record.run_id, walls.join(" ")));
                screen::note(&format!(
                    "         use it: hotcell exec {0} -- COMMAND   end it: hotcell rm {0}",
                    args.name
                ));
            }
            Ok(0)
        }
        Ok(Word::Refused { refusal, code }) => {
            crate::report(&Failure::Session(SessionError::Refused(refusal)));
            Ok(code)
        }
        Err(_) => Err(failed(std::io::Error::other("it ended without a word"))),
    }
}

/// Hosts a session until it ends.
fn be_host(args: &CreateArgs, home: Option<PathBuf>) -> u8 {
    match try_be_host(args, home) {
        Ok(()) => 0,
        Err(failure) => {
            let code = failure.code(During::Other);
            say(&Word::Refused { refusal: refusal(&failure), code });
            code
        }
    }
}

/// Tells whoever started this host, once; nobody listens after that.
fn say(word: &Word) {
    let text = serde_json::to_string(word).expect("plain data");
    let mut stdout = std::io::stdout();
    // Whoever started it may be gone; the session is there all the same.
    let _gone = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
    if let Ok(nothing) = std::fs::OpenOptions::new().write(true).open("/dev/null") {
        let _still_open = rustix::stdio::dup2_stdout(nothing);
    }
}

fn refusal(failure: &Failure) -> Refusal {
    Refusal { chain: failure.chain(), hint: failure.hint(), outcome: failure.outcome() }
}

fn try_be_host(args: &CreateArgs, home: Option<PathBuf>) -> Result<(), Failure> {
    // Whoever waits for the end of something of the caller's does not wait for this.
    hotcell_sys::inherited::close_inherited();
    // A session of its own: no terminal's signals, and none of its end.
    let _leader_already = rustix::process::setsid();
    let host = Host::probe(std::env::vars_os())?;
    let place = crate::HomePlace::find(home)?;
    let plan = |home: &std::path::Path| -> Result<_, Failure> {
        let builder = run::builder(&args.cell, &args.start, home)?.limits(args.limits.limits());
        let builder = args.with.iter().fold(builder, |builder, program| builder.tool(program));
        Ok(builder.plan_session(&host)?)
    };
    // Planned before the home is made, so that a wrong request leaves nothing; and again when it is there to be hidden.
    plan(&place.path)?;
    let home = place.open()?;
    let plan = plan(home.path())?;
    crate::gc::sweep(&home);
    let stopper = Arc::new(Mutex::new(Stop::default()));
    let asked = Arc::clone(&stopper);
    run::pass_on(run::end_signals()?, move |_| {
        let mut stop = asked.lock().unwrap_or_else(PoisonError::into_inner);
        stop.is_asked = true;
        if let Some(stopper) = &stop.stopper {
            stopper.stop();
        }
    });
    let life = Life { idle: args.idle, total: args.life };
    let labels = args.label.iter().cloned().collect();
    session::host(&home, &args.name, &plan, labels, life, &Ours, |record, handle| {
        let mut stop = stopper.lock().unwrap_or_else(PoisonError::into_inner);
        if stop.is_asked {
            handle.stop();
        }
        stop.stopper = Some(handle);
        say(&Word::Ready(Box::new(record.clone())));
        // Nothing of the caller's is held on to.
        let _stays = std::env::set_current_dir("/");
    })?;
    Ok(())
}

#[derive(Default)]
struct Stop {
    /// A signal may come before there is something to stop.
    is_asked: bool,
    stopper: Option<Stopper>,
}

/// How this program shows and explains.
struct Ours;

impl Edge for Ours {
    fn window(&self, stdout: OwnedFd, stderr: OwnedFd, is_gone: Arc<AtomicBool>) -> Box<dyn Window> {
        Box::new(Tee::on(stdout, stderr, is_gone))
    }

    fn explain_plan(&self, error: PlanError) -> Refusal {
        refusal(&error.into())
    }

    fn explain_gate(&self, error: GateError) -> Refusal {
        refusal(&error.into())
    }
}

/// Runs a command in a session and gives the exit code to pass on.
pub(crate) fn exec(args: &ExecArgs, home: Option<PathBuf>) -> u8 {
    match try_exec(args, home) {
        Ok(code) => code,
        Err(failure) => {
            if args.output.json {
                // Where nothing can be printed, the report below is all there is.
                let _said_below = screen::data(&run::refusal(&failure));
            }
            crate::report(&failure);
            failure.code(During::Run)
        }
    }
}

fn try_exec(args: &ExecArgs, home: Option<PathBuf>) -> Result<u8, Failure> {
    let home = crate::HomePlace::find(home)?.open()?;
    let null = || std::fs::OpenOptions::new().read(true).write(true).open("/dev/null").map(OwnedFd::from);
    let unusable = |source| Failure::Io { message: "cannot open /dev/null".to_owned(), hint: None, source };
    // Before there is another thread.
    let signals = run::end_signals()?;
    let stdin = match run::stdin(&args.stdin)? {
        Stdin::Null => null().map_err(unusable)?,
        Stdin::From(source) => source,
    };
    let nothing = null().map_err(unusable)?;
    let client = Client::connect(&home, &args.session)?;
    let pass_on = client.signals().map_err(unusable)?;
    run::pass_on(signals, pass_on);
    // Our own variables, not those of the session's host.
    let variables = args.start.variables().into_iter().map(|(name, value)| {
        let value = value.or_else(|| std::env::var_os(&name));
        (name, value)
    });
    let exec = Exec {
        argv: args.command.clone(),
        env: variables.collect(),
        cwd: args.start.directory.clone(),
        ..Exec::default()
    };
    let labels = args.records.label.iter().cloned().collect();
    let lease = match args.permission.lease.as_deref() {
        Some(name) => Some(run::lease_text(&Authority::open(&home)?, name)?),
        None => None,
    };
    // What is no text is no lease; it is for the gate to say so.
    let lease = lease.map(|text| String::from_utf8_lossy(&text).into_owned());
    let is_leased = lease.is_some();
    let request = ExecRequest::new(&exec, args.limits.changes())
        .named(args.records.name.clone(), labels)
        .leased(lease, args.permission.attempt_id.clone());
    let (stdout, stderr) = (std::io::stdout(), std::io::stderr());
    // The record takes the output's place.
    let shown = if args.output.json { [nothing.as_fd(); 2] } else { [stdout.as_fd(), stderr.as_fd()] };
    let is_quiet = args.output.quiet || args.output.json;
    let ran = client.exec(&request, [stdin.as_fd(), shown[0], shown[1]], |told| match told {
        Told::Busy(command) if !is_quiet => {
            screen::note(&format!("waiting  `{}` runs in {}", command.join(" "), args.session));
        }
        Told::Started(run_id) if !is_quiet => screen::note(&format!("started  {run_id}  in {}", args.session)),
        Told::Busy(_) | Told::Started(_) => {}
    })?;
    let is_replayed = ran.timings.is_none();
    if is_replayed && !args.output.json {
        runs::replay(&home, &ran.record)?;
    }
    if args.output.json {
        screen::answer(run::as_json(&ran.record, is_replayed))?;
    } else if !args.output.quiet {
        screen::note(&run::ending(&ran.record, is_replayed));
    }
    if args.output.verbose {
        screen::note(&run::lease_line(&ran.record, is_leased));
        if let Some(timings) = &ran.timings {
            screen::note(&run::timing(timings));
        }
    }
    // Nothing of it ran that could have said so.
    let missing = match ran.record.outcome {
        Some(Outcome::NotFound) => Some("there is no such command in the session"),
        Some(Outcome::NotExecutable) => Some("it cannot be executed"),
        _ => None,
    };
    if let Some(why) = missing.filter(|_| !args.output.json) {
        let word = ran.record.command.first().map_or("", String::as_str);
        screen::note(&format!(
            "error: `{word}`: {why}\nhint: look for it: hotcell exec {} -- sh -c 'command -v {word}'",
            args.session
        ));
    }
    Ok(ran.record.exit_status())
}

/// Lists sessions that are there.
pub(crate) fn ls(home: &Home, args: &LsArgs) -> Result<(), Failure> {
    // One that ends in this moment has no status, and is not there.
    let status = |name: &str| Client::connect(home, name).and_then(Client::status).ok();
    let known = Sessions::of(home).list();
    let sessions: Vec<_> =
        known.iter().filter_map(|known| Some((known, status(&known.name)?))).take(args.limit).collect();
    if args.json {
        let list: Vec<_> = sessions
            .iter()
            .map(|(known, status)| json!({ "name": known.name, "run_id": known.run_id, "status": status }))
            .collect();
        return screen::answer(format!("{:#}\n", serde_json::Value::from(list)));
    }
    if sessions.is_empty() {
        screen::note("no sessions; make one: hotcell create NAME");
        return Ok(());
    }
    let mut rows =
        vec![["SESSION", "RUN", "COMMANDS", "IDLE LEFT", "LIFE LEFT", "RUNNING"].map(str::to_owned).to_vec()];
    for (known, status) in &sessions {
        // To the second, the minute or the hour, as a person reads it.
        let left = |ms: u64| {
            let unit = match ms {
                0..600_000 => 1,
                600_000..7_200_000 => 60,
                _ => 3600,
            };
            if ms < 1000 { "<1s".to_owned() } else { show_duration(Duration::from_secs(ms / 1000 / unit * unit)) }
        };
        rows.push(vec![
            known.name.clone(),
            known.run_id.to_string(),
            status.n_commands.to_string(),
            status.idle_left_ms.map(left).unwrap_or_default(),
            left(status.life_left_ms),
            status.running.as_ref().map(|command| command.join(" ")).unwrap_or_default(),
        ]);
    }
    screen::answer(screen::table(&rows))
}
