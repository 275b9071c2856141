//! Namespaces: what is set in them, and the proof that each is the cell's own.

use hotcell_sys::program::Expect;
use libc::ENETUNREACH;

use super::{AT_FDCWD, Label, Writer, inet_address};
use crate::wall::Wall;

const HOST_NAME: &str = "cell";
const CLONE_NEWTIME: i32 = 0x80;

impl Writer<'_> {
    /// The spawner goes into new ones, and its next child is born there: nobody waits for a network to be made.
    pub(super) fn namespaces(&mut self) {
        for (wall, flag) in [
            (Wall::Net, libc::CLONE_NEWNET),
            (Wall::Ipc, libc::CLONE_NEWIPC),
            (Wall::Uts, libc::CLONE_NEWUTS),
            (Wall::Time, CLONE_NEWTIME),
        ] {
            if self.plan.asks_for(wall) {
                self.wall = wall;
                self.call("unshare", libc::SYS_unshare, &[flag.into()], Expect::Ok);
            }
        }
        self.wall = Wall::Uts;
        if self.plan.asks_for(Wall::Uts) {
            let name = self.text(HOST_NAME);
            let len = HOST_NAME.len() as u64;
            self.call("set the host name", libc::SYS_sethostname, &[name.into(), len.into()], Expect::Ok);
            let domain = self.text("");
            self.call("clear the domain name", libc::SYS_setdomainname, &[domain.into(), 0u64.into()], Expect::Ok);
        }
    }

    /// Each namespace must be another than the one hotcell is in.
    pub(super) fn prove_namespaces(&mut self) {
        let proc = self.plan.asks_for(Wall::Pid) || !self.plan.asks_for(Wall::Root);
        let directory = proc.then(|| {
            self.wall = Wall::Pid;
            let path = self.text("/proc/self/ns");
            let args = [AT_FDCWD.into(), path.into(), (libc::O_PATH | libc::O_CLOEXEC).into()];
            self.call_keep("open the list of namespaces", libc::SYS_openat, &args)
        });
        for (wall, name) in [
            (Wall::User, "user"),
            (Wall::Mount, "mnt"),
            (Wall::Pid, "pid"),
            (Wall::Net, "net"),
            (Wall::Ipc, "ipc"),
            (Wall::Uts, "uts"),
            (Wall::CgroupNs, "cgroup"),
            (Wall::Time, "time"),
        ] {
            let host = self.plan.host.namespaces.get(name).filter(|_| self.plan.asks_for(wall));
            let (Some(host), Some(directory)) = (host, directory) else { continue };
            self.wall = wall;
            let (path, stat) = (self.text(name), self.program.room(144));
            let args = [directory.into(), path.into(), stat.into(), 0.into()];
            self.call(format!("look at the {name} namespace"), libc::SYS_newfstatat, &args, Expect::Ok);
            let host = self.program.words(&[*host]);
            let label = Label { wall, what: format!("proof: own {name} namespace").into() };
            // struct stat: inode at byte 8.
            self.program.compare(self.stage, label, stat.offset(8), host, 8, false);
        }
        if self.plan.asks_for(Wall::Pid) {
            self.wall = Wall::Pid;
            self.call("proof: first process", libc::SYS_getpid, &[], Expect::Is(1));
            self.call("proof: no parent in sight", libc::SYS_getppid, &[], Expect::Is(0));
        }
        if self.plan.asks_for(Wall::Uts) {
            self.wall = Wall::Uts;
            let (names, name) = (self.program.room(390), self.text(HOST_NAME));
            self.call("ask for the host name", libc::SYS_uname, &[names.into()], Expect::Ok);
            let label = Label { wall: Wall::Uts, what: "proof: own host name".into() };
            // struct utsname: 65 bytes a field, the node name is the second.
            self.program.compare(self.stage, label, names.offset(65), name, HOST_NAME.len() as u64 + 1, true);
        }
        if self.plan.asks_for(Wall::Net) {
            self.wall = Wall::Net;
            let udp = [libc::AF_INET.into(), (libc::SOCK_DGRAM | libc::SOCK_CLOEXEC).into(), 0.into()];
            let fd = self.call_keep("make a udp socket", libc::SYS_socket, &udp);
            let anybody = self.program.data(&inet_address([192, 0, 2, 1], 9));
            let args = [fd.into(), anybody.into(), 16u64.into()];
            self.call("proof: no route to anybody", libc::SYS_connect, &args, Expect::Fails(&[ENETUNREACH]));
            self.close(fd);
        }
    }
}
