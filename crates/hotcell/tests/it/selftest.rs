//! The escape suite that ships: green here, and red as soon as anything is missing.

use hotcell_cell::{Wall, seccomp};
use serde_json::Value;

use crate::support::*;

fn selftest(args: &[&str]) -> (Value, Option<i32>) {
    let bench = Bench::new();
    let output = bench.output(["selftest", "--json"].iter().chain(args));
    let value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("no verdicts: {}{}", text(&output.stdout), text(&output.stderr)));
    (value, output.status.code())
}

/// Attempts of this verdict, with their reasons.
fn with_verdict(found: &Value, verdict: &str) -> Vec<String> {
    let attempts = found["attempts"].as_array().unwrap().iter().filter(|one| one["verdict"] == verdict);
    attempts.map(|one| format!("{}: {}", one["id"].as_str().unwrap(), one["reason"].as_str().unwrap_or(""))).collect()
}

#[test]
fn every_attempt_of_the_list_is_held_with_its_control() {
    let (found, code) = selftest(&[]);
    assert_eq!(with_verdict(&found, "ESCAPED"), Vec::<String>::new());
    assert_eq!(with_verdict(&found, "VOID"), Vec::<String>::new());
    assert_eq!(code, Some(0));
    for skipped in with_verdict(&found, "skipped") {
        skip(&skipped);
    }
    // The public cases are a floor.
    let ids: Vec<&str> = found["attempts"].as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap()).collect();
    let has = |id: &str| ids.iter().any(|found| found.split('.').next() == Some(id));
    let sections = [
        ("A", "1 2 3 4 5 7 8 9 10 12 13 15 16 17 18 20 22"),
        ("B", "1 2 3 5 6 8 9 11 12 13 14"),
        ("C", "1 2 3 4 5 6 9 10 11 13 14 16 17 18"),
        ("D", "1 2 3"),
        ("E", "1 2 3 4 6 8 9 11 12"),
        ("F", "1 2 3 5 6 7"),
        ("G", "1 2 4 5 6"),
    ];
    for (section, numbers) in sections {
        for number in numbers.split(' ') {
            assert!(has(&format!("{section}{number}")), "{section}{number} is not tried");
        }
    }
}

/// The same attempts in cells that came to be in another way.
fn hold_in_cells(how: &str) {
    let (found, code) = selftest(&["--cells", how]);
    assert_eq!(found["cells"], how);
    assert_eq!(with_verdict(&found, "ESCAPED"), Vec::<String>::new());
    assert_eq!(with_verdict(&found, "VOID"), Vec::<String>::new());
    assert_eq!(code, Some(0));
}

#[test]
fn cells_on_demand_hold_as_well() {
    hold_in_cells("on-demand");
}

#[test]
fn cells_of_a_pool_hold_as_well() {
    hold_in_cells("pool");
}

#[test]
fn cells_of_a_session_hold_as_well() {
    hold_in_cells("session");
}

#[test]
fn cells_that_go_on_from_a_template_hold_as_well() {
    hold_in_cells("template");
}

/// The attempt that only this wall refuses.
fn attempt_of(wall: Wall) -> &'static str {
    match wall {
        Wall::Id => "W.id",
        Wall::Groups => "B14",
        Wall::User => "W.user",
        Wall::Mount => "W.mount",
        Wall::Pid => "W.pid",
        Wall::Net => "D1.udp",
        Wall::Ipc => "W.ipc",
        Wall::Uts => "W.uts",
        Wall::CgroupNs => "W.cgroup-ns",
        Wall::Time => "W.time",
        Wall::Root => "A1",
        Wall::Caps => "C1",
        Wall::NoNewPrivs => "W.no-new-privs",
        Wall::Seccomp => "C5",
        Wall::Landlock => "W.landlock",
        Wall::LandlockTcp => "D1.fence",
        Wall::LandlockScope => "B6.scope",
        Wall::Rlimits => "W.rlimits",
        Wall::Cgroup => "W.cgroup",
        Wall::Disk => "W.disk",
        Wall::Fds => "A13",
        Wall::Tty => "W.tty",
    }
}

