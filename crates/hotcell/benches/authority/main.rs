//! What permission and evidence cost: leases, the ledger, the gate, revocation, the store. Figures and the bars beside
//! them; nothing here fails, because machines are shared and noisy.

#![allow(clippy::print_stdout, missing_docs)]

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use hotcell_authority::{Audience, Circumstances, Known, LeaseLimits, Scope, Terms, verify};
use hotcell_base::{LeaseId, RunId};
use hotcell_cell::{Cell, Host, Plan, Stream};
use hotcell_gate::authority::{ledger_place, store};
use hotcell_gate::leases::{Issued, Wish};
use hotcell_gate::{Authority, Gate, Home, Permission, Request, Viewer};
use hotcell_ledger::audit::Auditor;
use hotcell_ledger::file::{Durability, Lines, Place, head, segments};
use hotcell_ledger::{Event, Ids, Ledger, News};
use jiff::{SignedDuration, Timestamp};
use serde_json::json;

fn main() {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |name: &str, default: u64| {
        let at = words.iter().position(|word| word == name);
        at.and_then(|at| words.get(at + 1)).and_then(|word| word.parse().ok()).unwrap_or(default)
    };
    let only = words.iter().position(|word| word == "--only").and_then(|at| words.get(at + 1)).cloned();
    let is_wanted = |name: &str| only.as_deref().is_none_or(|only| name.contains(only));
    let place = tempfile::tempdir().expect("a directory");
    let host = Host::probe(std::env::vars_os()).expect("a machine");
    println!("{:<52} {:>12} {:>12}  bar", "", "p50", "p99");
    if is_wanted("lease") {
        leases(place.path());
    }
    if is_wanted("ledger") {
        ledger(place.path(), number("--entries", 200_000));
    }
    if is_wanted("gate") {
        gate(&host, place.path(), number("--rounds", 200));
    }
    if is_wanted("load") {
        load(&host, place.path(), Duration::from_secs(number("--seconds", 4)));
    }
    if is_wanted("revoke") {
        revoke(&host, place.path(), number("--tries", 200));
    }
    if is_wanted("store") {
        listing(place.path(), number("--runs", 100_000));
    }
}

/// Times of something, and how they are shown.
#[derive(Default)]
struct Times(Vec<Duration>);

impl Times {
    fn of<T>(n: u64, mut what: impl FnMut() -> T) -> Times {
        let times = (0..n).map(|_| {
            let since = Instant::now();
            std::hint::black_box(what());
            since.elapsed()
        });
        Times(times.collect())
    }

    fn at(&self, part: f64) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index")]
        let idx = ((sorted.len() - 1) as f64 * part).round() as usize;
        sorted[idx]
    }

    fn show(&self, name: &str, bar: &str) {
        println!("{name:<52} {:>12} {:>12}  {bar}", shown(self.at(0.5)), shown(self.at(0.99)));
    }
}

fn shown(time: Duration) -> String {
    match time.as_secs_f64() * 1e6 {
        micros if micros < 1000.0 => format!("{micros:.1} µs"),
        micros => format!("{:.2} ms", micros / 1e3),
    }
}

fn home(place: &Path, name: &str) -> Home {
    Home::open(&place.join(name)).expect("a home")
}

fn wish(authority: &Authority, command: &str, runs_max: u32) -> Wish {
    let scope = Scope { commands_allowlist: vec![command.parse().expect("a pattern")], ..Scope::default() };
    Wish {
        terms: Terms {
            capability: "own".to_owned(),
            scope,
            limits: LeaseLimits { runs_max, fd_limit: 1024, ..LeaseLimits::default() },
        },
        lasts: SignedDuration::from_mins(60),
        intent_id: None,
        actor: "bench".to_owned(),
        audience: authority.here().clone(),
        parent: None,
    }
}

fn issue(authority: &Authority, command: &str) -> Issued {
    authority.leases().issue(wish(authority, command, 1_000_000)).expect("a lease")
}

struct Nothing;

impl Known for Nothing {
    fn is_revoked(&self, _: &LeaseId) -> bool {
        false
    }
    fn runs_used(&self, _: &LeaseId) -> u32 {
        0
    }
    fn text(&self, _: &LeaseId) -> Option<Vec<u8>> {
        None
    }
}

fn leases(place: &Path) {
    let home = home(place, "leases");
    let authority = Authority::open(&home).expect("an authority");
    let issued = issue(&authority, "pytest -q **");
    let here: &Audience = authority.here();
    let trust = Some(&authority.ring().trust);
    let check = || {
        let in_ = Circumstances { known: &Nothing, trust, policy: authority.policy(), here, now: Timestamp::now() };
        verify(&issued.text, None, &in_).expect("it holds")
    };
    Times::of(5000, check).show("verify a lease, from its text", "≤ 100 µs");
    Times::of(200, || issue(&authority, "pytest -q **")).show("issue a lease, told and kept durably", "");
    Times::of(500, || Authority::open(&home).expect("an authority")).show("open keys, trust, policy and ledger", "");
}

