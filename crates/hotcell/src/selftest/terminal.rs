//! G: terminals, and what people look at.

use super::verdict::{Attempt, rule, skip};

pub(super) fn attempts() -> Vec<Attempt> {
    vec![
        rule("G1", "push characters into a terminal", "call", |_| vec!["tiocsti".into()], "terminal input"),
        rule("G1.high", "the same with high bits set", "call", |_| vec!["tiocsti-high-bits".into()], "terminal input"),
        rule("G2", "paste into a console", "call", |_| vec!["tioclinux".into()], "terminal input"),
        skip("G4", "inject into a page", "hotcell has no page yet"),
        skip("G5", "reach the page's server from elsewhere", "hotcell has no server yet"),
        skip("G6", "inject into an agent's context", "hotcell has no agent interface yet"),
    ]
}
