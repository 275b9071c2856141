//! Who is measured, and how each of them starts a command.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hotcell_cell::pool::Ahead;
use hotcell_cell::template::{self, Template};
use hotcell_cell::{Cell, Exec, Host, MountRequest, Observer, Plan, Pool, Session, Stream};

use crate::launcher::Launchers;

/// So many commands are started at once, at most.
const LAUNCHERS_MAX: usize = 32;
/// So many stations are kept by a pool: one for each of eight launchers, and as many that are being made ready.
const POOLED: usize = 16;

/// What is started.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Payload {
    /// A static program that does nothing.
    Noop,
    True,
    Python,
}

impl Payload {
    pub(crate) const ALL: [Payload; 3] = [Payload::Noop, Payload::True, Payload::Python];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Payload::Noop => "noop",
            Payload::True => "true",
            Payload::Python => "python",
        }
    }

    fn argv(self, place: &Place) -> Vec<String> {
        match self {
            Payload::Noop => vec![place.noop.display().to_string()],
            Payload::True => vec!["/bin/true".to_owned()],
            Payload::Python => ["/usr/bin/python3", "-c", "pass"].map(str::to_owned).to_vec(),
        }
    }
}

/// What the contenders need on disk: a no-op, a root for those that want one, a home for us.
pub(crate) struct Place {
    launchers: Arc<Launchers>,
    directory: tempfile::TempDir,
    pub(crate) noop: PathBuf,
}

impl Place {
    pub(crate) fn new() -> Place {
        let launchers = Arc::new(Launchers::new(LAUNCHERS_MAX));
        let directory = tempfile::Builder::new().prefix("hotcell-bench-").tempdir().expect("a directory");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(directory.path(), mode).expect("ours");
        let noop = directory.path().join("noop");
        let mut compiler = Command::new("cc");
        compiler.args(["-static", "-O2", "-x", "c", "-", "-o"]).arg(&noop).stdin(Stdio::piped());
        let mut compiler = compiler.spawn().expect("a C compiler makes the no-op");
        let mut source = compiler.stdin.take().expect("piped");
        std::io::Write::write_all(&mut source, b"int main(void) { return 0; }\n").expect("read by the compiler");
        drop(source);
        assert!(compiler.wait().expect("it ends").success(), "the static no-op cannot be made");
        Place { launchers, directory, noop }
    }

