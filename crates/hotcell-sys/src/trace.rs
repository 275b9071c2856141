//! Crashes and races on demand: runs a program up to its nth system call, and kills it there or does something else
//! while it stands still.
//!
//! For tests of what a crash leaves behind and of what others do meanwhile. Nothing is built into the program under
//! test: the kernel stops its first thread at every call it makes, and one of them is its last.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use libc::{c_int, c_long, c_void};

/// How the program ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ending {
    /// It was killed as it made the call of this number in the kernel's table.
    Killed {
        /// Which call.
        call: i64,
    },
    /// It made fewer calls and ended by itself.
    Ended {
        /// Its wait status.
        status: i32,
    },
}

/// What becomes of a program that stands before a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Then {
    /// It makes the call.
    GoOn,
    /// It is killed, before the kernel carries the call out.
    Kill,
}

/// Starts a program, lets it begin `n` system calls, and kills it before the kernel carries the last one out.
pub fn kill_at_call(command: &mut Command, n: u64) -> io::Result<Ending> {
    at_calls(command, |call| if call == n { Then::Kill } else { Then::GoOn })
}

/// Starts a program and asks before each of its calls, counted from one, what is to become of it. Whatever is done
/// meanwhile, it stands still.
pub fn at_calls(command: &mut Command, then: impl FnMut(u64) -> Then) -> io::Result<Ending> {
    // SAFETY: between fork and exec only one call is made, which allocates nothing and takes no lock.
    unsafe {
        command.pre_exec(|| ptrace(libc::PTRACE_TRACEME, 0, 0));
    }
    let child: Child = command.spawn()?;
    let pid = c_int::try_from(child.id()).expect("a pid is an int");
    let traced = follow(pid, then);
    if traced.is_err() {
        // SAFETY: a child of ours that nobody has waited for.
        unsafe { libc::kill(pid, libc::SIGKILL) };
        // An error of tracing matters more than that of waiting.
        let _reaped = wait(pid);
    }
    traced
}

fn follow(pid: c_int, mut then: impl FnMut(u64) -> Then) -> io::Result<Ending> {
    // Stopped by its own exec.
    wait(pid)?;
    let options = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_EXITKILL;
    ptrace(libc::PTRACE_SETOPTIONS, pid, c_long::from(options))?;
    let (mut n_calls, mut signal, mut entering) = (0, 0, true);
    loop {
        ptrace(libc::PTRACE_SYSCALL, pid, signal)?;
        let status = wait(pid)?;
        if !libc::WIFSTOPPED(status) {
            return Ok(Ending::Ended { status });
        }
        signal = 0;
        let stop = libc::WSTOPSIG(status);
        if stop != libc::SIGTRAP | 0x80 {
            // A signal for the program itself.
            signal = c_long::from(stop);
            continue;
        }
        if entering {
            n_calls += 1;
            if then(n_calls) == Then::Kill {
                let call = call_number(pid)?;
                // SAFETY: a child of ours that nobody has waited for.
                unsafe { libc::kill(pid, libc::SIGKILL) };
                while !libc::WIFSIGNALED(wait(pid)?) {}
                return Ok(Ending::Killed { call });
            }
        }
        entering = !entering;
    }
}

/// The call a stopped program is about to make.
fn call_number(pid: c_int) -> io::Result<i64> {
    // On this architecture the number is kept apart from the answer.
    let offset = std::mem::offset_of!(libc::user_regs_struct, orig_rax);
    // SAFETY: reads one word of the stopped child's registers; no memory of ours is touched.
    let word =
        unsafe { libc::ptrace(libc::PTRACE_PEEKUSER, pid, offset as *mut c_void, std::ptr::null_mut::<c_void>()) };
    Ok(word)
}

fn ptrace(request: libc::c_uint, pid: c_int, data: c_long) -> io::Result<()> {
    // SAFETY: none of the requests made here reads or writes memory of ours; `data` is a number to each.
    let rc = unsafe { libc::ptrace(request, pid, std::ptr::null_mut::<c_void>(), data as *mut c_void) };
    if rc == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn wait(pid: c_int) -> io::Result<c_int> {
    let mut status = 0;
    loop {
        // SAFETY: writes one int of ours. Threads of a traced program are told apart only with this flag.
        let rc = unsafe { libc::waitpid(pid, &raw mut status, libc::__WALL) };
        if rc == pid {
            return Ok(status);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_killed_at_the_call_or_ends_before_it() {
        let kill = |n| kill_at_call(&mut Command::new("/bin/true"), n).expect("traced");
        assert!(matches!(kill(1), Ending::Killed { call } if call >= 0));
        assert_eq!(kill(1_000_000), Ending::Ended { status: 0 });
        let mut n_calls = 0;
        let count = |n| {
            n_calls = n;
            Then::GoOn
        };
        assert_eq!(at_calls(&mut Command::new("/bin/true"), count).expect("traced"), Ending::Ended { status: 0 });
        assert!(n_calls > 5);
    }
}
