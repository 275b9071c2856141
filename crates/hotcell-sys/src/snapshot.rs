//! Snapshots: a process that stands still, taken down with all that makes it go on elsewhere.
//!
//! ```text
//! a program stops itself (SIGSTOP) ─▶ take(pid) ─▶ Snapshot + its memory in a file ─▶ restore() writes a Program
//!                                                                                    that goes on from there
//! ```
//!
//! What goes on is a process of its own, made by a cell's init behind all its walls: it maps the file's pages as its own
//! private copy, at the addresses they had, and returns into the program as from a signal. Nothing of one such process
//! can reach another, for they have nothing in common that could be written to.
//!
//! Only what can be carried over is taken: one thread, no memory shared with others, no open files but the three
//! streams. Anything else is refused by name.

use std::fs::{self, File};
use std::io;
use std::os::fd::FromRawFd;
use std::os::unix::fs::FileExt;

use libc::{c_int, c_long, c_void};
use serde::{Deserialize, Serialize};

use crate::program::{Arg, Expect, Program, Slot, Stage};
use crate::wire::{COMMAND_BASE, MEMORY_END, PARKING, PAYLOAD_CONTROL_FD, ROOM, STUB_BASE};

const PAGE: u64 = 4096;
const SIGNALS: usize = 64;
/// The stack grows downwards into this much, as it would have.
const STACK_BYTES: u64 = 8 << 20;
/// More parts of memory than any sane program has.
const REGIONS_MAX: usize = 8192;

/// Why a process cannot be taken.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// It has more than one thread.
    #[error("it has {0} threads; only one can be carried over")]
    Threads(usize),
    /// It has processes of its own.
    #[error("it has started processes that still run; only itself can be carried over")]
    Children,
    /// It has more in memory than may be kept.
    #[error("it has more than {0} bytes in memory, which is the most that is carried over")]
    TooLarge(u64),
    /// It has a file open.
    #[error("it has `{path}` open as descriptor {fd}; only the three streams can be carried over")]
    Open {
        /// Which descriptor.
        fd: i32,
        /// What it is.
        path: String,
    },
    /// It shares memory.
    #[error("it shares memory with others: `{0}`")]
    Shared(String),
    /// It uses addresses of ours.
    #[error("it uses memory at {0:#x}, which a restored process needs for itself")]
    Address(u64),
    /// Tracing it failed.
    #[error("it cannot be {what}")]
    Trace {
        /// What was tried.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
}

fn failed(what: &'static str) -> impl Fn(io::Error) -> SnapshotError {
    move |source| SnapshotError::Trace { what, source }
}

/// A process, but for the contents of its memory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Snapshot {
    regions: Vec<Region>,
    /// The vdso and what belongs to it, from low to high.
    vdso: Vec<Special>,
    /// As `ptrace` gives them: `struct user_regs_struct`.
    registers: Vec<u64>,
    /// As `ptrace` gives it: `struct user_fpregs_struct`.
    floating_point: Vec<u8>,
    signal_mask: u64,
    /// As the kernel takes it, for each signal that does not do what it does by default.
    handlers: Vec<(u32, [u64; 4])>,
    alternate_stack: [u64; 3],
    robust_list: (u64, u64),
    rseq: Option<(u64, u32, u32)>,
    /// The name it has for `ps`.
    name: String,
    stack_top: u64,
    /// What the kernel knows of what is where: code, data, heap, stack, arguments and environment.
    layout: [u64; 11],
    /// Files that parts of it came from.
    files: Vec<String>,
    /// What every run writes to, from one address to another: see [`Snapshot::learn`].
    written: Vec<(u64, u64)>,
}

/// Where the arguments and the environment of a run are, one after the other, each word ended by a zero byte.
#[derive(Clone, Copy, Debug)]
pub struct Words {
    /// The descriptor of the file they are in.
    pub file: Slot,
    /// Where in it they begin.
    pub offset: u64,
    /// How long the arguments are.
    pub n_argument_bytes: u64,
    /// How long the environment is.
    pub n_environment_bytes: u64,
}

/// A part of its memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Region {
    start: u64,
    end: u64,
    protection: u8,
    /// Where its contents are in the file; none if it is all zeroes.
    offset: Option<u64>,
}

/// A part that the kernel itself made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Special {
    start: u64,
    end: u64,
    is_code: bool,
}

