//! Documents that are made from the program are the program's.

use crate::support::*;

#[test]
fn the_command_line_reference_is_up_to_date() {
    let bench = Bench::new();
    let made = text(&bench.output(["reference"]).stdout);
    let kept = include_str!("../../../../docs/cli.md");
    assert!(kept == made, "docs/cli.md is old; make it again: cargo run -- reference > docs/cli.md");
}

#[test]
fn the_readme_has_every_attempt_of_the_selftest() {
    let readme = include_str!("../../../../README.md");
    let bench = Bench::new();
    let listed = bench.output(["selftest", "--list", "--json"]).stdout;
    let listed: serde_json::Value = serde_json::from_slice(&listed).unwrap();
    for attempt in listed.as_array().unwrap() {
        let (id, what) = (attempt["id"].as_str().unwrap(), attempt["what"].as_str().unwrap());
        let is_there = readme.lines().any(|line| line.split_whitespace().next() == Some(id) && line.contains(what));
        assert!(is_there, "{id} ({what}) is not in the README: paste the output of `hotcell selftest`");
    }
}