#[test]
fn a_wall_that_is_missing_turns_the_suite_red() {
    for wall in Wall::ALL {
        let untried = match wall {
            // Root's cells have no such namespace; a user's id and groups are the user's own.
            Wall::User => is_root(),
            Wall::Id | Wall::Groups => !is_root(),
            _ => false,
        };
        if untried {
            skip(&format!("a missing wall `{wall}`: this user's cells do not have it"));
            continue;
        }
        let (found, code) = selftest(&["--without", wall.name(), "--only", attempt_of(wall)]);
        assert_eq!(code, Some(1), "nobody notices that `{wall}` is missing: {found:#}");
        // Without these no cell stands at all, which is noticed, too.
        let stands = !matches!(wall, Wall::User | Wall::NoNewPrivs);
        assert!(!stands || found["escaped"].as_u64() > Some(0), "{found:#}");
        let (whole, code) = selftest(&["--only", attempt_of(wall)]);
        assert_eq!(code, Some(0), "VOID: red with `{wall}`, too: {whole:#}");
    }
}

#[test]
fn a_rule_that_is_missing_turns_the_suite_red() {
    let bench = Bench::new();
    let listed: Value = serde_json::from_slice(&bench.output(["selftest", "--list", "--json"]).stdout).unwrap();
    for rule in seccomp::refusing_rules() {
        let without = format!("seccomp:{rule}");
        let of_rule = listed.as_array().unwrap().iter().filter(|one| one["control_without"] == without.as_str());
        // The filter's own shape is tried by attempts that need more than one probe.
        let mut ids: Vec<&str> = of_rule.map(|one| one["id"].as_str().unwrap()).collect();
        if rule == seccomp::ARCHITECTURE {
            ids.push("C6");
        }
        assert!(!ids.is_empty(), "no attempt is about the rule `{rule}`");
        let args: Vec<&str> = ["--without", &without, "--only"].into_iter().chain(ids).collect();
        let (found, code) = selftest(&args);
        assert_eq!(code, Some(1), "nobody notices that the rule `{rule}` is missing: {found:#}");
        assert_eq!(found["void"], 0, "{found:#}");
    }
}

#[test]
fn one_attempt_or_one_section_can_be_chosen() {
    let bench = Bench::new();
    let output = bench.output(["selftest", "--only", "g1", "A1"]);
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}");
    assert!(
        said.contains("A1 ") && said.contains("G1.high") && !said.contains("A2 ") && !said.contains("A12"),
        "{said}"
    );
    let output = bench.output(["selftest", "--list", "--only", "G"]);
    assert!(text(&output.stdout).contains("seccomp:terminal input"), "{}", text(&output.stdout));
    for (args, says) in [
        (["--only", "Z9"], "no attempt has this id"),
        (["--without", "moat"], "there is no wall `moat`"),
        (["--without", "seccomp:moat"], "no rule `moat`"),
    ] {
        let output = bench.output(["selftest"].iter().chain(&args));
        assert_eq!(output.status.code(), Some(2));
        assert!(
            text(&output.stderr).contains(says) && text(&output.stderr).contains("hint:"),
            "{}",
            text(&output.stderr)
        );
    }
}

#[test]
fn it_leaves_nothing_behind_whatever_is_missing() {
    let bench = Bench::new();
    let place = bench.dir("place");
    std::fs::set_permissions(bench.path(""), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    // What attempts have been seen to leave; other programs of this machine come and go as they like.
    let strangers = |directory: &str| -> Vec<String> {
        let names = std::fs::read_dir(directory).into_iter().flatten().flatten();
        let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let known = ["f", "copy", "not-cat", "hotcell-probe", "hotcell-setid", "hotcell-disk"];
        names.filter(|name| known.contains(&&**name) || name.bytes().all(|byte| byte.is_ascii_digit())).collect()
    };
    let before = [strangers("/tmp"), strangers("/dev/shm")];
    for without in [&[][..], &["--without", "root"], &["--without", "mount"], &["--without", "seccomp"]] {
        let mut command =
            bench.hotcell(["selftest", "--json", "--only", "A7", "B9", "C11", "C13", "E2", "E3"].iter().chain(without));
        let output = command.env("TMPDIR", &place).output().unwrap();
        assert_eq!(output.status.code(), Some(i32::from(!without.is_empty())), "{}", text(&output.stderr));
        let left: Vec<_> = std::fs::read_dir(&place).unwrap().flatten().map(|entry| entry.file_name()).collect();
        assert!(left.is_empty(), "{without:?}: {left:?}");
        for (before, now) in before.iter().zip([strangers("/tmp"), strangers("/dev/shm")]) {
            let new: Vec<_> = now.iter().filter(|name| !before.contains(name)).collect();
            assert!(new.is_empty(), "{without:?} left {new:?}");
        }
    }
}
