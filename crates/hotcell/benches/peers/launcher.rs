//! Starts whole commands from a process that is small and holds nothing open.
//!
//! A process that holds hundreds of cells takes long to start anything: the kernel copies and closes all its descriptors.
//! That would be charged to the peers, and to the floor they are compared with.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// What the bench is called with to be one.
pub(crate) const FLAG: &str = "--launcher";

/// Launchers that are free.
pub(crate) struct Launchers(Mutex<Vec<Launcher>>);

struct Launcher {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Launchers {
    /// Started before anything is opened.
    pub(crate) fn new(n: usize) -> Launchers {
        Launchers(Mutex::new((0..n).map(|_| Launcher::start()).collect()))
    }

    /// Starts a command and waits for its end: how long that took, if it went well.
    pub(crate) fn run(&self, home: &str, argv: &[String]) -> Option<Duration> {
        let mut launcher = self.0.lock().expect("nobody panicked").pop().expect("there are enough");
        let took = launcher.run(home, argv);
        self.0.lock().expect("nobody panicked").push(launcher);
        took
    }
}

impl Launcher {
    fn start() -> Launcher {
        let program = std::env::current_exe().expect("our own path");
        let spawned = Command::new(program).arg(FLAG).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = spawned.expect("a launcher");
        let (to, from) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        Launcher { child, to, from: BufReader::new(from) }
    }

    fn run(&mut self, home: &str, argv: &[String]) -> Option<Duration> {
        let words: Vec<&str> = std::iter::once(home).chain(argv.iter().map(String::as_str)).collect();
        let text = words.join("\0");
        self.to.write_all(&(text.len() as u64).to_le_bytes()).expect("it listens");
        self.to.write_all(text.as_bytes()).expect("it listens");
        let mut answer = String::new();
        self.from.read_line(&mut answer).expect("it answers");
        answer.trim().parse().ok().map(Duration::from_nanos)
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        // It would end by itself when its input does.
        let _ended = self.child.kill().and_then(|()| self.child.wait());
    }
}

/// The life of a launcher.
pub(crate) fn be_one() {
    let (mut input, mut output) = (std::io::stdin().lock(), std::io::stdout().lock());
    let mut len = [0; 8];
    while input.read_exact(&mut len).is_ok() {
        let mut text = vec![0; usize::try_from(u64::from_le_bytes(len)).expect("small")];
        input.read_exact(&mut text).expect("all of it");
        let text = String::from_utf8(text).expect("text");
        let words: Vec<&str> = text.split('\0').collect();
        let mut command = Command::new(words[1]);
        command.args(&words[2..]).env("HOTCELL_HOME", words[0]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let begun = Instant::now();
        let is_fine = command.status().is_ok_and(|status| status.success());
        let took = begun.elapsed().as_nanos();
        let answer = if is_fine { format!("{took}\n") } else { "failed\n".to_owned() };
        output.write_all(answer.as_bytes()).and_then(|()| output.flush()).expect("somebody listens");
    }
}