/// In a process that goes on from a snapshot: its request, which is descriptor 3 and nobody's yet. To be called once.
pub fn request() -> File {
    // SAFETY: whoever restored this process gave it the descriptor, for this and for nothing else.
    unsafe { File::from_raw_fd(3) }
}

impl Snapshot {
    /// Takes down a process that stands still, the child of `parent`, and writes its memory to a file, but not more than
    /// `most` bytes. It stands still afterwards.
    pub fn take(pid: i32, parent: i32, memory: &File, most: u64) -> Result<Snapshot, SnapshotError> {
        // First: from here on its pid is not another's, and it does not run. Should its like have let it go on meanwhile,
        // this lasts until it stops again, or its time is over.
        let tracee = Tracee::seize(pid)?;
        if stat(pid).map_err(failed("looked at"))?.field(4) != u64::try_from(parent).unwrap_or(0) {
            let source = io::Error::other("its pid is another's by now");
            return Err(SnapshotError::Trace { what: "traced", source });
        }
        let children = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).map_err(failed("looked at"))?;
        if !children.trim().is_empty() {
            return Err(SnapshotError::Children);
        }
        let n_threads = fs::read_dir(format!("/proc/{pid}/task")).map_err(failed("looked at"))?.count();
        if n_threads != 1 {
            return Err(SnapshotError::Threads(n_threads));
        }
        for entry in fs::read_dir(format!("/proc/{pid}/fd")).map_err(failed("looked at"))?.flatten() {
            let fd: i32 = entry.file_name().to_str().and_then(|name| name.parse().ok()).unwrap_or(-1);
            if fd > 2 {
                let path = fs::read_link(entry.path()).map(|path| path.display().to_string()).unwrap_or_default();
                return Err(SnapshotError::Open { fd, path });
            }
        }
        let registers = tracee.registers()?;
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).map_err(failed("looked at"))?;
        let mut snapshot = Snapshot {
            regions: Vec::new(),
            vdso: Vec::new(),
            floating_point: tracee.floating_point()?,
            signal_mask: tracee.signal_mask()?,
            rseq: tracee.rseq(),
            handlers: Vec::new(),
            alternate_stack: [0; 3],
            robust_list: (0, 0),
            name: fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().to_owned(),
            stack_top: 0,
            layout: layout(pid).map_err(failed("looked at"))?,
            registers: registers.to_vec(),
            files: Vec::new(),
            written: Vec::new(),
        };
        let from = File::open(format!("/proc/{pid}/mem")).map_err(failed("read"))?;
        let mut copy = Copy { from, to: memory, at: 0, most };
        for line in maps.lines() {
            snapshot.add(line, &mut copy)?;
        }
        tracee.ask_kernel(&mut snapshot, &registers)?;
        Ok(snapshot)
    }

    fn add(&mut self, line: &str, copy: &mut Copy<'_>) -> Result<(), SnapshotError> {
        // Five words, and a name that may hold anything.
        let mut words = line.splitn(6, ' ');
        let (range, rights) = (words.next().unwrap_or(""), words.next().unwrap_or(""));
        let name = words.nth(3).unwrap_or("").trim_start();
        let number = |text: &str| u64::from_str_radix(text, 16).unwrap_or(0);
        let (start, end) = range.split_once('-').map_or((0, 0), |(start, end)| (number(start), number(end)));
        if name == "[vsyscall]" || end > MEMORY_END {
            return Ok(());
        }
        if end > COMMAND_BASE - ROOM && start < STUB_BASE + 2 * ROOM {
            return Err(SnapshotError::Address(start));
        }
        if name.starts_with("[vvar") || name == "[vdso]" {
            self.vdso.push(Special { start, end, is_code: name == "[vdso]" });
            return Ok(());
        }
        if name.starts_with('/') && !self.files.iter().any(|file| file == name) {
            self.files.push(name.to_owned());
        }
        let has = |right: u8| rights.as_bytes().contains(&right);
        if has(b's') && has(b'w') {
            return Err(SnapshotError::Shared(name.to_owned()));
        }
        if name == "[stack]" {
            self.stack_top = end;
        }
        if self.regions.len() >= REGIONS_MAX {
            return Err(SnapshotError::Address(start));
        }
        let protection = u8::from(has(b'r')) | u8::from(has(b'w')) << 1 | u8::from(has(b'x')) << 2;
        let offset = if protection == 0 { None } else { copy.region(start, end)? };
        let region = Region { start, end, protection, offset };
        // What lies side by side, here and in the file, is mapped by one call.
        match self.regions.last_mut() {
            Some(last) if last.is_followed_by(&region) => last.end = end,
            _ => self.regions.push(region),
        }
        Ok(())
    }

    /// Learns from a process that went on from it, and stands still again, which pages it wrote to. Those that come after
    /// are given them at once: making a page when it is first written to takes twice as long.
    pub fn learn(&mut self, pid: i32) -> io::Result<()> {
        const IS_PRESENT: u64 = 1 << 63;
        const IS_OF_FILE: u64 = 1 << 61;
        let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
        self.written.clear();
        for region in self.regions.iter().filter(|region| region.is_file_written(self.stack_top)) {
            let mut entries = vec![0; usize::try_from((region.end - region.start) / PAGE).unwrap_or(0) * 8];
            pagemap.read_exact_at(&mut entries, region.start / PAGE * 8)?;
            for (idx, entry) in entries.chunks_exact(8).enumerate() {
                let entry = u64::from_ne_bytes(entry.try_into().unwrap_or_default());
                // What was written to is no longer the file's.
                if entry & IS_PRESENT == 0 || entry & IS_OF_FILE != 0 {
                    continue;
                }
                let start = region.start + idx as u64 * PAGE;
                match self.written.last_mut() {
                    Some(last) if last.1 == start => last.1 += PAGE,
                    _ => self.written.push((start, start + PAGE)),
                }
            }
        }
        Ok(())
    }

    /// Files that parts of its memory came from, by their paths in its cell.
    pub fn files(&self) -> &[String] {
        &self.files
    }

    /// How many bytes it has in memory, at least for a moment.
    pub fn bytes(&self) -> u64 {
        self.regions.iter().filter(|region| region.offset.is_some()).map(|region| region.end - region.start).sum()
    }

    /// Writes down how a command's process becomes this one. `memory` is the descriptor of the file; it and every other
    /// from `first_closed` on are closed, if that is said.
    pub fn restore<L: Clone>(
        &self,
        program: &mut Program<L>,
        label: &L,
        memory: Slot,
        words: &Words,
        first_closed: Option<i32>,
    ) {
        program.restored();
        let mut out = Writer { program, label };
        out.call(libc::SYS_prctl, &[libc::PR_SET_DUMPABLE.into(), 1.into()]);
        let name = out.program.text(&self.name);
        out.call(libc::SYS_prctl, &[libc::PR_SET_NAME.into(), name.into()]);
        // Out of the way of what is mapped next; then there, too, is room.
        let code = self.vdso.iter().find(|special| special.is_code).map_or(0, |special| special.start);
        let first = self.vdso.first().map_or(0, |special| special.start);
        let here = out.program.vdso();
        for special in &self.vdso {
            let distance = special.start.cast_signed() - code.cast_signed();
            let from = out.program.add(Stage::Payload, label.clone(), here, distance);
            out.relocate(from.into(), PARKING + (special.start - first), special.end - special.start);
        }
        for (start, end) in [(16 * PAGE, COMMAND_BASE), (PARKING + ROOM, STUB_BASE), (STUB_BASE + ROOM, MEMORY_END)] {
            out.call(libc::SYS_munmap, &[start.into(), (end - start).into()]);
        }
        self.map_memory(&mut out, memory);
        let layout = self.map_stack(&mut out, memory, words);
        for special in &self.vdso {
            out.relocate((PARKING + (special.start - first)).into(), special.start, special.end - special.start);
        }
        self.set_kernel_state(&mut out, layout);
        if let Some(first) = first_closed {
            out.close_from(first);
        }
        let frame = self.frame(out.program);
        out.program.resume(Stage::Payload, label.clone(), frame);
    }

    fn map_memory<L: Clone>(&self, out: &mut Writer<'_, L>, memory: Slot) {
        let private = libc::MAP_PRIVATE | libc::MAP_FIXED;
        for region in self.regions.iter().filter(|region| region.end != self.stack_top) {
            let (len, protection) = (region.end - region.start, u64::from(region.protection));
            let (flags, fd, offset): (i32, Arg, u64) = match region.offset {
                Some(offset) => (private, memory.into(), offset),
                None => (private | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE, (-1).into(), 0),
            };
            let args = [region.start.into(), len.into(), protection.into(), flags.into(), fd, offset.into()];
            out.call(libc::SYS_mmap, &args);
        }
        for (start, end) in &self.written {
            // A kernel that does not know it, or has no room, makes each page when it is needed.
            let args = [(*start).into(), (end - start).into(), libc::MADV_POPULATE_WRITE.into()];
            let expect = Expect::OkOr(&[libc::EINVAL, libc::ENOMEM, libc::EFAULT, libc::EAGAIN]);
            out.program.call(Stage::Payload, out.label.clone(), libc::SYS_madvise, &args, expect).ignore();
        }
    }

    /// Makes a stack with room to grow into, and below it puts the words of this run: what the kernel is to know of where
    /// everything is. None of it is a file's, for of those the kernel shows nobody arguments or environment.
    fn map_stack<L: Clone>(&self, out: &mut Writer<'_, L>, memory: Slot, words: &Words) -> [u64; 11] {
        let mut layout = self.layout;
        let Some(stack) = self.regions.iter().find(|region| region.end == self.stack_top) else { return layout };
        let below = self.regions.iter().filter(|region| region.end <= stack.start).map(|region| region.end).max();
        let n_bytes = words.n_argument_bytes + words.n_environment_bytes;
        let room = STACK_BYTES + n_bytes.next_multiple_of(PAGE);
        let low = self.stack_top.saturating_sub(room).max(below.unwrap_or(0) + 256 * PAGE).min(stack.start);
        let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_STACK;
        let (len, protection) = (self.stack_top - low, u64::from(stack.protection));
        let args = [low.into(), len.into(), protection.into(), flags.into(), (-1).into(), 0.into()];
        out.call(libc::SYS_mmap, &args);
        if let Some(offset) = stack.offset {
            // Below the last 128 bytes that a function may use, there is nothing of use to anybody.
            let used = (self.register(REG_RSP) - 128) & !(PAGE - 1);
            let used = used.clamp(stack.start, self.stack_top - PAGE);
            let offset = offset + (used - stack.start);
            let args = [memory.into(), used.into(), (self.stack_top - used).into(), offset.into()];
            out.call(libc::SYS_pread64, &args);
        }
        if low + n_bytes < stack.start {
            let args = [words.file.into(), low.into(), n_bytes.into(), words.offset.into()];
            out.call(libc::SYS_pread64, &args);
            let end = low + words.n_argument_bytes;
            layout[7..].copy_from_slice(&[low, end, end, end + words.n_environment_bytes]);
        }
        layout
    }

    /// What the kernel keeps of a process beside its memory.
    fn set_kernel_state<L: Clone>(&self, out: &mut Writer<'_, L>, layout: [u64; 11]) {
        const ARCH_SET_FS: u64 = 0x1002;
        const ARCH_SET_GS: u64 = 0x1001;
        for (code, base) in [(ARCH_SET_FS, self.register(REG_FS_BASE)), (ARCH_SET_GS, self.register(REG_GS_BASE))] {
            out.call(libc::SYS_arch_prctl, &[code.into(), base.into()]);
        }
        // Without it the heap could not grow: the kernel must know where it ends.
        let no_file = u64::from(u32::MAX) << 32;
        let map: Vec<u64> = layout.into_iter().chain([0, no_file]).collect();
        let map = out.program.words(&map);
        let args = [libc::PR_SET_MM.into(), libc::PR_SET_MM_MAP.into(), map.into(), 104u64.into(), 0.into()];
        out.call(libc::SYS_prctl, &args);
        let (head, len) = self.robust_list;
        if head != 0 {
            out.call(libc::SYS_set_robust_list, &[head.into(), len.into()]);
        }
        if let Some((at, len, signature)) = self.rseq {
            let args = [at.into(), u64::from(len).into(), 0.into(), u64::from(signature).into()];
            out.call(libc::SYS_rseq, &args);
        }
        for (signal, action) in &self.handlers {
            let action = out.program.words(action);
            out.call(libc::SYS_rt_sigaction, &[u64::from(*signal).into(), action.into(), 0u64.into(), 8u64.into()]);
        }
    }

    fn register(&self, number: usize) -> u64 {
        self.registers.get(number).copied().unwrap_or(0)
    }

    /// What the kernel would have left on the stack, had a signal interrupted it.
    fn frame<L: Clone>(&self, program: &mut Program<L>) -> crate::program::Addr {
        let mut floating_point = self.floating_point.clone();
        floating_point.resize(512, 0);
        // What the kernel keeps there for itself is not ours to say.
        floating_point[464..512].fill(0);
        let fpstate = program.aligned(&floating_point, 64);
        let at = |number| self.register(number);
        let segments = at(REG_CS) & 0xffff | (at(REG_SS) & 0xffff) << 48;
        let strict_ss = 2 | 4;
        let [stack, stack_flags, stack_len] = self.alternate_stack;
        let mut words = vec![0, strict_ss, 0, stack, stack_flags, stack_len];
        // struct sigcontext.
        words.extend([REG_R8, REG_R9, REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15].map(at));
        words.extend([REG_RDI, REG_RSI, REG_RBP, REG_RBX, REG_RDX, REG_RAX, REG_RCX].map(at));
        words.extend([REG_RSP, REG_RIP, REG_EFLAGS].map(at));
        words.extend([segments, 0, 0, 0, 0, fpstate.value()]);
        words.extend([0; 8]);
        words.push(self.signal_mask);
        // siginfo, which nobody reads.
        words.extend([0; 16]);
        program.words(&words)
    }
}

