//! Kernel calls that a wall must refuse, each with arguments that reach no further than the caller's own namespaces.
//!
//! The escape tests run these inside a cell and, as the control, in a cell without the wall. A call
//! that the kernel answers with an error about its arguments was reached; one that answers `EPERM`
//! or `ENOSYS` was not.

use std::io;

use libc::{c_char, c_int, c_long, c_ulong, c_void};

/// Makes the call of this name; `None` if there is none.
pub fn call(name: &str) -> Option<io::Result<i64>> {
    CALLS.iter().find(|(known, _)| *known == name).map(|(_, call)| call())
}

/// The names of all calls.
pub fn names() -> impl Iterator<Item = &'static str> {
    CALLS.iter().map(|(name, _)| *name)
}

type Call = fn() -> io::Result<i64>;

fn answer(rc: c_long) -> io::Result<i64> {
    if rc == -1 { Err(io::Error::last_os_error()) } else { Ok(rc) }
}

macro_rules! sys {
    ($nr:expr $(, $arg:expr)* $(,)?) => {
        // SAFETY: see the table: the arguments of each entry are numbers, NULL, or pointers to
        // constants and locals that outlive the call and have the size it reads or writes.
        answer(unsafe { libc::syscall($nr $(, $arg)*) })
    };
}

const NULL: *const c_void = std::ptr::null();
/// Where the caller is: a place of the selftest's own, whatever wall is missing.
const HERE: *const c_char = c".".as_ptr();
const TMPFS: *const c_char = c"tmpfs".as_ptr();
const NOWHERE: *const c_char = c"/hotcell-nowhere".as_ptr();
const EMPTY: *const c_char = c"".as_ptr();
const CWD: c_int = libc::AT_FDCWD;

