//! The supervisor's side of a launch: starts the stub, feeds it a program, hears what happened.
//!
//! The stub is executed from sealed memory: nothing on disk can be swapped for it, and nothing a
//! cell does through `/proc/self/exe` can write to it.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType,
};

use crate::program::{Image, command_bytes};
use crate::wire;

static STUB: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/stub"));

/// What a launch reports, in the order it happens.
#[derive(Debug)]
pub enum Event {
    /// Init exists; the pidfd names it for good.
    Spawned {
        /// Init's pid as we see it.
        pid: i32,
        /// Signals and waits that cannot hit another process.
        pidfd: OwnedFd,
    },
    /// Every wall stands and proved it; the exported descriptors, in order.
    Ready(Vec<OwnedFd>),
    /// A call did not answer as the program expects.
    Fault {
        /// Which: see [`Image::label`], or the `OP_*` values of [`wire`].
        op: u64,
        /// What the kernel answered: `-errno`, or an unexpected success.
        answer: i64,
    },
    /// The payload ended with this wait status.
    Ended {
        /// As `wait` gives it.
        status: i32,
        /// How many processes it left behind, which were killed.
        n_left: u64,
    },
    /// Every process of the cell is gone; init's numbers can be read until [`Spawner::reap`].
    Gone,
    /// Init is reaped, and this is what the whole tree used.
    Reaped(Usage),
}

/// What a finished tree used, as the kernel counted it.
#[derive(Clone, Copy, Default, Debug)]
pub struct Usage {
    /// User time.
    pub user_us: i64,
    /// System time.
    pub system_us: i64,
    /// Largest resident set of one process.
    pub resident_max_kib: i64,
    /// Blocks of 512 bytes read from storage.
    pub read_blocks: i64,
    /// Blocks of 512 bytes written to storage.
    pub written_blocks: i64,
}

/// A running stub.
#[derive(Debug)]
pub struct Spawner {
    control: OwnedFd,
    child: Child,
    has_spawned: bool,
    /// What init said before the spawner got to say that it exists: two processes share one socket.
    early: VecDeque<(wire::Message, Vec<OwnedFd>)>,
}

