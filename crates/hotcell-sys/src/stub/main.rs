//! The executable around [`run`]: an entry point, a panic that stops, and the memory functions
//! the compiler may call. Built by `build.rs`, embedded in the library, started from sealed memory.

#![no_std]
#![no_main]

#[path = "call.rs"]
mod stub_call;
#[path = "run.rs"]
mod stub_run;
#[path = "../wire.rs"]
#[allow(dead_code)] // The supervisor's half of the protocol.
mod wire;

core::arch::global_asm!(
    ".globl _start",
    "_start:",
    "xor ebp, ebp",
    "mov rdi, rsp",
    "and rsp, -16",
    "call {main}",
    "ud2",
    main = sym main,
);

extern "C" fn main(stack: *const u64) -> ! {
    // SAFETY: this is what the kernel left on the stack.
    unsafe { stub_run::find_vdso(stack) };
    // SAFETY: this is the process's only thread, started with the control socket as descriptor 0
    // and nothing mapped but the executable itself.
    unsafe { stub_run::spawner() }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    stub_run::exit(70)
}

// Byte by byte through volatile accesses: the compiler must not turn these loops into calls of the
// very functions they define. They move a few hundred bytes in the life of a stub.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
    let mut at = 0;
    while at < len {
        // SAFETY: the caller promises `len` readable bytes at `from` and writable ones at `to`.
        unsafe { to.add(at).write_volatile(from.add(at).read_volatile()) };
        at += 1;
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
    if (to as usize) <= (from as usize) {
        // SAFETY: copying upwards reads every byte before it is overwritten; bounds as promised.
        return unsafe { memcpy(to, from, len) };
    }
    let mut at = len;
    while at > 0 {
        at -= 1;
        // SAFETY: as in `memcpy`, downwards because the ranges may overlap.
        unsafe { to.add(at).write_volatile(from.add(at).read_volatile()) };
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, byte: i32, len: usize) -> *mut u8 {
    let mut at = 0;
    while at < len {
        // SAFETY: the caller promises `len` writable bytes at `to`.
        unsafe { to.add(at).write_volatile(byte as u8) };
        at += 1;
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(a: *const u8, b: *const u8, len: usize) -> i32 {
    let mut at = 0;
    while at < len {
        // SAFETY: the caller promises `len` readable bytes at both.
        let (x, y) = unsafe { (a.add(at).read_volatile(), b.add(at).read_volatile()) };
        if x != y {
            return i32::from(x) - i32::from(y);
        }
        at += 1;
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(a: *const u8, b: *const u8, len: usize) -> i32 {
    // SAFETY: the same promise.
    unsafe { memcmp(a, b, len) }
}
