//! Heads that are kept elsewhere: in a file, or in a git repository.
//!
//! Git is a program like any other: it runs in a cell, through the gate.

use std::ffi::OsString;
use std::io::Write;
use std::os::fd::OwnedFd;

use hotcell_base::text::shown;
use hotcell_cell::{Cell, Host, Mode, Stdin, Stream};
use hotcell_gate::{Gate, Home, Ran, Request, Viewer};
use hotcell_ledger::Head;

use crate::error::Failure;

/// Reads a head that was written elsewhere.
pub(crate) fn read(text: &[u8], name: &str) -> Result<Head, Failure> {
    Head::read(text.trim_ascii_end()).map_err(|error| Failure::Refused {
        message: format!("`{}` is no witness: {error}", shown(name)),
        hint: "write one: hotcell audit witness FILE".to_owned(),
    })
}

/// Writes a head to a ref of the repository we are in.
pub(crate) fn to_git(host: &Host, home: &Home, name: &str, head: &Head) -> Result<(), Failure> {
    let object = git(host, home, &["hash-object", "-w", "--stdin"], Some(&head.to_text()))?;
    let object = String::from_utf8_lossy(&object).trim().to_owned();
    git(host, home, &["update-ref", name, &object], None)?;
    Ok(())
}

/// What a ref of the repository we are in holds.
pub(crate) fn from_git(host: &Host, home: &Home, name: &str) -> Result<Vec<u8>, Failure> {
    git(host, home, &["cat-file", "blob", name], None)
}

/// What came on stdout and stderr.
#[derive(Default)]
struct Heard([Vec<u8>; 2]);

impl Viewer for Heard {
    fn output(&mut self, stream: Stream, bytes: &[u8]) {
        self.0[usize::from(stream == Stream::Stderr)].extend_from_slice(bytes);
    }
}

fn git(host: &Host, home: &Home, words: &[&str], input: Option<&[u8]>) -> Result<Vec<u8>, Failure> {
    let io = |source| Failure::Io { message: "git cannot be given its input".to_owned(), hint: None, source };
    let mode = if input.is_some() || words[0] == "update-ref" { Mode::Rw } else { Mode::Ro };
    // In its cell, it is not the owner of the repository.
    let argv = ["git", "-c", "safe.directory=*"].iter().chain(words).map(OsString::from);
    let mut builder = Cell::builder().hide(home.path()).workspace(&host.cwd, mode);
    if mode == Mode::Rw {
        builder = builder.allow_control(".git");
    }
    for wall in crate::run::always_allowed_missing()? {
        builder = builder.allow_missing(wall);
    }
    let plan = builder.command(argv).plan(host)?;
    let stdin = match input {
        Some(input) => {
            let (reader, mut writer) = std::io::pipe().map_err(io)?;
            // A head is smaller than any pipe.
            writer.write_all(input).map_err(io)?;
            Stdin::From(OwnedFd::from(reader))
        }
        None => Stdin::Null,
    };
    let request = Request { stdin, name: Some("witness".to_owned()), ..Request::default() };
    let mut heard = Heard::default();
    let Ran { record, .. } = Gate::open(home)?.run(&plan, request, &mut heard, None)?;
    let Heard([stdout, stderr]) = heard;
    if record.exit_status() == 0 {
        return Ok(stdout);
    }
    let said = String::from_utf8_lossy(&stderr).lines().next().unwrap_or_default().to_owned();
    Err(Failure::Refused {
        message: format!("git {} failed: {}", words[0], shown(said)),
        hint: format!("see what it said: hotcell logs {}", record.run_id),
    })
}
