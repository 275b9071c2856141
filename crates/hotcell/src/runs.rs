//! `ls`, `logs`, `show`, `rm`, `stop`: what is known of runs.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use hotcell_base::text::shown;
use hotcell_base::{Bytes, RunId};
use hotcell_gate::authority::store;
use hotcell_gate::live::LiveCell;
use hotcell_gate::record::Kind;
use hotcell_gate::session::Sessions;
use hotcell_gate::{Authority, AuthorityError, Home, Record, Runs, plain};
use hotcell_ledger::{Event, Ids, News};
use hotcell_store::{RunFilter, RunRow};
use jiff::Timestamp;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::cli::{LogsArgs, LsArgs, RmArgs, ShowArgs, StopArgs};
use crate::error::Failure;
use crate::screen;

fn is_running(home: &Home, record: &Record) -> bool {
    record.outcome.is_none() && LiveCell::find(home, &record.run_id).is_some_and(|cell| cell.is_alive(home))
}

fn state(home: &Home, record: &Record) -> String {
    match record.outcome {
        Some(outcome) => outcome.to_string(),
        None if is_running(home, record) => "running".to_owned(),
        None => "unknown".to_owned(),
    }
}

pub(crate) fn ls(home: &Home, args: &LsArgs) -> Result<(), Failure> {
    let filter = RunFilter {
        labels: args.label.clone(),
        outcome: args.outcome.clone(),
        since: args.since,
        lease: args.lease.as_ref().map(ToString::to_string),
        limit: Some(args.limit),
        ..RunFilter::default()
    };
    let rows = store(home).and_then(|store| store.runs(&filter)).map_err(AuthorityError::from)?;
    if args.json {
        let runs = Runs::of(home);
        let id = |row: &RunRow| row.run_id.parse().ok();
        let records: Vec<Record> = rows.iter().filter_map(|row| runs.read(&id(row)?).ok()).collect();
        return screen::answer(format!(
            "{}\n",
            serde_json::to_string_pretty(&records).expect("records are plain data")
        ));
    }
    if rows.is_empty() {
        screen::note(match args.is_filtered() {
            true => "no such runs; all of them: hotcell ls",
            false => "no runs yet; start one: hotcell run -- echo hello",
        });
        return Ok(());
    }
    let mut table = vec![["RUN", "NAME", "OUTCOME", "EXIT", "WALL", "MEMORY", "COMMAND"].map(str::to_owned).to_vec()];
    for row in rows {
        let is_alive = |id: &str| {
            let cell = id.parse().ok().and_then(|id| LiveCell::find(home, &id));
            cell.is_some_and(|cell| cell.is_alive(home))
        };
        table.push(vec![
            row.run_id.clone(),
            shown(row.name.unwrap_or_default()),
            row.outcome.unwrap_or_else(|| if is_alive(&row.run_id) { "running" } else { "unknown" }.to_owned()),
            row.exit_status.map(|status| status.to_string()).unwrap_or_default(),
            row.wall_ms.map(crate::show_ms).unwrap_or_default(),
            row.memory_peak_bytes.map(|bytes| Bytes(bytes).to_string()).unwrap_or_default(),
            match row.kind.as_str() {
                "session" => "(session)".to_owned(),
                "template" => format!("(template of {})", row.command.split(' ').next().unwrap_or_default()),
                _ => short(&row.command, 60),
            },
        ]);
    }
    screen::answer(screen::table(&table))
}

fn short(text: &str, len: usize) -> String {
    if text.chars().count() <= len { text.to_owned() } else { text.chars().take(len - 1).chain(['…']).collect() }
}