fn news(n: u64) -> News {
    let ids = Ids {
        run_id: Some(RunId::new("20270115-080000", n)),
        lease_id: Some(LeaseId::new("20270115-080000", n)),
        ..Ids::default()
    };
    let details = json!({ "kind": "run", "command": ["python3", "-m", "pytest", "-q"], "labels": { "team": "a" }, "limits": { "time_ms": 600_000 } });
    News::new(Event::ExecStarted, Timestamp::now(), ids, details)
}

fn ledger(place: &Path, n_entries: u64) {
    let key = hotcell_authority::SecretKey::from_seed(&[7; 32]);
    let at = Place { directory: place.join("ledger-bench"), head: place.join("ledger-bench.head") };
    let ledger = Ledger::open(&at, "0123456789abcdef", &key, Timestamp::now()).expect("a ledger");
    let batches: Vec<Vec<News>> =
        (0..n_entries / 1000).map(|n| (0..1000).map(|m| news(1000 * n + m)).collect()).collect();
    let since = Instant::now();
    for batch in batches {
        ledger.append(batch, &key, Durability::Synced).expect("written");
    }
    rate("append, a thousand to a batch, synced", n_entries, since.elapsed(), "≥ 50,000/s");
    let (n_threads, n_each) = (32, 200);
    let since = Instant::now();
    std::thread::scope(|scope| {
        for thread in 0..n_threads {
            let (ledger, key) = (&ledger, &key);
            scope.spawn(move || {
                for n in 0..n_each {
                    ledger.append(vec![news(thread * n_each + n)], key, Durability::Synced).expect("written");
                }
            });
        }
    });
    rate("append, one at a time from 32 threads, synced", n_threads * n_each, since.elapsed(), "");
    Times::of(300, || ledger.append(vec![news(1)], &key, Durability::Synced).expect("written"))
        .show("append one, synced", "");
    let trust = hotcell_authority::TrustStore::default();
    let found = head(&at).expect("readable");
    let since = Instant::now();
    let mut auditor = Auditor::new(found.iter());
    for segment in segments(&at.directory).expect("readable") {
        for line in Lines::of(std::fs::File::open(&segment.path).expect("there")) {
            auditor.line(&line.expect("readable"));
        }
    }
    let audit = auditor.finish(found.as_ref(), &[], &trust);
    rate("verify", audit.n_valid, since.elapsed(), "≥ 200,000/s");
}

fn rate(name: &str, n: u64, took: Duration, bar: &str) {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rate")]
    let rate = (n as f64 / took.as_secs_f64()) as u64;
    println!("{name:<52} {:>12} {:>12}  {bar}", format!("{rate}/s"), "");
}

struct Silent;

impl Viewer for Silent {
    fn output(&mut self, _: Stream, _: &[u8]) {}
}

fn plan(host: &Host, home: &Home, words: &[&str]) -> Plan {
    Cell::builder().hide(home.path()).command(words.iter().copied()).plan(host).expect("a plan")
}

fn gate(host: &Host, place: &Path, rounds: u64) {
    let home = home(place, "gate");
    let gate = Gate::open(&home).expect("a gate");
    let plan = plan(host, &home, &["true"]);
    let lease = issue(gate.authority(), "true").text;
    let own = || gate.run(&plan, Request::default(), &mut Silent, None).expect("it runs");
    let leased = || {
        let request = Request { permission: Permission::Lease(lease.clone()), ..Request::default() };
        gate.run(&plan, request, &mut Silent, None).expect("it runs")
    };
    // In turn, so that whatever else the machine does is in all of them.
    let (mut bare, mut ours, mut theirs) = (Times::default(), Times::default(), Times::default());
    for _ in 0..rounds {
        bare.0.extend(Times::of(1, || plan.run().expect("it runs")).0);
        ours.0.extend(Times::of(1, own).0);
        theirs.0.extend(Times::of(1, leased).0);
    }
    bare.show("a cell without the gate", "");
    ours.show("through the gate, under a lease of its own", "");
    theirs.show("through the gate, under a lease that was given", "");
    for (name, times) in [("own", &ours), ("given", &theirs)] {
        let over = times.at(0.5).saturating_sub(bare.at(0.5));
        println!("{:<52} {:>12} {:>12}  ≤ 1.5 ms", format!("gate overhead, durable, {name}"), shown(over), "");
    }
}

