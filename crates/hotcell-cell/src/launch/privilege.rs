//! Privilege: ids, groups, capabilities and per-process limits, given up in an order that leaves no way
//! back, each with its proof.

use hotcell_sys::program::{Arg, Expect};
use libc::{EINVAL, EPERM};

use super::{Label, PAGE, Writer};
use crate::plan::Identity;
use crate::wall::Wall;

const CAPABILITY_VERSION_3: u64 = 0x2008_0522;
const MEMLOCK_BYTES: u64 = 8 << 20;
const MSGQUEUE_BYTES: u64 = 819_200;
const SIGNALS_QUEUED_MAX: u64 = 4096;

impl Writer<'_> {
    /// No process of the spawner's can get a capability by executing something, ever again. It keeps what it has to
    /// build walls with; its children drop that themselves.
    pub(super) fn give_up_capabilities(&mut self) {
        if !self.plan.asks_for(Wall::Caps) {
            return;
        }
        self.wall = Wall::Caps;
        for cap in 0..=self.plan.host.last_cap {
            let args = [libc::PR_CAPBSET_DROP.into(), u64::from(cap).into()];
            self.call(format!("drop capability {cap} for good"), libc::SYS_prctl, &args, Expect::Ok);
            let args = [libc::PR_CAPBSET_READ.into(), u64::from(cap).into()];
            self.call(format!("proof: capability {cap} is gone for good"), libc::SYS_prctl, &args, Expect::Is(0));
        }
    }

    pub(super) fn drop_privilege(&mut self) {
        if self.plan.asks_for(Wall::Caps) {
            self.wall = Wall::Caps;
            let none = libc::PR_CAP_AMBIENT_CLEAR_ALL;
            let args = [libc::PR_CAP_AMBIENT.into(), none.into(), 0.into(), 0.into(), 0.into()];
            self.call("clear ambient capabilities", libc::SYS_prctl, &args, Expect::Ok);
            // noroot, no_setuid_fixup, no_cap_ambient_raise, each with its lock; keep_caps off and locked.
            let args = [libc::PR_SET_SECUREBITS.into(), 0xefu64.into()];
            self.call("lock the secure bits", libc::SYS_prctl, &args, Expect::Ok);
        }
        if !self.plan.asks_for(Wall::Caps) {
            self.keep_capabilities();
        }
        if self.plan.identity == Identity::Fresh {
            if self.plan.asks_for(Wall::Groups) {
                self.wall = Wall::Groups;
                self.call("leave all groups", libc::SYS_setgroups, &[0.into(), 0u64.into()], Expect::Ok);
            }
            if let Some(id) = self.fresh_id() {
                self.wall = Wall::Id;
                let id = Arg::from(id);
                self.call("change group", libc::SYS_setresgid, &[id, id, id], Expect::Ok);
                self.call("change user", libc::SYS_setresuid, &[id, id, id], Expect::Ok);
                // A change of id forgets it.
                self.parent_death();
            }
        }
        if self.plan.asks_for(Wall::Caps) {
            self.wall = Wall::Caps;
            let header = self.program.words(&[CAPABILITY_VERSION_3]);
            let none = self.program.words(&[0, 0, 0]);
            self.call("drop all capabilities", libc::SYS_capset, &[header.into(), none.into()], Expect::Ok);
            let (found, zero) = (self.program.words(&[u64::MAX; 3]), none);
            self.call("read the capabilities", libc::SYS_capget, &[header.into(), found.into()], Expect::Ok);
            let label = Label { wall: Wall::Caps, what: "proof: no capability left".into() };
            self.program.compare(self.stage, label, found, zero, 24, true);
            let (tmpfs, at) = (self.text("tmpfs"), self.text("/"));
            let args = [tmpfs.into(), at.into(), tmpfs.into(), 0u64.into(), 0u64.into()];
            self.call("proof: cannot mount", libc::SYS_mount, &args, Expect::Fails(&[EPERM]));
        }
        self.parent_death();
        self.call(
            "let nobody read this process",
            libc::SYS_prctl,
            &[libc::PR_SET_DUMPABLE.into(), 0.into()],
            Expect::Ok,
        );
        if self.plan.asks_for(Wall::Id) {
            self.wall = Wall::Id;
            let uid = match self.plan.identity {
                Identity::Own { uid, .. } => uid,
                Identity::Fresh => self.making.id,
            };
            self.call("proof: the id is the cell's", libc::SYS_getuid, &[], Expect::Is(i64::from(uid)));
            if self.plan.asks_for(Wall::Caps) && uid != 0 {
                let args = [0.into(), 0.into(), 0.into()];
                self.call("proof: no way back to root", libc::SYS_setresuid, &args, Expect::Fails(&[EPERM, EINVAL]));
            }
        }
        if self.plan.asks_for(Wall::Groups) {
            self.wall = Wall::Groups;
            self.call("proof: no group left", libc::SYS_getgroups, &[0.into(), 0u64.into()], Expect::Is(0));
        }
    }

    /// For a control, where the wall is left out: an ordinary user's exec would drop them by itself.
    fn keep_capabilities(&mut self) {
        self.wall = Wall::Caps;
        let last_cap = self.plan.host.last_cap;
        let header = self.program.words(&[CAPABILITY_VERSION_3]);
        let found = self.program.room(24);
        self.call("read the capabilities", libc::SYS_capget, &[header.into(), found.into()], Expect::Ok);
        let all = (1u64 << (last_cap + 1)) - 1;
        // Two rows of effective, permitted, inheritable; capabilities root does not have stay away.
        let (low, high) = (all & 0xffff_ffff, all >> 32);
        let rows = [low | low << 32, low | high << 32, high | high << 32];
        let wanted = self.program.words(&rows);
        let missing = Expect::OkOr(&[EPERM]);
        self.call("make them inheritable", libc::SYS_capset, &[header.into(), wanted.into()], missing);
        for cap in 0..=last_cap {
            let raise = libc::PR_CAP_AMBIENT_RAISE;
            let args = [libc::PR_CAP_AMBIENT.into(), raise.into(), u64::from(cap).into(), 0.into(), 0.into()];
            self.call("keep a capability", libc::SYS_prctl, &args, missing);
        }
    }

    pub(super) fn rlimits(&mut self) {
        self.wall = Wall::Rlimits;
        if !self.plan.asks_for(Wall::Rlimits) {
            return;
        }
        let limits = &self.plan.limits;
        let cpu_s = limits.cpu_time.map_or(libc::RLIM_INFINITY, |time| time.as_secs() + 1);
        for (resource, name, value) in [
            (libc::RLIMIT_NOFILE, "descriptors", u64::from(limits.fds)),
            // Counted for each user and namespace, and no process but this cell's init and spawner has its id there. One
            // more, so that the cgroup's limit or the watch is met first and tells.
            (libc::RLIMIT_NPROC, "processes", u64::from(limits.pids) + 3),
            // By default one block more than the disk limit, which is then met first and tells.
            (libc::RLIMIT_FSIZE, "file size", limits.file_size.map_or(limits.disk.0 + PAGE, |size| size.0)),
            (libc::RLIMIT_CPU, "cpu time", cpu_s),
            (libc::RLIMIT_MEMLOCK, "locked memory", MEMLOCK_BYTES),
            (libc::RLIMIT_MSGQUEUE, "queue bytes", MSGQUEUE_BYTES),
            (libc::RLIMIT_SIGPENDING, "queued signals", SIGNALS_QUEUED_MAX),
            (libc::RLIMIT_RTPRIO, "real-time priority", 0),
            (libc::RLIMIT_NICE, "nice", 0),
        ] {
            self.rlimit(resource, name, value);
        }
    }

    /// The limit on core files, which the syscall filter lets nobody set.
    pub(super) fn core_limit(&mut self) {
        self.wall = Wall::Rlimits;
        if self.plan.asks_for(Wall::Rlimits) {
            // One, not zero: at zero the kernel still starts a core handler of the host.
            self.rlimit(libc::RLIMIT_CORE, "core size", 1);
        }
    }

    fn rlimit(&mut self, resource: u32, name: &str, value: u64) {
        // Only downward: a limit that the caller has already is kept.
        let value = self.plan.host.hard_limits.get(&resource).map_or(value, |hard| value.min(*hard));
        let given = self.program.words(&[value, value]);
        let found = self.program.room(16);
        let set = [0.into(), u64::from(resource).into(), given.into(), 0u64.into()];
        self.call(format!("limit {name}"), libc::SYS_prlimit64, &set, Expect::Ok);
        let get = [0.into(), u64::from(resource).into(), 0u64.into(), found.into()];
        self.call(format!("read the limit on {name}"), libc::SYS_prlimit64, &get, Expect::Ok);
        let label = Label { wall: Wall::Rlimits, what: format!("proof: {name} limited").into() };
        self.program.compare(self.stage, label, found, given, 16, true);
    }

    /// For the spawner and all its children: there is no way back from it.
    pub(super) fn no_new_privs(&mut self) {
        self.wall = Wall::NoNewPrivs;
        if self.plan.asks_for(Wall::NoNewPrivs) {
            let args = [libc::PR_SET_NO_NEW_PRIVS.into(), 1.into(), 0.into(), 0.into(), 0.into()];
            self.call("give up new privileges", libc::SYS_prctl, &args, Expect::Ok);
        }
    }

    pub(super) fn prove_no_new_privs(&mut self) {
        self.wall = Wall::NoNewPrivs;
        if self.plan.asks_for(Wall::NoNewPrivs) {
            let args = [libc::PR_GET_NO_NEW_PRIVS.into(), 0.into(), 0.into(), 0.into(), 0.into()];
            self.call("proof: no new privileges", libc::SYS_prctl, &args, Expect::Is(1));
        }
    }
}
