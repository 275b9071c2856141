//! Every parser that is fed from outside, fed with what was bent, cut, joined and doubled. Whatever comes, nothing panics, nothing takes
//! for ever, and what is taken is what was signed. `HOTCELL_FUZZ=N` makes so many tries of each instead of
//! 20,000; a failure prints the seed that repeats it.

use std::time::Instant;

use hotcell_authority::{
    Audience, CommandPattern, DEFAULT_POLICY, Draft, Lease, LeaseLimits, PathPattern, Policy, Role, Scope, SecretKey,
    Terms, TrustStore,
};
use hotcell_base::{LeaseId, RunId};
use hotcell_ledger::audit::Auditor;
use hotcell_ledger::{Entry, Envelope, Event, Hash, Head, Ids, Statement};
use jiff::Timestamp;
use serde_json::json;

/// Random numbers that a seed repeats.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 % (below.max(1) as u64)).expect("below")
    }
}

/// What is likely to mean something to one of the parsers.
const WORDS: &[&str] = &[
    "\"",
    "\\",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "null",
    "true",
    "-1",
    "0",
    "1e999",
    "18446744073709551616",
    "\\u0000",
    "\\ud800",
    "*",
    "**",
    "/",
    "..",
    "repo://",
    "'",
    "\n",
    "\r\n",
    "\t",
    " ",
    "#",
    "=",
    "[[",
    "]]",
    "Ed25519",
    "none",
    "sha256:",
    "\u{202e}",
    "é",
    "😀",
    "\u{0}",
    "version = 2",
    "\"sig\": {",
    "9999-12-31T23:59:59Z",
    "-009999-01-02T01:59:59Z",
];

fn bent(dice: &mut Dice, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut text = corpus[dice.roll(corpus.len())].clone();
    for _ in 0..=dice.roll(4) {
        let at = dice.roll(text.len() + 1);
        let until = (at + dice.roll(64)).min(text.len());
        match dice.roll(7) {
            0 if at < text.len() => text[at] ^= 1 << dice.roll(8),
            1 => drop(text.splice(at..at, WORDS[dice.roll(WORDS.len())].bytes())),
            2 => drop(text.drain(at..until)),
            3 => {
                let part = text[at..until].to_vec();
                drop(text.splice(at..at, part));
            }
            4 => text.truncate(at),
            5 => {
                let other = &corpus[dice.roll(corpus.len())];
                let from = dice.roll(other.len() + 1);
                text.truncate(at);
                text.extend_from_slice(&other[from..]);
            }
            _ => drop(text.splice(at..until, WORDS[dice.roll(WORDS.len())].bytes())),
        }
    }
    text
}

/// Tries a parser with bent texts.
fn feed(name: &str, corpus: &[Vec<u8>], parse: impl Fn(&[u8]) + std::panic::RefUnwindSafe) {
    let tries = std::env::var("HOTCELL_FUZZ").ok().and_then(|n| n.parse().ok()).unwrap_or(20_000);
    let fresh = hotcell_gate::door::random() | 1;
    for seed in [0x9e37_79b9_7f4a_7c15, fresh] {
        let mut dice = Dice(seed);
        for n in 0..tries {
            let text = bent(&mut dice, corpus);
            let since = Instant::now();
            let outcome = std::panic::catch_unwind(|| parse(&text));
            assert!(outcome.is_ok(), "{name}: seed {seed:#x}, try {n}: {}", String::from_utf8_lossy(&text));
            assert!(since.elapsed().as_secs() < 10, "{name}: seed {seed:#x}, try {n} takes for ever");
        }
    }
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + second).expect("a time")
}

fn key() -> SecretKey {
    SecretKey::from_seed(&[7; 32])
}

fn lease() -> Lease {
    let scope = Scope {
        paths_allowlist: vec!["/srv/data/*".parse().expect("a path"), "repo://calyx/tools".parse().expect("a path")],
        commands_allowlist: vec![
            "pytest -q **".parse().expect("a pattern"),
            "echo 'a b' '*'".parse().expect("a pattern"),
        ],
        env_allowlist: vec!["CI".to_owned()],
        ..Scope::default()
    };
    let draft = Draft {
        lease_id: LeaseId::new("20270115-080000", 1),
        intent_id: Some("INT-1".to_owned()),
        actor: "tests".to_owned(),
        audience: Audience { home: Some("h".to_owned()), host: None, boot: None },
        issued_at: at(0),
        expires_at: at(300),
        terms: Terms { capability: "exec_staging".to_owned(), scope, limits: LeaseLimits::default() },
        policy_digest: "sha256:0".to_owned(),
        parent: None,
    };
    let mut lease = draft.sign(&key()).expect("a lease");
    lease.cosign(&SecretKey::from_seed(&[8; 32]), Role::Human, "ann".to_owned(), at(1)).expect("signed");
    lease
}

