//! Attempts to get out that `hotcell selftest` does not make: they need programs or users that not every machine has,
//! or would not be harmless there. Each has its control.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use hotcell_base::Outcome;
use hotcell_cell::{Cell, Mode, MountRequest, Wall};

use crate::support::*;

#[test]
fn a2_a_working_directory_cannot_climb_out_of_the_cell() {
    let bench = Bench::new();
    let (work, secret) = (bench.dir("work"), bench.file("secret", "x"));
    let climb = |builder: hotcell_cell::Builder| {
        run(builder.workspace(&work, Mode::Ro).current_dir("../../../../..").command(["sh", "-c", "pwd; ls -A"]))
    };
    let inside = climb(Cell::builder());
    assert!(inside.stdout.text().starts_with("/\n"), "{}", inside.stdout.text());
    let tmp = secret.parent().unwrap().file_name().unwrap().to_str().unwrap();
    let look = format!("/tmp/{tmp}/secret");
    tries(Cell::builder().workspace(&work, Mode::Ro), "read", [&look]).all_refused();
    tries(omit(Cell::builder(), FILES).workspace(&work, Mode::Ro), "read", [&secret]).all_through();
}

#[test]
fn a3_a_link_in_the_workspace_leads_to_nothing_of_the_host() {
    let bench = Bench::new();
    let (work, secret) = (bench.dir("work"), bench.file("outside/secret", "host"));
    symlink(&secret, work.join("link")).unwrap();
    symlink(secret.parent().unwrap(), work.join("dir")).unwrap();
    let ways = [work.join("link"), work.join("dir/secret")];
    tries(Cell::builder().workspace(&work, Mode::Cow), "read", &ways).all_refused();
    tries(Cell::builder().workspace(&work, Mode::Cow), "write", &ways).all_refused();
    tries(omit(Cell::builder(), FILES).workspace(&work, Mode::Rw), "read", &ways).all_through();

    // The supervisor lists a link the guest made, and neither follows nor opens it.
    let script = format!(
        "ln -s {0} planted; rm dir; ln -s {1} dir; mkfifo fifo; ls",
        secret.display(),
        bench.path("outside").display()
    );
    let report = run(Cell::builder().workspace(&work, Mode::Cow).command(["sh", "-c", &script]));
    let listed: Vec<_> = report
        .changes
        .unwrap()
        .list
        .iter()
        .map(|change| format!("{:?} {}", change.kind, change.path.display()))
        .collect();
    assert_eq!(listed, ["Added fifo", "Added planted"]);
    assert_eq!(std::fs::read_to_string(&secret).unwrap(), "host");
}

#[test]
fn b5_a_signal_to_everybody_stays_inside() {
    // Without a pid namespace this would end the machine, so that its control is in `selftest`: one signal, to us.
    // Everything a guest can send to everybody, and to its own first process, changes nothing outside.
    let report = run(Cell::builder().command([
        "sh",
        "-c",
        "trap '' TERM; kill -TERM -1; kill -KILL 1; kill -STOP 1; echo still here",
    ]));
    assert_eq!((report.outcome, report.stdout.text().as_str()), (Outcome::Exited, "still here\n"));
}

