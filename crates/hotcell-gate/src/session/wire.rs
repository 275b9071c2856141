//! What a client and a host of a session say to each other: one JSON object a message, descriptors beside it, and what
//! may be large in memory behind a descriptor.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use hotcell_base::{Bytes, Cpus, ExactPath, Outcome, RunId};
use hotcell_cell::report::Timings;
use hotcell_cell::{Exec, Limits};
use rustix::fs::MemfdFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::record::Record;

/// What a client asks.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Ask {
    /// Run a command: an [`ExecRequest`] in memory, then stdin, stdout and stderr.
    Exec,
    /// Pass a signal on to it.
    Signal(u8),
    /// Give the root of what exists inside.
    Root,
    /// Say how things are.
    Status,
}

/// What a host answers.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// Another command runs; this one waits.
    Busy { command: Vec<String> },
    /// Its record exists and it is about to begin.
    Started { run_id: RunId },
    /// It ended: a [`Done`] in memory.
    Ended,
    /// It did not run.
    Refused(Refusal),
    /// The root comes along; whose files are the cell's own, where its commands begin, and which of the host's
    /// directories they may write to.
    Root { owner: u32, directory: ExactPath, writable: Vec<ExactPath> },
    /// How things are.
    Status(Status),
}

/// How a command ended.
#[derive(Serialize, Deserialize)]
pub(super) struct Done {
    pub(super) record: Record,
    /// Of prepare, walls, run and collect; none if the attempt was made before, and nothing ran now.
    pub(super) timings_us: Option<[u64; 4]>,
}

/// Why a command did not run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Refusal {
    /// The message and its causes.
    pub chain: Vec<String>,
    /// What to try next.
    pub hint: Option<String>,
    /// In a word.
    pub outcome: Outcome,
}

/// How a session is doing.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Status {
    /// Commands it has run.
    pub n_commands: u64,
    /// The one that runs now.
    pub running: Option<Vec<String>>,
    /// Until it ends for want of a command; none while one runs.
    pub idle_left_ms: Option<u64>,
    /// Until it ends in any case.
    pub life_left_ms: u64,
}

/// A command to run in a session.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ExecRequest {
    argv: Vec<ExactPath>,
    env: Vec<(ExactPath, Option<ExactPath>)>,
    cwd: Option<ExactPath>,
    limits: LimitChanges,
    pub(super) name: Option<String>,
    pub(super) labels: std::collections::BTreeMap<String, String>,
    /// The text of the lease it is to run under; its own, if none.
    pub(super) lease: Option<String>,
    pub(super) attempt_id: Option<String>,
}

/// Limits of a command that differ from its session's.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[allow(missing_docs)] // Named as in [`Limits`].
pub struct LimitChanges {
    pub time: Option<Duration>,
    pub cpus_milli: Option<u32>,
    pub cpu_time: Option<Duration>,
    pub memory: Option<u64>,
    pub pids: Option<u32>,
    pub fds: Option<u32>,
    pub output: Option<u64>,
    pub file_size: Option<u64>,
}

impl LimitChanges {
    fn of(self, session: &Limits) -> Option<Limits> {
        let changed = Limits {
            time: self.time.unwrap_or(session.time),
            cpus: self.cpus_milli.map_or(session.cpus, |milli| Cpus { milli }),
            cpu_time: self.cpu_time.or(session.cpu_time),
            memory: self.memory.map_or(session.memory, Bytes),
            pids: self.pids.unwrap_or(session.pids),
            fds: self.fds.unwrap_or(session.fds),
            // The session's filesystem has the size it has.
            disk: session.disk,
            output: self.output.map_or(session.output, Bytes),
            file_size: self.file_size.map(Bytes).or(session.file_size),
        };
        (changed != *session).then_some(changed)
    }
}

impl ExecRequest {
    /// A request; variables without a value are taken away.
    pub fn new(exec: &Exec, limits: LimitChanges) -> ExecRequest {
        let exact = |text: &std::ffi::OsString| ExactPath::from(Path::new(text));
        ExecRequest {
            argv: exec.argv.iter().map(exact).collect(),
            env: exec.env.iter().map(|(name, value)| (exact(name), value.as_ref().map(exact))).collect(),
            cwd: exec.cwd.as_deref().map(ExactPath::from),
            limits,
            name: None,
            labels: Default::default(),
            lease: None,
            attempt_id: None,
        }
    }

