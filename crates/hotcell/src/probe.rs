//! `hotcell probe`: one attempt to get out, as a guest would make it.
//!
//! Every try says what the kernel answered: `done` it succeeded, `reached` the kernel looked at the
//! arguments and did not like them, `refused` a wall was in the way.

use std::ffi::{OsStr, OsString};
use std::fs::{self, OpenOptions};
use std::io::{self, Read};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

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
        "socket" => texts.iter().map(|kind| tried(kind, socket(kind))).collect(),
        "env" => args.args.iter().map(|name| tried(name, present(std::env::var_os(name).is_some()))).collect(),
        "caps" => status_sets(&["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"]),
        "fds" => descriptors(),
        "core" => attempt::dump_core(),
        _ => Vec::new(),
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

/// `family,type,protocol`, as numbers.
fn socket(text: &str) -> io::Result<i64> {
    let numbers: Vec<i32> = text.split(',').filter_map(|number| number.parse().ok()).collect();
    match numbers[..] {
        [family, kind, protocol] => attempt::socket(family, kind, protocol),
        _ => Err(Errno::INVAL.into()),
    }
}

/// Capability sets: `done` if there is one in the set.
fn status_sets(names: &[&str]) -> Vec<Value> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let set = |name: &str| {
        let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        u64::from_str_radix(value.unwrap_or("").trim(), 16)
    };
    names.iter().map(|name| tried(name, present(set(name) != Ok(0)))).collect()
}

/// Descriptors other than the first three and the one that lists them; and whether the three are pipes.
fn descriptors() -> Vec<Value> {
    let mut tries = Vec::new();
    let listed: Vec<OsString> =
        fs::read_dir("/proc/self/fd").into_iter().flatten().flatten().map(|fd| fd.file_name()).collect();
    let leaked = listed.iter().filter(|fd| {
        let target = fs::read_link(std::path::Path::new("/proc/self/fd").join(fd));
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
