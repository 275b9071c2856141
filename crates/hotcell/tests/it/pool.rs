//! Pools: cells that stand before anybody asks are as good as those that are made for one, and are used once.

use hotcell_cell::pool::{Ahead, Pool};
use hotcell_cell::{Cell, Exec, Mode, Session};

use crate::support::*;

fn open(script: &str, size: usize, ahead: Ahead) -> Pool {
    let plan = plan_on(&host(), Cell::builder().command(["/bin/sh", "-c", script])).expect("a plan");
    Pool::open(plan, size, ahead).expect("a pool")
}

const BOTH: [Ahead; 2] = [Ahead::Station, Ahead::Cell];

#[test]
fn no_cell_of_a_pool_sees_what_another_left() {
    let script = "ls -A /tmp /dev/shm \"$HOME\" .; echo x > /tmp/f; echo x > /dev/shm/f; echo x > ~/f; echo x > f; \
                  sleep 100 & cat /proc/sys/kernel/hostname; echo $$";
    for ahead in BOTH {
        let pool = open(script, 2, ahead);
        let reports: Vec<_> = (0..12).map(|_| pool.run().expect("a run")).collect();
        for report in &reports {
            assert_eq!(report.exit_code, Some(0), "{}", report.stderr.text());
            assert_eq!(report.stdout.text(), reports[0].stdout.text(), "a cell saw another's");
            assert!(!report.stdout.text().contains('f'), "{}", report.stdout.text());
        }
        let counters = pool.counters();
        assert_eq!(counters.hits + counters.waits, 12, "{counters:?}");
    }
}

#[test]
fn a_station_is_used_again_and_its_counters_are_exact() {
    let pool = open("exit 3", 1, Ahead::Cell);
    for _ in 0..20 {
        let report = pool.run().expect("a run");
        assert_eq!((report.exit_code, report.pids_peak), (Some(3), Some(1)));
    }
    let counters = pool.counters();
    assert!(counters.renewed >= 18 && counters.opened == 1, "{counters:?}");
    drop(pool);
    // More processes than any cell must have: the kernel does not lower that peak, so its group is made anew.
    let pool = open("(sleep 0.01 & sleep 0.01 & wait)", 1, Ahead::Cell);
    let peaks: Vec<u64> = (0..4).map(|_| pool.run().expect("a run").pids_peak.expect("counted")).collect();
    // Elsewhere it is watched, and what lives for a moment may not be seen.
    if cgroup_version_is_one() {
        assert!(peaks.iter().all(|peak| (2..=4).contains(peak)), "{peaks:?}");
    }
    // A command that had to be killed uses a group up, too; what comes after it knows nothing of that.
    let bench = Bench::new();
    let script = format!("test -e {0} && exit 3; while :; do :; done", bench.path("go/on").display());
    let work = bench.dir("go");
    let limits = hotcell_cell::Limits { time: std::time::Duration::from_millis(300), ..Default::default() };
    let builder = Cell::builder().limits(limits).workspace(&work, Mode::Ro).command(["/bin/sh", "-c", &script]);
    let pool = Pool::open(plan_on(&host(), builder).expect("a plan"), 1, Ahead::Cell).expect("a pool");
    assert_eq!(pool.run().expect("a run").outcome, hotcell_base::Outcome::Timeout);
    bench.file("go/on", "");
    let report = pool.run().expect("a run");
    assert_eq!((report.exit_code, report.pids_peak), (Some(3), Some(1)));
    assert!(report.cpu < std::time::Duration::from_millis(200), "{:?} is another's", report.cpu);
    assert_eq!(pool.counters().opened, 1, "{:?}", pool.counters());
}

fn cgroup_version_is_one() -> bool {
    is_root() && std::path::Path::new("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists()
}

#[test]
fn limits_and_ends_are_each_cells_own() {
    let time = std::time::Duration::from_secs(1);
    let open = |script: &str| {
        let limits = hotcell_cell::Limits { time, ..Default::default() };
        let builder = Cell::builder().limits(limits).command(["/bin/sh", "-c", script]);
        Pool::open(plan_on(&host(), builder).expect("a plan"), 1, Ahead::Cell).expect("a pool")
    };
    let pool = open("sleep 60");
    for _ in 0..2 {
        assert_eq!(pool.run().expect("a run").outcome, hotcell_base::Outcome::Timeout);
    }
    // Waiting in the pool for longer than it may run is not on its clock.
    let pool = open("exit 7");
    std::thread::sleep(time * 3 / 2);
    assert_eq!(pool.run().expect("a run").exit_code, Some(7));
}

/// Spawners of this process, by pid.
fn spawners() -> Vec<u32> {
    let us = std::process::id().to_string();
    let is_ours = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let fields: Vec<&str> =
            stat.rsplit_once(')').map(|(_, rest)| rest.split_whitespace().collect()).unwrap_or_default();
        stat.contains("(hotcell-spawn)") && fields.get(1) == Some(&us.as_str())
    };
    let pids = std::fs::read_dir("/proc").expect("/proc").flatten();
    pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_ours).collect()
}

