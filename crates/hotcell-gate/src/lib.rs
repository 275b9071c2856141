//! The one door: every run passes here and leaves its artifacts behind.
//!
//! ```text
//! Plan ─▶ Gate::run ─▶ runs/<id>/ made, cells/<id>.json written ─▶ the cell runs ─▶ meta.json finished
//! ```
//!
//! Nothing is started before its record exists, and a record that cannot be written stops the run.
//! There is no second way to start a process.

pub mod door;
pub mod home;
pub mod live;
pub mod record;

pub use door::{Gate, GateError, Request, Viewer};
pub use home::{Home, HomeError};
pub use record::{Record, RecordError, Runs};
