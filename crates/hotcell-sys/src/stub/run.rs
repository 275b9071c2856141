//! The three processes of a launch, and the loop that runs an op table.
//!
//! ```text
//! supervisor ──exec──▶ spawner ──clone3(namespaces)──▶ init (pid 1) ──vfork──▶ payload ──execve──▶ the command
//!     ▲  ▲               │ one cell after the other;       │ builds and proves the walls; then
//!     │  │               │ ends it if the supervisor       │ one command after the other:
//!     │  └── control ────┘ vanishes                        │ reaps, forwards signals
//!     └───── line ─────────────────────────────────────────┘
//! ```
//!
//! There are no decisions here: which calls are made, in which order and with which answers, is in
//! the images (see `wire`). Nothing is allocated, and a failed op ends the process that ran it after
//! one message that names the op.

use core::sync::atomic::AtomicI64;
use core::sync::atomic::Ordering::Relaxed;

use crate::stub_call::{self as nr, call};
use crate::wire::*;

const EINTR: i64 = -4;
const SIGKILL: u64 = 9;
const SIGCHLD: i64 = 17;
const SIGSTOP: u64 = 19;
const SIGCONT: u64 = 18;
const SIGNALS: u64 = 64;
const PR_SET_PDEATHSIG: u64 = 1;
const CLONE_PIDFD: u64 = 0x1000;
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
const MSG_NOSIGNAL: u64 = 0x4000;
const MSG_CMSG_CLOEXEC: u64 = 0x4000_0000;
const SOL_SOCKET: i32 = 1;
const SCM_RIGHTS: i32 = 1;
const WNOHANG: u64 = 1;
const SFD_CLOEXEC_NONBLOCK: u64 = 0o2_004_000;
const WALL: u64 = 0x4000_0000;
const POLLIN: i16 = 1;
const O_CLOEXEC: u64 = 0o2_000_000;
const F_DUPFD_CLOEXEC: u64 = 1030;
/// Above what a command begins with, and below the smallest limit on descriptors.
const HIGH_FD_FIRST: u64 = 20;
const CLOCK_MONOTONIC: u64 = 1;

#[repr(C)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

#[repr(C)]
struct IoVec {
    base: u64,
    len: u64,
}

#[repr(C)]
struct MsgHeader {
    name: u64,
    name_len: u64,
    iov: u64,
    iov_len: u64,
    control: u64,
    control_len: u64,
    flags: u64,
}

#[repr(C)]
struct Rights<const N: usize> {
    len: u64,
    level: i32,
    kind: i32,
    fds: [i32; N],
}

#[repr(C)]
struct PollFd {
    fd: i32,
    events: i16,
    revents: i16,
}

/// An op that did not answer as expected.
pub(crate) struct Fault {
    pub(crate) op: u64,
    pub(crate) answer: i64,
}

impl Fault {
    fn message(&self) -> Message {
        Message { kind: MESSAGE_FAULT, op: self.op, value: self.answer, ..Message::default() }
    }
}

pub(crate) fn exit(code: i32) -> ! {
    loop {
        // SAFETY: ends the process; touches no memory.
        unsafe { call!(nr::EXIT_GROUP, code) };
    }
}

/// Where the kernel put the vdso: its children have it there, too.
static VDSO: AtomicI64 = AtomicI64::new(0);

/// Finds the vdso.
///
/// # Safety
/// `stack` must be what the kernel left a new process: its arguments, its environment, and facts about it.
pub(crate) unsafe fn find_vdso(stack: *const u64) {
    const AT_SYSINFO_EHDR: u64 = 33;
    // SAFETY: whatever is read lies before the pair of zeroes that ends it all.
    let word = |at: usize| unsafe { core::ptr::read(stack.wrapping_add(at)) };
    // The number of arguments comes first; the arguments and a NULL follow, then variables up to a NULL.
    let mut at = word(0) as usize + 2;
    while word(at) != 0 {
        at += 1;
    }
    // Pairs follow, up to one of zeroes.
    at += 1;
    while word(at) != 0 {
        if word(at) == AT_SYSINFO_EHDR {
            VDSO.store(word(at + 1) as i64, Relaxed);
        }
        at += 2;
    }
}

