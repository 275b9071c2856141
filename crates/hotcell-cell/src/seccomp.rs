//! The syscall filter: an allowlist, with a reason for every group and every condition.
//!
//! ```text
//! GROUPS + CONDITIONS ─▶ intervals of numbers with one verdict each ─▶ binary tree of BPF ─▶ kernel
//! ```
//!
//! - Another architecture's numbers (`int 0x80`, x32) kill the process: the table means nothing there.
//! - A call that is not listed does not exist here (`ENOSYS`), so programs fall back as on an older kernel.
//! - A call that is listed as refused answers `EPERM`.
//! - Arguments are compared in the width the kernel reads: an `int` argument by its low half only, so
//!   that set high bits change nothing, a pointer by both halves.
//!
//! What pointers point to is never looked at: it could change after the look. Where that would be
//! needed (`clone3`, `openat2`) the call does not exist and libraries use the older one.
//!
//! The kernel takes long to compile a filter, and a process inherits those of its parent. So there are two: the spawner
//! has one that lets through, of what is refused, only what walls are built with; each cell adds a small one that
//! refuses that as well. The kernel asks both and does what the stricter says.

use std::collections::BTreeSet;

use libc::{EAFNOSUPPORT, ENOSYS, EPERM, EPROTONOSUPPORT, c_long};

/// What happens to a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Allow,
    Refuse(i32),
    /// Decided by the condition with this index.
    Condition(usize),
}

/// Calls that share a verdict and the reason for it.
struct Group {
    name: &'static str,
    why: &'static str,
    verdict: Verdict,
    calls: &'static [c_long],
}

/// One question about an argument.
#[derive(Clone, Copy, Debug)]
enum Test {
    /// The `int` argument is this.
    Is(u8, u32),
    /// The `int` argument has one of these bits.
    AnyOf(u8, u32),
    /// The `int` argument, masked, is this.
    MaskedIs(u8, u32, u32),
    /// The pointer argument is not NULL.
    NotNull(u8),
}

/// A call whose arguments decide: the first clause whose tests all hold, else `otherwise`.
struct Condition {
    name: &'static str,
    why: &'static str,
    calls: &'static [c_long],
    clauses: &'static [(&'static [Test], Verdict)],
    otherwise: Verdict,
}

const NAMESPACE_FLAGS: u32 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u32;
const SETID_BITS: u32 = libc::S_ISUID | libc::S_ISGID;
const CREATES: u32 = (libc::O_CREAT | (libc::O_TMPFILE & !libc::O_DIRECTORY)) as u32;
const SOCKET_TYPE: u32 = 0xf;
/// The pid of a cell's init, inside.
const INIT: u32 = 1;
const IOPRIO_WHO_PROCESS: u32 = 1;
const IOPRIO_WHO_USER: u32 = 3;
// Terminal requests; the kernel reads them as 32 bits.
const TIOCSTI: u32 = 0x5412;
const TIOCLINUX: u32 = 0x541c;
const TIOCCONS: u32 = 0x541d;
const TIOCSETD: u32 = 0x5423;

// Numbers the libc crate does not name yet.
const SYS_IO_PGETEVENTS: c_long = 333;
const SYS_MAP_SHADOW_STACK: c_long = 453;
const SYS_FUTEX_WAKE: c_long = 454;
const SYS_FUTEX_WAIT: c_long = 455;
const SYS_FUTEX_REQUEUE: c_long = 456;
const SYS_CACHESTAT: c_long = 451;
const SYS_SETXATTRAT: c_long = 463;
const SYS_GETXATTRAT: c_long = 464;
const SYS_LISTXATTRAT: c_long = 465;
const SYS_REMOVEXATTRAT: c_long = 466;
const SYS_OPEN_TREE_ATTR: c_long = 467;

