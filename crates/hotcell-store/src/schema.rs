//! The tables, and how older ones become these.

use std::path::Path;

use rusqlite::{Connection, TransactionBehavior};

use crate::StoreError;

/// Each step leads from one version to the next. A step that was released is never changed.
pub(crate) const STEPS: &[&str] = &["
    CREATE TABLE ledger (
        only INTEGER PRIMARY KEY CHECK (only = 0),
        id TEXT NOT NULL,
        segment INTEGER NOT NULL,
        offset INTEGER NOT NULL,
        seq INTEGER NOT NULL,
        hash TEXT NOT NULL
    ) STRICT;

    CREATE TABLE leases (
        lease_id TEXT PRIMARY KEY,
        intent_id TEXT,
        actor TEXT NOT NULL,
        capability TEXT NOT NULL,
        issued_at TEXT NOT NULL,
        expires_at TEXT NOT NULL,
        parent TEXT,
        runs_max INTEGER NOT NULL,
        self_issued INTEGER NOT NULL,
        commands TEXT NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX leases_by_time ON leases (self_issued, issued_at DESC);
    CREATE INDEX leases_by_parent ON leases (parent);

    CREATE TABLE revocations (
        lease_id TEXT PRIMARY KEY,
        at TEXT NOT NULL
    ) STRICT, WITHOUT ROWID;

    CREATE TABLE runs (
        run_id TEXT PRIMARY KEY,
        kind TEXT NOT NULL,
        session TEXT,
        name TEXT,
        labels TEXT NOT NULL,
        command TEXT NOT NULL,
        lease_id TEXT,
        attempt_id TEXT,
        started_at TEXT NOT NULL,
        ended_at TEXT,
        outcome TEXT,
        exit_status INTEGER,
        wall_ms REAL,
        memory_peak_bytes INTEGER
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX runs_by_time ON runs (started_at DESC, run_id DESC);
    CREATE INDEX runs_by_name ON runs (name, started_at DESC) WHERE name IS NOT NULL;
    CREATE INDEX runs_by_outcome ON runs (outcome, started_at DESC);
    CREATE INDEX runs_by_lease ON runs (lease_id, started_at DESC);
    CREATE INDEX runs_by_session ON runs (session) WHERE session IS NOT NULL;

    CREATE TABLE labels (
        key TEXT NOT NULL,
        value TEXT NOT NULL,
        -- The run's own, so that the newest of a label are found without looking at all of them.
        started_at TEXT NOT NULL,
        run_id TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
        PRIMARY KEY (key, value, started_at DESC, run_id DESC)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX labels_by_run ON labels (run_id);

    CREATE TABLE samples (
        run_id TEXT NOT NULL REFERENCES runs ON DELETE CASCADE,
        key TEXT NOT NULL,
        step INTEGER NOT NULL,
        value REAL NOT NULL,
        PRIMARY KEY (run_id, key, step)
    ) STRICT, WITHOUT ROWID;

    CREATE TABLE uses (
        lease_id TEXT NOT NULL,
        run_id TEXT NOT NULL,
        PRIMARY KEY (lease_id, run_id)
    ) STRICT, WITHOUT ROWID;

    CREATE TABLE attempts (
        attempt_id TEXT PRIMARY KEY,
        run_id TEXT NOT NULL,
        digest TEXT NOT NULL,
        reserved_at TEXT NOT NULL
    ) STRICT, WITHOUT ROWID;
"];

/// The version this hotcell knows.
pub const VERSION: i64 = STEPS.len() as i64;

/// Brings a store to the version this hotcell knows, a step at a time.
pub(crate) fn migrate(connection: &mut Connection, path: &Path) -> Result<(), StoreError> {
    migrate_by(connection, path, STEPS)
}

pub(crate) fn migrate_by(connection: &mut Connection, path: &Path, steps: &[&str]) -> Result<(), StoreError> {
    let failed = |source| StoreError::Sql { path: path.to_owned(), what: "brought to this version", source };
    let version = |connection: &Connection| {
        connection.pragma_query_value(None, "user_version", |row| row.get::<_, i64>(0)).map_err(failed)
    };
    let known = i64::try_from(steps.len()).expect("a few");
    if version(connection)? == known {
        return Ok(());
    }
    // Looked at again once nobody else can change it.
    let transaction = connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(failed)?;
    let found = version(&transaction)?;
    if found > known {
        return Err(StoreError::Newer { path: path.to_owned(), found, known });
    }
    for step in &steps[usize::try_from(found.max(0)).expect("not negative")..] {
        transaction.execute_batch(step).map_err(failed)?;
    }
    transaction.pragma_update(None, "user_version", known).map_err(failed)?;
    transaction.commit().map_err(failed)
}