/// The life of the spawner.
///
/// # Safety
/// The process must be single-threaded and own its whole descriptor table; descriptor 0 is the
/// control socket and nothing is mapped at [`BASE`].
pub(crate) unsafe fn spawner() -> ! {
    // SAFETY: its own session, so that a terminal's signals reach the supervisor alone, and no
    // descriptor but the control socket, whatever the caller of the supervisor leaked to it.
    unsafe { call!(nr::SETSID) };
    name(b"hotcell-spawn\0");
    // SAFETY: descriptors are plain numbers here; no Rust object owns one.
    unsafe { call!(nr::CLOSE_RANGE, 1, u32::MAX, 0) };
    // What the supervisor's callers ignore must not be ignored here: a dead child would vanish unseen.
    default_signals();
    let alive = Alive::new();
    let mut program = None;
    loop {
        let received = receive();
        match (received.command.kind, program) {
            (COMMAND_EARLY, None) => {
                let header = map(BASE, &received);
                // SAFETY: `map` checked the magic, so the tables are those our library wrote.
                if let Err(fault) = unsafe { interpret(header, header.ground) } {
                    fail(Fault { op: fault.op | OP_EARLY, ..fault });
                }
                // SAFETY: mapped above; nothing points to it any more.
                unsafe { call!(nr::MUNMAP, BASE, received.command.value) };
            }
            (COMMAND_PROGRAM, None) => {
                let header = map(BASE, &received);
                // SAFETY: `map` checked the magic, so the tables are those our library wrote.
                run_or_fail(unsafe { interpret(header, header.ground) });
                if header.is_ahead_done == 0 {
                    // SAFETY: as above.
                    run_or_fail(unsafe { interpret(header, header.ahead) });
                }
                program = Some(BASE);
            }
            (COMMAND_CELL, Some(_)) if received.n_fds >= 1 => {
                // SAFETY: mapped and checked above, and only this process writes to it.
                let header = unsafe { &mut *(BASE as *mut Header) };
                for (to, from) in header.cell_inputs.iter_mut().zip(received.inputs()) {
                    *to = i64::from(*from);
                }
                cell(header, &received, &alive);
                // SAFETY: as above. For the next one, while nobody waits.
                run_or_fail(unsafe { interpret(header, header.ahead) });
            }
            // End of file, or a supervisor that is not ours. There is no cell now.
            (_, Some(_)) => {
                // SAFETY: as above.
                sweep(unsafe { &*(BASE as *const Header) });
                exit(0)
            }
            _ => exit(0),
        }
    }
}

/// Makes a cell and waits until it is reaped.
fn cell(header: &Header, received: &Received, alive: &Alive) {
    let line = received.fds[0];
    let mut pidfd: i32 = -1;
    let mut args = CloneArgs {
        flags: header.clone_flags | CLONE_PIDFD,
        pidfd: (&raw mut pidfd) as u64,
        child_tid: 0,
        parent_tid: 0,
        exit_signal: SIGCHLD as u64,
        stack: 0,
        stack_size: 0,
        tls: 0,
        set_tid: 0,
        set_tid_size: 0,
        cgroup: 0,
    };
    if header.cgroup_slot != 0 {
        args.flags |= CLONE_INTO_CGROUP;
        // SAFETY: a slot of the image, mapped readable.
        args.cgroup = unsafe { *(header.cgroup_slot as *const u64) };
    }
    // SAFETY: no CLONE_VM, so the child has its own copy of this memory and stack.
    let pid = unsafe { call!(nr::CLONE3, &raw mut args, size_of::<CloneArgs>()) };
    if pid == 0 {
        // SAFETY: this is the new process, with the image mapped.
        unsafe { init(header, line, alive) }
    }
    if pid < 0 {
        fail(Fault { op: OP_CLONE, answer: pid });
    }
    for fd in received.fds.iter().take(received.n_fds) {
        close(*fd);
    }
    send(&Message { kind: MESSAGE_SPAWNED, value: pid, ..Message::default() }, &[pidfd]);
    watch(header, pid, pidfd);
    close(pidfd);
}