#[rustfmt::skip]
const GROUPS: &[Group] = &[
    Group {
        name: "files",
        why: "reading and writing files; which files is decided by the mount view and Landlock",
        verdict: Verdict::Allow,
        calls: &[
            libc::SYS_read, libc::SYS_write, libc::SYS_close, libc::SYS_stat, libc::SYS_fstat, libc::SYS_lstat,
            libc::SYS_lseek, libc::SYS_pread64, libc::SYS_pwrite64, libc::SYS_readv, libc::SYS_writev, libc::SYS_access,
            libc::SYS_pipe, libc::SYS_pipe2, libc::SYS_dup, libc::SYS_dup2, libc::SYS_dup3, libc::SYS_sendfile,
            libc::SYS_fcntl, libc::SYS_flock, libc::SYS_fsync, libc::SYS_fdatasync, libc::SYS_truncate,
            libc::SYS_ftruncate, libc::SYS_getdents, libc::SYS_getdents64, libc::SYS_getcwd, libc::SYS_chdir,
            libc::SYS_fchdir, libc::SYS_rename, libc::SYS_mkdir, libc::SYS_rmdir, libc::SYS_link, libc::SYS_unlink,
            libc::SYS_symlink, libc::SYS_readlink, libc::SYS_chown, libc::SYS_fchown, libc::SYS_lchown, libc::SYS_umask,
            libc::SYS_utime, libc::SYS_utimes, libc::SYS_futimesat, libc::SYS_utimensat, libc::SYS_statfs,
            libc::SYS_fstatfs, libc::SYS_sync, libc::SYS_syncfs, libc::SYS_readahead, libc::SYS_fadvise64,
            libc::SYS_setxattr, libc::SYS_lsetxattr, libc::SYS_fsetxattr, libc::SYS_getxattr, libc::SYS_lgetxattr,
            libc::SYS_fgetxattr, libc::SYS_listxattr, libc::SYS_llistxattr, libc::SYS_flistxattr,
            libc::SYS_removexattr, libc::SYS_lremovexattr, libc::SYS_fremovexattr, SYS_SETXATTRAT, SYS_GETXATTRAT,
            SYS_LISTXATTRAT, SYS_REMOVEXATTRAT, libc::SYS_mkdirat, libc::SYS_fchownat, libc::SYS_newfstatat,
            libc::SYS_unlinkat, libc::SYS_renameat, libc::SYS_renameat2, libc::SYS_linkat, libc::SYS_symlinkat,
            libc::SYS_readlinkat, libc::SYS_faccessat, libc::SYS_faccessat2, libc::SYS_statx, libc::SYS_splice,
            libc::SYS_tee, libc::SYS_vmsplice, libc::SYS_sync_file_range, libc::SYS_fallocate,
            libc::SYS_copy_file_range, libc::SYS_preadv, libc::SYS_pwritev, libc::SYS_preadv2, libc::SYS_pwritev2,
            libc::SYS_close_range, libc::SYS_inotify_init, libc::SYS_inotify_init1, libc::SYS_inotify_add_watch,
            libc::SYS_inotify_rm_watch, SYS_CACHESTAT,
        ],
    },
    Group {
        name: "memory",
        why: "a program's own memory; how much is decided by the memory limit",
        verdict: Verdict::Allow,
        calls: &[
            libc::SYS_mmap, libc::SYS_mprotect, libc::SYS_munmap, libc::SYS_brk, libc::SYS_mremap, libc::SYS_msync,
            libc::SYS_mincore, libc::SYS_madvise, libc::SYS_mlock, libc::SYS_mlock2, libc::SYS_munlock,
            libc::SYS_mlockall, libc::SYS_munlockall, libc::SYS_pkey_mprotect, libc::SYS_pkey_alloc,
            libc::SYS_pkey_free, libc::SYS_membarrier, libc::SYS_mseal, SYS_MAP_SHADOW_STACK,
        ],
    },
    Group {
        name: "processes",
        why: "processes, threads and their ids inside the cell's own pid namespace",
        verdict: Verdict::Allow,
        calls: &[
            libc::SYS_fork, libc::SYS_vfork, libc::SYS_execve, libc::SYS_execveat, libc::SYS_exit, libc::SYS_exit_group,
            libc::SYS_wait4, libc::SYS_waitid, libc::SYS_kill, libc::SYS_tkill, libc::SYS_tgkill, libc::SYS_getpid,
            libc::SYS_getppid, libc::SYS_gettid, libc::SYS_getpgid, libc::SYS_setpgid, libc::SYS_getpgrp,
            libc::SYS_setsid, libc::SYS_getsid, libc::SYS_getuid, libc::SYS_geteuid, libc::SYS_getgid,
            libc::SYS_getegid, libc::SYS_getresuid, libc::SYS_getresgid, libc::SYS_getgroups, libc::SYS_prctl,
            libc::SYS_arch_prctl, libc::SYS_set_tid_address, libc::SYS_set_robust_list, libc::SYS_get_robust_list,
            libc::SYS_rseq, libc::SYS_futex, libc::SYS_futex_waitv, SYS_FUTEX_WAKE, SYS_FUTEX_WAIT, SYS_FUTEX_REQUEUE,
            libc::SYS_sched_yield, libc::SYS_sched_getparam, libc::SYS_sched_getscheduler,
            libc::SYS_sched_get_priority_max, libc::SYS_sched_get_priority_min,
            libc::SYS_sched_rr_get_interval, libc::SYS_sched_getaffinity, libc::SYS_sched_getattr,
            libc::SYS_getpriority, libc::SYS_ioprio_get, libc::SYS_getrusage, libc::SYS_times, libc::SYS_getrlimit, libc::SYS_getcpu,
            libc::SYS_pidfd_open, libc::SYS_pidfd_send_signal, libc::SYS_process_mrelease, libc::SYS_restart_syscall,
            libc::SYS_uname, libc::SYS_sysinfo,
        ],
    },
    Group {
        name: "memory files",
        why: "memory behind a descriptor; absent where memory is only watched, because a descriptor can be hidden in a socket",
        verdict: Verdict::Allow,
        calls: &[libc::SYS_memfd_create],
    },
    Group {
        name: "identity",
        why: "harmless without a capability: every id but the cell's own answers EPERM",
        verdict: Verdict::Allow,
        calls: &[
            libc::SYS_setuid, libc::SYS_setgid, libc::SYS_setreuid, libc::SYS_setregid, libc::SYS_setresuid,
            libc::SYS_setresgid, libc::SYS_setfsuid, libc::SYS_setfsgid, libc::SYS_setgroups, libc::SYS_capget,
            libc::SYS_capset,
        ],
    },
    Group {
        name: "self-restraint",
        why: "a program may build further walls around itself; they only narrow",
        verdict: Verdict::Allow,
        calls: &[
            libc::SYS_seccomp, libc::SYS_landlock_create_ruleset, libc::SYS_landlock_add_rule,
            libc::SYS_landlock_restrict_self,
        ],
    },
    Group {
        name: "signals and time",
        why: "a program's own signals and timers",
        verdict: Verdict::Allow,
        calls: &[
            libc::SYS_rt_sigaction, libc::SYS_rt_sigprocmask, libc::SYS_rt_sigreturn, libc::SYS_rt_sigpending,
            libc::SYS_rt_sigtimedwait, libc::SYS_rt_sigqueueinfo, libc::SYS_rt_tgsigqueueinfo,
            libc::SYS_rt_sigsuspend, libc::SYS_sigaltstack, libc::SYS_pause, libc::SYS_alarm, libc::SYS_getitimer,
            libc::SYS_setitimer, libc::SYS_gettimeofday, libc::SYS_time, libc::SYS_clock_gettime,
            libc::SYS_clock_getres, libc::SYS_clock_nanosleep, libc::SYS_nanosleep, libc::SYS_timer_create,
            libc::SYS_timer_settime, libc::SYS_timer_gettime, libc::SYS_timer_getoverrun, libc::SYS_timer_delete,
            libc::SYS_timerfd_create, libc::SYS_timerfd_settime, libc::SYS_timerfd_gettime, libc::SYS_signalfd,
            libc::SYS_signalfd4, libc::SYS_getrandom,
        ],
    },
    Group {
        name: "waiting",
        why: "waiting for descriptors",
        verdict: Verdict::Allow,
        calls: &[
            libc::SYS_poll, libc::SYS_ppoll, libc::SYS_select, libc::SYS_pselect6, libc::SYS_epoll_create,
            libc::SYS_epoll_create1, libc::SYS_epoll_ctl, libc::SYS_epoll_wait, libc::SYS_epoll_pwait,
            libc::SYS_epoll_pwait2, libc::SYS_eventfd, libc::SYS_eventfd2,
        ],
    },
    Group {
        name: "older asynchronous files",
        why: "their number is limited for the whole machine: one cell could take them all",
        verdict: Verdict::Refuse(ENOSYS),
        calls: &[
            libc::SYS_io_setup, libc::SYS_io_destroy, libc::SYS_io_submit, libc::SYS_io_cancel, libc::SYS_io_getevents,
            SYS_IO_PGETEVENTS,
        ],
    },
    Group {
        name: "sockets",
        why: "sockets that `socket` let exist; what they reach is decided by the network namespace",
        verdict: Verdict::Allow,
        calls: &[
            libc::SYS_connect, libc::SYS_accept, libc::SYS_accept4, libc::SYS_bind, libc::SYS_listen,
            libc::SYS_getsockname, libc::SYS_getpeername, libc::SYS_setsockopt, libc::SYS_getsockopt, libc::SYS_sendto,
            libc::SYS_recvfrom, libc::SYS_sendmsg, libc::SYS_recvmsg, libc::SYS_sendmmsg, libc::SYS_recvmmsg,
            libc::SYS_shutdown,
        ],
    },
    Group {
        name: "ipc",
        why: "semaphores and POSIX queues of the cell's own ipc namespace",
        verdict: Verdict::Allow,
        calls: &[
            libc::SYS_semget, libc::SYS_semop, libc::SYS_semctl, libc::SYS_semtimedop, libc::SYS_mq_open, libc::SYS_mq_unlink,
            libc::SYS_mq_timedsend, libc::SYS_mq_timedreceive, libc::SYS_mq_notify, libc::SYS_mq_getsetattr,
        ],
    },
    Group {
        name: "shared segments",
        why: "shared memory and messages of the cell's own ipc namespace; absent where memory is only watched, because they belong to no process",
        verdict: Verdict::Allow,
        calls: &[
            libc::SYS_shmget, libc::SYS_shmat, libc::SYS_shmctl, libc::SYS_shmdt, libc::SYS_msgget, libc::SYS_msgsnd,
            libc::SYS_msgrcv, libc::SYS_msgctl,
        ],
    },
    Group {
        name: "namespaces",
        why: "a new user namespace gives its maker every capability inside it; entering one undoes ours",
        verdict: Verdict::Refuse(EPERM),
        calls: &[libc::SYS_unshare, libc::SYS_setns],
    },
    Group {
        name: "mounts",
        why: "the mount view is the filesystem wall; nothing inside may change it",
        verdict: Verdict::Refuse(EPERM),
        calls: &[
            libc::SYS_mount, libc::SYS_umount2, libc::SYS_pivot_root, libc::SYS_chroot, libc::SYS_open_tree,
            libc::SYS_move_mount, libc::SYS_fsopen, libc::SYS_fsconfig, libc::SYS_fsmount, libc::SYS_fspick,
            libc::SYS_mount_setattr, SYS_OPEN_TREE_ATTR,
        ],
    },
    Group {
        name: "the machine",
        why: "modules, kexec, clock, swap, accounting, ports and names are the host's",
        verdict: Verdict::Refuse(EPERM),
        calls: &[
            libc::SYS_init_module, libc::SYS_finit_module, libc::SYS_delete_module, libc::SYS_kexec_load,
            libc::SYS_kexec_file_load, libc::SYS_reboot, libc::SYS_swapon, libc::SYS_swapoff, libc::SYS_acct,
            libc::SYS_quotactl, libc::SYS_quotactl_fd, libc::SYS_syslog, libc::SYS_iopl, libc::SYS_ioperm,
            libc::SYS_sethostname, libc::SYS_setdomainname, libc::SYS_settimeofday, libc::SYS_clock_settime,
            libc::SYS_clock_adjtime, libc::SYS_adjtimex, libc::SYS_vhangup,
        ],
    },
    Group {
        name: "other processes",
        why: "reading, steering or measuring another process is how a wall is walked around from beside it",
        verdict: Verdict::Refuse(EPERM),
        calls: &[
            libc::SYS_ptrace, libc::SYS_process_vm_readv, libc::SYS_process_vm_writev, libc::SYS_pidfd_getfd,
            libc::SYS_kcmp, libc::SYS_perf_event_open, libc::SYS_process_madvise, libc::SYS_fanotify_init,
            libc::SYS_fanotify_mark,
        ],
    },
    Group {
        name: "kernel attack surface",
        why: "rarely needed and often the first step of a kernel exploit",
        verdict: Verdict::Refuse(EPERM),
        calls: &[
            libc::SYS_bpf, libc::SYS_userfaultfd, libc::SYS_add_key, libc::SYS_request_key, libc::SYS_keyctl,
            libc::SYS_open_by_handle_at, libc::SYS_name_to_handle_at, libc::SYS_mbind, libc::SYS_set_mempolicy,
            libc::SYS_get_mempolicy, libc::SYS_migrate_pages, libc::SYS_move_pages,
            libc::SYS_set_mempolicy_home_node, libc::SYS_memfd_secret, libc::SYS_lookup_dcookie,
        ],
    },
    Group {
        name: "io_uring",
        why: "its operations are not syscalls, so no filter sees them",
        verdict: Verdict::Refuse(ENOSYS),
        calls: &[libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register],
    },
    Group {
        name: "unreadable arguments",
        why: "their flags are behind a pointer; libraries fall back to clone and openat, whose flags are not",
        verdict: Verdict::Refuse(ENOSYS),
        calls: &[libc::SYS_clone3, libc::SYS_openat2],
    },
];

