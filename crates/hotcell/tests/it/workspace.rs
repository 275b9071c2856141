//! Workspaces: what a command sees of them, what it may change, and what is said about it.

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use hotcell_base::Outcome;
use hotcell_cell::{Cell, Mode, MountRequest, Report};

use crate::support::*;

fn work_in(work: &Path, mode: Mode, script: &str) -> Report {
    let report = run(Cell::builder().workspace(work, mode).command(["sh", "-c", script]));
    assert_eq!(report.outcome, Outcome::Exited, "{}", report.stderr.text());
    report
}

/// Every entry below a directory with all that must not change.
fn picture(root: &Path) -> BTreeMap<String, String> {
    fn walk(root: &Path, at: &Path, found: &mut BTreeMap<String, String>) {
        for entry in std::fs::read_dir(at).unwrap().flatten() {
            let (path, meta) = (entry.path(), entry.path().symlink_metadata().unwrap());
            let contents = if meta.is_file() { std::fs::read(&path).unwrap() } else { Vec::new() };
            let link = std::fs::read_link(&path).unwrap_or_default();
            let facts =
                format!("{:o} {}:{} {} {link:?} {contents:?}", meta.mode(), meta.uid(), meta.gid(), meta.mtime_nsec());
            found.insert(path.strip_prefix(root).unwrap().to_string_lossy().into_owned(), facts);
            if meta.is_dir() {
                walk(root, &path, found);
            }
        }
    }
    let mut found = BTreeMap::new();
    walk(root, root, &mut found);
    found
}

fn project(bench: &Bench) -> std::path::PathBuf {
    bench.file("work/a.txt", "one\n");
    bench.file("work/b.txt", "two\n");
    bench.file("work/same.txt", "same\n");
    bench.file("work/dir/deep/c.txt", "three\n");
    bench.dir("work/empty");
    let work = bench.path("work");
    symlink("a.txt", work.join("link")).unwrap();
    std::fs::set_permissions(work.join("b.txt"), std::fs::Permissions::from_mode(0o600)).unwrap();
    work
}

#[test]
fn a_copy_on_write_workspace_leaves_the_host_as_it_was_and_lists_what_changed() {
    let bench = Bench::new();
    let work = project(&bench);
    let before = picture(&work);
    let script = "
        pwd; cat b.txt
        echo changed >> a.txt
        rm b.txt
        echo same > same.txt
        rm -r dir; mkdir dir; echo new > dir/new.txt
        chmod 700 empty
        rm link; echo file > link
        mkdir -p fresh/nested; ln -s /etc/passwd fresh/secret; mkfifo fresh/pipe
        mkdir locked; echo x > locked/x; chmod 000 locked
        touch gone; rm gone
        mv same.txt renamed.txt
    ";
    let report = work_in(&work, Mode::Cow, script);
    assert_eq!(report.exit_code, Some(0), "{}", report.stderr.text());
    assert_eq!(report.stdout.text(), format!("{}\ntwo\n", work.display()));
    assert_eq!(picture(&work), before);
    let listed = kinds(&report);
    let expected = [
        "Modified a.txt",
        "Deleted b.txt",
        "Deleted dir/deep",
        "Deleted dir/deep/c.txt",
        "Added dir/new.txt",
        "Modified empty",
        "Added fresh",
        "Added fresh/nested",
        "Added fresh/pipe",
        "Added fresh/secret",
        "TypeChanged link",
        "Added locked",
        "Added locked/x",
        "Added renamed.txt",
        "Deleted same.txt",
    ];
    assert_eq!(listed, expected);
}

#[test]
fn a_file_opened_for_writing_and_left_alone_is_no_change() {
    let bench = Bench::new();
    let work = project(&bench);
    let report = work_in(&work, Mode::Cow, "exec 3>>a.txt; touch dir");
    assert_eq!(report.changes.unwrap().list, Vec::new());
}

#[test]
fn a_read_only_workspace_can_be_read_and_nothing_else() {
    let bench = Bench::new();
    let work = project(&bench);
    let before = picture(&work);
    let report = work_in(&work, Mode::Ro, "cat a.txt b.txt; echo x > a.txt; rm b.txt; touch new; chmod 777 a.txt");
    assert_eq!(report.stdout.text(), "one\ntwo\n");
    assert_ne!(report.exit_code, Some(0));
    assert_eq!(picture(&work), before);
}

