//! The command-line reference, made from the definition of the flags.

use clap::{Arg, Command, CommandFactory};

use crate::cli::Cli;

/// `docs/cli.md`.
pub(crate) fn reference() -> String {
    let mut cli = Cli::command();
    cli.build();
    let mut text = String::from(
        "# Command line\n\nMade by `hotcell reference` from the definition of the flags; a test compares the two.\n",
    );
    describe(&cli, "hotcell", &mut text);
    text
}

/// Every command, and those below it.
fn describe(parent: &Command, names: &str, text: &mut String) {
    for command in parent.get_subcommands().filter(|command| !command.is_hide_set()) {
        let about = command.get_about().map(ToString::to_string).unwrap_or_default();
        let names = format!("{names} {}", command.get_name());
        let is_group = command.get_subcommands().next().is_some();
        text.push_str(&format!("\n{} {names}\n\n{about}.\n", if names.split(' ').count() > 2 { "###" } else { "##" }));
        if !is_group {
            text.push_str("\n| argument | meaning |\n|---|---|\n");
            for argument in command.get_arguments().filter(|argument| !argument.is_hide_set()) {
                text.push_str(&row(argument));
            }
        }
        describe(command, &names, text);
    }
}

fn row(argument: &Arg) -> String {
    let mut names = Vec::new();
    if let Some(short) = argument.get_short() {
        names.push(format!("-{short}"));
    }
    if let Some(long) = argument.get_long() {
        names.push(format!("--{long}"));
    }
    let takes_value = argument.get_action().takes_values();
    let values = argument.get_value_names().map(|names| names.join(" ")).filter(|_| takes_value);
    let values = values.unwrap_or_default().replace('|', "\\|");
    let name = match (names.is_empty(), values.is_empty()) {
        (true, _) => values,
        (false, true) => names.join(", "),
        (false, false) => format!("{} {values}", names.join(", ")),
    };
    let mut help = argument.get_help().map(ToString::to_string).unwrap_or_default();
    let choices: Vec<String> = argument
        .get_possible_values()
        .iter()
        .filter_map(|value| Some(format!("`{}` {}", value.get_name(), value.get_help()?.to_string().to_lowercase())))
        .collect();
    if takes_value && !choices.is_empty() {
        help.push_str(&format!(": {}", choices.join("; ")));
    }
    format!("| `{name}` | {} |\n", help.replace('|', "\\|"))
}