#[rustfmt::skip]
const CONDITIONS: &[Condition] = &[
    Condition {
        name: "clone",
        why: "processes and threads are fine, new namespaces are not",
        calls: &[libc::SYS_clone],
        clauses: &[(&[Test::AnyOf(0, NAMESPACE_FLAGS)], Verdict::Refuse(EPERM))],
        otherwise: Verdict::Allow,
    },
    Condition {
        name: "terminal input",
        why: "pushing characters into a terminal types commands for whoever reads it next",
        calls: &[libc::SYS_ioctl],
        clauses: &[
            (&[Test::Is(1, TIOCSTI)], Verdict::Refuse(EPERM)),
            (&[Test::Is(1, TIOCLINUX)], Verdict::Refuse(EPERM)),
            (&[Test::Is(1, TIOCSETD)], Verdict::Refuse(EPERM)),
            (&[Test::Is(1, TIOCCONS)], Verdict::Refuse(EPERM)),
        ],
        otherwise: Verdict::Allow,
    },
    Condition {
        name: "socket families",
        why: "unix, tcp and udp; other families and raw sockets reach past what the namespace walls off",
        calls: &[libc::SYS_socket],
        clauses: &[
            (&[Test::Is(0, libc::AF_UNIX as u32)], Verdict::Allow),
            (&[Test::Is(0, libc::AF_INET as u32), Test::MaskedIs(1, SOCKET_TYPE, libc::SOCK_STREAM as u32), Test::Is(2, 0)], Verdict::Allow),
            (&[Test::Is(0, libc::AF_INET as u32), Test::MaskedIs(1, SOCKET_TYPE, libc::SOCK_STREAM as u32), Test::Is(2, libc::IPPROTO_TCP as u32)], Verdict::Allow),
            (&[Test::Is(0, libc::AF_INET as u32), Test::MaskedIs(1, SOCKET_TYPE, libc::SOCK_DGRAM as u32), Test::Is(2, 0)], Verdict::Allow),
            (&[Test::Is(0, libc::AF_INET as u32), Test::MaskedIs(1, SOCKET_TYPE, libc::SOCK_DGRAM as u32), Test::Is(2, libc::IPPROTO_UDP as u32)], Verdict::Allow),
            (&[Test::Is(0, libc::AF_INET6 as u32), Test::MaskedIs(1, SOCKET_TYPE, libc::SOCK_STREAM as u32), Test::Is(2, 0)], Verdict::Allow),
            (&[Test::Is(0, libc::AF_INET6 as u32), Test::MaskedIs(1, SOCKET_TYPE, libc::SOCK_STREAM as u32), Test::Is(2, libc::IPPROTO_TCP as u32)], Verdict::Allow),
            (&[Test::Is(0, libc::AF_INET6 as u32), Test::MaskedIs(1, SOCKET_TYPE, libc::SOCK_DGRAM as u32), Test::Is(2, 0)], Verdict::Allow),
            (&[Test::Is(0, libc::AF_INET6 as u32), Test::MaskedIs(1, SOCKET_TYPE, libc::SOCK_DGRAM as u32), Test::Is(2, libc::IPPROTO_UDP as u32)], Verdict::Allow),
            (&[Test::Is(0, libc::AF_INET as u32), Test::MaskedIs(1, SOCKET_TYPE, libc::SOCK_RAW as u32)], Verdict::Refuse(EPERM)),
            (&[Test::Is(0, libc::AF_INET6 as u32), Test::MaskedIs(1, SOCKET_TYPE, libc::SOCK_RAW as u32)], Verdict::Refuse(EPERM)),
            (&[Test::Is(0, libc::AF_INET as u32)], Verdict::Refuse(EPROTONOSUPPORT)),
            (&[Test::Is(0, libc::AF_INET6 as u32)], Verdict::Refuse(EPROTONOSUPPORT)),
        ],
        otherwise: Verdict::Refuse(EAFNOSUPPORT),
    },
    Condition {
        name: "socket pairs",
        why: "pairs of unix sockets reach nobody but their maker",
        calls: &[libc::SYS_socketpair],
        clauses: &[(&[Test::Is(0, libc::AF_UNIX as u32)], Verdict::Allow)],
        otherwise: Verdict::Refuse(EAFNOSUPPORT),
    },
    Condition {
        name: "set-id bits by path",
        why: "a set-id file left in a writable workspace would hand its owner's rights to whoever runs it outside",
        calls: &[libc::SYS_chmod, libc::SYS_fchmod, libc::SYS_creat, libc::SYS_mknod],
        clauses: &[(&[Test::AnyOf(1, SETID_BITS)], Verdict::Refuse(EPERM))],
        otherwise: Verdict::Allow,
    },
    Condition {
        name: "set-id bits by directory",
        why: "as above, for the calls that take a directory first",
        calls: &[libc::SYS_fchmodat, libc::SYS_fchmodat2, libc::SYS_mknodat],
        clauses: &[(&[Test::AnyOf(2, SETID_BITS)], Verdict::Refuse(EPERM))],
        otherwise: Verdict::Allow,
    },
    Condition {
        name: "set-id bits at open",
        why: "as above; the mode counts only where a file may be created",
        calls: &[libc::SYS_open],
        clauses: &[(&[Test::AnyOf(1, CREATES), Test::AnyOf(2, SETID_BITS)], Verdict::Refuse(EPERM))],
        otherwise: Verdict::Allow,
    },
    Condition {
        name: "set-id bits at openat",
        why: "as above",
        calls: &[libc::SYS_openat],
        clauses: &[(&[Test::AnyOf(2, CREATES), Test::AnyOf(3, SETID_BITS)], Verdict::Refuse(EPERM))],
        otherwise: Verdict::Allow,
    },
    Condition {
        name: "core limit",
        why: "the core limit is 1, the only value at which the kernel starts no core handler of the host, not even at 0",
        calls: &[libc::SYS_setrlimit],
        clauses: &[(&[Test::Is(0, libc::RLIMIT_CORE)], Verdict::Refuse(EPERM))],
        otherwise: Verdict::Allow,
    },
    Condition {
        name: "limits by prlimit",
        why: "the core limit as above; and nobody's limits but one's own, for init runs as the same user; asking stays possible",
        calls: &[libc::SYS_prlimit64],
        clauses: &[
            (&[Test::Is(1, libc::RLIMIT_CORE), Test::NotNull(2)], Verdict::Refuse(EPERM)),
            (&[Test::Is(0, 0)], Verdict::Allow),
            (&[Test::NotNull(2)], Verdict::Refuse(EPERM)),
        ],
        otherwise: Verdict::Allow,
    },
    Condition {
        name: "init's scheduling",
        why: "one's own and one's children's; but all commands of a session inherit what init has, which runs as the same user",
        calls: &[
            libc::SYS_sched_setparam, libc::SYS_sched_setscheduler, libc::SYS_sched_setaffinity, libc::SYS_sched_setattr,
        ],
        clauses: &[(&[Test::Is(0, INIT)], Verdict::Refuse(EPERM))],
        otherwise: Verdict::Allow,
    },
    Condition {
        name: "init's priority",
        why: "as above; all processes of the user would be init, too",
        calls: &[libc::SYS_setpriority],
        clauses: &[
            (&[Test::Is(0, libc::PRIO_USER)], Verdict::Refuse(EPERM)),
            (&[Test::Is(0, libc::PRIO_PROCESS), Test::Is(1, INIT)], Verdict::Refuse(EPERM)),
        ],
        otherwise: Verdict::Allow,
    },
    Condition {
        name: "init's io priority",
        why: "as above",
        calls: &[libc::SYS_ioprio_set],
        clauses: &[
            (&[Test::Is(0, IOPRIO_WHO_USER)], Verdict::Refuse(EPERM)),
            (&[Test::Is(0, IOPRIO_WHO_PROCESS), Test::Is(1, INIT)], Verdict::Refuse(EPERM)),
        ],
        otherwise: Verdict::Allow,
    },
    Condition {
        name: "personality",
        why: "the plain personalities; the others switch off address randomisation or read-implies-exec protection",
        calls: &[libc::SYS_personality],
        clauses: &[
            (&[Test::Is(0, 0)], Verdict::Allow),
            (&[Test::Is(0, 0x8)], Verdict::Allow),
            (&[Test::Is(0, 0x2_0000)], Verdict::Allow),
            (&[Test::Is(0, 0x2_0008)], Verdict::Allow),
            (&[Test::Is(0, u32::MAX)], Verdict::Allow),
        ],
        otherwise: Verdict::Refuse(EPERM),
    },
];