/// The calls. Those that change something change it in the caller's own namespaces or process only,
/// or are given arguments that no kernel accepts.
static CALLS: &[(&str, Call)] = &[
    ("unshare-user", || sys!(libc::SYS_unshare, c_long::from(libc::CLONE_NEWUSER))),
    ("unshare-mount", || sys!(libc::SYS_unshare, c_long::from(libc::CLONE_NEWNS))),
    ("clone-user", || clone(libc::CLONE_NEWUSER)),
    ("clone3-user", clone3_user),
    ("setns", || {
        let fd = sys!(libc::SYS_openat, CWD, c"/proc/self/ns/ipc".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC)?;
        sys!(libc::SYS_setns, fd, libc::CLONE_NEWIPC)
    }),
    ("mount", || sys!(libc::SYS_mount, TMPFS, HERE, TMPFS, 0 as c_ulong, NULL)),
    ("umount2", || sys!(libc::SYS_umount2, HERE, libc::MNT_DETACH)),
    ("pivot_root", || sys!(libc::SYS_pivot_root, NOWHERE, NOWHERE)),
    ("chroot", || sys!(libc::SYS_chroot, c"/".as_ptr())),
    ("open_tree", || sys!(libc::SYS_open_tree, CWD, HERE, 1 | libc::O_CLOEXEC)),
    ("move_mount", || sys!(libc::SYS_move_mount, -1 as c_int, EMPTY, CWD, HERE, 4 as c_long)),
    ("fsopen", || sys!(libc::SYS_fsopen, TMPFS, 0 as c_long)),
    ("fspick", || sys!(libc::SYS_fspick, CWD, HERE, 0 as c_long)),
    ("fsmount", || sys!(libc::SYS_fsmount, -1 as c_int, 0 as c_long, 0 as c_long)),
    ("mount_setattr", || {
        let attributes = [1u64, 0, 0, 0];
        sys!(libc::SYS_mount_setattr, CWD, HERE, 0 as c_long, attributes.as_ptr(), size_of_val(&attributes))
    }),
    ("io_uring_setup", || {
        let mut parameters = [0u64; 15];
        sys!(libc::SYS_io_uring_setup, 1 as c_long, parameters.as_mut_ptr())
    }),
    ("io_uring_enter", || {
        sys!(libc::SYS_io_uring_enter, -1 as c_long, 0 as c_long, 0 as c_long, 0 as c_long, NULL, 0 as c_long)
    }),
    ("io_uring_register", || sys!(libc::SYS_io_uring_register, -1 as c_long, 0 as c_long, NULL, 0 as c_long)),
    ("userfaultfd", || sys!(libc::SYS_userfaultfd, libc::O_CLOEXEC | 1)),
    ("perf_event_open", || {
        // A software clock of this process: what an ordinary user may measure if anything.
        let mut attributes = [0u64; 16];
        attributes[0] = 1 | 128 << 32;
        attributes[5] = 1 | 1 << 5 | 1 << 6;
        sys!(libc::SYS_perf_event_open, attributes.as_ptr(), 0 as c_long, -1 as c_long, -1 as c_long, 0 as c_long)
    }),
    ("bpf", || sys!(libc::SYS_bpf, 9999 as c_long, NULL, 0 as c_long)),
    ("add_key", || {
        let process_keyring: c_long = -2;
        let (kind, name, payload) = (c"user".as_ptr(), c"hotcell-probe".as_ptr(), c"x".as_ptr());
        sys!(libc::SYS_add_key, kind, name, payload, 1 as c_long, process_keyring)
    }),
    ("keyctl", || sys!(libc::SYS_keyctl, 0 as c_long, -2 as c_long, 1 as c_long)),
    ("request_key", || sys!(libc::SYS_request_key, c"user".as_ptr(), c"hotcell-none".as_ptr(), NULL, 0 as c_long)),
    ("kexec_load", || sys!(libc::SYS_kexec_load, 0 as c_long, 99 as c_long, NULL, -1 as c_long)),
    ("init_module", || sys!(libc::SYS_init_module, NULL, 0 as c_long, EMPTY)),
    ("finit_module", || sys!(libc::SYS_finit_module, -1 as c_long, EMPTY, 0 as c_long)),
    ("delete_module", || sys!(libc::SYS_delete_module, c"hotcell-none".as_ptr(), libc::O_NONBLOCK)),
    ("quotactl", || sys!(libc::SYS_quotactl, -1 as c_long, NOWHERE, 0 as c_long, NULL)),
    ("acct", || sys!(libc::SYS_acct, NOWHERE)),
    ("swapon", || sys!(libc::SYS_swapon, NOWHERE, 0 as c_long)),
    ("settimeofday", || sys!(libc::SYS_settimeofday, NULL, NULL)),
    ("clock_settime", || sys!(libc::SYS_clock_settime, 99 as c_long, NULL)),
    ("sethostname", || sys!(libc::SYS_sethostname, EMPTY, -1 as c_long)),
    ("iopl", || sys!(libc::SYS_iopl, 3 as c_long)),
    ("ioperm", || sys!(libc::SYS_ioperm, 0x80 as c_long, 1 as c_long, 1 as c_long)),
    ("reboot", || sys!(libc::SYS_reboot, 0 as c_long, 0 as c_long, 0 as c_long, NULL)),
    ("syslog", || sys!(libc::SYS_syslog, 10 as c_long, NULL, 0 as c_long)),
    ("open_by_handle_at", || {
        let handle = [0u64; 4];
        sys!(libc::SYS_open_by_handle_at, CWD, handle.as_ptr(), libc::O_RDONLY)
    }),
    ("get_mempolicy", || sys!(libc::SYS_get_mempolicy, NULL, NULL, 0 as c_long, NULL, 0 as c_long)),
    ("adjtimex", || {
        // Nothing is set: anybody may ask.
        let mut state = [0u64; 32];
        sys!(libc::SYS_adjtimex, state.as_mut_ptr())
    }),
    ("io_setup", || {
        let mut context = 0u64;
        sys!(libc::SYS_io_setup, 1 as c_long, &raw mut context)
    }),
    ("modify_ldt", || sys!(libc::SYS_modify_ldt, 0 as c_long, NULL, 0 as c_long)),
    ("ustat", || sys!(libc::SYS_ustat, 0 as c_long, NULL)),
    ("open_tree-plain", || sys!(libc::SYS_open_tree, CWD, HERE, libc::O_CLOEXEC)),
    ("openat2", || {
        let how = [0u64; 3];
        sys!(libc::SYS_openat2, CWD, HERE, how.as_ptr(), size_of_val(&how))
    }),
    ("memfd_secret", || sys!(libc::SYS_memfd_secret, 0 as c_long)),
    ("personality", || sys!(libc::SYS_personality, 0x004_0000 as c_long)),
    ("chmod-setuid", || {
        let fd = made_file()?;
        sys!(libc::SYS_fchmod, fd, 0o4755 as c_long)
    }),
    ("fchmodat-setuid", || {
        made_file()?;
        sys!(libc::SYS_fchmodat, CWD, MADE, 0o4755 as c_long)
    }),
    ("open-setuid", || sys!(libc::SYS_open, c"hotcell-setid".as_ptr(), libc::O_CREAT | libc::O_WRONLY, 0o4755)),
    ("openat-setuid", || {
        sys!(libc::SYS_openat, CWD, c"hotcell-setid".as_ptr(), libc::O_CREAT | libc::O_WRONLY, 0o4755)
    }),
    ("setrlimit-core", || {
        let none = [0u64; 2];
        sys!(libc::SYS_setrlimit, libc::RLIMIT_CORE as c_long, none.as_ptr())
    }),
    ("prlimit-init", || {
        let some = [60u64, 60];
        sys!(libc::SYS_prlimit64, 1 as c_long, libc::RLIMIT_CPU as c_long, some.as_ptr(), NULL)
    }),
    ("affinity-init", || {
        let first = 1u64;
        sys!(libc::SYS_sched_setaffinity, 1 as c_long, 8 as c_long, &raw const first)
    }),
    ("nice-init", || sys!(libc::SYS_setpriority, libc::PRIO_PROCESS as c_long, 1 as c_long, 1 as c_long)),
    ("ioprio-init", || sys!(libc::SYS_ioprio_set, 1 as c_long, 1 as c_long, (2 << 13 | 7) as c_long)),
    ("tiocsti", || sys!(libc::SYS_ioctl, 0 as c_long, c_long::from(0x5412u32), c"x".as_ptr())),
    ("tiocsti-high-bits", || sys!(libc::SYS_ioctl, 0 as c_long, 0x1_0000_5412 as c_long, c"x".as_ptr())),
    ("tioclinux", || sys!(libc::SYS_ioctl, 0 as c_long, 0x541C as c_long, c"\x03".as_ptr())),
    ("set-core-limit", || {
        let none = [0u64; 2];
        sys!(libc::SYS_prlimit64, 0 as c_long, libc::RLIMIT_CORE as c_long, none.as_ptr(), NULL)
    }),
    ("sched-fifo", || {
        let priority: c_int = 1;
        sys!(libc::SYS_sched_setscheduler, 0 as c_long, libc::SCHED_FIFO, &raw const priority)
    }),
    ("nice-minus-20", || sys!(libc::SYS_setpriority, libc::PRIO_PROCESS as c_long, 0 as c_long, -20 as c_long)),
    ("ioprio-realtime", || sys!(libc::SYS_ioprio_set, 1 as c_long, 0 as c_long, (1 << 13) as c_long)),
    ("setuid-0", || sys!(libc::SYS_setresuid, 0 as c_long, 0 as c_long, 0 as c_long)),
    ("mknod-block", || {
        sys!(libc::SYS_mknodat, CWD, c"hotcell-disk".as_ptr(), libc::S_IFBLK | 0o600, libc::makedev(254, 0))
    }),
    ("x32", || {
        let getpid = 39;
        sys!(0x4000_0000 | getpid as c_long)
    }),
    ("int80", int80),
];

