//! A shared machine is noisy: a sample starts only when nothing else is runnable, and does not count if somebody else's
//! work was seen while it ran.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Waits for silence and remembers what was heard.
pub(crate) struct Gate {
    loadavg: File,
    stat: File,
    patience: Duration,
    pub(crate) n_waits: u64,
    pub(crate) n_dropped: u64,
}

impl Gate {
    pub(crate) fn new(patience: Duration) -> Gate {
        let open = |path| File::open(path).expect("/proc is there");
        Gate { loadavg: open("/proc/loadavg"), stat: open("/proc/stat"), patience, n_waits: 0, n_dropped: 0 }
    }

    /// Waits until nobody else wants to run, but not for ever: a machine that is never quiet is measured as it is.
    pub(crate) fn wait(&mut self) {
        let give_up = Instant::now() + self.patience;
        let mut n_quiet = 0;
        while n_quiet < 3 && Instant::now() < give_up {
            if self.n_running() <= 1 {
                n_quiet += 1;
            } else {
                n_quiet = 0;
                self.n_waits += 1;
            }
            sleep(Duration::from_micros(200));
        }
    }

    /// Runs something; none if niced work of others was seen meanwhile.
    pub(crate) fn sample<T>(&mut self, run: impl FnOnce() -> T) -> Option<T> {
        self.wait();
        let before = self.niced();
        let result = run();
        if self.niced() == before {
            return Some(result);
        }
        self.n_dropped += 1;
        None
    }

    /// The fourth field of `/proc/loadavg` begins with the number of runnable tasks, ourselves included.
    fn n_running(&self) -> u64 {
        let text = read(&self.loadavg);
        text.split(' ').nth(3).and_then(|field| field.split('/').next()?.parse().ok()).unwrap_or(1)
    }

    /// Ticks spent on niced processes since boot.
    fn niced(&self) -> u64 {
        let text = read(&self.stat);
        text.split_whitespace().nth(2).and_then(|field| field.parse().ok()).unwrap_or(0)
    }
}

fn read(file: &File) -> String {
    let mut bytes = [0u8; 256];
    let n = file.read_at(&mut bytes, 0).unwrap_or(0);
    String::from_utf8_lossy(&bytes[..n]).into_owned()
}
