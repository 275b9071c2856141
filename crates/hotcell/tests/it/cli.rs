//! The command line as a person meets it: whole exchanges.

use std::io::Write;
use std::process::Stdio;

use serde_json::Value;

use crate::support::*;

#[test]
fn a_command_runs_and_its_exit_code_comes_through() {
    let bench = Bench::new();
    let output = bench.output(["run", "--", "sh", "-c", "echo out; echo err >&2; exit 3"]);
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(text(&output.stdout), "out\n");
    let said = text(&output.stderr);
    assert!(said.starts_with("started  run-"), "{said}");
    assert!(said.contains("err\n") && said.contains("exit 3"), "{said}");
    let quiet = bench.output(["run", "-q", "--", "sh", "-c", "echo out; echo err >&2"]);
    assert_eq!((text(&quiet.stdout).as_str(), text(&quiet.stderr).as_str()), ("out\n", "err\n"));
}

#[test]
fn output_streams_as_it_comes() {
    let bench = Bench::new();
    let mut child = bench.hotcell(["run", "-q", "--", "sh", "-c", "echo first; read line; echo $line"]);
    let mut child = child.stdout(Stdio::piped()).stdin(Stdio::piped()).args(["ignored"]).spawn().unwrap();
    drop(child.stdin.take());
    assert!(child.wait().unwrap().code().is_some());

    let mut command =
        bench.hotcell(["run", "-q", "--stdin", "-", "--", "sh", "-c", "echo first; read line; echo got $line"]);
    let mut child = command.stdout(Stdio::piped()).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdout = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    // Only after its first line came out is the second one sent in.
    std::io::BufRead::read_line(&mut stdout, &mut line).unwrap();
    assert_eq!(line, "first\n");
    child.stdin.take().unwrap().write_all(b"second\n").unwrap();
    line.clear();
    std::io::BufRead::read_line(&mut stdout, &mut line).unwrap();
    assert_eq!(line, "got second\n");
    assert!(child.wait().unwrap().success());
}

