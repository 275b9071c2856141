//! Programs: launches written down as syscalls, before any of them is made.
//!
//! ```text
//! Program::cell ─────▶ data(), slot(), call() … ─▶ image() ─▶ Spawner::prepare, raise ─▶ a cell
//! Program::command ──▶ data(), slot(), call() … ─▶ image() ─▶ Line::run ───────────────▶ a command in it
//! ```
//!
//! A program is data. It is built by safe code, it can be printed and compared, and it runs in the
//! stub's process, so a mistake in it cannot corrupt the memory of the process that built it.
//! Each call carries a label of the caller's choice, which is how a failure gets its name.

use crate::wire::{self, Header, Op};

/// The process of a launch that a call belongs to, and when it makes it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Stage {
    /// Outside the cell, once: what all cells of a program share.
    Ground,
    /// Outside the cell, before each: what can be made before anybody asks for a cell.
    Ahead,
    /// The cell's pid 1: builds and proves the walls.
    Init,
    /// The process that becomes the command.
    Payload,
    /// Outside the cell, after it ended without a supervisor.
    Orphaned,
}

/// The address of data in the image.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Addr(u64);

impl Addr {
    /// The address `bytes` further on, for a field of a struct.
    pub fn offset(self, bytes: u64) -> Addr {
        Addr(self.0 + bytes)
    }

    /// The address as the kernel will see it, for structs that hold pointers.
    pub fn value(self) -> u64 {
        self.0
    }
}

/// A place for a call's answer that later calls take as an argument.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot(u64);

/// One argument of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arg {
    /// A number.
    Value(u64),
    /// An address in the image.
    At(Addr),
    /// The answer of an earlier call.
    From(Slot),
}

impl From<u64> for Arg {
    fn from(value: u64) -> Arg {
        Arg::Value(value)
    }
}

impl From<i32> for Arg {
    /// Sign-extended, as the kernel's `int` parameters expect of `AT_FDCWD` and `-1`.
    fn from(value: i32) -> Arg {
        Arg::Value(i64::from(value).cast_unsigned())
    }
}

impl From<Addr> for Arg {
    fn from(at: Addr) -> Arg {
        Arg::At(at)
    }
}

impl From<Slot> for Arg {
    fn from(slot: Slot) -> Arg {
        Arg::From(slot)
    }
}

/// What a call must answer for the launch to go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Expect {
    /// Success.
    Ok,
    /// Success, or one of these errnos (at most four).
    OkOr(&'static [i32]),
    /// Exactly this.
    Is(i64),
    /// Failure with one of these errnos (at most four): the call is a proof that a wall stands.
    Fails(&'static [i32]),
}

/// A call that was added and can be told where to keep its answer.
#[must_use = "chain `keep` or `ignore`"]
pub struct Added<'a>(&'a mut Op, &'a mut Data);

impl Added<'_> {
    /// Keeps the answer for later calls.
    pub fn keep(self) -> Slot {
        let slot = self.1.slot();
        self.0.keep = slot.0;
        slot
    }

    /// Writes the answer as an `int` into a struct in the image.
    pub fn keep_int_at(self, at: Addr) {
        self.0.keep_i32 = at.0;
    }

    /// The answer is of no further use.
    pub fn ignore(self) {}
}

/// The data part of an image.
#[derive(Clone)]
struct Data {
    base: u64,
    bytes: Vec<u8>,
}

impl Data {
    fn push(&mut self, bytes: &[u8]) -> Addr {
        // Eight bytes cover nearly every struct the kernel reads through these addresses.
        self.push_aligned(bytes, 8)
    }

    fn push_aligned(&mut self, bytes: &[u8], alignment: usize) -> Addr {
        // The base is a multiple of anything the kernel wants.
        let end = (size_of::<Header>() + self.bytes.len()).next_multiple_of(alignment);
        self.bytes.resize(end - size_of::<Header>(), 0);
        self.bytes.extend_from_slice(bytes);
        Addr(self.base + end as u64)
    }

    fn slot(&mut self) -> Slot {
        Slot(self.push(&[0; 8]).0)
    }
}

