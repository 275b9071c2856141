//! What is asked for.

use std::collections::BTreeMap;

use hotcell_base::LeaseId;
use jiff::Timestamp;
use rusqlite::types::{ToSql, Value};
use rusqlite::{OptionalExtension, Row};

use crate::apply::time;
use crate::{Store, StoreError};

/// Which runs.
#[derive(Clone, Debug, Default)]
pub struct RunFilter {
    /// With all of these labels.
    pub labels: Vec<(String, String)>,
    /// With this outcome; `running` stands for those that have none yet.
    pub outcome: Option<String>,
    /// That began then or later.
    pub since: Option<Timestamp>,
    /// Under this lease.
    pub lease: Option<String>,
    /// In this session, by the id of its run.
    pub session: Option<String>,
    /// Of this name.
    pub name: Option<String>,
    /// At most so many, the newest first; all if none.
    pub limit: Option<usize>,
}

/// A run in a list.
#[derive(Clone, PartialEq, Debug)]
pub struct RunRow {
    /// Its id.
    pub run_id: String,
    /// What kind of run.
    pub kind: String,
    /// The session it was in.
    pub session: Option<String>,
    /// Its name.
    pub name: Option<String>,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its command, without secrets.
    pub command: String,
    /// Its lease.
    pub lease_id: Option<String>,
    /// The attempt it was.
    pub attempt_id: Option<String>,
    /// When it began.
    pub started_at: String,
    /// When it ended.
    pub ended_at: Option<String>,
    /// How, in a word.
    pub outcome: Option<String>,
    /// The status that was passed on.
    pub exit_status: Option<i64>,
    /// How long it took.
    pub wall_ms: Option<f64>,
    /// The most memory it had.
    pub memory_peak_bytes: Option<u64>,
}

/// Which leases.
#[derive(Clone, Debug, Default)]
pub struct LeaseFilter {
    /// Those too that runs issued themselves.
    pub self_issued: bool,
    /// Only those that hold at this time.
    pub active_at: Option<Timestamp>,
    /// At most so many, the newest first; all if none.
    pub limit: Option<usize>,
}

/// A lease in a list.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LeaseRow {
    /// Its id.
    pub lease_id: String,
    /// What for.
    pub intent_id: Option<String>,
    /// For whom.
    pub actor: String,
    /// Under which capability.
    pub capability: String,
    /// From when.
    pub issued_at: String,
    /// Until when.
    pub expires_at: String,
    /// Made of which.
    pub parent: Option<String>,
    /// How many runs there may be.
    pub runs_max: u32,
    /// How many there were.
    pub runs_used: u32,
    /// Whether a run issued it for itself.
    pub self_issued: bool,
    /// When it was revoked.
    pub revoked_at: Option<String>,
    /// What may be run.
    pub commands: Vec<String>,
}

/// Something that was measured.
#[derive(Clone, PartialEq, Debug)]
pub struct Sample {
    /// What.
    pub key: String,
    /// The how-manieth time.
    pub step: u64,
    /// How much.
    pub value: f64,
}

/// Conditions and their values, put together as they come.
#[derive(Default)]
struct Where {
    conditions: Vec<String>,
    values: Vec<Value>,
}

impl Where {
    fn and(&mut self, condition: &str, values: impl IntoIterator<Item = String>) {
        self.conditions.push(condition.to_owned());
        self.values.extend(values.into_iter().map(Value::from));
    }

    fn sql(&self) -> String {
        if self.conditions.is_empty() { String::new() } else { format!("WHERE {}", self.conditions.join(" AND ")) }
    }

    fn values(&self) -> Vec<&dyn ToSql> {
        self.values.iter().map(|value| value as &dyn ToSql).collect()
    }
}

fn limit(limit: Option<usize>) -> String {
    limit.map(|limit| format!("LIMIT {limit}")).unwrap_or_default()
}

const RUN: &str =
    "runs.run_id, kind, session, name, labels, command, lease_id, attempt_id, runs.started_at, ended_at, outcome,
                   exit_status, wall_ms, memory_peak_bytes";

fn run(row: &Row<'_>) -> rusqlite::Result<RunRow> {
    let labels: String = row.get(4)?;
    Ok(RunRow {
        run_id: row.get(0)?,
        kind: row.get(1)?,
        session: row.get(2)?,
        name: row.get(3)?,
        labels: if labels == "{}" { BTreeMap::new() } else { serde_json::from_str(&labels).unwrap_or_default() },
        command: row.get(5)?,
        lease_id: row.get(6)?,
        attempt_id: row.get(7)?,
        started_at: row.get(8)?,
        ended_at: row.get(9)?,
        outcome: row.get(10)?,
        exit_status: row.get(11)?,
        wall_ms: row.get(12)?,
        memory_peak_bytes: row.get::<_, Option<i64>>(13)?.map(i64::cast_unsigned),
    })
}

