//! `hotcell selftest`: the attempts to get out of a cell, made on this machine, as this user.
//!
//! ```text
//! attempt ─▶ in a whole cell: must be refused ─▶ in a cell without the wall: must get through ─▶ held
//!                     │ got through                          │ refused all the same
//!                     ▼                                      ▼
//!                  ESCAPED                                  VOID: it proved nothing
//! ```
//!
//! One program makes every attempt, `hotcell probe`, and says what the kernel answered. A control is harmless: it
//! names files of the selftest's own, asks without doing, or gives arguments that no kernel carries out.
//!
//! `--without WALL` leaves a wall out of every cell that should be whole: if the suite stays green, it is worth nothing.

mod bench;
mod files;
mod lifecycle;
mod network;
mod privilege;
mod processes;
mod resources;
mod terminal;
mod verdict;
mod walls;

use std::time::Instant;

use clap::ValueEnum;
use hotcell_cell::{Host, Wall, seccomp};
use serde_json::{Value, json};

use crate::cli::{self, SelftestArgs};
use crate::error::Failure;
use crate::screen;
use bench::Bench;
use verdict::{Attempt, Missing, Verdict};

/// Every attempt, by section.
fn attempts() -> Vec<Attempt> {
    let sections = [
        files::attempts(),
        processes::attempts(),
        privilege::attempts(),
        network::attempts(),
        resources::attempts(),
        lifecycle::attempts(),
        terminal::attempts(),
        walls::attempts(),
    ];
    let mut attempts: Vec<Attempt> = sections.into_iter().flatten().collect();
    // By the numbers of the list; parts of one number as they stand.
    attempts.sort_by_key(|attempt| {
        let number = attempt.id.split('.').next().and_then(|id| id.get(1..)).and_then(|id| id.parse::<u32>().ok());
        (attempt.id.as_bytes().first().copied(), number)
    });
    attempts
}

/// Makes every attempt and says how it went. 0: all held, 1: one escaped or is void.
pub(crate) fn selftest(host: &Host, args: &SelftestArgs) -> Result<u8, Failure> {
    let missing = args.without.as_deref().map(missing).transpose()?;
    if let Some(Missing::Walls(walls)) = &missing
        && let Some(wall) = walls.iter().find(|wall| !is_had(host, **wall))
    {
        return Err(Failure::Usage {
            message: format!("this user's cells do not have the wall `{wall}`, so that nobody can miss it"),
            hint: "leave out another one: hotcell selftest --without net".to_owned(),
        });
    }
    let all = attempts();
    let chosen: Vec<&Attempt> = all.iter().filter(|attempt| is_chosen(attempt, args)).collect();
    if chosen.is_empty() {
        return Err(Failure::Usage {
            message: "no attempt has this id".to_owned(),
            hint: "see them all: hotcell selftest --list".to_owned(),
        });
    }
    if args.list {
        return screen::answer(list(&chosen, args.json)).map(|()| 0);
    }
    let bench = Bench::new(host, missing, args.cells)?;
    let mut results = Vec::new();
    for attempt in chosen {
        let begun = Instant::now();
        let verdict = attempt.make(&bench);
        if !args.json {
            screen::answer(format!("{}\n", line(attempt, &verdict)))?;
        }
        results.push((attempt, verdict, begun.elapsed().as_secs_f64() * 1e3));
    }
    let count = |name: &str| results.iter().filter(|(_, verdict, _)| verdict.name() == name).count();
    let (held, escaped, void, skipped) = (count("held"), count("ESCAPED"), count("VOID"), count("skipped"));
    if args.json {
        let attempts = results.iter().map(|(attempt, verdict, ms)| {
            json!({
                "id": attempt.id, "what": attempt.what, "verdict": verdict.name(), "reason": verdict.reason(),
                "control_without": attempt.missed(), "ms": (ms * 10.0).round() / 10.0,
            })
        });
        let object = json!({
            "uid": host.uid, "privileged": host.privileged, "without": args.without,
            "cells": args.cells.to_possible_value().map(|value| value.get_name().to_owned()),
            "held": held, "escaped": escaped, "void": void, "skipped": skipped,
            "attempts": attempts.collect::<Vec<_>>(),
        });
        screen::answer(format!("{object:#}\n"))?;
    } else {
        screen::answer(format!("\n{held} held, {escaped} ESCAPED, {void} VOID, {skipped} skipped\n"))?;
    }
    Ok(u8::from(escaped + void > 0))
}

/// Whether leaving a wall out changes anything: root's cells have no user namespace, and a user's cells are that user.
fn is_had(host: &Host, wall: Wall) -> bool {
    match wall {
        Wall::User => !host.privileged,
        Wall::Id => host.privileged,
        Wall::Groups => host.privileged || !host.groups.is_empty(),
        _ => true,
    }
}

fn is_chosen(attempt: &Attempt, args: &SelftestArgs) -> bool {
    // `A1` means A1 and all of its parts, `A` the whole section.
    let matches = |wanted: &String| {
        attempt.id.eq_ignore_ascii_case(wanted)
            || attempt.id.split('.').next().is_some_and(|id| id.eq_ignore_ascii_case(wanted))
            || attempt.id.get(..1).is_some_and(|section| section.eq_ignore_ascii_case(wanted))
    };
    args.only.is_empty() || args.only.iter().any(matches)
}

/// What `--without` names: a wall, or a rule of the filter.
fn missing(text: &str) -> Result<Missing, Failure> {
    if let Some(rule) = text.strip_prefix("seccomp:") {
        let known = seccomp::refusing_rules().find(|known| *known == rule);
        return known.map(Missing::Rule).ok_or_else(|| Failure::Usage {
            message: format!("the filter has no rule `{rule}`"),
            hint: format!("the rules are: {}", seccomp::refusing_rules().collect::<Vec<_>>().join(", ")),
        });
    }
    cli::wall(text).map(|wall| Missing::Walls(vec![wall])).map_err(|message| Failure::Usage {
        message,
        hint: "name a wall, or a rule of the filter: hotcell selftest --without seccomp:mounts".to_owned(),
    })
}

fn line(attempt: &Attempt, verdict: &Verdict) -> String {
    let reason = verdict.reason().map_or_else(String::new, |reason| format!(": {reason}"));
    format!("{:<14} {:<8} {}{reason}", attempt.id, verdict.name(), attempt.what)
}

fn list(chosen: &[&Attempt], as_json: bool) -> String {
    if as_json {
        let attempts: Vec<Value> = chosen
            .iter()
            .map(|attempt| json!({ "id": attempt.id, "what": attempt.what, "control_without": attempt.missed() }))
            .collect();
        return format!("{:#}\n", Value::from(attempts));
    }
    let mut rows = vec![["ID", "ATTEMPT", "CONTROL WITHOUT"].map(str::to_owned).to_vec()];
    rows.extend(
        chosen
            .iter()
            .map(|attempt| vec![attempt.id.to_owned(), attempt.what.to_owned(), attempt.missed().unwrap_or_default()]),
    );
    screen::table(&rows)
}
