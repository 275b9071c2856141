//! A: files.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use hotcell_base::text::shown;
use hotcell_base::{Bytes, Outcome};
use hotcell_cell::tree::Node;
use hotcell_cell::{Builder, Limits, Mode, MountRequest, Wall};

use serde_json::Value;

use super::bench::{Bench, PRIVILEGE, words};
use super::verdict::{Attempt, Verdict, Who, judge, other, probe, rule, skip};

const ROOT: &[Wall] = &[Wall::Root];
const ROOT_AND_PRIVILEGE: &[Wall] = &[Wall::Root, Wall::Id, Wall::Caps, Wall::Groups];

pub(super) fn attempts() -> Vec<Attempt> {
    vec![
        probe("A1", "read a file outside the grants", "read", |bench| vec![bench.secret().into()], ROOT),
        probe("A1.home", "read keys and start-up files of the home directory", "read", home_files, ROOT_AND_PRIVILEGE),
        probe(
            "A1.shadow",
            "read password hashes",
            "read",
            |_| words(&["/etc/shadow", "/etc/gshadow"]),
            ROOT_AND_PRIVILEGE,
        )
        .only(Who::Root),
        probe("A2", "reach a file by odd spellings of its path", "read", odd_paths, ROOT),
        probe("A3", "read through links in the workspace", "read", |_| links_in_workspace(), ROOT)
            .shape(linked_workspace),
        probe("A3.write", "write through links in the workspace", "write", |_| links_in_workspace(), ROOT)
            .shape(linked_workspace),
        other("A4", "swap a directory for a link while the supervisor looks", swapped_links),
        probe("A5", "hard link a host file into the workspace", "link", hard_link, ROOT_AND_PRIVILEGE)
            .shape(beside_workspace),
        probe(
            "A7",
            "rename, link, unlink or truncate outside the grants",
            "change",
            |bench| {
                let directory = bench.dir("victims");
                let victim = directory.join("victim");
                let _made = fs::write(&victim, "x")
                    .and_then(|()| fs::set_permissions(&victim, fs::Permissions::from_mode(0o666)));
                vec![victim.into()]
            },
            ROOT_AND_PRIVILEGE,
        ),
        rule(
            "A8",
            "open by openat2, whose flags no filter sees",
            "call",
            |_| words(&["openat2"]),
            "unreadable arguments",
        ),
        other("A9", "change hooks and settings in a writable workspace", control_files),
        other("A10", "make hooks and settings that are not there yet", absent_control_files),
        other("A10.parent", "rename what hooks are in, and not be reported", renamed_parent),
        probe(
            "A12",
            "magic links of /proc to another root",
            "read",
            |bench| {
                let secret = bench.secret();
                let through = |link: &str| format!("{link}{}", secret.display()).into();
                vec![
                    through("/proc/self/root"),
                    through("/proc/thread-self/root"),
                    through(&format!("/proc/self/cwd{}", "/..".repeat(40))),
                ]
            },
            ROOT,
        ),
        other("A12.init", "magic links and memory of the cell's first process", init_files),
        probe("A13", "reopen an inherited directory through /proc/self/fd", "leaks", |_| words(&[""]), &[Wall::Fds])
            .shape(|bench, builder| {
                leak_a_descriptor(bench);
                builder
            }),
        other("A15", "mount onto /proc, /dev or through a link", mounts_in_the_way),
        other("A16", "have a mount inside show outside", propagation),
        other("A17", "smuggle a set-id bit out through a copy", setid_copy),
        other("A18", "leave links, pipes and huge files for the supervisor to read", hostile_artifacts),
        other("A20", "inject into logs by file names", hostile_names),
        skip("A22", "execute from writable places", "not promised: scratch and workspaces are executable"),
    ]
}

fn home_files(bench: &Bench) -> Vec<OsString> {
    let Some(home) = &bench.host.home else { return Vec::new() };
    let names = [".ssh/id_ed25519", ".ssh/id_rsa", ".ssh/known_hosts", ".netrc", ".bashrc", ".profile", ".gitconfig"];
    let there = names.iter().map(|name| home.join(name)).filter(|path| fs::File::open(path).is_ok());
    // An empty one reads like one that is covered.
    there.filter(|path| fs::metadata(path).is_ok_and(|file| file.len() > 0)).map(Into::into).collect()
}

fn odd_paths(bench: &Bench) -> Vec<OsString> {
    let secret = bench.secret();
    let plain = secret.display();
    let up = "/..".repeat(40);
    let odd = ["/tmp/../..", "//", "/.", &format!(".{up}"), "/proc/.."];
    odd.iter().map(|before| format!("{before}{plain}").into()).collect()
}

