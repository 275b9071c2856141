//! The program as its users and its guests meet it. One binary: it links once.

#![allow(clippy::unwrap_used, clippy::print_stderr, missing_docs)]

mod authority;
mod bad_input;
mod changes;
mod cli;
mod crashes;
mod crowd;
mod documents;
mod escapes;
mod fuzz;
mod lifecycle;
mod limits;
mod pool;
mod selftest;
mod session;
mod support;
mod template;
mod workspace;