impl Spawner {
    /// Starts the stub.
    pub fn start() -> io::Result<Spawner> {
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let mut command = Command::new(stub_path()?);
        command.env_clear().stdin(Stdio::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn()?;
        Ok(Spawner { control: ours, child, has_spawned: false, early: VecDeque::new() })
    }

    /// The stub's pid. No other process of this machine has it while the cell lives.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Makes a user namespace with these maps, for mounts that show a file's owner as somebody else.
    pub fn user_namespace(&mut self, uid_map: &str, gid_map: &str) -> io::Result<OwnedFd> {
        self.send(&wire::Command { kind: wire::COMMAND_HOLD, len: 0 }, &[])?;
        let (message, _) = self.receive_raw()?;
        if message.kind != wire::MESSAGE_HOLDING {
            return Err(io::Error::other("the stub answered out of turn"));
        }
        if message.value < 0 {
            return Err(os_error(message.value));
        }
        let process = PathBuf::from(format!("/proc/{}", message.value));
        std::fs::write(process.join("uid_map"), uid_map)?;
        std::fs::write(process.join("gid_map"), gid_map)?;
        Ok(File::open(process.join("ns/user"))?.into())
    }

    /// Hands over a program and the descriptors it refers to as [`wire::INPUT_FD_FIRST`] and up.
    pub fn launch<L>(&mut self, image: &Image<L>, inputs: &[BorrowedFd<'_>]) -> io::Result<()> {
        let memory = File::from(memfd("hotcell-program", MemfdFlags::CLOEXEC)?);
        (&memory).write_all(&image.bytes)?;
        let mut fds = vec![memory.as_fd()];
        fds.extend_from_slice(inputs);
        assert!(fds.len() <= wire::INPUT_FDS_MAX, "a program takes at most {} descriptors", wire::INPUT_FDS_MAX - 1);
        self.send(&wire::Command { kind: wire::COMMAND_PROGRAM, len: image.bytes.len() as u64 }, &fds)
    }

    /// The control socket, for polling.
    pub fn as_pollable(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }

    /// Whether an event waits that polling does not show.
    pub fn has_early_event(&self) -> bool {
        self.has_spawned && !self.early.is_empty()
    }

    /// Waits for the next event; `None` when the stub is gone. Events come in the order of [`Event`].
    pub fn next_event(&mut self) -> io::Result<Option<Event>> {
        let (message, mut fds) = loop {
            if self.has_spawned
                && let Some(early) = self.early.pop_front()
            {
                break early;
            }
            let received = match self.receive_raw() {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    // No init will come any more; what was said before the end is why.
                    self.has_spawned = true;
                    match self.early.pop_front() {
                        Some(early) => break early,
                        None => return Ok(None),
                    }
                }
                Err(error) => return Err(error),
            };
            self.has_spawned |= received.0.kind == wire::MESSAGE_SPAWNED;
            if self.has_spawned {
                break received;
            }
            self.early.push_back(received);
        };
        let value_i32 = i32::try_from(message.value).unwrap_or(-1);
        Ok(Some(match message.kind {
            wire::MESSAGE_SPAWNED => match fds.pop() {
                Some(pidfd) => Event::Spawned { pid: value_i32, pidfd },
                // The kernel drops descriptors silently when our table is full.
                None => return Err(io::Error::from_raw_os_error(libc::EMFILE)),
            },
            wire::MESSAGE_READY => Event::Ready(fds),
            wire::MESSAGE_FAULT => Event::Fault { op: message.op, answer: message.value },
            wire::MESSAGE_ENDED => Event::Ended { status: value_i32, n_left: message.usage[0].cast_unsigned() },
            wire::MESSAGE_GONE => Event::Gone,
            wire::MESSAGE_REAPED => {
                let [user_us, system_us, resident_max_kib, read_blocks, written_blocks] = message.usage;
                Event::Reaped(Usage { user_us, system_us, resident_max_kib, read_blocks, written_blocks })
            }
            other => return Err(io::Error::other(format!("the stub sent a message of unknown kind {other}"))),
        }))
    }

    /// Tells the stub that init's numbers were read.
    pub fn reap(&mut self) -> io::Result<()> {
        self.send(&wire::Command { kind: wire::COMMAND_REAP, len: 0 }, &[])
    }

    fn send(&mut self, command: &wire::Command, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(wire::INPUT_FDS_MAX))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(io::Error::other("too many descriptors for one message"));
        }
        let bytes = [io::IoSlice::new(command_bytes(command))];
        rustix::io::retry_on_intr(|| rustix::net::sendmsg(&self.control, &bytes, &mut ancillary, SendFlags::NOSIGNAL))?;
        Ok(())
    }

    fn receive_raw(&mut self) -> io::Result<(wire::Message, Vec<OwnedFd>)> {
        let mut bytes = [0u8; size_of::<wire::Message>()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(wire::EXPORTS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = rustix::io::retry_on_intr(|| {
            rustix::net::recvmsg(
                &self.control,
                &mut [io::IoSliceMut::new(&mut bytes)],
                &mut ancillary,
                RecvFlags::CMSG_CLOEXEC,
            )
        });
        let n = match received {
            // The stub died with our command unread.
            Err(rustix::io::Errno::CONNRESET) => 0,
            other => other?.bytes,
        };
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let fds = ancillary
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            })
            .flatten()
            .collect();
        let word = |at: usize| {
            let mut word = [0u8; 8];
            word.copy_from_slice(&bytes[at * 8..at * 8 + 8]);
            u64::from_ne_bytes(word)
        };
        let signed = |at: usize| word(at).cast_signed();
        let message = wire::Message {
            kind: word(0),
            op: word(1),
            value: signed(2),
            usage: [signed(3), signed(4), signed(5), signed(6), signed(7)],
        };
        Ok((message, fds))
    }
}

impl Drop for Spawner {
    /// Ends the cell with the stub. Closing the socket is what the stub listens to; it kills and
    /// sweeps, and only then is it reaped here.
    fn drop(&mut self) {
        if let Ok((ours, _theirs)) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
        {
            self.control = ours;
        } else if self.child.kill().is_err() {
            // Already gone; init follows its parent.
        }
        if self.child.wait().is_err() {
            // Reaped by somebody else: nothing is left to wait for.
        }
    }
}

/// The error a negative answer of the kernel stands for.
pub fn os_error(answer: i64) -> io::Error {
    io::Error::from_raw_os_error(i32::try_from(-answer).unwrap_or(libc::EIO))
}

/// A path that executes the stub: a read-only descriptor of sealed memory, made once a process.
fn stub_path() -> io::Result<PathBuf> {
    static SEALED: OnceLock<File> = OnceLock::new();
    let file = match SEALED.get() {
        Some(file) => file,
        None => {
            let made = sealed_stub()?;
            SEALED.get_or_init(|| made)
        }
    };
    Ok(PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd())))
}

fn sealed_stub() -> io::Result<File> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Kernels before 6.3 know no MFD_EXEC and make every memfd executable.
    let writable =
        File::from(memfd("hotcell-stub", flags | MemfdFlags::EXEC).or_else(|_| memfd("hotcell-stub", flags))?);
    (&writable).write_all(STUB)?;
    rustix::fs::fchmod(&writable, rustix::fs::Mode::from_raw_mode(0o555))?;
    let seals = SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    rustix::fs::fcntl_add_seals(&writable, seals)?;
    // The kernel refuses to execute what somebody holds open for writing, ourselves included.
    File::open(format!("/proc/self/fd/{}", writable.as_raw_fd()))
}

fn memfd(name: &str, flags: MemfdFlags) -> io::Result<OwnedFd> {
    Ok(rustix::fs::memfd_create(name, flags)?)
}
