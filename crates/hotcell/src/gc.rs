//! `hotcell gc`, and the quick form of it that every start does.

use hotcell_base::text::{shown, shown_path};
use hotcell_gate::Home;
use hotcell_gate::gc::{self, Cleared, Leftover};
use hotcell_gate::pack::{Recovered, State};
use serde_json::json;

use crate::cli::GcArgs;
use crate::error::Failure;
use crate::screen;

/// Says what crashes left, and clears it away if told to.
pub(crate) fn gc(home: &Home, args: &GcArgs) -> Result<u8, Failure> {
    let temporary = std::env::temp_dir();
    let found = gc::survey(home, &temporary);
    let cleared = if args.yes { gc::clear(home, &temporary) } else { Cleared::default() };
    let text = if args.json { as_json(&found, args.yes, &cleared) } else { as_text(&found, args.yes, &cleared) };
    screen::answer(&text)?;
    say(&cleared);
    Ok(u8::from(!cleared.failed.is_empty() || cleared.error.is_some()))
}

/// Clears away what the last crash left, and says so.
pub(crate) fn sweep(home: &Home) {
    say(&gc::sweep(home));
}

fn as_text(found: &[Leftover], really: bool, cleared: &Cleared) -> String {
    if found.is_empty() {
        return "nothing is left of any crash\n".to_owned();
    }
    let rows: Vec<Vec<String>> = found
        .iter()
        .map(|leftover| {
            let (what, which) = leftover.describe();
            vec![what.to_owned(), shown(which)]
        })
        .collect();
    let verdict = match (really, cleared.is_busy, cleared.failed.len()) {
        (true, ..) if cleared.error.is_some() => "nothing could be cleared away".to_owned(),
        (false, ..) => "nothing was touched; to clear it away: hotcell gc --yes".to_owned(),
        (true, true, _) => "another hotcell is clearing up; nothing was touched by this one".to_owned(),
        (true, false, 0) => "cleared away".to_owned(),
        (true, false, n) => format!("cleared away but for {n}"),
    };
    format!("{}{verdict}\n", screen::table(&rows))
}

fn as_json(found: &[Leftover], really: bool, cleared: &Cleared) -> String {
    let found = found.iter().map(|leftover| {
        let (what, which) = leftover.describe();
        json!({ "what": what, "which": shown(which) })
    });
    let object = json!({
        "found": found.collect::<Vec<_>>(),
        "cleared": really && !cleared.is_busy && cleared.error.is_none(),
        "failed": cleared.failed.len(),
    });
    format!("{object:#}\n")
}

fn say(cleared: &Cleared) {
    if let Some(error) = &cleared.error {
        screen::note(&format!("hotcell: what a crash left cannot be cleared away here: {error}"));
    }
    for run in &cleared.unknown {
        screen::note(&format!("hotcell: {run} was cut short by a crash; its outcome is unknown"));
    }
    for pack in &cleared.packs {
        say_pack(pack);
    }
    for directory in &cleared.astray {
        screen::note(&format!(
            "hotcell: {} is not there any more; if it was moved, a killed cell's empty .git and the like went with it, \
             until the next `hotcell run --mode rw` there",
            shown_path(directory)
        ));
    }
    for (leftover, error) in &cleared.failed {
        let (what, which) = leftover.describe();
        screen::note(&format!("hotcell: {what} {}: cannot be cleared away yet", shown(which)));
        let mut cause: Option<&dyn std::error::Error> = Some(error);
        while let Some(one) = cause {
            screen::note(&format!("  cause: {one}"));
            cause = one.source();
        }
    }
}

/// Says what became of a change that was cut short.
pub(crate) fn say_pack(pack: &Recovered) {
    let what = match pack.state {
        State::Stuck => "was cut short by a crash, and the tree was changed since; what others changed was left alone",
        State::Undone => "was being undone when hotcell died; it is undone now",
        _ => "was being applied when hotcell died; the tree is as it was before",
    };
    screen::note(&format!("hotcell: {} {what}", pack.pack_id));
    for conflict in &pack.conflicts {
        let path = shown_path(&conflict.path);
        screen::note(&format!("         {path} {}", conflict.why));
    }
}