/// A launch, written down. `L` is what the caller wants to know of a call that failed.
#[derive(Clone)]
pub struct Program<L> {
    data: Data,
    ops: Vec<(Stage, Op, L)>,
    clone_flags: u64,
    cgroup: Option<Slot>,
    exports: Vec<Slot>,
    life_ms_max: u64,
    is_last: bool,
    is_restored: bool,
    is_ahead_done: bool,
}

impl<L> Program<L> {
    /// An empty program of a cell: init is cloned without namespaces, has no walls and waits for commands.
    pub fn cell() -> Self {
        // As many as it takes, about: to grow is to copy.
        Self::at(wire::BASE, 640)
    }

    /// An empty program of a command in a cell.
    pub fn command() -> Self {
        Self::at(wire::COMMAND_BASE, 32)
    }

    fn at(base: u64, n_calls: usize) -> Self {
        Program {
            data: Data { base, bytes: Vec::with_capacity(n_calls * 32) },
            ops: Vec::with_capacity(n_calls),
            clone_flags: 0,
            cgroup: None,
            exports: Vec::new(),
            life_ms_max: u64::MAX,
            is_last: false,
            is_restored: false,
            is_ahead_done: false,
        }
    }

    /// The nth descriptor that comes with the image.
    ///
    /// # Panics
    /// If there are never so many.
    pub fn input(&self, n: usize) -> Slot {
        assert!(n < wire::INPUTS_MAX, "an image comes with at most {} descriptors", wire::INPUTS_MAX);
        Slot(self.data.base + (std::mem::offset_of!(Header, inputs) + 8 * n) as u64)
    }

    /// The nth descriptor that comes with the order to make a cell.
    ///
    /// # Panics
    /// If there are never so many.
    pub fn cell_input(&self, n: usize) -> Slot {
        assert!(n < wire::CELL_INPUTS_MAX, "a cell comes with at most {} descriptors", wire::CELL_INPUTS_MAX);
        Slot(self.data.base + (std::mem::offset_of!(Header, cell_inputs) + 8 * n) as u64)
    }

    /// Sets the `CLONE_NEW*` flags init is cloned with.
    pub fn clone_flags(&mut self, flags: u64) {
        self.clone_flags = flags;
    }

    /// Has init cloned straight into the cgroup whose directory this slot holds.
    pub fn clone_into_cgroup(&mut self, directory: Slot) {
        self.cgroup = Some(directory);
    }

    /// Has init send this descriptor to the supervisor once its whole stage has passed.
    ///
    /// # Panics
    /// If more than [`wire::EXPORTS_MAX`] are asked for.
    pub fn export(&mut self, descriptor: Slot) {
        assert!(self.exports.len() < wire::EXPORTS_MAX, "a program exports at most {}", wire::EXPORTS_MAX);
        self.exports.push(descriptor);
    }

    /// Has the cell end with this command.
    pub fn last(&mut self) {
        self.is_last = true;
    }

    /// Says that an early image did before the first cell what [`Stage::Ahead`] does before each.
    pub fn ahead_is_done(&mut self) {
        self.is_ahead_done = true;
    }

    /// Gives the command's process memory of its own, for [`Program::resume`].
    pub fn restored(&mut self) {
        self.is_restored = true;
    }

    /// Where the kernel put the vdso.
    pub fn vdso(&self) -> Slot {
        Slot(self.data.base + std::mem::offset_of!(Header, vdso) as u64)
    }

    /// Has init end the command after this time, should the supervisor not.
    pub fn life_max(&mut self, life: std::time::Duration) {
        self.life_ms_max = u64::try_from(life.as_millis()).unwrap_or(u64::MAX);
    }

    /// Adds bytes that calls may point to.
    pub fn data(&mut self, bytes: &[u8]) -> Addr {
        self.data.push(bytes)
    }

    /// Adds bytes at a multiple of `alignment`, a power of two of at least eight.
    pub fn aligned(&mut self, bytes: &[u8], alignment: usize) -> Addr {
        self.data.push_aligned(bytes, alignment)
    }

    /// Adds a NUL-terminated string.
    ///
    /// # Panics
    /// If the text has a NUL byte inside: the plan that asked for it must have refused it.
    pub fn text(&mut self, text: impl AsRef<[u8]>) -> Addr {
        let text = text.as_ref();
        assert!(!text.contains(&0), "a string for the kernel has a NUL byte inside");
        let at = self.data.push(text);
        self.data.bytes.push(0);
        at
    }