/// Waits for init's end or the supervisor's, whichever comes first; returns when init is reaped.
fn watch(header: &Header, pid: i64, pidfd: i32) {
    let mut told = false;
    loop {
        let mut fds = [
            PollFd { fd: CONTROL_FD, events: POLLIN, revents: 0 },
            // A pidfd stays readable once the process is gone; look at it once.
            PollFd { fd: if told { -1 } else { pidfd }, events: POLLIN, revents: 0 },
        ];
        // SAFETY: the kernel writes `revents` of two entries that live here.
        let n = unsafe { call!(nr::POLL, &raw mut fds, 2, -1i64) };
        if n <= 0 {
            continue;
        }
        if fds[1].revents != 0 {
            send(&Message { kind: MESSAGE_GONE, value: pid, ..Message::default() }, &[]);
            told = true;
        }
        if fds[0].revents != 0 {
            if receive().command.kind == COMMAND_REAP {
                let (status, usage) = kill_and_reap(pid);
                send(&Message { kind: MESSAGE_REAPED, value: status, usage, ..Message::default() }, &[]);
                return;
            }
            // The supervisor is gone. Killing a pid namespace's init kills all of it.
            kill_and_reap(pid);
            sweep(header);
            exit(0);
        }
    }
}

/// Removes what a supervisor that is gone cannot.
fn sweep(header: &Header) {
    // SAFETY: the image is still mapped. What cannot be removed is left to the next start.
    let _swept_later = unsafe { interpret(header, header.orphaned) };
}

/// The life of a cell's pid 1.
///
/// # Safety
/// Runs in the process made by the clone, with the image mapped.
unsafe fn init(header: &Header, line: i32, spawner: &Alive) -> ! {
    // The spawner's own socket is not for here.
    // SAFETY: descriptors are plain numbers here.
    unsafe { call!(nr::DUP3, line, CONTROL_FD, O_CLOEXEC) };
    spawner.watch_only();
    name(b"cell-init\0");
    // Every signal waits to be read; the payload opens the mask again for itself.
    let all = u64::MAX;
    // SAFETY: reads eight bytes of ours.
    unsafe { call!(nr::RT_SIGPROCMASK, 0, &raw const all, 0, 8) };
    // SAFETY: reads eight bytes of ours.
    let signals = high(unsafe { call!(nr::SIGNALFD4, -1i64, &raw const all, 8, SFD_CLOEXEC_NONBLOCK) } as i32);
    // SAFETY: the tables come from our library.
    run_or_fail(unsafe { interpret(header, header.init) });
    // The last change of id is made, so from here on the spawner's death is ours. Was it before?
    if spawner.is_gone() {
        exit(1);
    }
    let mut exported = [0i32; EXPORTS_MAX];
    let n_exports = (header.n_exports as usize).min(EXPORTS_MAX);
    for (fd, slot) in exported.iter_mut().zip(header.exports).take(n_exports) {
        // SAFETY: a slot of the image.
        *fd = unsafe { *(slot as *const i64) } as i32;
    }
    send(&Message { kind: MESSAGE_READY, ..Message::default() }, &exported[..n_exports]);
    // Nothing but the two ways to be told something stays.
    // SAFETY: descriptors are plain numbers here.
    unsafe { call!(nr::CLOSE_RANGE, 1, signals - 1, 0) };
    // SAFETY: as above.
    unsafe { call!(nr::CLOSE_RANGE, signals + 1, u32::MAX, 0) };
    serve(signals)
}

/// A command that runs.
struct Running {
    payload: i64,
    begun_us: u64,
    last_us: u64,
    is_last: bool,
    usage: [i64; 7],
}

/// Runs commands, reaps orphans and forwards the supervisor's signals, until the last command has ended or the supervisor
/// is gone; the kernel then kills whatever is left in the namespace.
fn serve(signals: i32) -> ! {
    let (mut running, mut mapped): (Option<Running>, u64) = (None, 0);
    loop {
        // A supervisor that was stopped does not look at the clock: past the last moment the command is killed from here.
        let left_ms =
            running.as_ref().map_or(u64::MAX, |running| running.last_us.saturating_sub(now_us()).div_ceil(1000));
        if left_ms == 0 {
            signal_all(SIGKILL);
        }
        let mut fds =
            [PollFd { fd: CONTROL_FD, events: POLLIN, revents: 0 }, PollFd { fd: signals, events: POLLIN, revents: 0 }];
        let wait_ms = if left_ms == 0 || left_ms > i32::MAX as u64 { u64::MAX } else { left_ms };
        // SAFETY: the kernel writes `revents` of two entries that live here.
        let n = unsafe { call!(nr::POLL, &raw mut fds, 2, wait_ms) };
        if n <= 0 {
            continue;
        }
        if fds[1].revents != 0 {
            // What came does not matter: any number of children may be behind one signal.
            let mut infos = [0u64; 64];
            // SAFETY: writes at most the size of `infos`.
            unsafe { call!(nr::READ, signals, &raw mut infos, size_of_val(&infos)) };
            reap(&mut running);
        }
        if fds[0].revents != 0 {
            obey(&receive(), &mut running, &mut mapped);
        }
    }
}

