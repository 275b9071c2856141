//! Killed at any step, hotcell leaves nothing that the next start does not find and clear away.
//!
//! The kernel stops the program at every system call it makes and kills it there: each of its steps is tried, and
//! nothing is built into it for that.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use hotcell_sys::trace::{Ending, Then, at_calls, kill_at_call};
use serde_json::Value;

use crate::support::*;

/// Kills a command at every `stride`th of its calls until it gets to its end; how many times it was killed.
fn at_every_call(stride: u64, mut start: impl FnMut() -> Command, mut after: impl FnMut(u64, Ending)) -> u64 {
    let mut n_killed = 0;
    for n in (1..).step_by(usize::try_from(stride).unwrap()) {
        let mut command = start();
        let mut said = tempfile::tempfile().unwrap();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(said.try_clone().unwrap());
        let ending = kill_at_call(&mut command, n).unwrap();
        after(n, ending);
        match ending {
            Ending::Killed { .. } => n_killed += 1,
            Ending::Ended { status } => {
                let mut text = String::new();
                std::io::Seek::rewind(&mut said).unwrap();
                std::io::Read::read_to_string(&mut said, &mut text).unwrap();
                assert_eq!(status, 0, "not killed at call {n}, it should have succeeded: {text}");
                break;
            }
        }
    }
    n_killed
}

#[track_caller]
fn gc(bench: &Bench) {
    let output = bench.output(["gc", "--yes"]);
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
}

fn forget_packs(bench: &Bench) {
    for pack in std::fs::read_dir(bench.path("home/rollback")).into_iter().flatten().flatten() {
        if pack.file_name() != "unfinished" {
            bench.output(["undo", "--forget", pack.file_name().to_str().unwrap()]);
        }
    }
}

fn stride(short: u64) -> u64 {
    if std::env::var_os("HOTCELL_SOAK").is_some() { 1 } else { short }
}

/// What a home and a workspace hold that must be gone after the next start.
fn leftovers(bench: &Bench, work: &Path) -> Vec<PathBuf> {
    let list = |path: &Path| std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut left: Vec<PathBuf> = list(&bench.path("home/cells")).collect();
    left.extend(list(&bench.path("home/rollback/unfinished")));
    left.extend(list(work).filter(|path| path.file_name().unwrap().to_string_lossy().starts_with(".hotcell-")));
    for run in list(&bench.path("home/runs")) {
        left.extend(cgroups_with(&run.file_name().unwrap().to_string_lossy()));
    }
    left
}

#[test]
fn a_run_killed_at_any_call_leaves_nothing_after_the_next_start() {
    let bench = Bench::new();
    let (work, word) = (bench.dir("work"), token());
    bench.file("work/a", "a\n");
    let args = ["run", "-q", "-w", work.to_str().unwrap(), "--", "sh", "-c", "echo b >> a; echo new > n", "sh", &word];
    let n_killed = at_every_call(
        stride(5),
        || bench.hotcell(args),
        |n, ending| {
            eventually("every process goes", || {
                processes_with(&word).is_empty() && processes_in(&bench.path("")).is_empty()
            });
            assert_eq!(std::fs::read_to_string(work.join("a")).unwrap(), "a\n", "call {n}, {ending:?}");
            // Cleared away by hand at times, by the next run otherwise.
            if n % 2 == 0 {
                gc(&bench);
                let left = leftovers(&bench, &work);
                assert!(left.is_empty(), "call {n}, {ending:?}: {left:?}");
            }
        },
    );
    assert!(n_killed > 20, "VOID: killed {n_killed} times only");
    assert!(bench.output(["run", "-q", "--", "true"]).status.success());
    let left = leftovers(&bench, &work);
    assert!(left.is_empty(), "{left:?}");
    // Whatever was recorded has an end: exited, or nobody knows.
    let runs: Value = serde_json::from_slice(&bench.output(["ls", "--json", "-n", "1000000"]).stdout).unwrap();
    let outcomes: Vec<&str> =
        runs.as_array().unwrap().iter().map(|run| run["outcome"].as_str().unwrap_or("none")).collect();
    assert!(outcomes.contains(&"unknown") && !outcomes.contains(&"none"), "{outcomes:?}");
}

