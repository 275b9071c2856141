//! Every limit binds, ends in its own outcome, and leaves a neighbour unharmed.

use std::time::Duration;

use hotcell_base::{Bytes, Cpus, Outcome};
use hotcell_cell::{Builder, Cell, Limit, Limits, Mode, Report, Standing, Wall};

use crate::support::*;

const PYTHON: &str = "/usr/bin/python3";

/// Runs a command under a limit, with a neighbour that must not notice.
fn bound(limits: Limits, argv: &[&str]) -> Report {
    let neighbour = std::thread::spawn(|| {
        let script = "for i in 1 2 3 4 5 6 7 8 9 10; do echo $i > /tmp/f; sleep 0.02; done; cat /tmp/f";
        run(Cell::builder().command(["sh", "-c", script]))
    });
    let report = run(Cell::builder().limits(limits).command(argv.iter().copied()));
    let neighbour = neighbour.join().expect("the neighbour's thread");
    assert_eq!(
        (neighbour.outcome, neighbour.exit_code, neighbour.stdout.text().as_str()),
        (Outcome::Exited, Some(0), "10\n")
    );
    report
}

/// The control: the same command with room enough.
#[track_caller]
fn unbound(argv: &[&str]) -> Report {
    let report = run(Cell::builder()
        .limits(Limits { cpus: Cpus { milli: 2000 }, ..Limits::default() })
        .command(argv.iter().copied()));
    assert_eq!((report.outcome, report.exit_code), (Outcome::Exited, Some(0)), "VOID: {}", report.stderr.text());
    report
}

#[track_caller]
fn ended(report: &Report, outcome: Outcome, limit: Limit) {
    assert_eq!(
        (report.outcome, report.limit),
        (outcome, Some(limit)),
        "{} {}",
        report.stdout.text(),
        report.stderr.text()
    );
}

#[test]
fn time_ends_a_run() {
    let argv = ["sleep", "0.5"];
    let report = bound(Limits { time: Duration::from_millis(100), ..Limits::default() }, &argv);
    ended(&report, Outcome::Timeout, Limit::Time);
    assert!(report.wall >= Duration::from_millis(100), "{:?}", report.wall);
    unbound(&argv);
}

#[test]
fn cpu_time_of_the_whole_tree_ends_a_run() {
    // Two processes that each use less than the limit, and more together.
    let spin = "import time, os\npid = os.fork()\nwhile time.process_time() < 0.3: pass\nif pid: os.wait()";
    let argv = [PYTHON, "-c", spin];
    let limits = Limits { cpu_time: Some(Duration::from_millis(450)), cpus: Cpus { milli: 2000 }, ..Limits::default() };
    ended(&bound(limits, &argv), Outcome::Timeout, Limit::CpuTime);
    assert!(unbound(&argv).cpu >= Duration::from_millis(500));
}

#[test]
fn the_cpu_share_is_held_on_all_processors_together() {
    let spin = "import os, time\nos.fork()\nend = time.monotonic() + 1.5\nwhile time.monotonic() < end: pass";
    let argv = [PYTHON, "-c", spin];
    let report = bound(Limits { cpus: Cpus { milli: 300 }, ..Limits::default() }, &argv);
    let share = report.cpu.as_secs_f64() / report.wall.as_secs_f64();
    assert!(share < 0.5, "{share} of a processor instead of 0.3");
    let free = run(omit(Cell::builder(), &[Wall::Cgroup]).command(argv));
    let share = free.cpu.as_secs_f64() / free.wall.as_secs_f64();
    assert!(share > 0.6, "VOID: {share} of a processor without the wall");
}

