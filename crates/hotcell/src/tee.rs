//! Shows a run's output while it is recorded, without ever making the supervisor wait.
//!
//! A thread of its own writes to the streams. If whoever reads them is slow, the queue fills up, the
//! command is made to wait, and its limits go on; if they are closed, the rest is recorded only.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use hotcell_base::RunId;
use hotcell_cell::Stream;
use hotcell_gate::Viewer;
use hotcell_gate::session::Window;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::screen;

/// Bytes that may wait to be shown.
const QUEUED_BYTES_MAX: usize = 1 << 20;

type OnStart = Box<dyn FnOnce(&RunId) + Send>;

pub(crate) struct Tee {
    /// Where output goes, until there is some.
    streams: Option<[Box<dyn Write + Send>; 2]>,
    queue: Option<Sender<(Stream, Vec<u8>)>>,
    queued_bytes: Arc<AtomicUsize>,
    writer: Option<JoinHandle<()>>,
    /// Called once, when every wall stands.
    pub(crate) on_start: Option<OnStart>,
}

impl Tee {
    /// Shows output if `show`, else only lets it be recorded.
    pub(crate) fn new(show: bool) -> Tee {
        if show {
            return Tee::to([Box::new(io::stdout()), Box::new(io::stderr())]);
        }
        Tee { streams: None, queue: None, queued_bytes: Arc::default(), writer: None, on_start: None }
    }

    /// Shows output on somebody else's streams, for as long as they are there.
    pub(crate) fn on(stdout: OwnedFd, stderr: OwnedFd, is_gone: Arc<AtomicBool>) -> Tee {
        let patient = |stream| Box::new(Patient { stream, is_gone: Arc::clone(&is_gone) });
        Tee::to([patient(stdout), patient(stderr)])
    }

    fn to(streams: [Box<dyn Write + Send>; 2]) -> Tee {
        Tee { streams: Some(streams), queue: None, queued_bytes: Arc::default(), writer: None, on_start: None }
    }

    /// Starts the thread: many commands have nothing to say.
    fn begin(&mut self) {
        let Some(streams) = self.streams.take() else { return };
        let (queue, received) = channel();
        let shown = Arc::clone(&self.queued_bytes);
        self.queue = Some(queue);
        self.writer = Some(std::thread::spawn(move || write_all(&received, streams, &shown)));
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

/// A stream of somebody who may go away while others still hold it, and read nothing.
struct Patient {
    stream: OwnedFd,
    is_gone: Arc<AtomicBool>,
}

impl Write for Patient {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // So much can be written to a pipe that polls as writable, without waiting.
        const AT_ONCE: usize = 4096;
        const LOOK_EVERY: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
        while !self.is_gone.load(Ordering::Relaxed) {
            let mut fds = [PollFd::new(&self.stream, PollFlags::OUT)];
            match rustix::event::poll(&mut fds, Some(&LOOK_EVERY)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return Ok(rustix::io::write(&self.stream, &bytes[..bytes.len().min(AT_ONCE)])?),
                Err(errno) => return Err(errno.into()),
            }
        }
        Err(io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Window for Tee {
    fn close(self: Box<Self>) {
        self.finish();
    }
}

impl Viewer for Tee {
    fn started(&mut self, run: &RunId) {
        if let Some(on_start) = self.on_start.take() {
            on_start(run);
        }
    }

    fn output(&mut self, stream: Stream, bytes: &[u8]) {
        self.begin();
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

fn write_all(
    received: &Receiver<(Stream, Vec<u8>)>,
    mut streams: [Box<dyn Write + Send>; 2],
    queued_bytes: &AtomicUsize,
) {
    let mut closed = [false; 2];
    for (stream, bytes) in received {
        let idx = usize::from(stream == Stream::Stderr);
        if !closed[idx] {
            let written = streams[idx].write_all(&bytes).and_then(|()| streams[idx].flush());
            if written.is_err() {
                closed[idx] = true;
                if stream == Stream::Stdout {
                    // If that is closed as well, nobody is there to be told.
                    let _told =
                        writeln!(streams[1], "hotcell: stdout is closed; the rest of the output is only in the log");
                }
            }
        }
        queued_bytes.fetch_sub(bytes.len(), Ordering::Relaxed);
    }
}