    /// A command as it is called where the no-op's directory is at `/noop`.
    fn inside(&self, argv: &[String]) -> Vec<String> {
        let directory = self.directory.path().display().to_string();
        argv.iter().map(|word| word.replace(&directory, "/noop")).collect()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

/// Starts a payload and waits for its end: how long that took, if it went well.
type Start = Box<dyn Fn() -> Option<Duration> + Sync>;

/// Something of ours, timed.
fn timed(run: impl FnOnce() -> bool) -> Option<Duration> {
    let begun = Instant::now();
    run().then(|| begun.elapsed())
}

/// One way to start one payload.
pub(crate) struct Contender {
    pub(crate) name: &'static str,
    pub(crate) payload: Payload,
    /// Whether it is one of ours.
    pub(crate) is_ours: bool,
    pub(crate) start: Start,
}

/// All contenders that work here, and the names of those that do not.
pub(crate) fn all(place: &Place, is_wanted: &dyn Fn(&str, Payload) -> bool) -> (Vec<Contender>, Vec<&'static str>) {
    let (mut able, mut absent) = (Vec::new(), Vec::new());
    for payload in Payload::ALL {
        let candidates = peers(place, payload).into_iter().chain(engines(place, payload)).chain(ours(place, payload));
        for Candidate { name, is_ours, make } in candidates.filter(|one| is_wanted(one.name, payload)) {
            let start = make();
            // Twice: the first start of some makes what the next ones use.
            if start().and_then(|_| start()).is_some() {
                able.push(Contender { name, payload, is_ours, start });
            } else if !absent.contains(&name) {
                absent.push(name);
            }
        }
    }
    (able, absent)
}

/// Who could be measured. What it keeps open while it is, is opened only then.
struct Candidate<'a> {
    name: &'static str,
    is_ours: bool,
    make: Box<dyn FnOnce() -> Start + 'a>,
}

/// Stands for a name that no other start has.
const NAME: &str = "NAME";

/// A whole command.
fn command(place: &Place, argv: Vec<String>) -> Start {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let (launchers, home) = (Arc::clone(&place.launchers), place.path("home").display().to_string());
    Box::new(move || {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("hotcell-bench-{}-{number}", std::process::id());
        let words: Vec<String> =
            argv.iter().map(|word| if word == NAME { name.clone() } else { word.clone() }).collect();
        launchers.run(&home, &words)
    })
}

fn peers(place: &Place, payload: Payload) -> Vec<Candidate<'_>> {
    let argv = payload.argv(place);
    let noop_directory = place.noop.parent().unwrap_or(Path::new("/")).display().to_string();
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let roots = format!(
        "--ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64 \
         --ro-bind {noop_directory} {noop_directory} --proc /proc --dev /dev --tmpfs /run"
    );
    let mut peers = vec![
        ("posix_spawn", Vec::new()),
        (
            "unshare",
            words(
                "unshare --user --map-current-user --mount --pid --fork --net --ipc --uts --cgroup --time --kill-child",
            ),
        ),
        ("bwrap --unshare-all", words(&format!("bwrap --unshare-all --die-with-parent {roots}"))),
        (
            "nsjail",
            words(&format!(
                "nsjail -Mo -Q --disable_rlimits -R /usr -s usr/bin:/bin -s usr/lib:/lib -s usr/lib64:/lib64 -R {noop_directory} --"
            )),
        ),
    ];
    for runtime in ["crun", "runc"] {
        if let Some(prefix) = bundle(place, runtime, payload, &argv) {
            peers.push((runtime, prefix));
        }
    }
    let candidate = |(name, prefix): (&'static str, Vec<String>)| {
        let whole = if matches!(name, "crun" | "runc") { prefix } else { [prefix, argv.clone()].concat() };
        Candidate { name, is_ours: false, make: Box::new(|| command(place, whole)) }
    };
    peers.into_iter().map(candidate).collect()
}

/// A bundle for a container runtime, with the host's `/usr` as its root's, and the command that runs it.
fn bundle(place: &Place, runtime: &'static str, payload: Payload, argv: &[String]) -> Option<Vec<String>> {
    let directory = place.path(&format!("{runtime}-{}", payload.name()));
    make_root(&directory.join("rootfs")).ok()?;
    let made = Command::new(runtime).arg("spec").current_dir(&directory).stderr(Stdio::null()).status();
    if !made.is_ok_and(|status| status.success()) {
        // Named among those that are absent when its start fails.
        return Some(vec![runtime.to_owned()]);
    }
    let path = directory.join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).ok()?).ok()?;
    config["process"]["args"] = place.inside(argv).into();
    config["process"]["terminal"] = false.into();
    config["process"]["rlimits"] = serde_json::json!([]);
    let bind = |source: &Path, target: &str| serde_json::json!({ "destination": target, "source": source, "type": "bind", "options": ["rbind", "ro"] });
    let mounts = config["mounts"].as_array_mut()?;
    mounts.push(bind(Path::new("/usr"), "/usr"));
    mounts.push(bind(place.directory.path(), "/noop"));
    config["linux"]["resources"] =
        serde_json::json!({ "memory": { "limit": 2_147_483_648u64 }, "pids": { "limit": 256 } });
    std::fs::write(&path, config.to_string()).ok()?;
    Some([runtime, "run", "-b", &directory.display().to_string(), NAME].map(str::to_owned).to_vec())
}