#[test]
fn a_run_in_place_killed_at_any_call_leaves_no_decoy() {
    let bench = Bench::new();
    let work = bench.dir("work");
    bench.file("work/a", "a\n");
    let args = ["run", "-q", "-w", work.to_str().unwrap(), "--mode", "rw", "--", "true"];
    let mut decoys_seen = 0;
    at_every_call(
        stride(9),
        || bench.hotcell(args),
        |n, ending| {
            let count = || std::fs::read_dir(&work).unwrap().count();
            decoys_seen = decoys_seen.max(count());
            eventually("every process goes", || processes_in(&bench.path("")).is_empty());
            gc(&bench);
            assert_eq!(
                count(),
                1,
                "call {n}, {ending:?}: {:?}",
                std::fs::read_dir(&work).unwrap().flatten().collect::<Vec<_>>()
            );
        },
    );
    assert!(decoys_seen > 10, "VOID: no decoy was ever there");
}

/// The invariants of the gate: an attempt never runs twice, what is told holds together, and how it ended is honest.
#[test]
fn a_leased_attempt_killed_at_any_call_runs_at_most_once_and_is_told_honestly() {
    let bench = Bench::new();
    let work = bench.dir("work");
    let work_name = work.to_str().unwrap().to_owned();
    let issue = || {
        let words = [
            "lease",
            "issue",
            "--command",
            "python3 -c **",
            "--write",
            &work_name,
            "--minutes",
            "10",
            "--runs",
            "1000",
        ];
        text(&bench.output(words).stdout).trim().to_owned()
    };
    let (mut n_attempt, mut n_unknown, mut n_done, mut lease) = (0, 0, 0, issue());
    let words = |lease: &str, n: u64| {
        let script = format!("open('ran-{n}', 'a').write('x')");
        let attempt = format!("attempt-{n}");
        [
            "run",
            "-q",
            "--lease",
            lease,
            "--attempt-id",
            &attempt,
            "-w",
            &work_name,
            "--mode",
            "rw",
            "--",
            "python3",
            "-c",
            &script,
        ]
        .map(str::to_owned)
    };
    // One after the other: an attempt that was killed, and the same again.
    loop {
        n_attempt += 1;
        let n = n_attempt * stride(61);
        let mut command = bench.hotcell(words(&lease, n));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let ending = kill_at_call(&mut command, n).unwrap();
        eventually("every process goes", || processes_in(&bench.path("")).is_empty());
        let again = bench.output(words(&lease, n));
        let said = text(&again.stderr);
        let times = std::fs::read_to_string(work.join(format!("ran-{n}"))).unwrap_or_default().len();
        match (again.status.code(), times) {
            // It ran to its end, now or before.
            (Some(0), 1) => n_done += 1,
            // Nobody knows: it may have run, and does not again.
            (Some(125), 0 | 1) => n_unknown += 1,
            other => panic!("call {n}, {ending:?}: {other:?} {said}"),
        }
        let verified = bench.output(["audit", "verify"]);
        assert!(verified.status.success(), "call {n}: {}", text(&verified.stdout));
        assert!(bench.path("home/cells").read_dir().unwrap().next().is_none(), "call {n}: a cell is left");
        if matches!(ending, Ending::Ended { .. }) {
            break;
        }
        if n_attempt % 40 == 0 {
            lease = issue();
        }
    }
    assert!(n_unknown > 0 && n_done > 1, "VOID: {} unknown, {n_done} done", n_unknown);
    // Every run that was told of has an end that was told of.
    let told = text(&bench.output(["audit", "export"]).stdout);
    let entries: Vec<Value> = told.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let runs_of = |wanted: &[&str]| -> std::collections::BTreeSet<String> {
        let of = entries.iter().filter(|entry| wanted.contains(&entry["event"].as_str().unwrap()));
        of.map(|entry| entry["run_id"].as_str().unwrap().to_owned()).collect()
    };
    let ended = runs_of(&["exec_event.FINISHED", "exec_event.KILLED", "exec_event.TIMEOUT"]);
    assert!(runs_of(&["exec_event.STARTED"]).is_subset(&ended));
}

