//! Who may run what.
//!
//! ```text
//! keys ─▶ trust store ─┐
//! policy.toml ─▶ Policy ├─▶ verify(lease, ask, now) ─▶ ValidLease | Refusal
//! Terms ─▶ Draft ─▶ Lease ┘
//! ```
//!
//! Pure: nothing here reads a clock, a file or the environment; time, random bytes and facts are arguments. Only a
//! [`ValidLease`] opens the gate, and [`verify()`] is the only way to get one.

pub mod command;
pub mod key;
pub mod lease;
pub mod limits;
pub mod policy;
pub mod scope;
pub mod trust;
pub mod verify;

pub use command::{Command, CommandPattern};
pub use key::{KeyId, PublicKey, SecretKey, Signature, digest};
pub use lease::{Audience, Draft, Lease, LeaseError, Network, Parent, Scope, Terms};
pub use limits::{LeaseLimits, LimitsMax};
pub use policy::{DEFAULT_POLICY, Policy, PolicyError};
pub use scope::{Access, PathPattern, PathScope, Repos};
pub use trust::{Role, Stage, TrustStore, Trusted};
pub use verify::{Ask, Circumstances, Known, Refusal, ValidLease, verify};
