//! What is told and signed of a run: the entries of its beginning and its end, and its receipt.

use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use hotcell_authority::{SecretKey, digest};
use hotcell_base::Outcome;
use hotcell_base::exact::hex;
use hotcell_base::text::{shown, shown_path};
use hotcell_cell::{Limits, Plan};
use hotcell_ledger::{Envelope, Event, Ids, News, Statement, redact};
use jiff::Timestamp;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::blobs;
use crate::permit::{Permit, redacted};
use crate::record::{Kind, Record};

fn ids(record: &Record) -> Ids {
    Ids {
        lease_id: record.lease_id.clone(),
        run_id: Some(record.run_id.clone()),
        attempt_id: record.attempt_id.clone(),
        intent_id: record.intent_id.clone(),
        kid: None,
    }
}

/// What is told before anything of a run is made.
pub(crate) fn started(record: &Record, plan: &Plan, permit: &Permit, request_digest: &str) -> News {
    let labels: Map<String, Value> = record
        .labels
        .iter()
        .map(|(key, value)| {
            let pair = redact::word(&format!("{key}={value}"));
            (key.clone(), pair.strip_prefix(&format!("{key}=")).unwrap_or(redact::REDACTED).into())
        })
        .collect();
    let shows =
        plan.shows().iter().map(|(path, writable)| json!([shown_path(path), if *writable { "write" } else { "read" }]));
    let details = json!({
        "kind": kind(record.kind),
        "session": record.session,
        "name": record.name,
        "labels": labels,
        "command": redacted(plan),
        "program": plan.program().map(shown_path),
        "paths": shows.collect::<Vec<_>>(),
        "limits": limits(plan.limits()),
        "ancestors": permit.lease.ancestors().iter().map(|(id, _)| id).collect::<Vec<_>>(),
        "capability": permit.lease.lease().capability,
        "policy_digest": record.policy_digest,
        "plan_digest": record.plan_digest,
        "digest": request_digest,
    });
    News::new(Event::ExecStarted, record.started_at, ids(record), details)
}

/// What is told when it is over.
pub(crate) fn ended(record: &Record, receipt: Option<&str>, recovered: bool) -> Vec<News> {
    let at = record.ended_at.unwrap_or_else(Timestamp::now);
    let outcome = record.outcome.unwrap_or(Outcome::Unknown);
    let mut news = Vec::new();
    let mut tell = |event, details| news.push(News::new(event, at, ids(record), details));
    match outcome {
        Outcome::Oom | Outcome::Pids | Outcome::Disk | Outcome::OutputLimit | Outcome::Timeout => {
            tell(Event::ResourceViolation, json!({ "violation": outcome, "limit": record.limit }));
        }
        Outcome::LeaseExpired => tell(Event::LeaseExpired, json!({})),
        _ => {}
    }
    let event = match outcome {
        Outcome::Timeout => Event::ExecTimeout,
        Outcome::Oom
        | Outcome::Pids
        | Outcome::Disk
        | Outcome::OutputLimit
        | Outcome::Killed
        | Outcome::LeaseExpired
        | Outcome::LeaseRevoked => Event::ExecKilled,
        _ => Event::ExecFinished,
    };
    let mut details = json!({
        "outcome": outcome,
        "exit_code": record.exit_code,
        "exit_status": record.exit_status(),
        "signal": record.signal,
        "limit": record.limit,
        "error": record.error.as_deref().map(redact::word),
        "usage": usage(record),
        "stdout_sha256": record.stdout_sha256,
        "stderr_sha256": record.stderr_sha256,
        "receipt_digest": receipt,
    });
    if recovered {
        details["recovered"] = true.into();
    }
    tell(event, details);
    news
}

fn kind(kind: Kind) -> &'static str {
    match kind {
        Kind::Run => "run",
        Kind::Session => "session",
        Kind::Exec => "exec",
        Kind::Template => "template",
    }
}

fn usage(record: &Record) -> Value {
    json!({
        "wall_ms": record.wall_ms,
        "cpu_ms": record.cpu_ms,
        "memory_peak_bytes": record.memory_peak_bytes,
        "pids_peak": record.pids_peak,
        "disk_peak_bytes": record.disk_peak_bytes,
        "io_read_bytes": record.io_read_bytes,
        "io_write_bytes": record.io_write_bytes,
        "stdout_bytes": record.stdout_bytes,
        "stderr_bytes": record.stderr_bytes,
    })
}

fn limits(limits: &Limits) -> Value {
    let ms = |time: std::time::Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX).min(1 << 52);
    json!({
        "time_ms": ms(limits.time),
        "cpus_milli": limits.cpus.milli,
        "cpu_time_ms": limits.cpu_time.map(ms),
        "memory_bytes": limits.memory.0.min(1 << 52),
        "pids": limits.pids,
        "fds": limits.fds,
        "disk_bytes": limits.disk.0.min(1 << 52),
        "output_bytes": limits.output.0.min(1 << 52),
        "file_size_bytes": limits.file_size.map(|size| size.0.min(1 << 52)),
    })
}

