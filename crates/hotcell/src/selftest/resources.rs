//! E: resources. The host stays as it is, and the run ends for the limit it met.

use std::time::Duration;

use hotcell_base::{Bytes, Cpus, Outcome};
use hotcell_cell::{Builder, Limit, Limits, Mode, Report, Wall};

use super::bench::{Bench, PRIVILEGE};
use super::verdict::{Attempt, Verdict, Who, judge, other, probe};

pub(super) fn attempts() -> Vec<Attempt> {
    let calls: fn(&Bench) -> Vec<std::ffi::OsString> =
        |_| ["sched-fifo", "nice-minus-20", "ioprio-realtime"].iter().map(Into::into).collect();
    vec![
        other("E1", "fork without end", |bench| {
            let limits = Limits { pids: 24, ..Limits::default() };
            ends(bench, limits, "forks", &["60"], Outcome::Pids, Some(Limit::Pids))
        }),
        other("E1.threads", "make threads without end", |bench| {
            let limits = Limits { pids: 24, ..Limits::default() };
            ends(bench, limits, "threads", &["60"], Outcome::Pids, Some(Limit::Pids))
        }),
        other("E2", "take more memory than allowed", |bench| {
            ends(bench, memory(), "allocate", &["160"], Outcome::Oom, Some(Limit::Memory))
        }),
        other("E2.files", "take memory as files in scratch", |bench| {
            ends(bench, memory(), "fill", &[".", "160", "0"], Outcome::Oom, Some(Limit::Memory))
        }),
        other("E3", "write more than allowed, in many places", |bench| {
            let limits = Limits { disk: Bytes::mib(8), ..Limits::default() };
            ends(bench, limits, "fill", &[".", "12", "0"], Outcome::Disk, Some(Limit::Disk))
        }),
        other("E3.inodes", "make more files than allowed", |bench| {
            let limits = Limits { disk: Bytes::mib(8), ..Limits::default() };
            ends(bench, limits, "files", &[".", "5000"], Outcome::Disk, Some(Limit::Disk))
        }),
        other("E3.sparse", "make a file larger than the disk", |bench| {
            let limits = Limits { disk: Bytes::mib(8), ..Limits::default() };
            ends(bench, limits, "grow", &["f", "536870912"], Outcome::Disk, Some(Limit::Disk))
        }),
        other("E3.place", "write more than allowed into the host's own directory", in_place),
        probe("E4", "take priority above others", "call", calls, PRIVILEGE)
            .open(&[Wall::Rlimits, Wall::Seccomp, Wall::Cgroup])
            .only(Who::Root),
        other("E4.share", "spin on every processor", share),
        other("E6", "write output without end", |bench| {
            let limits = Limits { output: Bytes(1_000_000), ..Limits::default() };
            ends(bench, limits, "flood", &["8"], Outcome::OutputLimit, Some(Limit::Output))
        }),
        other("E8", "have a neighbour killed for one's own memory", neighbour),
        other("E9", "dodge the limit by many children", |bench| {
            ends(bench, memory(), "hogs", &["8", "20"], Outcome::Oom, Some(Limit::Memory))
        }),
        other("E12.time", "outlive the time limit", |bench| {
            let limits = Limits { time: Duration::from_millis(150), ..Limits::default() };
            ends(bench, limits, "sleep", &["400"], Outcome::Timeout, Some(Limit::Time))
        }),
        other("E12.cpu-time", "use more processor time than allowed", |bench| {
            let limits = Limits { cpu_time: Some(Duration::from_millis(200)), cpus: two(), ..Limits::default() };
            ends(bench, limits, "spin", &["700"], Outcome::Timeout, Some(Limit::CpuTime))
        }),
        other("E12.fds", "open more descriptors than allowed", |bench| {
            let limits = Limits { fds: 32, ..Limits::default() };
            ends(bench, limits, "descriptors", &["60"], Outcome::Exited, None)
        }),
        other("E12.file", "make a file larger than allowed", |bench| {
            let limits = Limits { file_size: Some(Bytes::mib(1)), ..Limits::default() };
            ends(bench, limits, "grow", &["f", "4194304"], Outcome::Disk, Some(Limit::FileSize))
        }),
    ]
}