#[test]
fn an_apply_or_undo_killed_at_any_call_is_whole_or_not_at_all() {
    whole_or_not_at_all(&Bench::new(), None);
}

/// As above, where what a pack keeps of the originals are copies.
#[test]
fn an_apply_or_undo_killed_on_another_filesystem_is_whole_or_not_at_all() {
    let place = elsewhere();
    whole_or_not_at_all(&Bench::new(), Some(place.path()));
}

fn whole_or_not_at_all(bench: &Bench, work: Option<&Path>) {
    let work = work.map_or_else(|| bench.dir("work"), Path::to_owned);
    let trees = bench.file("trees.py", include_str!("trees.py"));
    let python = |what: &str| {
        let mut python = Command::new("/usr/bin/python3");
        let output = python.arg(&trees).args([what, "268"]).current_dir(&work).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let before = python("make");
    let mount = format!("{}:/trees.py:ro", trees.display());
    let command = ["/usr/bin/python3", "/trees.py", "change", "268"];
    let run = ["run", "-q", "--name", "changes", "-w", work.to_str().unwrap(), "--mount", &mount, "--"];
    let output = bench.output(run.iter().chain(&command));
    assert!(output.status.success(), "{}", text(&output.stderr));

    let described = || python("describe");
    let recovered = || {
        let output = bench.output(["gc", "--yes"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let left = leftovers(bench, &work);
        assert!(left.is_empty(), "{left:?}");
    };
    let (mut n_back, mut n_there) = (0, 0);
    at_every_call(
        stride(13),
        || bench.hotcell(["apply", "changes"]),
        |n, ending| {
            recovered();
            let now = described();
            if now == before {
                n_back += 1;
            } else {
                // Whole: the way back is there, and leads back.
                n_there += 1;
                let undo = bench.output(["undo", "changes"]);
                assert!(undo.status.success(), "call {n}, {ending:?}: {}", text(&undo.stderr));
                assert_eq!(described(), before, "call {n}, {ending:?}");
            }
        },
    );
    assert!(n_back > 10 && n_there > 0, "VOID: {n_back} times back, {n_there} times there");

    let applied = bench.output(["apply", "changes"]);
    assert!(applied.status.success());
    let after = described();
    let id = text(&applied.stdout).split_whitespace().last().unwrap().to_owned();
    let (mut id, mut n_back, mut n_there) = (id, 0, 0);
    let current = std::cell::RefCell::new(id.clone());
    at_every_call(
        stride(13),
        || bench.hotcell(["undo", &current.borrow()]),
        |n, ending| {
            recovered();
            let now = described();
            if now == after {
                n_there += 1;
            } else {
                assert!(now == before, "call {n}, {ending:?}: half-way");
                n_back += 1;
                let again = bench.output(["apply", "changes"]);
                assert!(again.status.success(), "call {n}, {ending:?}: {}", text(&again.stderr));
                id = text(&again.stdout).split_whitespace().last().unwrap().to_owned();
                current.replace(id.clone());
            }
        },
    );
    assert!(n_back > 0 && n_there > 10, "VOID: {n_back} times back, {n_there} times there");
}

#[test]
fn what_others_changed_since_a_crash_is_left_alone_and_said() {
    let bench = Bench::new();
    let work = bench.dir("work");
    for name in ["a", "b", "c"] {
        bench.file(&format!("work/{name}"), "old\n");
    }
    let work_name = work.to_str().unwrap();
    let run = ["run", "-q", "--name", "r", "-w", work_name, "--", "sh", "-c", "for f in a b c; do echo new > $f; done"];
    assert!(bench.output(run).status.success());
    // Killed between the renames of `a` and of `c`.
    let is_new = |name: &str| std::fs::read_to_string(work.join(name)).unwrap() == "new\n";
    let halfway = (1..).find(|n| {
        let mut command = bench.hotcell(["apply", "r"]);
        let ending = kill_at_call(command.stdout(Stdio::null()).stderr(Stdio::null()), *n).unwrap();
        assert!(matches!(ending, Ending::Killed { .. }), "VOID: never half-way");
        let is_halfway = is_new("a") && !is_new("c");
        if !is_halfway {
            bench.output(["gc", "--yes"]);
        }
        is_halfway
    });
    assert!(halfway.is_some());
    bench.file("work/a", "somebody's\n");
    let said = text(&bench.output(["gc", "--yes"]).stderr);
    assert!(said.contains("left alone") && said.contains("a is a file of 11 bytes"), "{said}");
    let read = |name: &str| std::fs::read_to_string(work.join(name)).unwrap();
    assert_eq!([read("a"), read("b"), read("c")], ["somebody's\n", "old\n", "old\n"]);
    let listed = text(&bench.output(["undo", "--list"]).stdout);
    assert!(listed.contains("stuck"), "{listed}");
}

#[test]
fn gc_touches_nothing_unless_it_is_told_to_and_never_what_is_not_ours() {
    let bench = Bench::new();
    let mut child = bench.hotcell(["run", "-q", "--", "sleep", "60"]).stdout(Stdio::null()).spawn().unwrap();
    eventually("it runs", || std::fs::read_dir(bench.path("home/cells")).into_iter().flatten().count() == 1);
    let alive = text(&bench.output(["gc", "--yes"]).stdout);
    assert_eq!(alive, "nothing is left of any crash\n");
    // A record that names somebody else's group, and another's process by a pid that was reused.
    let is_record = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "json");
    let records = std::fs::read_dir(bench.path("home/cells")).unwrap().flatten().map(|entry| entry.path());
    let cell = records.into_iter().find(is_record).unwrap();
    let mut forged: Value = serde_json::from_slice(&std::fs::read(&cell).unwrap()).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    forged["supervisor"]["pid"] = 1.into();
    let victim = bench.dir("victim");
    let odd = bench.dir("hotcell-x");
    let climbing = format!("/sys/fs/cgroup/../../..{}", odd.display());
    forged["cgroups"] = serde_json::json!([victim, "/sys/fs/cgroup/memory", climbing]);
    forged["placeholders"] = serde_json::json!([victim]);
    std::fs::write(&cell, forged.to_string()).unwrap();
    let listed = text(&bench.output(["gc"]).stdout);
    assert!(listed.contains("cell") && listed.contains("nothing was touched"), "{listed}");
    assert!(cell.exists());
    let json: Value = serde_json::from_slice(&bench.output(["gc", "--json"]).stdout).unwrap();
    // Beside the cell there may be its ticket.
    let n_cells = json["found"].as_array().unwrap().iter().filter(|found| found["what"] == "cell").count();
    assert_eq!((n_cells, &json["cleared"]), (1, &Value::Bool(false)));
    gc(&bench);
    assert!(!cell.exists() && victim.is_dir() && odd.is_dir());
    assert!(text(&bench.output(["ls"]).stdout).contains("unknown"));
}

#[test]
fn hotcells_of_one_home_do_not_disturb_each_other() {
    let bench = Bench::new();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Some clear up all the time, some are killed, and the others must not notice.
        let clearing = scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let output = bench.output(["gc", "--yes"]);
                assert!(output.status.success(), "{}", text(&output.stderr));
            }
        });
        let dying = scope.spawn(|| {
            for round in 0..40u64 {
                let mut child =
                    bench.hotcell(["run", "-q", "--", "sleep", "60"]).stdout(Stdio::null()).spawn().unwrap();
                std::thread::sleep(std::time::Duration::from_millis(round % 20 * 4));
                child.kill().unwrap();
                child.wait().unwrap();
            }
        });
        for number in 0..40 {
            let word = number.to_string();
            let output =
                bench.output(["run", "-q", "--", "sh", "-c", "echo $1 > /tmp/f; sleep 0.02; cat /tmp/f", "sh", &word]);
            assert_eq!(
                (output.status.code(), text(&output.stdout)),
                (Some(0), format!("{number}\n")),
                "{}",
                text(&output.stderr)
            );
        }
        dying.join().unwrap();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        clearing.join().unwrap();
    });
    gc(&bench);
    let runs: Value = serde_json::from_slice(&bench.output(["ls", "--json", "-n", "1000"]).stdout).unwrap();
    let count = |outcome: &str| runs.as_array().unwrap().iter().filter(|run| run["outcome"] == outcome).count();
    assert_eq!(count("exited"), 40);
    assert!(count("unknown") > 5, "VOID: nobody died");
    assert_eq!(count("exited") + count("unknown"), runs.as_array().unwrap().len(), "{runs:#}");
    assert!(leftovers(&bench, &bench.path("")).is_empty());
}