impl Store {
    fn rows<T>(
        &self,
        sql: &str,
        values: &[&dyn ToSql],
        row: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Vec<T>, StoreError> {
        let read = || self.connection.prepare(sql)?.query_map(values, row)?.collect::<Result<Vec<T>, _>>();
        read().map_err(self.failed("read"))
    }

    /// Runs, the newest first.
    pub fn runs(&self, filter: &RunFilter) -> Result<Vec<RunRow>, StoreError> {
        let mut wanted = Where::default();
        // From one label's runs, which are in the order that is asked for, to those that have the others as well.
        let (from, order) = match filter.labels.first() {
            Some((key, value)) => {
                wanted.and("first.key = ? AND first.value = ?", [key.clone(), value.clone()]);
                ("labels AS first JOIN runs ON runs.run_id = first.run_id", "first")
            }
            None => ("runs", "runs"),
        };
        for (key, value) in filter.labels.iter().skip(1) {
            let condition = "EXISTS (SELECT 1 FROM labels WHERE key = ? AND value = ? \
                             AND started_at = runs.started_at AND labels.run_id = runs.run_id)";
            wanted.and(condition, [key.clone(), value.clone()]);
        }
        match filter.outcome.as_deref() {
            Some("running") => wanted.and("outcome IS NULL", []),
            Some(outcome) => wanted.and("outcome = ?", [outcome.to_owned()]),
            None => {}
        }
        for (condition, value) in [
            ("runs.started_at >= ?", filter.since.map(time)),
            ("lease_id = ?", filter.lease.clone()),
            ("session = ?", filter.session.clone()),
            ("name = ?", filter.name.clone()),
        ] {
            if let Some(value) = value {
                wanted.and(condition, [value]);
            }
        }
        let (condition, limit) = (wanted.sql(), limit(filter.limit));
        let sql = format!(
            "SELECT {RUN} FROM {from} {condition} ORDER BY {order}.started_at DESC, {order}.run_id DESC {limit}"
        );
        self.rows(&sql, &wanted.values(), run)
    }

    /// Leases, the newest first.
    pub fn leases(&self, filter: &LeaseFilter) -> Result<Vec<LeaseRow>, StoreError> {
        let mut wanted = Where::default();
        if !filter.self_issued {
            wanted.and("self_issued = 0", []);
        }
        if let Some(now) = filter.active_at {
            let now = now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
            wanted.and("expires_at > ? AND revocations.at IS NULL", [now]);
        }
        let (wanted_sql, limit) = (wanted.sql(), limit(filter.limit));
        self.lease_rows(
            &format!("{wanted_sql} ORDER BY issued_at DESC, leases.lease_id DESC {limit}"),
            &wanted.values(),
        )
    }

    /// One lease.
    pub fn lease(&self, id: &LeaseId) -> Result<Option<LeaseRow>, StoreError> {
        let id = id.as_str();
        Ok(self.lease_rows("WHERE leases.lease_id = ?", &[&id])?.pop())
    }

    fn lease_rows(&self, rest: &str, values: &[&dyn ToSql]) -> Result<Vec<LeaseRow>, StoreError> {
        let sql = format!(
            "SELECT leases.lease_id, intent_id, actor, capability, issued_at, expires_at, parent, runs_max, self_issued,
                    revocations.at, commands, (SELECT count(*) FROM uses WHERE uses.lease_id = leases.lease_id)
             FROM leases LEFT JOIN revocations USING (lease_id) {rest}"
        );
        let lease = |row: &Row<'_>| {
            let commands: String = row.get(10)?;
            Ok(LeaseRow {
                lease_id: row.get(0)?,
                intent_id: row.get(1)?,
                actor: row.get(2)?,
                capability: row.get(3)?,
                issued_at: row.get(4)?,
                expires_at: row.get(5)?,
                parent: row.get(6)?,
                runs_max: row.get(7)?,
                self_issued: row.get(8)?,
                revoked_at: row.get(9)?,
                commands: commands.lines().map(str::to_owned).collect(),
                runs_used: row.get(11)?,
            })
        };
        self.rows(&sql, values, lease)
    }

    /// Leases that were made of this one, and of those, and so on.
    pub fn descendants(&self, id: &LeaseId) -> Result<Vec<String>, StoreError> {
        let sql = "WITH RECURSIVE below (id) AS (
                       SELECT lease_id FROM leases WHERE parent = ?1
                       UNION SELECT lease_id FROM leases JOIN below ON parent = below.id
                   ) SELECT id FROM below";
        self.rows(sql, &[&id.as_str()], |row| row.get(0))
    }

    /// What was measured of a run.
    pub fn samples(&self, run_id: &str) -> Result<Vec<Sample>, StoreError> {
        let sql = "SELECT key, step, value FROM samples WHERE run_id = ?1 ORDER BY key, step";
        let sample = |row: &Row<'_>| {
            Ok(Sample { key: row.get(0)?, step: row.get::<_, i64>(1)?.cast_unsigned(), value: row.get(2)? })
        };
        self.rows(sql, &[&run_id], sample)
    }

    /// The newest run of a name.
    pub fn newest_named(&self, name: &str) -> Result<Option<String>, StoreError> {
        let sql = "SELECT run_id FROM runs WHERE name = ?1 ORDER BY started_at DESC LIMIT 1";
        self.connection.query_row(sql, [name], |row| row.get(0)).optional().map_err(self.failed("read"))
    }
}
