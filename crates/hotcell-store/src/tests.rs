//! A real ledger, a real database.

use std::fs;

use hotcell_authority::SecretKey;
use hotcell_ledger::file::Durability;
use hotcell_ledger::{Event, Ids, Ledger, News};
use serde_json::json;

use super::*;

struct Bench {
    directory: tempfile::TempDir,
    place: Place,
    key: SecretKey,
    ledger: Ledger,
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + second).expect("a time")
}

fn run_id(n: u64) -> RunId {
    RunId::new("20270115-080000", n)
}

fn lease_id(n: u64) -> LeaseId {
    LeaseId::new("20270115-080000", n)
}

impl Bench {
    fn new() -> Bench {
        let directory = tempfile::tempdir().expect("a directory");
        let place = Place { directory: directory.path().join("ledger"), head: directory.path().join("head") };
        let key = SecretKey::from_seed(&[1; 32]);
        let ledger = Ledger::open(&place, "0123456789abcdef", &key, at(0)).expect("opened");
        Bench { directory, place, key, ledger }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("hotcell.db")
    }

    fn store(&self) -> Store {
        let mut store = Store::open(&self.path(), self.place.clone()).expect("opened");
        store.catch_up().expect("read");
        store
    }

    fn tell(&self, news: Vec<News>) {
        self.ledger.append(news, &self.key, Durability::Written).expect("written");
    }

    fn start(&self, n: u64, lease: u64, details: serde_json::Value) {
        let ids = Ids { run_id: Some(run_id(n)), lease_id: Some(lease_id(lease)), ..Ids::default() };
        self.tell(vec![News::new(Event::ExecStarted, at(n.cast_signed()), ids, details)]);
    }

    fn end(&self, n: u64, event: Event, outcome: &str) {
        let ids = Ids { run_id: Some(run_id(n)), ..Ids::default() };
        let usage = json!({ "wall_ms": 12.5, "memory_peak_bytes": 4096, "cpu_ms": 3.0 });
        let details = json!({ "outcome": outcome, "exit_status": 0, "usage": usage });
        self.tell(vec![News::new(event, at(n.cast_signed() + 1), ids, details)]);
    }

    fn issue(&self, n: u64, parent: Option<u64>, self_issued: bool) {
        let ids = Ids { lease_id: Some(lease_id(n)), ..Ids::default() };
        let details = json!({
            "actor": "tests", "capability": "exec_staging", "issued_at": "2027-01-15T08:00:00Z",
            "expires_at": "2027-01-15T08:10:00Z", "parent": parent.map(lease_id), "runs_max": 3,
            "self_issued": self_issued, "commands": ["pytest -q **", "ruff check ."],
        });
        self.tell(vec![News::new(Event::LeaseIssued, at(0), ids, details)]);
    }
}

fn ids(rows: &[RunRow]) -> Vec<&str> {
    rows.iter().map(|row| row.run_id.as_str()).collect()
}

#[test]
fn runs_are_listed_as_the_ledger_tells_and_by_every_filter() {
    let bench = Bench::new();
    bench.start(1, 1, json!({ "command": ["echo", "hi"], "labels": { "team": "a", "x": "1" }, "name": "one" }));
    bench.start(2, 2, json!({ "command": ["sleep", "5"], "labels": { "team": "a" }, "kind": "session" }));
    bench.start(3, 2, json!({ "command": ["true"], "labels": { "team": "b" }, "session": run_id(2) }));
    bench.end(1, Event::ExecFinished, "exited");
    bench.end(3, Event::ExecTimeout, "timeout");
    let store = bench.store();
    let all = store.runs(&RunFilter::default()).expect("read");
    let [one, two, three] = [1, 2, 3].map(|n| run_id(n).as_str().to_owned());
    assert_eq!(ids(&all), [&*three, &*two, &*one], "the newest first");
    let first = &all[2];
    assert_eq!(
        (first.command.as_str(), first.outcome.as_deref(), first.wall_ms),
        ("echo hi", Some("exited"), Some(12.5))
    );
    assert_eq!((first.memory_peak_bytes, first.labels["x"].as_str()), (Some(4096), "1"));
    let found =
        |filter: RunFilter| store.runs(&filter).expect("read").into_iter().map(|row| row.run_id).collect::<Vec<_>>();
    let label = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    assert_eq!(found(RunFilter { labels: vec![label("team", "a")], ..RunFilter::default() }), [&*two, &*one]);
    assert_eq!(found(RunFilter { labels: vec![label("team", "a"), label("x", "1")], ..RunFilter::default() }), [&*one]);
    assert_eq!(found(RunFilter { outcome: Some("timeout".into()), ..RunFilter::default() }), [&*three]);
    assert_eq!(found(RunFilter { outcome: Some("running".into()), ..RunFilter::default() }), [&*two]);
    assert_eq!(found(RunFilter { since: Some(at(2)), ..RunFilter::default() }), [&*three, &*two]);
    assert_eq!(found(RunFilter { lease: Some(lease_id(2).to_string()), ..RunFilter::default() }), [&*three, &*two]);
    assert_eq!(found(RunFilter { session: Some(two.clone()), ..RunFilter::default() }), [&*three]);
    assert_eq!(found(RunFilter { name: Some("one".into()), ..RunFilter::default() }), [&*one]);
    assert_eq!(found(RunFilter { limit: Some(1), ..RunFilter::default() }), [&*three]);
    assert_eq!(store.newest_named("one").expect("read").as_deref(), Some(&*one));
    let samples = store.samples(&one).expect("read");
    assert_eq!(
        samples.iter().map(|sample| sample.key.as_str()).collect::<Vec<_>>(),
        ["cpu_ms", "memory_peak_bytes", "wall_ms"]
    );
    // Removed is removed, with all that hangs on it.
    let gone = Ids { run_id: Some(run_id(1)), ..Ids::default() };
    bench.tell(vec![News::new(Event::ExecRemoved, at(9), gone, json!({}))]);
    let store = bench.store();
    assert_eq!(ids(&store.runs(&RunFilter::default()).expect("read")), [&*three, &*two]);
    assert!(store.samples(&one).expect("read").is_empty());
    assert_eq!(store.runs_used(&lease_id(1)).expect("read"), 1, "the lease was used all the same");
}

