//! Attempts to get out, by the numbers of the list in SECURITY.md. Each is made inside a whole cell
//! and must be refused; then, as the control, in a cell without the wall, where it must get through.
//! A control that is refused makes the test void, and void is red.

use std::ffi::OsString;
use std::net::{TcpListener, UdpSocket};
use std::os::fd::AsFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use hotcell_base::Outcome;
use hotcell_cell::{Cell, Mode, MountRequest, Wall};

use crate::support::*;

const NETWORK: &[Wall] = &[Wall::Net, Wall::LandlockTcp];

// ---- A: files -----------------------------------------------------------------------------------

#[test]
fn a1_secrets_outside_the_grants_do_not_exist() {
    let bench = Bench::new();
    let secrets = [bench.file("home/.ssh/id_ed25519", "key"), bench.file("home/.env", "TOKEN=1"), bench.file("x", "x")];
    walled("read", &secrets).all_refused();
    without(&[FILES], "read", &secrets).all_through();
    // Only root could read this one, so only root's control means anything.
    walled("read", ["/etc/shadow", "/etc/gshadow"]).all_refused();
    if is_root() {
        without(&[FILES, PRIVILEGE], "read", ["/etc/shadow", "/etc/gshadow"]).all_through();
    } else {
        skip("a1: the control of /etc/shadow needs root");
    }
}

#[test]
fn a2_paths_written_in_odd_ways_lead_nowhere_else() {
    let bench = Bench::new();
    let secret = bench.file("secret", "x");
    let plain = secret.to_str().unwrap();
    let odd = [
        format!("/tmp/../..{plain}"),
        format!("//{plain}"),
        format!("/.{plain}"),
        format!("../../../../../..{plain}"),
        format!("/proc/../{plain}"),
    ];
    walled("read", &odd).all_refused();
    without(&[FILES], "read", &odd).all_through();
}

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
fn a12_magic_links_of_proc_lead_to_the_cells_own_root() {
    let bench = Bench::new();
    let secret = bench.file("secret", "x");
    let through = |link: &str| format!("{link}{}", secret.display());
    let own = [through("/proc/self/root"), through("/proc/thread-self/root"), through("/proc/self/cwd/../../../..")];
    walled("read", &own).all_refused();
    without(&[FILES], "read", &own).all_through();
    // Of init, which is ours and not the guest's, nothing can be had at all.
    walled("read", [through("/proc/1/root"), through("/proc/1/cwd"), "/proc/1/environ".into(), "/proc/1/maps".into()])
        .all_refused();
    walled("read", ["/proc/1/stat"]).all_through();
}