#[test]
fn b14_groups_that_cannot_be_left_refuse_the_run_unless_they_are_accepted() {
    if !is_root() {
        return skip("b14: only root can give groups to a user");
    }
    let bench = Bench::new();
    let private = std::fs::Permissions::from_mode(0o700);
    std::fs::set_permissions(bench.path(""), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::set_permissions(bench.dir("home"), private).unwrap();
    rustix::fs::chown(bench.path("home"), Some(rustix::fs::Uid::from_raw(65534)), None).unwrap();
    let user = |groups: &str, variable: &str, flags: &[&str]| {
        let mut command = bench.command("setpriv");
        command.args(["--reuid=65534", "--regid=65534", groups, HOTCELL.as_str(), "run", "--json"]);
        let output = command.args(flags).args(["--", "true"]).env("HOTCELL_ALLOW_MISSING", variable).output().unwrap();
        let record: serde_json::Value = serde_json::from_slice(&output.stdout).expect("one object");
        (output.status.code(), record)
    };
    let groups = "--groups=4,27";
    let (code, record) = user(groups, "", &[]);
    assert_eq!(code, Some(125), "ESCAPED: {record}");
    assert!(record["error"].as_str().unwrap().contains("`groups`"), "{record}");
    assert!(record["hint"].as_str().unwrap().contains("--allow-missing groups"), "{record}");
    for (variable, flags) in [("", &["--allow-missing", "groups"][..]), ("groups", &[])] {
        let (code, record) = user(groups, variable, flags);
        assert_eq!((code, record["isolation"]["walls"]["groups"].as_str()), (Some(0), Some("missing")), "{record}");
    }
    let (code, record) = user("--clear-groups", "", &[]);
    assert_eq!((code, record["isolation"]["walls"]["groups"].as_str()), (Some(0), Some("proven")), "VOID: {record}");
    let (code, record) = user("--clear-groups", "grups", &[]);
    assert_eq!((code, record["hint"].as_str().unwrap().contains("HOTCELL_ALLOW_MISSING=")), (Some(125), true));
}

#[test]
fn c13_devices_beyond_the_harmless_ones_do_not_exist() {
    let report = run(Cell::builder().command(["ls", "/dev"]));
    assert_eq!(report.stdout.text(), "fd\nfull\nnull\nrandom\nshm\nstderr\nstdin\nstdout\nurandom\nzero\n");
    walled("read", ["/dev/ptmx", "/dev/kmsg", "/dev/mem", "/dev/vda", "/dev/kvm", "/dev/net/tun", "/dev/tty"])
        .all_refused();
    without(&[FILES], "read", ["/dev/ptmx"]).all_through();
    walled("call", ["mknod-block"]).all_refused();
    if is_root() {
        let here = ["/dev/kmsg", "/dev/net/tun"].into_iter().filter(|device| Path::new(device).exists());
        without(&[FILES, PRIVILEGE], "read", here).all_through();
        without(&[PRIVILEGE, &[Wall::Seccomp, Wall::Landlock]], "call", ["mknod-block"]).all_through();
    } else {
        skip("c13: the control of devices that only root may open needs root");
    }
}

#[test]
fn init_cannot_be_limited_or_signalled_by_the_guest() {
    // Its limits could have it killed, and a queued signal could pretend to be the supervisor's.
    let program = "import ctypes, os, resource, signal, time
libc = ctypes.CDLL(None, use_errno=True)
try:
    resource.prlimit(1, resource.RLIMIT_CPU, (1, 1)); print('limited')
except PermissionError: print('refused')
class Info(ctypes.Structure):
    _fields_ = [('no', ctypes.c_int), ('errno', ctypes.c_int), ('code', ctypes.c_int), ('pad', ctypes.c_int), ('pid', ctypes.c_int), ('uid', ctypes.c_int), ('rest', ctypes.c_char * 104)]
info = Info(signal.SIGTERM, 0, -1, 0, 0, 0)
libc.syscall(129, 1, signal.SIGTERM, ctypes.byref(info))
time.sleep(0.2)
print('still here')";
    let report = run(Cell::builder().command(["/usr/bin/python3", "-c", program]));
    assert_eq!(
        (report.outcome, report.stdout.text().as_str()),
        (Outcome::Exited, "refused\nstill here\n"),
        "{}",
        report.stderr.text()
    );
    // The control: without the filter its limits can be set.
    let report = run(omit(Cell::builder(), &[Wall::Seccomp]).command(["/usr/bin/python3", "-c", program]));
    assert!(report.stdout.text().starts_with("limited\n"), "VOID: {} {}", report.stdout.text(), report.stderr.text());
}

#[test]
fn hotcells_own_home_is_covered_where_the_workspace_has_it() {
    let bench = Bench::new();
    let work = bench.dir("project");
    let secret = bench.file("project/.hotcell/keys/k", "key");
    tries(Cell::builder().workspace(&work, Mode::Cow).hide(work.join(".hotcell")), "read", [&secret]).all_refused();
    tries(Cell::builder().workspace(&work, Mode::Cow), "read", [&secret]).all_through();
    let mount = || MountRequest { source: work.clone(), target: "/m".into(), writable: true };
    tries(Cell::builder().mount(mount()).hide(work.join(".hotcell")), "read", ["/m/.hotcell/keys/k"]).all_refused();
    tries(Cell::builder().mount(mount()), "read", ["/m/.hotcell/keys/k"]).all_through();
}

#[test]
fn a_workspace_swapped_after_the_plan_is_not_mounted() {
    let bench = Bench::new();
    let (work, other) = (bench.dir("work"), bench.dir("other"));
    let plan = plan_on(&host(), Cell::builder().workspace(&work, Mode::Rw).command(["true"])).unwrap();
    std::fs::rename(&work, bench.path("gone")).unwrap();
    std::fs::rename(&other, &work).unwrap();
    let error = plan.run().map(|report| report.outcome).expect_err("another directory");
    assert!(error.to_string().contains("as planned"), "{error}");
    // The control: unswapped, the same plan runs.
    std::fs::rename(&work, &other).unwrap();
    std::fs::rename(bench.path("gone"), &work).unwrap();
    assert_eq!(plan.run().unwrap().outcome, Outcome::Exited);
}

#[test]
fn nothing_of_the_home_directory_is_there_but_what_the_command_needs() {
    let report = run(Cell::builder().command(["sh", "-c", "cd; ls -A"]));
    assert_eq!(report.stdout.text(), "");
}
