//! B: processes, descriptors, executables.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::process::Stdio;

use hotcell_base::Outcome;
use hotcell_cell::{Builder, Mode, MountRequest, Wall};

use super::bench::{Bench, Tries, omit};
use super::verdict::{Attempt, Verdict, judge, other, probe, rule, skip};

const OUTSIDE: &[Wall] = &[Wall::Root, Wall::Id, Wall::Caps, Wall::Groups];

pub(super) fn attempts() -> Vec<Attempt> {
    vec![
        other("B1", "write into the program that builds the walls", first_process),
        probe(
            "B1.program",
            "overwrite a program of the host's",
            "write",
            |bench| vec![bench.path("tools/tool").into()],
            OUTSIDE,
        )
        .shape(with_a_tool),
        other("B2", "use descriptors the supervisor left open", descriptors),
        rule("B3", "trace or read another process", "child", |_| vec!["".into()], "other processes"),
        probe(
            "B5",
            "signal the supervisor",
            "signal",
            supervisor,
            &[Wall::Pid, Wall::LandlockScope, Wall::Id, Wall::Caps, Wall::Groups],
        ),
        probe("B5.pid", "signal the supervisor, past the scope fence", "signal", supervisor, &[Wall::Pid]).open(&[
            Wall::LandlockScope,
            Wall::Id,
            Wall::Caps,
            Wall::Groups,
        ]),
        probe(
            "B5.scope",
            "signal the supervisor, from its own pid namespace",
            "signal",
            supervisor,
            &[Wall::LandlockScope],
        )
        .open(&[Wall::Pid, Wall::Id, Wall::Caps, Wall::Groups]),
        other("B6", "reach an abstract socket of the host", |bench| {
            abstract_socket(bench, &[], &[Wall::Net, Wall::LandlockScope])
        }),
        other("B6.net", "reach an abstract socket, past the scope fence", |bench| {
            abstract_socket(bench, &[Wall::LandlockScope], &[Wall::Net])
        }),
        other("B6.scope", "reach an abstract socket, from the host's network", |bench| {
            abstract_socket(bench, &[Wall::Net], &[Wall::LandlockScope])
        }),
        other("B6.path", "reach a socket file: docker, ssh-agent, D-Bus", socket_file),
        other("B8", "find secrets and loader settings in the environment", environment),
        other("B9", "read by way of another program: env, sh, find, a script", by_proxy),
        skip(
            "B11",
            "execute a file that was changed after it was checked",
            "no file is checked by its contents before it runs yet",
        ),
        rule("B12", "set the core limit by prlimit", "call", |_| vec!["set-core-limit".into()], "limits by prlimit"),
        rule("B12.set", "set the core limit by setrlimit", "call", |_| vec!["setrlimit-core".into()], "core limit"),
        other("B12.dump", "leave a core file in the workspace", core_file),
        other("B13", "gain an id by a set-id program", set_id_program),
        other("B14", "keep the supervisor's groups", groups),
    ]
}

fn first_process(bench: &Bench) -> Verdict {
    let inside = bench.tries(bench.whole(), "write", &["/proc/1/exe", "/proc/1/mem"]).map(|tries| tries.through());
    // The control: the memory of a process that is the guest's own, past both walls that let nobody write to /proc.
    both(inside, bench.tries(omit(bench.bare(), &[Wall::Root, Wall::Landlock]), "write", &["/proc/self/mem"]))
}

/// A program of the host's that the cell may use.
fn with_a_tool(bench: &Bench, builder: Builder) -> Builder {
    let tools = bench.dir("tools");
    let tool = tools.join("tool");
    let _made =
        fs::copy("/bin/true", &tool).and_then(|_| fs::set_permissions(&tool, fs::Permissions::from_mode(0o755)));
    builder.mount(MountRequest { source: tools.clone(), target: tools, writable: false })
}

fn supervisor(_: &Bench) -> Vec<OsString> {
    vec![std::process::id().to_string().into()]
}