/// Files that a run changed, removed and made, in a directory where somebody saves them meanwhile.
struct Edited<'a> {
    bench: &'a Bench,
    work: PathBuf,
    /// Whether the command under test takes the changes back.
    undoing: bool,
}

const EDITED: [&str; 3] = ["mod", "del", "added"];

impl<'a> Edited<'a> {
    fn new(bench: &'a Bench, work: PathBuf, undoing: bool) -> Edited<'a> {
        let edited = Edited { bench, work, undoing };
        edited.put_old();
        let (work, script) = (edited.work.to_str().unwrap(), "echo new > mod; rm del; echo new > added");
        let run = bench.output(["run", "-q", "--name", "r", "-w", work, "--", "sh", "-c", script]);
        assert!(run.status.success(), "{}", text(&run.stderr));
        edited
    }

    /// As it was before the run.
    fn put_old(&self) {
        for entry in std::fs::read_dir(&self.work).unwrap().flatten() {
            std::fs::remove_file(entry.path()).unwrap();
        }
        for name in ["mod", "del"] {
            std::fs::write(self.work.join(name), "old\n").unwrap();
        }
    }

    /// As it must be before the command under test. What is stuck is the saver's to decide.
    fn reset(&self) {
        forget_packs(self.bench);
        self.put_old();
        if self.undoing {
            assert!(self.bench.output(["apply", "r"]).status.success());
        }
    }

    /// As editors do it: written beside it, and renamed into place.
    fn save(&self, contents: &str) {
        for name in EDITED {
            std::fs::write(self.work.join(".saved"), contents).unwrap();
            std::fs::rename(self.work.join(".saved"), self.work.join(name)).unwrap();
        }
    }

    /// Files that hold this in their place; or anywhere, under their own name or one made of it.
    fn with(&self, contents: &str, anywhere: bool) -> Vec<&'static str> {
        let is_kept = |name: &&str| {
            let files = std::fs::read_dir(&self.work).unwrap().flatten().map(|entry| entry.path());
            let is_it = |path: &PathBuf| {
                let found = path.file_name().unwrap().to_str().unwrap().to_owned();
                found == **name || (anywhere && found.starts_with(&format!("{name}.hotcell-saved-")))
            };
            files.filter(is_it).any(|path| std::fs::read_to_string(path).unwrap() == contents)
        };
        EDITED.into_iter().filter(is_kept).collect()
    }

