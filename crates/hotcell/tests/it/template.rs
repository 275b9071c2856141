//! Templates: runs that go on from a loaded program are runs like any other, and know nothing of each other.

use std::sync::Arc;
use std::time::Duration;

use hotcell_base::{Bytes, Outcome};
use hotcell_cell::pool::{Ahead, Pool};
use hotcell_cell::template::{self, Template};
use hotcell_cell::{Cell, Limits, Mode, Report};

use crate::support::*;

const PYTHON: &str = "/usr/bin/python3";

fn warm(imports: &[&str]) -> Arc<Template> {
    let imports: Vec<String> = imports.iter().map(|name| (*name).to_owned()).collect();
    let plan = plan_on(&host(), template::python(Cell::builder(), PYTHON, &imports)).expect("a plan");
    let memory = tempfile::tempfile().expect("a file");
    Arc::new(
        Template::warm(&plan, memory, template::PYTHON_TRIAL).unwrap_or_else(|error| panic!("{error}: {:?}", error)),
    )
}

fn run_from(template: &Arc<Template>, seed: u64, argv: &[&str]) -> Report {
    let words = [PYTHON].iter().chain(argv).map(|word| (*word).to_owned());
    let plan = plan_on(&host(), Cell::builder().command(words)).expect("a plan");
    plan.from_template(Arc::clone(template), seed).run().unwrap_or_else(|error| panic!("{error}: {:?}", error))
}

/// The same program, by the interpreter itself and from a template.
fn both(template: &Arc<Template>, argv: &[&str]) -> [Report; 2] {
    let words = [PYTHON].iter().chain(argv).map(|word| (*word).to_owned());
    [run_on(&host(), Cell::builder().command(words)), run_from(template, 7, argv)]
}

#[test]
fn a_run_from_a_template_does_what_python_does() {
    let template = warm(&["json"]);
    for argv in [
        &["-c", "import sys, json; print(json.dumps(sys.argv)); sys.exit(3)", "a", "b"][..],
        &["-c", "print(sorted(__import__('os').environ.items())); print(__name__, __import__('os').getcwd())"],
        &["-c", "import sys; print(sys.path[0] == '', sys.flags.interactive); sys.stdout.write('no newline')"],
        &["-c", "def f():\n  raise ValueError('bad')\nf()"],
        &["-c", "import sys; sys.exit('said so')"],
        &["-c", "syntax error here"],
        &["-c", "raise SystemExit"],
        &["-c", "import sys; sys.exit(-1)"],
        &["-c", "raise KeyboardInterrupt"],
        &["-c", "import atexit; atexit.register(print, 'handler'); print('body')"],
        &[
            "-c",
            "f = open('/tmp/f', 'w'); f.write('kept'); import atexit; atexit.register(lambda: print(open('/tmp/f').read() or 'not yet'))",
        ],
        &["-c", "import threading, time; threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()"],
        &[
            "-c",
            "import subprocess, sys; print(subprocess.run([sys.executable, '-c', 'print(6 * 7)'], capture_output=True, text=True).stdout)",
        ],
        &["-c", "import multiprocessing as m\nwith m.Pool(2) as p: print(p.map(abs, [-1, -2, 3]))"],
        &["-c", "x = [bytearray(1 << 20) for _ in range(50)]; print(len(x)); print(sum(range(10 ** 6)))"],
        &["-c", "import sys; sys.setrecursionlimit(10 ** 5)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(20000))"],
        &[
            "-c",
            "import re, decimal, hashlib, sqlite3, zlib; print(sqlite3.connect(':memory:').execute('select 1').fetchall())",
        ],
        &["-c", "import os; os.kill(os.getpid(), 9)"],
        &["-c", "import os; os.abort()"],
        &["-m", "json.tool", "/nonexistent"],
        &["-m", "no_such_module"],
        &["/no/such/script.py"],
    ] {
        let [plain, restored] = both(&template, argv);
        let said = |report: &Report| (report.outcome, report.exit_code, report.signal, report.stdout.text());
        assert_eq!(said(&restored), said(&plain), "{argv:?}: {}", restored.stderr.text());
        // How the interpreter is named in a message is the only thing that may differ.
        let stderr = |report: &Report| report.stderr.text().replace("<module>", "").replace(PYTHON, "python3");
        if !argv.contains(&"-m") {
            assert_eq!(stderr(&restored), stderr(&plain), "{argv:?}");
        }
    }
}