#[test]
fn stdin_comes_from_a_file_from_ours_or_from_nowhere() {
    let bench = Bench::new();
    let big = "0123456789abcdef".repeat(100_000);
    let file = bench.file("input", &big);
    let count = |stdin: &str| {
        let output = bench
            .hotcell(["run", "-q", "--stdin", stdin, "--", "wc", "-c"])
            .stdin(std::fs::File::open(&file).unwrap())
            .output()
            .unwrap();
        text(&output.stdout).trim().to_owned()
    };
    assert_eq!(count(file.to_str().unwrap()), "1600000");
    assert_eq!(count("-"), "1600000");
    assert_eq!(count("null"), "0");
    // A command that does not read its input ends all the same.
    let output = bench.output(["run", "-q", "--stdin", file.to_str().unwrap(), "--", "true"]);
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn json_is_one_object_with_every_field() {
    let bench = Bench::new();
    let work = bench.dir("work");
    let args = [
        "-w",
        work.to_str().unwrap(),
        "--name",
        "my-run",
        "--label",
        "a=b",
        "--",
        "sh",
        "-c",
        "echo hi; echo x > f; exit 4",
    ];
    let (record, code) = bench.json(args);
    assert_eq!(code, 4);
    assert_eq!(record["outcome"], "exited");
    assert_eq!(record["exit_code"], 4);
    assert_eq!(record["signal"], Value::Null);
    assert_eq!((record["stdout_bytes"].as_u64(), record["stderr_bytes"].as_u64()), (Some(3), Some(0)));
    assert_eq!(record["stdout_sha256"], "98ea6e4f216f2fb4b69fff9b3a44842c38686ca685f3f55dc48c5d3fb1107be4");
    assert_eq!((&record["stdout_truncated"], &record["stderr_truncated"]), (&Value::Bool(false), &Value::Bool(false)));
    for number in ["wall_ms", "cpu_ms"] {
        assert!(record[number].as_f64().unwrap() > 0.0, "{number}");
    }
    for number in ["memory_peak_bytes", "pids_peak", "io_read_bytes", "io_write_bytes"] {
        assert!(record[number].is_u64(), "{number}");
    }
    assert!(record["memory_peak_bytes"].as_u64().unwrap() > 0);
    assert_eq!(record["isolation"]["tier"], "process");
    assert_eq!(record["isolation"]["walls"]["seccomp"], "proven");
    assert_ne!(record["isolation"]["id_outside"], 0);
    assert_eq!(record["workspace"]["mode"], "cow");
    assert_eq!(record["workspace"]["changed"], serde_json::json!([{ "path": "f", "kind": "added" }]));
    let artifacts = std::path::Path::new(record["artifacts"].as_str().unwrap());
    assert_eq!(std::fs::read_to_string(artifacts.join("stdout.log")).unwrap(), "hi\n");
    assert_eq!(std::fs::read_to_string(artifacts.join("stderr.log")).unwrap(), "");
    assert_eq!(std::fs::read_to_string(artifacts.join("exit_code.txt")).unwrap(), "4");
    let meta: Value = serde_json::from_slice(&std::fs::read(artifacts.join("meta.json")).unwrap()).unwrap();
    assert_eq!(meta, record);

    let run_id = record["run_id"].as_str().unwrap();
    for name in [run_id, "my-run", &run_id[run_id.len() - 6..]] {
        let shown: Value = serde_json::from_slice(&bench.output(["show", "--json", name]).stdout).unwrap();
        assert_eq!(shown, record, "{name}");
    }
    let listed = bench.output(["ls", "--json", "--label", "a=b"]);
    assert_eq!(serde_json::from_slice::<Value>(&listed.stdout).unwrap()[0], record);
    assert_eq!(text(&bench.output(["ls", "--json", "--label", "a=c"]).stdout), "[]\n");
    assert_eq!(text(&bench.output(["logs", "my-run"]).stdout), "hi\n");
    let shown = text(&bench.output(["show", "my-run"]).stdout);
    assert!(shown.contains("added        f"), "{shown}");
}

#[test]
fn exit_codes_say_which_kind_of_end_it_was() {
    let bench = Bench::new();
    let (record, _) = bench.json(["--", "true"]);
    assert_eq!(
        (record["workspace"]["mode"].as_str(), record["workspace"]["changed"].as_array().map(Vec::len)),
        (Some("none"), Some(0))
    );
    for (args, code, outcome) in [
        (&["--", "true"][..], 0, "exited"),
        (&["--time", "50ms", "--", "sleep", "5"], 124, "timeout"),
        (&["--", "no-such-command"], 127, "not_found"),
        (&["--", "/etc/passwd"], 126, "not_executable"),
        (&["--", "/usr"], 126, "not_executable"),
        (&["--", "sh", "-c", "kill -SEGV $$"], 139, "signaled"),
        (&["--", "sh", "-c", "kill -KILL $$"], 137, "signaled"),
        (
            &[
                "--memory",
                "32M",
                "--",
                "/usr/bin/python3",
                "-c",
                "x = bytearray(100 << 20)\nimport time; time.sleep(1)",
            ],
            137,
            "oom",
        ),
        (&["--output", "10", "--", "sh", "-c", "echo 0123456789ab; sleep 5"], 137, "output_limit"),
        (&["-w", "/no/such/dir", "--", "true"], 125, "platform_error"),
    ] {
        let (record, found) = bench.json(args);
        assert_eq!((found, record["outcome"].as_str()), (code, Some(outcome)), "{args:?}");
    }
}

#[test]
fn explain_prints_the_plan_and_runs_nothing() {
    let bench = Bench::new();
    let output =
        bench.output(["run", "--explain", "--memory", "64M", "-e", "A=1", "--", "sh", "-c", "touch /tmp/it-ran"]);
    assert_eq!(output.status.code(), Some(0));
    let plan = text(&output.stdout);
    for line in [
        "command      sh -c 'touch /tmp/it-ran'",
        "memory     64 MiB",
        "A=1",
        "proc     /proc",
        "ro       /usr",
        "pids       256",
    ] {
        assert!(plan.contains(line), "{line} is not in\n{plan}");
    }
    assert!(!bench.path("home").exists(), "explaining made a home");
    let json: Value =
        serde_json::from_slice(&bench.output(["run", "--explain", "--json", "--", "true"]).stdout).unwrap();
    assert_eq!(json["walls"]["seccomp"], "proven");
}

#[test]
fn explain_is_the_same_plan_twice() {
    let bench = Bench::new();
    let plan = || text(&bench.output(["run", "--explain", "--", "python3", "-c", "1"]).stdout);
    assert_eq!(plan(), plan());
}

#[test]
fn verbose_says_where_the_time_went() {
    let bench = Bench::new();
    let said = text(&bench.output(["run", "-v", "--", "true"]).stderr);
    assert!(said.contains("times    prepare") && said.contains("walls"), "{said}");
}

#[test]
fn the_environment_is_what_was_asked_for() {
    let bench = Bench::new();
    let output = bench
        .hotcell(["run", "-q", "-e", "GIVEN=x=y", "-e", "PASSED", "-e", "UNSET", "--", "env"])
        .env("PASSED", "on")
        .env("SECRET", "no")
        .env_remove("UNSET")
        .output()
        .unwrap();
    let env = text(&output.stdout);
    assert!(env.contains("GIVEN=x=y\n") && env.contains("PASSED=on\n"), "{env}");
    assert!(!env.contains("SECRET") && !env.contains("UNSET"), "{env}");
}

#[test]
fn doctor_says_what_it_tried() {
    let bench = Bench::new();
    let output = bench.output(["doctor", "--json"]);
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(if cannot_leave_groups(&host()) { 4 } else { 0 }), "{found:#}");
    let state = |name: &str| {
        let findings = found["findings"].as_array().unwrap().iter();
        let one =
            findings.clone().find(|finding| finding["name"] == name).unwrap_or_else(|| panic!("{name} is not listed"));
        one["state"].as_str().unwrap().to_owned()
    };
    for wall in ["mount", "pid", "net", "seccomp", "landlock", "workspace-cow", "workspace-rw", "workspace-ro"] {
        assert_eq!(state(wall), "works", "{wall}");
    }
    assert_eq!(state("user"), if is_root() { "not_needed" } else { "works" });
    // As a machine without the right finds it: a user without a group of its own is told how to get one.
    if state("cgroup") == "watched" {
        let text = text(&bench.output(["doctor"]).stdout);
        assert!(text.contains("run as root"), "{text}");
    }
    assert!(
        std::fs::read_dir(bench.path("home"))
            .unwrap()
            .flatten()
            .all(|entry| !entry.file_name().to_string_lossy().contains("doctor"))
    );
}

