//! Wrong input: a clear error, a hint, the right code, and nothing half-done.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Stdio;

use crate::support::*;

/// Runs hotcell, expects a refusal with this code, and gives what it said.
#[track_caller]
fn refused<T: AsRef<OsStr>>(bench: &Bench, code: i32, args: impl IntoIterator<Item = T>) -> String {
    let output = bench.output(args);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{said}");
    assert_eq!(text(&output.stdout), "");
    assert!(said.starts_with("error: "), "{said}");
    said
}

#[track_caller]
fn says(said: &str, words: &[&str]) {
    for word in words {
        assert!(said.contains(word), "`{word}` is not in\n{said}");
    }
}

#[test]
fn unknown_flags_and_words_suggest_the_nearest() {
    let bench = Bench::new();
    says(&refused(&bench, 125, ["run", "--memry", "1G", "--", "true"]), &["--memry", "--memory"]);
    says(&refused(&bench, 2, ["lst"]), &["lst", "ls"]);
    says(&refused(&bench, 125, ["run", "-w", "/tmp", "--mode", "cwo", "--", "true"]), &["cwo", "cow"]);
    says(&refused(&bench, 125, ["run", "--require", "secomp", "--", "true"]), &["secomp", "seccomp"]);
}

#[test]
fn quantities_that_are_none_are_named_with_what_would_be_one() {
    let bench = Bench::new();
    says(&refused(&bench, 125, ["run", "--memory", "lots", "--", "true"]), &["lots", "512MiB"]);
    says(&refused(&bench, 125, ["run", "--memory", "-1", "--", "true"]), &["-1"]);
    says(&refused(&bench, 125, ["run", "--time", "soon", "--", "true"]), &["soon", "90s"]);
    says(&refused(&bench, 125, ["run", "--time", "0", "--", "true"]), &["less than 1ms"]);
    says(&refused(&bench, 125, ["run", "--cpus", "none", "--", "true"]), &["none", "0.5"]);
    says(&refused(&bench, 125, ["run", "--pids", "many", "--", "true"]), &["many"]);
    says(&refused(&bench, 125, ["run", "--pids", "0", "--", "true"]), &["pids limit 0", "--pids 1"]);
    says(&refused(&bench, 125, ["run", "--memory", "1k", "--", "true"]), &["1 KiB", "4 MiB", "hint:"]);
    says(&refused(&bench, 125, ["run", "--label", "novalue", "--", "true"]), &["key=value"]);
    says(&refused(&bench, 125, ["run", "--name", "../x", "--", "true"]), &["../x"]);
}

#[test]
fn commands_that_are_none() {
    let bench = Bench::new();
    says(&refused(&bench, 125, ["run"]), &["COMMAND"]);
    says(&refused(&bench, 125, ["run", "--", ""]), &["no command", "hint:"]);
    says(&refused(&bench, 127, ["run", "--", "no-such"]), &["`no-such`", "hint:"]);
    says(&refused(&bench, 127, ["run", "--", "/no/such"]), &["`/no/such`"]);
    says(&refused(&bench, 127, ["run", "--", "./no-such"]), &["`./no-such`", "--workspace"]);
    says(&refused(&bench, 126, ["run", "--", "/usr"]), &["is a directory", "hint:"]);
    let plain = bench.file("plain.sh", "echo hi\n");
    says(&refused(&bench, 126, ["run", "--", plain.to_str().unwrap()]), &["no execute permission", "chmod +x"]);
    // A script whose interpreter is not there fails where every program would: at exec.
    let orphan = bench.file("orphan", "#!/no/such/interpreter\n");
    std::fs::set_permissions(&orphan, std::fs::Permissions::from_mode(0o755)).unwrap();
    let (record, code) = bench.json([orphan.to_str().unwrap()]);
    assert_eq!((code, record["outcome"].as_str()), (127, Some("not_found")));
}

