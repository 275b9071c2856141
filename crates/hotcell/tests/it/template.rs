//! Templates: runs that go on from a loaded program are runs like any other, and know nothing of each other.

use std::sync::Arc;

use hotcell_base::Outcome;
use hotcell_cell::template::{self, Template};
use hotcell_cell::{Cell, Report};

use crate::support::*;

const PYTHON: &str = "/usr/bin/python3";

fn warm(imports: &[&str]) -> Arc<Template> {
    let imports: Vec<String> = imports.iter().map(|name| (*name).to_owned()).collect();
    let plan = plan_on(&host(), template::python(Cell::builder(), PYTHON, &imports)).expect("a plan");
    let memory = tempfile::tempfile().expect("a file");
    Arc::new(Template::warm(&plan, memory, template::PYTHON_TRIAL).unwrap_or_else(|error| panic!("{error}: {:?}", error)))
}

fn run_from(template: &Arc<Template>, seed: u64, argv: &[&str]) -> Report {
    let words = [PYTHON].iter().chain(argv).map(|word| (*word).to_owned());
    let plan = plan_on(&host(), Cell::builder().command(words)).expect("a plan");
    plan.from_template(Arc::clone(template), seed).run().unwrap_or_else(|error| panic!("{error}: {:?}", error))
}

#[test]
fn a_run_goes_on_from_a_loaded_python() {
    let template = warm(&["json"]);
    let report = run_from(&template, 1, &["-c", "import sys, json; print(json.dumps(sys.argv)); sys.exit(3)", "a", "b"]);
    assert_eq!(report.stderr.text(), "");
    assert_eq!((report.outcome, report.exit_code), (Outcome::Exited, Some(3)));
    assert_eq!(report.stdout.text(), "[\"-c\", \"a\", \"b\"]\n");
}

#[test]
fn zz_faults() {
    let template = warm(&[]);
    for _ in 0..3 {
    let report = run_from(&template, 1, &["-c", "pass"]);
    println!("{} {:?}", report.stderr.text(), report.wall);
    }
}
