//! Documents that are made from the program are the program's.

use crate::support::*;

#[test]
fn the_command_line_reference_is_up_to_date() {
    let bench = Bench::new();
    let made = text(&bench.output(["reference"]).stdout);
    let kept = include_str!("../../../../docs/cli.md");
    assert!(kept == made, "docs/cli.md is old; make it again: cargo run -- reference > docs/cli.md");
}