#[test]
fn leases_are_listed_with_what_became_of_them() {
    let bench = Bench::new();
    bench.issue(1, None, false);
    bench.issue(2, Some(1), false);
    bench.issue(3, Some(2), false);
    bench.issue(4, None, true);
    bench.start(1, 3, json!({ "ancestors": [lease_id(2), lease_id(1)] }));
    let revoked = Ids { lease_id: Some(lease_id(2)), ..Ids::default() };
    bench.tell(vec![News::new(Event::LeaseRevoked, at(5), revoked, json!({}))]);
    let store = bench.store();
    let listed = store.leases(&LeaseFilter::default()).expect("read");
    assert_eq!(listed.len(), 3);
    assert_eq!(store.leases(&LeaseFilter { self_issued: true, ..LeaseFilter::default() }).expect("read").len(), 4);
    let active = LeaseFilter { active_at: Some(at(0)), ..LeaseFilter::default() };
    assert_eq!(store.leases(&active).expect("read").len(), 2);
    let later = LeaseFilter { active_at: Some(at(600)), ..LeaseFilter::default() };
    assert!(store.leases(&later).expect("read").is_empty());
    let second = store.lease(&lease_id(2)).expect("read").expect("there");
    assert_eq!((second.runs_used, second.revoked_at.is_some(), second.commands.len()), (1, true, 2));
    assert_eq!(store.descendants(&lease_id(1)).expect("read").len(), 2);
    assert!(store.is_revoked(&lease_id(2)).expect("read") && !store.is_revoked(&lease_id(1)).expect("read"));
}

#[test]
fn a_run_of_a_lease_is_taken_once_and_an_attempt_is_made_once() {
    let bench = Bench::new();
    let mut store = bench.store();
    let leases = [(lease_id(1), 2), (lease_id(2), 9)];
    let mut take = |n: u64, attempt: Option<&str>| {
        let run_id = run_id(n);
        let wanted = Reservation { run_id: &run_id, attempt_id: attempt, digest: "d", leases: &leases, now: at(0) };
        store.reserve(&wanted).expect("written")
    };
    assert_eq!(take(1, Some("a")), Reserved::New);
    assert_eq!(take(2, Some("a")), Reserved::Before { run_id: run_id(1), digest: "d".into() });
    assert_eq!(take(2, Some("b")), Reserved::New);
    assert_eq!(take(3, None), Reserved::Exhausted(lease_id(1)));
    assert_eq!(store.runs_used(&lease_id(2)).expect("read"), 2, "what was refused was not counted");
    let revoked = Ids { lease_id: Some(lease_id(2)), ..Ids::default() };
    bench.tell(vec![News::new(Event::LeaseRevoked, at(5), revoked, json!({}))]);
    let wider = [(lease_id(2), 9)];
    let run_id = run_id(4);
    let wanted = Reservation { run_id: &run_id, attempt_id: None, digest: "d", leases: &wider, now: at(0) };
    assert_eq!(
        store.reserve(&wanted).expect("written"),
        Reserved::Revoked(lease_id(2)),
        "read from the ledger just now"
    );
}

#[test]
fn of_many_that_want_the_last_run_one_gets_it() {
    let bench = Bench::new();
    let (path, place) = (bench.path(), bench.place.clone());
    drop(bench.store());
    let threads: Vec<_> = (0..8)
        .map(|n| {
            let (path, place) = (path.clone(), place.clone());
            std::thread::spawn(move || {
                let mut store = Store::open(&path, place).expect("opened");
                let (run_id, leases) = (run_id(n), [(lease_id(1), 3)]);
                let wanted =
                    Reservation { run_id: &run_id, attempt_id: None, digest: "d", leases: &leases, now: at(0) };
                store.reserve(&wanted).expect("written") == Reserved::New
            })
        })
        .collect();
    let taken = threads.into_iter().map(|thread| thread.join().expect("no panic")).filter(|taken| *taken).count();
    assert_eq!(taken, 3);
}

