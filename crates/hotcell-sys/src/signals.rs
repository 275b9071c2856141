//! Signals as something to read, for a program that waits for them.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

/// Signals that ask a program to end.
const ENDING: [i32; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

/// A queue of the signals that ask this program to end, which no longer end it.
#[derive(Debug)]
pub struct EndSignals(File);

impl EndSignals {
    /// Blocks them for this thread and those it starts: call it before starting any.
    pub fn listen() -> io::Result<EndSignals> {
        // SAFETY: zeroed bytes are a valid sigset_t, and sigemptyset makes it one in any case.
        let mut set: libc::sigset_t = unsafe { std::mem::zeroed() };
        // SAFETY: writes the set above.
        unsafe { libc::sigemptyset(&raw mut set) };
        for signal in ENDING {
            // SAFETY: as above; the numbers are valid signals.
            unsafe { libc::sigaddset(&raw mut set, signal) };
        }
        let mut blocked = set;
        // Not to end, only not to be harmed by: a file of ours may meet a limit of our caller's, and a stopped
        // supervisor would enforce nothing.
        for signal in [libc::SIGXFSZ, libc::SIGTSTP] {
            // SAFETY: as above.
            unsafe { libc::sigaddset(&raw mut blocked, signal) };
        }
        // SAFETY: reads the set; the old mask is not asked for.
        let rc = unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const blocked, std::ptr::null_mut()) };
        if rc != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: reads the set; makes a new descriptor.
        let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and nobody else's.
        Ok(EndSignals(File::from(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// Waits for the next one and gives its number.
    pub fn wait(&self) -> io::Result<u8> {
        let mut info = [0u8; size_of::<libc::signalfd_siginfo>()];
        (&self.0).read_exact(&mut info)?;
        // signalfd_siginfo begins with the signal's number; all of ours fit a byte.
        Ok(info[0])
    }
}

impl AsFd for EndSignals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