fn obey(received: &Received, running: &mut Option<Running>, mapped: &mut u64) {
    match (received.command.kind, &running) {
        (COMMAND_RUN, None) => {
            // SAFETY: the image of an earlier command, which has long executed.
            unsafe { call!(nr::MUNMAP, COMMAND_BASE, *mapped) };
            *mapped = received.command.value;
            *running = Some(run(received));
        }
        // SAFETY: sends a signal; touches no memory. The payload leads its own session, so its group has its pid.
        (COMMAND_SIGNAL, Some(Running { payload, .. })) => unsafe {
            call!(nr::KILL, -payload, received.command.value);
        },
        (COMMAND_KILL, Some(_)) => _ = signal_all(SIGKILL),
        (COMMAND_PAUSE, _) => _ = signal_all(SIGSTOP),
        (COMMAND_RESUME, _) => _ = signal_all(SIGCONT),
        // It ended by itself in this very moment.
        (COMMAND_SIGNAL | COMMAND_KILL, None) => {}
        // The supervisor is gone, or not ours.
        _ => exit(1),
    }
}

/// Starts the command whose image was received.
fn run(received: &Received) -> Running {
    /// Used by one child at a time, while this process stands still.
    static mut STACK: [u64; 2048] = [0; 2048];
    let header = map(COMMAND_BASE, received);
    let begun_us = now_us();
    let top = (&raw mut STACK) as u64 + size_of::<[u64; 2048]>() as u64;
    // While it shares our memory, we stand still, and no page is copied; what restores another needs memory of its own.
    let shared = if header.is_restored != 0 { 0 } else { nr::CLONE_VM | nr::CLONE_VFORK };
    let flags = shared | nr::SIGCHLD;
    // SAFETY: the stack is used by nobody else; `payload` does not return.
    let payload = unsafe { nr::clone(flags, top, payload, COMMAND_BASE) };
    // The ends of the payload's pipes must be its own.
    for fd in received.inputs() {
        close(*fd);
    }
    if payload < 0 {
        fail(Fault { op: OP_FORK, answer: payload });
    }
    let last_us = begun_us.saturating_add(header.life_ms_max.saturating_mul(1000));
    Running { payload, begun_us, last_us, is_last: header.is_last != 0, usage: [0; 7] }
}

/// Reaps whoever ended. With the command, everything it left is ended and counted.
fn reap(running: &mut Option<Running>) {
    loop {
        let (pid, status, usage) = wait(-1, WNOHANG);
        if pid <= 0 {
            return;
        }
        // Orphans of a command that is over are nobody's.
        let Some(now) = running else { continue };
        add(&mut now.usage, &usage);
        if pid == now.payload {
            now.usage[6] = now_us().wrapping_sub(now.begun_us) as i64;
            end_all(&mut now.usage);
            let message =
                Message { kind: MESSAGE_ENDED, value: i64::from(status), usage: now.usage, ..Message::default() };
            send(&message, &[]);
            if now.is_last {
                exit(0);
            }
            *running = None;
        }
    }
}

fn add(sum: &mut [i64; 7], usage: &[i64; 7]) {
    for at in [0, 1, 3, 4] {
        sum[at] = sum[at].wrapping_add(usage[at]);
    }
    sum[2] = sum[2].max(usage[2]);
}

/// Kills whatever the payload left behind and waits for it, so that what it used is counted, and how many they were.
/// Leaving would kill it as well, uncounted.
fn end_all(usage: &mut [i64; 7]) {
    if !signal_all(SIGKILL) {
        return;
    }
    loop {
        let (pid, _, more) = wait(-1, 0);
        if pid > 0 {
            add(usage, &more);
            usage[5] = usage[5].wrapping_add(1);
        } else if pid != EINTR {
            return;
        }
    }
}