fn memory() -> Limits {
    Limits { memory: Bytes::mib(64), ..Limits::default() }
}

fn two() -> Cpus {
    Cpus { milli: 2000 }
}

/// Under the limit the run ends for it; with room enough the same ends well.
fn ends(bench: &Bench, limits: Limits, kind: &str, args: &[&str], outcome: Outcome, limit: Option<Limit>) -> Verdict {
    let inside = bench.act(bench.whole(), limits, kind, args);
    let control = bench.act(bench.bare(), Limits { cpus: two(), ..Limits::default() }, kind, args);
    verdict(inside, control, |report| {
        // A limit of one process is its own to deal with: it fails, and goes on.
        (report.outcome, report.limit) == (outcome, limit) && (limit.is_some() || report.exit_code != Some(0))
    })
}

fn verdict(
    inside: Result<Report, String>,
    control: Result<Report, String>,
    bound: impl Fn(&Report) -> bool,
) -> Verdict {
    judge(inside, control, |inside, control| {
        Verdict::of(
            bound(&inside),
            format!("not bound: {} {}", inside.outcome, inside.stderr.text().trim()),
            (control.outcome, control.exit_code) == (Outcome::Exited, Some(0)),
            format!("fails with room enough too: {} {}", control.outcome, control.stderr.text().trim()),
        )
    })
}

fn in_place(bench: &Bench) -> Verdict {
    let work = bench.dir("work");
    let args = [work.display().to_string(), "24".to_owned(), "20".to_owned()];
    let limits = Limits { disk: Bytes::mib(8), ..Limits::default() };
    let inside = bench.act(bench.whole().workspace(&work, Mode::Rw), limits, "fill", &args);
    let work = bench.dir("work");
    let control = bench.act(bench.bare().workspace(&work, Mode::Rw), Limits::default(), "fill", &args);
    verdict(inside, control, |report| (report.outcome, report.limit) == (Outcome::Disk, Some(Limit::Disk)))
}

fn share(bench: &Bench) -> Verdict {
    let used = |builder: Builder| {
        let limits = Limits { cpus: Cpus { milli: 250 }, ..Limits::default() };
        let report = bench.act(builder, limits, "spin", &["1200"])?;
        Ok::<f64, String>(report.cpu.as_secs_f64() / report.wall.as_secs_f64())
    };
    let inside = match used(bench.whole()) {
        Ok(inside) => inside,
        Err(why) => return Verdict::Void(why),
    };
    // On a busy machine nobody gets much: try again until there was more to be had.
    let mut control = 0.0f64;
    for _ in 0..TRIES {
        match used(bench.bare().omit(Wall::Cgroup)) {
            Ok(share) => control = control.max(share),
            Err(why) => return Verdict::Void(why),
        }
        if control > 0.55 {
            break;
        }
    }
    Verdict::of(
        inside < 0.45,
        format!("{inside:.2} of a processor instead of 0.25"),
        control > 0.55,
        format!("{control:.2} of a processor without the wall: the machine is too busy to tell"),
    )
}

const TRIES: usize = 5;

fn neighbour(bench: &Bench) -> Verdict {
    std::thread::scope(|scope| {
        let neighbour = scope.spawn(|| bench.act(bench.bare(), Limits::default(), "sleep", &["600"]));
        let greedy = bench.act(bench.whole(), memory(), "allocate", &["200"]);
        let neighbour = neighbour.join().unwrap_or_else(|_| Err("the thread failed".to_owned()));
        judge(greedy, neighbour, |greedy, neighbour| {
            Verdict::of(
                (neighbour.outcome, neighbour.exit_code) == (Outcome::Exited, Some(0)),
                format!("the neighbour ended as {}", neighbour.outcome),
                greedy.outcome == Outcome::Oom,
                format!("there was nobody greedy: {}", greedy.outcome),
            )
        })
    })
}
