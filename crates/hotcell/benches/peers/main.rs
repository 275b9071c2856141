//! What a start costs: hotcell in each of its modes, with all walls and limits, beside its peers, in one run.
//!
//! ```text
//! cargo bench -p hotcell --bench peers -- [--rounds N] [--seconds N] [--payload NAME] [--only TEXT] [--alone]
//!                                         [--json FILE] [--svg FILE]
//! ```
//!
//! `--only` keeps those whose name has the text in it, and the two that all others are compared with, unless `--alone`.
//!
//! Contenders take turns, so that whatever the machine does meanwhile it does to all of them. Peers that are not
//! installed, or cannot run here, are named and left out. Times of a shared machine are rough: the ratios count.

#![allow(clippy::print_stdout, clippy::print_stderr, missing_docs)]

mod contenders;
mod launcher;
mod memory;
mod quiet;
mod report;

use std::fs::File;
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use contenders::{Contender, Payload, Place};
use memory::Memory;
use quiet::Gate;
use report::{Latency, Rate, Results};

struct Args {
    rounds: usize,
    seconds: f64,
    payload: Option<String>,
    only: Option<String>,
    is_alone: bool,
    json: Option<String>,
    svg: Option<String>,
}

impl Args {
    fn parse() -> Args {
        let mut args =
            Args { rounds: 100, seconds: 1.0, payload: None, only: None, is_alone: false, json: None, svg: None };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().unwrap_or_else(|| panic!("{word} takes a value"));
            match word.as_str() {
                "--rounds" => args.rounds = value().parse().expect("a number of rounds"),
                "--seconds" => args.seconds = value().parse().expect("seconds for each rate; 0 for none"),
                "--payload" => args.payload = Some(value()),
                "--alone" => args.is_alone = true,
                "--only" => args.only = Some(value()),
                "--json" => args.json = Some(value()),
                "--svg" => args.svg = Some(value()),
                // What cargo itself says.
                "--bench" => {}
                other => panic!("`{other}` is not known; see the head of benches/peers/main.rs"),
            }
        }
        args
    }

    fn wants(&self, name: &str, payload: Payload) -> bool {
        let is_base = !self.is_alone && matches!(name, "posix_spawn" | "bwrap --unshare-all");
        let is_named = self.only.as_ref().is_none_or(|only| name.contains(only.as_str()));
        (is_base || is_named) && self.payload.as_ref().is_none_or(|wanted| wanted == payload.name())
    }
}

fn main() {
    if std::env::args().nth(1).as_deref() == Some(launcher::FLAG) {
        return launcher::be_one();
    }
    let args = Args::parse();
    // Before anything that takes long.
    let create = |path: &String| File::create(path).unwrap_or_else(|error| panic!("cannot write `{path}`: {error}"));
    let (json, svg) = (args.json.as_ref().map(create), args.svg.as_ref().map(create));
    let place = Place::new();
    let (contenders, absent) = contenders::all(&place, &|name, payload| args.wants(name, payload));
    let mut gate = Gate::new(Duration::from_millis(50));
    let latencies = latencies(&contenders, &mut gate, args.rounds);
    let rates = if args.seconds > 0.0 { rates(&contenders, args.seconds) } else { Vec::new() };
    let n_mounts = std::fs::read_to_string("/proc/self/mountinfo").map_or(0, |text| text.lines().count());
    // What is kept open for the others goes first.
    drop(contenders);
    let memory = (args.only.is_none() && !args.is_alone).then(|| Memory::measure(&place));
    let (n_waits, n_dropped) = (gate.n_waits, gate.n_dropped);
    let results = Results { n_mounts, n_waits, n_dropped, absent, latencies, rates, memory };
    print!("{}", results.table());
    if let Some(mut file) = json {
        writeln!(file, "{:#}", results.json()).expect("there is room for it");
    }
    if let Some(mut file) = svg {
        file.write_all(results.picture().as_bytes()).expect("there is room for it");
    }
}

/// Everybody once, then everybody once more, in another order.
fn latencies(contenders: &[Contender], gate: &mut Gate, rounds: usize) -> Vec<Latency> {
    let mut all: Vec<Latency> = contenders
        .iter()
        .map(|one| Latency { name: one.name, payload: one.payload, is_ours: one.is_ours, times: Vec::new() })
        .collect();
    let mut order: Vec<usize> = (0..contenders.len()).collect();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for round in 0..rounds {
        // In another order each time: nobody always comes after the one that leaves the machine cold.
        for at in (1..order.len()).rev() {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            order.swap(at, usize::try_from(random % (at as u64 + 1)).expect("an index"));
        }
        for at in &order {
            // A sample that somebody disturbed is taken again, a few times.
            let sample = (0..10).find_map(|_| gate.sample(&contenders[*at].start));
            if let Some(Some(took)) = sample {
                all[*at].times.push(took);
            }
        }
        if round % 20 == 19 {
            eprintln!("{} of {rounds} rounds", round + 1);
        }
    }
    all.iter_mut().for_each(|latency| latency.times.sort_unstable());
    all
}

/// How many starts a second many launchers get out of this machine together.
fn rates(contenders: &[Contender], seconds: f64) -> Vec<Rate> {
    let mut rates = Vec::new();
    for one in contenders.iter().filter(|one| one.payload == Payload::Noop) {
        for n_launchers in [1, 2, 8, 32] {
            let (is_over, n_started) = (AtomicBool::new(false), AtomicU64::new(0));
            let begun = Instant::now();
            std::thread::scope(|scope| {
                for _ in 0..n_launchers {
                    scope.spawn(|| {
                        while !is_over.load(Ordering::Relaxed) {
                            if (one.start)().is_some() {
                                n_started.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                    });
                }
                std::thread::sleep(Duration::from_secs_f64(seconds));
                is_over.store(true, Ordering::Relaxed);
            });
            let per_second = n_started.load(Ordering::Relaxed) as f64 / begun.elapsed().as_secs_f64();
            rates.push(Rate { name: one.name, n_launchers, per_second });
        }
    }
    rates
}
