//! Shows a run's output while it is recorded, without ever making the supervisor wait.
//!
//! A thread of its own writes to our streams. If whoever reads them is slow, the queue fills up, the
//! command is made to wait, and its limits go on; if they are closed, the rest is recorded only.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use hotcell_base::RunId;
use hotcell_cell::Stream;
use hotcell_gate::Viewer;

use crate::screen;

/// Bytes that may wait to be shown.
const QUEUED_BYTES_MAX: usize = 1 << 20;

type OnStart = Box<dyn FnOnce(&RunId)>;

pub(crate) struct Tee {
    queue: Option<Sender<(Stream, Vec<u8>)>>,
    queued_bytes: Arc<AtomicUsize>,
    writer: Option<JoinHandle<()>>,
    /// Called once, when every wall stands.
    pub(crate) on_start: Option<OnStart>,
}

impl Tee {
    /// Shows output if `show`, else only lets it be recorded.
    pub(crate) fn new(show: bool) -> Tee {
        let queued_bytes = Arc::new(AtomicUsize::new(0));
        let mut tee = Tee { queue: None, queued_bytes: Arc::clone(&queued_bytes), writer: None, on_start: None };
        if show {
            let (queue, received) = channel();
            tee.queue = Some(queue);
            tee.writer = Some(std::thread::spawn(move || write_all(&received, &queued_bytes)));
        }
        tee
    }

    /// Waits until everything is shown.
    pub(crate) fn finish(mut self) {
        self.queue = None;
        if let Some(writer) = self.writer.take()
            && writer.join().is_err()
        {
            screen::note("hotcell: showing the output failed; it is complete in the log");
        }
    }
}

impl Viewer for Tee {
    fn started(&mut self, run: &RunId) {
        if let Some(on_start) = self.on_start.take() {
            on_start(run);
        }
    }

    fn output(&mut self, stream: Stream, bytes: &[u8]) {
        if let Some(queue) = &self.queue {
            self.queued_bytes.fetch_add(bytes.len(), Ordering::Relaxed);
            // The writer never leaves before the queue is closed.
            let _writer_gone = queue.send((stream, bytes.to_vec()));
        }
    }

    fn ready(&mut self) -> bool {
        self.queued_bytes.load(Ordering::Relaxed) < QUEUED_BYTES_MAX
    }
}

fn write_all(received: &Receiver<(Stream, Vec<u8>)>, queued_bytes: &AtomicUsize) {
    let mut closed = [false; 2];
    for (stream, bytes) in received {
        let idx = usize::from(stream == Stream::Stderr);
        if !closed[idx] {
            let written = match stream {
                Stream::Stdout => io::stdout().write_all(&bytes).and_then(|()| io::stdout().flush()),
                Stream::Stderr => io::stderr().write_all(&bytes),
            };
            if written.is_err() {
                closed[idx] = true;
                if stream == Stream::Stdout {
                    screen::note("hotcell: stdout is closed; the rest of the output is only in the log");
                }
            }
        }
        queued_bytes.fetch_sub(bytes.len(), Ordering::Relaxed);
    }
}