pub(crate) fn show(home: &Home, args: &ShowArgs) -> Result<(), Failure> {
    let record = Runs::of(home).find(&args.run)?;
    if args.json {
        return screen::answer(format!("{}\n", serde_json::to_string_pretty(&record).expect("a record is plain data")));
    }
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut row = |name: &str, value: String| rows.push(vec![name.to_owned(), value]);
    let kind = match record.kind {
        Kind::Session => "session",
        Kind::Template => "template",
        Kind::Run | Kind::Exec => "run",
    };
    row(kind, record.run_id.to_string());
    if let Some(session) = &record.session {
        row("in session", session.to_string());
    }
    if let Some(name) = &record.name {
        row("name", name.clone());
    }
    for (key, value) in &record.labels {
        row("label", format!("{}={}", shown(key), shown(value)));
    }
    row("command", record.command.join(" "));
    if let Some(lease) = &record.lease_id {
        row("lease", lease.to_string());
    }
    if let Some(intent) = &record.intent_id {
        row("intent", shown(intent));
    }
    if let Some(attempt) = &record.attempt_id {
        row("attempt", shown(attempt));
    }
    row("outcome", state(home, &record));
    row("exit status", record.exit_status().to_string());
    if let Some(signal) = record.signal {
        row("signal", signal.to_string());
    }
    if let Some(limit) = &record.limit {
        row("limit", limit.clone());
    }
    if let Some(error) = &record.error {
        row("error", error.clone());
    }
    row("started", record.started_at.to_string());
    if let Some(ended_at) = record.ended_at {
        row("ended", ended_at.to_string());
    }
    row("wall", crate::show_ms(record.wall_ms));
    row("cpu", crate::show_ms(record.cpu_ms));
    row("memory peak", Bytes(record.memory_peak_bytes).to_string());
    row("pids peak", record.pids_peak.map_or_else(|| "not known".to_owned(), |peak| peak.to_string()));
    row("disk peak", Bytes(record.disk_peak_bytes).to_string());
    row("storage", format!("{} read, {} written", Bytes(record.io_read_bytes), Bytes(record.io_write_bytes)));
    for (name, bytes, truncated, sha256) in [
        ("stdout", record.stdout_bytes, record.stdout_truncated, &record.stdout_sha256),
        ("stderr", record.stderr_bytes, record.stderr_truncated, &record.stderr_sha256),
    ] {
        let cut = if truncated { ", truncated" } else { "" };
        row(name, format!("{}{cut}, sha256 {sha256}", Bytes(bytes)));
    }
    if let Some(isolation) = &record.isolation {
        row("tier", format!("{}, as user {} outside", isolation.tier, isolation.id_outside));
        for standing in ["proven", "watched", "missing"] {
            let names = isolation.walls.iter().filter(|(_, found)| *found == standing).map(|(name, _)| name.as_str());
            let names: Vec<&str> = names.collect();
            if !names.is_empty() {
                row(standing, names.join(" "));
            }
        }
    }
    let workspace = &record.workspace;
    if let Some(path) = &workspace.path {
        row("workspace", format!("{path} ({})", workspace.mode));
        for change in &workspace.changed {
            row("", format!("{:<12} {}", change.kind, change.path));
        }
        if workspace.changed_truncated {
            row("", "… and more".to_owned());
        }
    }
    row("artifacts", record.artifacts.display().to_string());
    screen::answer(screen::table(&rows))
}

/// How often a followed log is looked at.
const FOLLOW_EVERY: Duration = Duration::from_millis(100);

pub(crate) fn logs(home: &Home, args: &LogsArgs) -> Result<(), Failure> {
    let runs = Runs::of(home);
    let record = runs.find(&args.run)?;
    let directory = runs.directory(&record.run_id);
    let open = |name: &str, wanted: bool| -> Result<Option<File>, Failure> {
        if !wanted {
            return Ok(None);
        }
        let path = directory.join(name);
        plain::open(&path).map(Some).map_err(|source| Failure::Io {
            message: format!("cannot read `{}`", path.display()),
            hint: Some(format!("see what is there: ls -l '{}'", directory.display())),
            source,
        })
    };
    let mut stdout = open("stdout.log", !args.stderr)?;
    let mut stderr = open("stderr.log", !args.stdout)?;
    loop {
        // Asked before copying: what was written before the end is copied after it.
        let running = args.follow && LiveCell::find(home, &record.run_id).is_some_and(|cell| cell.is_alive(home));
        copy(stdout.as_mut(), &mut io::stdout())?;
        copy(stderr.as_mut(), &mut io::stderr())?;
        if !running {
            return Ok(());
        }
        std::thread::sleep(FOLLOW_EVERY);
    }
}

/// Prints what a run wrote that was made before.
pub(crate) fn replay(home: &Home, record: &Record) -> Result<(), Failure> {
    let directory = Runs::of(home).directory(&record.run_id);
    let open = |name: &str| plain::open(&directory.join(name)).ok();
    copy(open("stdout.log").as_mut(), &mut io::stdout())?;
    copy(open("stderr.log").as_mut(), &mut io::stderr())
}

fn copy(from: Option<&mut File>, to: &mut dyn Write) -> Result<(), Failure> {
    let Some(from) = from else { return Ok(()) };
    let failed = |source| Failure::Io { message: "cannot copy the log".to_owned(), hint: None, source };
    let mut buffer = vec![0; 64 << 10];
    loop {
        let n = from.read(&mut buffer).map_err(failed)?;
        if n == 0 {
            return to.flush().map_err(failed);
        }
        to.write_all(&buffer[..n]).map_err(failed)?;
    }
}