fn trust() -> TrustStore {
    let mut trust = TrustStore::default();
    trust.trust(key().public(), Role::Human, "me".to_owned(), at(-1), None).expect("new");
    trust
}

#[test]
fn leases_that_were_bent() {
    let whole = lease().to_text();
    feed("lease", &[whole], |text| {
        if let Ok(lease) = Lease::read(text) {
            assert_eq!(lease.to_text(), text, "a lease has one text");
        }
    });
}

#[test]
fn policies_that_were_bent() {
    feed("policy", &[DEFAULT_POLICY.as_bytes().to_vec()], |text| {
        if let Ok(policy) = Policy::read(text) {
            assert!(policy.capabilities().all(|row| row.capability.minutes_max > 0));
        }
    });
}

#[test]
fn patterns_that_were_bent() {
    let corpus = ["pytest -q **", "git apply --check *", "'my tool' \"a b\" \\\\*", "/usr/bin/x", "**"]
        .map(|text| text.as_bytes().to_vec());
    feed("command", &corpus, |text| {
        let Ok(text) = std::str::from_utf8(text) else { return };
        if let Ok(pattern) = text.parse::<CommandPattern>() {
            assert_eq!(pattern.to_string().parse::<CommandPattern>().as_ref(), Ok(&pattern));
            assert!(pattern.is_within(&pattern));
        }
    });
    let corpus = ["/srv/data/*", "repo://calyx/tools/**", "/", "/a/b/c"].map(|text| text.as_bytes().to_vec());
    feed("path", &corpus, |text| {
        let Ok(text) = std::str::from_utf8(text) else { return };
        if let Ok(pattern) = text.parse::<PathPattern>() {
            assert_eq!(pattern.to_string().parse::<PathPattern>().as_ref(), Ok(&pattern));
        }
    });
}

#[test]
fn ledgers_that_were_bent() {
    let entry = |seq: u64, prev: Hash| Entry {
        seq,
        prev,
        ledger: "0123456789abcdef".to_owned(),
        at: at(1),
        event: Event::ExecStarted.name().to_owned(),
        ids: Ids { run_id: Some(RunId::new("20270115-080000", seq)), ..Ids::default() },
        details: json!({ "command": ["echo", "é\n"], "wall_ms": 1.5 }).as_object().expect("an object").clone(),
    };
    let mut text = Vec::new();
    let mut prev = Hash::NONE;
    for seq in 0..5 {
        let line = entry(seq, prev).to_line().expect("exact");
        prev = Hash::of(&line);
        text.extend_from_slice(&line);
        text.push(b'\n');
    }
    let head = Head::sign(&key(), "0123456789abcdef", (4, prev), (0, text.len() as u64), at(2));
    let trust = trust();
    let audit = |text: &[u8]| {
        let mut auditor = Auditor::new([&head]);
        text.split_inclusive(|byte| *byte == b'\n').for_each(|line| auditor.line(line));
        auditor.finish(Some(&head), &[], &trust)
    };
    assert_eq!(audit(&text).finding, None, "the control");
    feed("ledger", &[text.clone()], |bent| {
        assert!(bent == text || audit(bent).finding.is_some(), "a change that was not found");
        for line in bent.split(|byte| *byte == b'\n') {
            if let Some((entry, line)) =
                Entry::read(line).ok().and_then(|entry| Some((entry.clone(), entry.to_line().ok()?)))
            {
                assert_eq!(Entry::read(&line).expect("it reads back"), entry);
            }
        }
    });
    let whole = head.to_text();
    feed("head", &[whole], |bent| {
        if let Ok(found) = Head::read(bent.trim_ascii_end()) {
            assert!(found == head || found.check(&trust).is_err(), "a head that was not signed");
        }
    });
}

#[test]
fn receipts_and_trust_stores_that_were_bent() {
    let files = [("stdout.log".to_owned(), "00".to_owned())];
    let statement = Statement::new(files, json!({ "run_id": "run-1", "ended_at": at(1), "usage": { "wall_ms": 1.5 } }));
    let whole = statement.sign(&key()).to_text();
    let trust = trust();
    let verified = |text: &[u8]| Envelope::read(text).and_then(|envelope| envelope.verify(&trust));
    assert_eq!(verified(&whole).expect("the control"), statement);
    feed("receipt", &[whole], |bent| {
        if let Ok(found) = verified(bent) {
            assert_eq!(found, statement, "a statement that was not signed");
        }
    });
    feed("trust", &[trust.to_text()], |bent| {
        if let Ok(store) = TrustStore::read(bent) {
            assert!(store.keys().all(|(kid, key)| key.public.id() == *kid));
        }
    });
}