    /// Adds zeroed room for the kernel to write to.
    pub fn room(&mut self, len: usize) -> Addr {
        self.data.push(&vec![0; len])
    }

    /// Adds numbers, each as eight bytes: most structs of the newer calls are that.
    pub fn words(&mut self, words: &[u64]) -> Addr {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        self.data.push(&bytes)
    }

    /// Adds a NULL-terminated array of strings, as `execve` takes them.
    pub fn texts<T: AsRef<[u8]>>(&mut self, texts: impl IntoIterator<Item = T>) -> Addr {
        let mut addresses: Vec<u64> = texts.into_iter().map(|text| self.text(text).0).collect();
        addresses.push(0);
        self.words(&addresses)
    }

    /// Adds a call.
    ///
    /// # Panics
    /// If it has more than six arguments or expects one of more than four errnos.
    pub fn call(&mut self, stage: Stage, label: L, number: i64, args: &[Arg], expect: Expect) -> Added<'_> {
        let mut op = Op { call: number, ..Op::default() };
        assert!(args.len() <= op.args.len(), "a syscall has at most six arguments");
        for (idx, arg) in args.iter().enumerate() {
            op.args[idx] = match arg {
                Arg::Value(value) => *value,
                Arg::At(at) => at.0,
                Arg::From(slot) => {
                    op.slots |= 1 << idx;
                    slot.0
                }
            };
        }
        let mut list = |errnos: &[i32]| {
            for (value, errno) in op.values.iter_mut().zip(errnos) {
                *value = i64::from(*errno);
            }
            assert!(errnos.len() <= 4, "at most four errnos");
        };
        op.expect = match expect {
            Expect::Ok => wire::EXPECT_OK,
            Expect::OkOr(errnos) => {
                list(errnos);
                wire::EXPECT_OK_OR
            }
            Expect::Fails(errnos) => {
                list(errnos);
                wire::EXPECT_FAILS
            }
            Expect::Is(value) => {
                op.values[0] = value;
                wire::EXPECT_IS
            }
        };
        self.push(stage, label, op)
    }

    /// Adds a check that two stretches of memory are the same, or that they differ.
    pub fn compare(&mut self, stage: Stage, label: L, a: Addr, b: Addr, len: u64, same: bool) {
        let op = Op {
            call: wire::CALL_COMPARE,
            args: [a.0, b.0, len, 0, 0, 0],
            expect: if same { wire::EXPECT_SAME } else { wire::EXPECT_DIFFERENT },
            ..Op::default()
        };
        self.push(stage, label, op).ignore();
    }

    /// Adds a number to an answer.
    pub fn add(&mut self, stage: Stage, label: L, to: Slot, number: i64) -> Slot {
        let op =
            Op { call: wire::CALL_ADD, args: [to.0, number.cast_unsigned(), 0, 0, 0, 0], slots: 1, ..Op::default() };
        self.push(stage, label, op).keep()
    }

    /// Goes on as another process would after a signal: `frame` is what the kernel would have left on its stack. There
    /// is nothing after this.
    pub fn resume(&mut self, stage: Stage, label: L, frame: Addr) {
        let op = Op { call: wire::CALL_RESUME, args: [frame.0, 0, 0, 0, 0, 0], ..Op::default() };
        self.push(stage, label, op).ignore();
    }

    /// Adds a check that two answers are the same.
    pub fn compare_answers(&mut self, stage: Stage, label: L, a: Slot, b: Slot) {
        self.compare(stage, label, Addr(a.0), Addr(b.0), 8, true);
    }

    fn push(&mut self, stage: Stage, label: L, op: Op) -> Added<'_> {
        self.ops.push((stage, op, label));
        let Some((_, op, _)) = self.ops.last_mut() else { unreachable!("an op was pushed above") };
        Added(op, &mut self.data)
    }

    /// How many calls the program makes.
    pub fn n_calls(&self) -> usize {
        self.ops.len()
    }

    /// Lays the program out as the stub reads it.
    pub fn image(mut self) -> Image<L> {
        // In the order they were added, each stage for itself.
        self.ops.sort_by_key(|(stage, ..)| *stage);
        let section = |stage: Stage| {
            let at = |is_before: fn(Stage, Stage) -> bool| self.ops.partition_point(|(one, ..)| is_before(*one, stage));
            let (first, end) = (at(|one, stage| one < stage), at(|one, stage| one <= stage));
            wire::Section { first: count(first), count: count(end - first) }
        };
        let mut header = Header {
            magic: wire::MAGIC,
            ground: section(Stage::Ground),
            ahead: section(Stage::Ahead),
            init: section(Stage::Init),
            payload: section(Stage::Payload),
            orphaned: section(Stage::Orphaned),
            clone_flags: self.clone_flags,
            cgroup_slot: self.cgroup.map_or(0, |slot| slot.0),
            n_exports: self.exports.len() as u64,
            life_ms_max: self.life_ms_max,
            is_last: u64::from(self.is_last),
            is_restored: u64::from(self.is_restored),
            is_ahead_done: u64::from(self.is_ahead_done),
            ..Header::default()
        };
        for (to, slot) in header.exports.iter_mut().zip(&self.exports) {
            *to = slot.0;
        }
        let ops_at = (size_of::<Header>() + self.data.bytes.len()).next_multiple_of(8);
        header.ops = self.data.base + ops_at as u64;
        let mut bytes = Vec::with_capacity(ops_at + self.ops.len() * size_of::<Op>());
        bytes.extend_from_slice(wire_bytes(&header));
        bytes.extend_from_slice(&self.data.bytes);
        bytes.resize(ops_at, 0);
        let label = |(stage, op, label): (Stage, Op, L)| {
            bytes.extend_from_slice(wire_bytes(&op));
            (stage, label)
        };
        let labels = self.ops.into_iter().map(label).collect();
        Image { bytes, labels }
    }
}

