//! The supervisor's side of a launch: starts the stub, feeds it programs, hears what happened.
//!
//! ```text
//! Spawner::start ─▶ prepare(image of a cell) ─▶ raise() ─▶ Line ─▶ run(image of a command) ─▶ Ended
//!                                               ▲ again, when the cell is reaped      ▲ again
//! ```
//!
//! Nothing here waits for the stub to have done what it was told: what is sent is done in turn.
//!
//! The stub is executed from sealed memory: nothing on disk can be swapped for it, and nothing a
//! cell does through `/proc/self/exe` can write to it.

use std::fs::File;
use std::io::{self, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType,
};

use crate::program::{Image, command_bytes};
use crate::wire;

/// Not in rustix yet.
const F_SEAL_EXEC: u32 = 0x20;

static STUB: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/stub"));

/// What a spawner reports.
#[derive(Debug)]
pub enum Event {
    /// A cell's init exists; the pidfd names it for good.
    Spawned {
        /// Init's pid as we see it.
        pid: i32,
        /// Signals and waits that cannot hit another process.
        pidfd: OwnedFd,
    },
    /// A call did not answer as the program expects; the spawner ends.
    Fault(Fault),
    /// Every process of the cell is gone; init's numbers can be read until [`Spawner::reap`].
    Gone,
    /// Init is reaped, and this is what the whole tree used.
    Reaped(Usage),
}

/// What a cell's init reports.
#[derive(Debug)]
pub enum LineEvent {
    /// Every wall stands and proved it; the exported descriptors, in order.
    Ready(Vec<OwnedFd>),
    /// A call did not answer as the program of the cell expects; init ends.
    Fault(Fault),
    /// A call did not answer as the program of the command expects; the command never began.
    CommandFault(Fault),
    /// The command ended, and with it all that it left behind.
    Ended {
        /// As `wait` gives it.
        status: i32,
        /// How many processes it left behind, which were killed.
        n_left: u64,
        /// What it and all its processes used.
        usage: Usage,
        /// From its first instruction, or a little before, to its last.
        wall: Duration,
    },
}

/// A call that did not answer as expected.
#[derive(Clone, Copy, Debug)]
pub struct Fault {
    /// Which: see [`Image::label`], or the `OP_*` values of [`wire`].
    pub op: u64,
    /// What the kernel answered: `-errno`, or an unexpected success.
    pub answer: i64,
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

impl Usage {
    fn of(words: &[i64; 7]) -> Usage {
        let [user_us, system_us, resident_max_kib, read_blocks, written_blocks, ..] = *words;
        Usage { user_us, system_us, resident_max_kib, read_blocks, written_blocks }
    }
}

/// A running stub.
#[derive(Debug)]
pub struct Spawner {
    control: OwnedFd,
    child: Child,
}

impl Spawner {
    /// Starts the stub.
    pub fn start() -> io::Result<Spawner> {
        let (ours, theirs) = pair()?;
        let mut command = Command::new(stub_path()?);
        command.env_clear().stdin(Stdio::from(theirs)).stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn()?;
        Ok(Spawner { control: ours, child })
    }

    /// The stub's pid. No other process of this machine has it while the spawner lives.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Has something done before it is known which cells there will be: the ground of an image.
    pub fn begin<L>(&mut self, image: &Image<L>) -> io::Result<()> {
        send_image(&self.control, wire::COMMAND_EARLY, image, &[])
    }

