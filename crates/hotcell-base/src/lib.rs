//! The words every other crate uses: ids, units, outcomes, and text that is safe to show.
//!
//! Pure: nothing here reads a clock, a file or the environment.

pub mod exact;
pub mod glob;
pub mod id;
pub mod outcome;
pub mod text;
pub mod units;

pub use exact::ExactPath;
pub use glob::Glob;
pub use id::{PackId, RunId};
pub use outcome::Outcome;
pub use units::{Bytes, Cpus, UnitError};