/// A program as the stub reads it, and the labels that it does not need.
#[derive(Debug)]
pub struct Image<L> {
    pub(crate) bytes: Vec<u8>,
    labels: Vec<(Stage, L)>,
}

impl<L> Image<L> {
    /// The label of a call, by its place in the image.
    pub fn label(&self, op: u64) -> Option<&(Stage, L)> {
        usize::try_from(op).ok().and_then(|idx| self.labels.get(idx))
    }
}

fn count(len: usize) -> u32 {
    u32::try_from(len).expect("a program has far fewer than 2^32 calls")
}

/// The bytes of a wire type.
fn wire_bytes<T: WireType>(value: &T) -> &[u8] {
    // SAFETY: wire types are `repr(C)`, made of integers only and laid out without padding (checked
    // where the trait is implemented), so every byte of them is initialised and readable.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast::<u8>(), size_of::<T>()) }
}

/// # Safety
/// The type must be `repr(C)`, hold integers only and have no padding.
pub(crate) unsafe trait WireType: Copy {}
// SAFETY: u64, i64 and pairs of u32; the size check below leaves no room for padding.
unsafe impl WireType for Header {}
const _: () = assert!(
    size_of::<Header>() == 8 * (2 + 5 + 2 + wire::EXPORTS_MAX + 1 + wire::INPUTS_MAX + wire::CELL_INPUTS_MAX + 5)
);
// SAFETY: thirteen eight-byte integers and a pair of u32.
unsafe impl WireType for Op {}
const _: () = assert!(size_of::<Op>() == 8 * (1 + 6 + 1 + 4 + 2));
// SAFETY: two u64.
unsafe impl WireType for wire::Command {}
const _: () = assert!(size_of::<wire::Command>() == 16);

pub(crate) fn command_bytes(command: &wire::Command) -> &[u8] {
    wire_bytes(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_are_laid_out_apart_and_keep_their_labels() {
        let mut program = Program::cell();
        program.call(Stage::Orphaned, "late", 1, &[], Expect::Ok).ignore();
        let fd = program.call(Stage::Init, "early", 2, &[7i32.into()], Expect::Ok).keep();
        program.call(Stage::Init, "uses", 3, &[fd.into()], Expect::Fails(&[1])).ignore();
        let image = program.image();
        let labels: Vec<_> = (0..3).map(|op| image.label(op).expect("three ops").1).collect();
        assert_eq!(labels, ["early", "uses", "late"]);
        assert!(image.label(3).is_none());
    }

    #[test]
    #[should_panic(expected = "NUL byte")]
    fn a_string_with_a_nul_inside_is_our_mistake() {
        Program::<()>::cell().text("a\0b");
    }
}