#[test]
fn a_store_that_is_lost_or_of_another_ledger_is_made_again_and_reservations_stay() {
    let bench = Bench::new();
    bench.start(1, 1, json!({ "command": ["true"] }));
    let mut store = bench.store();
    let run = run_id(7);
    let wanted =
        Reservation { run_id: &run, attempt_id: Some("a"), digest: "d", leases: &[(lease_id(1), 9)], now: at(0) };
    assert_eq!(store.reserve(&wanted).expect("written"), Reserved::New);
    drop(store);
    // The ledger goes another way.
    fs::remove_dir_all(&bench.place.directory).expect("removed");
    fs::remove_file(&bench.place.head).expect("removed");
    let other = Ledger::open(&bench.place, "fedcba9876543210", &bench.key, at(0)).expect("opened");
    let ids = Ids { run_id: Some(run_id(2)), ..Ids::default() };
    other
        .append(vec![News::new(Event::ExecStarted, at(2), ids, json!({}))], &bench.key, Durability::Written)
        .expect("written");
    let mut store = bench.store();
    let listed = store.runs(&RunFilter::default()).expect("read");
    assert_eq!(listed.iter().map(|row| row.run_id.clone()).collect::<Vec<_>>(), [run_id(2).to_string()]);
    assert_eq!(store.reserve(&wanted).expect("written"), Reserved::Before { run_id: run_id(7), digest: "d".into() });
    drop(store);
    for file in ["hotcell.db", "hotcell.db-wal", "hotcell.db-shm"] {
        let _gone = fs::remove_file(bench.directory.path().join(file));
    }
    assert_eq!(bench.store().runs(&RunFilter::default()).expect("read").len(), 1);
}

#[test]
fn an_older_hotcell_refuses_a_newer_store_and_a_newer_one_updates_an_older() {
    let bench = Bench::new();
    bench.start(1, 1, json!({ "command": ["true"] }));
    drop(bench.store());
    let mut connection = Connection::open(bench.path()).expect("opened");
    let newer = [schema::STEPS, &["ALTER TABLE runs ADD COLUMN mood TEXT"]].concat();
    schema::migrate_by(&mut connection, &bench.path(), &newer).expect("updated");
    let mood: Option<String> =
        connection.query_row("SELECT mood FROM runs", [], |row| row.get(0)).expect("what was there is there");
    assert_eq!(mood, None);
    drop(connection);
    let refused = Store::open(&bench.path(), bench.place.clone()).expect_err("refused");
    assert!(matches!(refused, StoreError::Newer { found, known, .. } if found == VERSION + 1 && known == VERSION));
    // From nothing to each version, and on to the newest.
    for n in 0..=newer.len() {
        let path = bench.directory.path().join(format!("from-{n}.db"));
        let mut connection = Connection::open(&path).expect("opened");
        schema::migrate_by(&mut connection, &path, &newer[..n]).expect("made");
        schema::migrate_by(&mut connection, &path, &newer).expect("updated");
    }
}

#[test]
fn every_listing_has_an_index() {
    let bench = Bench::new();
    let store = bench.store();
    for (sql, index) in [
        ("SELECT * FROM runs ORDER BY started_at DESC, run_id DESC LIMIT 20", "runs_by_time"),
        ("SELECT * FROM runs WHERE outcome = 'oom' ORDER BY started_at DESC", "runs_by_outcome"),
        ("SELECT * FROM runs WHERE lease_id = 'x' ORDER BY started_at DESC", "runs_by_lease"),
        ("SELECT * FROM runs WHERE session = 'x'", "runs_by_session"),
        ("SELECT * FROM runs WHERE name = 'x' ORDER BY started_at DESC", "runs_by_name"),
        (
            "SELECT kind FROM labels AS first JOIN runs ON runs.run_id = first.run_id WHERE first.key = 'a' AND first.value = 'b'
             ORDER BY first.started_at DESC, first.run_id DESC LIMIT 20",
            "PRIMARY KEY (key=? AND value=?)",
        ),
        ("SELECT * FROM leases WHERE self_issued = 0 ORDER BY issued_at DESC", "leases_by_time"),
        ("SELECT * FROM leases WHERE parent = 'x'", "leases_by_parent"),
        ("SELECT count(*) FROM uses WHERE lease_id = 'x'", "PRIMARY KEY"),
    ] {
        let mut statement = store.connection.prepare(&format!("EXPLAIN QUERY PLAN {sql}")).expect("SQL");
        let plan: Vec<String> = statement.query_map([], |row| row.get(3)).expect("run").flatten().collect();
        let plan = plan.join("; ");
        assert!(plan.contains(index) && !plan.contains("TEMP B-TREE"), "{sql}: {plan}");
    }
}
