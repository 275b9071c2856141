//! Entries: one line each.

use hotcell_authority::KeyId;
use hotcell_base::{CanonicalError, LeaseId, RunId, to_canonical};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::chain::Hash;

/// The longest line.
pub const LINE_BYTES_MAX: usize = 1 << 20;

macro_rules! events {
    ($($(#[$doc:meta])* $variant:ident => $name:literal,)*) => {
        /// What can happen.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum Event { $($(#[$doc])* $variant,)* }

        impl Event {
            /// Every event there is.
            pub const ALL: &[Event] = &[$(Event::$variant,)*];

            /// Its name in the ledger.
            pub fn name(self) -> &'static str {
                match self { $(Event::$variant => $name,)* }
            }
        }
    };
}

events! {
    /// A ledger begins.
    LedgerCreated => "ledger_event.CREATED",
    /// A crash left something unfinished at the end.
    LedgerRecovered => "ledger_event.RECOVERED",
    /// A key was made.
    KeyCreated => "key_event.CREATED",
    /// A key is trusted from here on.
    KeyTrusted => "key_event.TRUSTED",
    /// A key took another's place.
    KeyRotated => "key_event.ROTATED",
    /// A key is trusted no more.
    KeyRevoked => "key_event.REVOKED",
    /// A lease was issued.
    LeaseIssued => "lease_event.ISSUED",
    /// A lease was checked, and holds.
    LeaseVerified => "lease_event.VERIFIED",
    /// A lease was checked, and does not hold or does not allow what was asked.
    LeaseDenied => "lease_event.DENIED",
    /// A lease came to its end while something ran.
    LeaseExpired => "lease_event.EXPIRED",
    /// A lease was taken back.
    LeaseRevoked => "lease_event.REVOKED",
    /// A lease was approved.
    LeaseCosigned => "lease_event.COSIGNED",
    /// A command is about to run.
    ExecStarted => "exec_event.STARTED",
    /// A command ended by itself, or never began.
    ExecFinished => "exec_event.FINISHED",
    /// A command ran for too long.
    ExecTimeout => "exec_event.TIMEOUT",
    /// A command was ended.
    ExecKilled => "exec_event.KILLED",
    /// What was kept of a run was removed.
    ExecRemoved => "exec_event.REMOVED",
    /// A limit was met.
    ResourceViolation => "resource_event.VIOLATION",
}

/// Whom an entry is about.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub struct Ids {
    /// A lease.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease_id: Option<LeaseId>,
    /// A run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_id: Option<RunId>,
    /// An attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempt_id: Option<String>,
    /// An intent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub intent_id: Option<String>,
    /// A key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kid: Option<KeyId>,
}

/// Something that happened, before it has its place.
#[derive(Clone, PartialEq, Debug)]
pub struct News {
    /// What.
    pub event: Event,
    /// When.
    pub at: Timestamp,
    /// To whom.
    pub ids: Ids,
    /// All the rest, without secrets.
    pub details: Map<String, Value>,
}

impl News {
    /// Something that happened. Details are an object; anything else is none.
    pub fn new(event: Event, at: Timestamp, ids: Ids, details: Value) -> News {
        let details = match details {
            Value::Object(details) => details,
            _ => Map::new(),
        };
        News { event, at, ids, details }
    }
}

/// A line of a ledger.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Entry {
    /// Its place, from 0.
    pub seq: u64,
    /// The hash of the line before.
    pub prev: Hash,
    /// Which ledger.
    pub ledger: String,
    /// When.
    pub at: Timestamp,
    /// What.
    pub event: String,
    /// To whom.
    #[serde(flatten)]
    pub ids: Ids,
    /// All the rest.
    #[serde(default)]
    pub details: Map<String, Value>,
}

impl Entry {
    /// Its line, without the newline.
    pub fn to_line(&self) -> Result<Vec<u8>, CanonicalError> {
        to_canonical(self)
    }

    /// Reads a line.
    pub fn read(line: &[u8]) -> Result<Entry, serde_json::Error> {
        serde_json::from_slice(line)
    }
}

/// What holds a line in its place: all that the audit of most lines needs.
#[derive(Deserialize)]
pub(crate) struct Link<'a> {
    pub(crate) seq: u64,
    pub(crate) prev: Hash,
    #[serde(borrow)]
    pub(crate) ledger: std::borrow::Cow<'a, str>,
}