#[test]
fn workspaces_that_are_none() {
    let bench = Bench::new();
    let file = bench.file("file", "x");
    let link = bench.path("link");
    symlink(bench.dir("real"), &link).unwrap();
    let workspace = |path: &std::path::Path| {
        refused(&bench, 125, ["run".as_ref(), "-w".as_ref(), path.as_os_str(), "--".as_ref(), "true".as_ref()])
    };
    says(&workspace(&bench.path("missing")), &["missing", "No such file", "hint:"]);
    says(&workspace(&file), &["is not a directory"]);
    says(&workspace(&link), &["is a symbolic link"]);
    says(&workspace(std::path::Path::new("/")), &["root of the filesystem"]);
    says(&workspace(std::path::Path::new("/proc")), &["belongs to the system"]);
    says(&workspace(std::path::Path::new("/usr")), &["belongs to the system"]);
    let home = bench.dir("home-of-user");
    let output =
        bench.hotcell(["run", "-w", home.to_str().unwrap(), "--", "true"]).env("HOME", &home).output().unwrap();
    says(&text(&output.stderr), &["home directory"]);
    says(&refused(&bench, 125, ["run", "--mode", "cow", "--", "true"]), &["--workspace"]);
    let real = bench.path("real");
    says(&refused(&bench, 125, ["run", "-w", real.to_str().unwrap(), "-C", "nowhere", "--", "true"]), &["nowhere"]);
    says(&refused(&bench, 125, ["run", "-C", "/no/such", "--", "true"]), &["/no/such", "hint:"]);
}

#[test]
fn mounts_that_are_none() {
    let bench = Bench::new();
    let real = bench.dir("real");
    let real = real.to_str().unwrap();
    let mount = |mount: &str| refused(&bench, 125, ["run", "--mount", mount, "--", "true"]);
    says(&mount("/tmp"), &["is not a mount", "SRC:DST"]);
    says(&mount(":/x"), &["is not a mount"]);
    says(&mount("/no/such:/x"), &["/no/such", "No such file"]);
    says(&mount(&format!("{real}:relative")), &["relative", "absolute"]);
    says(&mount(&format!("{real}:/")), &["cannot be covered"]);
    for taken in ["/tmp", "/etc", "/etc/ssl", "/usr", "/.hotcell", "/cell", "/dev/shm"] {
        says(&mount(&format!("{real}:{taken}")), &["cover"]);
    }
    let twice = [format!("{real}:/x"), format!("{real}:/x")];
    says(
        &refused(&bench, 125, ["run", "--mount", &twice[0], "--mount", &twice[1], "--", "true"]),
        &["would cover another mount"],
    );
    let inside = [format!("{real}:/x"), format!("{real}:/x/no/place")];
    says(
        &refused(&bench, 125, ["run", "--mount", &inside[0], "--mount", &inside[1], "--", "true"]),
        &["no such place"],
    );
    says(&mount(&format!("{real}:/proc/x")), &["cannot be covered"]);
    says(&mount("/proc:/x"), &["belongs to the kernel"]);
    says(&mount("/:/x"), &["whole filesystem"]);
    if is_root() {
        skip("mounts: root can read every path, so none is unreadable");
    } else {
        says(&mount("/root:/x"), &["/root", "Permission denied", "hint:"]);
    }
}

#[test]
fn stdin_that_is_none() {
    let bench = Bench::new();
    says(&refused(&bench, 125, ["run", "--stdin", "/no/such", "--", "cat"]), &["/no/such", "hint:"]);
    says(&refused(&bench, 125, ["run", "--stdin", "/usr", "--", "cat"]), &["/usr", "directory"]);
}

#[test]
fn arguments_may_be_long_and_need_not_be_text() {
    let bench = Bench::new();
    let long = "x".repeat(100_000);
    let output = bench.output(["run", "-q", "--", "sh", "-c", "printf %s \"$1\" | wc -c", "sh", &long]);
    assert_eq!(text(&output.stdout).trim(), "100000", "{}", text(&output.stderr));
    let many: Vec<String> = (0..20_000).map(|n| n.to_string()).collect();
    let counted = bench.hotcell(["run", "-q", "--", "sh", "-c", "echo $#", "sh"]).args(&many).output().unwrap();
    assert_eq!(text(&counted.stdout), "20000\n");
    let bytes = OsStr::from_bytes(b"\xff\xfe \x1b[31m");
    let args = ["run", "-q", "--", "printf", "%s"].map(OsStr::new);
    let output = bench.output(args.into_iter().chain([bytes]));
    assert_eq!(output.stdout, bytes.as_bytes());
    let listed = text(&bench.output(["ls"]).stdout);
    assert!(listed.contains("\\xff\\xfe \\u{1b}[31m"), "{listed}");
    says(&refused(&bench, 127, [OsStr::new("run"), OsStr::new("--"), bytes]), &["\\xff\\xfe"]);
    says(&refused(&bench, 125, ["run", "-e", "=x", "--", "true"]), &["environment variable"]);
}

