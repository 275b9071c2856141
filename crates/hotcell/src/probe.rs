//! `hotcell probe`: one attempt to get out, as a guest would make it.
//!
//! Every try says what the kernel answered: `done` it succeeded, `reached` the kernel looked at the
//! arguments and did not like them, `refused` a wall was in the way.

use std::ffi::{OsStr, OsString};
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs, UdpSocket};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use hotcell_base::text::shown;
use hotcell_sys::attempt;
use rustix::io::Errno;
use serde_json::{Value, json};

use crate::cli::ProbeArgs;
use crate::error::Failure;
use crate::screen;

/// Makes the attempt and prints what happened.
pub(crate) fn probe(args: &ProbeArgs) -> Result<u8, Failure> {
    // Outside a cell, some of these would change this very machine's mounts.
    if std::env::var_os(MARK).is_none() {
        return Err(Failure::Refused {
            message: "the probe is for the escape tests and runs in cells".to_owned(),
            hint: "see what this machine can do: hotcell doctor".to_owned(),
        });
    }
    if args.attempt == FROM_TEMPLATE {
        let request = go_on().map_err(|source| Failure::Io {
            message: "there is nothing to go on with".to_owned(),
            hint: None,
            source,
        })?;
        return probe(&request);
    }
    let texts: Vec<String> = args.args.iter().map(|argument| argument.to_string_lossy().into_owned()).collect();
    let tries: Vec<Value> = match args.attempt.as_str() {
        // One wrong name and nothing is tried: a test must not pass on fewer tries than it lists.
        "call" if texts.iter().all(|name| attempt::names().any(|known| known == name)) => {
            texts.iter().filter_map(|name| Some(tried(name, attempt::call(name)?))).collect()
        }
        "read" => args.args.iter().map(|path| tried(path, read(path))).collect(),
        "write" => args.args.iter().map(|path| tried(path, write(path))).collect(),
        "child" => match attempt::reach_into_child() {
            Ok(tries) => tries.into_iter().map(|(name, answer)| tried(name, answer)).collect(),
            Err(error) => vec![tried("fork", Err::<(), _>(error))],
        },
        "signal" => texts.iter().map(|pid| tried(pid, attempt::kill(pid.parse().unwrap_or(i32::MAX), 0))).collect(),
        "tcp" => texts.iter().map(|address| tried(address, tcp(address))).collect(),
        "udp" => texts.iter().map(|address| tried(address, udp(address))).collect(),
        "socket" => texts.iter().map(|text| tried_socket(text, attempt::socket)).collect(),
        "env" => args.args.iter().map(|name| tried(name, present(std::env::var_os(name).is_some()))).collect(),
        "caps" => status_sets(&texts),
        "fds" => descriptors(),
        "leaks" => descriptors().into_iter().take(1).collect(),
        "open" => args.args.iter().map(|path| tried(path, fs::File::open(path))).collect(),
        "resolve" => texts.iter().map(|address| tried(address, resolve(address))).collect(),
        "unix" => args.args.iter().map(|name| tried(name, unix(name))).collect(),
        "socketpair" => texts.iter().map(|text| tried_socket(text, attempt::socketpair)).collect(),
        "namespace" => texts.iter().map(|text| tried(text, present(is_namespace(text)))).collect(),
        "parent" => vec![tried("a parent outside", present(parent() > 1))],
        "session" => vec![tried("a session of somebody else's", present(attempt::session() == 0))],
        "user" => texts
            .iter()
            .map(|uid| tried(uid, present(uid.parse() == Ok(rustix::process::geteuid().as_raw()))))
            .collect(),
        "privileges" => vec![tried("new privileges", present(status("NoNewPrivs") == "0"))],
        "groups" => vec![tried("a group", present(!status("Groups").is_empty()))],
        "host-name" => texts.iter().map(|name| tried(name, present(host_name() == *name))).collect(),
        "link" => match &args.args[..] {
            [from, to] => vec![tried(to, fs::hard_link(from, to))],
            _ => Vec::new(),
        },
        "change" => args.args.iter().flat_map(change).collect(),
        "core" => attempt::dump_core(),
        _ => match act(&args.attempt, &texts) {
            Some(Ok(())) => return Ok(0),
            Some(Err(_)) => return Ok(1),
            None => Vec::new(),
        },
    };
    if tries.is_empty() {
        return Err(Failure::Usage {
            message: format!("there is no attempt `{}` with these arguments", args.attempt),
            hint: format!("the calls are: {}", attempt::names().collect::<Vec<_>>().join(", ")),
        });
    }
    let object = json!({ "attempt": args.attempt, "uid": rustix::process::geteuid().as_raw(), "tries": tries });
    let printed = screen::data(&format!("{object}\n"));
    Ok(u8::from(printed.is_err()))
}

