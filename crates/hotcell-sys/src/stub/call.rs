//! The syscall instruction, and typed calls for what the stub does by itself.
//!
//! No libc: the stub has no heap, no locks, no thread state, and starts in a fifth of the time.

use core::arch::asm;

/// Makes one syscall and gives back the kernel's raw answer: `-errno` on failure.
///
/// # Safety
/// The arguments must be what the call named by `nr` allows: pointers it reads or writes must be
/// valid for that, and it must not change what the Rust code around it relies on.
pub(crate) unsafe fn syscall(nr: i64, args: [u64; 6]) -> i64 {
    let answer: i64;
    // SAFETY: the instruction clobbers only rcx, r11 and rax, as declared, and memory, which is the
    // default; what the call itself does is the caller's promise.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") nr => answer,
            in("rdi") args[0],
            in("rsi") args[1],
            in("rdx") args[2],
            in("r10") args[3],
            in("r8") args[4],
            in("r9") args[5],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    answer
}

macro_rules! call {
    ($nr:expr $(, $arg:expr)*) => {{
        let given = [$($arg as u64),*];
        let mut args = [0u64; 6];
        let mut at = 0;
        while at < given.len() {
            args[at] = given[at];
            at += 1;
        }
        crate::stub_call::syscall($nr, args)
    }};
}
pub(crate) use call;

// Numbers of the calls the stub makes by itself (x86_64).
pub(crate) const MMAP: i64 = 9;
pub(crate) const RT_SIGACTION: i64 = 13;
pub(crate) const RT_SIGPROCMASK: i64 = 14;
pub(crate) const GETPID: i64 = 39;
pub(crate) const SENDMSG: i64 = 46;
pub(crate) const RECVMSG: i64 = 47;
pub(crate) const CLONE: i64 = 56;
pub(crate) const MUNMAP: i64 = 11;
pub(crate) const READ: i64 = 0;
pub(crate) const SIGNALFD4: i64 = 289;
pub(crate) const WAIT4: i64 = 61;
pub(crate) const KILL: i64 = 62;
pub(crate) const POLL: i64 = 7;
pub(crate) const CLOSE: i64 = 3;
pub(crate) const FCNTL: i64 = 72;
pub(crate) const CLOCK_GETTIME: i64 = 228;
pub(crate) const PIPE2: i64 = 293;
pub(crate) const SETSID: i64 = 112;
pub(crate) const PRCTL: i64 = 157;
pub(crate) const EXIT_GROUP: i64 = 231;
pub(crate) const DUP3: i64 = 292;
pub(crate) const CLONE3: i64 = 435;
pub(crate) const CLOSE_RANGE: i64 = 436;

/// For [`clone`]: the process shares this one's memory.
pub(crate) const CLONE_VM: u64 = 0x100;
/// For [`clone`]: this one stands still until the other has executed something else or ended.
pub(crate) const CLONE_VFORK: u64 = 0x4000;
/// For [`clone`]: this one is told of the other's end.
pub(crate) const SIGCHLD: u64 = 17;

/// Leaves this program for what the frame of a signal says: its registers, its stack, its place in the code.
///
/// # Safety
/// `frame` must be the address of one, as the kernel lays it out, and nothing of this process is needed any more.
pub(crate) unsafe fn resume(frame: u64) -> ! {
    const RT_SIGRETURN: u64 = 15;
    // SAFETY: as the caller vouches. The kernel looks for the frame below the return address that a handler popped.
    unsafe {
        asm!(
            "mov rsp, {top}",
            "syscall",
            "ud2",
            top = in(reg) frame + 8,
            in("rax") RT_SIGRETURN,
            options(noreturn),
        );
    }
}

/// Starts a process on a stack of its own: its pid, or `-errno`.
///
/// # Safety
/// `stack_top` must be the end of writable memory that nobody else uses meanwhile, aligned to 16 bytes. `run` must not
/// return, nor change what this process relies on, but through `argument`.
pub(crate) unsafe fn clone(flags: u64, stack_top: u64, run: unsafe extern "C" fn(u64) -> !, argument: u64) -> i64 {
    let answer: i64;
    // SAFETY: the child goes to `run` without touching this frame, which it cannot see on its own stack; what it does
    // there is the caller's promise.
    unsafe {
        asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r13",
            "call r12",
            "ud2",
            "2:",
            inlateout("rax") CLONE => answer,
            in("rdi") flags,
            in("rsi") stack_top,
            in("rdx") 0u64,
            in("r10") 0u64,
            in("r8") 0u64,
            in("r12") run,
            in("r13") argument,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    answer
}