const MADE: *const c_char = c"hotcell-probe".as_ptr();

/// A file of one's own to try things on.
fn made_file() -> io::Result<i64> {
    sys!(libc::SYS_openat, CWD, MADE, libc::O_CREAT | libc::O_WRONLY | libc::O_CLOEXEC, 0o644)
}

/// Forks into a new namespace; the child leaves at once.
fn clone(flag: c_int) -> io::Result<i64> {
    let flags = c_long::from(flag) | c_long::from(libc::SIGCHLD);
    // SAFETY: a fork without a new stack or shared memory; the child makes one call and is gone.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, 0 as c_long, 0 as c_long, 0 as c_long, 0 as c_long) };
    leave_or_reap(pid)
}

fn clone3_user() -> io::Result<i64> {
    let mut args = [0u64; 11];
    args[0] = i64::from(libc::CLONE_NEWUSER).cast_unsigned();
    args[4] = i64::from(libc::SIGCHLD).cast_unsigned();
    // SAFETY: reads 88 bytes of ours; as above.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, args.as_ptr(), size_of_val(&args)) };
    leave_or_reap(pid)
}

fn leave_or_reap(pid: c_long) -> io::Result<i64> {
    if pid == 0 {
        // SAFETY: ends the child without running anything of the parent's.
        unsafe { libc::_exit(0) };
    }
    let pid = answer(pid)?;
    let mut status: c_int = 0;
    // SAFETY: waits for the child made above; writes one int of ours.
    unsafe { libc::waitpid(i32::try_from(pid).unwrap_or(-1), &raw mut status, 0) };
    Ok(pid)
}

/// The 32-bit way into the kernel: `getpid` by its number there.
fn int80() -> io::Result<i64> {
    let answer: i64;
    // SAFETY: getpid touches no memory; the registers it may clobber are declared.
    unsafe {
        std::arch::asm!(
            "int 0x80",
            inlateout("rax") 20i64 => answer,
            lateout("r8") _, lateout("r9") _, lateout("r10") _, lateout("r11") _,
            options(nostack),
        );
    }
    if answer < 0 { Err(io::Error::from_raw_os_error(i32::try_from(-answer).unwrap_or(libc::EIO))) } else { Ok(answer) }
}

