//! `hotcell demo lease`: the whole way of a lease, with real values; and what happens when something is wrong.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use hotcell_authority::{LeaseLimits, Scope, Terms};
use hotcell_base::{Outcome, RunId};
use hotcell_cell::{Cell, Host, MountRequest, Plan, Stream};
use hotcell_gate::authority::ledger_place;
use hotcell_gate::leases::{self, Issued, Wish};
use hotcell_gate::{Authority, Gate, GateError, Home, Permission, Ran, Request, Viewer};
use hotcell_ledger::Envelope;
use jiff::SignedDuration;
use serde_json::{Value, json};

use crate::cli::authority::DemoCommand;
use crate::error::Failure;
use crate::{audit, screen};

pub(crate) fn demo(host: &Host, home: &Home, command: &DemoCommand) -> Result<u8, Failure> {
    let DemoCommand::Lease(args) = command;
    let scratch = Scratch::new()?;
    let mut demo = Demo { host, home, scratch: &scratch.0, as_json: args.json, steps: Vec::new(), n_failed: 0 };
    demo.lease()?;
    let (steps, n_failed) = (demo.steps, demo.n_failed);
    if args.json {
        screen::answer(format!("{:#}\n", json!({ "held": n_failed == 0, "steps": steps })))?;
    } else {
        let n = steps.len();
        screen::answer(match n_failed {
            0 => format!("\nall {n} steps went as they must\n"),
            failed => format!("\n{failed} of {n} steps did not go as they must\n"),
        })?;
    }
    Ok(u8::from(n_failed > 0))
}

/// A directory for the demo, which goes with it.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Scratch, Failure> {
        let path = std::env::temp_dir().join(format!("hotcell-demo-{:016x}", hotcell_gate::door::random()));
        let make = || {
            fs::create_dir_all(path.join("tools"))?;
            fs::write(path.join("tools/hello.py"), "print('hello from', __file__)\n")?;
            fs::write(path.join("secret.txt"), "not for the program\n")
        };
        make().map_err(|source| Failure::Io {
            message: format!("cannot make `{}`", path.display()),
            hint: Some("give it another place: TMPDIR=DIR hotcell demo lease".to_owned()),
            source,
        })?;
        // As a lease sees it: without links.
        let path = fs::canonicalize(&path).unwrap_or(path);
        Ok(Scratch(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _left = fs::remove_dir_all(&self.0);
    }
}

struct Demo<'a> {
    host: &'a Host,
    home: &'a Home,
    scratch: &'a Path,
    as_json: bool,
    steps: Vec<Value>,
    n_failed: usize,
}

/// What came on stdout, and when it began.
struct Heard {
    stdout: Vec<u8>,
    began: Option<mpsc::Sender<RunId>>,
}

impl Viewer for Heard {
    fn started(&mut self, run: &RunId) {
        if let Some(began) = self.began.take() {
            let _nobody_waits = began.send(run.clone());
        }
    }

    fn output(&mut self, stream: Stream, bytes: &[u8]) {
        if stream == Stream::Stdout {
            self.stdout.extend_from_slice(bytes);
        }
    }
}

