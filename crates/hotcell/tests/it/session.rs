//! Sessions: one cell, one command after the other, each with its own limits and its own report.

use std::time::Duration;

use hotcell_base::{Bytes, Outcome};
use hotcell_cell::{Cell, Exec, Limit, Limits, Mode, Report, Session};

use crate::support::*;

fn open(builder: hotcell_cell::Builder) -> Session {
    let plan = allowing(&host(), builder).plan_session(&host()).expect("a plan");
    Session::open(plan, &mut Nobody).expect("a session")
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
    assert!(first.pids_peak >= Some(3), "VOID: only {:?} processes", first.pids_peak);
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
    // The kernel knows the most of all, which was more; a watch sees what there is.
    assert!(second.pids_peak.is_none_or(|peak| peak == 1), "{:?}", second.pids_peak);
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

#[test]
fn a_name_that_leads_elsewhere_is_no_name() {
    let bench = Bench::new();
    bench.output(["run", "-q", "--", "true"]);
    let home = bench.path("home");
    for name in ["..", ".", "../runs", "a/b", "/tmp", ".hidden", ""] {
        for words in
            [&["create", name][..], &["exec", name, "--", "true"], &["cp", "/etc/hostname", &format!("{name}:/tmp/x")]]
        {
            let refused = bench.output(words);
            assert!(!refused.status.success(), "{words:?}");
        }
        assert!(home.join("runs").is_dir() && home.join("cells").is_dir(), "{name} took the home away");
    }
    assert_eq!(std::fs::read_dir(home.join("runs")).expect("there").count(), 1);
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

/// A session of the program's, which ends with the test.
struct Named<'a> {
    bench: &'a Bench,
    name: &'static str,
}

impl<'a> Named<'a> {
    fn create(bench: &'a Bench, name: &'static str, more: &[&str]) -> Named<'a> {
        let made = bench.output([&["create", name], more].concat());
        assert!(made.status.success(), "{}", text(&made.stderr));
        Named { bench, name }
    }

    fn exec(&self, more: &[&str], argv: &[&str]) -> std::process::Output {
        let words: Vec<&str> = [&["exec", "-q", self.name], more, &["--"], argv].concat();
        self.bench.output(words)
    }
}

impl Drop for Named<'_> {
    fn drop(&mut self) {
        self.bench.output(["stop", self.name]);
    }
}

#[test]
fn a_session_outlives_the_command_that_made_it() {
    let bench = Bench::new();
    let session = Named::create(&bench, "dev", &[]);
    assert_eq!(session.exec(&[], &["sh", "-c", "echo 1 > /tmp/f; exit 7"]).status.code(), Some(7));
    let second = session.exec(&[], &["cat", "/tmp/f"]);
    assert_eq!((second.status.code(), text(&second.stdout).as_str()), (Some(0), "1\n"));
    assert_eq!(session.exec(&[], &["no-such-command"]).status.code(), Some(127));
    assert_eq!(session.exec(&["--time", "200ms"], &["sleep", "60"]).status.code(), Some(124));
    assert_eq!(session.exec(&["--no-such-flag"], &["true"]).status.code(), Some(125));
    // Each is on record, and so is the session.
    let runs: serde_json::Value = serde_json::from_slice(&bench.output(["ls", "--json"]).stdout).expect("JSON");
    let kinds: Vec<&str> = runs.as_array().expect("a list").iter().filter_map(|run| run["kind"].as_str()).collect();
    assert_eq!(kinds, ["exec", "exec", "exec", "exec", "session"]);
    let sessions = bench.output(["ls", "--sessions", "--json"]);
    let sessions: serde_json::Value = serde_json::from_slice(&sessions.stdout).expect("JSON");
    assert_eq!((&sessions[0]["name"], &sessions[0]["status"]["n_commands"]), (&"dev".into(), &4.into()));
    let again = bench.output(["create", "dev"]);
    assert_eq!(again.status.code(), Some(3), "{}", text(&again.stderr));
    assert!(text(&again.stderr).contains("hotcell rm dev"), "{}", text(&again.stderr));
    let wide = session.exec(&["--memory", "64GiB"], &["true"]);
    assert_eq!(wide.status.code(), Some(125));
    assert!(text(&wide.stderr).contains("64 GiB") && text(&wide.stderr).contains("2 GiB"), "{}", text(&wide.stderr));
    // It goes with all its records, and its name can be had again.
    assert!(bench.output(["rm", "dev"]).status.success());
    assert_eq!(text(&bench.output(["ls", "--json"]).stdout), "[]\n");
    assert_eq!(session.exec(&[], &["true"]).status.code(), Some(125));
    let _again = Named::create(&bench, "dev", &[]);
}