/// Names of all groups and conditions, each with its reason and the number of calls it decides.
pub fn rules() -> impl Iterator<Item = (&'static str, &'static str, usize)> {
    let groups = GROUPS.iter().map(|group| (group.name, group.why, group.calls.len()));
    groups.chain(CONDITIONS.iter().map(|condition| (condition.name, condition.why, condition.calls.len())))
}

/// How the memory limit of the cell is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Memory {
    /// By a cgroup, which counts every kind of memory.
    Counted,
    /// By looking at processes: memory that belongs to none of them must not exist.
    Watched,
}

/// Groups that are allowed only where memory is counted.
const COUNTED_ONLY: &[&str] = &["memory files", "shared segments"];

/// One BPF instruction as the kernel reads it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Instruction {
    /// Operation.
    pub code: u16,
    /// Instructions to skip if the comparison holds.
    pub jt: u8,
    /// Instructions to skip if it does not.
    pub jf: u8,
    /// Operand.
    pub k: u32,
}

const LOAD: u16 = 0x20;
const AND: u16 = 0x54;
const RETURN: u16 = 0x06;
const JUMP: u16 = 0x05;
const JUMP_EQUAL: u16 = 0x15;
const JUMP_GREATER_OR_EQUAL: u16 = 0x35;
const JUMP_ANY_BIT: u16 = 0x45;