#[test]
fn scripts_and_modules_of_a_workspace_are_found() {
    let bench = Bench::new();
    let work = bench.dir("work");
    bench.file("work/helper.py", "value = 41\n");
    bench.file("work/sub/script.py", "import sys; print(sys.argv, __name__, __file__, sys.path[0])\n");
    bench.file("work/main.py", "import helper; print(helper.value + 1)\n");
    let template = warm(&[]);
    for argv in
        [&["main.py"][..], &["sub/script.py", "x"], &["-m", "main"], &["-c", "import helper; print(helper.value)"]]
    {
        let words = || [PYTHON].iter().chain(argv).map(|word| (*word).to_owned());
        let builder = || Cell::builder().workspace(&work, Mode::Cow).command(words());
        let plain = run_on(&host(), builder());
        let plan = plan_on(&host(), builder()).expect("a plan");
        let restored = plan.from_template(Arc::clone(&template), 0).run().expect("a run");
        assert_eq!(restored.stdout.text(), plain.stdout.text(), "{argv:?}: {}", restored.stderr.text());
        assert_eq!(restored.exit_code, Some(0));
    }
}

#[test]
fn no_run_sees_what_another_did() {
    let template = warm(&["json", "os"]);
    let script = "import os, json, sys, builtins\n\
                  print(os.listdir('/tmp'), hasattr(json, 'left'), hasattr(builtins, 'left'), os.environ.get('LEFT'), \
                  len(sys.modules), [p for p in os.listdir('/proc') if p.isdigit()], os.getpid())\n\
                  json.left = builtins.left = 1; os.environ['LEFT'] = '1'; open('/tmp/left', 'w').write('x')\n\
                  json.dumps = None; sys.path.append('left'); os.umask(0)";
    let plan = plan_on(&host(), Cell::builder().command([PYTHON, "-c", script])).expect("a plan");
    let pool = Pool::open(plan.from_template(template, 0), 2, Ahead::Cell).expect("a pool");
    let said: Vec<String> = (0..8)
        .map(|_| {
            let report = pool.run().expect("a run");
            assert_eq!(report.exit_code, Some(0), "{}", report.stderr.text());
            report.stdout.text()
        })
        .collect();
    assert!(said.iter().all(|one| *one == said[0]), "{said:#?}");
    assert!(said[0].starts_with("[] False False None "), "{}", said[0]);
    assert!(said[0].contains("['1', '2'] 2"), "{}", said[0]);
}

#[test]
fn what_is_random_is_each_runs_own_and_a_seed_repeats_it() {
    let template = warm(&["random", "ssl", "tempfile", "uuid", "multiprocessing"]);
    let draw = |seed: u64| {
        let script = "import random, os, ssl, tempfile, uuid, multiprocessing; print(random.random()); \
                      key = bytes(multiprocessing.current_process().authkey).hex(); \
                      print(os.urandom(8).hex(), ssl.RAND_bytes(8).hex(), tempfile.mktemp(), uuid.uuid4(), key)";
        let report = run_from(&template, seed, &["-c", script]);
        assert_eq!(report.exit_code, Some(0), "{}", report.stderr.text());
        let text = report.stdout.text();
        let (seeded, rest) = text.split_once('\n').expect("two lines");
        (seeded.to_owned(), rest.to_owned())
    };
    let (first, again, other) = (draw(1), draw(1), draw(2));
    assert_eq!(first.0, again.0, "a seed repeats");
    assert_ne!(first.0, other.0, "another does not");
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    for (a, b) in words(&first.1).iter().zip(&words(&again.1)) {
        assert_ne!(a, b, "what is not seeded does not repeat");
    }
}

#[test]
fn the_walls_and_limits_of_a_restored_process_are_those_of_any() {
    let template = warm(&[]);
    let script = "import os, socket, ctypes\n\
        def tries(what):\n    try: what(); return 'did'\n    except BaseException as error: return type(error).__name__\n\
        status = {line.split(':')[0]: line.split(':')[1].split() for line in open('/proc/self/status')}\n\
        print({name: status[name] for name in ('NoNewPrivs', 'Seccomp', 'CapEff', 'CapPrm', 'CapBnd', 'Threads')})\n\
        print(tries(lambda: open('/.hotcell/file')), tries(lambda: open('/proc/self/oom_score_adj', 'w')), \
        tries(lambda: socket.create_connection(('192.0.2.1', 9), 1)), tries(lambda: os.mkdir('/x')), \
        tries(lambda: os.setuid(0)), ctypes.CDLL(None).unshare(0x10000000), sorted(os.listdir('/proc/self/fd')))\n\
        import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE), resource.getrlimit(resource.RLIMIT_CORE))\n\
        print(open('/proc/self/environ').read() is not None, open('/proc/self/comm').read())";
    let [plain, restored] = both(&template, &["-c", script]);
    assert_eq!(restored.exit_code, Some(0), "{}", restored.stderr.text());
    assert_eq!(restored.stdout.text(), plain.stdout.text());
    let limited = |limits: Limits, script: &str| {
        let plan = plan_on(&host(), Cell::builder().limits(limits).command([PYTHON, "-c", script])).expect("a plan");
        plan.from_template(Arc::clone(&template), 0).run().expect("a run").outcome
    };
    let memory = Limits { memory: Bytes::mib(64), ..Limits::default() };
    assert_eq!(limited(memory, "x = bytearray(200 << 20); import time; time.sleep(1)"), Outcome::Oom);
    let time = Limits { time: Duration::from_millis(300), ..Limits::default() };
    assert_eq!(limited(time, "while True: pass"), Outcome::Timeout);
    let pids = Limits { pids: 4, ..Limits::default() };
    let forks = "import os, time\nfor _ in range(10):\n  if os.fork() == 0: time.sleep(1); os._exit(0)";
    assert_eq!(limited(pids, forks), Outcome::Pids);
}