const LINKED: &str = "linked";

fn links_in_workspace() -> Vec<OsString> {
    words(&["link", "directory/secret"])
}

/// A workspace with links that lead out of it.
fn linked_workspace(bench: &Bench, builder: Builder) -> Builder {
    let work = bench.dir(LINKED);
    let secret = bench.secret();
    let _writable = fs::set_permissions(&secret, fs::Permissions::from_mode(0o666));
    let _planted = symlink(&secret, work.join("link")).and_then(|()| symlink(bench.path(""), work.join("directory")));
    builder.workspace(&work, Mode::Rw)
}

fn hard_link(bench: &Bench) -> Vec<OsString> {
    vec![bench.path("beside/file").into(), bench.path("work/hard").into()]
}

/// A workspace, and beside it a directory that can only be read.
fn beside_workspace(bench: &Bench, builder: Builder) -> Builder {
    let (work, beside) = (bench.dir("work"), bench.dir("beside"));
    let _made = fs::write(beside.join("file"), "x");
    let mount = MountRequest { source: beside.clone(), target: beside, writable: false };
    builder.workspace(&work, Mode::Rw).mount(mount)
}

fn swapped_links(bench: &Bench) -> Verdict {
    // A directory of the host's that is larger than the disk limit: counted, it would end the run.
    let big = bench.dir("big");
    let _filled = fs::write(big.join("file"), vec![7u8; 16 << 20]);
    let limits = || Limits { disk: Bytes::mib(8), ..Limits::default() };
    let work = bench.dir("work");
    let args = ["name".to_owned(), big.display().to_string(), "100000".to_owned()];
    let inside = match bench.act(bench.whole().workspace(&work, Mode::Rw), limits(), "swap", &args) {
        Ok(report) => report,
        Err(why) => return Verdict::Void(why),
    };
    let args = [work.display().to_string(), "16".to_owned(), "20".to_owned()];
    let control = match bench.act(bench.bare().workspace(&work, Mode::Rw), limits(), "fill", &args) {
        Ok(report) => report,
        Err(why) => return Verdict::Void(why),
    };
    Verdict::of(
        (inside.outcome, inside.exit_code) == (Outcome::Exited, Some(0)),
        format!("the supervisor followed a link: {} {}", inside.outcome, inside.stderr.text()),
        control.outcome == Outcome::Disk,
        "the same bytes without a link are not seen either",
    )
}

fn control_files(bench: &Bench) -> Verdict {
    let work = bench.dir("work");
    let names = [".git/config", ".bashrc", "sub/.vscode/tasks.json"];
    for name in names {
        let path = work.join(name);
        let made = path.parent().map_or(Ok(()), fs::create_dir_all).and_then(|()| fs::write(&path, "x"));
        let open = made.and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o666)));
        if let Err(error) = open {
            return Verdict::Void(error.to_string());
        }
    }
    for mode in [Mode::Ro, Mode::Cow, Mode::Rw] {
        match bench.tries(bench.whole().workspace(&work, mode), "write", &names) {
            Err(why) => return Verdict::Void(why),
            Ok(tries) => {
                if let Some(through) = tries.through() {
                    return Verdict::Escaped(format!("{mode:?}: {through}"));
                }
            }
        }
    }
    let allowed = [".git", ".bashrc", "sub/.vscode"];
    let control =
        allowed.iter().fold(bench.bare().workspace(&work, Mode::Rw), |builder, path| builder.allow_control(*path));
    match bench.tries(control, "write", &names).map(|tries| tries.refused_without()) {
        Err(why) | Ok(Some(why)) => Verdict::Void(why),
        Ok(None) => Verdict::Held,
    }
}

fn absent_control_files(bench: &Bench) -> Verdict {
    let script = "mkdir -p .git/hooks; echo evil > .git/hooks/post-checkout; echo evil > .envrc; ln -s x .vscode/l; mv .git other";
    let work = bench.dir("work");
    let made = || [".git", ".envrc", ".vscode"].iter().any(|name| work.join(name).symlink_metadata().is_ok());
    let report = match bench.run(bench.whole().workspace(&work, Mode::Rw).command(["sh", "-c", script])) {
        Ok(report) => report,
        Err(why) => return Verdict::Void(why),
    };
    if made() {
        return Verdict::Escaped("a control file was made on the host".to_owned());
    }
    if !report.control.iter().any(|attempt| attempt.path.ends_with(".git") && attempt.blocked) {
        return Verdict::Escaped("the attempt was not reported".to_owned());
    }
    let control = [".git", ".envrc"]
        .iter()
        .fold(bench.bare().workspace(&work, Mode::Rw), |builder, path| builder.allow_control(*path));
    match bench.run(control.command(["sh", "-c", script])) {
        Err(why) => Verdict::Void(why),
        Ok(_) => Verdict::of(true, "", made() || work.join("other").exists(), "not made although it was allowed"),
    }
}

