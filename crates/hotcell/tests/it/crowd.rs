//! Many at once: two hundred cells alive, a thousand started in one burst, and everybody is served.

use std::fs::File;
use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};

use crate::support::*;

const LIVE: usize = 200;
const BURST: usize = 1000;

/// Resident memory of a process, in bytes.
fn resident(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count)
}

#[test]
fn two_hundred_cells_live_side_by_side() {
    let bench = Bench::new();
    let start = |number: usize| {
        let word = number.to_string();
        let script = "echo up; read x; echo $1 $x > /tmp/mine; cat /tmp/mine";
        let args = ["run", "-q", "--stdin", "-", "--memory", "64MiB", "--", "sh", "-c", script, "sh", &word];
        bench.hotcell(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut cells: Vec<Child> = (0..LIVE).map(start).collect();
    for (number, cell) in cells.iter_mut().enumerate() {
        let mut up = [0u8; 3];
        let read = cell.stdout.as_mut().unwrap().read_exact(&mut up);
        assert!(read.is_ok() && &up == b"up\n", "cell {number} is not up");
    }
    // All of them are alive now; a supervisor's share of the machine is small and does not grow with its neighbours.
    let (mut most_memory, mut most_descriptors) = (0, 0);
    for cell in &cells {
        most_memory = most_memory.max(resident(cell.id()).expect("it is alive"));
        most_descriptors = most_descriptors.max(descriptors(cell.id()));
    }
    assert!(most_memory < 16 << 20, "{most_memory} bytes for one supervisor");
    assert!(most_descriptors < 40, "{most_descriptors} descriptors for one supervisor");
    for (number, mut cell) in cells.into_iter().enumerate() {
        cell.stdin.take().unwrap().write_all(b"answer\n").unwrap();
        let output = cell.wait_with_output().unwrap();
        assert_eq!(text(&output.stdout), format!("{number} answer\n"), "{}", text(&output.stderr));
        assert_eq!(output.status.code(), Some(0));
    }
    assert!(processes_in(&bench.path("")).is_empty());
    assert_eq!(text(&bench.output(["gc"]).stdout), "nothing is left of any crash\n");
}

#[test]
fn a_thousand_starts_in_one_burst_are_all_served() {
    let bench = Bench::new();
    bench.dir("out");
    // All of them wait at a gate, so that it is one burst, however long it takes to start the last.
    let gate = bench.path("gate");
    rustix::fs::mknodat(rustix::fs::CWD, &gate, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    let start = |number: usize| {
        let file = |what: &str| File::create(bench.path(&format!("out/{number}.{what}"))).unwrap();
        let word = number.to_string();
        let hotcell = bench.hotcell(["run", "--", "sh", "-c", "echo $1; echo $1 > /tmp/f; cat /tmp/f", "sh", &word]);
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "read _ < \"$0\"; exec \"$@\""]).arg(&gate).arg(hotcell.get_program());
        command.args(hotcell.get_args());
        for (name, value) in hotcell.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.stdin(Stdio::null()).stdout(file("out")).stderr(file("err")).spawn().unwrap()
    };
    let mut children: Vec<Child> = (0..BURST).map(start).collect();
    let is_hotcell = |child: &Child| {
        let name = std::fs::read_to_string(format!("/proc/{}/comm", child.id())).unwrap_or_default();
        name.trim_end() == "hotcell"
    };
    // A line for each; whoever comes late finds it open.
    let mut opened = File::options().read(true).write(true).open(&gate).unwrap();
    opened.write_all(&[b'\n'; BURST]).unwrap();
    // While they wait and run, each takes little, however many there are.
    let (mut seen, mut most_memory, mut most_descriptors) = (std::collections::BTreeSet::new(), 0, 0);
    eventually("a good part of them was looked at", || {
        for child in children.iter().filter(|child| is_hotcell(child)) {
            seen.insert(child.id());
            most_memory = most_memory.max(resident(child.id()).unwrap_or(0));
            most_descriptors = most_descriptors.max(descriptors(child.id()));
        }
        seen.len() > BURST / 10
    });
    assert!(most_memory < 16 << 20 && most_descriptors < 40, "{most_memory} bytes, {most_descriptors} descriptors");
    for (number, child) in children.iter_mut().enumerate() {
        let code = child.wait().unwrap().code();
        let read = |what: &str| std::fs::read_to_string(bench.path(&format!("out/{number}.{what}"))).unwrap();
        assert_eq!((code, read("out")), (Some(0), format!("{number}\n{number}\n")), "{number}: {}", read("err"));
        // Every wall stood for every one of them: nothing was given up under pressure.
        let said = read("err");
        let weak = said.lines().find_map(|line| line.trim().strip_prefix("not proven: "));
        let known = if cannot_leave_groups(&host()) { "groups missing, cgroup watched" } else { "cgroup watched" };
        assert!(weak.is_none() || !is_root() && weak == Some(known), "{said}");
    }
    let runs: serde_json::Value =
        serde_json::from_slice(&bench.output(["ls", "--json", "-n", "100000"]).stdout).unwrap();
    let runs = runs.as_array().unwrap();
    let ids: std::collections::BTreeSet<&str> = runs.iter().map(|run| run["run_id"].as_str().unwrap()).collect();
    assert_eq!((runs.len(), ids.len()), (BURST, BURST));
    assert!(runs.iter().all(|run| run["outcome"] == "exited"));
    assert_eq!(text(&bench.output(["gc"]).stdout), "nothing is left of any crash\n");
}
