//! `hotcell run`.

use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use hotcell_base::text::shown;
use hotcell_base::{Bytes, Outcome};
use hotcell_cell::report::Timings;
use hotcell_cell::{Builder, Cell, Host, Mode, MountRequest, Plan, RemoteEnd, Stdin, Wall};
use hotcell_gate::permit::{self, View};
use hotcell_gate::record::Kind;
use hotcell_gate::{Authority, Gate, GateError, Permission, Ran, Record, Request};
use hotcell_sys::signals::EndSignals;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;

use crate::cli::{self, CellArgs, RunArgs, StartArgs};
use crate::error::{During, Failure};
use crate::explain;
use crate::tee::Tee;
use crate::{runs, screen, template};

/// Runs a command and gives the exit code to pass on.
pub(crate) fn run(args: &RunArgs, home: Option<PathBuf>) -> u8 {
    match try_run(args, home) {
        Ok(code) => code,
        Err(failure) => {
            if args.output.json {
                // Where nothing can be printed, the report below is all there is.
                let _said_below = screen::data(&refusal(&failure));
            }
            crate::report(&failure);
            failure.code(During::Run)
        }
    }
}

/// The JSON of a run that did not happen, or failed on our side.
pub(crate) fn refusal(failure: &Failure) -> String {
    let record = match failure {
        Failure::Gate(error) => match &**error {
            GateError::Run { record, .. }
            | GateError::Turn { record, .. }
            | GateError::Unrecorded { record, .. }
            | GateError::Untold { record, .. } => serde_json::to_value(&**record).ok(),
            // Nothing ran; or the record is of the template, not of this run.
            _ => None,
        },
        _ => None,
    };
    let mut object = record.unwrap_or_else(|| {
        serde_json::json!({ "run_id": null, "outcome": failure.outcome().name(), "exit_code": null, "signal": null })
    });
    object["error"] = failure.chain().join(": ").into();
    object["hint"] = failure.hint().into();
    format!("{object:#}\n")
}

fn try_run(args: &RunArgs, home: Option<PathBuf>) -> Result<u8, Failure> {
    let host = Host::probe(std::env::vars_os())?;
    let home_place = crate::HomePlace::find(home)?;
    // A home that is not there yet has nothing to hide.
    let home_path = std::fs::canonicalize(&home_place.path).unwrap_or_else(|_| home_place.path.clone());
    if args.explain {
        let plan = plan(args, &host, &home_path, &View::default())?;
        let text = if args.output.json { explain::json(&plan) } else { explain::text(&plan, args) };
        screen::answer(&text)?;
        return Ok(0);
    }
    // Meanwhile. What cannot be begun early is begun later, and says why not.
    let _later = hotcell_cell::run::early::begin(&host);
    // Before there is another thread.
    let remote = RemoteEnd::from(end_signals()?);
    let stdin = stdin(&args.stdin)?;
    // Planned before the home is made, so that a wrong request leaves nothing; and again if it was not there to be hidden,
    // or if a lease says what is to be seen.
    let is_leased = args.permission.lease.is_some();
    let planned = if is_leased { None } else { Some(plan(args, &host, &home_path, &View::default())?) };
    let home = home_place.open()?;
    crate::gc::sweep(&home);
    let gate = Gate::open(&home)?;
    let (permission, view) = permission(&gate, args.permission.lease.as_deref())?;
    let plan = match planned {
        Some(planned) if home.path() == home_path => planned,
        _ => plan(args, &host, home.path(), &view)?,
    };
    let (plan, template) = template::begin(args, &host, &gate, &home, plan, &remote)?;
    let request = Request {
        stdin,
        name: args.records.name.clone(),
        labels: args.records.label.iter().cloned().collect(),
        template,
        permission,
        attempt_id: args.permission.attempt_id.clone(),
        lasts: None,
    };
    let Ran { record, report } = pass_the_gate(args, &gate, &plan, request, &remote)?;
    let is_replayed = report.is_none();
    if is_replayed && !args.output.json {
        runs::replay(&home, &record)?;
    }
    if args.output.json {
        screen::answer(as_json(&record, is_replayed))?;
    } else if !args.output.quiet {
        screen::note(&ending(&record, is_replayed));
    }
    if args.output.verbose {
        screen::note(&lease_line(&record, is_leased));
        if let Some(report) = &report {
            screen::note(&timing(&report.timings));
        }
    }
    Ok(record.exit_status())
}

