//! `hotcell run --template`: runs that begin from a program that is loaded already.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use hotcell_base::Bytes;
use hotcell_base::text::shown;
use hotcell_cell::{Builder, Cell, Host, Plan, RemoteEnd, template};
use hotcell_gate::record::TemplateRecord;
use hotcell_gate::{Gate, Home, Templates};

use crate::cli::RunArgs;
use crate::error::Failure;
use crate::{run, screen};

/// The program that a template is of.
pub(crate) fn program(name: &str) -> Result<String, Failure> {
    let file = Path::new(name).file_name().map(|file| file.to_string_lossy().into_owned()).unwrap_or_default();
    match name {
        "python" => Ok("python3".to_owned()),
        _ if file.starts_with("python") => Ok(name.to_owned()),
        _ => Err(Failure::Usage {
            message: format!("there is no template of `{}`", shown(name)),
            hint: "there is one of Python: hotcell run --template python -- SCRIPT".to_owned(),
        }),
    }
}

/// The plan, with what it begins from, if that is a template.
pub(crate) fn begin(
    args: &RunArgs,
    host: &Host,
    gate: &Gate,
    home: &Home,
    plan: Plan,
    remote: &RemoteEnd,
) -> Result<(Plan, Option<TemplateRecord>), Failure> {
    let Some(name) = &args.template else { return Ok((plan, None)) };
    let warm = template::python(surroundings(args, home)?, &program(name)?, &args.import).plan(host)?;
    let found = Templates::of(home).get(gate, &warm, template::PYTHON_TRIAL, Some(remote))?;
    if !found.was_kept && !args.output.quiet && !args.output.json {
        let bytes = Bytes(found.template.snapshot().bytes());
        let kept = if found.is_kept { "and kept for the next runs" } else { "and cannot be kept" };
        screen::note(&format!("template {name} is loaded ({bytes}), {kept}"));
    }
    let seed = args.seed.unwrap_or_else(hotcell_gate::door::random);
    let record = TemplateRecord { name: name.clone(), imports: args.import.clone(), seed, sha256: found.sha256 };
    Ok((plan.from_template(Arc::new(found.template), seed), Some(record)))
}

/// What the program is loaded in: nothing but what it is installed with, so that no run can leave something there for the
/// next; within the run's limits and walls.
fn surroundings(args: &RunArgs, home: &Home) -> Result<Builder, Failure> {
    let mut builder = Cell::builder().hide(home.path()).limits(args.limits.limits());
    // A template is kept, so it gets none of the caller's variables but those that say how to load it.
    let variables = args.start.variables().into_iter().filter(|(name, _)| is_for_loading(name));
    builder = variables.fold(builder, |builder, (name, value)| builder.env(name, value));
    builder = args.cell.require.iter().fold(builder, |builder, wall| builder.require(*wall));
    let missing = args.cell.allow_missing.iter().copied().chain(run::always_allowed_missing()?);
    Ok(missing.fold(builder, Builder::allow_missing))
}

/// `PYTHONPATH` and its like, and how many threads a library may start.
fn is_for_loading(name: &OsStr) -> bool {
    name.as_bytes().starts_with(b"PYTHON") || name.as_bytes().ends_with(b"_NUM_THREADS")
}