#[test]
fn input_output_and_signals_are_the_clients_own() {
    let bench = Bench::new();
    let session = Named::create(&bench, "io", &[]);
    let mut child = bench
        .hotcell(["exec", "-q", "--stdin", "-", "io", "--", "sh", "-c", "read x; echo got $x; echo err >&2"])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("started");
    std::io::Write::write_all(&mut child.stdin.take().expect("piped"), b"hello\n").expect("taken");
    let output = child.wait_with_output().expect("ended");
    assert_eq!((text(&output.stdout).as_str(), text(&output.stderr).as_str()), ("got hello\n", "err\n"));
    // A signal to the client is one to the command.
    let script = "trap 'echo asked; exit 5' TERM; echo up; while :; do sleep 0.05; done";
    let mut child = bench
        .hotcell(["exec", "-q", "io", "--", "sh", "-c", script])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("started");
    let mut up = [0; 3];
    std::io::Read::read_exact(child.stdout.as_mut().expect("piped"), &mut up).expect("it says that it is up");
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("ours");
    let output = child.wait_with_output().expect("ended");
    assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(5), "asked\n"));
    // A client that is killed takes its command with it, and nothing else.
    let mut child = bench.hotcell(["exec", "-q", "io", "--", "sleep", "1000"]).spawn().expect("started");
    let status = || -> serde_json::Value {
        serde_json::from_slice(&bench.output(["ls", "--sessions", "--json"]).stdout).expect("JSON")
    };
    eventually("it runs", || status()[0]["status"]["running"][0] == "sleep");
    child.kill().expect("ours");
    child.wait().expect("ended");
    eventually("its command ends", || status()[0]["status"]["running"].is_null());
    assert_eq!(session.exec(&[], &["true"]).status.code(), Some(0));
}

#[test]
fn commands_of_one_session_wait_for_each_other() {
    let bench = Bench::new();
    let session = Named::create(&bench, "queue", &[]);
    let script = "test -e /tmp/busy && echo two at once; touch /tmp/busy; sleep 0.1; rm /tmp/busy; echo done";
    let outputs: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..6).map(|_| scope.spawn(|| session.exec(&[], &["sh", "-c", script]))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    for output in outputs {
        assert_eq!((output.status.code(), text(&output.stdout).as_str()), (Some(0), "done\n"));
    }
}

#[test]
fn a_session_ends_when_it_is_idle_or_its_life_is_over() {
    let bench = Bench::new();
    let ended = |name: &str| -> serde_json::Value {
        let shown = bench.output(["show", "--json", name]);
        serde_json::from_slice(&shown.stdout).expect("JSON")
    };
    let _idle = Named::create(&bench, "idle", &["--idle", "300ms"]);
    eventually("it ends by itself", || ended("idle")["outcome"] == "timeout");
    assert_eq!(ended("idle")["limit"], "idle");
    let short = Named::create(&bench, "short", &["--life", "700ms"]);
    // In the middle of a command.
    let cut = short.exec(&[], &["sleep", "60"]);
    assert_eq!(cut.status.code(), Some(137), "{}", text(&cut.stderr));
    eventually("it ends by itself", || ended("short")["outcome"] == "timeout");
    assert_eq!(ended("short")["limit"], "life");
    assert_eq!(text(&bench.output(["ls", "--sessions", "--json"]).stdout), "[]\n");
}