fn renamed_parent(bench: &Bench) -> Verdict {
    let work = bench.dir("work");
    let made = fs::create_dir_all(work.join("sub/.git"))
        .and_then(|()| fs::set_permissions(&work, fs::Permissions::from_mode(0o777)));
    if let Err(error) = made {
        return Verdict::Void(error.to_string());
    }
    let reported = |script: &str| {
        let report = bench.run(bench.whole().workspace(&work, Mode::Rw).command(["sh", "-c", script]))?;
        Ok::<bool, String>(
            report.control.iter().any(|attempt| attempt.path == work.join("sub/.git") && !attempt.blocked),
        )
    };
    judge(reported("true"), reported("mv sub x && mkdir -p sub/.git/hooks && chmod 1700 sub/.git"), |quiet, renamed| {
        Verdict::of(renamed, "it was not reported", !quiet, "reported although nothing was done")
    })
}

fn init_files(bench: &Bench) -> Verdict {
    let secret = bench.secret();
    let inside: Vec<OsString> = ["/proc/1/environ", "/proc/1/maps", "/proc/1/mem", "/proc/1/exe", "/proc/1/fd/0"]
        .iter()
        .map(Into::into)
        .chain([format!("/proc/1/root{}", secret.display()).into(), format!("/proc/1/cwd{}", secret.display()).into()])
        .collect();
    // The control: the same files of a process that is the guest's own.
    let own = ["/proc/self/environ", "/proc/self/maps", "/proc/self/exe"];
    judge(bench.tries(bench.whole(), "read", &inside), bench.tries(bench.bare(), "read", &own), |inside, own| {
        let (through, refused) = (inside.through(), own.refused_without());
        Verdict::of(through.is_none(), through.unwrap_or_default(), refused.is_none(), refused.unwrap_or_default())
    })
}

/// The mistake: a descriptor without close-on-exec in the process that starts cells.
fn leak_a_descriptor(bench: &Bench) {
    if let Ok(directory) = fs::File::open(bench.path("")) {
        use std::os::fd::{AsFd, IntoRawFd};
        let _leaked = rustix::io::fcntl_setfd(directory.as_fd(), rustix::io::FdFlags::empty());
        // For as long as the selftest lives, as a careless program would.
        let _number = directory.into_raw_fd();
    }
}

fn mounts_in_the_way(bench: &Bench) -> Verdict {
    let (work, beside) = (bench.dir("work"), bench.dir("beside"));
    let _planted = symlink("/proc", work.join("proc"));
    let mounted = |target: &Path| {
        let mount = MountRequest { source: beside.clone(), target: target.to_owned(), writable: false };
        let builder = bench.whole().workspace(&work, Mode::Ro).mount(mount).command(["/bin/true"]);
        builder.plan(&bench.host)
    };
    let through_link = work.join("proc/sys");
    for target in ["/proc/sys", "/dev/shm", "/", "/etc/passwd"].iter().map(Path::new).chain([through_link.as_path()]) {
        if mounted(target).is_ok() {
            return Verdict::Escaped(format!("a mount onto {} was planned", target.display()));
        }
    }
    Verdict::of(true, "", mounted(Path::new("/opt/selftest")).is_ok(), "no mount can be planned at all")
}

/// Made in a cell of its own and never with `--without`: with a mount namespace missing, too, it would be the host's
/// mounts that change.
fn propagation(bench: &Bench) -> Verdict {
    let mounts = || fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let before = mounts();
    // The control is that the mount really happens, in a cell without the walls that forbid it.
    let loose = PRIVILEGE.iter().chain(&[Wall::Seccomp, Wall::Landlock]);
    let loose = loose.fold(bench.bare(), |builder, wall| builder.omit(*wall));
    match bench.tries(loose, "call", &["mount"]) {
        Err(why) => Verdict::Void(why),
        Ok(tries) => {
            let refused = tries.refused_without();
            Verdict::of(mounts() == before, "the host's mounts changed", refused.is_none(), refused.unwrap_or_default())
        }
    }
}