#[test]
fn a_pool_that_is_dropped_leaves_nothing() {
    let pool = open("true", 3, Ahead::Cell);
    assert_eq!(pool.run().expect("a run").exit_code, Some(0));
    eventually("all of its stations are open", || spawners().len() == 3);
    let groups = cgroups_with(&format!("-{}-", std::process::id()));
    assert!(!groups.is_empty() || !cgroup_version_is_one(), "VOID: no group was there");
    drop(pool);
    assert_eq!(spawners(), Vec::<u32>::new());
    let left: Vec<_> = groups.iter().filter(|group| group.exists()).collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn what_writes_in_place_is_no_plan_for_a_pool() {
    let bench = Bench::new();
    let builder = Cell::builder().workspace(bench.dir("work"), Mode::Rw).command(["/bin/true"]);
    let refused = Pool::open(plan_on(&host(), builder).expect("a plan"), 1, Ahead::Cell);
    assert!(refused.is_err_and(|error| error.to_string().contains("in place")));
}

#[test]
fn a_copy_on_write_workspace_is_new_in_each_cell_and_shows_the_host_as_it_is() {
    let bench = Bench::new();
    let work = bench.dir("work");
    bench.file("work/a", "1\n");
    let script = "cat a; ls; echo changed > a; echo new > n";
    let builder = Cell::builder().workspace(&work, Mode::Cow).command(["/bin/sh", "-c", script]);
    let pool = Pool::open(plan_on(&host(), builder).expect("a plan"), 2, Ahead::Cell).expect("a pool");
    for number in 1..8 {
        bench.file("work/a", &format!("{number}\n"));
        let report = pool.run().expect("a run");
        assert_eq!(report.stdout.text(), format!("{number}\na\n"), "{}", report.stderr.text());
        assert_eq!(report.changes.expect("a copy").list.len(), 2);
    }
    assert_eq!(std::fs::read_to_string(work.join("a")).expect("there"), "7\n");
}

/// What this process and this machine hold.
#[derive(Debug)]
struct Held {
    memory_kib: u64,
    descriptors: usize,
    threads: usize,
    cgroups: usize,
    mounts: usize,
    /// Objects of the kernel's that belong to a cell; only root may count them.
    kernel: Vec<(String, u64)>,
}

impl Held {
    fn now() -> Held {
        let status = std::fs::read_to_string("/proc/self/status").expect("our own");
        let memory = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a size");
        let count = |path: &str| std::fs::read_dir(path).map_or(0, Iterator::count);
        let slabs = std::fs::read_to_string("/proc/slabinfo").unwrap_or_default();
        let kinds =
            ["net_namespace", "pid_namespace", "mnt_cache", "proc_inode_cache", "shmem_inode_cache", "task_struct"];
        let kernel = slabs.lines().filter_map(|line| {
            let mut words = line.split_whitespace();
            let (name, n_active) = (words.next()?, words.next()?.parse().ok()?);
            kinds.contains(&name).then(|| (name.to_owned(), n_active))
        });
        Held {
            memory_kib: memory.trim().split(' ').next().and_then(|size| size.parse().ok()).expect("a number"),
            descriptors: count("/proc/self/fd"),
            threads: count("/proc/self/task"),
            cgroups: cgroups_with("hotcell-").len(),
            mounts: std::fs::read_to_string("/proc/self/mountinfo").expect("our own").lines().count(),
            kernel: kernel.collect(),
        }
    }

    /// Whether nothing grew, but for what comes and goes.
    fn is_no_more_than(&self, before: &Held) -> bool {
        // The kernel frees some of its objects later, all at once: a few per start would be many more.
        let kernel = self.kernel.iter().zip(&before.kernel).all(|((_, now), (_, before))| *now < before + 1500);
        self.memory_kib < before.memory_kib + 2048
            && self.descriptors <= before.descriptors + 4
            && (self.threads, self.mounts) == (before.threads, before.mounts)
            && self.cgroups <= before.cgroups + 16
            && kernel
    }
}

#[test]
fn many_starts_leave_nothing_behind() {
    let n_starts = if std::env::var_os("HOTCELL_SOAK").is_some() { 100_000 } else { 3000 };
    let pool = open("true", 4, Ahead::Cell);
    let mut session = {
        let plan = allowing(&host(), Cell::builder()).plan_session(&host()).expect("a plan");
        Session::open(plan, &mut Nobody).expect("a session")
    };
    let exec = Exec { argv: vec!["/bin/true".into()], ..Exec::default() };
    let mut run = |n: u64| {
        for number in 0..n {
            assert_eq!(pool.run().expect("a run").exit_code, Some(0));
            if number % 8 == 0 {
                assert_eq!(session.exec(&exec).expect("a command").exit_code, Some(0));
            }
        }
        // As many spawners as stations, and no descriptor comes or goes: then its cells stand as well.
        let (mut last, mut n_same) = (0, 0);
        eventually("the pool is full again", || {
            let now = std::fs::read_dir("/proc/self/fd").expect("our own").count();
            n_same = if now == last && spawners().len() == 5 { n_same + 1 } else { 0 };
            last = now;
            n_same == 10
        });
    };
    run(n_starts / 10);
    let before = Held::now();
    run(n_starts * 9 / 10);
    // What the last cells had is given back a moment later.
    let give_up = std::time::Instant::now() + std::time::Duration::from_secs(10);
    let mut now = Held::now();
    while !now.is_no_more_than(&before) && std::time::Instant::now() < give_up {
        std::thread::sleep(std::time::Duration::from_millis(50));
        now = Held::now();
    }
    assert!(now.is_no_more_than(&before), "{now:?} after {before:?}");
}

#[test]
fn a_pool_runs_other_commands_with_other_limits_and_forgets_both() {
    let pool = open("exit 1", 1, Ahead::Cell);
    let sh = |script: &str| Exec { argv: ["sh", "-c", script].map(Into::into).to_vec(), ..Exec::default() };
    let output = |exec: &Exec| pool.exec(exec).expect("a run").stdout.text();
    let narrow = hotcell_cell::Limits { pids: 3, fds: 20, ..Default::default() };
    let many = "for i in 1 2 3 4 5 6; do sleep 0.3 & done; wait; ulimit -n";
    assert_eq!(output(&Exec { cwd: Some("/tmp".into()), ..sh("pwd") }), "/tmp\n");
    let ended = pool.exec(&Exec { limits: Some(narrow), ..sh(many) }).expect("a run").outcome;
    assert_eq!(ended, hotcell_base::Outcome::Pids);
    // The next one has the plan's own again.
    assert_eq!(output(&sh(many)), "1024\n");
    assert_eq!(pool.run().expect("a run").exit_code, Some(1));
    let wide = hotcell_cell::Limits { pids: 1000, ..Default::default() };
    assert!(pool.exec(&Exec { limits: Some(wide), ..sh(":") }).is_err());
}

#[test]
fn each_cell_of_a_station_has_namespaces_of_its_own() {
    for ahead in BOTH {
        let pool = open(":", 1, ahead);
        let run = |script: &str| {
            let argv = ["/bin/sh", "-c", script].map(Into::into).to_vec();
            let report = pool.exec(&Exec { argv, ..Exec::default() }).expect("a run");
            assert_eq!(report.exit_code, Some(0), "{}", report.stderr.text());
            report.stdout.text()
        };
        // What one leaves in them: a semaphore, and a name that anybody in the network could take.
        let leave = "ipcmk -S 1 >/dev/null; ipcs -s | grep -c 0x; \
                     python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"\\0left\")' && echo bound";
        for _ in 0..3 {
            assert_eq!(run(leave), "1\nbound\n", "one that sees its own alone");
        }
        assert!(pool.counters().renewed >= 2, "VOID: not of one station: {:?}", pool.counters());
    }
}

#[test]
fn a_pool_that_lost_a_station_has_another() {
    struct Panics;
    impl hotcell_cell::Observer for Panics {
        fn output(&mut self, _: hotcell_cell::Stream, _: &[u8]) -> std::io::Result<()> {
            panic!("on purpose");
        }
    }
    let pool = open("echo x", 1, Ahead::Cell);
    let run = || pool.run_with(hotcell_cell::Stdin::Null, &mut Panics, None);
    let lost = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
    assert!(lost.is_err(), "VOID: nothing was lost");
    assert_eq!(pool.run().expect("another").exit_code, Some(0));
}