/// The variable that says that somebody knows what they do.
const MARK: &str = "HOTCELL_PROBE";

/// What a wall answers with, as opposed to a kernel that has looked at the arguments.
const REFUSALS: &[Errno] = &[
    Errno::PERM,
    Errno::ACCESS,
    Errno::NOSYS,
    Errno::NOENT,
    Errno::SRCH,
    Errno::ROFS,
    Errno::NETUNREACH,
    Errno::ADDRNOTAVAIL,
    Errno::AFNOSUPPORT,
    Errno::PROTONOSUPPORT,
    // A link across two mounts, which are never one for a guest.
    Errno::XDEV,
];
/// Of these, a call by its number means only the first three: it names things that do not exist.
const CALL_REFUSALS: usize = 3;

fn tried<T>(name: impl AsRef<OsStr>, answer: io::Result<T>) -> Value {
    let name = shown(name.as_ref().as_bytes());
    let Err(error) = answer else { return json!({ "try": name, "result": "done", "errno": 0 }) };
    let errno = error.raw_os_error().unwrap_or(0);
    let is_call = attempt::names().any(|call| call == name);
    let refusals = if is_call { &REFUSALS[..CALL_REFUSALS] } else { REFUSALS };
    let refused = refusals.iter().any(|refusal| refusal.raw_os_error() == errno);
    json!({ "try": name, "result": if refused { "refused" } else { "reached" }, "errno": errno })
}

fn absent() -> io::Error {
    Errno::NOENT.into()
}

fn present(is: bool) -> io::Result<()> {
    if is { Ok(()) } else { Err(absent()) }
}

/// Reads a byte; an empty answer means the file is covered.
fn read(path: &OsStr) -> io::Result<()> {
    let mut file = OpenOptions::new().read(true).custom_flags(NONBLOCK).open(path)?;
    let mut byte = [0u8; 1];
    match file.read(&mut byte) {
        Ok(1) => Ok(()),
        Ok(_) => Err(absent()),
        // Opened is enough: a directory or device does not read like a file.
        Err(_) => Ok(()),
    }
}

const NONBLOCK: i32 = 0o4000;

/// Opens for writing and writes nothing.
fn write(path: &OsStr) -> io::Result<()> {
    OpenOptions::new().append(true).custom_flags(NONBLOCK).open(path).map(drop)
}

fn address(text: &str) -> io::Result<SocketAddr> {
    text.parse().map_err(|_| io::Error::from(Errno::INVAL))
}

fn tcp(text: &str) -> io::Result<()> {
    TcpStream::connect_timeout(&address(text)?, Duration::from_secs(2)).map(drop)
}

fn udp(text: &str) -> io::Result<()> {
    let to = address(text)?;
    let from = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    UdpSocket::bind(from)?.send_to(b"x", to).map(drop)
}

/// A socket by `name=family,type,protocol`.
fn tried_socket(text: &str, make: fn(i32, i32, i32) -> io::Result<i64>) -> Value {
    let (name, numbers) = text.split_once('=').unwrap_or(("", text));
    let numbers: Vec<i32> = numbers.split(',').filter_map(|number| number.parse().ok()).collect();
    match numbers[..] {
        [family, kind, protocol] => tried(name, make(family, kind, protocol)),
        _ => tried::<i64>(text, Err(Errno::INVAL.into())),
    }
}

