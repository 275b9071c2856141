//! Leases, the ledger, receipts and the store, as their users and their enemies meet them. Every refusal has its control.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::Value;

use crate::support::*;

/// A policy under which a shell may be leased, for these tests.
const POLICY: &str = r#"
version = 1
[phases.staging]
status = "enabled"
why = "tests"
[groups.tests]
why = "tests"
commands = ["sh **", "true **", "cat **", "sleep **", "echo **", "head **"]
deny = ["cat /forbidden **"]
allows = ["sh -c x", "true"]
refuses = ["id", "cat /forbidden x"]
[groups.anything]
why = "tests"
commands = ["**"]
[capabilities.own]
why = "tests"
phase = "staging"
self_issued = true
groups = ["anything"]
paths_allowlist = ["/"]
paths_writable = ["/"]
env_allowlist = ["*"]
minutes_max = 1500
[capabilities.tests]
why = "tests"
phase = "staging"
groups = ["tests"]
paths_allowlist = ["/"]
paths_writable = ["/"]
env_allowlist = ["COLOR"]
limits = { mem_quota_mb = 4096 }
"#;

fn bench() -> Bench {
    let bench = Bench::new();
    assert!(bench.output(["run", "-q", "--", "true"]).status.success());
    fs::write(bench.path("home/policy.toml"), POLICY).unwrap();
    bench
}

/// Issues a lease and gives its id.
#[track_caller]
fn issue(bench: &Bench, words: &[&str]) -> String {
    let output = bench.output([&["lease", "issue"][..], words].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout).trim().to_owned()
}

fn file_of(bench: &Bench, lease: &str) -> std::path::PathBuf {
    bench.path(&format!("home/leases/{lease}.json"))
}

#[track_caller]
fn runs(bench: &Bench, words: &[&str]) {
    let output = bench.output([&["run", "-q"][..], words].concat());
    assert_eq!(output.status.code(), Some(0), "VOID, the control failed: {}", text(&output.stderr));
}

/// A run that is refused: with 126, this reason, a hint, a word to the ledger, and nothing that ran.
#[track_caller]
fn refused(bench: &Bench, words: &[&str], reason: &str) {
    let before = fs::read_dir(bench.path("home/runs")).unwrap().count();
    let output = bench.output([&["run"][..], words].concat());
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(126), "{said}");
    assert!(said.contains(reason) && said.contains("hint:"), "{said}");
    assert_eq!(fs::read_dir(bench.path("home/runs")).unwrap().count(), before, "nothing of it is left");
    let last = entries(bench).pop().unwrap();
    assert_eq!(last["event"], "lease_event.DENIED");
    assert!(last["details"]["reason"].as_str().unwrap().starts_with(reason.split(": ").next().unwrap()), "{last}");
}