impl Region {
    /// Whether a process can write to it, and has it from the file until then.
    fn is_file_written(&self, stack_top: u64) -> bool {
        self.offset.is_some() && self.protection & 2 != 0 && self.end != stack_top
    }

    fn is_followed_by(&self, next: &Region) -> bool {
        let follows_in_file = match (self.offset, next.offset) {
            (Some(offset), Some(other)) => offset + (self.end - self.start) == other,
            (None, None) => true,
            _ => false,
        };
        self.end == next.start && self.protection == next.protection && follows_in_file
    }
}

/// The numbers of `/proc/PID/stat`.
struct Stat(Vec<u64>);

impl Stat {
    /// By its number in the kernel's documentation; 0 if it is none.
    fn field(&self, number: usize) -> u64 {
        self.0.get(number - 3).copied().unwrap_or(0)
    }
}

fn stat(pid: i32) -> io::Result<Stat> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // After the name, which may hold anything, the third field comes first.
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    Ok(Stat(rest.split_ascii_whitespace().map(|field| field.parse().unwrap_or(0)).collect()))
}

/// What the kernel knows of what is where in a process's memory, in the order of `struct prctl_mm_map`.
fn layout(pid: i32) -> io::Result<[u64; 11]> {
    let stat = stat(pid)?;
    let field = |number| stat.field(number);
    let heap = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let heap = heap.lines().find(|line| line.ends_with("[heap]")).and_then(|line| line.split(['-', ' ']).nth(1));
    let start_brk = field(47);
    let brk = heap.and_then(|end| u64::from_str_radix(end, 16).ok()).unwrap_or(start_brk);
    let [code, data] = [[field(26), field(27)], [field(45), field(46)]];
    let [arguments, environment] = [[field(48), field(49)], [field(50), field(51)]];
    Ok([
        code[0],
        code[1],
        data[0],
        data[1],
        start_brk,
        brk,
        field(28),
        arguments[0],
        arguments[1],
        environment[0],
        environment[1],
    ])
}