#[test]
fn a_host_that_is_killed_leaves_nothing_and_its_name_is_free() {
    let bench = Bench::new();
    let _session = Named::create(&bench, "gone", &[]);
    let client = bench.hotcell(["exec", "-q", "gone", "--", "sleep", "1000"]).spawn().expect("started");
    let status = || text(&bench.output(["ls", "--sessions"]).stdout);
    eventually("it runs", || status().contains("sleep 1000"));
    let known = std::fs::read(bench.path("home/sessions/gone/session.json")).expect("a session");
    let known: serde_json::Value = serde_json::from_slice(&known).expect("JSON");
    rustix::process::kill_process(host_of(&bench, "gone"), rustix::process::Signal::KILL).expect("ours");
    let output = client.wait_with_output().expect("ended");
    assert_eq!(output.status.code(), Some(125));
    let run_id = known["run_id"].as_str().expect("a run").to_owned();
    eventually("its groups go", || cgroups_with(&run_id).is_empty());
    eventually("its processes go", || processes_in(&bench.path("")).is_empty());
    let left = bench.path("home/sessions/gone");
    assert!(left.exists(), "VOID: nothing was left");
    assert!(bench.output(["gc", "--yes"]).status.success() && !left.exists());
    let again = Named::create(&bench, "gone", &[]);
    assert_eq!(again.exec(&[], &["true"]).status.code(), Some(0));
    let runs = text(&bench.output(["ls"]).stdout);
    assert_eq!(runs.matches("unknown").count(), 2, "the session and its command: {runs}");
}

#[test]
fn a_copy_on_write_session_can_be_looked_at_and_applied() {
    let bench = Bench::new();
    let work = bench.dir("work");
    bench.file("work/a", "1\n");
    let words = ["-w", work.to_str().expect("text")];
    let session = Named::create(&bench, "edit", &words);
    assert_eq!(session.exec(&[], &["sh", "-c", "echo 2 > a"]).status.code(), Some(0));
    assert_eq!(text(&session.exec(&[], &["cat", "a"]).stdout), "2\n");
    assert_eq!(std::fs::read_to_string(work.join("a")).expect("there"), "1\n");
    assert!(bench.output(["stop", "edit"]).status.success());
    let diff = text(&bench.output(["diff", "edit"]).stdout);
    assert!(diff.contains("-1") && diff.contains("+2"), "{diff}");
    let applied = bench.output(["apply", "edit"]);
    assert!(applied.status.success(), "{}", text(&applied.stderr));
    assert_eq!(std::fs::read_to_string(work.join("a")).expect("there"), "2\n");
}

