//! What was allowed, refused and done, so that nothing of it can be changed quietly.
//!
//! ```text
//! Event ──chain──▶ Entry: one line of canonical JSON, which names the hash of the line before
//!                    │ appended and synced, many at a time
//!                    ▼
//!                  ledger/current.jsonl, ledger/<first>-<last>.jsonl        head: the last line's hash, signed, kept apart
//!                    └───────────────── audit ◀── public keys, head, witness ──┘
//! ```
//!
//! Pure but for [`mod@file`]: entries, heads, the audit and receipts are functions of bytes.

pub mod audit;
pub mod chain;
pub mod entry;
pub mod file;
pub mod head;
pub mod receipt;
pub mod redact;

pub use audit::{Audit, Damage, Finding};
pub use chain::Hash;
pub use entry::{Entry, Event, Ids, News};
pub use file::{Ledger, LedgerError};
pub use head::Head;
pub use receipt::{Envelope, ReceiptError, Statement};
