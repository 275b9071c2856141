//! Sessions: one cell, one command after the other, each with its own limits and its own report.

use std::time::Duration;

use hotcell_base::{Bytes, Outcome};
use hotcell_cell::run::Observer;
use hotcell_cell::{Cell, Exec, Limit, Limits, Mode, Report, Session, Stream};

use crate::support::*;

struct Nobody;

impl Observer for Nobody {
    fn output(&mut self, _: Stream, _: &[u8]) -> std::io::Result<()> {
        Ok(())
    }
}

fn open(builder: hotcell_cell::Builder) -> Session {
    let plan = allowing(&host(), builder).plan_session(&host()).expect("a plan");
    Session::open(plan, "hotcell-session", &mut Nobody).expect("a session")
}

fn sh(script: &str) -> Exec {
    Exec { argv: ["sh", "-c", script].map(Into::into).to_vec(), ..Exec::default() }
}

fn run(session: &mut Session, script: &str) -> Report {
    session.exec(&sh(script)).expect("a command")
}

#[test]
fn files_stay_and_processes_do_not() {
    let mut session = open(Cell::builder());
    let first = run(&mut session, "echo kept > /tmp/f; echo x > f; sleep 1000 & sleep 1000 & echo $!");
    assert_eq!((first.outcome, first.exit_code), (Outcome::Exited, Some(0)), "{}", first.stderr.text());
    // The control: something was left, and was seen.
    assert!(first.pids_peak >= 3, "VOID: only {} processes", first.pids_peak);
    let second = run(&mut session, "cat /tmp/f f; ls -d /proc/[0-9]*; exit 3");
    assert_eq!(second.exit_code, Some(3));
    let lines: Vec<String> = second.stdout.text().lines().map(str::to_owned).collect();
    assert_eq!(lines[..2], ["kept", "x"]);
    // Init and the shell.
    assert_eq!(lines.len(), 2 + 2, "{lines:?}");
    assert!(session.is_alive());
}

#[test]
fn each_command_has_its_own_limits_and_a_session_outlives_what_they_end() {
    let mut session = open(Cell::builder());
    let narrow = |change: fn(&mut Limits), script: &str| {
        let mut limits = Limits::default();
        change(&mut limits);
        Exec { limits: Some(limits), ..sh(script) }
    };
    let mut end = |exec: Exec| {
        let report = session.exec(&exec).unwrap_or_else(|error| panic!("{error}: {:?}", error));
        assert!(session.is_alive(), "{:?} ended the session", report.outcome);
        (report.outcome, report.limit)
    };
    let forever = "trap '' TERM; while :; do :; done & while :; do :; done";
    let time = narrow(|limits| limits.time = Duration::from_millis(300), forever);
    assert_eq!(end(time), (Outcome::Timeout, Some(Limit::Time)));
    let output = narrow(|limits| limits.output = Bytes(1000), "yes");
    assert_eq!(end(output), (Outcome::OutputLimit, Some(Limit::Output)));
    let hungry = "exec /usr/bin/python3 -c 'import time; x = b\"x\" * (200 << 20); time.sleep(1)'";
    let memory = narrow(|limits| limits.memory = Bytes::mib(64), hungry);
    assert_eq!(end(memory), (Outcome::Oom, Some(Limit::Memory)));
    let processor = narrow(|limits| limits.cpu_time = Some(Duration::from_millis(200)), "while :; do :; done");
    assert_eq!(end(processor), (Outcome::Timeout, Some(Limit::CpuTime)));
    let many = "for i in 1 2 3 4 5 6 7 8 9 10 11 12; do sleep 0.5 & done; wait";
    let pids = narrow(|limits| limits.pids = 8, many);
    assert_eq!(end(pids), (Outcome::Pids, Some(Limit::Pids)));
    let fds = narrow(|limits| limits.fds = 20, "ulimit -n");
    assert_eq!(session.exec(&fds).expect("a command").stdout.text(), "20\n");
    // The control: each of them can be done in this session, with the limits it was made with.
    for script in [hungry, many] {
        let report = run(&mut session, script);
        assert_eq!((report.outcome, report.exit_code), (Outcome::Exited, Some(0)), "{script}");
    }
    assert_eq!(run(&mut session, "ulimit -n").stdout.text(), "1024\n");
}