/// The places of a root whose `/usr` is the host's.
fn make_root(root: &Path) -> std::io::Result<()> {
    for name in ["usr", "proc", "dev", "sys", "tmp", "etc", "run", "noop"] {
        std::fs::create_dir_all(root.join(name))?;
    }
    for name in ["bin", "lib", "lib64"] {
        std::os::unix::fs::symlink(format!("usr/{name}"), root.join(name))?;
    }
    Ok(())
}

/// Container engines, where they are: without a network, and with a limit on memory and processes.
fn engines(place: &Place, payload: Payload) -> Vec<Candidate<'_>> {
    let argv = place.inside(&payload.argv(place));
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let options = format!(
        "run --rm --network none --memory 2g --pids-limit 256 --ulimit nofile=1024:1024 --ulimit nproc=4096:4096 \
         -v /usr:/usr:ro -v {}:/noop:ro",
        place.directory.path().display()
    );
    let root = place.path(&format!("engine-{}", payload.name()));
    make_root(&root).expect("a directory of ours");
    let podman =
        [words("podman --cgroup-manager=cgroupfs --runtime runc"), words(&options), words("--rootfs")].concat();
    let podman = [podman, vec![root.display().to_string()], argv.clone()].concat();
    let docker = move || -> Start {
        let image = Image::of(&root);
        let start = command(place, [words("docker"), words(&options), vec![image.0.clone()], argv].concat());
        Box::new(move || {
            let _is_there = &image;
            start()
        })
    };
    vec![
        Candidate { name: "podman run", is_ours: false, make: Box::new(|| command(place, podman)) },
        Candidate { name: "docker run", is_ours: false, make: Box::new(docker) },
    ]
}

/// An image of docker's, which is removed with this. Where there is no docker, nothing comes of it.
struct Image(String);

impl Image {
    fn of(root: &Path) -> Image {
        let name = root.file_name().unwrap_or_default().display();
        let image = Image(format!("hotcell-bench-{}-{name}", std::process::id()));
        let import = "tar -C \"$1\" -c . | docker import - \"$2\"";
        Image::quietly(Command::new("sh").args(["-c", import, "sh"]).arg(root).arg(&image.0));
        image
    }

    fn quietly(command: &mut Command) {
        // If it fails, so does every start, which says that docker is not able to run here.
        let _shows_later = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        Image::quietly(Command::new("docker").args(["rmi", "--force"]).arg(&self.0));
    }
}

/// A plan of a payload, with every wall and the default limits.
pub(crate) fn plan(place: &Place, payload: Payload) -> Plan {
    let host = Host::probe(std::env::vars_os()).expect("this machine can be looked at");
    let mount = MountRequest { source: place.noop.clone(), target: place.noop.clone(), writable: false };
    Cell::builder().mount(mount).command(payload.argv(place)).plan(&host).expect("a plan")
}

/// A session of the program's, which ends with this.
struct Created {
    home: PathBuf,
    name: String,
}

impl Created {
    fn new(place: &Place, payload: Payload) -> Created {
        let created = Created { home: place.path("home"), name: format!("bench-{}", payload.name()) };
        let mount = format!("{0}:{0}:ro", place.noop.display());
        let made = created.hotcell(&["create", &created.name, "--mount", &mount]);
        assert!(made, "a session can be made");
        created
    }

    fn hotcell(&self, words: &[&str]) -> bool {
        let mut command = Command::new(env!("CARGO_BIN_EXE_hotcell"));
        command.args(words).env("HOTCELL_HOME", &self.home);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().is_ok_and(|status| status.success())
    }
}

impl Drop for Created {
    fn drop(&mut self) {
        self.hotcell(&["rm", &self.name]);
    }
}

