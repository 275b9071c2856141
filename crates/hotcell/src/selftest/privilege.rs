//! C: privilege, namespaces, syscalls.

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use hotcell_base::Outcome;
use hotcell_cell::{Builder, Mode, MountRequest, Standing, Wall, seccomp};

use super::bench::{Bench, PRIVILEGE, words};
use super::verdict::{Attempt, Missing, Verdict, Who, judge, other, probe, rule, skip};

const MOUNT_CALLS: &[&str] = &[
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
const ROOT_CALLS: &[&str] = &[
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
const LOOSE: &[Wall] = &[Wall::Id, Wall::Caps, Wall::Groups, Wall::Landlock];
const HOST: &[Wall] = &[Wall::Root, Wall::Id, Wall::Caps, Wall::Groups];

pub(super) fn attempts() -> Vec<Attempt> {
    vec![
        probe("C1", "get a capability back by executing", "caps", |_| words(&["CapBnd"]), &[Wall::Caps]),
        probe(
            "C1.sets",
            "use a capability that is left in any set",
            "caps",
            |_| words(&["CapPrm", "CapEff", "CapBnd"]),
            PRIVILEGE,
        ),
        probe("C1.inherited", "inherit a capability", "caps", |_| words(&["CapInh", "CapAmb"]), PRIVILEGE)
            .only(Who::User),
        rule("C2", "make a user namespace by unshare", "call", |_| words(&["unshare-user"]), "namespaces"),
        rule("C2.clone", "make a user namespace by clone", "call", |_| words(&["clone-user"]), "clone"),
        rule(
            "C2.clone3",
            "make a user namespace by clone3",
            "call",
            |_| words(&["clone3-user"]),
            "unreadable arguments",
        ),
        rule("C3", "enter a namespace", "call", |_| words(&["setns"]), "namespaces").open(PRIVILEGE),
        rule("C4", "change the mounts, with every capability", "call", |_| words(MOUNT_CALLS), "mounts").open(LOOSE),
        probe("C4.caps", "change the mounts, without the filter", "call", |_| words(MOUNT_CALLS), LOOSE)
            .open(&[Wall::Seccomp]),
        rule("C4.plain", "take a descriptor of a mount", "call", |_| words(&["open_tree-plain"]), "mounts"),
        rule(
            "C5",
            "io_uring, whose operations no filter sees",
            "call",
            |_| words(&["io_uring_setup", "io_uring_enter", "io_uring_register"]),
            "io_uring",
        ),
        other("C6", "32-bit calls", |bench| other_architecture(bench, "int80")),
        other("C6.x32", "calls of the x32 kind", |bench| other_architecture(bench, "x32")),
        skip(
            "C9",
            "change an argument after a supervisor checked it",
            "no call is decided by a supervisor; the kernel decides all",
        ),
        skip("C10", "make a supervisor's answer fail", "no call is decided by a supervisor; the kernel decides all"),
        rule(
            "C11",
            "calls that kernel exploits begin with",
            "call",
            |_| words(&["userfaultfd", "add_key", "keyctl", "request_key", "memfd_secret", "get_mempolicy"]),
            "kernel attack surface",
        ),
        rule("C11.persona", "switch address randomisation off", "call", |_| words(&["personality"]), "personality"),
        rule(
            "C11.clock",
            "read or steer the machine's clock discipline",
            "call",
            |_| words(&["adjtimex"]),
            "the machine",
        ),
        rule(
            "C11.aio",
            "take the machine's asynchronous contexts",
            "call",
            |_| words(&["io_setup"]),
            "older asynchronous files",
        ),
        rule("C11.other", "calls nobody thought of", "call", |_| words(&["modify_ldt", "ustat"]), "unlisted"),
        probe("C11.root", "steer the machine, with every capability", "call", |_| words(ROOT_CALLS), &[Wall::Seccomp])
            .open(LOOSE)
            .only(Who::Root),
        rule("C11.fchmod", "make a set-id file by fchmod", "call", |_| words(&["chmod-setuid"]), "set-id bits by path"),
        rule(
            "C11.fchmodat",
            "make a set-id file by fchmodat",
            "call",
            |_| words(&["fchmodat-setuid"]),
            "set-id bits by directory",
        ),
        rule("C11.open", "make a set-id file by open", "call", |_| words(&["open-setuid"]), "set-id bits at open"),
        rule(
            "C11.openat",
            "make a set-id file by openat",
            "call",
            |_| words(&["openat-setuid"]),
            "set-id bits at openat",
        ),
        rule(
            "C11.prlimit",
            "limit the cell's first process",
            "call",
            |_| words(&["prlimit-init"]),
            "limits by prlimit",
        ),
        rule(
            "C11.affinity",
            "choose the processors of the cell's first process",
            "call",
            |_| words(&["affinity-init"]),
            "init's scheduling",
        ),
        rule("C11.nice", "slow the cell's first process down", "call", |_| words(&["nice-init"]), "init's priority"),
        rule(
            "C11.ioprio",
            "have the cell's first process wait for storage",
            "call",
            |_| words(&["ioprio-init"]),
            "init's io priority",
        ),
        probe("C13", "open devices beyond the harmless ones", "open", |_| there(&["/dev/ptmx"]), &[Wall::Root]),
        probe(
            "C13.root",
            "open devices only root may",
            "open",
            |_| there(&["/dev/kmsg", "/dev/net/tun", "/dev/kvm"]),
            HOST,
        )
        .only(Who::Root),
        probe("C13.mknod", "make a disk's device", "call", |_| words(&["mknod-block"]), PRIVILEGE)
            .open(&[Wall::Landlock, Wall::Seccomp])
            .only(Who::Root),
        probe(
            "C14",
            "read /sys and what /proc tells of the machine",
            "read",
            |_| there(&["/sys/kernel/uevent_seqnum", "/proc/interrupts"]),
            &[Wall::Root],
        ),
        probe(
            "C14.oom",
            "steer the kernel's choice of whom to kill",
            "write",
            |_| words(&["/proc/self/oom_score_adj"]),
            &[Wall::Root, Wall::Landlock],
        ),
        probe(
            "C14.root",
            "write what steers the machine",
            "write",
            |_| there(&["/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches", "/proc/irq/default_smp_affinity"]),
            HOST,
        )
        .only(Who::Root),
        other("C16", "have a wall reported that does not stand", reported_walls),
        other("C17", "make one missing path take the whole fence away", missing_path),
        probe("C18", "set the clock", "call", |_| words(&["clock_settime"]), &[Wall::Seccomp])
            .open(LOOSE)
            .only(Who::Root),
    ]
}

/// Of these, what this machine has.
fn there(paths: &[&str]) -> Vec<OsString> {
    paths.iter().filter(|path| Path::new(path).exists()).map(Into::into).collect()
}

fn other_architecture(bench: &Bench, way: &str) -> Verdict {
    let make = |builder: Builder| bench.run(builder.command(bench.probe_argv("call", &[way])));
    const SIGSYS: i32 = 31;
    judge(make(bench.whole()), make(Missing::Rule(seccomp::ARCHITECTURE).of(bench.bare())), |inside, control| {
        let killed = (inside.outcome, inside.signal) == (Outcome::Signaled, Some(SIGSYS));
        let reached = control.outcome == Outcome::Exited && control.stdout.text().contains("\"done\"");
        if killed && !reached {
            return Verdict::Skipped(
                "killed inside; this kernel has no such calls, so its control means nothing".to_owned(),
            );
        }
        Verdict::of(killed, format!("not killed: {}", inside.stdout.text().trim()), reached, "")
    })
}

fn reported_walls(bench: &Bench) -> Verdict {
    for wall in [Wall::Landlock, Wall::Seccomp, Wall::Net, Wall::Caps] {
        let standing = |builder: Builder| {
            bench.run(builder.command(["/bin/true"])).map(|report| report.isolation.walls.get(&wall).copied())
        };
        match (standing(bench.bare().omit(wall)), standing(bench.whole())) {
            (Err(why), _) | (_, Err(why)) => return Verdict::Void(why),
            (Ok(without), Ok(whole)) => {
                if without != Some(Standing::Missing) {
                    return Verdict::Escaped(format!("{wall} was left out and is not reported as missing"));
                }
                if whole != Some(Standing::Proven) {
                    return Verdict::Escaped(format!("{wall} does not stand in a whole cell"));
                }
            }
        }
    }
    Verdict::Held
}

fn missing_path(bench: &Bench) -> Verdict {
    let (work, beside) = (bench.dir("work"), bench.dir("beside"));
    let mount = MountRequest { source: beside.clone(), target: "/opt/selftest".into(), writable: false };
    let builder = bench.whole().workspace(&work, Mode::Ro).mount(mount).command(["/bin/true"]);
    let plan = match builder.plan(&bench.host) {
        Ok(plan) => plan,
        Err(error) => return Verdict::Void(error.to_string()),
    };
    let live = plan.run().is_ok();
    if let Err(error) = fs::remove_dir_all(&beside) {
        return Verdict::Void(error.to_string());
    }
    Verdict::of(
        plan.run().is_err(),
        "the cell ran without what it was granted",
        live,
        "it does not run with the path there either",
    )
}