/// Capability sets: `done` if there is one in the set.
fn status_sets(names: &[String]) -> Vec<Value> {
    let is_empty = |name: &str| u64::from_str_radix(&status(name), 16) == Ok(0);
    names.iter().map(|name| tried(name, present(!is_empty(name)))).collect()
}

/// Descriptors other than the first three and the one that lists them; and whether the three are pipes.
fn descriptors() -> Vec<Value> {
    let mut tries = Vec::new();
    let listed: Vec<OsString> =
        fs::read_dir("/proc/self/fd").into_iter().flatten().flatten().map(|fd| fd.file_name()).collect();
    let leaked = listed.iter().filter(|fd| {
        let target = fs::read_link(Path::new("/proc/self/fd").join(fd));
        let own_listing =
            target.as_ref().is_ok_and(|target| target.as_os_str().as_bytes().ends_with(b"/fd")) || target.is_err();
        !["0", "1", "2"].iter().any(|stream| fd == stream) && !own_listing
    });
    tries.push(tried("a descriptor above 2", present(leaked.count() > 0)));
    for fd in ["0", "1", "2"] {
        let target = fs::read_link(format!("/proc/self/fd/{fd}")).unwrap_or_default();
        let is_pipe = target.as_os_str().as_bytes().starts_with(b"pipe:");
        tries.push(tried(format!("{fd} is a file of the host"), present(!is_pipe)));
    }
    tries
}

/// A line of this process's status.
fn status(field: &str) -> String {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let value = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    value.unwrap_or_default().trim().to_owned()
}

fn parent() -> i32 {
    rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get())
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// `net:[4026531840]`: whether this process is in that namespace.
fn is_namespace(text: &str) -> bool {
    let kind = text.split(':').next().unwrap_or_default();
    fs::read_link(format!("/proc/self/ns/{kind}")).is_ok_and(|own| own.as_os_str() == text)
}

/// An address in any of the ways people write one.
fn resolve(text: &str) -> io::Result<()> {
    let mut error = absent();
    for address in text.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, Duration::from_secs(2)) {
            Ok(_) => return Ok(()),
            Err(refused) => error = refused,
        }
    }
    Err(error)
}

/// A unix socket by its path, or abstract with an `@`.
fn unix(name: &OsStr) -> io::Result<()> {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixStream};
    let address = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(name)?,
    };
    UnixStream::connect_addr(&address).map(drop)
}

/// Every way to change what is at a path but opening it.
fn change(path: &OsString) -> Vec<Value> {
    let path = Path::new(path);
    let beside = |what: &str| path.with_extension(what);
    vec![
        tried("chmod", fs::set_permissions(path, fs::Permissions::from_mode(0o640))),
        tried("link", fs::hard_link(path, beside("link"))),
        tried("symlink", std::os::unix::fs::symlink("x", beside("symlink"))),
        tried("mkdir", fs::create_dir(beside("dir"))),
        tried("truncate", OpenOptions::new().write(true).truncate(true).open(path)),
        tried("rename", fs::rename(path, beside("renamed"))),
        tried("unlink", fs::remove_file(beside("renamed"))),
    ]
}

/// What uses resources rather than trying a door: done, or an error.
fn act(name: &str, args: &[String]) -> Option<io::Result<()>> {
    let number = |at: usize| args.get(at).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
    let text = |at: usize| args.get(at).cloned().unwrap_or_default();
    Some(match name {
        "allocate" => allocate(number(0)),
        "forks" => (0..number(0)).try_for_each(|_| attempt::fork_a_sleeper(Duration::from_millis(300))),
        "hogs" => hogs(number(0), number(1)),
        "threads" => threads(number(0)),
        "descriptors" => (0..number(0)).map(|_| fs::File::open("/dev/null")).collect::<io::Result<Vec<_>>>().map(drop),
        "fill" => fill(&text(0), number(1), number(2)),
        "files" => (0..number(1)).try_for_each(|idx| fs::write(format!("{}/{idx}", text(0)), "")),
        "grow" => fs::File::create(text(0)).and_then(|file| file.set_len(number(1))),
        "append" => OpenOptions::new().append(true).open(text(0)).and_then(|mut file| file.write_all(b"more\n")),
        "flood" => flood(number(0)),
        "spin" => spin(number(0)),
        "sleep" => {
            std::thread::sleep(Duration::from_millis(number(0)));
            Ok(())
        }
        "daemon" => attempt::leave_a_daemon(),
        "swap" => swap(&text(0), &text(1), number(2)),
        _ => return None,
    })
}

