//! D: network, of which a cell has none.

use std::net::{TcpListener, UdpSocket};
use std::path::Path;

use hotcell_cell::{Builder, Wall};

use super::bench::{Bench, Tries, omit, words};
use super::verdict::{Attempt, Verdict, Who, judge, other, probe, rule};

const NETWORK: &[Wall] = &[Wall::Net, Wall::LandlockTcp];

pub(super) fn attempts() -> Vec<Attempt> {
    vec![
        other("D1", "connect to the host by tcp", |bench| tcp(bench, &[], NETWORK)),
        other("D1.net", "connect to the host by tcp, past the tcp fence", |bench| {
            tcp(bench, &[Wall::LandlockTcp], &[Wall::Net])
        }),
        other("D1.fence", "connect to the host by tcp, from its own network", |bench| {
            tcp(bench, &[Wall::Net], &[Wall::LandlockTcp])
        }),
        other("D1.udp", "send to the host by udp", udp),
        rule(
            "D1.family",
            "sockets of other families",
            "socket",
            |_| words(&["netlink=16,3,0", "alg=38,5,0", "vsock=40,1,0", "bluetooth=31,3,0"]),
            "socket families",
        ),
        rule(
            "D1.pairs",
            "pairs of sockets of other families",
            "socketpair",
            |_| words(&["inet=2,1,0"]),
            "socket pairs",
        ),
        probe(
            "D1.raw",
            "raw and packet sockets",
            "socket",
            |_| words(&["raw=2,3,1", "packet=17,3,0", "raw6=10,3,58"]),
            &[Wall::Seccomp],
        )
        .open(&[Wall::Id, Wall::Caps, Wall::Groups])
        .only(Who::Root),
        other("D2", "connect by a shell's own /dev/tcp", shell),
        other("D3", "reach this machine by odd addresses", odd_addresses),
    ]
}

fn compare(bench: &Bench, kind: &str, args: &[String], open: &[Wall], missing: &[Wall]) -> Verdict {
    let inside = bench.tries(omit(bench.whole(), open), kind, args).map(|tries| tries.through());
    let control = bench.tries(omit(bench.bare(), &[open, missing].concat()), kind, args);
    judge(inside, control.map(|tries: Tries| tries.not_done()), |through, failed| {
        Verdict::of(through.is_none(), through.unwrap_or_default(), failed.is_none(), failed.unwrap_or_default())
    })
}

fn tcp(bench: &Bench, open: &[Wall], missing: &[Wall]) -> Verdict {
    let listeners: Vec<TcpListener> =
        ["127.0.0.1:0", "[::1]:0"].iter().filter_map(|address| TcpListener::bind(address).ok()).collect();
    let addresses = listeners.iter().filter_map(|listener| listener.local_addr().ok());
    let mut addresses: Vec<String> = addresses.map(|address| address.to_string()).collect();
    if let Some(port) = addresses.first().and_then(|address| address.rsplit_once(':')).map(|(_, port)| port.to_owned())
    {
        addresses.push(format!("[::ffff:127.0.0.1]:{port}"));
    }
    if listeners.len() < 2 {
        // Without IPv6 there is no mapped address either.
        addresses.truncate(1);
    }
    compare(bench, "tcp", &addresses, open, missing)
}

fn udp(bench: &Bench) -> Verdict {
    match UdpSocket::bind("127.0.0.1:0").and_then(|socket| Ok((socket.local_addr()?, socket))) {
        Err(error) => Verdict::Void(error.to_string()),
        Ok((address, _socket)) => compare(bench, "udp", &[address.to_string()], &[], &[Wall::Net]),
    }
}

fn shell(bench: &Bench) -> Verdict {
    if !Path::new("/bin/bash").exists() {
        return Verdict::Skipped("there is no bash, whose /dev/tcp it is".to_owned());
    }
    let listener = match TcpListener::bind("127.0.0.1:0").and_then(|socket| Ok((socket.local_addr()?, socket))) {
        Ok(listener) => listener,
        Err(error) => return Verdict::Void(error.to_string()),
    };
    let script = format!("exec 3<>/dev/tcp/127.0.0.1/{}", listener.0.port());
    let knock =
        |builder: Builder| bench.run(builder.command(["/bin/bash", "-c", &script])).map(|report| report.exit_code);
    judge(knock(bench.whole()), knock(omit(bench.bare(), NETWORK)), |inside, control| {
        Verdict::of(inside != Some(0), "connected", control == Some(0), "does not connect without the walls either")
    })
}

fn odd_addresses(bench: &Bench) -> Verdict {
    let listener = match TcpListener::bind("0.0.0.0:0").and_then(|socket| Ok((socket.local_addr()?, socket))) {
        Ok(listener) => listener,
        Err(error) => return Verdict::Void(error.to_string()),
    };
    let port = listener.0.port();
    // Any address, a short form, hexadecimal, decimal and octal: all of them this machine.
    let forms = ["0.0.0.0", "127.1", "0x7f000001", "2130706433", "017700000001", "localhost"];
    let addresses: Vec<String> = forms.iter().map(|form| format!("{form}:{port}")).collect();
    compare(bench, "resolve", &addresses, &[], NETWORK)
}
