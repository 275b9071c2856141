//! Cgroups that nobody wrote down: those of a program that uses this library. Their names say whose they are, so that the
//! next one clears away what a crash left.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::cgroup::Layout;
use crate::host::start_time;

/// A name for a cgroup that no other has: `<prefix>-<pid namespace>-<pid>-<start>-<number>`.
pub(crate) fn group_name(prefix: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let (namespace, pid) = (pid_namespace(), std::process::id());
    let start = start_time(pid).unwrap_or(0);
    format!("{prefix}-{namespace}-{pid}-{start}-{}", NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Removes groups of processes that are gone, once in the life of this one. What cannot be removed is somebody's.
pub(crate) fn sweep(layout: &Layout) {
    static ONCE: OnceLock<()> = OnceLock::new();
    ONCE.get_or_init(|| {
        for parent in layout.parents() {
            let entries = fs::read_dir(parent).into_iter().flatten().flatten();
            let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
            for name in names.filter(|name| is_stray(name)) {
                let _in_use = fs::remove_dir(parent.join(name));
            }
        }
    });
}

/// Whether a group was made by a process of this pid namespace that is gone.
fn is_stray(name: &str) -> bool {
    let Some(name) = name.strip_prefix("hotcell-") else { return false };
    let mut numbers = name.rsplit('-').map(|part| part.parse::<u64>().ok());
    let mut next = || numbers.next().flatten();
    let (Some(_), Some(start), Some(pid), Some(namespace)) = (next(), next(), next(), next()) else { return false };
    let Ok(pid) = u32::try_from(pid) else { return false };
    namespace == pid_namespace() && start_time(pid) != Some(start)
}

fn pid_namespace() -> u64 {
    static OURS: OnceLock<u64> = OnceLock::new();
    *OURS.get_or_init(|| fs::metadata("/proc/self/ns/pid").map_or(0, |file| file.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_a_stray_when_its_maker_is_gone() {
        let ours = group_name("hotcell-pool");
        assert!(!is_stray(&ours), "{ours}");
        let parts: Vec<&str> = ours.rsplitn(4, '-').collect();
        let [number, start, pid, rest] = parts[..] else { panic!("{ours}") };
        let another = start.parse::<u64>().expect("a number") + 1;
        assert!(is_stray(&format!("{rest}-{pid}-{another}-{number}")), "a process of that pid which started later");
        assert!(!is_stray(&format!("hotcell-pool-1-{pid}-{another}-{number}")), "of another namespace");
        for foreign in ["hotcell-run-20261115-100311-12jjn3", "other-1-2-3-4", "hotcell-pool-7-0"] {
            assert!(!is_stray(foreign), "{foreign}");
        }
    }
}