struct Writer<'a, L> {
    program: &'a mut Program<L>,
    label: &'a L,
}

impl<L: Clone> Writer<'_, L> {
    fn call(&mut self, number: c_long, args: &[Arg]) {
        self.program.call(Stage::Payload, self.label.clone(), number, args, Expect::Ok).ignore();
    }

    /// Closes every descriptor from this one on; the last to go is the one that tells of a failure.
    fn close_from(&mut self, first: i32) {
        let kept = PAYLOAD_CONTROL_FD;
        for (first, last) in [(first, kept - 1), (kept + 1, i32::MAX)] {
            self.call(libc::SYS_close_range, &[first.into(), last.into(), 0.into()]);
            let args = [first.into(), libc::F_GETFD.into()];
            let expect = Expect::Fails(&[libc::EBADF]);
            self.program.call(Stage::Payload, self.label.clone(), libc::SYS_fcntl, &args, expect).ignore();
        }
        self.call(libc::SYS_close, &[kept.into()]);
    }

    fn relocate(&mut self, from: Arg, to: u64, len: u64) {
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        self.call(libc::SYS_mremap, &[from, len.into(), len.into(), flags.into(), to.into()]);
    }
}

/// Copies memory to a file, but for pages of zeroes.
struct Copy<'a> {
    from: File,
    to: &'a File,
    at: u64,
    most: u64,
}

