//! Everything that can be asked for: runs, leases, attempts, samples.
//!
//! ```text
//! ledger ──catch up──▶ hotcell.db ──▶ ls, lease list, how often a lease was used, what an attempt came to
//! ```
//!
//! The ledger is the truth; this is what it says, in a form that answers questions quickly. It remembers how far it has read, and
//! whoever asks has it read on first. If it is lost, it is read again from the beginning. A run that nobody asks about costs
//! it nothing.
//!
//! One thing begins here and not in the ledger: a reservation. Whoever wants to use a lease that others may use as well
//! takes one of its runs, and its attempt's name, in one transaction; then it is written down; then it runs.

mod apply;
mod query;
mod schema;

use std::path::{Path, PathBuf};
use std::time::Duration;

use hotcell_base::{LeaseId, RunId};
use hotcell_ledger::LedgerError;
use hotcell_ledger::file::Place;
use jiff::Timestamp;
use rusqlite::config::DbConfig;
use rusqlite::{Connection, OptionalExtension, TransactionBehavior, params};

pub use query::{LeaseFilter, LeaseRow, RunFilter, RunRow, Sample};
pub use schema::VERSION;

/// How long to wait for another writer.
const BUSY: Duration = Duration::from_secs(10);

/// When so many entries were read at once, what they wrote is put in its place.
const TIDY_AFTER: u64 = 1000;

/// A store that is open.
#[derive(Debug)]
pub struct Store {
    connection: Connection,
    ledger: Place,
}

/// Why the store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// SQLite or the disk failed us.
    #[error("the store `{}` cannot be {what}", path.display())]
    Sql {
        /// Which.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// What SQLite said.
        source: rusqlite::Error,
    },
    /// Made by a newer hotcell.
    #[error("the store `{}` has version {found}, and this hotcell knows versions up to {known}", path.display())]
    Newer {
        /// Which.
        path: PathBuf,
        /// Its version.
        found: i64,
        /// Ours.
        known: i64,
    },
    /// What it is made of cannot be read.
    #[error("the ledger cannot be read")]
    Ledger(#[from] LedgerError),
}

/// What is to be reserved.
#[derive(Clone, Debug)]
pub struct Reservation<'a> {
    /// The run that will be made.
    pub run_id: &'a RunId,
    /// The name of the attempt, if the caller gave it one.
    pub attempt_id: Option<&'a str>,
    /// What is attempted.
    pub digest: &'a str,
    /// The lease, and all it was made of, each with the most runs there may be.
    pub leases: &'a [(LeaseId, u32)],
    /// When.
    pub now: Timestamp,
}

/// How a reservation went.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Reserved {
    /// It is ours.
    New,
    /// This attempt was made before.
    Before {
        /// By this run.
        run_id: RunId,
        /// Of this.
        digest: String,
    },
    /// This lease has no runs left.
    Exhausted(LeaseId),
    /// This lease was revoked.
    Revoked(LeaseId),
}

impl Store {
    /// Opens the store of a ledger, and makes or updates it first if need be.
    pub fn open(path: &Path, ledger: Place) -> Result<Store, StoreError> {
        let failed = |what| move |source| StoreError::Sql { path: path.to_owned(), what, source };
        let mut connection = Connection::open(path).map_err(failed("opened"))?;
        let set_up = |connection: &Connection| {
            connection.busy_timeout(BUSY)?;
            connection.pragma_update(None, "journal_mode", "WAL")?;
            // What a power cut takes is in the ledger still, so that not every commit waits for the disk.
            connection.pragma_update(None, "synchronous", "NORMAL")?;
            connection.pragma_update(None, "foreign_keys", "ON")?;
            // Whoever closes it last need not tidy up: the next to open it does not mind.
            connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
            connection.set_prepared_statement_cache_capacity(64);
            Ok(())
        };
        set_up(&connection).map_err(failed("set up"))?;
        schema::migrate(&mut connection, path)?;
        Ok(Store { connection, ledger })
    }