fn descriptors(bench: &Bench) -> Verdict {
    let inside = match bench.tries(bench.whole(), "fds", &[""]) {
        Ok(tries) => tries.through(),
        Err(why) => return Verdict::Void(why),
    };
    // The control: the probe itself, with files of the host's as its streams.
    let input = match fs::File::open(bench.secret()) {
        Ok(file) => file,
        Err(error) => return Verdict::Void(error.to_string()),
    };
    let output = match bench.outside("fds", &[""]).stdin(input).stdout(Stdio::piped()).output() {
        Ok(output) => output,
        Err(error) => return Verdict::Void(error.to_string()),
    };
    match Tries::of(&output.stdout) {
        Err(why) => Verdict::Void(why),
        Ok(outside) => {
            let live = outside.through().is_some();
            Verdict::of(inside.is_none(), inside.unwrap_or_default(), live, "a file as a stream is not noticed")
        }
    }
}

fn abstract_socket(bench: &Bench, open: &[Wall], missing: &[Wall]) -> Verdict {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::SocketAddr;
    let name = format!("hotcell-selftest-{}", std::process::id());
    let listener = SocketAddr::from_abstract_name(&name).and_then(|address| UnixListener::bind_addr(&address));
    let _listener = match listener {
        Ok(listener) => listener,
        Err(error) => return Verdict::Void(error.to_string()),
    };
    let args = [format!("@{name}")];
    // Not there is how it must look from another network namespace.
    both(
        bench.tries(omit(bench.whole(), open), "unix", &args).map(not_there),
        bench.tries(omit(bench.bare(), &[open, missing].concat()), "unix", &args),
    )
}

/// A refused connection means that nobody listens under this name here.
fn not_there(tries: Tries) -> Option<String> {
    const ECONNREFUSED: i64 = 111;
    tries.through_but(ECONNREFUSED)
}

fn both(inside: Result<Option<String>, String>, control: Result<Tries, String>) -> Verdict {
    judge(inside, control, |through, control| {
        let refused = control.not_done();
        Verdict::of(through.is_none(), through.unwrap_or_default(), refused.is_none(), refused.unwrap_or_default())
    })
}

fn socket_file(bench: &Bench) -> Verdict {
    let path = bench.dir("sockets").join("socket");
    let listener = UnixListener::bind(&path).and_then(|listener| {
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666))?;
        Ok(listener)
    });
    let _listener = match listener {
        Ok(listener) => listener,
        Err(error) => return Verdict::Void(error.to_string()),
    };
    let inside = bench.tries(bench.whole(), "unix", &[&path]).map(|tries| tries.through());
    both(inside, bench.tries(omit(bench.bare(), &[Wall::Root]), "unix", &[&path]))
}

fn environment(bench: &Bench) -> Verdict {
    let names = [
        "AWS_SECRET_ACCESS_KEY",
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "PYTHONPATH",
        "GIT_DIR",
        "BASH_ENV",
        "SSH_AUTH_SOCK",
    ];
    let mut host = bench.host.clone();
    host.env.extend(names.map(|name| (name.into(), "/nowhere".into())));
    let run = |builder: Builder| {
        let plan = builder.command(bench.probe_argv("env", &names)).plan(&host).map_err(|error| error.to_string())?;
        let report = plan.run().map_err(|error| error.to_string())?;
        Tries::of(&report.stdout.kept)
    };
    let asked = names.iter().fold(bench.bare(), |builder, name| builder.env(name, None));
    both(run(bench.whole()).map(|tries| tries.through()), run(asked))
}

fn by_proxy(bench: &Bench) -> Verdict {
    let secret = bench.secret();
    let script = bench.dir("scripts").join("script");
    let made = fs::write(&script, format!("#!/bin/cat {}\n", secret.display()))
        .and_then(|()| fs::set_permissions(&script, fs::Permissions::from_mode(0o755)));
    if let Err(error) = made {
        return Verdict::Void(error.to_string());
    }
    let secret = secret.display();
    let ways = [
        format!("env cat {secret}"),
        format!("sh -c 'cat {secret}'"),
        format!("(exec -a innocent cat {secret}) 2>/dev/null || cat {secret}"),
        format!("find {secret} -exec cat {{}} +"),
        format!("ln -s /bin/cat not-cat; ./not-cat {secret}"),
        format!("cp /bin/cat copy; ./copy {secret}"),
        format!("/lib64/ld-linux-x86-64.so.2 /bin/cat {secret} 2>/dev/null || cat {secret}"),
        script.display().to_string(),
    ];
    let read = |builder: Builder, way: &String| {
        bench.run(builder.command(["sh", "-c", way])).map(|report| report.stdout.text().contains("selftest"))
    };
    for way in &ways {
        match read(bench.whole(), way) {
            Err(why) => return Verdict::Void(why),
            Ok(true) => return Verdict::Escaped(format!("got through: {way}")),
            Ok(false) => {}
        }
        match read(omit(bench.bare(), &[Wall::Root]), way) {
            Err(why) => return Verdict::Void(why),
            Ok(false) => return Verdict::Void(format!("does not read anything without the wall either: {way}")),
            Ok(true) => {}
        }
    }
    Verdict::Held
}