    /// Runs the command under test; at its nth call something is saved, and `gap` calls later again, or it is killed.
    /// Whether it got to the nth call.
    fn round(&self, n: u64, gap: u64, kill: bool) -> (bool, Ending) {
        let mut command = self.bench.hotcell([if self.undoing { "undo" } else { "apply" }, "r"]);
        let (mut was_there, mut is_over, mut replaced) = (false, false, Vec::new());
        let mut save_again = || {
            // What is in its place now is replaced by its own editor, not by us.
            replaced = self.with("first\n", false);
            self.save("second\n");
        };
        let ending = at_calls(command.stdout(Stdio::null()).stderr(Stdio::null()), |call| {
            if call == n {
                was_there = true;
                self.save("first\n");
            } else if call == n + gap && kill {
                return Then::Kill;
            } else if call == n + gap {
                is_over = true;
                save_again();
            }
            Then::GoOn
        })
        .unwrap();
        // After a crash, and before anybody cleared up.
        let is_killed = matches!(ending, Ending::Killed { .. });
        if is_killed && n.is_multiple_of(2) {
            is_over = true;
            save_again();
        }
        let left = leftovers(self.bench, &self.work);
        assert!(left.is_empty() || ending != (Ending::Ended { status: 0 }), "call {n}: {left:?}");
        gc(self.bench);
        let left = leftovers(self.bench, &self.work);
        assert!(left.is_empty(), "call {n} + {gap}, {ending:?}: {left:?}");
        if was_there {
            let check = |name: &str, is_kept: bool| {
                let here: Vec<_> = std::fs::read_dir(&self.work).unwrap().flatten().map(|entry| entry.path()).collect();
                assert!(is_kept, "call {n} + {gap}, {ending:?}: `{name}` was lost: {here:?}");
            };
            let (first, second) = (self.with("first\n", true), self.with("second\n", true));
            for name in EDITED {
                check(name, first.contains(&name) || replaced.contains(&name));
                check(name, second.contains(&name) || !is_over);
            }
            // Saved once and not disturbed by anything else, it is where it was saved.
            if !is_over && !is_killed {
                assert_eq!(self.with("first\n", false), EDITED, "call {n}");
            }
        }
        (was_there, ending)
    }