/// Three ways to reach into another process, tried on a child of this one.
pub fn reach_into_child() -> io::Result<Vec<(&'static str, io::Result<i64>)>> {
    // SAFETY: a fork; the child waits to be killed and does nothing else.
    let child = unsafe { libc::fork() };
    if child == 0 {
        loop {
            // SAFETY: waits for a signal.
            unsafe { libc::pause() };
        }
    }
    let pid = c_long::from(answer(c_long::from(child)).map(|_| child)?);
    let seize = 0x4206 as c_long;
    let ptrace = sys!(libc::SYS_ptrace, seize, pid, NULL, NULL);
    let mut local = [0u8; 8];
    let here = libc::iovec { iov_base: local.as_mut_ptr().cast::<c_void>(), iov_len: local.len() };
    // The child is a copy of this process: the same address holds a readable buffer there.
    let there = libc::iovec { iov_base: local.as_mut_ptr().cast::<c_void>(), iov_len: local.len() };
    let one: c_ulong = 1;
    let read = sys!(libc::SYS_process_vm_readv, pid, &raw const here, one, &raw const there, one, 0 as c_ulong);
    let pidfd = sys!(libc::SYS_pidfd_open, pid, 0 as c_long);
    let getfd = pidfd.and_then(|pidfd| sys!(libc::SYS_pidfd_getfd, pidfd, 0 as c_long, 0 as c_long));
    // SAFETY: the child is ours and unreaped.
    unsafe { libc::kill(child, libc::SIGKILL) };
    let mut status: c_int = 0;
    // SAFETY: writes one int of ours.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    Ok(vec![("ptrace", ptrace), ("process_vm_readv", read), ("pidfd_getfd", getfd)])
}

/// Makes a socket and closes it again.
pub fn socket(family: i32, kind: i32, protocol: i32) -> io::Result<i64> {
    // SAFETY: three numbers in, a descriptor out.
    let fd = answer(c_long::from(unsafe { libc::socket(family, kind | libc::SOCK_CLOEXEC, protocol) }))?;
    // SAFETY: the descriptor made above, nobody else's.
    unsafe { libc::close(i32::try_from(fd).unwrap_or(-1)) };
    Ok(fd)
}

/// Makes a pair of sockets and closes them again.
pub fn socketpair(family: i32, kind: i32, protocol: i32) -> io::Result<i64> {
    let mut pair = [-1; 2];
    // SAFETY: three numbers in, two descriptors out into an array of ours.
    let rc = answer(c_long::from(unsafe { libc::socketpair(family, kind, protocol, pair.as_mut_ptr()) }))?;
    for fd in pair {
        // SAFETY: a descriptor made above, nobody else's.
        unsafe { libc::close(fd) };
    }
    Ok(rc)
}

/// Becomes two further processes, the last of them in a session of its own with nobody above it, which waits.
/// Returns in the first, when the others are there.
pub fn leave_a_daemon() -> io::Result<()> {
    for _ in 0..2 {
        // SAFETY: this program has one thread; each side goes on by itself.
        let pid = answer(c_long::from(unsafe { libc::fork() }))?;
        if pid > 0 {
            return Ok(());
        }
        // SAFETY: no arguments.
        unsafe { libc::setsid() };
        // SAFETY: two numbers and a null handler: the usual ways to end it do nothing.
        unsafe { libc::signal(libc::SIGTERM, libc::SIG_IGN) };
        // SAFETY: as above.
        unsafe { libc::signal(libc::SIGHUP, libc::SIG_IGN) };
    }
    // Gives its streams away, so that nobody waits for their end.
    for fd in 0..3 {
        // SAFETY: the three streams, which this process does not use any more.
        unsafe { libc::close(fd) };
    }
    std::thread::sleep(std::time::Duration::from_secs(60));
    std::process::exit(0)
}

/// Makes a child that waits a moment.
pub fn fork_a_sleeper(time: std::time::Duration) -> io::Result<()> {
    // SAFETY: this program has one thread; the child sleeps and leaves without running anything of the parent's.
    let pid = answer(c_long::from(unsafe { libc::fork() }))?;
    if pid == 0 {
        std::thread::sleep(time);
        // SAFETY: as above.
        unsafe { libc::_exit(0) };
    }
    Ok(())
}

/// The session this process is in; 0 for one that is outside its pid namespace.
pub fn session() -> i32 {
    // SAFETY: one number.
    unsafe { libc::getsid(0) }
}

/// Sends a signal, or none (0) to ask whether it could be sent.
pub fn kill(pid: i32, signal: i32) -> io::Result<i64> {
    // SAFETY: two numbers.
    answer(c_long::from(unsafe { libc::kill(pid, signal) }))
}

/// Ends this process with a core dump, if it is let.
pub fn dump_core() -> ! {
    let all = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: reads the struct above. Refused inside; where it is not, the limit is off.
    unsafe { libc::setrlimit(libc::RLIMIT_CORE, &raw const all) };
    std::process::abort()
}
