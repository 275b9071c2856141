//! F: lifecycle. Nothing outlives its run, and nothing is forgotten.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use hotcell_base::Outcome;
use hotcell_cell::Limits;
use serde_json::Value;

use super::bench::Bench;
use super::verdict::{Attempt, Verdict, other, skip};

pub(super) fn attempts() -> Vec<Attempt> {
    vec![
        other("F1", "leave a daemon behind", daemon),
        other("F2", "ignore every signal at the time limit", stubborn),
        other("F3", "outlive a supervisor that is killed", orphan),
        other("F5", "be forgotten, or run twice, after a crash", crash),
        skip(
            "F6",
            "jump the clock past the time limit",
            "setting this machine's clock would harm it; limits use the monotonic clock",
        ),
        other("F7", "run on when nothing can be recorded", full_disk),
        other("E11", "start many at once", many),
    ]
}

/// Whether a process has this word among its arguments.
fn lives(word: &str) -> bool {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let lines = processes.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok());
    lines.into_iter().any(|line| line.split(|byte| *byte == 0).any(|argument| argument == word.as_bytes()))
}

/// Waits for a condition, for as long as a busy machine may need.
fn eventually(mut holds: impl FnMut() -> bool) -> bool {
    let give_up = Instant::now() + Duration::from_secs(10);
    while !holds() {
        if Instant::now() > give_up {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    true
}

/// A word no other process has.
fn token(name: &str) -> String {
    format!("hotcell-selftest-{name}-{}", std::process::id())
}

fn daemon(bench: &Bench) -> Verdict {
    let inside = token("inside");
    if let Err(why) = bench.act(bench.whole(), Limits::default(), "daemon", &[&inside]) {
        return Verdict::Void(why);
    }
    let held = !lives(&inside);
    end(&inside);
    // The control: without a cell it lives on, until we end it.
    let outside = token("outside");
    let left = bench.outside("daemon", &[&outside]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    // A list of processes that is read while one forks may show neither.
    let live = left.is_ok() && eventually(|| lives(&outside));
    end(&outside);
    Verdict::of(held, "it lives on", live, "nothing is left behind without a cell either")
}

/// Ends processes of ours by the word only they have.
fn end(word: &str) {
    for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let pid = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse::<i32>().ok())
            .and_then(rustix::process::Pid::from_raw);
        if let Some(pid) = pid
            && line.split(|byte| *byte == 0).any(|argument| argument == word.as_bytes())
        {
            let _gone = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

fn stubborn(bench: &Bench) -> Verdict {
    for script in [
        "trap '' TERM INT HUP; while :; do sleep 0.05; done",
        "kill -STOP $$; sleep 60",
        "(trap '' TERM; sleep 60) & wait",
    ] {
        let limits = Limits { time: Duration::from_millis(200), ..Limits::default() };
        match bench.run(bench.whole().limits(limits).command(["sh", "-c", script])) {
            Err(why) => return Verdict::Void(why),
            Ok(report) if report.outcome != Outcome::Timeout => {
                return Verdict::Escaped(format!("{}: {script}", report.outcome));
            }
            Ok(_) => {}
        }
    }
    // The control is in the outcome: it was still running when its time was over.
    Verdict::Held
}

/// A hotcell that runs something with a word among its arguments, and says so.
fn start(bench: &Bench, home: &Path, word: &str) -> Result<Child, String> {
    let args = ["run", "-q", "--", "sh", "-c", "echo up; sleep 60", "sh", word];
    let child = bench.hotcell(home, &args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let mut child = child.map_err(|error| error.to_string())?;
    let mut line = String::new();
    let said = child.stdout.as_mut().map(|stdout| BufReader::new(stdout).read_line(&mut line));
    if line == "up\n" { Ok(child) } else { Err(format!("it did not start: {said:?}")) }
}

fn home(bench: &Bench, name: &str) -> PathBuf {
    let home = bench.path(name);
    // Another attempt's, if it is there.
    let _fresh = fs::remove_dir_all(&home);
    home
}

fn orphan(bench: &Bench) -> Verdict {
    let (home, word) = (home(bench, "home"), token("orphan"));
    let mut child = match start(bench, &home, &word) {
        Ok(child) => child,
        Err(why) => return Verdict::Void(why),
    };
    // Hotcell itself has the word among its arguments, too: look below it.
    let children = || {
        let pid = child.id();
        fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default()
    };
    let live = !children().trim().is_empty();
    let killed = child.kill().and_then(|()| child.wait());
    let held = killed.is_ok() && eventually(|| !lives(&word));
    end(&word);
    Verdict::of(held, "it lives on", live, "there was nothing to outlive it")
}

fn crash(bench: &Bench) -> Verdict {
    let (home, word) = (home(bench, "home"), token("crash"));
    let mut child = match start(bench, &home, &word) {
        Ok(child) => child,
        Err(why) => return Verdict::Void(why),
    };
    let killed = child.kill().and_then(|()| child.wait());
    if killed.is_err() || !eventually(|| !lives(&word)) {
        return Verdict::Void("it could not be killed".to_owned());
    }
    let before = listed(bench, &home);
    let next = bench.hotcell(&home, &["run", "-q", "--", "true"]).stderr(Stdio::null()).status();
    let after = listed(bench, &home);
    let outcomes: Vec<&str> = after.iter().filter_map(|run| run["outcome"].as_str()).collect();
    Verdict::of(
        outcomes.iter().filter(|outcome| **outcome == "unknown").count() == 1 && after.len() == 2 && !lives(&word),
        format!("the next start knows of {outcomes:?}"),
        next.is_ok_and(|status| status.success()) && before.len() == 1,
        "the run was not recorded before it began",
    )
}

fn listed(bench: &Bench, home: &Path) -> Vec<Value> {
    let output = bench.hotcell(home, &["ls", "--json"]).output().map(|output| output.stdout).unwrap_or_default();
    serde_json::from_slice::<Value>(&output).ok().and_then(|runs| runs.as_array().cloned()).unwrap_or_default()
}

fn full_disk(bench: &Bench) -> Verdict {
    // No file of this hotcell's may grow beyond 64 KiB: what it records meets that as it would meet a full disk.
    let home = home(bench, "home");
    let probe = bench.probe();
    let record = |limit: &str| {
        let script = format!("{limit} exec \"$0\" run --json -- sh -c 'yes | head -c 2000000; exit 0'");
        let mut shell = std::process::Command::new("sh");
        let accepted = std::env::var_os("HOTCELL_ALLOW_MISSING").unwrap_or_default();
        shell.args(["-c", &script]).arg(&probe).env("HOTCELL_HOME", &home).env("HOTCELL_ALLOW_MISSING", accepted);
        let output = shell.stdin(Stdio::null()).output().map_err(|error| error.to_string())?;
        let object: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        Ok::<_, String>((output.status.code(), object["outcome"].as_str().unwrap_or_default().to_owned()))
    };
    match (record("ulimit -f 64;"), record("")) {
        (Err(why), _) | (_, Err(why)) => Verdict::Void(why),
        (Ok((code, outcome)), Ok(control)) => Verdict::of(
            code == Some(125) && outcome == "platform_error",
            format!("exit {code:?}, outcome {outcome:?}"),
            control == (Some(0), "exited".to_owned()),
            format!("fails with room enough too: {control:?}"),
        ),
    }
}

fn many(bench: &Bench) -> Verdict {
    const N: usize = 40;
    let home = home(bench, "home");
    let start = |number: usize| {
        let word = number.to_string();
        let args = ["run", "-q", "--", "sh", "-c", "echo $1", "sh", &word];
        bench.hotcell(&home, &args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()
    };
    let children: Vec<Child> = match (0..N).map(start).collect() {
        Ok(children) => children,
        Err(error) => return Verdict::Void(error.to_string()),
    };
    for (number, mut child) in children.into_iter().enumerate() {
        let mut said = String::new();
        let _read = child.stdout.take().map(|mut stdout| stdout.read_to_string(&mut said));
        let code = child.wait().ok().and_then(|status| status.code());
        if (code, said.as_str()) != (Some(0), format!("{number}\n").as_str()) {
            return Verdict::Escaped(format!("start {number} of {N}: exit {code:?}, {said:?}"));
        }
    }
    Verdict::of(true, "", listed(bench, &home).len() >= 20, "the runs were not recorded")
}
