//! W: one attempt for each wall that refuses nothing else could, so that none can be missing unnoticed.

use std::ffi::OsString;
use std::fs;

use hotcell_base::{Bytes, Outcome};
use hotcell_cell::{Builder, Limits, Wall};

use super::bench::Bench;
use super::verdict::{Attempt, Verdict, Who, judge, other, probe};

pub(super) fn attempts() -> Vec<Attempt> {
    vec![
        probe(
            "W.id",
            "be the user who started the cell",
            "user",
            |bench| vec![bench.host.uid.to_string().into()],
            &[Wall::Id],
        )
        .only(Who::Root),
        probe(
            "W.user",
            "be in the host's user namespace",
            "namespace",
            |_| namespace("user"),
            &[
                Wall::User,
                Wall::Mount,
                Wall::Pid,
                Wall::Net,
                Wall::Ipc,
                Wall::Uts,
                Wall::CgroupNs,
                Wall::Time,
                Wall::Caps,
            ],
        )
        .only(Who::User),
        probe("W.mount", "be in the host's mount namespace", "namespace", |_| namespace("mnt"), &[Wall::Mount]),
        probe("W.pid", "have a parent outside", "parent", |_| vec!["".into()], &[Wall::Pid]),
        probe("W.net", "be in the host's network namespace", "namespace", |_| namespace("net"), &[Wall::Net]),
        probe("W.ipc", "be in the host's ipc namespace", "namespace", |_| namespace("ipc"), &[Wall::Ipc]),
        probe(
            "W.uts",
            "see the host's name",
            "host-name",
            |_| vec![rustix::system::uname().nodename().to_string_lossy().into_owned().into()],
            &[Wall::Uts],
        ),
        probe(
            "W.cgroup-ns",
            "be in the host's cgroup namespace",
            "namespace",
            |_| namespace("cgroup"),
            &[Wall::CgroupNs],
        ),
        probe("W.time", "be in the host's time namespace", "namespace", |_| namespace("time"), &[Wall::Time]),
        probe("W.no-new-privs", "gain privileges by executing", "privileges", |_| vec!["".into()], &[Wall::NoNewPrivs])
            .open(&[Wall::Seccomp, Wall::Landlock, Wall::LandlockTcp, Wall::LandlockScope]),
        probe(
            "W.landlock",
            "read what the view has and no fence grants",
            "open",
            |_| vec!["/.hotcell/file".into()],
            &[Wall::Landlock],
        ),
        other("W.rlimits", "open more descriptors than allowed", |bench| {
            let limits = || Limits { fds: 32, ..Limits::default() };
            without(bench, limits, "descriptors", &["60"], Wall::Rlimits, |outcome, code| {
                (outcome, code) == (Outcome::Exited, Some(1))
            })
        }),
        other("W.cgroup", "take more memory than the tree may", |bench| {
            let limits = || Limits { memory: Bytes::mib(64), ..Limits::default() };
            without(bench, limits, "allocate", &["160"], Wall::Cgroup, |outcome, _| outcome == Outcome::Oom)
        }),
        other("W.disk", "write more than the disk limit", |bench| {
            let limits = || Limits { disk: Bytes::mib(8), ..Limits::default() };
            without(bench, limits, "fill", &[".", "12", "0"], Wall::Disk, |outcome, _| outcome == Outcome::Disk)
        }),
        probe("W.tty", "stay in a session of the host's", "session", |_| vec!["".into()], &[Wall::Tty]),
    ]
}

/// This process's own namespace, which is the host's.
fn namespace(kind: &str) -> Vec<OsString> {
    fs::read_link(format!("/proc/self/ns/{kind}")).map(|link| vec![link.into()]).unwrap_or_default()
}

/// The same limits, and the one wall that holds them.
fn without(
    bench: &Bench,
    limits: fn() -> Limits,
    kind: &str,
    args: &[&str],
    wall: Wall,
    bound: fn(Outcome, Option<i32>) -> bool,
) -> Verdict {
    let run = |builder: Builder| bench.act(builder, limits(), kind, args);
    judge(run(bench.whole()), run(bench.bare().omit(wall)), |inside, control| {
        Verdict::of(
            bound(inside.outcome, inside.exit_code),
            format!("not bound: {}", inside.outcome),
            (control.outcome, control.exit_code) == (Outcome::Exited, Some(0)),
            format!("bound without the wall too: {} {}", control.outcome, control.stderr.text().trim()),
        )
    })
}