#[test]
fn a13_b2_no_descriptor_of_ours_is_inherited() {
    let bench = Bench::new();
    let directory = std::fs::File::open(bench.dir("leaked")).unwrap();
    // The mistake: a descriptor without close-on-exec in the process that starts cells.
    rustix::io::fcntl_setfd(directory.as_fd(), rustix::io::FdFlags::empty()).unwrap();
    walled("fds", [""]).all_refused();
    let leaked = unwalled("fds", [""]);
    let seen = format!("{leaked:?}");
    assert!(seen.contains(r#"("a descriptor above 2", "done", 0)"#), "VOID: {seen}");
}

#[test]
fn a16_mounts_inside_never_show_outside() {
    let mounts = || std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let before = mounts();
    // The control is that the mount really happens: in a cell without the walls that forbid it.
    without(&[PRIVILEGE, &[Wall::Seccomp, Wall::Landlock]], "call", ["mount"]).all_through();
    walled("call", ["mount"]).all_refused();
    assert_eq!(mounts(), before);
}

// ---- B: processes, descriptors, executables -----------------------------------------------------

#[test]
fn b1_the_program_that_builds_the_walls_cannot_be_read_or_written() {
    walled("read", ["/proc/1/exe", "/proc/1/mem", "/proc/1/fd/0"]).all_refused();
    walled("write", ["/proc/1/exe", "/proc/1/mem", "/usr/bin/env"]).all_refused();
    // The control: the same ways into a process that is not protected, the probe itself.
    walled("read", ["/proc/self/exe", "/proc/self/maps", "/proc/self/environ"]).all_through();
    if is_root() {
        without(&[FILES, PRIVILEGE], "write", ["/usr/bin/env"]).all_through();
    } else {
        skip("b1: the control of writing a system program needs root");
    }
}

#[test]
fn b3_no_process_can_be_traced_or_read() {
    walled("child", [""]).all_refused();
    without(&[&[Wall::Seccomp]], "child", [""]).all_through();
}

#[test]
fn b5_no_signal_reaches_the_supervisor() {
    let us = std::process::id().to_string();
    walled("signal", [&us]).all_refused();
    let mut walls = vec![Wall::Pid, Wall::LandlockScope];
    walls.extend_from_slice(PRIVILEGE);
    without(&[&walls], "signal", [&us]).all_through();

    // Everything a guest can send to everybody, and to its own first process, changes nothing outside.
    let report = run(Cell::builder().command([
        "sh",
        "-c",
        "trap '' TERM; kill -TERM -1; kill -KILL 1; kill -STOP 1; echo still here",
    ]));
    assert_eq!((report.outcome, report.stdout.text().as_str()), (Outcome::Exited, "still here\n"));
}

#[test]
fn b8_the_environment_is_an_allowlist() {
    let names = [
        "AWS_SECRET_ACCESS_KEY",
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "PYTHONPATH",
        "GIT_DIR",
        "BASH_ENV",
        "SSH_AUTH_SOCK",
    ];
    let mut env: Vec<(OsString, OsString)> = std::env::vars_os().collect();
    env.extend(names.map(|name| (name.into(), "/nowhere".into())));
    let host = hotcell_cell::Host::probe(env).unwrap();
    let report =
        run_on(&host, Cell::builder().env("HOTCELL_PROBE", Some("yes".into())).command(probe_argv("env", names)));
    Tries::of(&report.stdout.kept).all_refused();
    // The control: the same variables, asked for by name.
    let builder = names.iter().fold(Cell::builder(), |builder, name| builder.env(name, None));
    let report = run_on(&host, builder.env("HOTCELL_PROBE", Some("yes".into())).command(probe_argv("env", names)));
    Tries::of(&report.stdout.kept).all_through();
}

#[test]
fn b12_a_crash_leaves_no_core_and_starts_no_handler() {
    walled("call", ["set-core-limit"]).all_refused();
    without(&[&[Wall::Seccomp]], "call", ["set-core-limit"]).all_through();
    let pattern = std::fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap_or_default();
    if pattern.trim() != "core" || rustix::process::getrlimit(rustix::process::Resource::Core).maximum.is_some() {
        return skip("b12: this machine writes no core files to the working directory");
    }
    let crash = |builder: hotcell_cell::Builder| {
        let bench = Bench::new();
        let work = bench.dir("work");
        let report = run(builder
            .workspace(&work, Mode::Rw)
            .env("HOTCELL_PROBE", Some("yes".into()))
            .command(probe_argv("core", [""])));
        assert_eq!(report.outcome, Outcome::Signaled);
        std::fs::read_dir(&work).unwrap().flatten().any(|file| file.file_name().to_string_lossy().starts_with("core"))
    };
    assert!(!crash(Cell::builder()), "ESCAPED: a core file");
    assert!(crash(omit(Cell::builder(), &[Wall::Seccomp, Wall::Rlimits])), "VOID: no core file without the walls");
}

#[test]
fn b13_set_id_programs_give_nothing() {
    if !is_root() {
        return skip("b13: only root can make a set-id program of root's");
    }
    let bench = Bench::new();
    let work = bench.dir("work");
    let program = work.join("setid");
    std::fs::copy("/usr/bin/id", &program).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o6755)).unwrap();
    std::fs::set_permissions(bench.path(""), std::fs::Permissions::from_mode(0o755)).unwrap();
    let command = [program.as_os_str(), "-u".as_ref()];
    let report = run(Cell::builder().workspace(&work, Mode::Ro).command(command));
    assert_ne!(report.stdout.text(), "0\n", "ESCAPED");
    assert_eq!(report.exit_code, Some(0));
    let outside =
        std::process::Command::new("setpriv").args(["--reuid=65534", "--clear-groups"]).args(command).output().unwrap();
    assert_eq!(text(&outside.stdout), "0\n", "VOID: {}", text(&outside.stderr));
}