    /// Hands over the program of all its cells, and the descriptors it refers to.
    pub fn prepare<L>(&mut self, image: &Image<L>, inputs: &[BorrowedFd<'_>]) -> io::Result<()> {
        send_image(&self.control, wire::COMMAND_PROGRAM, image, inputs)
    }

    /// Has a cell made, with the descriptors its init needs. The one before it must be reaped.
    pub fn raise(&mut self, inputs: &[OwnedFd]) -> io::Result<Line> {
        assert!(inputs.len() <= wire::CELL_INPUTS_MAX, "a cell comes with at most {}", wire::CELL_INPUTS_MAX);
        let (ours, theirs) = pair()?;
        let fds: Vec<BorrowedFd<'_>> = std::iter::once(&theirs).chain(inputs).map(AsFd::as_fd).collect();
        send(&self.control, wire::COMMAND_CELL, 0, &fds)?;
        Ok(Line { socket: ours })
    }

    /// The control socket, for polling.
    pub fn as_pollable(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }

    /// Waits for the next event; `None` when the stub is gone.
    pub fn next_event(&mut self) -> io::Result<Option<Event>> {
        let Some((message, mut fds)) = receive_or_end(&self.control)? else { return Ok(None) };
        Ok(Some(match message.kind {
            wire::MESSAGE_SPAWNED => match fds.pop() {
                Some(pidfd) => Event::Spawned { pid: i32::try_from(message.value).unwrap_or(-1), pidfd },
                // The kernel drops descriptors silently when our table is full.
                None => return Err(io::Error::from_raw_os_error(libc::EMFILE)),
            },
            wire::MESSAGE_FAULT => Event::Fault(Fault { op: message.op, answer: message.value }),
            wire::MESSAGE_GONE => Event::Gone,
            wire::MESSAGE_REAPED => Event::Reaped(Usage::of(&message.usage)),
            other => return Err(io::Error::other(format!("the stub sent a message of unknown kind {other}"))),
        }))
    }

    /// Tells the stub that init's numbers were read.
    pub fn reap(&mut self) -> io::Result<()> {
        send(&self.control, wire::COMMAND_REAP, 0, &[])
    }
}

/// The line to a cell's init. The cell ends when it is dropped.
#[derive(Debug)]
pub struct Line {
    socket: OwnedFd,
}

impl Line {
    /// Has a command run, once every wall stands and the one before it has ended.
    pub fn run<L>(&self, image: &Image<L>, inputs: &[BorrowedFd<'_>]) -> io::Result<()> {
        send_image(&self.socket, wire::COMMAND_RUN, image, inputs)
    }

    /// Signals the command's process group.
    pub fn signal(&self, signal: u8) -> io::Result<()> {
        send(&self.socket, wire::COMMAND_SIGNAL, u64::from(signal), &[])
    }

    /// Kills the command and every process it made; the cell stays.
    pub fn kill(&self) -> io::Result<()> {
        send(&self.socket, wire::COMMAND_KILL, 0, &[])
    }

    /// Stops every process of the cell.
    pub fn pause(&self) -> io::Result<()> {
        send(&self.socket, wire::COMMAND_PAUSE, 0, &[])
    }

    /// Lets them go on.
    pub fn resume(&self) -> io::Result<()> {
        send(&self.socket, wire::COMMAND_RESUME, 0, &[])
    }

    /// The socket, for polling.
    pub fn as_pollable(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Waits for the next event; `None` when init is gone.
    pub fn next_event(&self) -> io::Result<Option<LineEvent>> {
        let Some((message, fds)) = receive_or_end(&self.socket)? else { return Ok(None) };
        let fault = Fault { op: message.op, answer: message.value };
        Ok(Some(match message.kind {
            wire::MESSAGE_READY => LineEvent::Ready(fds),
            wire::MESSAGE_FAULT => LineEvent::Fault(fault),
            wire::MESSAGE_COMMAND_FAULT => LineEvent::CommandFault(fault),
            wire::MESSAGE_ENDED => LineEvent::Ended {
                status: i32::try_from(message.value).unwrap_or(-1),
                n_left: message.usage[5].cast_unsigned(),
                usage: Usage::of(&message.usage),
                wall: Duration::from_micros(message.usage[6].cast_unsigned()),
            },
            other => return Err(io::Error::other(format!("init sent a message of unknown kind {other}"))),
        }))
    }
}

fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

fn send_image<L>(socket: &OwnedFd, kind: u64, image: &Image<L>, inputs: &[BorrowedFd<'_>]) -> io::Result<()> {
    assert!(inputs.len() <= wire::INPUTS_MAX, "an image comes with at most {} descriptors", wire::INPUTS_MAX);
    let memory = File::from(memfd("hotcell-program", MemfdFlags::CLOEXEC)?);
    (&memory).write_all(&image.bytes)?;
    let mut fds = vec![memory.as_fd()];
    fds.extend_from_slice(inputs);
    send(socket, kind, image.bytes.len() as u64, &fds)
}

fn send(socket: &OwnedFd, kind: u64, value: u64, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(wire::INPUTS_MAX + 1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("too many descriptors for one message"));
    }
    let command = wire::Command { kind, value };
    let bytes = [io::IoSlice::new(command_bytes(&command))];
    rustix::io::retry_on_intr(|| rustix::net::sendmsg(socket, &bytes, &mut ancillary, SendFlags::NOSIGNAL))?;
    Ok(())
}

/// The next message; none when the other side is gone.
fn receive_or_end(socket: &OwnedFd) -> io::Result<Option<(wire::Message, Vec<OwnedFd>)>> {
    match receive(socket) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        received => received.map(Some),
    }
}

fn receive(socket: &OwnedFd) -> io::Result<(wire::Message, Vec<OwnedFd>)> {
    let mut bytes = [0u8; size_of::<wire::Message>()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(wire::EXPORTS_MAX))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let n = loop {
        let mut into = [io::IoSliceMut::new(&mut bytes)];
        match rustix::net::recvmsg(socket, &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            // It died with a command of ours unread, which is told once; what it said before comes after.
            Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNRESET) => {}
            received => break received?.bytes,
        }
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
    let message = wire::Message {
        kind: word(0),
        op: word(1),
        value: word(2).cast_signed(),
        usage: std::array::from_fn(|at| word(3 + at).cast_signed()),
    };
    Ok((message, fds))
}

impl Drop for Spawner {
    /// Ends the cell with the stub. Closing the socket is what the stub listens to; it kills and
    /// sweeps, and only then is it reaped here.
    fn drop(&mut self) {
        if let Ok((ours, _theirs)) = pair() {
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
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE;
    // Its mode as well, since Linux 6.3: an ordinary user's guest is its owner.
    let with_mode = SealFlags::from_bits_retain(F_SEAL_EXEC) | seals;
    rustix::fs::fcntl_add_seals(&writable, with_mode).or_else(|_| rustix::fs::fcntl_add_seals(&writable, seals))?;
    rustix::fs::fcntl_add_seals(&writable, SealFlags::SEAL)?;
    // The kernel refuses to execute what somebody holds open for writing, ourselves included.
    File::open(format!("/proc/self/fd/{}", writable.as_raw_fd()))
}

fn memfd(name: &str, flags: MemfdFlags) -> io::Result<OwnedFd> {
    Ok(rustix::fs::memfd_create(name, flags)?)
}
