//! `hotcell run --template`: runs that begin from a program that is loaded already.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use hotcell_base::Bytes;
use hotcell_cell::template::{self, Template};
use hotcell_cell::{Cell, Host, Plan};
use hotcell_gate::record::TemplateRecord;
use hotcell_gate::{Home, Templates};

use crate::cli::RunArgs;
use crate::error::Failure;
use crate::screen;

/// The program that a template is of.
pub(crate) fn program(name: &str) -> Result<String, Failure> {
    let file = Path::new(name).file_name().map(|file| file.to_string_lossy().into_owned()).unwrap_or_default();
    match name {
        "python" => Ok("python3".to_owned()),
        _ if file.starts_with("python") => Ok(name.to_owned()),
        _ => Err(Failure::Usage {
            message: format!("there is no template of `{}`", hotcell_base::text::shown(name)),
            hint: "there is one of Python: hotcell run --template python -- SCRIPT".to_owned(),
        }),
    }
}

/// The plan, with what it begins from, if that is a template.
pub(crate) fn begin(
    args: &RunArgs,
    host: &Host,
    home: &Home,
    plan: Plan,
) -> Result<(Plan, Option<TemplateRecord>), Failure> {
    let Some(name) = &args.template else { return Ok((plan, None)) };
    // Loaded as it will run: with the same program, and with what the caller sets.
    let builder =
        args.start.variables().into_iter().fold(Cell::builder(), |builder, (name, value)| builder.env(name, value));
    let builder = args.cell.allow_missing.iter().fold(builder, |builder, wall| builder.allow_missing(*wall));
    let builder = crate::run::always_allowed_missing()?.into_iter().fold(builder, hotcell_cell::Builder::allow_missing);
    let warm = template::python(builder.hide(home.path()), &program(name)?, &args.import).plan(host)?;
    let environment: Vec<u8> =
        warm.env().iter().flat_map(|(name, value)| [name.as_bytes(), b"=", value.as_bytes(), b"\0"].concat()).collect();
    let arguments: Vec<u8> = warm.argv().iter().flat_map(|word| [word.as_bytes(), b"\0"].concat()).collect();
    let executable = warm.program().map(|path| path.as_os_str().as_bytes()).unwrap_or_default();
    let found = Templates::of(home)
        .get(&[&arguments, &environment, executable], |memory| Template::warm(&warm, memory, template::PYTHON_TRIAL))?;
    if !found.is_kept && !args.output.quiet && !args.output.json {
        let bytes = Bytes(found.template.snapshot().bytes());
        screen::note(&format!("template {name} is loaded ({bytes}), and kept for the next runs"));
    }
    let seed = args.seed.unwrap_or_else(hotcell_gate::door::random);
    let record = TemplateRecord { name: name.clone(), imports: args.import.clone(), seed };
    Ok((plan.from_template(Arc::new(found.template), seed), Some(record)))
}