/// The record of a run as `--json` prints it.
pub(crate) fn as_json(record: &Record, is_replayed: bool) -> String {
    let mut object = serde_json::to_value(record).expect("a record is plain data");
    if is_replayed {
        object["replayed"] = true.into();
    }
    format!("{object:#}\n")
}

/// The lease that was given, and what it says is to be seen; without one, the run's own.
fn permission(gate: &Gate, lease: Option<&str>) -> Result<(Permission, View), Failure> {
    let Some(name) = lease else { return Ok((Permission::Own, View::default())) };
    let text = lease_text(gate.authority(), name)?;
    let view = permit::view(&text, gate.authority().policy().repos());
    Ok((Permission::Lease(text), view))
}

/// The text of a lease that was given.
pub(crate) fn lease_text(authority: &Authority, name: &str) -> Result<Vec<u8>, Failure> {
    let found = authority.leases().find(name, &serde_json::Value::Null)?;
    found.map_err(|source| GateError::Refused { command: format!("--lease {}", shown(name)), source }.into())
}

/// One line on what a run was let in by.
pub(crate) fn lease_line(record: &Record, is_leased: bool) -> String {
    let whose = if is_leased { "as given" } else { "its own, issued by your key from the policy" };
    let lease = record.lease_id.as_ref().map_or("none", |id| id.as_str());
    format!("lease    {lease}  {whose}\n         receipt {}/receipt.json", record.artifacts.display())
}

fn pass_the_gate(
    args: &RunArgs,
    gate: &Gate,
    plan: &Plan,
    request: Request,
    remote: &RemoteEnd,
) -> Result<Ran, Failure> {
    let mut tee = Tee::new(!args.output.json);
    if !args.output.quiet && !args.output.json {
        let walls: Vec<&str> =
            plan.walls().keys().filter(|wall| plan.asks_for(**wall)).map(|wall| wall.name()).collect();
        let walls = walls.join(" ");
        tee.on_start = Some(Box::new(move |run| screen::note(&format!("started  {run}  walls: {walls}"))));
    }
    let ran = gate.run(plan, request, &mut tee, Some(remote));
    tee.finish();
    Ok(ran?)
}

fn plan(args: &RunArgs, host: &Host, home: &std::path::Path, view: &View) -> Result<Plan, Failure> {
    let mut builder = builder(&args.cell, &args.start, home)?.limits(args.limits.limits());
    builder = view.hide.iter().fold(builder, Builder::hide);
    if args.cell.workspace.is_none() && args.cell.mount.is_empty() {
        for (path, writable) in &view.show {
            builder = builder.mount(MountRequest { source: path.clone(), target: path.clone(), writable: *writable });
        }
        // Where there is one place to be, that is where the command begins.
        if let ([(path, _)], None) = (&view.show[..], &args.start.directory)
            && path.is_dir()
        {
            builder = builder.current_dir(path);
        }
    }
    let program = args.template.as_deref().map(template::program).transpose()?;
    let words = program.map(OsString::from).into_iter().chain(args.command.iter().cloned());
    Ok(builder.command(words).plan(host)?)
}

/// A request for a cell, but for its limits and its command.
pub(crate) fn builder(cell: &CellArgs, start: &StartArgs, home: &std::path::Path) -> Result<Builder, Failure> {
    let mut builder = Cell::builder().hide(home);
    if let Some(workspace) = &cell.workspace {
        builder = builder.workspace(workspace, cell.mode.map_or(Mode::Cow, Mode::from));
    }
    if let Some(directory) = &start.directory {
        builder = builder.current_dir(directory);
    }
    builder = cell.allow_control.iter().fold(builder, |builder, path| builder.allow_control(path));
    for mount in &cell.mount {
        builder = builder.mount(mount_request(mount)?);
    }
    builder = start.variables().into_iter().fold(builder, |builder, (name, value)| builder.env(name, value));
    builder = cell.require.iter().fold(builder, |builder, wall| builder.require(*wall));
    for wall in cell.allow_missing.iter().copied().chain(always_allowed_missing()?) {
        builder = builder.allow_missing(wall);
    }
    Ok(builder)
}