#[test]
fn memory_of_every_kind_counts() {
    let memory = Bytes::mib(64);
    let write = "b = b'x' * (1 << 20)\nfor _ in range(160): f.write(b)\nimport time; time.sleep(0.3)";
    for (kind, program) in [
        ("heap", "x = bytearray(160 << 20); import time; time.sleep(0.3)".to_owned()),
        ("tmpfs", format!("f = open('/tmp/f', 'wb')\n{write}")),
        ("shared memory", format!("f = open('/dev/shm/f', 'wb')\n{write}")),
        ("memfd", format!("import os\nf = os.fdopen(os.memfd_create('f'), 'wb')\n{write}")),
        ("shared mapping", "import mmap, time\nm = mmap.mmap(-1, 160 << 20)\nfor i in range(0, 160 << 20, 4096): m[i] = 1\ntime.sleep(0.3)".to_owned()),
        ("many children", "import os, time\nfor _ in range(8):\n  if not os.fork():\n    x = bytearray(20 << 20); time.sleep(2); os._exit(0)\nfor _ in range(8): os.wait()".to_owned()),
    ] {
        let argv = [PYTHON, "-c", &program];
        let report = bound(Limits { memory, ..Limits::default() }, &argv);
        // Where memory is only watched, what cannot be watched does not exist.
        if kind == "memfd" && is_watched(&report) {
            assert!(report.stderr.text().contains("Function not implemented"), "{}", report.stderr.text());
            continue;
        }
        assert_eq!((report.outcome, report.limit), (Outcome::Oom, Some(Limit::Memory)), "{kind}: {}", report.stderr.text());
        unbound(&argv);
    }
}

fn is_watched(report: &Report) -> bool {
    report.isolation.walls[&Wall::Cgroup] == Standing::Watched
}

#[test]
fn memory_that_is_let_go_of_and_not_given_back_counts() {
    // Pages of a shared mapping stay when the mapping forgets them; a first thread that ends hides its process.
    for (kind, program) in [
        (
            "forgotten",
            "import mmap, time\nm = mmap.mmap(-1, 160 << 20)\nfor i in range(0, 160 << 20, 4096):\n  m[i] = 1\n  if i % (8 << 20) == 0: m.madvise(mmap.MADV_DONTNEED)\ntime.sleep(0.5)",
        ),
        (
            "behind a thread",
            "import ctypes, threading, time\ndef work():\n  time.sleep(0.05)\n  x = bytearray(160 << 20); time.sleep(0.5)\n  import os; os._exit(0)\nthreading.Thread(target=work).start()\nctypes.CDLL(None).syscall(60, 0)",
        ),
    ] {
        let argv = [PYTHON, "-c", program];
        let report = bound(Limits { memory: Bytes::mib(64), ..Limits::default() }, &argv);
        assert_eq!(
            (report.outcome, report.limit),
            (Outcome::Oom, Some(Limit::Memory)),
            "{kind}: {}",
            report.stderr.text()
        );
        unbound(&argv);
    }
}

#[test]
fn a_program_that_starts_others_is_not_counted_twice() {
    // A vfork runs on its parent's memory until it executes something.
    let program = "import subprocess\nx = bytearray(120 << 20)\nfor _ in range(60): subprocess.run(['/bin/true'])";
    let limits = Limits { memory: Bytes::mib(200), ..Limits::default() };
    let report = run(Cell::builder().limits(limits).command([PYTHON, "-c", program]));
    assert_eq!((report.outcome, report.exit_code), (Outcome::Exited, Some(0)), "{}", report.stderr.text());
}

#[test]
fn a_tree_that_wakes_itself_is_held_to_its_share_or_ended() {
    let program = "import signal, time\nsignal.signal(signal.SIGCONT, lambda *_: None)\nsignal.signal(signal.SIGALRM, lambda *_: None)\nimport os\nif not os.fork():\n  while True: time.sleep(0.003); os.kill(os.getppid(), signal.SIGCONT)\nend = time.monotonic() + 2.5\nwhile time.monotonic() < end: pass\nos.killpg(0, signal.SIGKILL)";
    let limits = Limits { cpus: Cpus { milli: 100 }, ..Limits::default() };
    let report = run(Cell::builder().limits(limits).command([PYTHON, "-c", program]));
    let share = report.cpu.as_secs_f64() / report.wall.as_secs_f64();
    assert!(
        share < 0.5 || report.limit == Some(Limit::CpuShare),
        "{share} of a processor instead of 0.1, {}",
        report.outcome
    );
    let free = run(omit(Cell::builder(), &[Wall::Cgroup]).command([PYTHON, "-c", program]));
    let share = free.cpu.as_secs_f64() / free.wall.as_secs_f64();
    assert!(share > 0.6, "VOID: {share} of a processor without the wall");
}

