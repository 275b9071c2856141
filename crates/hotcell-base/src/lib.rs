//! The words every other crate uses: ids, units, outcomes, canonical JSON, and text that is safe to show.
//!
//! Pure: nothing here reads a clock, a file or the environment.

pub mod canonical;
pub mod exact;
pub mod glob;
pub mod id;
pub mod outcome;
pub mod text;
pub mod units;

pub use canonical::{CanonicalError, to_canonical};
pub use exact::ExactPath;
pub use glob::Glob;
pub use id::{LeaseId, PackId, RunId};
pub use outcome::Outcome;
pub use units::{Bytes, Cpus, UnitError};