    fn failed(&self, what: &'static str) -> impl Fn(rusqlite::Error) -> StoreError + use<> {
        let path = self.connection.path().map(PathBuf::from).unwrap_or_default();
        move |source| StoreError::Sql { path: path.clone(), what, source }
    }

    /// Reads what the ledger says since the last time.
    pub fn catch_up(&mut self) -> Result<(), StoreError> {
        let failed = self.failed("brought up to date");
        let ledger = self.ledger.clone();
        let transaction = self.connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(&failed)?;
        let n_read = apply::catch_up(&transaction, &ledger, &failed)?;
        transaction.commit().map_err(failed)?;
        if n_read > TIDY_AFTER {
            // Whoever opens it next reads all of what was written and not put in its place yet. While others read, it stays.
            let _later = self.connection.execute_batch("PRAGMA wal_checkpoint(TRUNCATE)");
        }
        Ok(())
    }

    /// Takes one run of each of these leases and the attempt's name, or nothing.
    pub fn reserve(&mut self, wanted: &Reservation<'_>) -> Result<Reserved, StoreError> {
        let failed = self.failed("written");
        let ledger = self.ledger.clone();
        let transaction = self.connection.transaction_with_behavior(TransactionBehavior::Immediate).map_err(&failed)?;
        apply::catch_up(&transaction, &ledger, &failed)?;
        let reserved = reserve(&transaction, wanted).map_err(&failed)?;
        // What was read meanwhile stays, whatever came of the rest.
        transaction.commit().map_err(failed)?;
        Ok(reserved)
    }

    /// How often a lease was used, itself or by leases made of it.
    pub fn runs_used(&self, id: &LeaseId) -> Result<u32, StoreError> {
        runs_used(&self.connection, id).map_err(self.failed("read"))
    }

    /// Whether a lease was revoked.
    pub fn is_revoked(&self, id: &LeaseId) -> Result<bool, StoreError> {
        is_revoked(&self.connection, id).map_err(self.failed("read"))
    }

    /// How far it has read: the last line and its hash.
    pub fn has_read(&self) -> Result<Option<(u64, String)>, StoreError> {
        apply::checkpoint(&self.connection)
            .map(|found| found.map(|point| (point.seq, point.hash)))
            .map_err(self.failed("read"))
    }
}

fn reserve(connection: &Connection, wanted: &Reservation<'_>) -> rusqlite::Result<Reserved> {
    if let Some(attempt_id) = wanted.attempt_id {
        let sql = "SELECT run_id, digest FROM attempts WHERE attempt_id = ?1";
        let mut statement = connection.prepare_cached(sql)?;
        let before = statement
            .query_row([attempt_id], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)))
            .optional()?;
        if let Some((run_id, digest)) = before {
            let run_id = run_id.parse().map_err(|_| rusqlite::Error::InvalidQuery)?;
            return Ok(Reserved::Before { run_id, digest });
        }
    }
    for (id, most) in wanted.leases {
        if is_revoked(connection, id)? {
            return Ok(Reserved::Revoked(id.clone()));
        }
        if runs_used(connection, id)? >= *most {
            return Ok(Reserved::Exhausted(id.clone()));
        }
    }
    for (id, _) in wanted.leases {
        apply::used(connection, id.as_str(), wanted.run_id.as_str())?;
    }
    if let Some(attempt_id) = wanted.attempt_id {
        apply::attempted(connection, attempt_id, wanted.run_id.as_str(), wanted.digest, wanted.now)?;
    }
    Ok(Reserved::New)
}

fn runs_used(connection: &Connection, id: &LeaseId) -> rusqlite::Result<u32> {
    let mut statement = connection.prepare_cached("SELECT count(*) FROM uses WHERE lease_id = ?1")?;
    statement.query_row(params![id.as_str()], |row| row.get(0))
}

fn is_revoked(connection: &Connection, id: &LeaseId) -> rusqlite::Result<bool> {
    let mut statement = connection.prepare_cached("SELECT 1 FROM revocations WHERE lease_id = ?1")?;
    statement.exists(params![id.as_str()])
}

#[cfg(test)]
mod tests;