/// The attempt that another attempt takes the place of, in a process that went on from this one.
pub(crate) const FROM_TEMPLATE: &str = "from-template";

/// Stops, and reads what to attempt when it goes on.
fn go_on() -> io::Result<ProbeArgs> {
    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::STOP)?;
    let mut request = Vec::new();
    hotcell_sys::snapshot::request().read_to_end(&mut request)?;
    // A seed, a number of words, and the words, of which the first two are the program and this command.
    let mut words = request.split(|byte| *byte == 0).map(|word| OsStr::from_bytes(word).to_owned());
    let number = |word: Option<OsString>| word.and_then(|word| word.to_str()?.parse::<usize>().ok()).unwrap_or(0);
    let (_seed, count) = (words.next(), number(words.next()));
    let mut words = words.take(count).skip(2);
    let attempt = words.next().map(|word| word.to_string_lossy().into_owned()).unwrap_or_default();
    Ok(ProbeArgs { attempt, args: words.collect() })
}

fn allocate(mib: u64) -> io::Result<()> {
    let len = usize::try_from(mib << 20).map_err(io::Error::other)?;
    // Other than zero, so that every page is really there.
    let memory = vec![1u8; len];
    std::thread::sleep(Duration::from_millis(300));
    std::hint::black_box(&memory);
    Ok(())
}

/// Children that each hold some memory.
fn hogs(n: u64, mib: u64) -> io::Result<()> {
    let hogs: Vec<_> = (0..n)
        .map(|_| {
            // By name: a process that went on from a template executes nothing.
            let program = std::env::args_os().next().unwrap_or_default();
            let mut hog = std::process::Command::new(program);
            hog.args(["probe", "allocate", &mib.to_string()]).spawn()
        })
        .collect::<io::Result<_>>()?;
    hogs.into_iter().try_for_each(|mut hog| match hog.wait() {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err(io::Error::other("a child was ended")),
        Err(error) => Err(error),
    })
}

fn threads(n: u64) -> io::Result<()> {
    let sleep = || std::thread::sleep(Duration::from_millis(300));
    let made: Vec<io::Result<_>> = (0..n).map(|_| std::thread::Builder::new().spawn(sleep)).collect();
    // Those that were made are waited for, whatever became of the others.
    let mut all = Ok(());
    for thread in made {
        match thread {
            Ok(thread) => all = all.and(thread.join().map_err(|_| io::Error::other("a thread failed"))),
            Err(error) => all = Err(error),
        }
    }
    all
}

/// Files of a mebibyte each, slowly enough to be seen.
fn fill(directory: &str, n_files: u64, pause_ms: u64) -> io::Result<()> {
    let block = vec![7u8; 1 << 20];
    (0..n_files).try_for_each(|idx| {
        std::thread::sleep(Duration::from_millis(pause_ms));
        fs::write(format!("{directory}/{idx}"), &block)
    })
}

fn flood(mib: u64) -> io::Result<()> {
    let block = vec![b'x'; 1 << 19];
    for _ in 0..mib {
        io::stdout().write_all(&block)?;
        io::stderr().write_all(&block)?;
    }
    Ok(())
}

fn spin(ms: u64) -> io::Result<()> {
    let end = Instant::now() + Duration::from_millis(ms);
    let spinners: Vec<_> = (0..2).map(|_| std::thread::spawn(move || while Instant::now() < end {})).collect();
    spinners.into_iter().try_for_each(|spinner| spinner.join().map_err(|_| io::Error::other("a thread failed")))
}

/// Makes a name a directory and a link by turns, as fast as it can.
fn swap(name: &str, target: &str, n: u64) -> io::Result<()> {
    for _ in 0..n {
        fs::create_dir(name)?;
        fs::remove_dir(name)?;
        std::os::unix::fs::symlink(target, name)?;
        fs::remove_file(name)?;
    }
    Ok(())
}