impl Copy<'_> {
    /// Where in the file it went; none if it is all zeroes.
    fn region(&mut self, start: u64, end: u64) -> Result<Option<u64>, SnapshotError> {
        // What is reserved and never used is large as well, and takes as long to look through.
        if self.at + (end - start) > self.most {
            return Err(SnapshotError::TooLarge(self.most));
        }
        self.copy(start, end).map_err(failed("copied"))
    }

    fn copy(&mut self, start: u64, end: u64) -> io::Result<Option<u64>> {
        const CHUNK: usize = 1 << 20;
        let mut buffer = vec![0; CHUNK];
        let (begun, mut is_empty) = (self.at, true);
        let mut at = start;
        while at < end {
            let len = CHUNK.min(usize::try_from(end - at).unwrap_or(CHUNK));
            self.from.read_exact_at(&mut buffer[..len], at)?;
            for (idx, page) in buffer[..len].chunks(PAGE as usize).enumerate() {
                if page.iter().any(|byte| *byte != 0) {
                    is_empty = false;
                    self.to.write_all_at(page, begun + (at - start) + idx as u64 * PAGE)?;
                }
            }
            at += len as u64;
        }
        if is_empty {
            return Ok(None);
        }
        self.at += end - start;
        // A file that ends in a hole is as long as one that does not.
        self.to.set_len(self.at)?;
        Ok(Some(begun))
    }
}