#[test]
fn a_writable_workspace_is_the_hosts_own_and_new_files_are_its_owners() {
    let bench = Bench::new();
    let work = project(&bench);
    let report =
        work_in(&work, Mode::Rw, "echo changed > a.txt; mkdir new; echo x > new/file; rm b.txt; chmod u+s new/file");
    assert!(
        report.stderr.text().contains("Operation not permitted"),
        "a set-id file was left: {}",
        report.stderr.text()
    );
    assert_eq!(std::fs::read_to_string(work.join("a.txt")).unwrap(), "changed\n");
    let made = work.join("new/file").metadata().unwrap();
    assert_eq!((made.uid(), made.mode() & 0o7777), (work.metadata().unwrap().uid(), 0o644));
    assert!(!work.join("b.txt").exists());
    assert_eq!(report.changes, None);
}

#[test]
fn without_a_workspace_the_directory_is_empty_and_writable() {
    let report = run(Cell::builder().command(["sh", "-c", "pwd; ls -A; echo x > f && cat f"]));
    assert_eq!(report.stdout.text(), "/cell\nx\n");
}

#[test]
fn mounts_show_files_and_directories_where_they_are_asked_for() {
    let bench = Bench::new();
    let (data, file) = (bench.dir("data"), bench.file("one.txt", "one\n"));
    bench.file("data/in", "in\n");
    let mount =
        |source: &Path, target: &str, writable| MountRequest { source: source.into(), target: target.into(), writable };
    let builder = Cell::builder()
        .mount(mount(&data, "/data/rw", true))
        .mount(mount(&data, "/data/ro", false))
        .mount(mount(&file, "/opt/deep/down/one.txt", false))
        .command(["sh", "-c", "cat /data/ro/in /opt/deep/down/one.txt; echo out > /data/rw/out; cat /data/ro/out; echo x 2>/dev/null > /data/ro/x || echo refused"]);
    let report = run(builder);
    assert_eq!(report.stdout.text(), "in\none\nout\nrefused\n", "{}", report.stderr.text());
    assert_eq!(std::fs::read_to_string(data.join("out")).unwrap(), "out\n");
}

#[test]
fn a_workspace_with_odd_letters_in_its_path_works() {
    let bench = Bench::new();
    for name in ["with space", "comma,colon:back\\slash", "quote'\"", "new\nline", "ünïcode", "-dash", "a=b"] {
        let work = bench.dir(name);
        std::fs::write(work.join("f"), "here\n").unwrap();
        for mode in [Mode::Ro, Mode::Cow, Mode::Rw] {
            assert_eq!(work_in(&work, mode, "cat f").stdout.text(), "here\n", "{name} {mode:?}");
        }
    }
}

#[test]
fn names_a_guest_makes_up_are_listed_exactly_and_shown_safely() {
    let bench = Bench::new();
    let work = bench.dir("work");
    let script = "touch \"$(printf 'a\\nb')\" \"$(printf 'c\\033[31m')\" \"$(printf 'd\\377')\"";
    let (record, code) = bench.json(["-w", work.to_str().unwrap(), "--", "sh", "-c", script]);
    assert_eq!(code, 0);
    let names: Vec<&str> =
        record["workspace"]["changed"].as_array().unwrap().iter().map(|one| one["path"].as_str().unwrap()).collect();
    assert_eq!(names, ["a\\nb", "c\\u{1b}[31m", "d\\xff"]);
}

#[test]
fn a_directory_in_place_of_a_link_tells_nothing_of_where_the_link_led() {
    let bench = Bench::new();
    let work = bench.dir("work");
    bench.file("secret/key", "guess\n");
    symlink(bench.path("secret"), work.join("dir")).unwrap();
    let report = work_in(&work, Mode::Cow, "rm dir; mkdir dir; echo guess > dir/key");
    assert_eq!(kinds(&report), ["TypeChanged dir", "Added dir/key"]);
}

#[test]
fn a_tree_too_deep_to_list_is_said_to_be_more() {
    let bench = Bench::new();
    let work = bench.dir("work");
    let script = "i=0; while [ $i -lt 600 ]; do mkdir d && cd d; i=$((i+1)); done";
    let report = work_in(&work, Mode::Cow, script);
    let changes = report.changes.unwrap();
    assert!(changes.truncated && changes.list.len() >= 100, "{} {}", changes.truncated, changes.list.len());
}

#[test]
fn what_is_gone_below_a_directory_made_anew_is_listed() {
    let bench = Bench::new();
    let work = bench.dir("work");
    bench.file("work/d/top", "x");
    bench.file("work/d/sub/guard", "x");
    let report = work_in(&work, Mode::Cow, "rm -rf d && mkdir -p d/sub && echo y > d/top && touch d/sub/other");
    assert_eq!(kinds(&report), ["Deleted d/sub/guard", "Added d/sub/other", "Modified d/top"]);
}

