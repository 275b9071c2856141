//! Runs end, with everything in them, however they and we are ended.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Stdio};
use std::time::Duration;

use hotcell_base::Outcome;
use hotcell_cell::{Cell, Limits};
use rustix::process::{Pid, Signal, kill_process};

use crate::support::*;

/// A hotcell that runs this script with a word among its arguments, and has said `ready`.
fn start(bench: &Bench, script: &str, word: &str) -> Child {
    let mut child = bench
        .hotcell(["run", "--", "sh", "-c", &format!("{script}\nsleep 60"), "sh", word])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    child
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap(), signal).unwrap();
}

#[test]
fn f1_what_a_command_leaves_behind_dies_with_the_run() {
    let word = token();
    for script in [
        format!("setsid sh -c 'sleep 61 # ' sh {word} & sleep 0.1"),
        format!("(trap '' HUP TERM; exec sh -c 'sleep 61 #' sh {word}) & disown 2>/dev/null; sleep 0.1"),
        format!(
            "python3 -c 'import os, sys, time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\ntime.sleep(61)' {word}; sleep 0.1"
        ),
    ] {
        let report = run(Cell::builder().command(["sh", "-c", &script]));
        assert_eq!(report.outcome, Outcome::Exited, "{}", report.stderr.text());
        assert_eq!(processes_with(&word), Vec::<i32>::new(), "ESCAPED: {script}");
    }
    // The control: without a cell the first of them lives on.
    let script = format!("setsid sh -c 'sleep 61 #' sh {word} & sleep 0.1");
    std::process::Command::new("sh").args(["-c", &script]).status().unwrap();
    let left = processes_with(&word);
    for pid in &left {
        rustix::process::kill_process_group(Pid::from_raw(*pid).unwrap(), Signal::KILL).unwrap();
    }
    assert!(!left.is_empty(), "VOID: nothing was left behind without a cell");
}

#[test]
fn f2_commands_that_will_not_end_are_ended() {
    for script in [
        "trap '' TERM INT HUP; while :; do sleep 1; done",
        "kill -STOP $$; sleep 60",
        "(trap '' TERM; sleep 60) & wait",
    ] {
        let limits = Limits { time: Duration::from_millis(300), ..Limits::default() };
        let report = run(Cell::builder().limits(limits).command(["sh", "-c", script]));
        assert_eq!(report.outcome, Outcome::Timeout, "{script}");
    }
}

#[test]
fn f3_a_killed_supervisor_takes_its_cell_with_it() {
    let (bench, word) = (Bench::new(), token());
    let mut child = start(&bench, "echo ready", &word);
    // One, or two while its shell is between fork and exec.
    assert!(!processes_with(&word).is_empty(), "VOID: the command does not run");
    let run_id = newest_run(&bench);
    signal(&child, Signal::KILL);
    child.wait().unwrap();
    eventually("the tree dies", || processes_with(&word).is_empty());
    eventually("its cgroup goes", || cgroups_with(&run_id).is_empty());
    // The next start knows that it does not know.
    bench.output(["run", "-q", "--", "true"]);
    let shown = text(&bench.output(["show", &run_id]).stdout);
    assert!(shown.contains("unknown"), "{shown}");
    assert!(std::fs::read_dir(bench.path("home/cells")).unwrap().next().is_none());
}

#[test]
fn f3_a_killed_spawner_takes_its_cell_with_it() {
    let (bench, word) = (Bench::new(), token());
    let mut child = start(&bench, "echo ready", &word);
    let supervisor = child.id();
    let spawner = std::fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children")).unwrap();
    for pid in spawner.split_whitespace() {
        kill_process(Pid::from_raw(pid.parse().unwrap()).unwrap(), Signal::KILL).unwrap();
    }
    eventually("the tree dies", || processes_with(&word).is_empty());
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(125));
}

#[test]
fn f3_a_supervisor_killed_at_any_moment_leaves_nothing() {
    let (bench, word) = (Bench::new(), token());
    let work = bench.dir("work");
    let rounds: u64 = if std::env::var_os("HOTCELL_SOAK").is_some() { 500 } else { 60 };
    let mounts = || std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let mounts_before = mounts();
    for round in 0..rounds {
        let mut child = bench
            .hotcell(["run", "-w", work.to_str().unwrap(), "--", "sh", "-c", "sleep 60", "sh", &word])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // From before the first step to well into the run, a little later each time.
        std::thread::sleep(Duration::from_micros(round % 60 * 350));
        signal(&child, Signal::KILL);
        child.wait().unwrap();
    }
    eventually("every process goes", || processes_with(&word).is_empty() && processes_in(&bench.path("")).is_empty());
    let next = bench.output(["run", "-q", "--", "true"]);
    assert!(next.status.success(), "{}", text(&next.stderr));
    for run in std::fs::read_dir(bench.path("home/runs")).unwrap().flatten() {
        let left = cgroups_with(&run.file_name().to_string_lossy());
        assert!(left.is_empty(), "{left:?}");
    }
    assert_eq!(mounts(), mounts_before);
    assert_eq!(std::fs::read_dir(&work).unwrap().count(), 0);
    assert_eq!(text(&bench.output(["gc"]).stdout), "nothing is left of any crash\n");
}