// Places in `struct user_regs_struct`.
const REG_R15: usize = 0;
const REG_R14: usize = 1;
const REG_R13: usize = 2;
const REG_R12: usize = 3;
const REG_RBP: usize = 4;
const REG_RBX: usize = 5;
const REG_R11: usize = 6;
const REG_R10: usize = 7;
const REG_R9: usize = 8;
const REG_R8: usize = 9;
const REG_RAX: usize = 10;
const REG_RCX: usize = 11;
const REG_RDX: usize = 12;
const REG_RSI: usize = 13;
const REG_RDI: usize = 14;
const REG_ORIG_RAX: usize = 15;
const REG_RIP: usize = 16;
const REG_CS: usize = 17;
const REG_EFLAGS: usize = 18;
const REG_RSP: usize = 19;
const REG_SS: usize = 20;
const REG_FS_BASE: usize = 21;
const REG_GS_BASE: usize = 22;
const N_REGISTERS: usize = 27;

/// A process that is traced until this is dropped.
struct Tracee {
    pid: c_int,
}

impl Drop for Tracee {
    fn drop(&mut self) {
        // It stands still again, as it did before: its stop is its own.
        let _gone = ptrace(libc::PTRACE_DETACH, self.pid, 0, libc::SIGSTOP as usize);
    }
}

impl Tracee {
    fn seize(pid: c_int) -> Result<Tracee, SnapshotError> {
        ptrace(libc::PTRACE_SEIZE, pid, 0, 0).map_err(failed("traced"))?;
        let tracee = Tracee { pid };
        tracee.wait().map_err(failed("traced"))?;
        Ok(tracee)
    }

    fn wait(&self) -> io::Result<c_int> {
        let mut status = 0;
        // SAFETY: writes one int of ours.
        let waited = unsafe { libc::waitpid(self.pid, &raw mut status, libc::__WALL) };
        if waited != self.pid {
            return Err(io::Error::last_os_error());
        }
        if !libc::WIFSTOPPED(status) {
            return Err(io::Error::other("it ended"));
        }
        Ok(status)
    }

    fn registers(&self) -> Result<[u64; N_REGISTERS], SnapshotError> {
        let mut registers = [0u64; N_REGISTERS];
        ptrace(libc::PTRACE_GETREGS, self.pid, 0, registers.as_mut_ptr() as usize).map_err(failed("read"))?;
        Ok(registers)
    }

    fn set_registers(&self, registers: &[u64; N_REGISTERS]) -> Result<(), SnapshotError> {
        ptrace(libc::PTRACE_SETREGS, self.pid, 0, registers.as_ptr() as usize).map_err(failed("steered"))?;
        Ok(())
    }

    fn floating_point(&self) -> Result<Vec<u8>, SnapshotError> {
        let mut state = vec![0u8; 512];
        ptrace(libc::PTRACE_GETFPREGS, self.pid, 0, state.as_mut_ptr() as usize).map_err(failed("read"))?;
        Ok(state)
    }

