//! `apply` and `undo`: a run's changes made to the workspace itself, and taken back.

use hotcell_base::text::shown_path;
use hotcell_gate::pack::{Pack, Packs, State, Undone};
use hotcell_gate::{Conflict, Diff, Home, Selection};
use hotcell_sys::signals::EndSignals;
use serde_json::{Value, json};

use crate::cli::{ApplyArgs, UndoArgs};
use crate::error::Failure;
use crate::screen;

pub(crate) fn apply(home: &Home, args: &ApplyArgs) -> Result<(), Failure> {
    crate::gc::sweep(home);
    let diff = Diff::of(home, &args.run)?;
    let selection =
        Selection { only: args.only.clone(), except: args.except.clone(), allow_control: args.allow_control.clone() };
    let _held_back = hold_signals_back()?;
    let applied = Packs::of(home).apply(&diff, &selection)?;
    applied.recovered.iter().for_each(crate::gc::say_pack);
    for path in &applied.left_out {
        let path = shown_path(path);
        screen::note(&format!("left out {path}: pipes, sockets and devices are not applied"));
    }
    say_saved(&applied.saved);
    let Some(pack) = &applied.pack else {
        let nothing = json!({ "pack": null, "left_out": applied.left_out.len(), "saved": [] });
        return screen::answer(if args.json { format!("{nothing:#}\n") } else { "nothing to apply\n".to_owned() });
    };
    let text = if args.json {
        let object = json!({ "pack": pack, "left_out": applied.left_out.len(), "saved": as_json(&applied.saved) });
        format!("{object:#}\n")
    } else {
        let workspace = shown_path(&pack.workspace.0);
        let n = screen::count(pack.entries.len(), "change");
        format!("applied  {n} to {workspace}\nundo     hotcell undo {}\n", pack.pack_id)
    };
    screen::answer(text).inspect_err(|_| {
        // Nobody saw it, and it is done all the same.
        screen::note(&format!("the changes were made; to take them back: hotcell undo {}", pack.pack_id));
    })
}

pub(crate) fn undo(home: &Home, args: &UndoArgs) -> Result<(), Failure> {
    crate::gc::sweep(home);
    let packs = Packs::of(home);
    let Some(id) = &args.id else { return list(&packs, args.json) };
    if args.forget {
        let (pack, saved) = packs.forget(id)?;
        say_saved(&saved);
        return screen::answer(format!("forgotten  {}: it cannot be undone any more\n", pack.pack_id));
    }
    let _held_back = hold_signals_back()?;
    let Undone { pack, saved, recovered } = packs.undo(id)?;
    recovered.iter().for_each(crate::gc::say_pack);
    say_saved(&saved);
    if args.json {
        return screen::answer(format!("{:#}\n", json!({ "pack": pack, "saved": as_json(&saved) })));
    }
    let workspace = shown_path(&pack.workspace.0);
    let n = screen::count(pack.entries.len(), "path");
    screen::answer(format!("undone   {}: {n} of {workspace} as before\n", pack.pack_id))
}

/// Half-way is no place to stop: what is asked for meanwhile comes after.
fn hold_signals_back() -> Result<EndSignals, Failure> {
    EndSignals::listen().map_err(|source| Failure::Io {
        message: "cannot listen for signals".to_owned(),
        hint: None,
        source,
    })
}

fn as_json(saved: &[Conflict]) -> Value {
    let list = saved.iter().map(|one| json!({ "path": shown_path(&one.path), "why": one.why }));
    list.collect::<Vec<_>>().into()
}

/// Says what somebody wrote meanwhile.
fn say_saved(saved: &[Conflict]) {
    for one in saved {
        screen::note(&format!("note: {} {}", shown_path(&one.path), one.why));
    }
}

fn list(packs: &Packs, as_json: bool) -> Result<(), Failure> {
    for id in packs.damaged() {
        screen::note(&format!("{id} is damaged: what it applied cannot be undone by it"));
    }
    let packs = packs.list();
    if as_json {
        return screen::answer(format!("{:#}\n", json!(packs)));
    }
    if packs.is_empty() {
        screen::note("nothing was applied yet");
        return Ok(());
    }
    let mut rows = vec![["ID", "RUN", "STATE", "PATHS", "TREE"].map(str::to_owned).to_vec()];
    rows.extend(packs.iter().map(row));
    screen::answer(screen::table(&rows))
}

fn row(pack: &Pack) -> Vec<String> {
    let state = match pack.state {
        State::Applying => "applying",
        State::Applied => "applied",
        State::Undoing => "undoing",
        State::Undone => "undone",
        State::RolledBack => "rolled back",
        State::Stuck => "stuck",
    };
    let workspace = shown_path(&pack.workspace.0);
    vec![pack.pack_id.to_string(), pack.run_id.to_string(), state.to_owned(), pack.entries.len().to_string(), workspace]
}
