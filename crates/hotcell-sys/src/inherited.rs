//! What this process was started with.

use std::sync::atomic::{AtomicBool, Ordering};

static STDOUT_CLOSED: AtomicBool = AtomicBool::new(false);

/// Whether this process was started without a stdout. By the time `main` runs there is one: the runtime
/// puts `/dev/null` in its place.
pub fn stdout_was_closed() -> bool {
    STDOUT_CLOSED.load(Ordering::Relaxed)
}

extern "C" fn look_at_stdout() {
    // SAFETY: asks about a number; touches no memory.
    let flags = unsafe { libc::fcntl(1, libc::F_GETFD) };
    STDOUT_CLOSED.store(flags == -1, Ordering::Relaxed);
}

// SAFETY: the linker collects functions of this type in this section, and the C library calls them before the
// runtime starts. Ours makes one call and stores one flag.
#[used]
#[unsafe(link_section = ".init_array")]
static LOOK_AT_STDOUT: extern "C" fn() = look_at_stdout;

/// Closes what this process was given beside its three streams. For the beginning of a program that outlives its caller:
/// before anything is opened, so that no descriptor is anybody's.
pub fn close_inherited() {
    // SAFETY: numbers only; as said above, nobody owns what is closed.
    unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, 0) };
}
