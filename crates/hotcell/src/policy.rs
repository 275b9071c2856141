//! `hotcell policy`: what can be permitted at all.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use hotcell_authority::{Command, Policy};
use hotcell_base::text::shown;
use hotcell_cell::{Host, needs};
use hotcell_gate::{AuthorityError, Home, authority};
use serde_json::{Value, json};

use crate::cli::authority::{PolicyCheckArgs, PolicyCommand};
use crate::error::Failure;
use crate::screen;

pub(crate) fn policy(host: &Host, home: &Home, command: &PolicyCommand) -> Result<u8, Failure> {
    match command {
        PolicyCommand::Show(args) => {
            let (policy, text, path) = authority::policy(home)?;
            if args.json {
                screen::answer(format!("{:#}\n", as_json(&policy, path.as_deref())))?;
            } else {
                screen::answer(text)?;
                let from = path.map_or_else(|| "built in".to_owned(), |path| path.display().to_string());
                screen::note(&format!("policy   {from}, {}", policy.digest()));
            }
            Ok(0)
        }
        PolicyCommand::Check(args) => check(host, home, args),
    }
}

fn as_json(policy: &Policy, path: Option<&Path>) -> Value {
    let phases =
        policy.phases().map(|(name, enabled, why)| (name.to_owned(), json!({ "enabled": enabled, "why": why })));
    let groups = policy.groups().map(|(name, group)| (name.to_owned(), json!(group)));
    let rows = policy.capabilities().map(|row| (row.name.to_owned(), json!(row.capability)));
    json!({
        "digest": policy.digest(),
        "path": path,
        "repos": policy.repos(),
        "phases": phases.collect::<serde_json::Map<_, _>>(),
        "groups": groups.collect::<serde_json::Map<_, _>>(),
        "capabilities": rows.collect::<serde_json::Map<_, _>>(),
    })
}

/// The words of a command, and the file it would execute.
pub(crate) struct Words {
    words: Vec<Vec<u8>>,
    program: PathBuf,
}

impl Words {
    /// A command that is not there is looked at by its name.
    pub(crate) fn new(host: &Host, command: &[OsString]) -> Words {
        let words = command.iter().map(|word| word.clone().into_vec()).collect();
        let first = command.first().map_or(OsStr::new(""), |word| word);
        let program = find(host, first).unwrap_or_else(|| PathBuf::from(first));
        Words { words, program }
    }

    pub(crate) fn command(&self) -> Command<'_> {
        Command { words: &self.words, program: &self.program }
    }
}

/// What a word stands for: the file that is found, or its own name if there is none.
pub(crate) fn find(host: &Host, word: &OsStr) -> Option<PathBuf> {
    let found = needs::find(host, word, &host.cwd);
    Some(found.map_or_else(|_| PathBuf::from(word), |path| needs::in_real_directory(&path)))
}

fn check(host: &Host, home: &Home, args: &PolicyCheckArgs) -> Result<u8, Failure> {
    let (policy, from) = match &args.policy {
        Some(path) => {
            let unreadable = |source| AuthorityError::Unreadable { path: path.clone(), source };
            let text = std::fs::read(path).map_err(unreadable)?;
            let wrong = |source| AuthorityError::Policy { path: path.clone(), source: Box::new(source) };
            (Policy::read(&text).map_err(wrong)?, path.display().to_string())
        }
        None => {
            let (policy, _, path) = authority::policy(home)?;
            (policy, path.map_or_else(|| "built in".to_owned(), |path| path.display().to_string()))
        }
    };
    if let Some(name) = args.capability.as_ref().filter(|name| policy.capability(name).is_none()) {
        let names: Vec<&str> = policy.capabilities().map(|row| row.name).collect();
        return Err(Failure::Usage {
            message: format!("the policy has no capability `{}`", shown(name)),
            hint: format!("there are {}", names.join(", ")),
        });
    }
    if args.command.is_empty() {
        let (n_groups, n_rows) = (policy.groups().count(), policy.capabilities().count());
        let n_examples: usize = policy.groups().map(|(_, group)| group.allows.len() + group.refuses.len()).sum();
        let object =
            json!({ "digest": policy.digest(), "groups": n_groups, "capabilities": n_rows, "examples": n_examples });
        screen::answer(if args.json {
            format!("{object:#}\n")
        } else {
            format!(
                "{from}: {n_rows} capabilities, {n_groups} groups, {n_examples} examples hold\n{}\n",
                policy.digest()
            )
        })?;
        return Ok(0);
    }
    let words = Words::new(host, &args.command);
    let lookup = |word: &str| find(host, OsStr::new(word));
    let mut rows = Vec::new();
    for row in policy.capabilities().filter(|row| args.capability.as_deref().is_none_or(|name| name == row.name)) {
        let group = row.permits(&words.command(), &lookup);
        let verdict = match group {
            _ if !row.is_enabled() => "phase not enabled",
            Some(_) => "permits",
            None => "refuses",
        };
        rows.push((row.name, verdict, group.unwrap_or_default(), row.capability.self_issued));
    }
    let is_permitted = rows.iter().any(|(_, verdict, ..)| *verdict == "permits");
    if args.json {
        let list: Vec<Value> = rows
            .iter()
            .map(|(name, verdict, group, own)| {
                json!({ "capability": name, "verdict": verdict, "group": group, "self_issued": own })
            })
            .collect();
        screen::answer(format!(
            "{:#}\n",
            json!({ "permitted": is_permitted, "digest": policy.digest(), "capabilities": list })
        ))?;
    } else {
        let mut table = vec![["CAPABILITY", "VERDICT", "GROUP", ""].map(str::to_owned).to_vec()];
        for (name, verdict, group, own) in rows {
            let own = if own { "what you run yourself" } else { "can be leased" };
            table.push([name, verdict, group, own].map(str::to_owned).to_vec());
        }
        screen::answer(screen::table(&table))?;
    }
    Ok(u8::from(!is_permitted))
}
