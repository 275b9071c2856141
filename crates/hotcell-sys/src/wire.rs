//! The memory layout that the supervisor writes and the stub runs.
//!
//! ```text
//! BASE ─▶ Header │ strings, structs, filter code, slots │ Op, Op, Op …
//! ```
//!
//! There are two kinds of images: one of a cell, which the spawner keeps for all cells it makes, and one of a command,
//! which a cell's init gets for each. An image is mapped at a fixed address, so every pointer in it is final when it is
//! written and the stub relocates nothing. Compiled twice, into the library and into the stub: both must see the same
//! bytes, so this file uses `core` only and every type is `repr(C)`.

/// Where the image of a cell is mapped. Far from where a static executable, its stack and its vdso live.
pub const BASE: u64 = 0x1000_0000_0000;
/// Where the image of a command is mapped.
pub const COMMAND_BASE: u64 = 0x1100_0000_0000;
/// Where the stub itself is. With the two above it keeps to a part of memory that no other program is loaded to: what a
/// process restores there beside it is never in its way.
pub const STUB_BASE: u64 = 0x1200_0000_0000;
/// Room for an image, or for the stub, from its base.
pub const ROOM: u64 = 1 << 28;
/// Where a process that restores another puts its vdso meanwhile.
pub const PARKING: u64 = COMMAND_BASE + ROOM;
/// The first address that is nobody's.
pub const MEMORY_END: u64 = 0x7fff_ffff_f000;
/// First word of an image: a stub fed anything else stops before it interprets it.
pub const MAGIC: u64 = 0x6c6c_6563_746f_6801;
/// The socket to the supervisor: the spawner's, and in a cell its init's own.
pub const CONTROL_FD: i32 = 0;
/// Where the payload keeps it, closing at exec, while it makes room for its own stdin. Low enough to
/// fit under the smallest limit on descriptors.
pub const PAYLOAD_CONTROL_FD: i32 = 15;
/// How many descriptors may come with an image, beside its own.
pub const INPUTS_MAX: usize = 12;
/// How many descriptors may come with the order to make a cell, beside its line.
pub const CELL_INPUTS_MAX: usize = 10;
/// How many descriptors a finished set-up may hand back.
pub const EXPORTS_MAX: usize = 4;
/// `Op::call` for comparing memory: `args` are two addresses and a length.
pub const CALL_COMPARE: i64 = -1;
/// `Op::call` for the sum of two numbers.
pub const CALL_ADD: i64 = -2;
/// `Op::call` for going on as another: `args[0]` is the address of what a signal handler returns to. The last op of all.
pub const CALL_RESUME: i64 = -3;
/// The ops of one process of the launch, as a range of the op table.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Section {
    /// Index of the first op.
    pub first: u32,
    /// Number of ops.
    pub count: u32,
}

/// Start of the image.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: u64,
    /// Address of the first op.
    pub ops: u64,
    /// Run once by the spawner itself, when the image comes.
    pub ground: Section,
    /// Run by the spawner before each cell, as soon as the one before it is gone.
    pub ahead: Section,
    /// Run by the cell's init: builds and proves the walls.
    pub init: Section,
    /// In an image of a command: run by the process that becomes it; its last op is `execve`.
    pub payload: Section,
    /// Run by the spawner if the supervisor vanished: removes what nobody else will remove.
    pub orphaned: Section,
    /// Flags of the clone that makes init.
    pub clone_flags: u64,
    /// Slot with the cgroup to clone into, or 0.
    pub cgroup_slot: u64,
    /// Slots whose descriptors init sends to the supervisor when every wall stands.
    pub exports: [u64; EXPORTS_MAX],
    /// How many of `exports` are in use.
    pub n_exports: u64,
    /// The descriptors that came with the image, written by whoever received them.
    pub inputs: [i64; INPUTS_MAX],
    /// The descriptors that came with the order to make a cell, likewise.
    pub cell_inputs: [i64; CELL_INPUTS_MAX],
    /// In an image of a command: how long it may run if its supervisor does not end it.
    pub life_ms_max: u64,
    /// In an image of a command: whether the cell ends with it.
    pub is_last: u64,
    /// In an image of a command: whether it does not execute anything, and needs memory of its own.
    pub is_restored: u64,
    /// Whether what is to be done before a cell was done before the first one.
    pub is_ahead_done: u64,
    /// Where the kernel put the vdso, written by whoever received the image.
    pub vdso: i64,
}

