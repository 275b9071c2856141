//! What was measured: a table, JSON and a picture.

use std::fmt::Write;
use std::time::Duration;

use serde_json::{Value, json};

use crate::contenders::Payload;
use crate::memory::Memory;

/// The times of one contender.
pub(crate) struct Latency {
    pub(crate) name: &'static str,
    pub(crate) payload: Payload,
    pub(crate) is_ours: bool,
    /// Sorted.
    pub(crate) times: Vec<Duration>,
}

impl Latency {
    pub(crate) fn at(&self, part: f64) -> Option<f64> {
        let last = self.times.len().checked_sub(1)?;
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // An index into a list of hundreds.
        let idx = (last as f64 * part).round() as usize;
        self.times.get(idx).map(|time| time.as_secs_f64() * 1e3)
    }
}

/// Starts per second of one contender with so many launchers.
pub(crate) struct Rate {
    pub(crate) name: &'static str,
    pub(crate) n_launchers: usize,
    pub(crate) per_second: f64,
}

/// Everything that was measured in one run.
pub(crate) struct Results {
    pub(crate) n_mounts: usize,
    pub(crate) n_waits: u64,
    pub(crate) n_dropped: u64,
    pub(crate) absent: Vec<&'static str>,
    pub(crate) latencies: Vec<Latency>,
    pub(crate) rates: Vec<Rate>,
    pub(crate) memory: Option<Memory>,
}

const FLOOR: &str = "posix_spawn";
const PEER: &str = "bwrap --unshare-all";

impl Results {
    fn median(&self, name: &str, payload: Payload) -> Option<f64> {
        self.latencies.iter().find(|one| one.name == name && one.payload == payload)?.at(0.5)
    }

    pub(crate) fn table(&self) -> String {
        let mut text = String::new();
        for payload in Payload::ALL {
            let (floor, peer) = (self.median(FLOOR, payload), self.median(PEER, payload));
            let name = payload.name();
            writeln!(text, "{name:<34} {:>9} {:>9} {:>9} {:>9}", "p50 ms", "p99 ms", "× spawn", "× bwrap")
                .expect("a String");
            for one in self.latencies.iter().filter(|one| one.payload == payload) {
                let (Some(median), Some(p99)) = (one.at(0.5), one.at(0.99)) else { continue };
                let ratio = |to: Option<f64>| to.map_or_else(|| "–".to_owned(), |to| format!("{:.2}", median / to));
                let (floor, peer) = (ratio(floor), ratio(peer));
                writeln!(text, "{:<34} {median:>9.3} {p99:>9.3} {floor:>9} {peer:>9}", one.name).expect("a String");
            }
            text.push('\n');
        }
        if !self.rates.is_empty() {
            let counts = self.launchers();
            let header: String = counts.iter().map(|n| format!(" {:>9}", format!("{n} at once"))).collect();
            writeln!(text, "{:<34}{header}", "starts a second (noop)").expect("a String");
            let mut names: Vec<&str> = self.rates.iter().map(|rate| rate.name).collect();
            names.dedup();
            for name in names {
                let rate = |n: usize| self.rates.iter().find(|rate| rate.name == name && rate.n_launchers == n);
                let row: String = counts
                    .iter()
                    .map(|n| {
                        format!(" {:>9}", rate(*n).map_or_else(|| "–".into(), |rate| format!("{:.0}", rate.per_second)))
                    })
                    .collect();
                writeln!(text, "{name:<34}{row}").expect("a String");
            }
            text.push('\n');
        }
        if let Some(Memory { idle_cell, supervisor, supervisor_own }) = self.memory {
            writeln!(text, "an idle cell of a pool takes {idle_cell:.2} MiB, with its station and in the kernel")
                .expect("a String");
            writeln!(text, "a hotcell run takes {supervisor:.1} MiB, {supervisor_own:.1} MiB of it its own")
                .expect("a String");
        }
        if !self.absent.is_empty() {
            writeln!(text, "not here, or not able to run here: {}", self.absent.join(", ")).expect("a String");
        }
        let Results { n_mounts, n_waits, n_dropped, .. } = self;
        writeln!(
            text,
            "{n_mounts} mounts on this machine; waited {n_waits} times for silence, dropped {n_dropped} samples"
        )
        .expect("a String");
        text
    }

    fn launchers(&self) -> Vec<usize> {
        let mut counts: Vec<usize> = self.rates.iter().map(|rate| rate.n_launchers).collect();
        counts.sort_unstable();
        counts.dedup();
        counts
    }

    pub(crate) fn json(&self) -> Value {
        let latencies = self.latencies.iter().map(|one| {
            json!({
                "name": one.name, "payload": one.payload.name(), "hotcell": one.is_ours, "samples": one.times.len(),
                "p50_ms": one.at(0.5), "p99_ms": one.at(0.99), "min_ms": one.at(0.0),
                "times_posix_spawn": one.at(0.5).zip(self.median(FLOOR, one.payload)).map(|(a, b)| a / b),
                "times_bwrap": one.at(0.5).zip(self.median(PEER, one.payload)).map(|(a, b)| a / b),
            })
        });
        let rates = self.rates.iter().map(
            |rate| json!({ "name": rate.name, "launchers": rate.n_launchers, "starts_per_second": rate.per_second }),
        );
        json!({
            "idle_cell_mib": self.memory.as_ref().map(|memory| memory.idle_cell),
            "supervisor_mib": self.memory.as_ref().map(|memory| memory.supervisor),
            "supervisor_own_mib": self.memory.as_ref().map(|memory| memory.supervisor_own),
            "mounts": self.n_mounts, "waits": self.n_waits, "dropped": self.n_dropped, "absent": self.absent,
            "latencies": latencies.collect::<Vec<_>>(), "rates": rates.collect::<Vec<_>>(),
        })
    }

    /// Bars of the medians for the no-op, on a scale of powers of ten.
    pub(crate) fn picture(&self) -> String {
        let mut rows: Vec<(&Latency, f64)> = self
            .latencies
            .iter()
            .filter(|one| one.payload == Payload::Noop)
            .filter_map(|one| Some((one, one.at(0.5)?)))
            .collect();
        rows.sort_by(|a, b| a.1.total_cmp(&b.1));
        let (left, row, width) = (220.0, 24.0, 760.0);
        let (least, most) = (0.1f64, rows.last().map_or(1.0, |last| last.1).max(1.0) * 1.5);
        let x = |ms: f64| left + (width - left - 90.0) * (ms / least).ln() / (most / least).ln();
        let height = 40.0 + row * rows.len() as f64;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"13\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n<text x=\"10\" y=\"20\">one start of a static no-op, median, milliseconds</text>\n"
        );
        for (at, (one, median)) in rows.iter().enumerate() {
            let y = 34.0 + row * at as f64;
            let fill = if one.is_ours { "#d9480f" } else { "#adb5bd" };
            writeln!(
                svg,
                "<text x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">{}</text><rect x=\"{left}\" y=\"{y:.0}\" width=\"{:.1}\" height=\"16\" fill=\"{fill}\"/><text x=\"{:.0}\" y=\"{:.0}\">{median:.2}</text>",
                left - 8.0,
                y + 13.0,
                one.name,
                (x(*median) - left).max(1.0),
                x(*median) + 6.0,
                y + 13.0,
            )
            .expect("a String");
        }
        svg.push_str("</svg>\n");
        svg
    }
}