#[test]
fn disk_in_place_cannot_be_hidden() {
    for (kind, program) in [
        (
            "without a name",
            "import os, time\nfs = []\nfor i in range(40):\n  f = open(f'f{i}', 'wb'); os.unlink(f'f{i}'); f.write(b'x' * (1 << 20)); f.flush(); fs.append(f); time.sleep(0.01)",
        ),
        (
            "too deep to look",
            "import os, time\nfor i in range(260): os.mkdir('d'); os.chdir('d')\nfor i in range(40): open(f'f{i}', 'wb').write(b'x' * (1 << 20)); time.sleep(0.01)",
        ),
        (
            "behind a closed door",
            "import os, time\nos.mkdir('d')\nos.chmod('d', 0o300)\nfor i in range(40): open(f'd/f{i}', 'wb').write(b'x' * (1 << 20)); time.sleep(0.01)",
        ),
    ] {
        let bench = Bench::new();
        let limits = Limits { disk: Bytes::mib(8), ..Limits::default() };
        let inside = |builder: Builder| {
            let work = bench.dir(&token());
            let report = run(builder.workspace(&work, Mode::Rw).command([PYTHON, "-c", program]));
            let closed = work.join("d");
            if closed.exists() {
                std::fs::set_permissions(&closed, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
            }
            report
        };
        let report = inside(Cell::builder().limits(limits));
        assert_eq!(
            (report.outcome, report.limit),
            (Outcome::Disk, Some(Limit::Disk)),
            "{kind}: {}",
            report.stderr.text()
        );
        let control = inside(omit(Cell::builder(), &[Wall::Disk]));
        assert_eq!((control.outcome, control.exit_code), (Outcome::Exited, Some(0)), "VOID: {kind}");
    }
}

#[test]
fn processor_time_nobody_waits_for_counts_where_the_kernel_counts() {
    let program = "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nend = time.monotonic() + 1.2\nwhile time.monotonic() < end:\n  if not os.fork():\n    t = time.monotonic() + 0.012\n    while time.monotonic() < t: pass\n    os._exit(0)\n  time.sleep(0.012)";
    let limits = Limits { cpu_time: Some(Duration::from_millis(300)), cpus: Cpus { milli: 2000 }, ..Limits::default() };
    let report = run(Cell::builder().limits(limits).command([PYTHON, "-c", program]));
    if is_watched(&report) {
        return skip("processes that live shorter than a look are not seen where processor time is only watched");
    }
    ended(&report, Outcome::Timeout, Limit::CpuTime);
}

#[test]
fn page_cache_is_the_cells_own_and_no_reason_to_end_it() {
    // Reading a large file fills the cache; the kernel gives it back when memory is short.
    let bench = Bench::new();
    let big = bench.dir("work").join("big");
    std::fs::write(&big, vec![7u8; 100 << 20]).unwrap();
    let builder = Cell::builder().workspace(bench.path("work"), Mode::Ro).command(["sh", "-c", "cat big | wc -c"]);
    let report = run(builder.limits(Limits { memory: Bytes::mib(48), ..Limits::default() }));
    assert_eq!((report.outcome, report.stdout.text().as_str()), (Outcome::Exited, "104857600\n"));
    assert!(report.memory_peak_bytes <= 48 << 20);
}

#[test]
fn processes_and_threads_are_counted_together() {
    let pids = 24;
    for (kind, program) in [
        (
            "forks",
            "import os, time\nfor _ in range(40):\n  if not os.fork(): time.sleep(0.4); os._exit(0)\ntime.sleep(0.1)",
        ),
        (
            "threads",
            "import threading, time\nfor _ in range(40): threading.Thread(target=time.sleep, args=(0.4,)).start()",
        ),
    ] {
        let argv = [PYTHON, "-c", program];
        let report = bound(Limits { pids, ..Limits::default() }, &argv);
        assert_eq!(
            (report.outcome, report.limit),
            (Outcome::Pids, Some(Limit::Pids)),
            "{kind}: {}",
            report.stderr.text()
        );
        let peak = report.pids_peak.expect("it is counted in a cell of its own");
        assert!(peak <= u64::from(pids) + 1, "{peak}");
        unbound(&argv);
    }
    // Up to the limit is not beyond it.
    let exactly = "import os, time\nfor _ in range(23):\n  if not os.fork(): time.sleep(0.1); os._exit(0)\nfor _ in range(23): os.wait()";
    let report = run(Cell::builder().limits(Limits { pids, ..Limits::default() }).command([PYTHON, "-c", exactly]));
    assert_eq!((report.outcome, report.exit_code), (Outcome::Exited, Some(0)), "{}", report.stderr.text());
}

#[test]
fn a_fork_bomb_ends_as_one_run() {
    let report = bound(
        Limits { pids: 32, time: Duration::from_secs(20), ..Limits::default() },
        &["bash", "-c", "f() { f | f & }; f; sleep 10"],
    );
    ended(&report, Outcome::Pids, Limit::Pids);
}

#[test]
fn descriptors_run_out_for_the_process_that_opens_them() {
    let program = "l = [open('/dev/null') for _ in range(60)]";
    let argv = [PYTHON, "-c", program];
    let report = bound(Limits { fds: 32, ..Limits::default() }, &argv);
    assert_eq!((report.outcome, report.exit_code), (Outcome::Exited, Some(1)));
    assert!(report.stderr.text().contains("Too many open files"), "{}", report.stderr.text());
    unbound(&argv);
}

#[test]
fn disk_is_one_number_for_everything_that_is_written() {
    let disk = Bytes::mib(8);
    let split = "for p in ('/tmp/f', '/var/tmp/f', '/dev/shm/f', '/cell/f'):\n  open(p, 'wb').write(b'x' * (3 << 20))";
    let many = "for i in range(5000): open(f'/tmp/{i}', 'w').close()";
    let deep = "import os\nfor i in range(3000): os.mkdir('d'); os.chdir('d')";
    for (kind, program) in [("bytes", split), ("files", many), ("directories", deep)] {
        let argv = [PYTHON, "-c", program];
        let report = bound(Limits { disk, ..Limits::default() }, &argv);
        assert_eq!(
            (report.outcome, report.limit),
            (Outcome::Disk, Some(Limit::Disk)),
            "{kind}: {}",
            report.stderr.text()
        );
        unbound(&argv);
    }
    // A file with nothing in it but a size takes no space, and may not be larger than the disk.
    let sparse =
        run(Cell::builder().limits(Limits { disk, ..Limits::default() }).command(["truncate", "-s", "1T", "/tmp/f"]));
    ended(&sparse, Outcome::Disk, Limit::Disk);
}

#[test]
fn disk_is_capped_in_every_kind_of_workspace() {
    for mode in [Mode::Cow, Mode::Rw] {
        let bench = Bench::new();
        let work = bench.dir("work");
        let argv =
            ["sh", "-c", "i=0; while [ $i -lt 24 ]; do head -c 1000000 /dev/zero > f$i; i=$((i+1)); sleep 0.02; done"];
        let cell = |builder: Builder| run(builder.workspace(&work, mode).command(argv));
        let report = cell(Cell::builder().limits(Limits { disk: Bytes::mib(8), ..Limits::default() }));
        ended(&report, Outcome::Disk, Limit::Disk);
        let control = cell(Cell::builder());
        assert_eq!((control.outcome, control.exit_code), (Outcome::Exited, Some(0)), "VOID");
    }
}

#[test]
fn a_copied_up_file_larger_than_the_disk_limit_is_refused_and_the_host_keeps_it() {
    let bench = Bench::new();
    let work = bench.dir("work");
    // Five gibibytes that take no space outside: what matters is that nothing is copied to begin with.
    std::fs::File::create(work.join("huge")).unwrap().set_len(5 << 30).unwrap();
    let cell = |script: &str| {
        let limits = Limits { disk: Bytes::mib(16), memory: Bytes::mib(256), ..Limits::default() };
        run(Cell::builder().workspace(&work, Mode::Cow).limits(limits).command(["sh", "-c", script]))
    };
    let report = cell("stat -c %s huge");
    assert_eq!((report.outcome, report.stdout.text().as_str()), (Outcome::Exited, "5368709120\n"));
    assert!(report.changes.unwrap().list.is_empty());
    let report = cell("echo x >> huge");
    assert!(
        report.outcome == Outcome::Disk || report.exit_code != Some(0),
        "{} {}",
        report.outcome,
        report.stderr.text()
    );
    assert_eq!(std::fs::metadata(work.join("huge")).unwrap().len(), 5 << 30);
}

#[test]
fn the_size_of_one_file_is_limited() {
    let argv = ["dd", "if=/dev/zero", "of=f", "bs=1M", "count=3", "status=none"];
    let report = bound(Limits { file_size: Some(Bytes::mib(1)), ..Limits::default() }, &argv);
    ended(&report, Outcome::Disk, Limit::FileSize);
    unbound(&argv);
}

#[test]
fn output_is_bounded_drained_and_counted() {
    // Both streams, no newline, much more than any pipe holds.
    let program = "import sys\nfor _ in range(64):\n  sys.stdout.write('o' * 65536); sys.stdout.flush()\n  sys.stderr.write('e' * 65536); sys.stderr.flush()";
    let argv = [PYTHON, "-c", program];
    let report = bound(Limits { output: Bytes(1_000_000), ..Limits::default() }, &argv);
    ended(&report, Outcome::OutputLimit, Limit::Output);
    assert_eq!(report.stdout.kept.len() + report.stderr.kept.len(), 1_000_000);
    assert!(report.stdout.truncated || report.stderr.truncated);
    assert!(report.stdout.bytes_total + report.stderr.bytes_total > 1_000_000);

    let report = unbound(&argv);
    assert_eq!((report.stdout.bytes_total, report.stderr.bytes_total), (64 << 16, 64 << 16));
    assert_eq!((report.stdout.truncated, report.stderr.truncated), (false, false));
    assert_eq!(report.stdout.kept.len(), 64 << 16);
    // sha256 of four mebibytes of the letter o, from sha256sum.
    assert_eq!(report.stdout.sha256, "3721e06e6f9aa23bd15da8493266df6c1b93bf350c9b08ae32d94ade93954391");
}

#[test]
fn an_oom_kills_exactly_that_tree() {
    // A parent that would go on after its child is killed does not: the run is over.
    let program = "import os, time\nif not os.fork(): x = bytearray(200 << 20)\nos.wait()\ntime.sleep(20)";
    let report = bound(Limits { memory: Bytes::mib(64), ..Limits::default() }, &[PYTHON, "-c", program]);
    ended(&report, Outcome::Oom, Limit::Memory);
    assert!(report.wall < Duration::from_secs(15), "the parent was not ended: {:?}", report.wall);
}

#[test]
fn every_limit_of_the_report_is_the_kernels_own() {
    let report = run(Cell::builder().command(["sh", "-c", "ulimit -n; ulimit -c; ulimit -u"]));
    let lines: Vec<String> = report.stdout.text().lines().map(str::to_owned).collect();
    assert_eq!(lines[0], "1024");
    // In blocks of 512 bytes, one byte is none.
    assert_eq!(lines[1], "0");
}