    fn all_rounds(&self, kill: bool) {
        let (mut n_done, mut n_refused, mut n_killed) = (0, 0, 0);
        // In the short form, each gap at other calls.
        let gaps = [1, 2, 3, 5, 8, 13, 21, 34, 1_000_000];
        'calls: for (round, n) in (1..).step_by(usize::try_from(stride(3)).unwrap()).enumerate() {
            let soak = std::env::var_os("HOTCELL_SOAK").is_some();
            for gap in gaps.iter().copied().skip(if soak { 0 } else { round % gaps.len() }).take(gaps.len()) {
                self.reset();
                match self.round(n, gap, kill) {
                    (false, _) => break 'calls,
                    (true, Ending::Killed { .. }) => n_killed += 1,
                    (true, Ending::Ended { status: 0 }) => n_done += 1,
                    (true, Ending::Ended { .. }) => n_refused += 1,
                }
                if !soak {
                    break;
                }
            }
        }
        let counted = format!("{n_done} times done, {n_refused} refused, {n_killed} killed");
        assert!(n_done > 3 && n_refused > 3 && (!kill || n_killed > 10), "VOID: {counted}");
    }
}

/// A directory on another filesystem than the home's, where there is one.
fn elsewhere() -> tempfile::TempDir {
    let place = tempfile::Builder::new().prefix("hotcell-test-").tempdir_in("/dev/shm");
    place.unwrap_or_else(|_| {
        skip("another filesystem than that of temporary files");
        tempfile::tempdir().unwrap()
    })
}

#[test]
fn what_somebody_saves_during_an_apply_is_never_lost() {
    let bench = Bench::new();
    Edited::new(&bench, bench.dir("work"), false).all_rounds(false);
}

#[test]
fn what_somebody_saves_during_an_undo_is_never_lost() {
    let bench = Bench::new();
    let work = elsewhere();
    Edited::new(&bench, work.path().to_owned(), true).all_rounds(false);
}

#[test]
fn what_somebody_saves_around_the_crash_of_an_apply_is_never_lost() {
    let bench = Bench::new();
    let work = elsewhere();
    Edited::new(&bench, work.path().to_owned(), false).all_rounds(true);
}

#[test]
fn what_somebody_saves_around_the_crash_of_an_undo_is_never_lost() {
    let bench = Bench::new();
    Edited::new(&bench, bench.dir("work"), true).all_rounds(true);
}

