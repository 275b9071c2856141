//! The fences inside: Landlock, and the syscall filter as the last wall of all.

use std::os::unix::ffi::OsStrExt;

use hotcell_base::text::shown;
use hotcell_sys::program::{Addr, Expect, Slot};
use libc::{EACCES, EPERM};

use super::{AT_FDCWD, Label, Writer, family, inet_address};
use crate::landlock;
use crate::seccomp::{self, Part};
use crate::view::FENCE;
use crate::wall::Wall;

impl Writer<'_> {
    pub(super) fn landlock(&mut self) {
        let (files, tcp, scope) = (
            self.plan.asks_for(Wall::Landlock),
            self.plan.asks_for(Wall::LandlockTcp),
            self.plan.asks_for(Wall::LandlockScope),
        );
        // One fence; what fails of it is named after a wall that was asked for.
        let asked = [(files, Wall::Landlock), (tcp, Wall::LandlockTcp), (scope, Wall::LandlockScope)];
        let Some((_, wall)) = asked.into_iter().find(|(is_asked, _)| *is_asked) else { return };
        self.wall = wall;
        let abi = self.plan.host.landlock_abi;
        // Where there is no private root, as in a control, the file fence has nothing to follow.
        let files = files && self.plan.asks_for(Wall::Root);
        let outsider = (scope && self.plan.asks_for(Wall::Net)).then(|| self.abstract_listener());
        self.wall = wall;
        let attributes = landlock::attributes(abi, files, tcp, scope);
        let (at, size) = (self.program.words(&attributes), attributes.len() as u64 * 8);
        let args = [at.into(), size.into(), 0.into()];
        let ruleset = self.call_keep("make a ruleset", libc::SYS_landlock_create_ruleset, &args);
        if files {
            for rule in landlock::rules(&self.plan.view, abi) {
                let path = self.text(rule.path.as_os_str().as_bytes());
                let name = shown(rule.path.as_os_str().as_bytes());
                let attr = self.program.words(&[rule.access, 0]);
                let flags = libc::O_PATH | libc::O_CLOEXEC;
                let args = [AT_FDCWD.into(), path.into(), flags.into()];
                let label = Label { wall: self.wall, what: format!("open {name}").into() };
                let added = self.program.call(self.stage, label, libc::SYS_openat, &args, Expect::Ok);
                // struct landlock_path_beneath_attr: the descriptor follows the rights.
                added.keep_int_at(attr.offset(8));
                let args = [ruleset.into(), 1.into(), attr.into(), 0.into()];
                self.call(format!("grant {name}"), libc::SYS_landlock_add_rule, &args, Expect::Ok);
            }
        }
        self.call("raise the fence", libc::SYS_landlock_restrict_self, &[ruleset.into(), 0.into()], Expect::Ok);
        if files {
            let fence = self.text(FENCE);
            let args = [AT_FDCWD.into(), fence.into(), libc::O_RDONLY.into()];
            self.call("proof: what is not granted cannot be read", libc::SYS_openat, &args, Expect::Fails(&[EACCES]));
        }
        if tcp {
            self.wall = Wall::LandlockTcp;
            let kind = [libc::AF_INET.into(), (libc::SOCK_STREAM | libc::SOCK_CLOEXEC).into(), 0.into()];
            let fd = self.call_keep("make a tcp socket", libc::SYS_socket, &kind);
            let local = self.program.data(&inet_address([127, 0, 0, 1], 9));
            let args = [fd.into(), local.into(), 16u64.into()];
            self.call("proof: no tcp", libc::SYS_connect, &args, Expect::Fails(&[EACCES]));
            self.close(fd);
        }
        if let Some((listener, address, len)) = outsider {
            self.wall = Wall::LandlockScope;
            let kind = [libc::AF_UNIX.into(), (libc::SOCK_STREAM | libc::SOCK_CLOEXEC).into(), 0.into()];
            let fd = self.call_keep("make a unix socket", libc::SYS_socket, &kind);
            let args = [fd.into(), address.into(), len.into()];
            self.call("proof: no abstract socket from before", libc::SYS_connect, &args, Expect::Fails(&[EPERM]));
            self.close(fd);
            self.close(listener);
        }
    }

    /// An abstract socket made before the fence: reaching it afterwards would mean there is none.
    fn abstract_listener(&mut self) -> (Slot, Addr, u64) {
        self.wall = Wall::LandlockScope;
        let kind = [libc::AF_UNIX.into(), (libc::SOCK_STREAM | libc::SOCK_CLOEXEC).into(), 0.into()];
        let fd = self.call_keep("make a unix socket", libc::SYS_socket, &kind);
        let mut address = family(libc::AF_UNIX);
        address.extend_from_slice(b"\0hotcell-proof");
        let (at, len) = (self.program.data(&address), address.len() as u64);
        self.call("bind an abstract socket", libc::SYS_bind, &[fd.into(), at.into(), len.into()], Expect::Ok);
        self.call("listen", libc::SYS_listen, &[fd.into(), 1.into()], Expect::Ok);
        (fd, at, len)
    }

    /// The filter of all cells, and each cell's own.
    pub(super) fn seccomp(&mut self, part: Part) {
        self.wall = Wall::Seccomp;
        if !self.plan.asks_for(Wall::Seccomp) {
            return;
        }
        let watched = self.plan.asks_for(Wall::Cgroup) && self.making.group.is_none();
        let memory = if watched { seccomp::Memory::Watched } else { seccomp::Memory::Counted };
        let code = seccomp::filter(part, memory, &self.plan.omitted_rules);
        let mut bytes = Vec::with_capacity(code.len() * 8);
        for instruction in &code {
            bytes.extend_from_slice(&instruction.code.to_ne_bytes());
            bytes.extend_from_slice(&[instruction.jt, instruction.jf]);
            bytes.extend_from_slice(&instruction.k.to_ne_bytes());
        }
        let filter = self.program.data(&bytes);
        // struct sock_fprog: the length in two bytes, then a pointer.
        let program = self.program.words(&[code.len() as u64, filter.value()]);
        let set_mode_filter = 1;
        let args = [set_mode_filter.into(), 0.into(), program.into()];
        self.call("install the filter", libc::SYS_seccomp, &args, Expect::Ok);
        if part == Part::Ground {
            return;
        }
        let filtered = 2;
        self.call("proof: filtered", libc::SYS_prctl, &[libc::PR_GET_SECCOMP.into()], Expect::Is(filtered));
        // A filter with rules left out proves nothing.
        if !self.plan.omitted_rules.is_empty() {
            return;
        }
        // Without the cell's own filter, unsharing nothing succeeds for anybody; without the ground's, so does this.
        self.call("proof: what built walls is refused", libc::SYS_unshare, &[0.into()], Expect::Fails(&[EPERM]));
        let no_randomisation = [0x4_0000.into()];
        self.call("proof: a listed call is refused", libc::SYS_personality, &no_randomisation, Expect::Fails(&[EPERM]));
    }
}