/// Walls that this user lives without on this machine: said once instead of with every run.
pub(crate) fn always_allowed_missing() -> Result<Vec<Wall>, Failure> {
    let names = std::env::var_os("HOTCELL_ALLOW_MISSING").unwrap_or_default();
    let names = names.to_string_lossy().into_owned();
    let names = names.split([',', ' ']).filter(|name| !name.is_empty());
    names
        .map(|name| {
            cli::wall(name).map_err(|message| Failure::Usage {
                message: format!("HOTCELL_ALLOW_MISSING: {message}"),
                hint: "name walls with commas between: export HOTCELL_ALLOW_MISSING=groups".to_owned(),
            })
        })
        .collect()
}

/// `SRC:DST`, `SRC:DST:rw` or `SRC:DST:ro`.
pub(crate) fn mount_request(text: &OsStr) -> Result<MountRequest, Failure> {
    let bytes = text.as_bytes();
    let (bytes, writable) = match (bytes.strip_suffix(b":rw"), bytes.strip_suffix(b":ro")) {
        (Some(rest), _) => (rest, true),
        (_, Some(rest)) => (rest, false),
        _ => (bytes, true),
    };
    // The last colon: a source may have one in its name, a target inside need not.
    let at = bytes.iter().rposition(|byte| *byte == b':').filter(|at| *at > 0 && at + 1 < bytes.len());
    let Some(at) = at else {
        return Err(Failure::Usage {
            message: format!("`{}` is not a mount", shown(text.as_bytes())),
            hint: "write SRC:DST or SRC:DST:ro: hotcell run --mount ~/data:/data:ro …".to_owned(),
        });
    };
    let path = |bytes: &[u8]| PathBuf::from(OsString::from_vec(bytes.to_vec()));
    Ok(MountRequest { source: path(&bytes[..at]), target: path(&bytes[at + 1..]), writable })
}

pub(crate) fn stdin(source: &OsStr) -> Result<Stdin, Failure> {
    match source.to_str() {
        Some("null") => Ok(Stdin::Null),
        Some("-") => {
            let ours = std::io::stdin().as_fd().try_clone_to_owned();
            ours.and_then(pumped).map(Stdin::From).map_err(|source| unreadable_input("-", source))
        }
        _ => {
            let name = shown(source.as_bytes());
            // A FIFO without a writer must not make us wait before the clock runs.
            let opened = OpenOptions::new().read(true).custom_flags(NONBLOCK).open(source).and_then(|file| match file
                .metadata()?
            {
                data if data.is_dir() => Err(Errno::ISDIR.into()),
                _ => Ok(file),
            });
            let pumped = opened.and_then(|file| pumped(file.into()));
            pumped.map(Stdin::From).map_err(|error| unreadable_input(&name, error))
        }
    }
}

/// A descriptor that nobody else reads from: whoever supervises must never wait for what somebody else took. Files are
/// their own; everything else is read by a thread, which ends with this program.
fn pumped(source: OwnedFd) -> std::io::Result<OwnedFd> {
    if File::from(source.try_clone()?).metadata()?.is_file() {
        return Ok(source);
    }
    let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    std::thread::Builder::new().name("hotcell-stdin".to_owned()).spawn(move || {
        let mut writer = File::from(writer);
        let mut buffer = vec![0; 64 << 10];
        loop {
            // A pipe that nobody has opened yet is not at its end.
            let mut fds = [PollFd::new(&source, PollFlags::IN)];
            let polled = rustix::event::poll(&mut fds, None);
            match polled.and_then(|_| rustix::io::read(&source, &mut buffer)) {
                Err(Errno::AGAIN | Errno::INTR) => {}
                Ok(n @ 1..) if writer.write_all(&buffer[..n]).is_ok() => {}
                // Its end, or that of whoever reads it.
                _ => return,
            }
        }
    })?;
    Ok(reader)
}