#[test]
fn files_go_in_and_come_out_and_nothing_else() {
    let bench = Bench::new();
    let session = Named::create(&bench, "cp", &[]);
    bench.file("in/a", "a\n");
    bench.file("in/sub/b", "b\n");
    std::os::unix::fs::symlink("sub/b", bench.path("in/link")).expect("a link");
    let at = |path: &str| bench.path(path).display().to_string();
    let cp = |from: &str, to: &str| bench.output(["cp", from, to]);
    let inside = cp(&at("in"), "cp:/tmp");
    assert!(inside.status.success(), "{}", text(&inside.stderr));
    assert_eq!(
        text(&session.exec(&[], &["sh", "-c", "cat /tmp/in/a /tmp/in/link; test -O /tmp/in/a"]).stdout),
        "a\nb\n"
    );
    // What the guest may not write, neither does cp.
    for target in ["cp:/etc/x", "cp:/usr/bin/x", "cp:/proc/self/comm", "cp:/x"] {
        let refused = cp(&at("in/a"), target);
        assert_eq!(refused.status.code(), Some(1), "{target}");
    }
    // The guest's links lead nowhere outside, and what is no file is not opened.
    bench.file("secret", "secret\n");
    let script = "mkdir -p /tmp/out/.git/hooks /tmp/out/d; cd /tmp/out; ln -s \"$1\" direct; ln -s / root; ln -s ../out/d up; \
                  ln -s d/../../../.. far; ln -s d fine; mkfifo pipe; echo x > .git/hooks/pre-commit; echo y > d/f; \
                  ln -s \"$2\" way; ln -s /tmp/out/d /tmp/dir";
    let made = session.exec(&[], &["sh", "-c", script, "sh", &at("secret"), &at("")]);
    assert_eq!(made.status.code(), Some(0), "{}", text(&made.stderr));
    let out = cp("cp:/tmp/out", &at("back"));
    assert!(out.status.success(), "{}", text(&out.stderr));
    let mut names: Vec<String> = std::fs::read_dir(bench.path("back"))
        .expect("copied")
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort_unstable();
    assert_eq!(names, ["d", "fine"], "{}", text(&out.stderr));
    for left_out in [".git", "direct", "root", "far", "pipe", "way", "up"] {
        assert!(text(&out.stderr).contains(&format!("/tmp/out/{left_out}`")), "{left_out}: {}", text(&out.stderr));
    }
    assert_eq!(std::fs::read_to_string(bench.path("back/fine/f")).expect("the link works"), "y\n");
    for stolen in ["cp:/tmp/out/direct", "cp:/tmp/out/way/secret", "cp:/tmp/out/pipe", "cp:/tmp/out/root/root/x"] {
        let refused = cp(stolen, &at("stolen"));
        assert_eq!(refused.status.code(), Some(1), "{stolen}");
        assert!(!bench.path("stolen").exists(), "{stolen}");
    }
    // The control: through a link of the guest's to a place of its own, it works.
    assert!(cp("cp:/tmp/dir/f", &at("fine")).status.success());
    // A path that does not begin at the root begins where commands do.
    assert!(cp(&at("in/a"), "cp:here").status.success());
    assert_eq!(text(&session.exec(&[], &["cat", "here"]).stdout), "a\n");
    assert!(cp("cp:here", &at("there")).status.success());
    // A link of ours is not followed either.
    std::os::unix::fs::symlink(bench.path("secret"), bench.path("trap")).expect("a link");
    assert_eq!(cp("cp:/tmp/in/a", &at("trap")).status.code(), Some(1));
    assert_eq!(std::fs::read_to_string(bench.path("secret")).expect("there"), "secret\n");
    // And a pipe of ours stays one.
    let pipe = bench.path("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).expect("a pipe");
    assert_eq!(cp("cp:/tmp/in/a", &at("pipe")).status.code(), Some(1));
    assert!(std::os::unix::fs::FileTypeExt::is_fifo(&pipe.metadata().expect("there").file_type()));
    // A second time is as good as the first.
    assert!(cp(&at("in"), "cp:/tmp").status.success());
    assert_eq!(cp(&at("in/a"), &at("x")).status.code(), Some(2));
    assert_eq!(cp(&at("in/a"), "no-such:/tmp/x").status.code(), Some(1));
}

#[test]
fn a_guest_that_swaps_files_while_they_are_copied_gains_nothing() {
    let bench = Bench::new();
    let work = bench.dir("work");
    let words = ["-w", work.to_str().expect("text"), "--mode", "rw"];
    let session = Named::create(&bench, "swap", &words);
    let at = |path: &str| bench.path(path).display().to_string();
    let cp = |from: &str, to: &str| bench.output(["cp", from, to]);
    bench.dir("victim");
    bench.file("secret/a", "TOPSECRET\n");
    // Two directories and two links, exchanged without a pause: what is copied in, and what is copied to.
    let script = "import ctypes, os, sys\n\
                  libc = ctypes.CDLL(None)\n\
                  for name, link in ((b'into', sys.argv[1]), (b'from', sys.argv[2])):\n    \
                      os.makedirs(name, exist_ok=True); os.symlink(link, name + b'.link')\n\
                  open('from/a', 'w').write('plain')\n\
                  os.makedirs('/tmp/result/into'); [open(f'/tmp/result/into/{i}', 'w').write('x') for i in range(100)]\n\
                  open('ready', 'w')\n\
                  while True:\n    \
                      for name in (b'into', b'from'): libc.renameat2(-100, name, -100, name + b'.link', 2)\n";
    let words = ["exec", "-q", "swap", "--", "python3", "-c", script, &at("victim"), &at("secret")];
    let mut guest = bench.hotcell(words).spawn().expect("started");
    eventually("it is at it", || work.join("ready").exists());
    let began = std::time::Instant::now();
    let (mut n_out, mut n_in) = (0, 0);
    // For a while, and until something came through: a slow machine needs longer for that.
    let is_enough = |n_least: u32| began.elapsed().as_secs() >= if n_least > 0 { 4 } else { 60 };
    while !is_enough(n_out.min(n_in)) {
        // Below a directory of ours, and by its own name.
        n_out += u32::from(cp("swap:/tmp/result/into", &at("work")).status.success());
        n_out += u32::from(cp("swap:/tmp/result/into/1", &at("work/into/1")).status.success());
        n_in += u32::from(cp(&at("work/from"), "swap:/tmp/in").status.success());
        n_in += u32::from(cp(&at("work"), "swap:/tmp/all").status.success());
    }
    guest.kill().expect("ours");
    guest.wait().expect("ended");
    assert!(n_out > 0 && n_in > 0, "VOID: {n_out} came out and {n_in} went in");
    let landed: Vec<_> = std::fs::read_dir(bench.path("victim")).expect("there").flatten().collect();
    assert!(landed.is_empty(), "{landed:?}");
    let seen = session.exec(&[], &["grep", "-r", "TOPSECRET", "/tmp/in", "/tmp/all"]);
    assert_eq!(text(&seen.stdout), "");
}

#[test]
fn a_command_whose_output_cannot_be_kept_is_ended_and_the_next_one_is_itself() {
    struct Full;
    impl hotcell_cell::Observer for Full {
        fn output(&mut self, _: hotcell_cell::Stream, _: &[u8]) -> std::io::Result<()> {
            Err(std::io::Error::other("no room"))
        }
    }
    let mut session = open(Cell::builder());
    let plan = session.plan().exec(&sh("echo x; sleep 1000; exit 33")).expect("a plan");
    let failed = session.exec_with(&plan, hotcell_cell::Stdin::Null, &mut Full, None);
    assert!(failed.is_err(), "VOID: it could be kept");
    let next = run(&mut session, "cat /proc/[0-9]*/comm | grep -c sleep");
    assert_eq!((next.exit_code, next.stdout.text().as_str()), (Some(1), "0\n"), "it runs on");
    assert!(session.is_alive());
}

#[test]
fn a_plan_for_another_cell_is_refused() {
    let (mut session, other) = (open(Cell::builder()), open(Cell::builder()));
    let plan = other.plan().exec(&sh(":")).expect("a plan");
    let refused = session.exec_with(&plan, hotcell_cell::Stdin::Null, &mut Nobody, None).expect_err("another's");
    assert!(refused.to_string().contains("another cell"), "{refused}");
    assert_eq!(run(&mut session, ":").exit_code, Some(0));
}

#[test]
fn who_finds_the_disk_full_is_not_who_filled_it() {
    let limits = Limits { disk: Bytes(8 << 20), ..Limits::default() };
    let mut session = open(Cell::builder().limits(limits));
    let filled = run(&mut session, "head -c 20000000 /dev/zero > /tmp/f; sleep 1");
    assert_eq!((filled.outcome, filled.limit), (Outcome::Disk, Some(Limit::Disk)));
    for innocent in ["sleep 0.2; echo fine", "rm /tmp/f; sleep 0.1; echo fine", "echo x > /tmp/g && echo fine"] {
        let report = run(&mut session, innocent);
        assert_eq!((report.outcome, report.stdout.text().as_str()), (Outcome::Exited, "fine\n"), "{innocent}");
    }
}

#[test]
fn a_limit_that_cannot_be_set_takes_no_other_away() {
    if !is_root() {
        return skip("limits of a session's group that cannot be set: an ordinary user's are watched");
    }
    let limits = Limits { cpus: hotcell_base::Cpus { milli: 200 }, ..Limits::default() };
    let mut session = open(Cell::builder().limits(limits.clone()));
    assert_eq!(run(&mut session, "head -c 60000000 /dev/zero > /tmp/f").exit_code, Some(0));
    let small = Exec { limits: Some(Limits { memory: Bytes(16 << 20), ..limits.clone() }), ..sh(":") };
    let refused = session.exec(&small).expect_err("60 MB are there already");
    let mut chain = String::new();
    let mut cause: Option<&dyn std::error::Error> = Some(&refused);
    while let Some(one) = cause {
        chain.push_str(&format!("{one}: "));
        cause = one.source();
    }
    assert!(chain.contains("of memory already"), "{chain}");
    let second = Limits { time: Duration::from_secs(1), ..limits };
    let spinning = Exec { limits: Some(second), ..sh("while :; do :; done") };
    let spinning = session.exec(&spinning).expect("it runs");
    assert_eq!(spinning.outcome, Outcome::Timeout);
    assert!(spinning.cpu < Duration::from_millis(600), "the share is gone: {:?} of a second", spinning.cpu);
}

#[test]
fn long_commands_are_shown_in_part_and_a_command_that_waits_can_be_given_up() {
    let bench = Bench::new();
    let session = Named::create(&bench, "long", &["--idle", "30s"]);
    let long = "x".repeat(100_000);
    let mut first =
        bench.hotcell(["exec", "-q", "long", "--", "sh", "-c", "sleep 1000", &long]).spawn().expect("started");
    let list = || text(&bench.output(["ls", "--sessions"]).stdout);
    eventually("it runs", || list().contains("sleep 1000"));
    assert!(list().contains('…'), "{}", list());
    let mut second = bench.hotcell(["exec", "long", "--", "touch", "/tmp/it-ran"]);
    let mut second = second.stderr(std::process::Stdio::piped()).spawn().expect("started");
    let mut said = String::new();
    let mut stderr = std::io::BufReader::new(second.stderr.take().expect("piped"));
    std::io::BufRead::read_line(&mut stderr, &mut said).expect("it says something");
    assert!(said.starts_with("waiting"), "{said}");
    let pid = rustix::process::Pid::from_child(&second);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("ours");
    assert_eq!(second.wait().expect("ended").code(), Some(137));
    first.kill().expect("ours");
    first.wait().expect("ended");
    assert_eq!(session.exec(&[], &["test", "-e", "/tmp/it-ran"]).status.code(), Some(1), "it ran all the same");
}

#[test]
fn whoever_shares_its_input_holds_nobody_up() {
    let bench = Bench::new();
    let session = Named::create(&bench, "input", &[]);
    // Two readers of one pipe: what one takes, the other waits for.
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let mut thief = reader.try_clone().expect("a copy");
    let mut command = bench.hotcell(["exec", "-q", "input", "--stdin", "-", "--time", "2s", "--", "cat"]);
    let mut child = command.stdin(reader).stdout(std::process::Stdio::null()).spawn().expect("started");
    let stealing = std::thread::spawn(move || {
        let mut byte = [0];
        while std::io::Read::read(&mut thief, &mut byte).is_ok_and(|n| n > 0) {}
    });
    let mut feeding = writer.try_clone().expect("a copy");
    let begun = std::time::Instant::now();
    while child.try_wait().expect("ours").is_none() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it is held up");
        let _closed = std::io::Write::write(&mut feeding, b"x");
    }
    assert_eq!(child.wait().expect("ended").code(), Some(124), "its limit holds");
    drop((writer, feeding));
    stealing.join().expect("ended");
    assert_eq!(session.exec(&[], &["true"]).status.code(), Some(0));
}

