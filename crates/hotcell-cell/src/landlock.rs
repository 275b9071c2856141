//! The second fence: what of the view may be read, written and executed, as Landlock rules.
//!
//! The mount view decides what exists; these rules say the same again in another mechanism, so that
//! one mistake or one kernel bug in either is not enough.

use std::path::PathBuf;

use crate::view::{Entry, FENCE};

const EXECUTE: u64 = 1;
const WRITE_FILE: u64 = 1 << 1;
const READ_FILE: u64 = 1 << 2;
const READ_DIR: u64 = 1 << 3;
const TRUNCATE: u64 = 1 << 14;
const IOCTL_DEV: u64 = 1 << 15;

/// TCP bind and connect.
const NET_ALL: u64 = 3;
/// Abstract unix sockets and signals.
const SCOPE_ALL: u64 = 3;

/// What a path beneath which rule applies may be used for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Rule {
    pub(crate) path: PathBuf,
    pub(crate) access: u64,
}

/// Rights that a version of Landlock knows; what it does not know it does not fence.
pub(crate) fn handled_fs(abi: u32) -> u64 {
    match abi {
        0 => 0,
        1 => (1 << 13) - 1,
        2 => (1 << 14) - 1,
        3 | 4 => (1 << 15) - 1,
        _ => (1 << 16) - 1,
    }
}

/// Attributes of the ruleset: files, TCP and scope, each only if its wall is asked for.
pub(crate) fn attributes(abi: u32, files: bool, tcp: bool, scope: bool) -> Vec<u64> {
    let pick = |asked: bool, value| if asked { value } else { 0 };
    let all = [pick(files, handled_fs(abi)), pick(tcp, NET_ALL), pick(scope, SCOPE_ALL)];
    // An older kernel refuses a longer struct unless the rest is zero; give it what it knows.
    let known = match abi {
        ..4 => 1,
        4 | 5 => 2,
        _ => 3,
    };
    all[..known].to_vec()
}

/// The rules for a view.
pub(crate) fn rules(view: &[Entry], abi: u32) -> Vec<Rule> {
    let handled = handled_fs(abi);
    let file = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV;
    let all_but_devices = handled & !IOCTL_DEV;
    let mut rules = vec![
        // Looking around is harmless in a root where only granted things exist.
        Rule { path: "/".into(), access: READ_DIR },
        // Whatever of the host's is mounted there is beneath it, too, and the walk to the root passes it.
        Rule { path: "/etc".into(), access: READ_FILE | READ_DIR },
        Rule { path: "/dev".into(), access: READ_FILE | WRITE_FILE | READ_DIR },
        Rule { path: "/proc".into(), access: READ_FILE | READ_DIR },
    ];
    for entry in view {
        let (path, access) = match entry {
            Entry::Bind { device: true, .. } => continue,
            Entry::Bind { target, identity: None, .. } if target.starts_with("/etc") => continue,
            Entry::Bind { target, writable: true, directory: true, .. } => (target, all_but_devices),
            Entry::Bind { target, writable: true, .. } => (target, all_but_devices & file),
            Entry::Bind { target, directory: true, .. } => (target, EXECUTE | READ_FILE | READ_DIR),
            Entry::Bind { target, .. } => (target, EXECUTE | READ_FILE),
            Entry::Scratch { target, .. } | Entry::Overlay { target, .. } => (target, all_but_devices),
            _ => continue,
        };
        rules.push(Rule { path: path.clone(), access: access & handled });
    }
    debug_assert!(rules.iter().all(|rule| rule.path.as_os_str() != FENCE), "the fence is granted to nobody");
    rules
}