#[test]
fn a_report_counts_one_command_and_nothing_before_it() {
    let mut session = open(Cell::builder());
    let busy = "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; /usr/bin/python3 -c 'x = b\"x\" * (100 << 20)'";
    let first = run(&mut session, busy);
    let second = run(&mut session, ":");
    assert!(first.cpu > Duration::from_millis(100), "VOID: {:?}", first.cpu);
    assert!(second.cpu < first.cpu / 2, "{:?} after {:?}", second.cpu, first.cpu);
    assert!(first.memory_peak_bytes > 100 << 20, "VOID: {}", first.memory_peak_bytes);
    assert!(second.memory_peak_bytes < 50 << 20, "{}", second.memory_peak_bytes);
    assert_eq!(second.pids_peak, 1);
}

#[test]
fn what_cannot_run_says_so_and_the_session_goes_on() {
    let mut session = open(Cell::builder());
    let outcome = |session: &mut Session, argv: &[&str]| {
        let argv = argv.iter().map(Into::into).collect();
        session.exec(&Exec { argv, ..Exec::default() }).expect("a report").outcome
    };
    assert_eq!(outcome(&mut session, &["no-such-command"]), Outcome::NotFound);
    assert_eq!(outcome(&mut session, &["./no/such"]), Outcome::NotFound);
    assert_eq!(outcome(&mut session, &["/etc/passwd"]), Outcome::NotExecutable);
    let nowhere = Exec { cwd: Some("/no/such".into()), ..sh(":") };
    let error = session.exec(&nowhere).expect_err("there is no such directory").to_string();
    assert!(error.contains("/no/such"), "{error}");
    let wide = Exec { limits: Some(Limits { pids: 10_000, ..Limits::default() }), ..sh(":") };
    let error = session.exec(&wide).expect_err("more than the session has").to_string();
    assert!(error.contains("pids") && error.contains("10000") && error.contains("256"), "{error}");
    let here = Exec { cwd: Some("/tmp".into()), env: vec![("A".into(), Some("b".into()))], ..sh("pwd; echo $A") };
    assert_eq!(session.exec(&here).expect("a report").stdout.text(), "/tmp\nb\n");
    assert_eq!(run(&mut session, "echo $A").stdout.text(), "\n");
}

#[test]
fn a_copy_shows_at_the_end_what_all_commands_changed() {
    let bench = Bench::new();
    let work = bench.dir("work");
    bench.file("work/a", "1\n");
    let mut session = open(Cell::builder().workspace(&work, Mode::Cow));
    assert_eq!(run(&mut session, "echo 2 > a; cat a").stdout.text(), "2\n");
    assert_eq!(run(&mut session, "cat a; echo n > b").stdout.text(), "2\n");
    let left = session.close(&mut Nobody).expect("closed");
    let changed: Vec<_> = left.changes.expect("a copy").list.into_iter().map(|change| change.path).collect();
    assert_eq!(changed, ["a", "b"].map(std::path::PathBuf::from));
    assert_eq!(std::fs::read_to_string(work.join("a")).expect("there"), "1\n");
}

#[test]
fn a_session_whose_first_process_is_killed_is_over_and_says_so() {
    let mut session = open(Cell::builder());
    assert!(session.is_alive());
    let inits = children_of_spawners();
    assert_eq!(inits.len(), 1, "VOID: {inits:?}");
    rustix::process::kill_process(inits[0], rustix::process::Signal::KILL).expect("ours");
    eventually("the session notices", || !session.is_alive());
    assert!(session.exec(&sh(":")).is_err());
}

/// The first processes of this process's cells.
fn children_of_spawners() -> Vec<rustix::process::Pid> {
    let parent = |pid: i32| -> Option<(i32, String)> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let (name, rest) = stat.rsplit_once(')')?;
        Some((rest.split_whitespace().nth(1)?.parse().ok()?, name.split_once('(')?.1.to_owned()))
    };
    let pids = std::fs::read_dir("/proc").expect("/proc").flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let us = i32::try_from(std::process::id()).expect("a pid");
    let is_ours = |pid: &i32| {
        let Some((spawner, name)) = parent(*pid) else { return false };
        name == "cell-init" && parent(spawner).is_some_and(|(above, _)| above == us)
    };
    pids.filter(is_ours).filter_map(rustix::process::Pid::from_raw).collect()
}