impl Demo<'_> {
    fn lease(&mut self) -> Result<(), Failure> {
        let authority = Authority::open(self.home)?;
        self.title("A lease, from its issue to its audit")?;
        let issued = self.issue(&authority, &["python3 --version", "python3 -c **"], 5.0)?;
        let lease = &issued.lease;
        self.step(
            "issue",
            true,
            &[
                ("lease", lease.lease_id.to_string()),
                ("intent", lease.intent_id.clone().unwrap_or_default()),
                ("until", format!("{} (5 minutes)", lease.expires_at)),
                ("commands", "python3 --version, python3 -c **".to_owned()),
                ("paths", format!("{}/tools/*", self.scratch.display())),
                ("policy", lease.policy_digest.clone()),
                ("signed by", lease.sig.kid.to_string()),
            ],
        )?;
        let checked = authority.leases().check(&issued.text, None, &json!({ "demo": true }))?;
        let says = checked.as_ref().map_or_else(ToString::to_string, |_| "Valid".to_owned());
        self.step("verify", checked.is_ok(), &[("answer", says)])?;

        let gate = Gate::open(self.home)?;
        let (ran, stdout) = self.run(&gate, &["python3", "--version"], &issued.text)?;
        let record = &ran.record;
        let walls = record.isolation.as_ref().map_or(0, |isolation| isolation.walls.len());
        self.step(
            "execute",
            record.exit_code == Some(0) && stdout.starts_with("Python 3"),
            &[
                ("command", record.command.join(" ")),
                ("run", record.run_id.to_string()),
                ("stdout", stdout.trim().to_owned()),
                ("exit code", record.exit_status().to_string()),
                ("walls", format!("{walls}, proven from inside")),
            ],
        )?;
        let limit = lease.limits;
        let within = record.outcome == Some(Outcome::Exited) && record.memory_peak_bytes <= limit.mem_quota_mb << 20;
        self.step(
            "monitor",
            within,
            &[
                ("status", if within { "within_limits" } else { "violation" }.to_owned()),
                ("duration", format!("{:.3} s of {} s", record.duration_s, limit.wallclock_timeout_s)),
                ("memory", format!("{} of {} MiB", record.memory_peak_bytes.div_ceil(1 << 20), limit.mem_quota_mb)),
                ("processes", format!("{} of {}", record.pids_peak.unwrap_or(0), limit.pids_limit)),
            ],
        )?;
        self.artifacts(&authority, record)?;
        self.audit()?;

        self.title("What happens when something is wrong")?;
        let text = String::from_utf8_lossy(&issued.text).replace("python3 --version", "cat /etc/shadow");
        self.refused(&gate, "tampered lease", &["cat", "/etc/shadow"], text.as_bytes(), "Invalid signature")?;
        self.refused(&gate, "wrong command", &["id"], &issued.text, "Command not in allowlist: id")?;
        let outside = self.scratch.join("secret.txt");
        let reason = format!("Path not in allowlist: {}", outside.display());
        self.refused_path(&gate, &outside, &issued.text, &reason)?;
        let short = self.issue(&authority, &["python3 --version"], 1.0 / 60.0)?;
        std::thread::sleep(Duration::from_millis(1100));
        self.refused(&gate, "expired lease", &["python3", "--version"], &short.text, "Lease expired")?;
        self.killed(&authority, &gate, &issued)?;
        self.refused(&gate, "revoked lease", &["python3", "--version"], &issued.text, "Lease revoked")?;
        self.audit()
    }

    fn issue(&self, authority: &Authority, commands: &[&str], minutes: f64) -> Result<Issued, Failure> {
        let tools = format!("{}/tools/*", self.scratch.display());
        let pattern = |text: &&str| text.parse().expect("a pattern");
        let scope = Scope {
            paths_allowlist: vec![tools.parse().map_err(|_| Failure::Usage {
                message: format!("`{tools}` is no place for a demo"),
                hint: "give it another: TMPDIR=DIR hotcell demo lease".to_owned(),
            })?],
            commands_allowlist: commands.iter().map(pattern).collect(),
            ..Scope::default()
        };
        let limits = LeaseLimits { runs_max: 5, ..LeaseLimits::default() };
        let wish = Wish {
            terms: Terms { capability: String::new(), scope, limits },
            lasts: SignedDuration::from_secs_f64(minutes * 60.0),
            intent_id: Some("INT-DEMO".to_owned()),
            actor: "demo".to_owned(),
            audience: authority.here().clone(),
            parent: None,
        };
        Ok(authority.leases().issue(wish)?)
    }

    fn plan(&self, words: &[&str], shows: &[&Path]) -> Result<Plan, Failure> {
        let mut builder = Cell::builder().hide(self.home.path()).command(words.iter().copied());
        for path in shows {
            builder =
                builder.mount(MountRequest { source: path.to_path_buf(), target: path.to_path_buf(), writable: false });
        }
        for wall in crate::run::always_allowed_missing()? {
            builder = builder.allow_missing(wall);
        }
        Ok(builder.plan(self.host)?)
    }

    fn run(&self, gate: &Gate, words: &[&str], lease: &[u8]) -> Result<(Ran, String), Failure> {
        let shows: Vec<PathBuf> = vec![self.scratch.join("tools/hello.py")];
        let plan = self.plan(words, &shows.iter().map(PathBuf::as_path).collect::<Vec<_>>())?;
        let mut heard = Heard { stdout: Vec::new(), began: None };
        let request = Request { permission: Permission::Lease(lease.to_vec()), ..Request::default() };
        let ran = gate.run(&plan, request, &mut heard, None)?;
        Ok((ran, String::from_utf8_lossy(&heard.stdout).into_owned()))
    }

    fn artifacts(&mut self, authority: &Authority, record: &hotcell_gate::Record) -> Result<(), Failure> {
        let read = |name: &str| fs::read(record.artifacts.join(name)).unwrap_or_default();
        let text = |name: &str| String::from_utf8_lossy(&read(name)).trim().to_owned();
        let receipt = Envelope::read(&read("receipt.json")).and_then(|receipt| receipt.verify(&authority.ring().trust));
        let is_complete = text("stdout.log").starts_with("Python 3") && text("exit_code.txt") == "0" && receipt.is_ok();
        let says = match &receipt {
            Ok(statement) => format!("signed, about {} files", statement.subject.len()),
            Err(error) => error.to_string(),
        };
        self.step(
            "artifacts",
            is_complete,
            &[
                ("stdout.log", text("stdout.log")),
                ("stderr.log", format!("({} bytes)", read("stderr.log").len())),
                ("exit_code.txt", text("exit_code.txt")),
                ("meta.json", format!("lease_id, intent_id, outcome, usage … ({} bytes)", read("meta.json").len())),
                ("receipt.json", says),
                ("in", record.artifacts.display().to_string()),
            ],
        )
    }

    fn audit(&mut self) -> Result<(), Failure> {
        let found = audit::check(&ledger_place(self.home), &[], &audit::trust(self.home, None)?)?;
        let says = found.finding.as_ref().map_or("whole".to_owned(), |finding| finding.why.clone());
        let hash = found.hash.map(|hash| hash.to_string()).unwrap_or_default();
        let entries = format!("{}, each naming the hash of the one before", found.n_valid);
        self.step("audit verify", found.finding.is_none(), &[("answer", says), ("entries", entries), ("head", hash)])
    }

    /// Something that must not run.
    fn refused(&mut self, gate: &Gate, name: &str, words: &[&str], lease: &[u8], reason: &str) -> Result<(), Failure> {
        let plan = self.plan(words, &[])?;
        self.must_refuse(gate, name, &plan, lease, reason)
    }

    fn refused_path(&mut self, gate: &Gate, path: &Path, lease: &[u8], reason: &str) -> Result<(), Failure> {
        let plan = self.plan(&["python3", "--version"], &[path])?;
        self.must_refuse(gate, "wrong path", &plan, lease, reason)
    }

    fn must_refuse(&mut self, gate: &Gate, name: &str, plan: &Plan, lease: &[u8], reason: &str) -> Result<(), Failure> {
        let request = Request { permission: Permission::Lease(lease.to_vec()), ..Request::default() };
        let mut heard = Heard { stdout: Vec::new(), began: None };
        let answer = match gate.run(plan, request, &mut heard, None) {
            Err(GateError::Refused { source, .. }) => source.to_string(),
            Err(error) => return Err(error.into()),
            Ok(ran) => format!("it ran: {}", ran.record.run_id),
        };
        self.step(name, answer == reason, &[("answer", answer)])
    }

    /// A program that runs on, until its lease is taken back.
    fn killed(&mut self, authority: &Authority, gate: &Gate, issued: &Issued) -> Result<(), Failure> {
        let plan = self.plan(&["python3", "-c", "import time; time.sleep(60)"], &[])?;
        let (began, begins) = mpsc::channel();
        let (ran, waited, id) = std::thread::scope(|scope| {
            let running = scope.spawn(|| {
                let request = Request { permission: Permission::Lease(issued.text.clone()), ..Request::default() };
                let mut heard = Heard { stdout: Vec::new(), began: Some(began) };
                gate.run(&plan, request, &mut heard, None)
            });
            let id = begins.recv().ok();
            std::thread::sleep(Duration::from_millis(200));
            let revoked = authority.leases().revoke(&issued.lease.lease_id, Some("the demo takes it back"));
            let since = Instant::now();
            let ran = running.join().expect("no panic");
            (revoked.map_err(GateError::from).and(ran), since.elapsed(), id)
        });
        let record = ran?.record;
        let outcome = record.outcome.map_or("none".to_owned(), |outcome| outcome.to_string());
        self.step(
            "killed on revoke",
            record.outcome == Some(Outcome::LeaseRevoked),
            &[
                ("run", id.map(|id| id.to_string()).unwrap_or_default()),
                ("outcome", outcome),
                (
                    "last process",
                    format!("gone, with all written down, {:.0} ms after the revocation", waited.as_secs_f64() * 1e3),
                ),
                (
                    "see",
                    format!(
                        "hotcell lease show {}",
                        leases::path(self.home, &issued.lease.lease_id)
                            .file_stem()
                            .map_or("", |stem| stem.to_str().unwrap_or(""))
                    ),
                ),
            ],
        )
    }

    fn title(&self, text: &str) -> Result<(), Failure> {
        if self.as_json { Ok(()) } else { screen::answer(format!("\n{text}\n\n")) }
    }

    fn step(&mut self, name: &str, held: bool, values: &[(&str, String)]) -> Result<(), Failure> {
        self.n_failed += usize::from(!held);
        let object: serde_json::Map<String, Value> =
            values.iter().map(|(key, value)| ((*key).to_owned(), value.clone().into())).collect();
        self.steps.push(json!({ "step": name, "held": held, "values": object }));
        if self.as_json {
            return Ok(());
        }
        let mark = if held { "ok " } else { "NOT" };
        let mut text = format!("{mark} {}. {name}\n", self.steps.len());
        for (key, value) in values {
            text.push_str(&format!("       {key:<14} {value}\n"));
        }
        screen::answer(hotcell_base::text::shown_line(text.replace('\n', "\u{1}")).replace("\\u{1}", "\n"))
    }
}