const RETURN_ALLOW: u32 = 0x7fff_0000;
const RETURN_ERRNO: u32 = 0x0005_0000;
const RETURN_KILL: u32 = 0x8000_0000;

const OFFSET_NUMBER: u32 = 0;
const OFFSET_ARCH: u32 = 4;
const ARCH_X86_64: u32 = 0xc000_003e;
/// Numbers from here on are those of the x32 ABI.
const X32_BIT: u32 = 0x4000_0000;

/// The rule about calls of another architecture.
pub const ARCHITECTURE: &str = "architecture";
/// The rule about calls that are not listed.
pub const UNLISTED: &str = "unlisted";

/// The rules that refuse something, by name: each can be left out of a filter to see that it is missed.
pub fn refusing_rules() -> impl Iterator<Item = &'static str> {
    let groups = GROUPS.iter().filter(|group| matches!(group.verdict, Verdict::Refuse(_))).map(|group| group.name);
    groups.chain(CONDITIONS.iter().map(|condition| condition.name)).chain([ARCHITECTURE, UNLISTED])
}

/// Which of the two filters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Part {
    /// All but what walls are built with: the spawner's, inherited by its cells.
    Ground,
    /// What walls were built with: each cell's own.
    Cell,
    /// Both in one: what a command is held to.
    #[cfg(test)]
    Whole,
}

/// Calls that the spawner and a cell's init make, and nobody after them.
const BUILDING: &[c_long] = &[
    libc::SYS_unshare,
    libc::SYS_clone3,
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
];

impl Part {
    /// The verdict of this part on a call, given that of the whole.
    fn of(self, call: c_long, whole: Verdict) -> Verdict {
        let is_elsewhere = match self {
            Part::Ground => BUILDING.contains(&call),
            Part::Cell => !BUILDING.contains(&call),
            #[cfg(test)]
            Part::Whole => false,
        };
        if is_elsewhere { Verdict::Allow } else { whole }
    }
}

