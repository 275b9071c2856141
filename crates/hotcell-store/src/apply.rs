//! What each entry of the ledger means for the tables.

use hotcell_ledger::file::{Place, Position, read_from};
use hotcell_ledger::{Entry, Event};
use jiff::Timestamp;
use rusqlite::{Connection, OptionalExtension, params};
use serde_json::{Map, Value};

use crate::StoreError;

/// How far the ledger was read.
#[derive(Clone, Debug)]
pub(crate) struct Checkpoint {
    pub(crate) id: String,
    pub(crate) position: Position,
    pub(crate) seq: u64,
    pub(crate) hash: String,
}

pub(crate) fn checkpoint(connection: &Connection) -> rusqlite::Result<Option<Checkpoint>> {
    let mut statement = connection.prepare_cached("SELECT id, segment, offset, seq, hash FROM ledger")?;
    let number = |row: &rusqlite::Row<'_>, idx| row.get::<_, i64>(idx).map(i64::cast_unsigned);
    statement
        .query_row([], |row| {
            let position = Position { segment: number(row, 1)?, offset: number(row, 2)? };
            Ok(Checkpoint { id: row.get(0)?, position, seq: number(row, 3)?, hash: row.get(4)? })
        })
        .optional()
}

/// Reads the ledger from where it was left; from the beginning, if it is not the one that was read before. Gives how many
/// entries that were.
pub(crate) fn catch_up(
    connection: &Connection,
    ledger: &Place,
    failed: &dyn Fn(rusqlite::Error) -> StoreError,
) -> Result<u64, StoreError> {
    let mut before = checkpoint(connection).map_err(failed)?;
    let head = hotcell_ledger::file::head(ledger)?;
    if let (Some(point), Some(head)) = (&before, &head) {
        let is_read = point.seq == head.seq && point.hash == head.hash.to_string();
        if is_read {
            return Ok(0);
        }
        if point.id != head.ledger || point.seq >= head.seq {
            forget(connection).map_err(failed)?;
            before = None;
        }
    }
    loop {
        let mut reader = Reader { connection, at: before.clone(), error: None, is_other: false };
        let from = before.as_ref().map(|point| point.position).unwrap_or_default();
        let position = read_from(ledger, from, |entry, hash| reader.take(&entry, &hash.to_string()))?;
        let Reader { at, error, is_other, .. } = reader;
        if let Some(error) = error {
            return Err(failed(error));
        }
        if is_other && before.is_some() {
            // It was put right after damage, or is another one: what is in the tables may never have been.
            forget(connection).map_err(failed)?;
            before = None;
            continue;
        }
        let Some(point) = at else { return Ok(0) };
        remember(connection, &Checkpoint { position, ..point.clone() }).map_err(failed)?;
        return Ok(point.seq.saturating_sub(before.map_or(0, |before| before.seq)));
    }
}

struct Reader<'a> {
    connection: &'a Connection,
    at: Option<Checkpoint>,
    error: Option<rusqlite::Error>,
    is_other: bool,
}

impl Reader<'_> {
    fn take(&mut self, entry: &Entry, hash: &str) -> bool {
        let follows = match &self.at {
            Some(point) => entry.seq == point.seq + 1 && entry.prev.to_string() == point.hash,
            None => entry.seq == 0,
        };
        if !follows {
            self.is_other = true;
            return false;
        }
        if let Err(error) = apply(self.connection, entry) {
            self.error = Some(error);
            return false;
        }
        let position = Position::default();
        self.at = Some(Checkpoint { id: entry.ledger.clone(), position, seq: entry.seq, hash: hash.to_owned() });
        true
    }
}

fn forget(connection: &Connection) -> rusqlite::Result<()> {
    // Not what was reserved: that may be somebody's who is about to run.
    connection.execute_batch("DELETE FROM runs; DELETE FROM leases; DELETE FROM revocations; DELETE FROM ledger;")
}

fn remember(connection: &Connection, point: &Checkpoint) -> rusqlite::Result<()> {
    let sql = "INSERT OR REPLACE INTO ledger (only, id, segment, offset, seq, hash) VALUES (0, ?1, ?2, ?3, ?4, ?5)";
    let number = u64::cast_signed;
    let Checkpoint { id, position, seq, hash } = point;
    let values = params![id, number(position.segment), number(position.offset), number(*seq), hash];
    connection.prepare_cached(sql)?.execute(values).map(drop)
}

pub(crate) fn used(connection: &Connection, lease_id: &str, run_id: &str) -> rusqlite::Result<()> {
    let sql = "INSERT OR IGNORE INTO uses (lease_id, run_id) VALUES (?1, ?2)";
    connection.prepare_cached(sql)?.execute([lease_id, run_id]).map(drop)
}

pub(crate) fn attempted(
    connection: &Connection,
    attempt_id: &str,
    run_id: &str,
    digest: &str,
    now: Timestamp,
) -> rusqlite::Result<()> {
    let sql = "INSERT OR IGNORE INTO attempts (attempt_id, run_id, digest, reserved_at) VALUES (?1, ?2, ?3, ?4)";
    connection.prepare_cached(sql)?.execute(params![attempt_id, run_id, digest, time(now)]).map(drop)
}

/// Times as text of one length, so that they sort as they are.
pub(crate) fn time(time: Timestamp) -> String {
    format!("{time:.6}")
}