    fn signal_mask(&self) -> Result<u64, SnapshotError> {
        const PTRACE_GETSIGMASK: u32 = 0x420a;
        let mut mask = 0u64;
        ptrace(PTRACE_GETSIGMASK, self.pid, 8, (&raw mut mask) as usize).map_err(failed("read"))?;
        Ok(mask)
    }

    /// Where the kernel writes on which processor it runs, if it does.
    fn rseq(&self) -> Option<(u64, u32, u32)> {
        const PTRACE_GET_RSEQ_CONFIGURATION: u32 = 0x420f;
        // An address, a length, a signature, flags and padding.
        let mut found = [0u32; 6];
        let len = size_of_val(&found);
        ptrace(PTRACE_GET_RSEQ_CONFIGURATION, self.pid, len, found.as_mut_ptr() as usize).ok()?;
        let at = u64::from(found[0]) | u64::from(found[1]) << 32;
        (at != 0).then_some((at, found[2], found[3]))
    }

    /// Has the process itself ask the kernel for what only it can.
    fn ask_kernel(&self, snapshot: &mut Snapshot, registers: &[u64; N_REGISTERS]) -> Result<(), SnapshotError> {
        // Below its stack, past what a function may keep there.
        let scratch = (registers[REG_RSP] - 4096) & !15;
        let word = |at: u64| self.word(at);
        for signal in 1..=SIGNALS as u64 {
            if signal == libc::SIGKILL as u64 || signal == libc::SIGSTOP as u64 {
                continue;
            }
            self.call(registers, libc::SYS_rt_sigaction, [signal, 0, scratch, 8])?;
            let action = [word(scratch)?, word(scratch + 8)?, word(scratch + 16)?, word(scratch + 24)?];
            if action[0] != 0 {
                snapshot.handlers.push((u32::try_from(signal).unwrap_or(0), action));
            }
        }
        self.call(registers, libc::SYS_sigaltstack, [0, scratch, 0, 0])?;
        let stack = [word(scratch)?, word(scratch + 8)?, word(scratch + 16)?];
        // Of the flags, an int is meant.
        snapshot.alternate_stack = [stack[0], stack[1] & 0xffff_ffff, stack[2]];
        self.call(registers, libc::SYS_get_robust_list, [0, scratch, scratch + 8, 0])?;
        snapshot.robust_list = (word(scratch)?, word(scratch + 8)?);
        self.set_registers(registers)
    }

    /// Has the process make one call.
    fn call(&self, registers: &[u64; N_REGISTERS], number: c_long, args: [u64; 4]) -> Result<u64, SnapshotError> {
        let mut changed = *registers;
        // It stands right behind the call with which it stopped itself: two bytes, to be made again.
        changed[REG_RIP] -= 2;
        changed[REG_RAX] = number.cast_unsigned();
        changed[REG_ORIG_RAX] = u64::MAX;
        [changed[REG_RDI], changed[REG_RSI], changed[REG_RDX], changed[REG_R10]] = args;
        self.set_registers(&changed)?;
        ptrace(libc::PTRACE_SINGLESTEP, self.pid, 0, 0).map_err(failed("steered"))?;
        self.wait().map_err(failed("steered"))?;
        let after = self.registers()?;
        if after[REG_RIP] != registers[REG_RIP] {
            let source = io::Error::other("it did not stop itself by a system call");
            return Err(SnapshotError::Trace { what: "steered", source });
        }
        Ok(after[REG_RAX])
    }

    fn word(&self, at: u64) -> Result<u64, SnapshotError> {
        let mut word = 0u64;
        // SAFETY: the raw call, unlike libc's, writes the word to the address in its last argument: ours.
        let rc = unsafe { libc::syscall(libc::SYS_ptrace, libc::PTRACE_PEEKDATA, self.pid, at, &raw mut word) };
        if rc < 0 { Err(failed("read")(io::Error::last_os_error())) } else { Ok(word) }
    }
}

fn ptrace(request: u32, pid: c_int, addr: usize, data: usize) -> io::Result<()> {
    // SAFETY: the requests made here read or write a buffer of the caller's that is as large as they say, or none.
    let rc = unsafe { libc::ptrace(request, pid, addr as *mut c_void, data as *mut c_void) };
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
