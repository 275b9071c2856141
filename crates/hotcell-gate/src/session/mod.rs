//! Sessions of a home: a cell that outlives whoever made it, under a supervisor of its own.
//!
//! ```text
//! hotcell create ─▶ host (a process of its own) ─▶ sessions/<name>/socket ◀── client: exec, cp, ls
//!                      │ one cell, one command after the other
//!                      └─ ends it: stopped, idle for too long, or its life is over
//! ```
//!
//! The host is the one that supervises: it holds the cell, enforces limits and writes records. A client hands over its
//! own streams and waits. Whoever may connect is decided by the home, which is its owner's alone, and asked of the kernel
//! again for each connection.

mod client;
mod host;
mod wire;

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hotcell_base::RunId;
use hotcell_base::text::shown;
use serde::{Deserialize, Serialize};

use crate::door::GateError;
use crate::home::Home;
use crate::live::{Hold, ProcessName};
use crate::plain;
use crate::record::{RecordError, replace};

pub use client::{Client, Ran, Root, Told};
pub use host::{Edge, Stopper, Window, host};
pub use wire::{ExecRequest, LimitChanges, Refusal, Status};

/// How long a session may be there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Life {
    /// Without a command.
    pub idle: Duration,
    /// In all.
    pub total: Duration,
}

/// What is known of a session that is there.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Known {
    /// Its name.
    pub name: String,
    /// Its record.
    pub run_id: RunId,
    /// Its host.
    pub supervisor: ProcessName,
}

/// Why something with a session could not be done.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// It cannot be one's name: it would lead elsewhere.
    #[error("`{}` cannot be the name of a session", shown(.0))]
    Name(String),
    /// There is none.
    #[error("there is no session `{}`", shown(.0))]
    NotFound(String),
    /// There is one already.
    #[error("there is a session `{}` already", shown(.0))]
    Exists(String),
    /// Its host went away in the middle.
    #[error("the session `{}` is over", shown(.0))]
    Over(String),
    /// The host said no.
    #[error("{}", .0.chain.first().map_or("it was refused", String::as_str))]
    Refused(Refusal),
    /// It could not be let in or recorded.
    #[error(transparent)]
    Gate(#[from] Box<GateError>),
    /// The machine failed us.
    #[error("{what}")]
    Io {
        /// What could not be done.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> SessionError {
    move |source| SessionError::Io { what, source }
}

/// The sessions of a home.
#[derive(Clone, Debug)]
pub struct Sessions {
    directory: PathBuf,
}

impl Sessions {
    /// The sessions of this home.
    pub fn of(home: &Home) -> Sessions {
        Sessions { directory: home.path().join("sessions") }
    }

    /// Those whose host lives, by name.
    pub fn list(&self) -> Vec<Known> {
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let mut known: Vec<Known> = entries.filter_map(|entry| self.read(&entry.path())).collect();
        known.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        known
    }

    /// The one with this name, if its host lives.
    pub fn find(&self, name: &str) -> Option<Known> {
        self.read(&self.place(name).ok()?)
    }

    /// Where a session of this name is.
    fn place(&self, name: &str) -> Result<PathBuf, SessionError> {
        let is_fine = |letter: char| letter.is_alphanumeric() || "._-".contains(letter);
        // Nothing that is a path, means another directory, or could be the id of a run.
        let is_name = (1..=64).contains(&name.len()) && name.chars().all(is_fine) && !name.starts_with(['.', '-']);
        if is_name && !name.starts_with("run-") {
            Ok(self.directory.join(name))
        } else {
            Err(SessionError::Name(name.to_owned()))
        }
    }

    fn read(&self, path: &Path) -> Option<Known> {
        let text = plain::read(&path.join("session.json")).ok()?;
        let known: Known = serde_json::from_slice(&text).ok()?;
        known.supervisor.is_alive_in(path).then_some(known)
    }

    /// Takes a name. What a host that is gone left under it goes.
    fn claim(&self, name: &str) -> Result<Claim, SessionError> {
        let path = self.place(name)?;
        let make = || fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.directory);
        make().map_err(failed("a place for sessions cannot be made"))?;
        let _one_at_a_time = self.lock().map_err(failed("the place for sessions cannot be locked"))?;
        if Hold::is_held(&path) {
            return Err(SessionError::Exists(name.to_owned()));
        }
        match fs::remove_dir_all(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(failed("what an earlier session left cannot be removed")(error));
            }
            _ => {}
        }
        let made = fs::DirBuilder::new().mode(0o700).create(&path);
        made.map_err(failed("a place for the session cannot be made"))?;
        let hold = Hold::take(&path).map_err(failed("the session's place cannot be locked"))?;
        Ok(Claim { path, name: name.to_owned(), _hold: hold })
    }

    /// One after the other, so that nobody takes what another just made for what a crash left.
    fn lock(&self) -> io::Result<fs::File> {
        let all = fs::File::open(&self.directory)?;
        all.lock()?;
        Ok(all)
    }

    /// What hosts that are gone left, and those that are just being made.
    pub(crate) fn left(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten().map(|entry| entry.path());
        entries.filter(|path| !Hold::is_held(path)).collect()
    }

    /// Removes what a host left, if it is gone.
    pub(crate) fn clear(&self, path: &Path) -> io::Result<()> {
        let _one_at_a_time = self.lock()?;
        if Hold::is_held(path) { Ok(()) } else { fs::remove_dir_all(path) }
    }
}

/// A name that is taken until this is dropped.
#[derive(Debug)]
struct Claim {
    path: PathBuf,
    name: String,
    _hold: Hold,
}

impl Claim {
    /// Lets it be found.
    fn publish(&self, run_id: &RunId) -> Result<(), RecordError> {
        let known = Known { name: self.name.clone(), run_id: run_id.clone(), supervisor: ProcessName::own() };
        let text = serde_json::to_vec_pretty(&known).expect("plain data");
        replace(&self.path.join("session.json"), &text)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // What cannot be removed is removed by whoever wants the name next.
        let _later = fs::remove_dir_all(&self.path);
    }
}