#[test]
fn a_session_is_found_before_a_command_of_its_name_and_keeps_nothing_of_its_makers() {
    let bench = Bench::new();
    let lock = bench.file("lock", "");
    let script = format!("exec 9>{}; flock 9; \"$0\" create dev --", lock.display());
    let made = bench.hotcell(["--version"]);
    let program = made.get_program().to_owned();
    let mut create = std::process::Command::new("sh");
    create.args(["-c", &script]).arg(&program);
    for (name, value) in made.get_envs() {
        match value {
            Some(value) => create.env(name, value),
            None => create.env_remove(name),
        };
    }
    let made = create.output().expect("started");
    assert!(made.status.success(), "{}", text(&made.stderr));
    let session = Named { bench: &bench, name: "dev" };
    let free = std::process::Command::new("flock").args(["-n"]).arg(&lock).arg("true").status().expect("started");
    assert!(free.success(), "the host holds the lock of whoever made it");
    assert_eq!(session.exec(&["--name", "dev"], &["true"]).status.code(), Some(0));
    assert!(bench.output(["stop", "dev"]).status.success());
    assert!(text(&bench.output(["ls", "--sessions"]).stdout).is_empty());
}

/// The process that hosts a session.
fn host_of(bench: &Bench, name: &str) -> rustix::process::Pid {
    let known = std::fs::read(bench.path(&format!("home/sessions/{name}/session.json"))).expect("a session");
    let known: serde_json::Value = serde_json::from_slice(&known).expect("JSON");
    let pid = known["supervisor"]["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).expect("a pid");
    rustix::process::Pid::from_raw(pid).expect("a pid")
}

#[test]
fn a_host_that_does_not_answer_is_stopped_by_force() {
    let bench = Bench::new();
    let _session = Named::create(&bench, "deaf", &[]);
    let host = host_of(&bench, "deaf");
    rustix::process::kill_process(host, rustix::process::Signal::STOP).expect("ours");
    let stopped = bench.output(["stop", "deaf"]);
    assert_eq!(stopped.status.code(), Some(0), "{}", text(&stopped.stderr));
    eventually("its processes go", || processes_in(&bench.path("")).is_empty());
    assert!(text(&bench.output(["ls", "--sessions"]).stdout).is_empty());
    let left = text(&bench.output(["gc"]).stdout);
    assert!(left.contains("nothing is left"), "what it left was cleared away: {left}");
}

#[test]
fn what_a_client_that_is_gone_would_have_read_holds_nothing_up() {
    let bench = Bench::new();
    let session = Named::create(&bench, "pipe", &[]);
    let host = host_of(&bench, "pipe").as_raw_nonzero();
    let held = || {
        let count = |what: &str| std::fs::read_dir(format!("/proc/{host}/{what}")).expect("it lives").count();
        (count("task"), count("fd"))
    };
    assert_eq!(session.exec(&[], &["true"]).status.code(), Some(0));
    let before = held();
    for _ in 0..5 {
        // This end of the pipe stays, and nobody reads from it.
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let mut client = bench.hotcell(["exec", "-q", "pipe", "--", "yes"]).stdout(writer).spawn().expect("started");
        let list = || text(&bench.output(["ls", "--sessions"]).stdout);
        eventually("it runs", || list().contains("yes"));
        client.kill().expect("ours");
        client.wait().expect("ended");
        eventually("what was for it goes", || held() <= before);
        drop(reader);
    }
}
