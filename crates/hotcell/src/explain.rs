//! `hotcell run --explain`: a plan, printed.

use std::os::unix::ffi::OsStrExt;

use hotcell_base::text::{shown, shown_path};
use hotcell_cell::plan::{ID_FIRST, Identity};
use hotcell_cell::{Plan, Standing, seccomp};
use serde_json::json;

use crate::cli::RunArgs;

/// The plan for a person.
pub(crate) fn text(plan: &Plan, args: &RunArgs) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        text.push_str(format!("{name:<12} {value}").trim_end());
        text.push('\n');
    };
    let argv: Vec<String> = plan.argv().iter().map(|argument| quoted(&shown(argument.as_bytes()))).collect();
    line("command", argv.join(" "));
    line("executable", executable(plan));
    if let Some(template) = &args.template {
        line(
            "template",
            format!("{} with {} loaded", shown(template), crate::screen::count(args.import.len(), "module")),
        );
    }
    line("directory", shown(plan.cwd().as_os_str().as_bytes()));
    line("identity", identity(plan));
    line(
        "workspace",
        match plan.workspace() {
            Some(workspace) => {
                let mode = format!("{:?}", workspace.mode).to_lowercase();
                format!("{} ({mode})", shown_path(&workspace.path))
            }
            None => "none: the directory is empty, writable and gone afterwards".to_owned(),
        },
    );
    line("stdin", shown(args.stdin.as_bytes()));
    let walls = |wanted: Standing| {
        let names = plan.walls().iter().filter(|(_, standing)| **standing == wanted).map(|(wall, _)| wall.name());
        names.collect::<Vec<_>>().join(" ")
    };
    line("walls", walls(Standing::Proven));
    for standing in [Standing::Watched, Standing::Missing] {
        if !walls(standing).is_empty() {
            line(&standing.to_string(), walls(standing));
        }
    }
    let n_calls: usize = seccomp::rules().map(|(_, _, n)| n).sum();
    line("filter", format!("{n_calls} syscalls decided by {} rules, all others absent", seccomp::rules().count()));
    for (idx, (name, value)) in plan.limits().listed().into_iter().enumerate() {
        line(if idx == 0 { "limits" } else { "" }, format!("{name:<10} {value}"));
    }
    for (idx, (name, value)) in plan.env().iter().enumerate() {
        let variable = format!("{}={}", shown(name.as_bytes()), shown(value.as_bytes()));
        line(if idx == 0 { "environment" } else { "" }, variable);
    }
    for (idx, entry) in plan.view().iter().enumerate() {
        line(if idx == 0 { "view" } else { "" }, entry.to_string());
    }
    text
}

fn identity(plan: &Plan) -> String {
    match plan.identity() {
        Identity::Own { uid, .. } => format!("user {uid}, in a user namespace without any capability"),
        Identity::Fresh => format!("an id of its own from {ID_FIRST} up, without any capability"),
    }
}

/// The plan for a program.
pub(crate) fn json(plan: &Plan) -> String {
    let pairs = plan.env().iter().map(|(name, value)| (shown(name.as_bytes()), shown(value.as_bytes())));
    let object = json!({
        "command": plan.argv().iter().map(|argument| shown(argument.as_bytes())).collect::<Vec<_>>(),
        "executable": executable(plan),
        "directory": shown(plan.cwd().as_os_str().as_bytes()),
        "identity": identity(plan),
        "workspace": plan.workspace().map(|workspace| json!({
            "path": shown_path(&workspace.path),
            "mode": workspace.mode,
        })),
        "walls": plan.walls(),
        "limits": plan.limits().listed().into_iter().collect::<std::collections::BTreeMap<_, _>>(),
        "environment": pairs.collect::<std::collections::BTreeMap<_, _>>(),
        "view": plan.view().iter().map(ToString::to_string).collect::<Vec<_>>(),
    });
    format!("{object:#}\n")
}

/// An argument as a shell would take it.
fn quoted(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"_-./=:,+@%".contains(&byte);
    if !text.is_empty() && text.bytes().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', "'\\''"))
    }
}

fn executable(plan: &Plan) -> String {
    plan.program().map(|program| shown(program.as_os_str().as_bytes())).unwrap_or_default()
}
