//! The three streams of a run: pipes of ours, never a descriptor of a host's file.

use std::io;
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags};
use rustix::fs::OFlags;
use sha2::{Digest, Sha256};

use super::{Stdin, Stream};
use crate::report::Captured;

/// The three pipes of a run: our ends (write, read, read) and the cell's.
pub(super) struct Pipes {
    pub(super) ours: [OwnedFd; 3],
    pub(super) theirs: [OwnedFd; 3],
}

impl Pipes {
    /// `owner`: who must be able to open them again by name, as `/dev/stdout`.
    pub(super) fn new(owner: Option<u32>) -> io::Result<Pipes> {
        let pipe = || rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC);
        let (stdin_read, stdin_write) = pipe()?;
        let (stdout_read, stdout_write) = pipe()?;
        let (stderr_read, stderr_write) = pipe()?;
        // Only our ends: the flag belongs to the open pipe, and a command expects its own to block.
        for fd in [&stdin_write, &stdout_read, &stderr_read] {
            rustix::fs::fcntl_setfl(fd, rustix::fs::fcntl_getfl(fd)? | OFlags::NONBLOCK)?;
        }
        if let Some(id) = owner {
            for fd in [&stdin_read, &stdout_write, &stderr_write] {
                rustix::fs::fchown(fd, Some(rustix::fs::Uid::from_raw(id)), Some(rustix::fs::Gid::from_raw(id)))?;
            }
        }
        Ok(Pipes { ours: [stdin_write, stdout_read, stderr_read], theirs: [stdin_read, stdout_write, stderr_write] })
    }
}

/// One stream that comes out.
pub(super) struct Output {
    pub(super) stream: Stream,
    pub(super) pipe: Option<OwnedFd>,
    pub(super) total: u64,
    pub(super) truncated: bool,
    pub(super) hash: Sha256,
}

impl Output {
    pub(super) fn new(stream: Stream, pipe: OwnedFd) -> Output {
        Output { stream, pipe: Some(pipe), total: 0, truncated: false, hash: Sha256::new() }
    }

    pub(super) fn captured(&self) -> Captured {
        let sha256 = self.hash.clone().finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Captured { bytes_total: self.total, truncated: self.truncated, sha256, kept: Vec::new() }
    }
}

/// What goes in.
pub(super) struct Input {
    source: Option<OwnedFd>,
    pipe: Option<OwnedFd>,
    pending: Vec<u8>,
}

impl Input {
    pub(super) fn new(stdin: Stdin, pipe: OwnedFd) -> Input {
        match stdin {
            Stdin::Null => Input { source: None, pipe: None, pending: Vec::new() },
            Stdin::From(source) => Input { source: Some(source), pipe: Some(pipe), pending: Vec::new() },
        }
    }

    /// Moves what can be moved without waiting; the descriptor polled was ready.
    pub(super) fn pump(&mut self) {
        if self.pending.is_empty()
            && let Some(source) = &self.source
        {
            let mut buffer = vec![0; CHUNK];
            match rustix::io::read(source, &mut buffer) {
                Ok(0) => self.source = None,
                Ok(n) => {
                    buffer.truncate(n);
                    self.pending = buffer;
                }
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
                // A source that cannot be read any more has ended.
                Err(_) => self.source = None,
            }
        }
        if let (Some(pipe), false) = (&self.pipe, self.pending.is_empty()) {
            match rustix::io::write(pipe, &self.pending) {
                Ok(n) => {
                    self.pending.drain(..n);
                }
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
                // The command closed its stdin; the rest is not wanted.
                Err(_) => self.close(),
            }
        }
        if self.source.is_none() && self.pending.is_empty() {
            self.close();
        }
    }

    pub(super) fn close(&mut self) {
        *self = Input { source: None, pipe: None, pending: Vec::new() };
    }

    pub(super) fn pollable(&self) -> Option<PollFd<'_>> {
        if self.pending.is_empty() {
            self.source.as_ref().map(|source| PollFd::new(source, PollFlags::IN))
        } else {
            self.pipe.as_ref().map(|pipe| PollFd::new(pipe, PollFlags::OUT))
        }
    }
}

pub(super) const CHUNK: usize = 64 << 10;