fn apply(connection: &Connection, entry: &Entry) -> rusqlite::Result<()> {
    let is = |event: Event| entry.event == event.name();
    if is(Event::ExecStarted) {
        started(connection, entry)
    } else if [Event::ExecFinished, Event::ExecTimeout, Event::ExecKilled].into_iter().any(is) {
        ended(connection, entry)
    } else if is(Event::ExecRemoved) {
        let run_id = entry.ids.run_id.as_ref().map(|id| id.as_str());
        connection.prepare_cached("DELETE FROM runs WHERE run_id = ?1")?.execute([run_id]).map(drop)
    } else if is(Event::LeaseIssued) {
        issued(connection, entry)
    } else if is(Event::LeaseRevoked) {
        let sql = "INSERT OR IGNORE INTO revocations (lease_id, at) VALUES (?1, ?2)";
        let lease_id = entry.ids.lease_id.as_ref().map(|id| id.as_str());
        connection.prepare_cached(sql)?.execute(params![lease_id, time(entry.at)]).map(drop)
    } else {
        // Told for the record, and nothing that is asked for.
        Ok(())
    }
}

fn text<'a>(details: &'a Map<String, Value>, name: &str) -> Option<&'a str> {
    details.get(name).and_then(Value::as_str)
}

fn started(connection: &Connection, entry: &Entry) -> rusqlite::Result<()> {
    let (details, ids) = (&entry.details, &entry.ids);
    let Some(run_id) = ids.run_id.as_ref().map(|id| id.as_str()) else { return Ok(()) };
    let lease_id = ids.lease_id.as_ref().map(|id| id.as_str());
    let words = details.get("command").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let command: Vec<&str> = words.iter().filter_map(Value::as_str).collect();
    let labels = details.get("labels").and_then(Value::as_object);
    let sql =
        "INSERT OR REPLACE INTO runs (run_id, kind, session, name, labels, command, lease_id, attempt_id, started_at)
               VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)";
    connection.prepare_cached(sql)?.execute(params![
        run_id,
        text(details, "kind").unwrap_or("run"),
        text(details, "session"),
        text(details, "name"),
        labels.map_or_else(|| "{}".to_owned(), |labels| serde_json::to_string(labels).unwrap_or_default()),
        command.join(" "),
        lease_id,
        ids.attempt_id,
        time(entry.at),
    ])?;
    for (key, value) in labels.into_iter().flatten() {
        let sql = "INSERT OR IGNORE INTO labels (key, value, started_at, run_id) VALUES (?1, ?2, ?3, ?4)";
        let value = value.as_str().unwrap_or_default();
        connection.prepare_cached(sql)?.execute(params![key, value, time(entry.at), run_id])?;
    }
    let ancestors = details.get("ancestors").and_then(Value::as_array);
    for id in lease_id.into_iter().chain(ancestors.into_iter().flatten().filter_map(Value::as_str)) {
        used(connection, id, run_id)?;
    }
    match &ids.attempt_id {
        Some(attempt_id) => {
            attempted(connection, attempt_id, run_id, text(details, "digest").unwrap_or_default(), entry.at)
        }
        None => Ok(()),
    }
}

fn ended(connection: &Connection, entry: &Entry) -> rusqlite::Result<()> {
    let details = &entry.details;
    let Some(run_id) = entry.ids.run_id.as_ref().map(|id| id.as_str()) else { return Ok(()) };
    let usage = details.get("usage").and_then(Value::as_object);
    let number = |name: &str| usage.and_then(|usage| usage.get(name)).and_then(Value::as_f64);
    let sql = "UPDATE runs SET ended_at = ?2, outcome = ?3, exit_status = ?4, wall_ms = ?5, memory_peak_bytes = ?6
               WHERE run_id = ?1";
    let changed = connection.prepare_cached(sql)?.execute(params![
        run_id,
        time(entry.at),
        text(details, "outcome"),
        details.get("exit_status").and_then(Value::as_i64),
        number("wall_ms"),
        usage.and_then(|usage| usage.get("memory_peak_bytes")).and_then(Value::as_i64),
    ])?;
    for (key, value) in usage.into_iter().flatten().filter(|_| changed > 0) {
        let Some(value) = value.as_f64() else { continue };
        let sql = "INSERT OR REPLACE INTO samples (run_id, key, step, value) VALUES (?1, ?2, 0, ?3)";
        connection.prepare_cached(sql)?.execute(params![run_id, key, value])?;
    }
    Ok(())
}

fn issued(connection: &Connection, entry: &Entry) -> rusqlite::Result<()> {
    let Some(lease_id) = entry.ids.lease_id.as_ref().map(|id| id.as_str()) else { return Ok(()) };
    let lease = &entry.details;
    let word = |name: &str| text(lease, name).unwrap_or_default();
    let commands = lease.get("commands").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let commands: Vec<&str> = commands.iter().filter_map(Value::as_str).collect();
    let sql = "INSERT OR REPLACE INTO leases
               (lease_id, intent_id, actor, capability, issued_at, expires_at, parent, runs_max, self_issued, commands)
               VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)";
    let values = params![
        lease_id,
        entry.ids.intent_id,
        word("actor"),
        word("capability"),
        word("issued_at"),
        word("expires_at"),
        text(lease, "parent"),
        lease.get("runs_max").and_then(Value::as_i64).unwrap_or(0),
        lease.get("self_issued").and_then(Value::as_bool).unwrap_or(false),
        commands.join("\n"),
    ];
    connection.prepare_cached(sql)?.execute(values).map(drop)
}