#[test]
fn b14_groups_are_left_behind() {
    if !is_root() {
        return skip("b14: only root can leave groups");
    }
    let bench = Bench::new();
    let in_groups = |args: &[&str]| {
        let output = bench.command("setpriv").args(["--groups", "4,27"]).args(args).output().unwrap();
        text(&output.stdout)
    };
    let inside = in_groups(&[HOTCELL.as_str(), "run", "-q", "--", "id", "-G"]);
    assert_eq!(inside.split_whitespace().count(), 1, "ESCAPED: {inside}");
    let outside = in_groups(&["id", "-G"]);
    assert!(outside.contains("27"), "VOID: {outside}");
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

// ---- C: privilege, namespaces, syscalls ---------------------------------------------------------

#[test]
fn c1_no_capability_is_left_in_any_set() {
    walled("caps", [""]).all_refused();
    let kept = format!("{:?}", without(&[PRIVILEGE], "caps", [""]));
    for set in ["CapPrm", "CapEff", "CapBnd"] {
        assert!(kept.contains(&format!("(\"{set}\", \"done\", 0)")), "VOID: {kept}");
    }
}

#[test]
fn c2_no_new_user_namespace() {
    // One at a time: a process that is in an unmapped namespace already cannot make another.
    for way in ["unshare-user", "clone-user", "clone3-user"] {
        walled("call", [way]).all_refused();
        without(&[&[Wall::Seccomp]], "call", [way]).all_through();
    }
}

#[test]
fn c3_no_namespace_can_be_entered() {
    walled("call", ["setns"]).all_refused();
    without(&[PRIVILEGE, &[Wall::Seccomp]], "call", ["setns"]).all_through();
}

#[test]
fn c4_the_mount_view_cannot_be_changed() {
    let calls = [
        "mount",
        "umount2",
        "pivot_root",
        "chroot",
        "open_tree",
        "move_mount",
        "fsopen",
        "fspick",
        "fsmount",
        "mount_setattr",
    ];
    walled("call", calls).all_refused();
    without(&[PRIVILEGE, &[Wall::Seccomp, Wall::Landlock]], "call", calls).all_through();
}

#[test]
fn c5_io_uring_does_not_exist() {
    let calls = ["io_uring_setup", "io_uring_enter", "io_uring_register"];
    walled("call", calls).all_refused();
    without(&[&[Wall::Seccomp]], "call", calls).all_through();
}

#[test]
fn c6_calls_of_other_architectures_kill() {
    for way in ["x32", "int80"] {
        let report = run(Cell::builder().env("HOTCELL_PROBE", Some("yes".into())).command(probe_argv("call", [way])));
        assert_eq!((report.outcome, report.signal), (Outcome::Signaled, Some(31)), "{way}: {}", report.stdout.text());
        let control = run(omit(Cell::builder(), &[Wall::Seccomp])
            .env("HOTCELL_PROBE", Some("yes".into()))
            .command(probe_argv("call", [way])));
        let reached = control.outcome == Outcome::Exited && control.stdout.text().contains("\"done\"");
        if !reached {
            skip(&format!("c6: this kernel has no {way} calls, so its control means nothing"));
        }
    }
}

#[test]
fn c11_calls_that_steer_the_machine_are_refused() {
    let anybody = ["userfaultfd", "add_key", "keyctl", "request_key", "memfd_secret", "personality", "chmod-setuid"];
    walled("call", anybody).all_refused();
    without(&[&[Wall::Seccomp]], "call", anybody).all_through();
    let roots = [
        "bpf",
        "kexec_load",
        "init_module",
        "finit_module",
        "delete_module",
        "quotactl",
        "acct",
        "swapon",
        "settimeofday",
        "clock_settime",
        "iopl",
        "ioperm",
        "reboot",
        "syslog",
        "open_by_handle_at",
        "perf_event_open",
        "sethostname",
    ];
    walled("call", roots).all_refused();
    if is_root() {
        without(&[PRIVILEGE, &[Wall::Seccomp, Wall::Landlock]], "call", roots).all_through_that_exist();
    } else {
        skip("c11: the control of calls that only root may make needs root");
    }
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
fn c14_the_kernels_own_files_are_absent_covered_or_read_only() {
    let read = ["/sys/kernel/uevent_seqnum", "/sys/fs/cgroup", "/proc/interrupts", "/proc/kallsyms"];
    walled("read", read).all_refused();
    without(&[FILES], "read", &read[..3]).all_through();
    let write = [
        "/proc/sys/kernel/core_pattern",
        "/proc/sys/vm/drop_caches",
        "/proc/sysrq-trigger",
        "/proc/self/oom_score_adj",
        "/proc/irq/default_smp_affinity",
    ];
    walled("write", write).all_refused();
    without(&[FILES], "write", ["/proc/self/oom_score_adj"]).all_through();
    if is_root() {
        without(&[FILES, PRIVILEGE], "write", ["/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches"])
            .all_through();
    } else {
        skip("c14: the control of files that only root may write needs root");
    }
}

// ---- D: network ---------------------------------------------------------------------------------

#[test]
fn d1_there_is_no_network_and_refusal_is_at_once() {
    let (v4, v6) = (TcpListener::bind("127.0.0.1:0").unwrap(), TcpListener::bind("[::1]:0"));
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut tcp =
        vec![v4.local_addr().unwrap().to_string(), format!("[::ffff:127.0.0.1]:{}", v4.local_addr().unwrap().port())];
    match &v6 {
        Ok(v6) => tcp.push(v6.local_addr().unwrap().to_string()),
        Err(_) => skip("d1: this machine has no IPv6"),
    }
    let udp = [udp.local_addr().unwrap().to_string()];
    walled("tcp", &tcp).all_refused();
    walled("udp", &udp).all_refused();
    without(&[NETWORK], "tcp", &tcp).all_through();
    without(&[NETWORK], "udp", &udp).all_through();
    // One fence at a time: each refuses alone.
    without(&[&[Wall::Net]], "tcp", &tcp).all_refused();
    without(&[&[Wall::LandlockTcp]], "tcp", &tcp).all_refused();

    // raw, icmp, packet, netlink, vsock, sctp, algorithms, bluetooth, xdp
    let odd = ["2,3,1", "2,2,1", "17,3,0", "16,3,0", "40,1,0", "2,1,132", "38,5,0", "31,3,0", "44,3,0", "10,3,58"];
    walled("socket", odd).all_refused();
    without(&[&[Wall::Seccomp]], "socket", ["16,3,0"]).all_through();
    if is_root() {
        without(&[PRIVILEGE, &[Wall::Seccomp]], "socket", ["2,3,1", "17,3,0"]).all_through();
    } else {
        skip("d1: the control of raw sockets needs root");
    }
    walled("socket", ["2,1,0", "2,2,17", "10,1,6", "1,1,0"]).all_through();
}

#[test]
fn d2_programs_that_reach_the_network_by_themselves_do_not() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let script = format!("exec 3<>/dev/tcp/127.0.0.1/{}", listener.local_addr().unwrap().port());
    let knock = |builder: hotcell_cell::Builder| run(builder.command(["bash", "-c", &script])).exit_code;
    assert_ne!(knock(Cell::builder()), Some(0), "ESCAPED");
    assert_eq!(knock(omit(Cell::builder(), NETWORK)), Some(0), "VOID");
    let resolve = run(Cell::builder().command(["getent", "ahosts", "example.com"]));
    assert_ne!(resolve.exit_code, Some(0));
}

// ---- E: resources; their limits are in `limits` -------------------------------------------------

#[test]
fn e4_no_priority_above_others() {
    let calls = ["sched-fifo", "nice-minus-20"];
    walled("call", calls).all_refused();
    if is_root() {
        without(&[PRIVILEGE, &[Wall::Rlimits, Wall::Cgroup]], "call", calls).all_through();
    } else {
        skip("e4: the control of priorities needs root");
    }
}

// ---- G: terminal --------------------------------------------------------------------------------

#[test]
fn g1_no_character_can_be_pushed_into_a_terminal() {
    let calls = ["tiocsti", "tiocsti-high-bits", "tioclinux"];
    walled("call", calls).all_refused();
    without(&[&[Wall::Seccomp]], "call", calls).all_through();
}

#[test]
fn every_namespace_is_the_cells_own() {
    let namespaces = [
        (Wall::Ipc, "ipc"),
        (Wall::Uts, "uts"),
        (Wall::Time, "time"),
        (Wall::CgroupNs, "cgroup"),
        (Wall::Net, "net"),
        (Wall::Mount, "mnt"),
    ];
    for (wall, name) in namespaces {
        let link = format!("/proc/self/ns/{name}");
        let ours = std::fs::read_link(&link).unwrap().display().to_string();
        let inside =
            |builder: hotcell_cell::Builder| run(builder.command(["readlink", &link])).stdout.text().trim().to_owned();
        let own = inside(Cell::builder());
        assert!(own.starts_with(name) && own != ours, "ESCAPED: {own}");
        let mut walls = vec![wall];
        if wall == Wall::Mount {
            walls.extend_from_slice(FILES);
        }
        assert_eq!(inside(omit(Cell::builder(), &walls)), ours, "VOID");
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

// ---- beyond the list ----------------------------------------------------------------------------

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