#[test]
fn a_directory_in_a_files_place_is_never_lost_either() {
    let bench = Bench::new();
    let work = bench.dir("work");
    // A name that leaves no room for another ending.
    let long = "n".repeat(250);
    for name in ["f", "g", &long] {
        bench.file(&format!("work/{name}"), "old\n");
    }
    let script = format!("rm f {long}; echo new > g");
    let work_name = work.to_str().unwrap();
    assert!(bench.output(["run", "-q", "--name", "r", "-w", work_name, "--", "sh", "-c", &script]).status.success());
    let mut n_stopped = 0;
    for n in (1..).step_by(usize::try_from(stride(3)).unwrap()) {
        let mut was_there = false;
        let ending = at_calls(bench.hotcell(["apply", "r"]).stdout(Stdio::null()).stderr(Stdio::null()), |call| {
            if call == n {
                was_there = true;
                for name in ["f", &long] {
                    let _gone_already = std::fs::remove_file(work.join(name));
                    std::fs::create_dir(work.join(name)).unwrap();
                    std::fs::write(work.join(name).join("data"), "precious\n").unwrap();
                }
            }
            Then::GoOn
        })
        .unwrap();
        gc(&bench);
        let left = leftovers(&bench, &work);
        assert!(left.is_empty(), "call {n}, {ending:?}: {left:?}");
        if !was_there {
            break;
        }
        n_stopped += u32::from(ending != Ending::Ended { status: 0 });
        for name in ["f", &long] {
            let found = std::fs::read_to_string(work.join(name).join("data")).unwrap_or_default();
            assert_eq!(found, "precious\n", "call {n}, {ending:?}");
            std::fs::remove_dir_all(work.join(name)).unwrap();
        }
        forget_packs(&bench);
        for name in ["f", "g", &long] {
            std::fs::write(work.join(name), "old\n").unwrap();
        }
    }
    assert!(n_stopped > 10, "VOID: stopped {n_stopped} times");
}

#[test]
fn what_was_left_half_way_is_taken_back_before_anything_else_is_applied() {
    let bench = Bench::new();
    let work = bench.dir("work");
    bench.file("work/a", "old\n");
    let work_name = work.to_str().unwrap();
    assert!(
        bench.output(["run", "-q", "--name", "r", "-w", work_name, "--", "sh", "-c", "echo new > a"]).status.success()
    );
    let is_new = || std::fs::read_to_string(work.join("a")).unwrap() == "new\n";
    let halfway = (1..).step_by(5).find(|n| {
        let ending =
            kill_at_call(bench.hotcell(["apply", "r"]).stdout(Stdio::null()).stderr(Stdio::null()), *n).unwrap();
        assert!(matches!(ending, Ending::Killed { .. }), "VOID: never half-way");
        let is_halfway = is_new();
        if !is_halfway {
            gc(&bench);
        }
        is_halfway
    });
    assert!(halfway.is_some());
    // Another hotcell is clearing up, so that this start does not.
    let lock = std::fs::File::options().write(true).open(bench.path("home/lock")).unwrap();
    lock.lock().unwrap();
    let refused = bench.output(["undo", "--forget", "r"]);
    assert_eq!(refused.status.code(), Some(3), "half-way, and forgotten: {}", text(&refused.stderr));
    let applied = bench.output(["apply", "r"]);
    drop(lock);
    assert!(applied.status.success(), "{}", text(&applied.stderr));
    assert!(text(&applied.stderr).contains("the tree is as it was before"), "{}", text(&applied.stderr));
    gc(&bench);
    assert!(is_new(), "what was applied was taken back");
    assert!(bench.output(["undo", "r"]).status.success() && !is_new());
}