/// Many at once, with and without the gate, in turns.
fn load(host: &Host, place: &Path, seconds: Duration) {
    let home = home(place, "load");
    let gate = Gate::open(&home).expect("a gate");
    let plan = plan(host, &home, &["true"]);
    let lease = issue(gate.authority(), "true").text;
    let rate_of = |what: &(dyn Fn() + Sync)| {
        let (stop, n) = (AtomicBool::new(false), AtomicU64::new(0));
        let since = Instant::now();
        std::thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        what();
                        n.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            std::thread::sleep(seconds / 4);
            stop.store(true, Ordering::Relaxed);
        });
        n.load(Ordering::Relaxed) as f64 / since.elapsed().as_secs_f64()
    };
    let mut rates: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for _ in 0..4 {
        let bare = rate_of(&|| drop(plan.run().expect("it runs")));
        let own = rate_of(&|| drop(gate.run(&plan, Request::default(), &mut Silent, None).expect("it runs")));
        let given = rate_of(&|| {
            let request = Request { permission: Permission::Lease(lease.clone()), ..Request::default() };
            drop(gate.run(&plan, request, &mut Silent, None).expect("it runs"));
        });
        for (name, rate) in [("bare", bare), ("own", own), ("given", given)] {
            rates.entry(name).or_default().push(rate);
        }
    }
    let mean = |name: &str| rates[name].iter().sum::<f64>() / rates[name].len() as f64;
    println!("{:<52} {:>12}", "16 at once, without the gate", format!("{:.0}/s", mean("bare")));
    for name in ["own", "given"] {
        // With all processors busy, what one run takes longer is what it costs.
        let over = Duration::try_from_secs_f64(1.0 / mean(name) - 1.0 / mean("bare")).unwrap_or_default();
        println!(
            "{:<52} {:>12} {:>12}  ≤ 300 µs",
            format!("gate overhead with group commit, {name} ({:.0}/s)", mean(name)),
            shown(over),
            ""
        );
    }
}

struct Begins(Option<mpsc::Sender<()>>);

impl Viewer for Begins {
    fn started(&mut self, _: &RunId) {
        if let Some(began) = self.0.take() {
            let _nobody_waits = began.send(());
        }
    }
    fn output(&mut self, _: Stream, _: &[u8]) {}
}

fn revoke(host: &Host, place: &Path, tries: u64) {
    let home = home(place, "revoke");
    let gate = Gate::open(&home).expect("a gate");
    let plan = plan(host, &home, &["sleep", "1000"]);
    let mut times = Times::default();
    for _ in 0..tries {
        let lease = issue(gate.authority(), "sleep 1000");
        let (began, begins) = mpsc::channel();
        std::thread::scope(|scope| {
            let running = scope.spawn(|| {
                let request = Request { permission: Permission::Lease(lease.text.clone()), ..Request::default() };
                gate.run(&plan, request, &mut Begins(Some(began)), None).expect("it runs")
            });
            begins.recv().expect("it begins");
            // Anywhere between two looks.
            std::thread::sleep(Duration::from_micros(hotcell_gate::door::random() % 40_000));
            let since = Instant::now();
            gate.authority().leases().revoke(&lease.lease.lease_id, None).expect("revoked");
            let ran = running.join().expect("no panic");
            times.0.push(since.elapsed());
            assert_eq!(ran.record.outcome, Some(hotcell_base::Outcome::LeaseRevoked));
        });
    }
    times.show("revoke, until the run is over and written down", "p99 ≤ 50 ms");
}

fn listing(place: &Path, n_runs: u64) {
    let home = home(place, "store");
    let authority = Authority::open(&home).expect("an authority");
    let mut batch = Vec::new();
    for n in 0..n_runs {
        let mut started = news(n);
        started.at = Timestamp::from_second(1_700_000_000 + i64::try_from(n).expect("small")).expect("a time");
        let usage = json!({ "wall_ms": 12.5, "cpu_ms": 3.0, "memory_peak_bytes": 4_000_000 });
        let details = json!({ "outcome": "exited", "exit_status": 0, "usage": usage });
        let ended = News::new(Event::ExecFinished, started.at, started.ids.clone(), details);
        batch.extend([started, ended]);
        if batch.len() >= 2000 || n + 1 == n_runs {
            authority.tell(std::mem::take(&mut batch)).expect("told");
        }
    }
    let since = Instant::now();
    drop(store(&home).expect("a store"));
    println!("{:<52} {:>12}", format!("read {n_runs} runs into a new store"), shown(since.elapsed()));
    let place = ledger_place(&home);
    assert!(place.directory.exists());
    let program = env!("CARGO_BIN_EXE_hotcell");
    let ls = |words: &[&str]| {
        let output =
            Command::new(program).arg("--home").arg(home.path()).arg("ls").args(words).output().expect("it runs");
        assert!(output.status.success());
        output.stdout.len()
    };
    Times::of(20, || ls(&[])).show(&format!("hotcell ls, of {n_runs}"), "≤ 50 ms");
    Times::of(20, || ls(&["--outcome", "oom"])).show("hotcell ls --outcome oom", "≤ 50 ms");
    Times::of(20, || ls(&["--label", "team=a"])).show("hotcell ls --label, which all of them have", "≤ 50 ms");
    let all = n_runs.to_string();
    Times::of(5, || ls(&["-n", &all])).show("hotcell ls -n, all of them", "");
}
