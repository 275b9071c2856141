//! User namespaces that only say whose files appear as whose, for mounts.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use crate::spawner::os_error;
use crate::stub_call::{self as nr, call};

/// Makes a user namespace with these maps. Needs root's capabilities.
///
/// # Errors
/// If the kernel makes none, or refuses the maps.
pub fn user_namespace(uid_map: &str, gid_map: &str) -> io::Result<OwnedFd> {
    // A namespace is there while a process is in it, or a descriptor leads to it: this one is there until it can be opened.
    // It shares our memory, of which it uses a stack of its own, so that none is copied.
    let mut stack = vec![0u128; 256];
    let all = u64::MAX;
    let mut before = 0u64;
    // Nothing of ours that handles a signal must run there.
    // SAFETY: reads and writes eight bytes of ours.
    unsafe { call!(nr::RT_SIGPROCMASK, libc::SIG_SETMASK, &raw const all, &raw mut before, 8) };
    let flags = nr::CLONE_VM | libc::CLONE_NEWUSER.cast_unsigned() as u64;
    // SAFETY: the stack is nobody else's, of 16-byte words, and outlives the process, which is reaped below; `hold` does
    // not return and touches nothing of ours.
    let pid = unsafe { nr::clone(flags, stack.as_mut_ptr_range().end as u64, hold, u64::from(std::process::id())) };
    // SAFETY: as above.
    unsafe { call!(nr::RT_SIGPROCMASK, libc::SIG_SETMASK, &raw const before, 0, 8) };
    if pid < 0 {
        return Err(os_error(pid));
    }
    let made = map(Path::new(&format!("/proc/{pid}")), uid_map, gid_map);
    // SAFETY: it is ours and not reaped, so nobody else has its pid.
    unsafe { call!(nr::KILL, pid, libc::SIGKILL) };
    // SAFETY: numbers only; how it ended is not asked for.
    while unsafe { call!(nr::WAIT4, pid, 0, libc::__WALL, 0) } == -i64::from(libc::EINTR) {}
    drop(stack);
    made
}

fn map(process: &Path, uid_map: &str, gid_map: &str) -> io::Result<OwnedFd> {
    fs::write(process.join("uid_map"), uid_map)?;
    fs::write(process.join("gid_map"), gid_map)?;
    Ok(File::open(process.join("ns/user"))?.into())
}

/// Waits to be killed, for no longer than its parent lives.
unsafe extern "C" fn hold(parent: u64) -> ! {
    // SAFETY: numbers only, here and below; no memory is touched.
    unsafe { call!(nr::PRCTL, libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) };
    // SAFETY: as above.
    while unsafe { call!(libc::SYS_getppid) } as u64 == parent {
        // SAFETY: as above.
        unsafe { call!(libc::SYS_pause) };
    }
    loop {
        // SAFETY: as above.
        unsafe { call!(nr::EXIT_GROUP, 1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_another_and_leaves_nothing_behind() {
        let children = || fs::read_to_string("/proc/thread-self/children").expect("proc is there");
        let before = children();
        if !rustix::process::geteuid().is_root() {
            // Nobody else may map a group, and what was begun goes all the same.
            let refused = user_namespace("0 7 1", "0 7 1").expect_err("not for an ordinary user");
            assert_eq!((refused.raw_os_error(), children()), (Some(libc::EPERM), before));
            return;
        }
        let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).expect("open").st_ino;
        let (first, second) = (user_namespace("0 7 1", "0 7 1"), user_namespace("0 8 1\n1 9 3", "0 8 1"));
        let (first, second) = (first.expect("root may"), second.expect("root may"));
        assert_ne!(inode(&first), inode(&second));
        let refused = user_namespace("nonsense", "0 7 1").expect_err("no map");
        assert_eq!(refused.raw_os_error(), Some(libc::EINVAL));
        assert_eq!(children(), before);
    }
}