#[test]
fn what_the_caller_ignores_does_not_hang_a_run() {
    let bench = Bench::new();
    let script = "trap '' CHLD INT; exec \"$0\" run -q --time 20s -- sh -c 'exit 5'";
    let status = bench.command("sh").args(["-c", script, HOTCELL.as_str()]).status().unwrap();
    assert_eq!(status.code(), Some(5));
}

#[test]
fn ctrl_c_is_passed_on_and_the_commands_answer_counts() {
    let (bench, word) = (Bench::new(), token());
    let mut child = start(&bench, "trap 'exit 42' INT; echo ready; while :; do sleep 0.05; done", &word);
    signal(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(42));
}

#[test]
fn a_command_that_ignores_the_end_is_killed_after_a_while() {
    let (bench, word) = (Bench::new(), token());
    let mut child = start(&bench, "trap '' TERM; echo ready; while :; do sleep 0.05; done", &word);
    signal(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(137));
    assert!(processes_with(&word).is_empty());
}

#[test]
fn a_second_ctrl_c_kills_at_once() {
    let (bench, word) = (Bench::new(), token());
    let mut child = start(&bench, "trap '' INT TERM; echo ready; while :; do sleep 0.05; done", &word);
    signal(&child, Signal::INT);
    std::thread::sleep(Duration::from_millis(50));
    signal(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(137));
}

#[test]
fn stop_ends_a_run_from_elsewhere_and_logs_follow_it() {
    let (bench, word) = (Bench::new(), token());
    let mut child = start(&bench, "echo ready; echo more >&2", &word);
    let run_id = newest_run(&bench);
    let listed = text(&bench.output(["ls"]).stdout);
    assert!(listed.contains("running"), "{listed}");
    let refused = bench.output(["rm", &run_id]);
    assert_eq!(refused.status.code(), Some(3), "{}", text(&refused.stderr));
    let mut follower =
        bench.hotcell(["logs", "-f", &run_id]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let stopped = bench.output(["stop", &run_id]);
    assert!(stopped.status.success(), "{}", text(&stopped.stderr));
    assert_eq!(child.wait().unwrap().code(), Some(143));
    assert!(follower.wait().unwrap().success());
    let mut followed = String::new();
    follower.stdout.take().unwrap().read_to_string(&mut followed).unwrap();
    assert_eq!(followed, "ready\n");
    let again = bench.output(["stop", &run_id]);
    assert_eq!(again.status.code(), Some(3), "{}", text(&again.stderr));
    assert!(bench.output(["rm", &run_id]).status.success());
    assert!(!bench.path("home/runs").join(&run_id).exists());
}

#[test]
fn a_command_is_timed_from_its_beginning_to_its_end() {
    let bench = Bench::new();
    let (record, _) = bench.json(["--", "sleep", "0.3"]);
    assert!(record["wall_ms"].as_f64().unwrap() >= 300.0, "{record:#}");
}

#[test]
fn a_stopped_hotcell_does_not_stop_the_clock() {
    if std::env::var_os("HOTCELL_SOAK").is_none() {
        return skip("a hotcell that is stopped for half a minute: with HOTCELL_SOAK=1");
    }
    let (bench, word) = (Bench::new(), token());
    let args = ["run", "-q", "--time", "1s", "--", "sh", "-c", "sleep 600; :", "sh", &word];
    let mut child = bench.hotcell(args).spawn().unwrap();
    eventually("it runs", || !processes_with(&word).is_empty());
    signal(&child, Signal::STOP);
    std::thread::sleep(Duration::from_secs(25));
    assert!(!processes_with(&word).is_empty(), "VOID: it ended before its time");
    eventually("init ends it", || processes_with(&word).is_empty());
    signal(&child, Signal::CONT);
    assert_eq!(child.wait().unwrap().code(), Some(124));
}

#[test]
fn a_slow_reader_does_not_stop_the_clock() {
    let bench = Bench::new();
    // Nobody reads our stdout; the command writes for ever; the time limit must still hold.
    let mut child = bench
        .hotcell(["run", "-q", "--time", "500ms", "--", "sh", "-c", "yes"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let run_id =
        || std::fs::read_dir(bench.path("home/runs")).into_iter().flatten().flatten().next().map(|run| run.path());
    eventually("the run is recorded as over", || {
        run_id().is_some_and(|run| std::fs::read_to_string(run.join("exit_code.txt")).is_ok_and(|code| code == "124"))
    });
    let mut rest = Vec::new();
    child.stdout.take().unwrap().read_to_end(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(124));
}

#[test]
fn a_closed_stdout_does_not_stop_the_run() {
    let bench = Bench::new();
    let mut child = bench
        .hotcell(["run", "--", "sh", "-c", "yes | head -c 1000000; exit 5"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(5));
    assert!(said.contains("stdout is closed"), "{said}");
    let log = bench.path("home/runs").join(newest_run(&bench)).join("stdout.log");
    assert_eq!(std::fs::metadata(log).unwrap().len(), 1_000_000);
}

fn newest_run(bench: &Bench) -> String {
    let listed: serde_json::Value = serde_json::from_slice(&bench.output(["ls", "--json"]).stdout).unwrap();
    listed[0]["run_id"].as_str().unwrap().to_owned()
}