/// One step: a syscall, what it must answer, and where the answer goes.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Op {
    /// Syscall number, or [`CALL_COMPARE`].
    pub call: i64,
    /// Arguments: values, or addresses of slots where `slots` has the bit.
    pub args: [u64; 6],
    /// Bit *i*: `args[i]` is the address of a slot that holds the argument.
    pub slots: u32,
    /// One of the `EXPECT_*` values.
    pub expect: u32,
    /// For [`EXPECT_IS`]: the answer. For [`EXPECT_FAILS`]: up to four errnos, others are 0.
    pub values: [i64; 4],
    /// Address of the slot (i64) that keeps the answer, or 0.
    pub keep: u64,
    /// Address of an i32 inside some struct that gets the answer, or 0.
    pub keep_i32: u64,
}

/// The call must succeed.
pub const EXPECT_OK: u32 = 0;
/// The call must answer exactly `values[0]`.
pub const EXPECT_IS: u32 = 1;
/// The call must fail, with one of the errnos in `values`.
pub const EXPECT_FAILS: u32 = 2;
/// The call must succeed, or fail with one of the errnos in `values`.
pub const EXPECT_OK_OR: u32 = 3;
/// A comparison must find the memory equal.
pub const EXPECT_SAME: u32 = 4;
/// A comparison must find the memory different.
pub const EXPECT_DIFFERENT: u32 = 5;

/// What the supervisor says.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Command {
    /// One of the `COMMAND_*` values.
    pub kind: u64,
    /// For images: their length. For [`COMMAND_SIGNAL`]: which.
    pub value: u64,
}

/// To the spawner: take the image of a cell, which comes as the first descriptor, and make the ground of its cells.
pub const COMMAND_PROGRAM: u64 = 2;
/// To the spawner: run the ground of an image that comes as the first descriptor, and of nothing else: what can be done
/// before it is known which cells there will be.
pub const COMMAND_EARLY: u64 = 10;
/// To the spawner: make a cell; its init gets the socket that comes first, and the other descriptors.
pub const COMMAND_CELL: u64 = 3;
/// To the spawner: init's last numbers were read: reap it and say what it used.
pub const COMMAND_REAP: u64 = 4;
/// To init: run the command whose image comes as the first descriptor.
pub const COMMAND_RUN: u64 = 5;
/// To init: signal the command's process group.
pub const COMMAND_SIGNAL: u64 = 6;
/// To init: kill the command and every process it made.
pub const COMMAND_KILL: u64 = 9;
/// To init: stop every process of the cell.
pub const COMMAND_PAUSE: u64 = 7;
/// To init: undo [`COMMAND_PAUSE`].
pub const COMMAND_RESUME: u64 = 8;

/// What the stub tells the supervisor.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Message {
    /// One of the `MESSAGE_*` values.
    pub kind: u64,
    /// For [`MESSAGE_FAULT`] and [`MESSAGE_COMMAND_FAULT`]: index of the op, or one of the `OP_*` values.
    pub op: u64,
    /// A pid, a wait status, or what the kernel answered.
    pub value: i64,
    /// For [`MESSAGE_REAPED`] and [`MESSAGE_ENDED`]: user µs, system µs, largest resident set in KiB, blocks of 512
    /// bytes read and written, and for the latter how many processes the command left behind and for how many µs it ran.
    pub usage: [i64; 7],
}

/// From the spawner: `value` is init's pid; its pidfd comes along.
pub const MESSAGE_SPAWNED: u64 = 2;
/// From init: every wall stands; the exported descriptors come along.
pub const MESSAGE_READY: u64 = 3;
/// An op of the cell's image did not answer as expected.
pub const MESSAGE_FAULT: u64 = 4;
/// From init: the command ended, and with it every process it left; `value` is its wait status.
pub const MESSAGE_ENDED: u64 = 5;
/// From the spawner: init ended, and with it every process of the cell; it is not reaped yet.
pub const MESSAGE_GONE: u64 = 6;
/// From the spawner: init is reaped; `usage` is what the whole tree used.
pub const MESSAGE_REAPED: u64 = 7;
/// From the process that becomes the command: an op of the command's image did not answer as expected.
pub const MESSAGE_COMMAND_FAULT: u64 = 8;

/// Indices of ops of an early image begin here.
pub const OP_EARLY: u64 = 1 << 32;
/// The clone that makes init failed.
pub const OP_CLONE: u64 = u64::MAX;
/// The fork that makes the payload failed.
pub const OP_FORK: u64 = u64::MAX - 1;
/// The image could not be received or mapped.
pub const OP_IMAGE: u64 = u64::MAX - 2;
