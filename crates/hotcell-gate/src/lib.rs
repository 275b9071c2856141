//! The one door: every run passes here and leaves its artifacts behind.
//!
//! ```text
//! Plan ─▶ Gate::run ─▶ runs/<id>/ made, cells/<id>.json written ─▶ the cell runs ─▶ meta.json finished
//! ```
//!
//! Nothing is started before its record exists, and a record that cannot be written stops the run.
//! There is no second way to start a process.

mod blobs;
pub mod diff;
pub mod door;
pub mod gc;
pub mod home;
pub mod live;
mod lock;
mod originals;
pub mod pack;
pub mod plain;
mod queue;
pub mod record;
pub mod select;
pub mod session;
pub mod templates;
mod transition;

pub use diff::{Diff, DiffError};
pub use door::{Gate, GateError, Request, Viewer};
pub use home::{Home, HomeError};
pub use pack::{PackError, Packs};
pub use record::{Record, RecordError, Runs};
pub use select::Selection;
pub use templates::Templates;
pub use transition::Conflict;
