//! What a whole `hotcell run -- true` costs beside its peers, in one run, interleaved.
//!
//! `cargo bench` prints the median of each and its ratio to a plain start. Peers that are not installed are named
//! and left out. Times of a shared machine are rough; the ratios are what counts.

#![allow(clippy::print_stdout, clippy::unwrap_used, missing_docs)]

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const ROUNDS: usize = 60;

fn main() {
    let home = tempfile::tempdir().unwrap();
    let hotcell = env!("CARGO_BIN_EXE_hotcell");
    let contenders: Vec<(&str, Vec<&str>)> = vec![
        ("plain start", vec!["/bin/true"]),
        ("unshare, 7 namespaces", "unshare --user --map-current-user --mount --pid --fork --net --ipc --uts --cgroup /bin/true".split(' ').collect()),
        (
            "bwrap --unshare-all",
            "bwrap --unshare-all --ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64 \
             --proc /proc --dev /dev --tmpfs /tmp /bin/true"
                .split_whitespace()
                .collect(),
        ),
        ("hotcell run", vec![hotcell, "run", "-q", "--", "/bin/true"]),
    ];
    let mut times: Vec<Vec<Duration>> = vec![Vec::new(); contenders.len()];
    for round in 0..=ROUNDS {
        for (idx, (_, argv)) in contenders.iter().enumerate() {
            let mut command = Command::new(argv[0]);
            command
                .args(&argv[1..])
                .env("HOTCELL_HOME", home.path().join("home"))
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            let begun = Instant::now();
            let worked = command.status().is_ok_and(|status| status.success());
            // The first round warms the caches.
            if worked && round > 0 {
                times[idx].push(begun.elapsed());
            }
        }
    }
    let median = |times: &mut Vec<Duration>| {
        times.sort_unstable();
        times.get(times.len() / 2).copied()
    };
    let plain = median(&mut times[0]).expect("/bin/true runs");
    println!("{:<24} {:>10} {:>8}", "whole command", "median", "× plain");
    for (idx, (name, _)) in contenders.iter().enumerate() {
        match median(&mut times[idx]) {
            Some(time) => println!(
                "{name:<24} {:>7.2} ms {:>8.1}",
                time.as_secs_f64() * 1e3,
                time.as_secs_f64() / plain.as_secs_f64()
            ),
            None => println!("{name:<24} not installed here, or not allowed"),
        }
    }
}