fn setid_copy(bench: &Bench) -> Verdict {
    let work = bench.dir("work");
    let tool = work.join("tool");
    let made =
        fs::write(&tool, "#!/bin/sh\n").and_then(|()| fs::set_permissions(&tool, fs::Permissions::from_mode(0o6777)));
    if let Err(error) = made {
        return Verdict::Void(error.to_string());
    }
    // Renamed in the copy, it keeps its bits there: writing to it would take them away by itself.
    let report =
        bench.run(bench.whole().workspace(&work, Mode::Cow).command(["sh", "-c", "mv tool other; stat -c %a other"]));
    let report = match report {
        Ok(report) => report,
        Err(why) => return Verdict::Void(why),
    };
    let had = report.stdout.text().trim() == "6777";
    let changes = report.changes.unwrap_or_default();
    let Some(change) = changes.list.iter().find(|change| change.path == Path::new("other")) else {
        return Verdict::Void("the file was not changed in the copy".to_owned());
    };
    let kept = matches!(change.after, Some(Node::File { mode, .. }) if mode & 0o7000 != 0);
    let said = ["setuid", "setgid"].iter().all(|word| change.stripped.iter().any(|stripped| stripped == word));
    Verdict::of(
        !kept && said,
        "the change has a set-id bit, or does not say that it was stripped",
        had,
        "the copy had no set-id bit",
    )
}

fn hostile_artifacts(bench: &Bench) -> Verdict {
    let (work, home) = (bench.dir("work"), bench.path("home"));
    let _fresh = fs::remove_dir_all(&home);
    let script = "echo x > plain; ln plain hard; ln -s /etc/passwd link; ln -s .. up; ln -s up/up far; mkfifo pipe; \
                  mkdir closed; echo x > closed/f; chmod 0 closed; truncate -s 512M sparse";
    let work = work.display().to_string();
    let ran = bench.hotcell(&home, &["run", "-q", "--name", "hostile", "-w", &work, "--", "sh", "-c", script]).output();
    let kept = bench.hotcell(&home, &["diff", "--json", "hostile"]).output().map(|output| output.stdout);
    let (ran, kept) = match (ran, kept) {
        (Ok(ran), Ok(kept)) => (ran, kept),
        (Err(error), _) | (_, Err(error)) => return Verdict::Void(error.to_string()),
    };
    let diff: Value = serde_json::from_slice(&kept).unwrap_or_default();
    let kind = |name: &str| {
        let entries = diff["entries"].as_array().cloned().unwrap_or_default();
        let entry = entries.into_iter().find(|entry| entry["path"] == name).unwrap_or_default();
        entry["after"]["type"].as_str().unwrap_or_default().to_owned()
    };
    let links = ["link", "up", "far"].iter().all(|name| kind(name) == "symlink");
    let plain = ["plain", "hard", "closed/f", "sparse"].iter().all(|name| kind(name) == "file");
    // Kept with its hole: five hundred mebibytes take no room.
    let room: u64 = bytes_below(&home);
    Verdict::of(
        links && kind("pipe") == "special" && room < 64 << 20,
        format!("a link or pipe was taken for a file, or {room} bytes were kept"),
        plain && ran.status.success(),
        format!("plain files were not kept either: {}", String::from_utf8_lossy(&ran.stderr).trim()),
    )
}

/// What a directory takes on its disk.
fn bytes_below(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let bytes = |entry: fs::DirEntry| match entry.metadata() {
        Ok(file) if file.is_dir() => bytes_below(&entry.path()),
        Ok(file) => file.blocks() * 512,
        Err(_) => 0,
    };
    entries.map(bytes).sum()
}

fn hostile_names(bench: &Bench) -> Verdict {
    let work = bench.dir("work");
    let script = "touch \"$(printf 'a\\nb')\" \"$(printf 'c\\033[31m')\" \"$(printf 'd\\377')\" \"$(printf '\\342\\200\\256e')\" \"$(printf 'x%.0s' $(seq 255))\"";
    let report = match bench.run(bench.whole().workspace(&work, Mode::Cow).command(["sh", "-c", script])) {
        Ok(report) => report,
        Err(why) => return Verdict::Void(why),
    };
    let names: Vec<Vec<u8>> = report
        .changes
        .unwrap_or_default()
        .list
        .iter()
        .map(|change| change.path.as_os_str().as_bytes().to_vec())
        .collect();
    let deceives = |name: &[u8]| {
        let text = shown(name);
        text.chars().any(|letter| letter.is_control() || letter == '\u{202e}')
    };
    let raw = names.iter().filter(|name| name.iter().any(|byte| *byte < b' ' || *byte > b'~')).count();
    Verdict::of(
        !names.iter().any(|name| deceives(name)),
        "a name is shown with what a terminal obeys",
        raw >= 4,
        "no such name was made",
    )
}