/// Signals every process of the namespace but its init, which must be this one: anywhere else, "all"
/// would be every process of the machine.
fn signal_all(signal: u64) -> bool {
    // SAFETY: asks for a number.
    let is_init = unsafe { call!(nr::GETPID) } == 1;
    if is_init {
        // SAFETY: sends a signal; touches no memory.
        unsafe { call!(nr::KILL, -1i64, signal) };
    }
    is_init
}

/// The last steps before the command's own first instruction.
///
/// # Safety
/// Runs in the process forked by init, with the command's image mapped at this address.
unsafe extern "C" fn payload(base: u64) -> ! {
    // SAFETY: as the caller vouches.
    let header = unsafe { &*(base as *const Header) };
    let none = 0u64;
    // SAFETY: reads eight bytes of ours.
    unsafe { call!(nr::RT_SIGPROCMASK, 2, &raw const none, 0, 8) };
    // SAFETY: descriptors are plain numbers here.
    unsafe { call!(nr::DUP3, CONTROL_FD, PAYLOAD_CONTROL_FD, O_CLOEXEC) };
    // SAFETY: the tables come from our library.
    if let Err(fault) = unsafe { interpret(header, header.payload) } {
        let message = Message { kind: MESSAGE_COMMAND_FAULT, ..fault.message() };
        send_on(PAYLOAD_CONTROL_FD, &message, &[]);
    }
    exit(127)
}

/// Runs a section; stops at the first op that does not answer as expected.
///
/// # Safety
/// `header` must be that of an image built by this crate's `program` and mapped at [`BASE`] (or,
/// in a test, wherever its addresses point to).
pub(crate) unsafe fn interpret(header: &Header, section: Section) -> Result<(), Fault> {
    let (first, count) = (section.first as usize, section.count as usize);
    // SAFETY: the op table has at least the ops its sections name.
    let ops = unsafe { core::slice::from_raw_parts(header.ops as *const Op, first + count) };
    for (idx, op) in ops.iter().enumerate().skip(first) {
        let mut args = op.args;
        for (bit, arg) in args.iter_mut().enumerate() {
            if op.slots & (1 << bit) != 0 {
                // SAFETY: an argument marked so is the address of a slot of the image.
                *arg = unsafe { *(*arg as *const u64) };
            }
        }
        let answer = if op.call == CALL_COMPARE {
            // SAFETY: both ranges lie in the image.
            i64::from(unsafe { differ(args[0] as *const u8, args[1] as *const u8, args[2] as usize) })
        } else if op.call == CALL_ADD {
            args[0].wrapping_add(args[1]) as i64
        } else if op.call == CALL_RESUME {
            // SAFETY: the library wrote the frame, and everything it leads to was mapped by the ops before this.
            unsafe { nr::resume(args[0]) }
        } else {
            loop {
                // SAFETY: every pointer argument is an address in the image, of a size the call's
                // encoder in `program` laid out for it.
                let answer = unsafe { nr::syscall(op.call, args) };
                if answer != EINTR {
                    break answer;
                }
            }
        };
        let failed_as_listed = answer < 0 && op.values.contains(&-answer);
        let holds = match op.expect {
            EXPECT_IS => answer == op.values[0],
            EXPECT_FAILS => failed_as_listed,
            EXPECT_OK_OR => answer >= 0 || failed_as_listed,
            EXPECT_SAME => answer == 0,
            EXPECT_DIFFERENT => answer != 0,
            _ => answer >= 0,
        };
        if !holds {
            return Err(Fault { op: idx as u64, answer });
        }
        if op.keep != 0 {
            // SAFETY: a slot of the image, which is mapped writable and private.
            unsafe { *(op.keep as *mut i64) = answer };
        }
        if op.keep_i32 != 0 {
            // SAFETY: an i32 field of a struct in the image; packed structs need not align it.
            unsafe { (op.keep_i32 as *mut i32).write_unaligned(answer as i32) };
        }
    }
    Ok(())
}

/// # Safety
/// Both ranges must be readable.
unsafe fn differ(a: *const u8, b: *const u8, len: usize) -> bool {
    // SAFETY: as the caller vouches.
    let a = unsafe { core::slice::from_raw_parts(a, len) };
    // SAFETY: as the caller vouches.
    let b = unsafe { core::slice::from_raw_parts(b, len) };
    a != b
}