#[test]
fn marks_a_guest_writes_do_not_hide_what_it_removed() {
    let bench = Bench::new();
    let work = bench.dir("work");
    bench.file("work/d/guard", "x");
    bench.file("work/d/keep", "x");
    let script = "rm d/guard; python3 -c \"import os\nfor name in ('user.overlay.opaque', 'trusted.overlay.opaque'):\n  try: os.setxattr('d', name, b'y')\n  except OSError: pass\"";
    let report = run(Cell::builder().workspace(&work, Mode::Cow).command(["sh", "-c", script]));
    assert_eq!(kinds(&report), ["Deleted d/guard"], "{}", report.stderr.text());
}

#[test]
fn mounts_through_a_link_of_the_workspace_make_nothing_on_the_host() {
    let bench = Bench::new();
    let (work, data, victim) = (bench.dir("work"), bench.dir("data"), bench.dir("victim"));
    symlink(&victim, work.join("out")).unwrap();
    for mode in [Mode::Ro, Mode::Cow, Mode::Rw] {
        let target = work.join("out/made");
        let mount = MountRequest { source: data.clone(), target, writable: false };
        let planned = plan_on(&host(), Cell::builder().workspace(&work, mode).mount(mount).command(["true"]));
        assert!(planned.is_err_and(|error| error.to_string().contains("link")));
    }
    // A link that climbs: outside, it leads to a place that is there; inside, nowhere.
    let (a, b) = (bench.dir("a"), bench.dir("b"));
    let up = Path::new("..").join(victim.strip_prefix("/").unwrap());
    symlink(&up, a.join("l")).unwrap();
    let nested = Cell::builder()
        .mount(MountRequest { source: a, target: "/data".into(), writable: false })
        .mount(MountRequest { source: b, target: "/data/l/made".into(), writable: false })
        .command(["true"]);
    let nested = plan_on(&host(), nested);
    assert!(nested.is_err_and(|error| error.to_string().contains("link")));
    assert_eq!(std::fs::read_dir(&victim).unwrap().count(), 0);
    // A link of our own: /var/run leads to /run inside, and not to the host's.
    let mount = MountRequest { source: data.clone(), target: "/var/run/hotcell-made".into(), writable: false };
    let report = run(Cell::builder().mount(mount).command(["ls", "-d", "/run/hotcell-made"]));
    assert_eq!(report.stdout.text(), "/run/hotcell-made\n", "{}", report.stderr.text());
    assert!(!Path::new("/run/hotcell-made").exists(), "ESCAPED");
    assert_eq!(std::fs::read_dir(&victim).unwrap().count(), 0);
}

#[test]
fn a_workspace_cannot_have_the_callers_files_shown_to_it() {
    let bench = Bench::new();
    let (home, work) = (bench.dir("user"), bench.dir("user/work"));
    let secret = bench.file("user/.ssh/id", "key\n");
    bench.file("user/work/.venv/pyvenv.cfg", &format!("home = {}/e\n", work.display()));
    symlink(&secret, bench.dir("user/work/e").join("python3")).unwrap();
    let script = bench.file("user/work/run.sh", &format!("#!{}\n", secret.display()));
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    let env =
        [("HOME", home.as_os_str()), ("PATH", "/usr/bin:/bin".as_ref())].map(|(key, value)| (key.into(), value.into()));
    let host = hotcell_cell::Host::probe(env).unwrap();
    let read =
        |command: &[&str]| run_on(&host, Cell::builder().workspace(&work, Mode::Cow).command(command.iter().copied()));
    let report = read(&["cat", secret.to_str().unwrap()]);
    assert_eq!(report.stdout.text(), "", "ESCAPED");
    assert!(report.stderr.text().contains("No such file"), "{}", report.stderr.text());
    read(&["./run.sh"]);
    // Nor through another project's virtual environment, whose interpreter is everybody's.
    bench.file("user/other/secret", "other\n");
    bench.file("user/other/lib/x", "");
    symlink("/usr/bin/env", bench.dir("user/other/bin").join("python3")).unwrap();
    bench.file("user/work/.venv/pyvenv.cfg", &format!("home = {}/other/bin\n", home.display()));
    let report = read(&["cat", home.join("other/secret").to_str().unwrap()]);
    assert_eq!(report.stdout.text(), "", "ESCAPED");
    // The control: the same file, asked for by the caller.
    let mount = MountRequest { source: secret.clone(), target: secret.clone(), writable: false };
    let report = run_on(
        &host,
        Cell::builder().workspace(&work, Mode::Cow).mount(mount).command(["cat", secret.to_str().unwrap()]),
    );
    assert_eq!(report.stdout.text(), "key\n", "VOID: {}", report.stderr.text());
}

fn kinds(report: &Report) -> Vec<String> {
    let changes = report.changes.as_ref().unwrap();
    changes.list.iter().map(|change| format!("{:?} {}", change.kind, change.path.display())).collect()
}
