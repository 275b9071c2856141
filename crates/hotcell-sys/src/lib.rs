//! The kernel, made safe: the only crate with `unsafe`.
//!
//! - [`program`]: a launch written down as syscalls, and [`spawner`], which has it run by the stub;
//! - `stub`: the 11 kB executable that runs it, without libc, heap or decisions;
//! - [`wire`]: the layout both agree on;
//! - [`snapshot`]: a process that stands still, to go on elsewhere.
//!
//! Not here: what a cell is made of. That is `hotcell-cell`, which only writes programs.

pub mod attempt;
pub mod facts;
pub mod id_map;
pub mod inherited;
pub mod program;
pub mod signals;
pub mod snapshot;
pub mod spawner;
pub mod trace;
pub mod wire;

#[path = "stub/call.rs"]
mod stub_call;
// Compiled here for lints and tests; it runs in the stub.
#[path = "stub/run.rs"]
#[allow(dead_code)]
mod stub_run;