#[test]
fn a_home_that_cannot_be_written_refuses_before_anything_runs() {
    let bench = Bench::new();
    let file = bench.file("not-a-directory", "");
    let output = bench.hotcell(["run", "--", "true"]).env("HOTCELL_HOME", &file).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    says(&text(&output.stderr), &["not-a-directory", "HOTCELL_HOME"]);
    let output = bench.hotcell(["run", "--", "true"]).env("HOTCELL_HOME", "/proc/hotcell").output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    says(&text(&output.stderr), &["/proc/hotcell", "hint:"]);
    // A directory of somebody else's is left exactly as it is.
    let theirs = bench.dir("theirs");
    bench.file("theirs/file", "x");
    std::fs::set_permissions(&theirs, std::fs::Permissions::from_mode(0o755)).unwrap();
    let output = bench.hotcell(["run", "--", "true"]).env("HOTCELL_HOME", &theirs).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    says(&text(&output.stderr), &["is not a home of hotcell's"]);
    assert_eq!(theirs.metadata().unwrap().permissions().mode() & 0o7777, 0o755);
    assert_eq!(std::fs::read_dir(&theirs).unwrap().count(), 1);
    let open = bench.dir("open/runs");
    std::fs::set_permissions(open.parent().unwrap(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let output = bench.hotcell(["run", "--", "true"]).env("HOTCELL_HOME", open.parent().unwrap()).output().unwrap();
    says(&text(&output.stderr), &["can be entered by others", "chmod 700"]);
}

#[test]
fn runs_that_are_none() {
    let bench = Bench::new();
    for command in ["show", "logs", "rm", "stop"] {
        says(&refused(&bench, 1, [command, "run-20260101-000000-abcdef"]), &["there is no run", "hotcell ls"]);
        says(&refused(&bench, 1, [command, "../../etc"]), &["there is no run"]);
    }
    assert!(bench.output(["run", "-q", "--", "true"]).status.success());
    assert!(bench.output(["run", "-q", "--", "true"]).status.success());
    says(&refused(&bench, 1, ["show", "run-"]), &["may be any of 2 runs"]);
    // One wrong name among right ones removes nothing.
    let listed: serde_json::Value = serde_json::from_slice(&bench.output(["ls", "--json"]).stdout).unwrap();
    let first = listed[0]["run_id"].as_str().unwrap();
    refused(&bench, 1, ["rm", first, "no-such-run"]);
    assert!(bench.output(["show", first]).status.success());
    says(&refused(&bench, 2, ["rm", "--all"]), &["--yes"]);
    assert!(bench.output(["rm", "--all", "--yes"]).status.success());
    assert_eq!(text(&bench.output(["ls", "--json"]).stdout), "[]\n");
}

#[test]
fn a_closed_stdout_is_said_where_it_loses_the_answer() {
    let bench = Bench::new();
    let mut command = bench.hotcell(["run", "--json", "--", "true"]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let output = command.stdout(writer).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    says(&text(&output.stderr), &["could not be printed on stdout", "hint:"]);
    // Closed from the start: the runtime would put /dev/null in its place.
    for args in ["run --json -- true", "run --explain -- true", "ls", "doctor"] {
        let script = format!("\"$0\" {args} >&-");
        let output = bench.command("sh").args(["-c", &script, HOTCELL.as_str()]).output().unwrap();
        assert_ne!(output.status.code(), Some(0), "{args}");
        says(&text(&output.stderr), &["stdout"]);
    }
}

#[test]
fn a_fifo_nobody_writes_to_does_not_stop_the_clock() {
    let bench = Bench::new();
    let fifo = bench.path("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let run = |command: &str| {
        bench.output(["run", "-q", "--time", "300ms", "--stdin", fifo.to_str().unwrap(), "--", command]).status.code()
    };
    assert_eq!(run("true"), Some(0));
    assert_eq!(run("cat"), Some(124));
}

#[test]
fn a_planted_home_cannot_send_records_elsewhere() {
    let bench = Bench::new();
    let (project, victim) = (bench.dir("project"), bench.dir("victim"));
    let planted = bench.dir("project/.hotcell");
    std::fs::set_permissions(&planted, std::fs::Permissions::from_mode(0o700)).unwrap();
    symlink(&victim, planted.join("runs")).unwrap();
    let output =
        bench.hotcell(["run", "--", "true"]).env_remove("HOTCELL_HOME").current_dir(&project).output().unwrap();
    assert_eq!(output.status.code(), Some(125), "{}", text(&output.stderr));
    assert_eq!(std::fs::read_dir(&victim).unwrap().count(), 0);
}

#[test]
fn a_home_that_somebody_else_put_there_is_not_used() {
    let bench = Bench::new();
    let (project, victim) = (bench.dir("project/sub"), bench.dir("victim"));
    // A whole home, with a change that was stopped half-way: finishing it would write a file of the planter's choice.
    for part in ["runs", "cells", "rollback/unfinished", "rollback/apply-20261115-100000-aaaaaa/originals"] {
        bench.dir(&format!("project/.hotcell/{part}"));
    }
    let planted = bench.path("project/.hotcell");
    std::fs::set_permissions(&planted, std::fs::Permissions::from_mode(0o700)).unwrap();
    let run = || {
        let mut command = bench.hotcell(["run", "-q", "--", "true"]);
        command.env_remove("HOTCELL_HOME").env("XDG_DATA_HOME", bench.path("data")).current_dir(&project);
        command.output().unwrap()
    };
    let output = run();
    assert_eq!(output.status.code(), Some(125));
    says(&text(&output.stderr), &["is not known to be yours", "hint: if it is yours, name it"]);
    assert_eq!(std::fs::read_dir(&victim).unwrap().count(), 0);
    // The control: an empty one is nobody's word, and is known from then on.
    std::fs::remove_dir_all(&planted).unwrap();
    std::fs::create_dir(&planted).unwrap();
    std::fs::set_permissions(&planted, std::fs::Permissions::from_mode(0o700)).unwrap();
    for _ in 0..2 {
        let output = run();
        assert!(output.status.success(), "VOID: {}", text(&output.stderr));
    }
    // Made again by somebody, with all that was in it but the word that only the two of them share.
    std::fs::remove_file(planted.join("token")).unwrap();
    assert_eq!(run().status.code(), Some(125));
    // Nor is the place for a cell's decoy a home.
    std::fs::remove_dir_all(&planted).unwrap();
    let work = bench.path("project");
    let mut child = bench
        .hotcell(["run", "-q", "--stdin", "-", "-w", work.to_str().unwrap(), "--mode", "rw", "--", "cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    eventually("its decoys are there", || planted.exists());
    let output = run();
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success() && output.status.success(), "{}", text(&output.stderr));
    assert!(!planted.exists(), "the place for a decoy was used as a home");
}

#[test]
fn pipes_and_links_in_a_home_keep_nobody_waiting() {
    let bench = Bench::new();
    assert!(bench.output(["run", "-q", "--", "true"]).status.success());
    let run = std::fs::read_dir(bench.path("home/runs")).unwrap().flatten().next().unwrap().path();
    let pack = bench.dir("home/rollback/apply-20261115-100000-aaaaaa");
    let fifos = [
        run.join("meta.json"),
        bench.path("home/cells/run-20261115-100000-aaaaaa.json"),
        bench.path("home/rollback/unfinished/apply-20261115-100000-aaaaaa"),
        pack.join("manifest.json"),
        bench.path("home/lock"),
        bench.path("home/queue/next"),
    ];
    for path in &fifos {
        // Some are there already.
        let _replaced = std::fs::remove_file(path);
        rustix::fs::mknodat(rustix::fs::CWD, path, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
    }
    // None of these may wait for a writer; what they answer is another matter.
    for args in [&["ls"][..], &["gc"], &["gc", "--yes"], &["undo", "--list"], &["run", "--", "true"]] {
        let mut child =
            bench.hotcell(args).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        eventually("it ends", || child.try_wait().unwrap().is_some());
    }
    let output = bench.output(["run", "--", "true"]);
    assert_eq!(output.status.code(), Some(125));
    says(&text(&output.stderr), &["it is not a plain file"]);
}

#[test]
fn limits_of_the_caller_are_kept_and_refuse_nothing() {
    let bench = Bench::new();
    let script = "ulimit -l 64; ulimit -n 256; ulimit -t 100; exec \"$0\" run -q -- sh -c 'ulimit -l; ulimit -n'";
    let output = bench.command("sh").args(["-c", script, HOTCELL.as_str()]).output().unwrap();
    assert_eq!(text(&output.stdout), "64\n256\n", "{}", text(&output.stderr));
}

#[test]
fn root_without_its_capabilities_is_not_taken_for_an_ordinary_user() {
    if !is_root() {
        return skip("only root can be root without capabilities");
    }
    let bench = Bench::new();
    let drop = ["--inh-caps=-all", "--bounding-set=-sys_admin"];
    let run = |more: &[&str]| {
        let output = bench
            .command("setpriv")
            .args(drop)
            .args([HOTCELL.as_str(), "run", "-q"])
            .args(more)
            .args(["--", "true"])
            .output()
            .unwrap();
        (output.status.code(), text(&output.stderr))
    };
    let (code, said) = run(&[]);
    assert_eq!(code, Some(125), "{said}");
    says(&said, &["`id`", "root without the capabilities"]);
}

/// Runs a script in a mount namespace of its own, where the machine can be made worse than it is.
fn on_a_worse_machine(bench: &Bench, script: &str) -> (Option<i32>, String, String) {
    let output = bench.command("unshare").args(["--mount", "sh", "-c", script, HOTCELL.as_str()]).output().unwrap();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn a_machine_without_proc_without_cgroups_or_with_a_read_only_home() {
    if !is_root() {
        return skip("only root can make a machine without /proc, without cgroups or with a read-only home");
    }
    let bench = Bench::new();
    let (code, _, said) = on_a_worse_machine(&bench, "umount -l /proc; exec \"$0\" run -- true");
    assert_eq!(code, Some(125), "{said}");
    says(&said, &["/proc is not mounted", "hint: mount it"]);

    let without_cgroups = |flag: &str| {
        on_a_worse_machine(
            &bench,
            &format!("mount -t tmpfs none /sys/fs/cgroup; exec \"$0\" run --json {flag} -- true"),
        )
    };
    let (code, record, said) = without_cgroups("");
    assert_eq!(code, Some(0), "{said}");
    says(&record, &["\"cgroup\": \"watched\""]);
    let (code, _, said) = without_cgroups("--require cgroup");
    assert_eq!(code, Some(125), "{said}");
    says(&said, &["`cgroup`", "hint:"]);

    assert!(bench.output(["run", "-q", "--", "true"]).status.success());
    let script = "mount --bind \"$HOTCELL_HOME\" \"$HOTCELL_HOME\" && mount -o remount,ro,bind \"$HOTCELL_HOME\"; exec \"$0\" run -- touch /tmp/ran";
    let (code, _, said) = on_a_worse_machine(&bench, script);
    assert_eq!(code, Some(125), "{said}");
    says(&said, &["the ledger cannot be written", "Read-only file system", "hint:"]);
}

#[test]
fn a_full_home_ends_the_run_and_says_so() {
    if !is_root() {
        return skip("only root can make a small filesystem to fill");
    }
    let bench = Bench::new();
    let script = "mkdir -p \"$HOTCELL_HOME\"; mount -t tmpfs -o size=256k,mode=0700 none \"$HOTCELL_HOME\"; exec \"$0\" run -q -- sh -c 'yes | head -c 2000000; sleep 30'";
    let (code, _, said) = on_a_worse_machine(&bench, script);
    assert_eq!(code, Some(125), "{said}");
    says(&said, &["No space left on device"]);

    // Full when the changes are to be kept, and full when a way back is to be kept: said, and nothing is changed.
    let work = bench.dir("work");
    bench.file("work/big", &"x".repeat(400_000));
    let script = "mkdir -p \"$HOTCELL_HOME\"; mount -t tmpfs -o size=256k,mode=0700 none \"$HOTCELL_HOME\"; exec \"$0\" run -q -w \"$WORK\" -- sh -c 'head -c 600000 /dev/urandom > new'";
    let in_work = |script: &str| on_a_worse_machine(&bench, &script.replace("$WORK", work.to_str().unwrap()));
    let (code, _, said) = in_work(script);
    assert_eq!(code, Some(125), "{said}");
    says(&said, &["cannot be kept", "No space left on device"]);
    let script = "mkdir -p \"$HOTCELL_HOME\"; mount -t tmpfs -o size=256k,mode=0700 none \"$HOTCELL_HOME\"; \"$0\" run -q --name r -w \"$WORK\" -- rm big && exec \"$0\" apply r";
    let (code, _, said) = in_work(script);
    assert_eq!(code, Some(1), "{said}");
    says(&said, &["No space left on device", "hint:"]);
    assert_eq!(std::fs::metadata(work.join("big")).unwrap().len(), 400_000);
}
