//! Checks of the repository itself. They run with the other tests: `cargo nextest run -p xtask`.

pub mod layers;