fn run_or_fail(ran: Result<(), Fault>) {
    if let Err(fault) = ran {
        fail(fault);
    }
}

fn close(fd: i32) {
    // SAFETY: descriptors are plain numbers here.
    unsafe { call!(nr::CLOSE, fd) };
}

/// Moves a descriptor out of the way of low numbers.
fn high(fd: i32) -> i32 {
    // SAFETY: descriptors are plain numbers here.
    let moved = unsafe { call!(nr::FCNTL, fd, F_DUPFD_CLOEXEC, HIGH_FD_FIRST) };
    if moved < 0 {
        return fd;
    }
    close(fd);
    moved as i32
}

fn fail(fault: Fault) -> ! {
    send(&fault.message(), &[]);
    exit(127)
}

/// What `ps` shows for this process; it was started by the number of a descriptor.
fn name(name: &[u8]) {
    const PR_SET_NAME: u64 = 15;
    // SAFETY: reads at most 16 bytes up to the NUL that ends `name`.
    unsafe { call!(nr::PRCTL, PR_SET_NAME, name.as_ptr(), 0, 0, 0) };
}

/// Lets every signal do what it does by default. An ignored one stays ignored across exec.
fn default_signals() {
    let default = [0u64; 4];
    for signal in 1..=SIGNALS {
        // SAFETY: installs SIG_DFL from 32 zero bytes of ours. SIGKILL and SIGSTOP refuse, as they should.
        unsafe { call!(nr::RT_SIGACTION, signal, &raw const default, 0, 8) };
    }
}

/// A pipe that tells whether the spawner lives. `PR_SET_PDEATHSIG` tells of deaths to come, this of one
/// that came before: the kernel closes a dying process's descriptors before it signals its children.
struct Alive {
    reader: i32,
    writer: i32,
}

impl Alive {
    fn new() -> Alive {
        let mut ends = [-1i32; 2];
        // SAFETY: writes two descriptors of ours.
        unsafe { call!(nr::PIPE2, &raw mut ends, O_CLOEXEC) };
        // High numbers: the low ones are the command's own.
        Alive { reader: high(ends[0]), writer: high(ends[1]) }
    }

    /// In a child: only the spawner must hold the end that keeps it open.
    fn watch_only(&self) {
        // SAFETY: descriptors are plain numbers here.
        unsafe { call!(nr::CLOSE, self.writer) };
    }

    /// In a child: whether the spawner died.
    fn is_gone(&self) -> bool {
        let mut fd = PollFd { fd: self.reader, events: POLLIN, revents: 0 };
        // SAFETY: the kernel writes one entry that lives here.
        unsafe { call!(nr::POLL, &raw mut fd, 1, 0) };
        fd.revents != 0
    }
}

/// Microseconds of a clock that only goes forward.
fn now_us() -> u64 {
    let mut now = [0u64; 2];
    // SAFETY: writes one timespec of ours.
    unsafe { call!(nr::CLOCK_GETTIME, CLOCK_MONOTONIC, &raw mut now) };
    now[0].wrapping_mul(1_000_000).wrapping_add(now[1] / 1000)
}

/// Kills a child of this process, waits until it is gone, and says how it ended and what it used.
fn kill_and_reap(pid: i64) -> (i64, [i64; 7]) {
    // SAFETY: the pid is an unreaped child of ours, so it cannot have been reused.
    unsafe { call!(nr::KILL, pid, SIGKILL) };
    loop {
        let (reaped, status, usage) = wait(pid, 0);
        if reaped != EINTR {
            return (i64::from(status), usage);
        }
    }
}

/// Waits for a child: its pid, its status and what it used.
fn wait(pid: i64, flags: u64) -> (i64, i32, [i64; 7]) {
    let mut status = 0i32;
    // rusage: user time, system time (seconds and µs each), largest resident set; blocks read and written
    // are its words 11 and 12.
    let mut usage = [0i64; 18];
    // SAFETY: writes one i32 and one rusage of ours.
    let reaped = unsafe { call!(nr::WAIT4, pid, &raw mut status, flags | WALL, &raw mut usage) };
    let micros = |at: usize| usage[at].wrapping_mul(1_000_000).wrapping_add(usage[at + 1]);
    (reaped, status, [micros(0), micros(2), usage[4], usage[11], usage[12], 0, 0])
}

