//! Attempts and how they go.

use std::ffi::OsString;

use hotcell_cell::{Builder, Wall};

use super::bench::Bench;

/// How an attempt went.
pub(super) enum Verdict {
    /// Refused in a whole cell, and not without the wall.
    Held,
    /// So were all parts of it that this kernel has; the others are named.
    HeldButFor(String),
    /// It got through.
    Escaped(String),
    /// It was refused without the wall too, or could not be made: it proves nothing.
    Void(String),
    /// It cannot be made here.
    Skipped(String),
}

impl Verdict {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Verdict::Held | Verdict::HeldButFor(_) => "held",
            Verdict::Escaped(_) => "ESCAPED",
            Verdict::Void(_) => "VOID",
            Verdict::Skipped(_) => "skipped",
        }
    }

    pub(super) fn reason(&self) -> Option<&str> {
        match self {
            Verdict::Held => None,
            Verdict::HeldButFor(reason)
            | Verdict::Escaped(reason)
            | Verdict::Void(reason)
            | Verdict::Skipped(reason) => Some(reason),
        }
    }

    /// From what held inside and what got through without the wall.
    pub(super) fn of(held: bool, inside: impl Into<String>, live: bool, control: impl Into<String>) -> Verdict {
        match (held, live) {
            (false, _) => Verdict::Escaped(inside.into()),
            (true, false) => Verdict::Void(control.into()),
            (true, true) => Verdict::Held,
        }
    }
}

/// Judges what came of an attempt and of its control; one that could not be made proves nothing.
pub(super) fn judge<A, B>(
    inside: Result<A, String>,
    control: Result<B, String>,
    judge: impl FnOnce(A, B) -> Verdict,
) -> Verdict {
    match (inside, control) {
        (Err(why), _) | (_, Err(why)) => Verdict::Void(why),
        (Ok(inside), Ok(control)) => judge(inside, control),
    }
}

/// What is left out of a cell.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Missing {
    Walls(Vec<Wall>),
    Rule(&'static str),
}

impl Missing {
    pub(super) fn of(&self, builder: Builder) -> Builder {
        match self {
            Missing::Walls(walls) => walls.iter().fold(builder, |builder, wall| builder.omit(*wall)),
            Missing::Rule(rule) => builder.omit_rule(rule),
        }
    }

    fn name(&self) -> String {
        match self {
            Missing::Walls(walls) => walls.iter().map(|wall| wall.name()).collect::<Vec<_>>().join("+"),
            Missing::Rule(rule) => format!("seccomp:{rule}"),
        }
    }
}

/// Whose control is live.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    Anybody,
    /// Only root could do it without the wall.
    Root,
    /// Only an ordinary user's cell has the wall.
    User,
}

/// One attempt, known by the number of the list of public cases and a word of ours.
pub(super) struct Attempt {
    pub(super) id: &'static str,
    pub(super) what: &'static str,
    way: Way,
}

enum Way {
    Probe(Box<Probe>),
    Other(fn(&Bench) -> Verdict),
    Skip(&'static str),
}

type Args = fn(&Bench) -> Vec<OsString>;
type Shape = fn(&Bench, Builder) -> Builder;

/// An attempt that the probe makes, inside and as its own control.
struct Probe {
    kind: &'static str,
    args: Args,
    shape: Shape,
    /// Left out of both cells: further walls that would refuse it too.
    open: Vec<Wall>,
    missing: Missing,
    who: Who,
}

/// An attempt by the probe; the control leaves these walls out.
pub(super) fn probe(id: &'static str, what: &'static str, kind: &'static str, args: Args, walls: &[Wall]) -> Attempt {
    with(id, what, kind, args, Missing::Walls(walls.to_vec()))
}

/// An attempt by the probe; the control leaves one rule of the filter out.
pub(super) fn rule(
    id: &'static str,
    what: &'static str,
    kind: &'static str,
    args: Args,
    rule: &'static str,
) -> Attempt {
    with(id, what, kind, args, Missing::Rule(rule))
}

fn with(id: &'static str, what: &'static str, kind: &'static str, args: Args, missing: Missing) -> Attempt {
    let probe = Probe { kind, args, shape: |_, builder| builder, open: Vec::new(), missing, who: Who::Anybody };
    Attempt { id, what, way: Way::Probe(Box::new(probe)) }
}

/// An attempt that takes more than the probe.
pub(super) fn other(id: &'static str, what: &'static str, make: fn(&Bench) -> Verdict) -> Attempt {
    Attempt { id, what, way: Way::Other(make) }
}

/// A case of the list that cannot be tried, and why.
pub(super) fn skip(id: &'static str, what: &'static str, why: &'static str) -> Attempt {
    Attempt { id, what, way: Way::Skip(why) }
}

impl Attempt {
    /// Leaves further walls out of both cells, which would refuse it too.
    pub(super) fn open(mut self, walls: &[Wall]) -> Attempt {
        if let Way::Probe(probe) = &mut self.way {
            probe.open = walls.to_vec();
        }
        self
    }

    /// Gives both cells a workspace or the like.
    pub(super) fn shape(mut self, shape: Shape) -> Attempt {
        if let Way::Probe(probe) = &mut self.way {
            probe.shape = shape;
        }
        self
    }

    pub(super) fn only(mut self, who: Who) -> Attempt {
        if let Way::Probe(probe) = &mut self.way {
            probe.who = who;
        }
        self
    }

    /// What the control leaves out, by name.
    pub(super) fn missed(&self) -> Option<String> {
        match &self.way {
            Way::Probe(probe) => Some(probe.missing.name()),
            _ => None,
        }
    }

    pub(super) fn make(&self, bench: &Bench) -> Verdict {
        bench.fresh();
        match &self.way {
            Way::Skip(why) => Verdict::Skipped((*why).to_owned()),
            Way::Other(make) => make(bench),
            Way::Probe(probe) => probe.make(bench),
        }
    }
}

impl Probe {
    fn make(&self, bench: &Bench) -> Verdict {
        match (self.who, bench.is_root()) {
            (Who::Root, false) => return Verdict::Skipped("only root could do it without the wall".to_owned()),
            (Who::User, true) => return Verdict::Skipped("only an ordinary user's cells have this wall".to_owned()),
            _ => {}
        }
        let args = (self.args)(bench);
        if args.is_empty() {
            return Verdict::Skipped("there is nothing of the kind on this machine".to_owned());
        }
        let open = |builder: Builder| self.open.iter().fold(builder, |builder, wall| builder.omit(*wall));
        let inside = bench.tries((self.shape)(bench, open(bench.whole())), self.kind, &args);
        let inside = match inside {
            Ok(tries) => tries,
            Err(why) => return Verdict::Void(why),
        };
        if let Some(through) = inside.through() {
            return Verdict::Escaped(through);
        }
        let control = self.missing.of((self.shape)(bench, open(bench.bare())));
        let control = match bench.tries(control, self.kind, &args) {
            Ok(tries) => tries,
            Err(why) => return Verdict::Void(format!("without the wall: {why}")),
        };
        match (control.refused_without(), control.unknown()) {
            (Some(refused), _) => Verdict::Void(refused),
            (None, Some(unknown)) => Verdict::HeldButFor(unknown),
            (None, None) => Verdict::Held,
        }
    }
}