    /// The same, with what it can be found by.
    pub fn named(self, name: Option<String>, labels: std::collections::BTreeMap<String, String>) -> ExecRequest {
        ExecRequest { name, labels, ..self }
    }

    /// The same, under this lease and as this attempt.
    pub fn leased(self, lease: Option<String>, attempt_id: Option<String>) -> ExecRequest {
        ExecRequest { lease, attempt_id, ..self }
    }

    pub(super) fn exec(&self, session: &Limits) -> Exec {
        let plain = |text: &ExactPath| text.0.clone().into_os_string();
        Exec {
            argv: self.argv.iter().map(plain).collect(),
            env: self.env.iter().map(|(name, value)| (plain(name), value.as_ref().map(plain))).collect(),
            cwd: self.cwd.as_ref().map(|cwd| cwd.0.clone()),
            limits: self.limits.of(session),
            seed: None,
        }
    }
}

pub(super) fn micros(timings: &Timings) -> [u64; 4] {
    let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
    [timings.prepare, timings.walls, timings.run, timings.collect].map(micros)
}

pub(super) fn timings([prepare, walls, run, collect]: [u64; 4]) -> Timings {
    let [prepare, walls, run, collect] = [prepare, walls, run, collect].map(Duration::from_micros);
    Timings { prepare, walls, run, collect }
}

/// Descriptors that come with a message at most.
const FDS_MAX: usize = 4;
/// A message is small; what may be large comes behind a descriptor.
const MESSAGE_MAX: usize = 64 << 10;

/// A socket of a session, bound or connected.
///
/// The path of one may be longer than a socket's name can be, so it is reached through its directory.
pub(super) fn socket(directory: &Path) -> io::Result<(OwnedFd, SocketAddrUnix, File)> {
    let directory = File::open(directory)?;
    let fd = std::os::fd::AsRawFd::as_raw_fd(&directory);
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{fd}/socket"))?;
    let kind = (AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    Ok((rustix::net::socket_with(kind.0, kind.1, kind.2, None)?, address, directory))
}

pub(super) fn send(socket: &OwnedFd, message: &impl Serialize, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let text = serde_json::to_vec(message).map_err(io::Error::other)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("too many descriptors for one message"));
    }
    let parts = [IoSlice::new(&text)];
    rustix::io::retry_on_intr(|| rustix::net::sendmsg(socket, &parts, &mut ancillary, SendFlags::NOSIGNAL))?;
    Ok(())
}

/// The next message and its descriptors; none when the other side is gone.
pub(super) fn receive<T: DeserializeOwned>(socket: &OwnedFd) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut text = vec![0u8; MESSAGE_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::io::retry_on_intr(|| {
        let mut parts = [IoSliceMut::new(&mut text)];
        rustix::net::recvmsg(socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC)
    });
    let n = match received {
        Ok(received) => received.bytes,
        Err(rustix::io::Errno::CONNRESET) => 0,
        Err(errno) => return Err(errno.into()),
    };
    if n == 0 {
        return Ok(None);
    }
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            fds.extend(received);
        }
    }
    let message = serde_json::from_slice(&text[..n]).map_err(io::Error::other)?;
    Ok(Some((message, fds)))
}

/// Puts something behind a descriptor.
pub(super) fn in_memory(value: &impl Serialize) -> io::Result<OwnedFd> {
    let memory = rustix::fs::memfd_create("hotcell-session", MemfdFlags::CLOEXEC)?;
    let mut file = File::from(memory);
    file.write_all(&serde_json::to_vec(value).map_err(io::Error::other)?)?;
    Ok(file.into())
}

/// What is behind a descriptor.
pub(super) fn from_memory<T: DeserializeOwned>(memory: OwnedFd) -> io::Result<T> {
    const MOST: u64 = 64 << 20;
    let mut file = File::from(memory);
    file.rewind()?;
    let mut text = Vec::new();
    file.take(MOST).read_to_end(&mut text)?;
    serde_json::from_slice(&text).map_err(io::Error::other)
}

/// Whether the other side is ourselves, as the kernel saw it connect.
pub(super) fn is_ours(socket: &OwnedFd) -> bool {
    let peer = rustix::net::sockopt::socket_peercred(socket.as_fd());
    peer.is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}