fn core_file(bench: &Bench) -> Verdict {
    let pattern = fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap_or_default();
    if pattern.trim() != "core" || rustix::process::getrlimit(rustix::process::Resource::Core).maximum.is_some() {
        return Verdict::Skipped("this machine writes no core files to the working directory".to_owned());
    }
    let dumps = |builder: Builder| {
        let work = bench.dir("work");
        let report = bench.run(builder.workspace(&work, Mode::Rw).command(bench.probe_argv("core", &[""])))?;
        if report.outcome != Outcome::Signaled {
            return Err(format!("the probe did not crash: {}", report.outcome));
        }
        let files = fs::read_dir(&work).into_iter().flatten().flatten();
        Ok(files.map(|file| file.file_name()).any(|name| name.to_string_lossy().starts_with("core")))
    };
    let loose = omit(bench.bare(), &[Wall::Seccomp, Wall::Rlimits]);
    judge(dumps(bench.whole()), dumps(loose), |inside, control| {
        Verdict::of(!inside, "a core file was left", control, "no core file without the walls")
    })
}

fn set_id_program(bench: &Bench) -> Verdict {
    if !bench.is_root() {
        return Verdict::Skipped("only root can make a set-id program of another user's".to_owned());
    }
    // Nobody's and not root's: it shows the wall as well, and is worth nothing to whoever finds it meanwhile.
    const NOBODY: u32 = 65534;
    let work = bench.dir("work");
    let program = work.join("setid");
    let made = fs::copy(bench.probe(), &program)
        .and_then(|_| std::os::unix::fs::chown(&program, Some(NOBODY), Some(NOBODY)))
        .and_then(|()| fs::set_permissions(&program, fs::Permissions::from_mode(0o6755)));
    if let Err(error) = made {
        return Verdict::Void(error.to_string());
    }
    let id = NOBODY.to_string();
    let becomes_nobody = |builder: Builder| {
        let argv = [program.as_os_str(), "probe".as_ref(), "user".as_ref(), id.as_ref()];
        let report = bench.run(builder.workspace(&work, Mode::Ro).command(argv))?;
        Tries::of(&report.stdout.kept).map(|tries| tries.through().is_some())
    };
    // The control: no private root, whose mounts are without set-id, and no promise of no new privileges; the fences
    // that need that promise go with it.
    let walls = [
        Wall::Root,
        Wall::NoNewPrivs,
        Wall::Seccomp,
        Wall::Landlock,
        Wall::LandlockTcp,
        Wall::LandlockScope,
        Wall::Caps,
    ];
    let verdict =
        judge(becomes_nobody(bench.whole()), becomes_nobody(omit(bench.bare(), &walls)), |inside, control| {
            Verdict::of(!inside, "it ran as its owner", control, "it does not run as its owner without the walls")
        });
    let removed = fs::remove_file(&program);
    if removed.is_err() { Verdict::Void("the set-id program could not be removed".to_owned()) } else { verdict }
}

fn groups(bench: &Bench) -> Verdict {
    if !bench.is_root() {
        return Verdict::Skipped("only root can be given groups to leave".to_owned());
    }
    // For this thread alone, and for what it starts.
    let in_groups = |builder: Builder| {
        std::thread::scope(|scope| {
            let run = scope.spawn(|| {
                let groups = [4, 27].map(rustix::process::Gid::from_raw);
                rustix::thread::set_thread_groups(&groups).map_err(|errno| errno.to_string())?;
                bench.tries(builder, "groups", &[""])
            });
            run.join().unwrap_or_else(|_| Err("the thread failed".to_owned()))
        })
    };
    let inside = in_groups(bench.whole()).map(|tries| tries.through());
    both(inside, in_groups(omit(bench.bare(), &[Wall::Groups])))
}