#[test]
fn recovery_that_is_killed_is_recovered_from() {
    // In memory, where nobody waits for a disk: there are thousands of starts in this.
    let bench = Bench::on(elsewhere());
    let work = bench.dir("work");
    for name in ["a", "b/c", "d/e"] {
        bench.file(&format!("work/{name}"), "old\n");
    }
    let work_name = work.to_str().unwrap();
    let script = "echo new > a; rm -r b; rm -r d; echo new > d; mkdir n; echo new > n/f";
    assert!(bench.output(["run", "-q", "--name", "r", "-w", work_name, "--", "sh", "-c", script]).status.success());
    let quiet = |mut command: Command| {
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    // A call near the end of an apply, where everything is in place and nothing is on record.
    let mut halfway = None;
    for n in (1..).map(|n| n * 20) {
        let ending = kill_at_call(&mut quiet(bench.hotcell(["apply", "r"])), n).unwrap();
        let is_in_place = std::fs::read_to_string(work.join("a")).unwrap() == "new\n" && work.join("n/f").exists();
        let manifests = std::fs::read_dir(bench.path("home/rollback")).into_iter().flatten().flatten();
        let manifests = manifests.filter_map(|pack| std::fs::read_to_string(pack.path().join("manifest.json")).ok());
        if is_in_place && manifests.into_iter().any(|text| text.contains("\"applying\"")) {
            halfway = Some(n);
        }
        gc(&bench);
        if let Ending::Ended { .. } = ending {
            break;
        }
    }
    let halfway = halfway.expect("VOID: never half-way");
    assert!(bench.output(["undo", "r"]).status.success());
    let mut n_cut_short = 0;
    for n in (1..).step_by(usize::try_from(stride(31)).unwrap()) {
        // A few calls more or less each time: mostly half-way, and never anything but back in the end.
        kill_at_call(&mut quiet(bench.hotcell(["apply", "r"])), halfway).unwrap();
        let is_halfway = || std::fs::read_dir(bench.path("home/rollback/unfinished")).unwrap().count() > 0;
        let was_halfway = is_halfway();
        let ending = kill_at_call(&mut quiet(bench.hotcell(["gc", "--yes"])), n).unwrap();
        n_cut_short += u32::from(was_halfway && is_halfway());
        gc(&bench);
        bench.output(["undo", "r"]);
        let read = |name: &str| std::fs::read_to_string(work.join(name)).unwrap_or_default();
        assert_eq!([read("a"), read("b/c"), read("d/e")], ["old\n"; 3], "call {n}, {ending:?}");
        assert!(!work.join("n").exists() && leftovers(&bench, &work).is_empty(), "call {n}, {ending:?}");
        // Else each round has more to look at than the one before, and none is the last.
        forget_packs(&bench);
        if matches!(ending, Ending::Ended { .. }) {
            break;
        }
    }
    assert!(n_cut_short > 5, "VOID: recovery was cut short {n_cut_short} times");
}

#[test]
fn an_edit_below_a_directory_that_must_go_stops_nothing_else_from_coming_back() {
    let bench = Bench::new();
    let work = bench.dir("work");
    bench.file("work/b", "old\n");
    bench.file("work/z", "old\n");
    let work_name = work.to_str().unwrap();
    let script = "mkdir new; echo guest > new/f; rm b; echo new > z";
    assert!(bench.output(["run", "-q", "--name", "r", "-w", work_name, "--", "sh", "-c", script]).status.success());
    let is_new = |name: &str| std::fs::read_to_string(work.join(name)).is_ok_and(|text| text != "old\n");
    let halfway = (1..).find(|n| {
        let mut command = bench.hotcell(["apply", "r"]);
        let ending = kill_at_call(command.stdout(Stdio::null()).stderr(Stdio::null()), *n).unwrap();
        assert!(matches!(ending, Ending::Killed { .. }), "VOID: never half-way");
        let is_halfway = is_new("new/f") && !is_new("z");
        if !is_halfway {
            gc(&bench);
        }
        is_halfway
    });
    assert!(halfway.is_some());
    bench.file("work/new/f", "mine\n");
    gc(&bench);
    let read = |name: &str| std::fs::read_to_string(work.join(name)).unwrap();
    assert_eq!([read("b"), read("z"), read("new/f")], ["old\n", "old\n", "mine\n"]);
    assert!(leftovers(&bench, &work).is_empty());
    // Out of the way, the rest comes back, too.
    std::fs::remove_dir_all(work.join("new")).unwrap();
    let undone = bench.output(["undo", "r"]);
    assert!(undone.status.success(), "{}", text(&undone.stderr));
}