fn entries(bench: &Bench) -> Vec<Value> {
    let output = bench.output(["audit", "export"]);
    assert!(output.status.success());
    text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[track_caller]
fn audit(bench: &Bench, words: &[&str]) -> (i32, String) {
    let output = bench.output([&["audit", "verify"][..], words].concat());
    (output.status.code().unwrap(), text(&output.stdout))
}

fn events(bench: &Bench) -> Vec<String> {
    entries(bench).iter().map(|entry| entry["event"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_bare_run_has_a_lease_of_its_own_and_leaves_evidence_of_all_of_it() {
    let bench = Bench::new();
    let output = bench.output(["run", "-v", "--", "echo", "hello"]);
    assert_eq!(text(&output.stdout), "hello\n");
    assert!(text(&output.stderr).contains("its own, issued by your key from the policy"), "{}", text(&output.stderr));
    let told = [
        "ledger_event.CREATED",
        "key_event.CREATED",
        "lease_event.ISSUED",
        "lease_event.VERIFIED",
        "exec_event.STARTED",
        "exec_event.FINISHED",
    ];
    assert_eq!(events(&bench), told);
    assert_eq!(audit(&bench, &[]).0, 0);
    let (record, _) = bench.json(["--", "true"]);
    let run = record["run_id"].as_str().unwrap();
    let artifacts = Path::new(record["artifacts"].as_str().unwrap());
    assert_eq!(fs::read_to_string(artifacts.join("exit_code.txt")).unwrap(), "0");
    for name in ["lease_id", "policy_digest", "plan_digest", "ledger", "duration_s", "command", "outcome"] {
        assert!(!record[name].is_null(), "meta.json has {name}");
    }
    assert!(bench.output(["receipt", "verify", run]).status.success());
    assert!(bench.output(["lease", "show", record["lease_id"].as_str().unwrap()]).status.success());
    // Any change of what it is about, or of itself, is found.
    for name in ["stdout.log", "stderr.log", "exit_code.txt", "meta.json"] {
        let path = artifacts.join(name);
        let was = fs::read(&path).unwrap();
        fs::write(&path, [was.as_slice(), b" "].concat()).unwrap();
        assert_eq!(bench.output(["receipt", "verify", run]).status.code(), Some(1), "{name}");
        fs::write(&path, was).unwrap();
    }
    let path = artifacts.join("receipt.json");
    let was = fs::read_to_string(&path).unwrap();
    let payload = was.lines().find(|line| line.contains("payload\"")).unwrap().to_owned();
    fs::write(&path, was.replace(&payload, &payload.replacen("ey", "fy", 1))).unwrap();
    assert_eq!(bench.output(["receipt", "verify", run]).status.code(), Some(1));
    // A key is its owner's alone.
    use std::os::unix::fs::PermissionsExt;
    let keys: Vec<_> = fs::read_dir(bench.path("home/keys")).unwrap().flatten().map(|entry| entry.path()).collect();
    let secret = keys.iter().find(|path| path.extension().is_some_and(|end| end == "key")).unwrap();
    assert_eq!(fs::metadata(secret).unwrap().permissions().mode() & 0o777, 0o600);
    fs::set_permissions(secret, fs::Permissions::from_mode(0o644)).unwrap();
    let output = bench.output(["run", "--", "true"]);
    assert_eq!(output.status.code(), Some(125));
    assert!(text(&output.stderr).contains("chmod 600"), "{}", text(&output.stderr));
}

#[test]
fn a_lease_allows_what_it_says_and_nothing_else() {
    let bench = bench();
    let (open, closed) = (bench.dir("open"), bench.dir("closed"));
    let (open, closed) = (open.to_str().unwrap(), closed.to_str().unwrap());
    let lease = issue(
        &bench,
        &["--command", "sh -c **", "--command", "cat **", "--path", open, "--env", "COLOR", "--minutes", "5"],
    );
    macro_rules! words { ($($word:expr),*) => { &["--lease", lease.as_str(), $($word),*] } }
    runs(&bench, words!["--", "sh", "-c", "exit 0"]);
    refused(&bench, words!["--", "true"], "Command not in allowlist: true");
    refused(&bench, words!["--", "sh", "-x"], "Command not in allowlist: sh -x");
    refused(&bench, words!["--", "cat", "/forbidden", "x"], "Command not in allowlist: cat /forbidden x");
    // The file counts, and not its name.
    bench.file("open/sh", "#!/bin/sh\nexit 0\n");
    fs::set_permissions(bench.path("open/sh"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let ours = format!("{open}/sh");
    refused(&bench, words!["-w", open, "--", ours.as_str(), "-c", "exit 0"], "Command not in allowlist");
    runs(&bench, words!["-w", open, "--", "/bin/sh", "-c", "exit 0"]);
    refused(&bench, words!["-w", closed, "--", "sh", "-c", "exit 0"], &format!("Path not in allowlist: {closed}"));
    refused(&bench, words!["-w", open, "--mode", "rw", "--", "sh", "-c", "exit 0"], "Path not writable under lease");
    let writable = issue(&bench, &["--command", "sh -c **", "--write", open]);
    runs(&bench, &["--lease", &writable, "-w", open, "--mode", "rw", "--", "sh", "-c", "echo x > new"]);
    assert_eq!(fs::read_to_string(bench.path("open/new")).unwrap(), "x\n");
    runs(&bench, words!["-e", "COLOR=red", "--", "sh", "-c", "test $COLOR = red"]);
    refused(&bench, words!["-e", "LD_PRELOAD=x", "--", "sh", "-c", "exit 0"], "Env not in allowlist: LD_PRELOAD");
}

#[test]
fn what_is_out_of_scope_does_not_exist_inside() {
    let bench = bench();
    bench.file("repo/tools/a", "a tool\n");
    bench.file("repo/tools/b/c", "another\n");
    bench.file("repo/secret/key", "TOPSECRET\n");
    let repo = bench.path("repo");
    let repo = repo.to_str().unwrap();
    let looks = format!("cat {repo}/tools/a {repo}/secret/key; echo x >> {repo}/tools/a");
    let seen = |lease: &str, words: &[&str]| {
        let words = [&["run", "-q", "--lease", lease][..], words, &["--", "sh", "-c", &looks]].concat();
        text(&bench.output(words).stdout)
    };
    // Without a workspace, what the lease names is what there is.
    let narrow = issue(&bench, &["--command", "sh **", "--path", &format!("{repo}/tools/*")]);
    assert_eq!(seen(&narrow, &[]), "a tool\n");
    assert_eq!(fs::read_to_string(bench.path("repo/tools/a")).unwrap(), "a tool\n", "and not to be written");
    // What is denied below what is shown is covered.
    let denying = issue(&bench, &["--command", "sh **", "--path", repo, "--deny", &format!("{repo}/secret")]);
    assert_eq!(seen(&denying, &["-w", repo]), "a tool\n");
    assert_eq!(seen(&denying, &[]), "a tool\n");
    // The control: without the denial it is there.
    let wide = issue(&bench, &["--command", "sh **", "--path", repo]);
    assert_eq!(seen(&wide, &["-w", repo]), "a tool\nTOPSECRET\n");
}

#[test]
fn what_a_lease_limits_is_limited_and_its_end_ends_what_runs() {
    let bench = bench();
    let script = "x=$(head -c 90000000 /dev/zero | tr '\\0' x); exit 0";
    let eats = |lease: &[&str]| {
        let words = [&["run", "--json"][..], lease, &["--memory", "500MiB", "--", "sh", "-c", script]].concat();
        let record: Value = serde_json::from_slice(&bench.output(words).stdout).unwrap();
        record["outcome"].as_str().unwrap().to_owned()
    };
    let shell = issue(&bench, &["--command", "sh **", "--memory", "32MiB"]);
    assert_eq!(eats(&["--lease", &shell]), "oom");
    assert_eq!(eats(&[]), "exited", "the control: without the lease's limit it runs");
    let short = issue(&bench, &["--command", "sleep *", "--minutes", "0.04"]);
    let output = bench.output(["run", "--json", "--lease", &short, "--", "sleep", "60"]);
    let record: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((record["outcome"].as_str(), output.status.code()), (Some("lease_expired"), Some(137)), "{record}");
    assert!(events(&bench).iter().any(|event| event == "lease_event.EXPIRED"));
    let little = issue(&bench, &["--command", "true", "--memory", "1MiB"]);
    refused(&bench, &["--lease", &little, "--", "true"], "Limit under lease: the memory limit");
    refused(&bench, &["--lease", &short, "--", "sleep", "0"], "Lease expired");
}

#[test]
fn a_lease_that_was_changed_by_a_letter_is_none() {
    let bench = bench();
    let lease = issue(&bench, &["--command", "true", "--minutes", "5"]);
    let path = file_of(&bench, &lease);
    let path = path.to_str().unwrap();
    runs(&bench, &["--lease", path, "--", "true"]);
    let was = fs::read_to_string(path).unwrap();
    let changed = |from: &str, to: &str| {
        assert!(was.contains(from), "VOID: {from}");
        fs::write(path, was.replacen(from, to, 1)).unwrap();
    };
    changed("\"true\"", "\"id\"");
    refused(&bench, &["--lease", path, "--", "id"], "Invalid signature");
    let year = &was[was.find("\"expires_at\": \"").unwrap() + 15..][..4];
    changed(&format!("\"expires_at\": \"{year}"), "\"expires_at\": \"2099");
    refused(&bench, &["--lease", path, "--", "true"], "Invalid signature");
    changed("  \"actor\"", "\t\"actor\"");
    refused(&bench, &["--lease", path, "--", "true"], "Lease not readable");
    changed("Ed25519", "none");
    refused(&bench, &["--lease", path, "--", "true"], "Lease not readable");
    fs::write(path, "").unwrap();
    refused(&bench, &["--lease", path, "--", "true"], "Lease not readable");
    fs::write(path, was).unwrap();
    runs(&bench, &["--lease", path, "--", "true"]);
    let output = bench.output(["run", "--lease", "/nowhere", "--", "true"]);
    assert_eq!(output.status.code(), Some(126));
    assert!(text(&output.stderr).contains("Lease file not found"));
    let last = entries(&bench).pop().unwrap();
    assert_eq!(
        (last["event"].as_str(), last["details"]["reason"].as_str()),
        (Some("lease_event.DENIED"), Some("Lease file not found"))
    );
}

#[test]
fn verify_says_why_not_and_exits_with_one() {
    let bench = bench();
    let lease = issue(&bench, &["--command", "true", "--runs", "2", "--minutes", "5"]);
    let verify = |words: &[&str]| {
        let output = bench.output([&["lease", "verify"][..], words].concat());
        (output.status.code(), text(&output.stdout))
    };
    assert!(verify(&[&lease]).1.starts_with("Valid"));
    assert_eq!(verify(&[&lease, "--", "id"]), (Some(1), "Command not in allowlist: id\n".to_owned()));
    assert_eq!(verify(&["LEASE-20260101-000000-bbbbbb"]), (Some(1), "Lease file not found\n".to_owned()));
    runs(&bench, &["--lease", &lease, "--", "true"]);
    runs(&bench, &["--lease", &lease, "--", "true"]);
    assert_eq!(verify(&[&lease]), (Some(1), "Run count exhausted\n".to_owned()));
    refused(&bench, &["--lease", &lease, "--", "true"], "Run count exhausted");
    let other = issue(&bench, &["--command", "true"]);
    // Issued under another policy.
    fs::write(bench.path("home/policy.toml"), format!("{POLICY}# changed\n")).unwrap();
    assert_eq!(verify(&[&other]), (Some(1), "Policy digest mismatch\n".to_owned()));
    fs::write(bench.path("home/policy.toml"), POLICY).unwrap();
    assert!(verify(&[&other]).1.starts_with("Valid"), "the control");
    // For another home.
    let elsewhere = issue(&bench, &["--command", "true", "--audience", "0123456789abcdef"]);
    assert_eq!(verify(&[&elsewhere]), (Some(1), "Lease is for another home\n".to_owned()));
    // By a key that is not trusted here.
    let stranger = self::bench();
    let foreign = issue(&stranger, &["--command", "true"]);
    let foreign = file_of(&stranger, &foreign);
    assert!(verify(&[foreign.to_str().unwrap()]).1.starts_with("Unknown key ID: ed25519-"));
    // By a key that was revoked.
    let keys: Value = serde_json::from_slice(&bench.output(["key", "list", "--json"]).stdout).unwrap();
    let kid = keys[0]["kid"].as_str().unwrap();
    assert!(bench.output(["key", "rotate"]).status.success());
    assert!(verify(&[&other]).1.starts_with("Valid"), "a previous key's leases hold");
    assert!(bench.output(["key", "revoke", kid]).status.success());
    assert_eq!(verify(&[&other]).1, format!("Key {kid} was revoked\n"));
    assert_eq!(audit(&bench, &[]).0, 0, "{}", audit(&bench, &[]).1);
    runs(&bench, &["--", "true"]);
}

#[test]
fn issuing_is_within_the_policy_and_a_clamp_is_said() {
    let bench = bench();
    let output = bench.output(["lease", "issue", "--command", "true", "--minutes", "60"]);
    assert!(output.status.success() && text(&output.stderr).contains("clamped"), "{}", text(&output.stderr));
    let lease = text(&output.stdout).trim().to_owned();
    let lease: Value = serde_json::from_slice(&fs::read(file_of(&bench, &lease)).unwrap()).unwrap();
    let time = |name: &str| lease[name].as_str().unwrap().parse::<jiff::Timestamp>().unwrap();
    assert_eq!(time("expires_at").duration_since(time("issued_at")).as_secs(), 600);
    for (words, code, says) in [
        (&["--command", "true", "--minutes", "0"][..], 2, "positive time"),
        (&["--command", "true", "--minutes", "-5"], 2, "positive time"),
        (&["--command", "true", "--minutes", "x"], 2, "number of minutes"),
        (&["--minutes", "5"], 2, "at least one command"),
        (&["--command", "id"], 3, "no capability of the policy admits it: the command `id`"),
        (&["--command", "true", "--memory", "100GiB"], 3, "mem_quota_mb"),
        (&["--command", "true", "--env", "HOME"], 3, "the variable `HOME`"),
        (&["--command", "true", "--path", "repo://nowhere/x"], 3, "nowhere"),
        (&["--command", "true", "--runs", "0"], 2, "runs_max is 0"),
        (&["--command", "true", "--path", "relative"], 2, "neither absolute"),
    ] {
        let output = bench.output([&["lease", "issue"][..], words].concat());
        assert_eq!(output.status.code(), Some(code), "{words:?}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains(says), "{words:?}: {}", text(&output.stderr));
    }
    // Many at once have each a name of its own.
    let children: Vec<Child> = (0..12)
        .map(|_| {
            bench
                .hotcell(["lease", "issue", "--command", "true"])
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .unwrap()
        })
        .collect();
    let mut names: Vec<String> =
        children.into_iter().map(|child| text(&child.wait_with_output().unwrap().stdout)).collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 12);
    assert_eq!(audit(&bench, &[]).0, 0);
    // A policy whose examples do not hold permits nothing.
    fs::write(bench.path("home/policy.toml"), POLICY.replace("refuses = [\"id\"", "refuses = [\"true\"")).unwrap();
    let output = bench.output(["run", "--", "true"]);
    assert_eq!(output.status.code(), Some(125));
    assert!(text(&output.stderr).contains("says that it refuses `true`"), "{}", text(&output.stderr));
    assert_eq!(bench.output(["policy", "check"]).status.code(), Some(1));
}

/// A run in the background that is there until it is ended.
fn sleeping(bench: &Bench, words: &[&str], word: &str) -> Child {
    let words =
        [&["run", "--json"][..], words, &["--", "sh", "-c", "sleep 1000 & setsid sleep 1000 & wait", word]].concat();
    let child = bench.hotcell(words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    eventually("it runs", || !processes_with(word).is_empty());
    child
}

#[track_caller]
fn ended(child: Child, outcome: &str) -> Value {
    let output = child.wait_with_output().unwrap();
    let record: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((record["outcome"].as_str(), output.status.code()), (Some(outcome), Some(137)), "{record}");
    record
}

#[test]
fn a_lease_that_is_revoked_ends_what_runs_under_it_and_under_all_made_of_it() {
    let bench = bench();
    let parent = issue(&bench, &["--command", "sh **"]);
    let output = bench.output(["lease", "attenuate", &parent, "--minutes", "4", "--runs", "5"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let child_lease = text(&output.stdout).trim().to_owned();
    let other = issue(&bench, &["--command", "sh **"]);
    let (one, two, three) = (token(), token(), token());
    let under_child = sleeping(&bench, &["--lease", &child_lease], &one);
    let under_parent = sleeping(&bench, &["--lease", &parent], &two);
    let mut under_other = sleeping(&bench, &["--lease", &other], &three);
    assert!(bench.output(["lease", "revoke", &parent, "--reason", "enough"]).status.success());
    for (child, word) in [(under_child, &one), (under_parent, &two)] {
        let record = ended(child, "lease_revoked");
        assert!(processes_with(word).is_empty(), "the whole tree is gone");
        let run = record["run_id"].as_str().unwrap();
        let receipt: Value = serde_json::from_slice(&bench.output(["receipt", "show", run]).stdout).unwrap();
        assert_eq!(receipt["predicate"]["outcome"], "lease_revoked");
    }
    // The control: another lease's goes on.
    assert!(!processes_with(&three).is_empty() && under_other.try_wait().unwrap().is_none());
    refused(&bench, &["--lease", &parent, "--", "sh", "-c", "exit"], "Lease revoked");
    refused(&bench, &["--lease", &child_lease, "--", "sh", "-c", "exit"], "Parent lease");
    assert!(bench.output(["lease", "revoke", &other]).status.success());
    ended(under_other, "lease_revoked");
    assert_eq!(audit(&bench, &[]).0, 0);
}

#[test]
fn a_narrower_lease_grants_no_more_than_what_it_is_made_of() {
    let bench = bench();
    let dir = bench.dir("d");
    let dir = dir.to_str().unwrap();
    let parent =
        issue(&bench, &["--command", "sh -c *", "--path", dir, "--memory", "64MiB", "--runs", "2", "--minutes", "5"]);
    let attenuate = |words: &[&str]| bench.output([&["lease", "attenuate", &parent][..], words].concat());
    for words in [
        &["--command", "sh **"][..],
        &["--path", "/"],
        &["--write", dir],
        &["--memory", "65MiB"],
        &["--runs", "3"],
        &["--env", "COLOR"],
    ] {
        let output = attenuate(words);
        assert_eq!(output.status.code(), Some(3), "{words:?}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains("would grant more"), "{}", text(&output.stderr));
    }
    let child = attenuate(&["--command", "sh -c exit", "--memory", "32MiB", "--minutes", "100"]);
    let child = text(&child.stdout).trim().to_owned();
    runs(&bench, &["--lease", &child, "--", "sh", "-c", "exit"]);
    refused(&bench, &["--lease", &child, "--", "sh", "-c", "id"], "Command not in allowlist");
    // Runs of the child are runs of the parent.
    runs(&bench, &["--lease", &parent, "--", "sh", "-c", "id"]);
    refused(&bench, &["--lease", &child, "--", "sh", "-c", "exit"], "Parent lease");
    refused(&bench, &["--lease", &parent, "--", "sh", "-c", "exit"], "Run count exhausted");
}

#[test]
fn an_attempt_is_made_once_whoever_asks_again() {
    let bench = bench();
    let work = bench.dir("work");
    let work = work.to_str().unwrap();
    let lease = issue(&bench, &["--command", "sh **", "--write", work]);
    let attempt = |name: &str, script: &str| {
        let words = [
            "run",
            "-q",
            "--lease",
            &lease,
            "--attempt-id",
            name,
            "-w",
            work,
            "--mode",
            "rw",
            "--",
            "sh",
            "-c",
            script,
        ];
        bench.output(words)
    };
    let script = "echo x >> ran; echo said; echo complained >&2; exit 7";
    for _ in 0..3 {
        let output = attempt("first", script);
        let came = (output.status.code(), text(&output.stdout), text(&output.stderr));
        assert_eq!(came, (Some(7), "said\n".to_owned(), "complained\n".to_owned()));
    }
    assert_eq!(fs::read_to_string(bench.path("work/ran")).unwrap(), "x\n", "it ran once");
    let output = attempt("first", "echo other >> ran");
    assert_eq!(output.status.code(), Some(125));
    assert!(text(&output.stderr).contains("it was of something else"), "{}", text(&output.stderr));
    assert_eq!(attempt("second", script).status.code(), Some(7), "another attempt is another run");
    assert_eq!(fs::read_to_string(bench.path("work/ran")).unwrap(), "x\nx\n");
    // Of many at once, one runs.
    let words = [
        "run",
        "-q",
        "--lease",
        &lease,
        "--attempt-id",
        "many",
        "-w",
        work,
        "--mode",
        "rw",
        "--",
        "sh",
        "-c",
        "echo y >> many; sleep 0.3",
    ];
    let children: Vec<Child> = (0..6).map(|_| bench.hotcell(words).stderr(Stdio::null()).spawn().unwrap()).collect();
    let codes: Vec<_> = children.into_iter().map(|mut child| child.wait().unwrap().code()).collect();
    assert_eq!(fs::read_to_string(bench.path("work/many")).unwrap(), "y\n", "{codes:?}");
    assert!(codes.contains(&Some(0)));
    // One whose hotcell was killed is not known, and not made again.
    let word = token();
    let words = ["run", "--attempt-id", "killed", "--", "sh", "-c", "sleep 1000", &word];
    let mut child = bench.hotcell(words).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    eventually("it runs", || !processes_with(&word).is_empty());
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("it is gone", || processes_with(&word).is_empty());
    let output = bench.output(words);
    assert_eq!(output.status.code(), Some(125), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("unknown"), "{}", text(&output.stderr));
}

#[test]
fn if_the_ledger_cannot_be_written_nothing_runs() {
    let bench = bench();
    let work = bench.dir("work");
    let work = work.to_str().unwrap();
    let touches = ["run", "-w", work, "--mode", "rw", "--", "sh", "-c", "echo x >> ran"];
    let ledger = bench.path("home/ledger/current.jsonl");
    let whole = fs::read(&ledger).unwrap();
    for damaged in [&whole[..whole.len() / 2], b"", &[whole.as_slice(), b"{}"].concat()[1..]] {
        fs::write(&ledger, damaged).unwrap();
        let output = bench.output(touches);
        assert_eq!(output.status.code(), Some(125), "{}", text(&output.stderr));
        assert!(text(&output.stderr).contains("ledger") && text(&output.stderr).contains("hotcell audit verify"));
        assert!(!bench.path("work/ran").exists());
        assert_eq!(audit(&bench, &[]).0, 1);
    }
    fs::write(&ledger, &whole).unwrap();
    assert_eq!(bench.output(touches).status.code(), Some(0), "the control");
    // A loss that is accepted is written down.
    let lines: Vec<String> = fs::read_to_string(&ledger).unwrap().lines().map(str::to_owned).collect();
    fs::write(&ledger, format!("{}\n", lines[..lines.len() - 2].join("\n"))).unwrap();
    let (code, said) = audit(&bench, &[]);
    assert_eq!((code, said.starts_with("truncated at entry")), (1, true), "{said}");
    assert_eq!(bench.output(["audit", "recover"]).status.code(), Some(1));
    assert!(bench.output(["audit", "recover", "--yes"]).status.success());
    assert!(bench.output(touches).status.success());
    assert_eq!(audit(&bench, &[]), audit(&bench, &[]));
    assert_eq!(audit(&bench, &[]).0, 0, "{}", audit(&bench, &[]).1);
    assert!(events(&bench).contains(&"ledger_event.RECOVERED".to_owned()));
}

#[test]
fn an_old_copy_of_everything_is_found_by_a_witness() {
    let bench = bench();
    let repo = bench.dir("repo");
    let git = |words: &[&str]| Command::new("git").current_dir(&repo).args(words).output().unwrap();
    let has_git = Command::new("git").arg("--version").output().is_ok_and(|output| output.status.success());
    if has_git {
        assert!(git(&["init", "-q"]).status.success());
    }
    let copy = bench.path("copy");
    let copied = |from: &Path, to: &Path| {
        assert!(Command::new("cp").args(["-a", "-T"]).args([from, to]).status().unwrap().success());
    };
    copied(&bench.path("home"), &copy);
    runs(&bench, &["--", "true"]);
    let witness = bench.path("witness");
    let witness = witness.to_str().unwrap();
    assert!(bench.output(["audit", "witness", witness]).status.success());
    assert_eq!(audit(&bench, &["--witness", witness]).0, 0, "the control");
    let in_git = |words: &[&str]| bench.hotcell(words).current_dir(&repo).output().unwrap();
    if has_git {
        let output = in_git(&["audit", "witness", "--git", "refs/hotcell/witness"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let output = in_git(&["audit", "verify", "--git", "refs/hotcell/witness"]);
        assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    } else {
        skip("a witness in a git repository: there is no git");
    }
    fs::remove_dir_all(bench.path("home")).unwrap();
    copied(&copy, &bench.path("home"));
    assert_eq!(audit(&bench, &[]).0, 0, "by itself it is whole");
    let (code, said) = audit(&bench, &["--witness", witness]);
    assert_eq!((code, said.starts_with("truncated")), (1, true), "{said}");
    if has_git {
        assert_eq!(in_git(&["audit", "verify", "--git", "refs/hotcell/witness"]).status.code(), Some(1));
    }
    // Offline, from a copy of the files and the public keys alone.
    let place = |name: &str| copy.join(name).display().to_string();
    let words = ["--ledger", &place("ledger"), "--head", &place("head"), "--trust", &place("trust.json")];
    assert_eq!(audit(&bench, &words).0, 0);
}

#[test]
fn secrets_are_not_told() {
    let bench = bench();
    let secrets = ["hunter2hunter2", "AKIA0123456789ABCDEF", "s3cr3tvalue", "u:p4ssw0rd"];
    let output = bench.output([
        "run",
        "-q",
        "--label",
        "api_token=s3cr3tvalue",
        "--",
        "echo",
        "--password",
        "hunter2hunter2",
        "AKIA0123456789ABCDEF",
        "https://u:p4ssw0rd@host/x",
    ]);
    assert!(output.status.success());
    assert!(secrets.iter().any(|secret| text(&output.stdout).contains(secret)), "VOID: they were given");
    let mut told = text(&bench.output(["audit", "export"]).stdout);
    let run = text(&bench.output(["ls", "--json", "-n", "1"]).stdout);
    let run: Value = serde_json::from_str(&run).unwrap();
    told.push_str(&text(&bench.output(["receipt", "show", run[0]["run_id"].as_str().unwrap()]).stdout));
    told.push_str(&text(&bench.output(["ls"]).stdout));
    for secret in secrets {
        assert!(!told.contains(secret), "{secret} was told");
    }
    assert!(told.contains("[redacted]"));
}

#[test]
fn the_key_and_the_ledger_are_out_of_reach_of_what_runs() {
    let bench = bench();
    let place = bench.path("");
    let place = place.to_str().unwrap().trim_end_matches('/');
    let secret = fs::read_dir(bench.path("home/keys")).unwrap().flatten().map(|entry| entry.path());
    let secret = secret.into_iter().find(|path| path.extension().is_some_and(|end| end == "key")).unwrap();
    let ledger = bench.path("home/ledger/current.jsonl");
    let tries =
        format!("cat {} {}; echo x >> {}; ls {place}/home", secret.display(), ledger.display(), ledger.display());
    let before = fs::read(&secret).unwrap();
    let output = bench.output(["run", "-q", "-w", place, "--mode", "rw", "--", "sh", "-c", &tries]);
    assert_eq!(text(&output.stdout), "", "{}", text(&output.stderr));
    assert_eq!(fs::read(&secret).unwrap(), before);
    assert_eq!(audit(&bench, &[]).0, 0);
    // The control: outside, all of it is there for its owner.
    let outside =
        Command::new("sh").args(["-c", &format!("cat {}; ls {place}/home", secret.display())]).output().unwrap();
    assert!(text(&outside.stdout).contains("ledger"));
    // A leased program that finds hotcell itself can make a home of its own, and nothing in this one.
    let renew = format!("{} lease issue --command true --home {place}/home", HOTCELL.as_str());
    let output = bench.output(["run", "-q", "-w", place, "--mode", "rw", "--", "sh", "-c", &renew]);
    assert_ne!(output.status.code(), Some(0));
}

#[test]
fn a_crash_of_hotcell_leaves_no_core_with_a_key_in_it() {
    let bench = bench();
    let word = token();
    let mut child = bench.hotcell(["run", "-q", "--", "sh", "-c", "sleep 1000", &word]).spawn().unwrap();
    eventually("it runs", || !processes_with(&word).is_empty());
    let limits = fs::read_to_string(format!("/proc/{}/limits", child.id())).unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    let soft = core.split_whitespace().nth(4).unwrap().parse::<u64>();
    assert!(soft.is_ok_and(|bytes| bytes <= 1), "{core}");
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_command_in_a_session_has_a_lease_as_well() {
    let bench = bench();
    assert!(bench.output(["create", "dev"]).status.success());
    struct Gone<'a>(&'a Bench);
    impl Drop for Gone<'_> {
        fn drop(&mut self) {
            self.0.output(["rm", "dev"]);
        }
    }
    let _gone = Gone(&bench);
    let lease = issue(&bench, &["--command", "echo **", "--command", "sleep *", "--runs", "3"]);
    let exec = |words: &[&str]| bench.output([&["exec", "-q", "--lease", &lease, "dev"][..], words].concat());
    assert_eq!(text(&exec(&["--", "echo", "hi"]).stdout), "hi\n");
    let output = exec(&["--", "id"]);
    assert_eq!(output.status.code(), Some(126), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("Command not in allowlist: id"), "{}", text(&output.stderr));
    assert_eq!(
        bench.output(["exec", "-q", "dev", "--", "id", "-u"]).status.code(),
        Some(0),
        "the control: without that lease"
    );
    let small = issue(&bench, &["--command", "echo **", "--disk", "10MiB"]);
    let output = bench.output(["exec", "-q", "--lease", &small, "dev", "--", "echo", "hi"]);
    assert_eq!(output.status.code(), Some(126), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("the session's disk is 1 GiB"), "{}", text(&output.stderr));
    let child = bench
        .hotcell(["exec", "--json", "--lease", &lease, "dev", "--", "sleep", "1000"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    eventually("it runs", || text(&bench.output(["ls", "--sessions"]).stdout).contains("sleep 1000"));
    assert!(bench.output(["lease", "revoke", &lease]).status.success());
    ended(child, "lease_revoked");
    assert_eq!(exec(&["--", "echo", "hi"]).status.code(), Some(126));
    assert_eq!(bench.output(["exec", "-q", "dev", "--", "true"]).status.code(), Some(0), "the session goes on");
    // With the session's own lease, the session goes.
    let sessions: Value = serde_json::from_slice(&bench.output(["ls", "--sessions", "--json"]).stdout).unwrap();
    let run = sessions[0]["run_id"].as_str().unwrap();
    let record: Value = serde_json::from_slice(&bench.output(["show", run, "--json"]).stdout).unwrap();
    assert!(bench.output(["lease", "revoke", record["lease_id"].as_str().unwrap()]).status.success());
    eventually("it ends", || text(&bench.output(["ls", "--sessions"]).stdout).is_empty());
    eventually("it is told", || {
        let record: Value = serde_json::from_slice(&bench.output(["show", run, "--json"]).stdout).unwrap();
        record["outcome"] == "lease_revoked"
    });
}

#[test]
fn runs_are_found_by_what_they_were() {
    let bench = bench();
    let lease = issue(&bench, &["--command", "true"]);
    runs(&bench, &["--lease", &lease, "--name", "one", "--label", "team=a", "--", "true"]);
    bench.output(["run", "-q", "--label", "team=b", "--time", "100ms", "--", "sleep", "5"]);
    runs(&bench, &["--label", "team=a", "--", "true"]);
    let found = |words: &[&str]| {
        let output = bench.output([&["ls", "--json"][..], words].concat());
        assert!(output.status.success(), "{}", text(&output.stderr));
        serde_json::from_slice::<Value>(&output.stdout).unwrap().as_array().unwrap().len()
    };
    assert_eq!(found(&[]), 4);
    assert_eq!(found(&["--label", "team=a"]), 2);
    assert_eq!(found(&["--outcome", "timeout"]), 1);
    assert_eq!(found(&["--lease", &lease]), 1);
    assert_eq!(found(&["--lease", &lease, "--label", "team=b"]), 0);
    assert_eq!(found(&["--since", "1h"]), 4);
    assert_eq!(found(&["--since", "2099-01-01T00:00:00Z"]), 0);
    assert_eq!(bench.output(["ls", "--outcome", "nonsense"]).status.code(), Some(2));
    assert!(bench.output(["rm", "one"]).status.success());
    assert_eq!(found(&[]), 3);
    // Lost, the store is made of the ledger again.
    for name in ["hotcell.db", "hotcell.db-wal", "hotcell.db-shm"] {
        let _absent = fs::remove_file(bench.path(&format!("home/{name}")));
    }
    assert_eq!(found(&[]), 3);
    let listed: Value = serde_json::from_slice(&bench.output(["lease", "list", "--json"]).stdout).unwrap();
    assert_eq!((listed[0]["lease_id"].as_str(), listed[0]["runs_used"].as_u64()), (Some(&*lease), Some(1)));
}

#[test]
fn the_demo_goes_as_it_must() {
    let bench = Bench::new();
    let output = bench.output(["demo", "lease", "--json"]);
    let demo: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", text(&output.stderr)));
    assert_eq!((demo["held"].as_bool(), output.status.code()), (Some(true), Some(0)), "{demo:#}");
    assert_eq!(demo["steps"].as_array().unwrap().len(), 13);
    assert!(text(&bench.output(["demo", "lease"]).stdout).contains("all 13 steps went as they must"));
}
