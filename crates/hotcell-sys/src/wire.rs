//! The memory layout that the supervisor writes and the stub runs.
//!
//! ```text
//! BASE ─▶ Header │ Op, Op, Op … │ strings, structs, filter code, slots
//! ```
//!
//! The image is mapped at one fixed address, so every pointer in it is final when it is written and
//! the stub relocates nothing. Compiled twice, into the library and into the stub: both must see
//! the same bytes, so this file uses `core` only and every type is `repr(C)`.

/// Where the image is mapped. Far from where a static executable, its stack and its vdso live.
pub const BASE: u64 = 0x1000_0000_0000;
/// First word of an image: a stub fed anything else stops before it interprets it.
pub const MAGIC: u64 = 0x6c6c_6563_746f_6801;
/// The control socket in the stub.
pub const CONTROL_FD: i32 = 0;
/// Where the payload keeps it, closing at exec, while it makes room for its own stdin. Low enough to
/// fit under the smallest limit on descriptors.
pub const PAYLOAD_CONTROL_FD: i32 = 15;
/// The first descriptor that came with the program; the image itself is number 1.
pub const INPUT_FD_FIRST: i32 = 2;
/// How many descriptors may come with a program.
pub const INPUT_FDS_MAX: usize = 12;
/// How many descriptors a finished set-up may hand back.
pub const EXPORTS_MAX: usize = 4;
/// `Op::call` for comparing memory: `args` are two addresses and a length.
pub const CALL_COMPARE: i64 = -1;
/// Stops every process of a cell but its init; sent by the supervisor, see `stub::run`.
pub const SIGNAL_PAUSE: i32 = 20; // SIGTSTP
/// Undoes [`SIGNAL_PAUSE`].
pub const SIGNAL_RESUME: i32 = 18; // SIGCONT

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
    /// Run by the spawner, outside the cell, before anything is cloned.
    pub spawner: Section,
    /// Run by the cell's init: builds and proves the walls.
    pub init: Section,
    /// Run by the payload; its last op is `execve`. Empty: init stops after its own section.
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
    /// How long the cell may live if its supervisor does not end it.
    pub life_ms_max: u64,
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

/// What the supervisor tells the spawner.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Command {
    /// One of the `COMMAND_*` values.
    pub kind: u64,
    /// For [`COMMAND_PROGRAM`]: length of the image.
    pub len: u64,
}

/// Hold a new user namespace open; answered by [`MESSAGE_HOLDING`].
pub const COMMAND_HOLD: u64 = 1;
/// Run the image that comes as the first descriptor.
pub const COMMAND_PROGRAM: u64 = 2;
/// Init's last numbers were read: reap it and say what it used.
pub const COMMAND_REAP: u64 = 3;

/// What the stub tells the supervisor.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Message {
    /// One of the `MESSAGE_*` values.
    pub kind: u64,
    /// For [`MESSAGE_FAULT`]: index of the op, or [`OP_CLONE`], [`OP_FORK`].
    pub op: u64,
    /// A pid, a wait status, or what the kernel answered.
    pub value: i64,
    /// For [`MESSAGE_REAPED`]: user µs, system µs, largest resident set in KiB, blocks of 512 bytes
    /// read and written. For [`MESSAGE_ENDED`]: how
    /// many processes the payload left behind.
    pub usage: [i64; 5],
}

/// `value` is the pid of a process that holds a user namespace.
pub const MESSAGE_HOLDING: u64 = 1;
/// `value` is init's pid; its pidfd comes along.
pub const MESSAGE_SPAWNED: u64 = 2;
/// Every wall stands; the exported descriptors come along.
pub const MESSAGE_READY: u64 = 3;
/// An op did not answer as expected.
pub const MESSAGE_FAULT: u64 = 4;
/// The payload ended; `value` is its wait status.
pub const MESSAGE_ENDED: u64 = 5;
/// Init ended, and with it every process of the cell; it is not reaped yet.
pub const MESSAGE_GONE: u64 = 6;
/// Init is reaped; `usage` is what the whole tree used.
pub const MESSAGE_REAPED: u64 = 7;

/// The clone that makes init failed.
pub const OP_CLONE: u64 = u64::MAX;
/// The fork that makes the payload failed.
pub const OP_FORK: u64 = u64::MAX - 1;
/// The image could not be received or mapped.
pub const OP_IMAGE: u64 = u64::MAX - 2;