pub(crate) fn rm(home: &Home, args: &RmArgs) -> Result<(), Failure> {
    let runs = Runs::of(home);
    // All are found before any is removed: a mistyped name removes nothing.
    let records: Vec<Record> = if args.all {
        let all = runs.ids()?.into_iter().filter_map(|id| runs.read(&id).ok());
        all.filter(|record| !is_running(home, record)).collect()
    } else {
        args.run.iter().map(|name| find(home, name)).collect::<Result<_, _>>()?
    };
    let is_in_use = |record: &&Record| record.kind != Kind::Session && is_running(home, record);
    if let Some(record) = records.iter().find(is_in_use) {
        return Err(Failure::Refused {
            message: format!("{} is running", record.run_id),
            hint: format!("end it first: hotcell stop {}", record.run_id),
        });
    }
    if records.is_empty() {
        return Ok(());
    }
    let authority = Authority::open(home)?;
    for record in &records {
        if is_running(home, record) {
            end(home, record)?;
        }
        // With a session, what ran in it.
        let below = RunFilter { session: Some(record.run_id.to_string()), ..RunFilter::default() };
        let is_session = record.kind == Kind::Session;
        let below = if is_session { authority.with_store(|store| store.runs(&below))? } else { Vec::new() };
        let below = below.iter().filter_map(|row| row.run_id.parse::<RunId>().ok());
        for id in below.chain([record.run_id.clone()]).filter(|id| runs.directory(id).exists()) {
            // Told first: what is gone without a word would be a hole.
            let ids = Ids { run_id: Some(id.clone()), ..Ids::default() };
            authority.tell(vec![News::new(Event::ExecRemoved, Timestamp::now(), ids, serde_json::Value::Null)])?;
            runs.remove(&id)?;
        }
        screen::note(&format!("removed {}", record.run_id));
    }
    Ok(())
}

/// How long a run may take to end after it was asked to.
const STOP_WAIT: Duration = Duration::from_secs(10);

pub(crate) fn stop(home: &Home, args: &StopArgs) -> Result<(), Failure> {
    let ended = end(home, &find(home, &args.run)?)?;
    screen::note(&format!("stopped {} ({})", ended.run_id, state(home, &ended)));
    Ok(())
}

/// The run that is meant: a session that is there, before any run of that name.
fn find(home: &Home, name: &str) -> Result<Record, Failure> {
    let session = Sessions::of(home).find(name);
    let runs = Runs::of(home);
    Ok(runs.find(session.as_ref().map_or(name, |session| session.run_id.as_str()))?)
}

/// Ends a run, or a session and what runs in it, and waits until it is over.
fn end(home: &Home, record: &Record) -> Result<Record, Failure> {
    let not_running = || Failure::Refused {
        message: format!("{} is not running", record.run_id),
        hint: format!("see how it ended: hotcell show {}", record.run_id),
    };
    let cell = LiveCell::find(home, &record.run_id).ok_or_else(not_running)?;
    let failed = |source: io::Error| Failure::Io {
        message: format!("cannot stop {}", record.run_id),
        hint: Some("see who runs it: ps -fp on its pid".to_owned()),
        source,
    };
    let pid = i32::try_from(cell.supervisor.pid).ok().and_then(Pid::from_raw).ok_or_else(not_running)?;
    // The descriptor first, the identity second: after both, it cannot be another process.
    let Ok(pidfd) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else { return Err(not_running()) };
    if !cell.is_alive(home) {
        return Err(not_running());
    }
    rustix::process::pidfd_send_signal(&pidfd, Signal::TERM).map_err(|errno| failed(errno.into()))?;
    let is_over = || LiveCell::find(home, &record.run_id).is_none() || !cell.is_alive(home);
    let give_up = Instant::now() + STOP_WAIT;
    while !is_over() && Instant::now() < give_up {
        std::thread::sleep(Duration::from_millis(10));
    }
    if !is_over() {
        // With a supervisor that hangs, its cell goes; what is left of both is cleared away here.
        rustix::process::pidfd_send_signal(&pidfd, Signal::KILL).map_err(|errno| failed(errno.into()))?;
        // All its threads: one that still ends may hold the lock by which its place is known to be taken.
        if !is_gone_within(&pidfd, STOP_WAIT) {
            return Err(failed(io::Error::other("it did not end in time")));
        }
        crate::gc::sweep(home);
    }
    Ok(Runs::of(home).find(record.run_id.as_str())?)
}

/// Waits until the last thread of a process is over.
fn is_gone_within(pidfd: &OwnedFd, most: Duration) -> bool {
    let most = Timespec::try_from(most).expect("a short time");
    rustix::event::poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&most)).is_ok_and(|n_ready| n_ready == 1)
}
