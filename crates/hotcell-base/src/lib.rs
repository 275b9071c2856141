//! The words every other crate uses: ids, units, outcomes, and text that is safe to show.
//!
//! Pure: nothing here reads a clock, a file or the environment.

pub mod id;
pub mod outcome;
pub mod text;
pub mod units;

pub use id::RunId;
pub use outcome::Outcome;
pub use units::{Bytes, Cpus, UnitError};
