//! The one door: every run passes here and leaves its artifacts behind.
//!
//! ```text
//! Plan + Permission ─▶ Gate::run ─▶ lease verified, told, runs/<id>/ made ─▶ the cell runs ─▶ artifacts, receipt, told
//! ```
//!
//! Nothing is started before its record exists, and a record that cannot be written stops the run.
//! There is no second way to start a process.

pub mod authority;
mod blobs;
pub mod diff;
pub mod door;
mod evidence;
pub mod gc;
pub mod home;
pub mod keys;
mod lapse;
pub mod leases;
pub mod live;
mod lock;
mod originals;
pub mod pack;
pub mod permit;
pub mod plain;
mod queue;
pub mod record;
pub mod select;
pub mod session;
pub mod templates;
mod transition;

pub use authority::{Authority, AuthorityError};
pub use diff::{Diff, DiffError};
pub use door::{Gate, GateError, Ran, Request, Viewer};
pub use home::{Home, HomeError};
pub use keys::{Keys, KeysError};
pub use pack::{PackError, Packs};
pub use permit::Permission;
pub use record::{Record, RecordError, Runs};
pub use select::Selection;
pub use templates::Templates;
pub use transition::Conflict;