/// The receipt of a run that is over: which files it left, and what they are the result of.
pub(crate) fn receipt(record: &Record, meta: &[u8], lease: &[u8], told: Option<u64>, key: &SecretKey) -> Envelope {
    let file = |name: &str, sha256: String| (name.to_owned(), sha256);
    // What was kept is less than what came, if it was cut.
    let log = |name: &str, sha256: &str, truncated: bool| {
        let kept = || File::open(record.artifacts.join(name)).ok().and_then(|log| blobs::digest(&log).ok());
        let sha256 = if truncated || sha256.is_empty() { kept().unwrap_or_default() } else { sha256.to_owned() };
        file(name, sha256)
    };
    let of = |bytes: &[u8]| hex(&Sha256::digest(bytes));
    let mut files = vec![
        log("stdout.log", &record.stdout_sha256, record.stdout_truncated),
        log("stderr.log", &record.stderr_sha256, record.stderr_truncated),
        file("exit_code.txt", of(record.exit_status().to_string().as_bytes())),
        file("meta.json", of(meta)),
    ];
    let manifest = record.artifacts.join("diff/manifest.json");
    if let Some(sha256) = File::open(manifest).ok().and_then(|manifest| blobs::digest(&manifest).ok()) {
        files.push(file("diff/manifest.json", sha256));
    }
    let predicate = json!({
        "run_id": record.run_id,
        "kind": kind(record.kind),
        "session": record.session,
        "lease_id": record.lease_id,
        "intent_id": record.intent_id,
        "attempt_id": record.attempt_id,
        "policy_digest": record.policy_digest,
        "plan_digest": record.plan_digest,
        "command": redact::command(&record.command),
        "walls": record.isolation.as_ref().map(|isolation| &isolation.walls),
        "tier": record.isolation.as_ref().map(|isolation| &isolation.tier),
        "outcome": record.outcome,
        "exit_code": record.exit_code,
        "signal": record.signal,
        "limit": record.limit,
        "usage": usage(record),
        "started_at": record.started_at,
        "ended_at": record.ended_at,
        "lease_digest": digest(lease),
        "ledger": { "id": record.ledger, "started_at_seq": told },
    });
    Statement::new(files, predicate).sign(key)
}

/// The digest of everything that was decided about a cell.
pub(crate) fn plan_digest(plan: &Plan) -> String {
    let walls = plan.walls().iter().map(|(wall, standing)| format!("{wall} {standing}").into_bytes());
    let shows =
        plan.shows().iter().map(|(path, writable)| [path.as_os_str().as_bytes(), &[u8::from(*writable)]].concat());
    let limits = format!("{:?} {:?}", plan.limits(), plan.identity()).into_bytes();
    let parts = parts(plan).chain(walls).chain(shows).chain([limits]);
    format!("sha256:{}", hex(&hashed(parts)))
}

/// The digest of what was asked for: a repeated attempt must be of the same.
pub(crate) fn request_digest(plan: &Plan) -> String {
    let words = plan.argv().iter().map(|word| shown(word.as_bytes()));
    let shows = plan.shows().iter().map(|(path, writable)| format!("{} {writable}", shown_path(path)));
    let asked = plan.asked().iter().map(|name| {
        let value = plan.env().get(name).map(|value| shown(value.as_bytes())).unwrap_or_default();
        format!("{}={value}", shown(name.as_bytes()))
    });
    let cwd = shown_path(plan.cwd());
    let text: Vec<Vec<String>> = vec![words.collect(), shows.collect(), asked.collect(), vec![cwd]];
    digest(&serde_json::to_vec(&text).expect("plain data"))
}

/// What a cell is, but for its limits and walls.
pub(crate) fn parts(plan: &Plan) -> impl Iterator<Item = Vec<u8>> {
    let words = plan.argv().iter().map(|word| word.as_bytes().to_vec());
    let variables = plan.env().iter().map(|(name, value)| [name.as_bytes(), b"=", value.as_bytes()].concat());
    let view = plan.view().iter().map(|entry| entry.to_string().into_bytes());
    let places = [plan.program().unwrap_or(Path::new("")), plan.cwd()].map(|path| path.as_os_str().as_bytes().to_vec());
    words.chain(variables).chain(view).chain(places)
}

/// The hash of parts, none of which can be taken for a part of another.
pub(crate) fn hashed(parts: impl Iterator<Item = Vec<u8>>) -> [u8; 32] {
    let mut digest = Sha256::new();
    for part in parts {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    digest.finalize().into()
}
