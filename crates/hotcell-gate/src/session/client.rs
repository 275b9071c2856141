//! The client's side of a session.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use hotcell_base::RunId;
use hotcell_cell::report::Timings;

use super::wire::{self, Answer, Ask, Done, ExecRequest, Status};
use super::{SessionError, Sessions, failed};
use crate::home::Home;
use crate::record::Record;

/// A connection to a session.
#[derive(Debug)]
pub struct Client {
    name: String,
    socket: OwnedFd,
}

/// What is heard while a command runs.
#[derive(Debug)]
pub enum Told<'a> {
    /// Another command runs; this one waits.
    Busy(&'a [String]),
    /// It is about to begin.
    Started(&'a RunId),
}

/// What exists inside a session.
#[derive(Debug)]
pub struct Root {
    /// Its root directory.
    pub root: OwnedFd,
    /// Whose files are the guest's own.
    pub owner: u32,
    /// Where its commands begin.
    pub directory: PathBuf,
    /// The host's own directories and files that the guest may write to.
    pub writable: Vec<PathBuf>,
}

/// A command that ran.
#[derive(Debug)]
pub struct Ran {
    /// Its record.
    pub record: Record,
    /// Where the time went; none if the attempt was made before, and nothing ran now.
    pub timings: Option<Timings>,
}

impl Client {
    /// Connects to the session with this name.
    pub fn connect(home: &Home, name: &str) -> Result<Client, SessionError> {
        let nobody = || SessionError::NotFound(name.to_owned());
        let path = Sessions::of(home).place(name)?;
        let (socket, address, _directory) = match wire::socket(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(nobody()),
            made => made.map_err(failed("a socket cannot be made"))?,
        };
        // One that a host left when it was killed has nobody behind it.
        rustix::net::connect(&socket, &address).map_err(|_| nobody())?;
        Ok(Client { name: name.to_owned(), socket })
    }

    /// A second hand on the connection, to pass signals on with.
    pub fn signals(&self) -> io::Result<impl Fn(u8) + Send + use<>> {
        let socket = self.socket.try_clone()?;
        Ok(move |signal| {
            // A host that is gone has ended the command.
            let _gone = wire::send(&socket, &Ask::Signal(signal), &[]);
        })
    }

    /// Runs a command with these as its stdin, stdout and stderr. It ends if this process does.
    pub fn exec(
        self,
        request: &ExecRequest,
        streams: [BorrowedFd<'_>; 3],
        mut told: impl FnMut(Told<'_>),
    ) -> Result<Ran, SessionError> {
        let memory = wire::in_memory(request).map_err(failed("the request cannot be written"))?;
        let [stdin, stdout, stderr] = streams;
        let sent = wire::send(&self.socket, &Ask::Exec, &[memory.as_fd(), stdin, stdout, stderr]);
        sent.map_err(failed("the request cannot be sent"))?;
        loop {
            let (answer, mut fds) = self.answer()?;
            match answer {
                Answer::Busy { command } => told(Told::Busy(&command)),
                Answer::Started { run_id } => told(Told::Started(&run_id)),
                Answer::Refused(refusal) => return Err(SessionError::Refused(refusal)),
                Answer::Ended => {
                    let memory = fds.pop().ok_or_else(|| self.out_of_turn())?;
                    let done: Done = wire::from_memory(memory).map_err(failed("the answer cannot be read"))?;
                    return Ok(Ran { record: done.record, timings: done.timings_us.map(wire::timings) });
                }
                Answer::Root { .. } | Answer::Status(_) => return Err(self.out_of_turn()),
            }
        }
    }

    /// What it takes to copy files in and out.
    pub fn root(self) -> Result<Root, SessionError> {
        match self.ask(&Ask::Root)? {
            (Answer::Root { owner, directory, writable }, mut fds) if !fds.is_empty() => {
                let writable = writable.into_iter().map(|path| path.0).collect();
                Ok(Root { root: fds.remove(0), owner, directory: directory.0, writable })
            }
            _ => Err(self.out_of_turn()),
        }
    }

    /// How it is doing.
    pub fn status(self) -> Result<Status, SessionError> {
        match self.ask(&Ask::Status)? {
            (Answer::Status(status), _) => Ok(status),
            _ => Err(self.out_of_turn()),
        }
    }

    fn ask(&self, ask: &Ask) -> Result<(Answer, Vec<OwnedFd>), SessionError> {
        wire::send(&self.socket, ask, &[]).map_err(|_| SessionError::Over(self.name.clone()))?;
        self.answer()
    }

    fn answer(&self) -> Result<(Answer, Vec<OwnedFd>), SessionError> {
        let answer = wire::receive(&self.socket).map_err(failed("the session cannot be heard"))?;
        answer.ok_or_else(|| SessionError::Over(self.name.clone()))
    }

    fn out_of_turn(&self) -> SessionError {
        let source = io::Error::other("its host answered something else");
        SessionError::Io { what: "the session does not understand this hotcell", source }
    }
}