#[test]
fn what_cannot_be_carried_over_is_refused_by_name() {
    let refusal = |script: &str| {
        let stop = "\nimport os, signal; os.kill(os.getpid(), signal.SIGSTOP)";
        let plan =
            plan_on(&host(), Cell::builder().command([PYTHON, "-c", &format!("{script}{stop}")])).expect("a plan");
        let memory = tempfile::tempfile().expect("a file");
        let error = Template::warm(&plan, memory, &[]).err();
        error.map(|error| {
            format!("{error}: {}", std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default())
        })
    };
    // The control: nothing of the kind.
    assert_eq!(refusal("pass"), None);
    let said =
        refusal("import threading, time; threading.Thread(target=lambda: time.sleep(9)).start()").expect("refused");
    assert!(said.contains("2 threads"), "{said}");
    let said = refusal("f = open('/tmp/held', 'w')").expect("refused");
    assert!(said.contains("/tmp/held") && said.contains("descriptor 3"), "{said}");
    let said = refusal("import mmap; m = mmap.mmap(-1, 4096)").expect("refused");
    assert!(said.contains("shares memory"), "{said}");
    let said = refusal("import subprocess; p = subprocess.Popen(['sleep', '9'])").expect("refused");
    assert!(said.contains("started processes"), "{said}");
    // A guest that maps much does not fill the host's disk.
    let flags = "mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000";
    let said = refusal(&format!("import mmap; m = mmap.mmap(-1, 8 << 30, flags={flags})")).expect("refused");
    assert!(said.contains("1073741824 bytes"), "{said}");
    let said = refusal("import sys; print('no such module', file=sys.stderr); sys.exit(3)").expect("refused");
    assert!(said.contains("no such module"), "{said}");
}

/// A virtual environment of the interpreter's: where it is, and where its modules are.
fn virtual_environment(bench: &Bench) -> (String, String) {
    let version = "import sys; print('python%d.%d' % sys.version_info[:2])";
    let version = std::process::Command::new(PYTHON).args(["-c", version]).output().expect("Python runs");
    bench.file("venv/pyvenv.cfg", "home = /usr/bin\n");
    bench.dir("venv/bin");
    let program = bench.path("venv/bin/python");
    std::os::unix::fs::symlink(PYTHON, &program).expect("a link");
    (program.display().to_string(), format!("venv/lib/{}/site-packages", text(&version.stdout).trim()))
}

#[test]
fn the_program_keeps_templates_and_makes_them_anew_when_their_files_change() {
    let bench = Bench::new();
    let (program, modules) = virtual_environment(&bench);
    let helper = format!("{modules}/helper.py");
    bench.file(&helper, "value = 1\n");
    let run = |more: &[&str]| {
        let script = "import sys; print(sys.argv, 'helper' in sys.modules); import helper; print(helper.value)";
        let output = bench.output([&["run", "--template", &program], more, &["--", "-c", script, "x"]].concat());
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        (text(&output.stdout), text(&output.stderr).contains("is loaded"))
    };
    let import = ["--import", "helper"];
    assert_eq!(run(&import), ("['-c', 'x'] True\n1\n".to_owned(), true));
    assert_eq!(run(&import), ("['-c', 'x'] True\n1\n".to_owned(), false), "it is kept");
    assert_eq!(run(&[]), ("['-c', 'x'] False\n1\n".to_owned(), true), "another one");
    // The module changes, and with it the template; the other one did not load it.
    bench.file(&helper, "value = 2\n");
    assert_eq!(run(&import), ("['-c', 'x'] True\n2\n".to_owned(), true));
    assert!(!run(&import).1);
    assert_eq!(run(&[]), ("['-c', 'x'] False\n2\n".to_owned(), false));
    let templates = || -> Vec<std::path::PathBuf> {
        let entries = std::fs::read_dir(bench.path("home/templates")).expect("there").flatten();
        entries.map(|entry| entry.path()).collect()
    };
    assert_eq!(templates().len(), 2, "the stale one is gone");
    // One that was cut short is no template.
    for path in templates() {
        let memory = std::fs::File::options().write(true).open(path.join("memory")).expect("there");
        memory.set_len(4096).expect("cut");
    }
    assert_eq!(run(&import), ("['-c', 'x'] True\n2\n".to_owned(), true));
    // What was loaded is on record, as everything that runs.
    let list: serde_json::Value = serde_json::from_slice(&bench.output(["ls", "--json"]).stdout).expect("JSON");
    let kinds: Vec<&str> = list.as_array().expect("a list").iter().filter_map(|one| one["kind"].as_str()).collect();
    assert_eq!(kinds.iter().filter(|kind| **kind == "template").count(), 4, "{kinds:?}");
    let seeded = bench.output(["run", "--json", "--template", PYTHON, "--seed", "7", "--", "-c", "pass"]);
    let record: serde_json::Value = serde_json::from_slice(&seeded.stdout).expect("JSON");
    assert_eq!(record["template"]["seed"], 7);
    assert_eq!(record["template"]["sha256"].as_str().map(str::len), Some(64));
    // One that cannot be made says why, and leaves nothing.
    let n_kept = templates().len();
    let absent = bench.output(["run", "--template", PYTHON, "--import", "no_such_module", "--", "-c", "pass"]);
    assert_eq!(absent.status.code(), Some(125));
    let said = text(&absent.stderr);
    assert!(said.contains("no_such_module") && said.contains("hint:"), "{said}");
    assert_eq!(templates().len(), n_kept);
}