fn ours(place: &Place, payload: Payload) -> Vec<Candidate<'_>> {
    let argv = payload.argv(place);
    let host = Host::probe(std::env::vars_os()).expect("this machine can be looked at");
    let plan = plan(place, payload);
    let pool = |ahead: Ahead| {
        let plan = plan.clone();
        move || -> Start {
            let pool = Pool::open(plan, POOLED, ahead).expect("a pool");
            Box::new(move || timed(|| pool.run().is_ok_and(|report| report.exit_code == Some(0))))
        }
    };
    let (on_demand, pooled) = (pool(Ahead::Station), pool(Ahead::Cell));
    let ours = |name, make: Box<dyn FnOnce() -> Start>| Candidate { name, is_ours: true, make };
    let session = {
        let host = host.clone();
        let mount = MountRequest { source: place.noop.clone(), target: place.noop.clone(), writable: false };
        let exec = Exec { argv: argv.iter().map(Into::into).collect(), ..Exec::default() };
        move || -> Start {
            let open = move || {
                let plan = Cell::builder().mount(mount.clone()).plan_session(&host).expect("a plan");
                Session::open(plan, &mut Nobody).expect("a session")
            };
            // One for each launcher: commands of one session wait for each other.
            let idle = Mutex::new(vec![open()]);
            Box::new(move || {
                let taken = idle.lock().expect("nobody panicked").pop();
                let mut session = taken.unwrap_or_else(&open);
                let took = timed(|| session.exec(&exec).is_ok_and(|report| report.exit_code == Some(0)));
                idle.lock().expect("nobody panicked").push(session);
                took
            })
        }
    };
    let template = |ahead: Ahead| {
        let (plan, host) = (plan.clone(), host.clone());
        move || -> Start {
            let warm = template::python(Cell::builder(), "/usr/bin/python3", &[]).plan(&host).expect("a plan");
            let memory = tempfile::tempfile().expect("a file");
            let template = Arc::new(Template::warm(&warm, memory, template::PYTHON_TRIAL).expect("a template"));
            let pool = Pool::open(plan.from_template(template, 0), POOLED, ahead).expect("a pool");
            Box::new(move || timed(|| pool.run().is_ok_and(|report| report.exit_code == Some(0))))
        }
    };
    let whole_template = || -> Start {
        let words = [env!("CARGO_BIN_EXE_hotcell"), "run", "-q", "--template", "/usr/bin/python3", "--", "-c", "pass"];
        command(place, words.map(str::to_owned).to_vec())
    };
    let templates = if payload == Payload::Python {
        vec![
            ours("hotcell, template, on demand", Box::new(template(Ahead::Station))),
            ours("hotcell, template, pool", Box::new(template(Ahead::Cell))),
            Candidate { name: "hotcell run --template", is_ours: true, make: Box::new(whole_template) },
        ]
    } else {
        Vec::new()
    };
    let exec = {
        let argv = argv.clone();
        move || -> Start {
            let session = Created::new(place, payload);
            let hotcell = env!("CARGO_BIN_EXE_hotcell").to_owned();
            let words = [hotcell, "exec".into(), "-q".into(), session.name.clone(), "--".into()];
            let start = command(place, words.into_iter().chain(argv).collect());
            Box::new(move || {
                let _is_there = &session;
                start()
            })
        }
    };
    let whole = || -> Start {
        let hotcell = env!("CARGO_BIN_EXE_hotcell").to_owned();
        let mount = format!("{0}:{0}:ro", place.noop.display());
        let whole = [hotcell, "run".into(), "-q".into(), "--mount".into(), mount, "--".into()];
        command(place, whole.into_iter().chain(argv).collect())
    };
    let mut all = vec![
        ours("hotcell, library, on demand", Box::new(on_demand)),
        ours("hotcell, library, pool", Box::new(pooled)),
        ours("hotcell, library, session", Box::new(session)),
        ours(
            "hotcell, library, cold",
            Box::new(move || Box::new(move || timed(|| plan.run().is_ok_and(|report| report.exit_code == Some(0))))),
        ),
        Candidate { name: "hotcell run", is_ours: true, make: Box::new(whole) },
        Candidate { name: "hotcell exec", is_ours: true, make: Box::new(exec) },
    ];
    all.extend(templates);
    all
}

struct Nobody;

impl Observer for Nobody {
    fn output(&mut self, _: Stream, _: &[u8]) -> std::io::Result<()> {
        Ok(())
    }
}