/// Builds a filter. `left_out` names rules that are not in it, for tests that must notice.
pub(crate) fn filter(part: Part, memory: Memory, left_out: &BTreeSet<&'static str>) -> Vec<Instruction> {
    let mut code = vec![load(OFFSET_NUMBER)];
    // Where the numbers mean something else, the ground's filter has the last word.
    if part != Part::Cell && !left_out.contains(ARCHITECTURE) {
        code = vec![
            load(OFFSET_ARCH),
            jump(JUMP_EQUAL, ARCH_X86_64, 1, 0),
            returns(RETURN_KILL),
            load(OFFSET_NUMBER),
            jump(JUMP_GREATER_OR_EQUAL, X32_BIT, 0, 1),
            returns(RETURN_KILL),
        ];
    }
    code.extend(tree(&intervals(part, memory, left_out)));
    code
}

/// The filter's table as ranges: each starts at a number and holds up to the next start.
fn intervals(part: Part, memory: Memory, left_out: &BTreeSet<&'static str>) -> Vec<(u32, Verdict)> {
    let mut listed: Vec<(u32, Verdict)> = Vec::new();
    let unlisted = match part {
        Part::Cell => Verdict::Allow,
        _ if left_out.contains(UNLISTED) => Verdict::Allow,
        _ => Verdict::Refuse(ENOSYS),
    };
    for group in GROUPS {
        let verdict = match group.verdict {
            _ if left_out.contains(group.name) => Verdict::Allow,
            Verdict::Allow if memory == Memory::Watched && COUNTED_ONLY.contains(&group.name) => {
                Verdict::Refuse(ENOSYS)
            }
            verdict => verdict,
        };
        listed.extend(group.calls.iter().map(|call| (number(*call), part.of(*call, verdict))));
    }
    for (idx, condition) in CONDITIONS.iter().enumerate() {
        let verdict = if left_out.contains(condition.name) { Verdict::Allow } else { Verdict::Condition(idx) };
        listed.extend(condition.calls.iter().map(|call| (number(*call), part.of(*call, verdict))));
    }
    listed.sort_unstable_by_key(|(number, _)| *number);
    let mut ranges: Vec<(u32, Verdict)> = vec![(0, unlisted)];
    let mut put = |start: u32, verdict: Verdict| match ranges.last_mut() {
        Some(last) if last.0 == start => last.1 = verdict,
        Some(last) if last.1 == verdict => {}
        _ => ranges.push((start, verdict)),
    };
    for (at, (number, verdict)) in listed.iter().enumerate() {
        put(*number, *verdict);
        if listed.get(at + 1).is_none_or(|(next, _)| *next > number + 1) {
            put(number + 1, unlisted);
        }
    }
    // Two neighbours may have become equal by an overwrite at the same start.
    ranges.dedup_by(|next, previous| next.1 == previous.1);
    ranges
}

/// Code that finds the range of the loaded number in about log2 comparisons.
fn tree(ranges: &[(u32, Verdict)]) -> Vec<Instruction> {
    if let [(_, verdict)] = ranges {
        return leaf(*verdict);
    }
    let (left, right) = ranges.split_at(ranges.len() / 2);
    let (start, left, right) = (right[0].0, tree(left), tree(right));
    let mut code = match u8::try_from(left.len()) {
        Ok(skip) => vec![jump(JUMP_GREATER_OR_EQUAL, start, skip, 0)],
        // A conditional jump reaches 255 instructions, a plain one any number.
        Err(_) => {
            let skip = u32::try_from(left.len()).expect("a filter has a few hundred instructions");
            vec![jump(JUMP_GREATER_OR_EQUAL, start, 0, 1), jump(JUMP, skip, 0, 0)]
        }
    };
    code.extend(left);
    code.extend(right);
    code
}

fn leaf(verdict: Verdict) -> Vec<Instruction> {
    match verdict {
        Verdict::Allow => vec![returns(RETURN_ALLOW)],
        Verdict::Refuse(errno) => vec![returns(RETURN_ERRNO | errno.cast_unsigned())],
        Verdict::Condition(idx) => {
            let condition = &CONDITIONS[idx];
            let mut code = Vec::new();
            for (tests, verdict) in condition.clauses {
                code.extend(clause(tests, *verdict));
            }
            code.extend(leaf(condition.otherwise));
            code
        }
    }
}

/// Returns the verdict if all tests hold, else runs on past its own end.
fn clause(tests: &[Test], verdict: Verdict) -> Vec<Instruction> {
    let mut code = leaf(verdict);
    for test in tests.iter().rev() {
        let past = u8::try_from(code.len()).expect("a clause is a few instructions");
        let question = match *test {
            Test::Is(arg, value) => vec![load(low(arg)), jump(JUMP_EQUAL, value, 0, past)],
            Test::AnyOf(arg, bits) => vec![load(low(arg)), jump(JUMP_ANY_BIT, bits, 0, past)],
            Test::MaskedIs(arg, mask, value) => {
                vec![load(low(arg)), Instruction { code: AND, jt: 0, jf: 0, k: mask }, jump(JUMP_EQUAL, value, 0, past)]
            }
            Test::NotNull(arg) => {
                vec![load(low(arg)), jump(JUMP_EQUAL, 0, 0, 2), load(low(arg) + 4), jump(JUMP_EQUAL, 0, past, 0)]
            }
        };
        code.splice(0..0, question);
    }
    code
}

fn low(arg: u8) -> u32 {
    16 + 8 * u32::from(arg)
}

fn load(offset: u32) -> Instruction {
    Instruction { code: LOAD, jt: 0, jf: 0, k: offset }
}

fn jump(code: u16, k: u32, jt: u8, jf: u8) -> Instruction {
    Instruction { code, jt, jf, k }
}

fn returns(k: u32) -> Instruction {
    Instruction { code: RETURN, jt: 0, jf: 0, k }
}