/// Maps the image that came as the first descriptor, and writes the others into it.
fn map(base: u64, received: &Received) -> &'static Header {
    const PROT_READ_WRITE: u64 = 3;
    const MAP_PRIVATE_FIXED_NOREPLACE: u64 = 0x10_0002;
    let (len, image) = (received.command.value, received.fds[0]);
    // SAFETY: NOREPLACE makes the kernel refuse rather than cover anything mapped there.
    let at = unsafe { call!(nr::MMAP, base, len, PROT_READ_WRITE, MAP_PRIVATE_FIXED_NOREPLACE, image, 0) };
    if received.n_fds == 0 || at != base as i64 || len < size_of::<Header>() as u64 {
        fail(Fault { op: OP_IMAGE, answer: at });
    }
    close(image);
    // SAFETY: mapped above, page-aligned, at least a header long, and nobody else's.
    let header = unsafe { &mut *(base as *mut Header) };
    if header.magic != MAGIC {
        fail(Fault { op: OP_IMAGE, answer: 0 });
    }
    for (to, from) in header.inputs.iter_mut().zip(received.inputs()) {
        *to = i64::from(*from);
    }
    header.vdso = VDSO.load(Relaxed);
    header
}

/// A command and the descriptors that came with it.
struct Received {
    command: Command,
    fds: [i32; INPUTS_MAX + 1],
    n_fds: usize,
}

impl Received {
    /// Those that came with an image.
    fn inputs(&self) -> impl Iterator<Item = &i32> {
        self.fds.iter().take(self.n_fds).skip(1)
    }
}

/// Receives one command; kind 0 is the end of the supervisor.
fn receive() -> Received {
    const RIGHTS_HEADER: usize = 16;
    let mut received = Received { command: Command::default(), fds: [-1; INPUTS_MAX + 1], n_fds: 0 };
    let mut rights = Rights::<{ INPUTS_MAX + 1 }> { len: 0, level: 0, kind: 0, fds: [-1; INPUTS_MAX + 1] };
    let mut iov = IoVec { base: (&raw mut received.command) as u64, len: size_of::<Command>() as u64 };
    let mut header = MsgHeader {
        name: 0,
        name_len: 0,
        iov: (&raw mut iov) as u64,
        iov_len: 1,
        control: (&raw mut rights) as u64,
        control_len: size_of_val(&rights) as u64,
        flags: 0,
    };
    loop {
        // SAFETY: the kernel writes one command and the control buffer, both of ours.
        let n = unsafe { call!(nr::RECVMSG, CONTROL_FD, &raw mut header, MSG_CMSG_CLOEXEC) };
        if n == EINTR {
            continue;
        }
        if n != size_of::<Command>() as i64 {
            received.command = Command::default();
        } else if header.control_len as usize > RIGHTS_HEADER && rights.kind == SCM_RIGHTS {
            received.n_fds = ((rights.len as usize - RIGHTS_HEADER) / 4).min(received.fds.len());
            received.fds = rights.fds;
        }
        return received;
    }
}

/// Sends one message. A supervisor that is gone shows at the next `receive`.
fn send(message: &Message, fds: &[i32]) {
    send_on(CONTROL_FD, message, fds);
}

fn send_on(socket: i32, message: &Message, fds: &[i32]) {
    let mut rights = Rights::<EXPORTS_MAX> { len: 0, level: SOL_SOCKET, kind: SCM_RIGHTS, fds: [0; EXPORTS_MAX] };
    for (to, from) in rights.fds.iter_mut().zip(fds) {
        *to = *from;
    }
    let used = 16 + 4 * fds.len() as u64;
    rights.len = used;
    let mut iov = IoVec { base: core::ptr::from_ref(message) as u64, len: size_of::<Message>() as u64 };
    let header = MsgHeader {
        name: 0,
        name_len: 0,
        iov: (&raw mut iov) as u64,
        iov_len: 1,
        control: if fds.is_empty() { 0 } else { (&raw const rights) as u64 },
        control_len: if fds.is_empty() { 0 } else { used.next_multiple_of(8) },
        flags: 0,
    };
    loop {
        // SAFETY: the kernel reads the message and the rights, both alive here.
        let n = unsafe { call!(nr::SENDMSG, socket, &raw const header, MSG_NOSIGNAL) };
        if n != EINTR {
            return;
        }
    }
}