const NONBLOCK: i32 = 0o4000;

fn unreadable_input(name: &str, source: std::io::Error) -> Failure {
    Failure::Io {
        message: format!("cannot read stdin from `{name}`"),
        hint: Some("give a file that can be read, - or null: hotcell run --stdin FILE …".to_owned()),
        source,
    }
}

/// Ctrl-C and its like, which from now on wait to be read.
pub(crate) fn end_signals() -> Result<EndSignals, Failure> {
    EndSignals::listen().map_err(|source| Failure::Io {
        message: "cannot listen for signals".to_owned(),
        hint: Some("see how many files are open: ulimit -n".to_owned()),
        source,
    })
}

/// Passes Ctrl-C and its like on.
pub(crate) fn pass_on(signals: EndSignals, mut to: impl FnMut(u8) + Send + 'static) {
    std::thread::spawn(move || {
        while let Ok(signal) = signals.wait() {
            to(signal);
        }
    });
}

/// One line on how a run ended.
pub(crate) fn ending(record: &Record, is_replayed: bool) -> String {
    let how = match (record.outcome, record.exit_code, record.signal) {
        (Some(Outcome::Exited), Some(code), _) => format!("exit {code}"),
        (Some(Outcome::Signaled), _, Some(signal)) => format!("signal {signal}"),
        (Some(outcome), ..) => match &record.limit {
            Some(limit) => format!("{outcome} ({limit} limit)"),
            None => outcome.to_string(),
        },
        (None, ..) => "running".to_owned(),
    };
    let mut text = format!(
        "{:<8} {}  {how}, wall {}, cpu {}, memory peak {}",
        if is_replayed { "stored" } else { "ended" },
        record.run_id,
        crate::show_ms(record.wall_ms),
        crate::show_ms(record.cpu_ms),
        Bytes(record.memory_peak_bytes),
    );
    if let Some(error) = &record.error {
        text.push_str(&format!("\n         {error}"));
    }
    if record.stdout_truncated || record.stderr_truncated {
        let total = Bytes(record.stdout_bytes + record.stderr_bytes);
        text.push_str(&format!("\n         output truncated: {total} came in all"));
    }
    let workspace = &record.workspace;
    // What commands of a session change adds up; the session's own record has it.
    if workspace.mode == "cow" && record.kind != Kind::Exec {
        let n = workspace.changed_count;
        let more = if workspace.changed_unknown { " or more" } else { "" };
        text.push_str(&format!(
            "\n         {n}{more} changed in the workspace's copy; the host's files are as they were"
        ));
        if n > 0 {
            text.push_str(&format!("\n         look: hotcell diff {0}   keep: hotcell apply {0}", record.run_id));
        }
    }
    // What is in a control directory goes without saying.
    let attempts = &workspace.control_attempts;
    let is_within = |path: &str| {
        attempts.iter().any(|above| path.strip_prefix(&*above.path).is_some_and(|rest| rest.starts_with('/')))
    };
    for attempt in attempts.iter().filter(|attempt| !is_within(&attempt.path)) {
        let what = if attempt.blocked { "kept away from the host" } else { "it is there now: look before you use it" };
        text.push_str(&format!("\n         control file {}: {what}", attempt.path));
    }
    let weak = record.weak_walls();
    if !weak.is_empty() {
        let weak: Vec<String> = weak.iter().map(|(wall, standing)| format!("{wall} {standing}")).collect();
        text.push_str(&format!("\n         not proven: {}", weak.join(", ")));
    }
    text
}

pub(crate) fn timing(timings: &Timings) -> String {
    let ms = |time: std::time::Duration| crate::show_ms(time.as_secs_f64() * 1e3);
    format!(
        "times    prepare {}, walls {}, run {}, collect {}",
        ms(timings.prepare),
        ms(timings.walls),
        ms(timings.run),
        ms(timings.collect)
    )
}