fn number(call: c_long) -> u32 {
    u32::try_from(call).expect("syscall numbers are small")
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small constants")]
mod tests {
    use super::*;

    /// What the kernel would do, and in how many steps.
    fn decide(code: &[Instruction], arch: u32, number: u32, args: [u64; 6]) -> (u32, usize) {
        let word = |offset: u32| -> u32 {
            match offset {
                OFFSET_NUMBER => number,
                OFFSET_ARCH => arch,
                _ => {
                    let arg = args[(offset as usize - 16) / 8];
                    if offset.is_multiple_of(8) { arg as u32 } else { (arg >> 32) as u32 }
                }
            }
        };
        let (mut at, mut accumulator, mut steps) = (0usize, 0u32, 0usize);
        loop {
            let Instruction { code: op, jt, jf, k } = code[at];
            steps += 1;
            at += 1;
            let branch = |holds: bool| usize::from(if holds { jt } else { jf });
            match op {
                LOAD => accumulator = word(k),
                AND => accumulator &= k,
                JUMP => at += k as usize,
                JUMP_EQUAL => at += branch(accumulator == k),
                JUMP_GREATER_OR_EQUAL => at += branch(accumulator >= k),
                JUMP_ANY_BIT => at += branch(accumulator & k != 0),
                RETURN => return (k, steps),
                other => panic!("unknown instruction {other:#x}"),
            }
        }
    }

    fn answer(number: c_long, args: [u64; 6]) -> String {
        let (verdict, _) =
            decide(&filter(Part::Whole, Memory::Counted, &BTreeSet::new()), ARCH_X86_64, super::number(number), args);
        match verdict {
            RETURN_ALLOW => "allow".to_owned(),
            RETURN_KILL => "kill".to_owned(),
            errno => std::io::Error::from_raw_os_error((errno & 0xffff) as i32).to_string(),
        }
    }

    fn args(given: &[u64]) -> [u64; 6] {
        let mut args = [0; 6];
        args[..given.len()].copy_from_slice(given);
        args
    }

    const REFUSED: &str = "Operation not permitted (os error 1)";
    const ABSENT: &str = "Function not implemented (os error 38)";

    #[test]
    fn every_listed_call_gets_its_verdict_and_all_others_do_not_exist() {
        let code = filter(Part::Whole, Memory::Counted, &BTreeSet::new());
        let listed: Vec<u32> = GROUPS
            .iter()
            .flat_map(|group| group.calls)
            .chain(CONDITIONS.iter().flat_map(|condition| condition.calls))
            .map(|call| number(*call))
            .collect();
        let mut once = listed.clone();
        once.sort_unstable();
        once.dedup();
        assert_eq!(once.len(), listed.len(), "a call is listed twice");
        assert_eq!(listed.len(), 354, "SPECIFICATION.md says how many");
        for group in GROUPS {
            for call in group.calls {
                let expected = match group.verdict {
                    Verdict::Allow => RETURN_ALLOW,
                    Verdict::Refuse(errno) => RETURN_ERRNO | errno as u32,
                    Verdict::Condition(_) => unreachable!(),
                };
                assert_eq!(decide(&code, ARCH_X86_64, number(*call), [0; 6]).0, expected, "{} {call}", group.name);
            }
        }
        for unlisted in (0..1024).filter(|nr| !listed.contains(nr)) {
            assert_eq!(decide(&code, ARCH_X86_64, unlisted, [0; 6]).0, RETURN_ERRNO | ENOSYS as u32, "{unlisted}");
        }
    }

    #[test]
    fn other_architectures_are_killed_before_their_numbers_mean_anything() {
        let code = filter(Part::Whole, Memory::Counted, &BTreeSet::new());
        let i386 = 0x4000_0003;
        assert_eq!(decide(&code, i386, 1, [0; 6]).0, RETURN_KILL);
        assert_eq!(decide(&code, ARCH_X86_64, X32_BIT | 1, [0; 6]).0, RETURN_KILL);
        assert_eq!(decide(&code, ARCH_X86_64, u32::MAX, [0; 6]).0, RETURN_KILL);
    }

    #[test]
    fn high_bits_change_no_verdict_on_an_int_argument() {
        let sti = libc::TIOCSTI;
        assert_eq!(answer(libc::SYS_ioctl, args(&[0, sti])), REFUSED);
        assert_eq!(answer(libc::SYS_ioctl, args(&[0, sti | 1 << 32])), REFUSED);
        assert_eq!(answer(libc::SYS_ioctl, args(&[0, libc::TIOCGWINSZ])), "allow");
        assert_eq!(
            answer(libc::SYS_socket, args(&[16 | 1 << 40, 3, 0])),
            "Address family not supported by protocol (os error 97)"
        );
    }

    #[test]
    fn namespaces_are_refused_by_every_call_that_makes_them() {
        for flag in [libc::CLONE_NEWUSER, libc::CLONE_NEWNS, libc::CLONE_NEWNET, libc::CLONE_NEWPID] {
            assert_eq!(answer(libc::SYS_clone, args(&[flag as u64 | 17])), REFUSED);
            assert_eq!(answer(libc::SYS_unshare, args(&[flag as u64])), REFUSED);
        }
        assert_eq!(answer(libc::SYS_clone, args(&[0x3d0f00])), "allow");
        assert_eq!(answer(libc::SYS_clone3, [0; 6]), ABSENT);
    }

    #[test]
    fn set_id_bits_are_refused_where_the_mode_counts() {
        assert_eq!(answer(libc::SYS_chmod, args(&[0, 0o4755])), REFUSED);
        assert_eq!(answer(libc::SYS_chmod, args(&[0, 0o1777])), "allow");
        assert_eq!(answer(libc::SYS_fchmodat, args(&[0, 0, 0o2755])), REFUSED);
        assert_eq!(answer(libc::SYS_openat, args(&[0, 0, libc::O_CREAT as u64, 0o4755])), REFUSED);
        // Without O_CREAT the fourth register is whatever was left in it.
        assert_eq!(answer(libc::SYS_openat, args(&[0, 0, libc::O_RDONLY as u64, 0o4755])), "allow");
        assert_eq!(answer(libc::SYS_openat, args(&[0, 0, (libc::O_TMPFILE | libc::O_RDWR) as u64, 0o4755])), REFUSED);
        assert_eq!(answer(libc::SYS_openat, args(&[0, 0, libc::O_DIRECTORY as u64, 0o4755])), "allow");
    }

    #[test]
    fn the_core_limit_can_be_read_and_not_set() {
        let core = u64::from(libc::RLIMIT_CORE);
        assert_eq!(answer(libc::SYS_prlimit64, args(&[0, core, 0, 8])), "allow");
        assert_eq!(answer(libc::SYS_prlimit64, args(&[0, core, 8, 0])), REFUSED);
        assert_eq!(answer(libc::SYS_prlimit64, args(&[0, core, 8 << 32, 0])), REFUSED);
        assert_eq!(answer(libc::SYS_prlimit64, args(&[0, u64::from(libc::RLIMIT_NOFILE), 8, 0])), "allow");
    }

    #[test]
    fn the_tree_keeps_the_way_to_a_verdict_short() {
        let code = filter(Part::Whole, Memory::Counted, &BTreeSet::new());
        let longest = (0..512).map(|nr| decide(&code, ARCH_X86_64, nr, [0; 6]).1).max();
        // Four instructions to get in, log2 of the ranges to get there, a condition at the leaf.
        let n_ranges = intervals(Part::Whole, Memory::Counted, &BTreeSet::new()).len();
        let depth = n_ranges.ilog2() as usize + 1;
        assert!(longest <= Some(4 + 2 * depth + 32), "{longest:?} steps for {n_ranges} ranges");
        assert!(code.len() < 4096, "the kernel's limit");
        let plain = decide(&code, ARCH_X86_64, number(libc::SYS_read), [0; 6]).1;
        assert!(plain <= 4 + depth + 1, "{plain} steps to `read`");
    }

    #[test]
    fn the_two_filters_together_are_the_whole_one() {
        // The kernel does what the stricter says; the smaller number is, of those that we return.
        let arguments = [0, 1, 2, 8, 10, 16, 17, libc::TIOCSTI, 0o4755, 0x4_0000, libc::CLONE_NEWUSER as u64, u64::MAX];
        for memory in [Memory::Counted, Memory::Watched] {
            let [whole, ground, cell] =
                [Part::Whole, Part::Ground, Part::Cell].map(|part| filter(part, memory, &BTreeSet::new()));
            for (arch, number) in (0..512).flat_map(|nr| [(ARCH_X86_64, nr), (ARCH_X86_64, nr | X32_BIT), (3, nr)]) {
                for a in arguments {
                    for b in arguments {
                        let decide = |code: &[Instruction]| decide(code, arch, number, [a, b, b, a, a, b]).0;
                        let rank = |verdict: u32| if verdict == RETURN_KILL { 0 } else { verdict };
                        let stricter = rank(decide(&ground)).min(rank(decide(&cell)));
                        assert_eq!(stricter, rank(decide(&whole)), "syscall {number} of {arch:#x} with {a:#x} {b:#x}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_ground_lets_through_what_walls_are_built_with_and_nothing_else() {
        let code = filter(Part::Ground, Memory::Counted, &BTreeSet::new());
        let whole = filter(Part::Whole, Memory::Counted, &BTreeSet::new());
        for nr in 0..512 {
            let is_building = BUILDING.iter().any(|call| number(*call) == nr);
            let differs = decide(&code, ARCH_X86_64, nr, [0; 6]).0 != decide(&whole, ARCH_X86_64, nr, [0; 6]).0;
            assert_eq!(differs, is_building, "syscall {nr}");
        }
    }

    #[test]
    fn watched_memory_takes_away_what_cannot_be_watched_and_nothing_else() {
        let (counted, watched) = (
            filter(Part::Whole, Memory::Counted, &BTreeSet::new()),
            filter(Part::Whole, Memory::Watched, &BTreeSet::new()),
        );
        for nr in 0..512 {
            let differs = decide(&counted, ARCH_X86_64, nr, [0; 6]).0 != decide(&watched, ARCH_X86_64, nr, [0; 6]).0;
            let groups = GROUPS.iter().filter(|group| COUNTED_ONLY.contains(&group.name));
            let ours = groups.flat_map(|group| group.calls).any(|call| number(*call) == nr);
            assert_eq!(differs, ours, "syscall {nr}");
        }
    }

    #[test]
    fn nobody_elses_limits_can_be_set() {
        let nofile = u64::from(libc::RLIMIT_NOFILE);
        assert_eq!(answer(libc::SYS_prlimit64, args(&[1, nofile, 8, 0])), REFUSED);
        assert_eq!(answer(libc::SYS_prlimit64, args(&[1, nofile, 0, 8])), "allow");
        assert_eq!(answer(libc::SYS_prlimit64, args(&[0, nofile, 8, 0])), "allow");
    }

    #[test]
    fn init_runs_as_it_was_started() {
        for call in [libc::SYS_sched_setaffinity, libc::SYS_sched_setscheduler, libc::SYS_sched_setattr] {
            assert_eq!(answer(call, args(&[1, 8, 8])), REFUSED);
            assert_eq!(answer(call, args(&[1 | 1 << 32, 8, 8])), REFUSED);
            assert_eq!(answer(call, args(&[0, 8, 8])), "allow");
            assert_eq!(answer(call, args(&[7, 8, 8])), "allow");
        }
        let (process, group, user) = (0, 1, 2);
        assert_eq!(answer(libc::SYS_setpriority, args(&[process, 1, 19])), REFUSED);
        assert_eq!(answer(libc::SYS_setpriority, args(&[user, 0, 19])), REFUSED);
        assert_eq!(answer(libc::SYS_setpriority, args(&[process, 0, 19])), "allow");
        assert_eq!(answer(libc::SYS_setpriority, args(&[group, 0, 19])), "allow");
        assert_eq!(answer(libc::SYS_ioprio_set, args(&[1, 1, 0])), REFUSED);
        assert_eq!(answer(libc::SYS_ioprio_set, args(&[3, 0, 0])), REFUSED);
        assert_eq!(answer(libc::SYS_ioprio_set, args(&[1, 0, 0])), "allow");
    }
}