#[test]
fn a_required_wall_that_is_only_watched_refuses_the_run() {
    let bench = Bench::new();
    let (doctor, cgroup) = (bench.output(["doctor", "--json"]), bench.json(["--require", "cgroup", "--", "true"]));
    let watched = text(&doctor.stdout).contains("\"watched\"");
    assert_eq!(cgroup.1, if watched { 125 } else { 0 }, "{}", cgroup.0);
    // In a writable workspace the disk is the host's own: watched for everybody.
    let work = bench.dir("work");
    let (record, code) = bench.json(["-w", work.to_str().unwrap(), "--mode", "rw", "--require", "disk", "--", "true"]);
    assert_eq!(code, 125);
    assert!(record["error"].as_str().unwrap().contains("`disk`"), "{record}");
    let (record, code) = bench.json(["-w", work.to_str().unwrap(), "--mode", "rw", "--", "true"]);
    assert_eq!((code, record["isolation"]["walls"]["disk"].as_str()), (0, Some("watched")));
}

#[test]
fn an_interpreter_in_the_home_directory_is_there_and_its_neighbours_are_not() {
    let bench = Bench::new();
    let home = bench.dir("user");
    bench.file("user/.ssh/id", "secret");
    let shims = bench.file(
        "user/.tool/bin/greet",
        "#!/bin/sh\n. \"$(dirname \"$0\")/../lib/words\"\necho $WORDS; ls -A ~; ls -A ~/.tool\n",
    );
    bench.file("user/.tool/lib/words", "WORDS='from the tool'\n");
    std::fs::set_permissions(&shims, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:/usr/bin:/bin", shims.parent().unwrap().display());
    let output = bench.hotcell(["run", "-q", "--", "greet"]).env("HOME", &home).env("PATH", path).output().unwrap();
    assert_eq!(text(&output.stdout), "from the tool\n.tool\nbin\nlib\n", "{}", text(&output.stderr));
}

#[test]
fn a_command_may_open_its_own_streams_by_name() {
    let bench = Bench::new();
    let output = bench.output(["run", "-q", "--", "sh", "-c", "echo out > /dev/stdout; echo err > /dev/stderr"]);
    assert_eq!((text(&output.stdout).as_str(), text(&output.stderr).as_str()), ("out\n", "err\n"));
}

#[test]
fn a_wall_that_may_be_missing_is_left_out_when_it_does_not_stand() {
    let bench = Bench::new();
    if host().landlock_abi < 4 {
        return skip("a wall that fails only when it is built: this kernel's Landlock knows no network");
    }
    // Sixteen fences already, and there can be no more: the wall fails when it is built, which no plan can know.
    let script = "import ctypes, os, sys\n\
                  c = ctypes.CDLL(None, use_errno=True)\n\
                  assert c.prctl(38, 1, 0, 0, 0) == 0\n\
                  for _ in range(16):\n\
                  \x20   fence = c.syscall(444, (ctypes.c_uint64 * 2)(0, 1), 16, 0)\n\
                  \x20   assert fence >= 0 and c.syscall(446, fence, 0) == 0\n\
                  \x20   os.close(fence)\n\
                  os.execv(sys.argv[1], sys.argv[1:])";
    let fenced = |flags: &[&str]| {
        let mut python = bench.command("/usr/bin/python3");
        python.args(["-c", script, HOTCELL.as_str(), "run", "--json"]).args(flags).args(["--", "true"]);
        let output = python.output().unwrap();
        let record = serde_json::from_slice::<Value>(&output.stdout);
        (record.unwrap_or_else(|_| panic!("{}", text(&output.stderr))), output.status.code())
    };
    let (refused, code) = fenced(&[]);
    assert_eq!(code, Some(125), "VOID: {refused}");
    assert!(refused["error"].as_str().unwrap().contains("`landlock"), "{refused}");
    let walls = ["landlock", "landlock-tcp", "landlock-scope"];
    let flags: Vec<&str> = walls.iter().flat_map(|wall| ["--allow-missing", wall]).collect();
    let (record, code) = fenced(&flags);
    assert_eq!((code, record["isolation"]["walls"]["landlock"].as_str()), (Some(0), Some("missing")), "{record}");
}

#[test]
fn certificates_locale_and_names_are_there() {
    let bench = Bench::new();
    let script = "test -s /etc/ssl/certs/ca-certificates.crt && id -un && getent passwd $(id -u) >/dev/null && locale >/dev/null && date +%Z && echo ok";
    let output = bench.output(["run", "-q", "--", "sh", "-c", script]);
    assert!(text(&output.stdout).ends_with("ok\n"), "{} {}", text(&output.stdout), text(&output.stderr));
}
