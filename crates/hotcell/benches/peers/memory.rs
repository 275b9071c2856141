//! What cells take while they do nothing.

use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use hotcell_cell::Pool;
use hotcell_cell::pool::Ahead;

use crate::contenders::{self, Payload, Place};

/// Cells that stand at once while they are measured.
const STANDING: u64 = 64;

/// In MiB.
pub(crate) struct Memory {
    /// Of a cell of a pool, with its station and all the kernel keeps for both.
    pub(crate) idle_cell: f64,
    /// Of a `hotcell run` that waits for its command: all it has, and what is not shared with other processes.
    pub(crate) supervisor: f64,
    pub(crate) supervisor_own: f64,
}

impl Memory {
    pub(crate) fn measure(place: &Place) -> Memory {
        let plan = contenders::plan(place, Payload::Noop);
        let opened = |size: u64| {
            let pool = Pool::open(plan.clone(), usize::try_from(size).expect("few"), Ahead::Cell).expect("a pool");
            let give_up = Instant::now() + Duration::from_secs(30);
            while pool.counters().opened < size && Instant::now() < give_up {
                sleep(Duration::from_millis(20));
            }
            sleep(Duration::from_millis(500));
            pool
        };
        // What the first ones make is made once.
        drop(opened(4));
        sleep(Duration::from_secs(2));
        let before = available_kib();
        let pool = opened(STANDING);
        let taken = before.saturating_sub(available_kib());
        drop(pool);
        let (supervisor, supervisor_own) = supervisor(place);
        Memory { idle_cell: taken as f64 / 1024.0 / STANDING as f64, supervisor, supervisor_own }
    }
}

fn available_kib() -> u64 {
    field("/proc/meminfo", "MemAvailable:")
}

fn field(path: &str, name: &str) -> u64 {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

fn supervisor(place: &Place) -> (f64, f64) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hotcell"));
    command.args(["run", "-q", "--", "sleep", "5"]).env("HOTCELL_HOME", place.path("home"));
    let spawned = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let mut child = spawned.expect("hotcell starts");
    sleep(Duration::from_millis(500));
    let path = format!("/proc/{}/status", child.id());
    let (all, own) = (field(&path, "VmRSS:"), field(&path, "RssAnon:"));
    // It is ours, and ends its command with itself.
    let _ended = child.kill().and_then(|()| child.wait());
    (all as f64 / 1024.0, own as f64 / 1024.0)
}