#[test]
fn a_template_has_no_secret_of_the_run_that_made_it_and_there_are_never_many() {
    let bench = Bench::new();
    let secret = "correct-horse-battery-staple";
    let script = "import os; print(os.environ['SECRET'])";
    let variable = format!("SECRET={secret}");
    let output = bench.output(["run", "-q", "--template", PYTHON, "-e", &variable, "--", "-c", script]);
    assert_eq!(text(&output.stdout).trim(), secret, "{}", text(&output.stderr));
    let place = bench.path("home/templates");
    let names = || -> Vec<String> {
        let entries = std::fs::read_dir(&place).expect("there").flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    };
    let [template] = &names()[..] else { panic!("one template") };
    let memory = std::fs::read(place.join(template).join("memory")).expect("there");
    let has = |word: &[u8]| memory.windows(word.len()).any(|window| window == word);
    assert!(has(b"HOME="), "VOID: nothing of the environment is found in it");
    assert!(!has(secret.as_bytes()), "a secret is kept");
    // Older ones make way.
    let boot = template.split_once('-').expect("a boot and a digest").0.to_owned();
    for number in 0..20 {
        bench.file(&format!("home/templates/{boot}-{number}/template.json"), "{}");
    }
    bench.file("home/templates/00000000-x/template.json", "{}");
    let output = bench.output(["run", "-q", "--template", PYTHON, "--import", "json", "--", "-c", "pass"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(names().len(), 16);
    assert!(names().iter().all(|name| name.starts_with(&boot)), "one of another boot is left");
}

#[test]
fn a_template_has_nothing_of_a_workspace_or_mount_and_its_runs_have_all_of_it() {
    let bench = Bench::new();
    bench.file("library/helper.py", "value = 1\n");
    let mount = format!("{}:/elsewhere:ro", bench.path("library").display());
    let words = ["run", "--template", PYTHON, "-e", "PYTHONPATH=/elsewhere", "--mount", &mount];
    let script = "import helper; print(helper.value)";
    let run = |more: &[&str]| bench.output([&words[..], more, &["--", "-c", script]].concat());
    assert_eq!(text(&run(&[]).stdout), "1\n");
    bench.file("library/helper.py", "value = 22\n");
    assert_eq!(text(&run(&[]).stdout), "22\n", "it is loaded by the run");
    let refused = run(&["--import", "helper"]);
    assert_eq!(refused.status.code(), Some(125));
    assert!(text(&refused.stderr).contains("nothing of a workspace or mount"), "{}", text(&refused.stderr));
}

#[test]
fn loading_a_template_has_the_limits_of_the_run_and_can_be_interrupted() {
    let bench = Bench::new();
    let (program, modules) = virtual_environment(&bench);
    bench.file(&format!("{modules}/slow.py"), "import time; time.sleep(1000)\n");
    let words = ["run", "--template", &program, "--import", "slow"];
    let late = bench.output([&words[..], &["--time", "500ms", "--", "-c", "pass"]].concat());
    assert_eq!(late.status.code(), Some(125));
    assert!(text(&late.stderr).contains("timeout"), "{}", text(&late.stderr));
    let mut child = bench.hotcell([&words[..], &["--", "-c", "pass"]].concat()).spawn().expect("started");
    let list = || text(&bench.output(["ls"]).stdout);
    eventually("it is at it", || list().contains("running"));
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).expect("ours");
    assert_eq!(child.wait().expect("ended").code(), Some(125));
    assert!(!list().contains("running"), "{}", list());
}
