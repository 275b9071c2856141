//! The ledger on disk: who may write, how many share one sync, and what a crash leaves.
//!
//! ```text
//! append ─▶ waiting ─▶ the first to come writes for all who wait: lock, catch up, write, sync, sign the head, unlock
//! ```
//!
//! - One writer at a time: a lock on the directory itself, held for one batch. Before each batch the writer makes sure that
//!   the directory and the file are still the ones it has open, and reads what others appended.
//! - The head is written after the lines are on disk. So it never says more than there is, unless something was taken away;
//!   then nothing is appended any more.
//! - Lines that no head covers are what a crash left between the two. They are kept if they hold together; what does not is
//!   put aside; and either way the next batch begins by saying so.

use std::collections::VecDeque;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use hotcell_authority::SecretKey;
use hotcell_base::CanonicalError;
use jiff::Timestamp;
use rustix::fs::{FlockOperation, OFlags};
use serde_json::json;

use crate::chain::Hash;
use crate::entry::{Entry, Event, Ids, LINE_BYTES_MAX, Link, News};
use crate::head::{self, Head, SLOT_BYTES};

/// When a file is this long, the next batch goes to a new one.
pub const SEGMENT_BYTES_MAX: u64 = if cfg!(test) { 16 << 10 } else { 64 << 20 };
const CURRENT: &str = "current.jsonl";

/// Where a ledger is.
#[derive(Clone, Debug)]
pub struct Place {
    /// Its files.
    pub directory: PathBuf,
    /// Its head, which is not among them.
    pub head: PathBuf,
}

/// What must have happened before an append is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Durability {
    /// It is on disk: a power cut does not take it back.
    Synced,
    /// The kernel has it: a crash of this process does not take it back.
    Written,
}

/// Why nothing can be appended.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The disk or the kernel failed us.
    #[error("cannot {what} `{}`", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// With what.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// There are lines, and no head to them.
    #[error("the ledger has lines and no head")]
    NoHead,
    /// There is less than the head says.
    #[error("the ledger was cut: its head says that there are {head} lines, and there are fewer")]
    Cut {
        /// How many lines there were.
        head: u64,
    },
    /// The last line is not the one that was signed.
    #[error("line {seq} of the ledger is not the one that its head was signed for")]
    Changed {
        /// Which.
        seq: u64,
    },
    /// It is another ledger than the one that was opened.
    #[error("the ledger was replaced while it was in use")]
    Replaced,
    /// What is to be written is too long to be read again.
    #[error("an entry has at most {LINE_BYTES_MAX} bytes")]
    TooLong,
    /// What is to be written has a number that readers would not agree about.
    #[error("an entry cannot be written exactly")]
    NotExact(#[from] CanonicalError),
    /// Somebody else's batch failed, and this was in it.
    #[error("the ledger cannot be written: {0}")]
    Batch(String),
}

fn failed<'a>(what: &'static str, path: &'a Path) -> impl Fn(io::Error) -> LedgerError + 'a {
    move |source| LedgerError::Io { what, path: path.to_owned(), source }
}

/// A ledger that can be appended to.
#[derive(Debug)]
pub struct Ledger {
    place: Place,
    /// Locked while a batch is written.
    directory: File,
    id: String,
    queue: Mutex<Queue>,
    /// Somebody's batch is done.
    done: Condvar,
    tail: Mutex<Tail>,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<(u64, Vec<News>, Durability)>,
    /// Tickets up to this one are done.
    n_done: u64,
    n_tickets: u64,
    is_led: bool,
    /// What went wrong with which tickets.
    failed: Vec<(u64, String)>,
    last: Option<Head>,
}

impl Queue {
    /// A batch is done, and somebody else may write the next.
    fn finish(&mut self, batch: &[(u64, Vec<News>, Durability)]) {
        self.n_done = batch.last().map_or(self.n_done, |(ticket, ..)| *ticket);
        self.is_led = false;
    }
}

/// The end of a ledger, as far as we know.
#[derive(Debug)]
struct Tail {
    file: File,
    head_file: File,
    segment: u64,
    offset: u64,
    next: u64,
    hash: Hash,
    /// What a crash left, until it is written down.
    left: Option<Left>,
}

#[derive(Clone, Debug, Default)]
struct Left {
    n_unsigned: u64,
    torn_bytes: u64,
    torn_hash: Option<Hash>,
}

/// A ledger's directory, locked.
struct Locked<'a>(&'a File);

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // The lock goes with the descriptor at the latest.
        let _then = rustix::fs::flock(self.0, FlockOperation::Unlock);
    }
}

fn lock<'a>(directory: &'a File, path: &Path) -> Result<Locked<'a>, LedgerError> {
    loop {
        match rustix::fs::flock(directory, FlockOperation::LockExclusive) {
            Err(rustix::io::Errno::INTR) => {}
            taken => return taken.map(|()| Locked(directory)).map_err(|errno| failed("lock", path)(errno.into())),
        }
    }
}

impl Ledger {
    /// Opens a ledger; where there is none, one begins, with this id.
    pub fn open(place: &Place, id: &str, key: &SecretKey, now: Timestamp) -> Result<Ledger, LedgerError> {
        let path = &place.directory;
        let make = DirBuilder::new().recursive(true).mode(0o700).create(path);
        make.map_err(failed("make", path))?;
        let directory = File::open(path).map_err(failed("open", path))?;
        let locked = lock(&directory, path)?;
        let (id, tail) = match Tail::load(place)? {
            Some(found) => found,
            None => (id.to_owned(), Tail::begin(place, id, key, now)?),
        };
        // One that was cut short when it began has its head before it has anything else.
        if head(place)?.is_none() {
            tail.sign(place, &id, key, now)?;
        }
        drop(locked);
        let (queue, done) = (Mutex::default(), Condvar::new());
        Ok(Ledger { place: place.clone(), directory, id, queue, done, tail: Mutex::new(tail) })
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Appends what happened, in this order and with nothing between, and gives the head that covers it. Whoever comes
    /// while another's batch is being written goes with the next, and all of them share its sync.
    pub fn append(&self, news: Vec<News>, key: &SecretKey, durability: Durability) -> Result<Head, LedgerError> {
        let mut queue = self.queue();
        queue.n_tickets += 1;
        let ticket = queue.n_tickets;
        queue.waiting.push_back((ticket, news, durability));
        while queue.is_led && queue.n_done < ticket {
            queue = self.done.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        if queue.n_done < ticket {
            // Nobody writes: we do, for all who came until now, ourselves among them.
            queue.is_led = true;
            let batch: Vec<_> = queue.waiting.drain(..).collect();
            drop(queue);
            let written = self.write(&batch, key);
            queue = self.queue();
            match written {
                Ok(head) => queue.last = Some(head),
                Err(error) => {
                    let others = batch.iter().map(|(other, ..)| *other).filter(|other| *other != ticket);
                    let text = chain(&error);
                    queue.failed.extend(others.map(|other| (other, text.clone())));
                    queue.finish(&batch);
                    self.done.notify_all();
                    return Err(error);
                }
            }
            queue.finish(&batch);
            self.done.notify_all();
        }
        if let Some(idx) = queue.failed.iter().position(|(failed, _)| *failed == ticket) {
            return Err(LedgerError::Batch(queue.failed.swap_remove(idx).1));
        }
        Ok(queue.last.clone().expect("something was written"))
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, batch: &[(u64, Vec<News>, Durability)], key: &SecretKey) -> Result<Head, LedgerError> {
        let mut tail = self.tail.lock().unwrap_or_else(PoisonError::into_inner);
        let _locked = lock(&self.directory, &self.place.directory)?;
        self.is_ours()?;
        tail.catch_up(&self.place, &self.id)?;
        let synced = batch.iter().any(|(.., durability)| *durability == Durability::Synced);
        let news = batch.iter().flat_map(|(_, news, _)| news);
        tail.append(&self.place, &self.id, news, key, if synced { Durability::Synced } else { Durability::Written })
    }

    /// Whether the directory that is locked is the one that others find.
    fn is_ours(&self) -> Result<(), LedgerError> {
        let path = &self.place.directory;
        let ours = identity(&self.directory.metadata().map_err(failed("look at", path))?);
        match fs::metadata(path) {
            Ok(found) if identity(&found) == ours => Ok(()),
            _ => Err(LedgerError::Replaced),
        }
    }

    /// Takes what is left of a damaged ledger for the whole, on somebody's word, and says so in it.
    pub fn recover(place: &Place, key: &SecretKey, now: Timestamp) -> Result<Head, LedgerError> {
        let directory = File::open(&place.directory).map_err(failed("open", &place.directory))?;
        let _locked = lock(&directory, &place.directory)?;
        let said = read_head(place)?;
        let mut tail = Tail::salvage(place)?;
        let id = said.as_ref().map(|head| head.ledger.clone()).or(tail.1).unwrap_or_default();
        let details = json!({
            "head_said": said.as_ref().map(|head| head.seq),
            "head_hash": said.as_ref().map(|head| head.hash),
            "found": tail.0.next.checked_sub(1),
            "accepted": true,
        });
        let news = News::new(Event::LedgerRecovered, now, Ids::default(), details);
        let head = tail.0.append(place, &id, [&news], key, Durability::Synced)?;
        // In both places: the other one says more.
        let other = SLOT_BYTES as u64 * ((head.seq + 1) % 2);
        tail.0.head_file.write_all_at(&head::slot(&head), other).map_err(failed("write", &place.head))?;
        Ok(head)
    }
}

/// What went wrong, with all its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

fn identity(file: &fs::Metadata) -> (u64, u64) {
    (file.dev(), file.ino())
}

/// Plain files alone: a pipe would have us wait, and a link would lead elsewhere.
fn open(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = options.custom_flags(flags.bits().cast_signed()).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is not a plain file")) }
}

fn read_head(place: &Place) -> Result<Option<Head>, LedgerError> {
    let mut slots = Vec::new();
    match open(OpenOptions::new().read(true), &place.head) {
        Ok(file) => {
            let most = 2 * SLOT_BYTES as u64;
            file.take(most).read_to_end(&mut slots).map_err(failed("read", &place.head))?;
            Ok(head::newest(&slots))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed("open", &place.head)(error)),
    }
}

impl Tail {
    /// Begins a ledger.
    fn begin(place: &Place, id: &str, key: &SecretKey, now: Timestamp) -> Result<Tail, LedgerError> {
        let mut tail = Tail::at(place, 0, 0, 0, Hash::NONE)?;
        let details = json!({
            "format": 1,
            "redaction": crate::redact::RULES,
            "public": key.public(),
        });
        let ids = Ids { kid: Some(key.id().clone()), ..Ids::default() };
        let news = News::new(Event::LedgerCreated, now, ids, details);
        tail.append(place, id, [&news], key, Durability::Synced)?;
        sync_directory(&place.directory)?;
        Ok(tail)
    }

    fn at(place: &Place, segment: u64, offset: u64, next: u64, hash: Hash) -> Result<Tail, LedgerError> {
        let path = place.directory.join(CURRENT);
        let options = || {
            let mut options = OpenOptions::new();
            options.read(true).create(true).truncate(false).mode(0o600);
            options
        };
        let file = open(options().append(true), &path).map_err(failed("open", &path))?;
        let head_file = open(options().write(true), &place.head).map_err(failed("open", &place.head))?;
        Ok(Tail { file, head_file, segment, offset, next, hash, left: None })
    }

    /// The end of a ledger that is there; none if there is none.
    fn load(place: &Place) -> Result<Option<(String, Tail)>, LedgerError> {
        let files = segments(&place.directory)?;
        let Some(head) = read_head(place)? else { return Tail::load_begun(place, &files) };
        let cut = || LedgerError::Cut { head: head.seq + 1 };
        let signed = files.iter().find(|file| file.first == head.segment).ok_or_else(cut)?;
        if signed.bytes < head.offset {
            return Err(cut());
        }
        check_last_line(&signed.path, &head)?;
        // Either the head's file is the one that is written to, or a new one was begun behind it.
        let is_current = signed.path.ends_with(CURRENT);
        let (segment, offset) = if is_current { (head.segment, head.offset) } else { (head.seq + 1, 0) };
        if !is_current && signed.bytes != head.offset {
            return Err(LedgerError::Changed { seq: head.seq + 1 });
        }
        let mut tail = Tail::at(place, segment, offset, head.seq + 1, head.hash)?;
        let n_before = tail.next;
        let torn = tail.read_on(&head.ledger)?;
        let n_unsigned = tail.next - n_before;
        if n_unsigned > 0 || !torn.is_empty() {
            let torn_hash = (!torn.is_empty()).then(|| Hash::of(&torn));
            tail.put_aside(place, &torn)?;
            tail.left = Some(Left { n_unsigned, torn_bytes: torn.len() as u64, torn_hash });
        }
        Ok(Some((head.ledger, tail)))
    }

    /// A ledger without a head: nothing yet, or one that was cut short when it began, of which there is a line at most.
    /// Anything more had a head.
    fn load_begun(place: &Place, files: &[Segment]) -> Result<Option<(String, Tail)>, LedgerError> {
        if files.iter().any(|file| !file.path.ends_with(CURRENT)) {
            return Err(LedgerError::NoHead);
        }
        if files.iter().all(|file| file.bytes == 0) {
            return Ok(None);
        }
        let mut tail = Tail::at(place, 0, 0, 0, Hash::NONE)?;
        let mut text = Vec::new();
        let path = place.directory.join(CURRENT);
        (&tail.file).take(LINE_BYTES_MAX as u64).read_to_end(&mut text).map_err(failed("read", &path))?;
        let first = text.split(|byte| *byte == b'\n').next().filter(|line| line.len() < text.len());
        let first = first.and_then(|line| Entry::read(line).ok());
        let first = first.filter(|entry| entry.event == Event::LedgerCreated.name() && entry.seq == 0);
        let id = first.as_ref().map(|entry| entry.ledger.clone());
        let torn = match &id {
            Some(id) => tail.read_on(id)?,
            None if text.contains(&b'\n') => return Err(LedgerError::NoHead),
            None => text,
        };
        if tail.next > 1 || torn.contains(&b'\n') {
            return Err(LedgerError::NoHead);
        }
        let torn_hash = (!torn.is_empty()).then(|| Hash::of(&torn));
        tail.put_aside(place, &torn)?;
        tail.left = Some(Left { n_unsigned: tail.next, torn_bytes: torn.len() as u64, torn_hash });
        Ok(id.map(|id| (id, tail)))
    }

    /// The end of what holds together, whatever the head says; and the ledger's id, if there is a line.
    fn salvage(place: &Place) -> Result<(Tail, Option<String>), LedgerError> {
        let mut id = None;
        let mut tail = Tail::at(place, 0, 0, 0, Hash::NONE)?;
        for segment in segments(&place.directory)? {
            let is_current = segment.path.ends_with(CURRENT);
            let file = open(OpenOptions::new().read(true), &segment.path).map_err(failed("open", &segment.path))?;
            let (segment_first, mut offset) = (tail.next, 0);
            let mut torn = Vec::new();
            for line in Lines::of(file) {
                let line = line.map_err(failed("read", &segment.path))?;
                let link =
                    line.strip_suffix(b"\n").and_then(|line| Some((line, serde_json::from_slice::<Link>(line).ok()?)));
                match link {
                    Some((text, link)) if torn.is_empty() && link.seq == tail.next && link.prev == tail.hash => {
                        id.get_or_insert_with(|| link.ledger.clone().into_owned());
                        tail.next += 1;
                        tail.hash = Hash::of(text);
                        offset += line.len() as u64;
                    }
                    _ => torn.extend_from_slice(&line),
                }
            }
            if is_current {
                (tail.segment, tail.offset) = (segment_first, offset);
                tail.put_aside(place, &torn)?;
            } else if !torn.is_empty() {
                // What comes after a gap hangs in the air; what is before it stays.
                let aside =
                    place.directory.join(format!("torn-{:012}-{}", tail.next, &Hash::of(&torn).to_string()[..8]));
                fs::write(&aside, &torn).map_err(failed("write", &aside))?;
                if offset == 0 {
                    fs::remove_file(&segment.path).map_err(failed("remove", &segment.path))?;
                } else {
                    let shorter = OpenOptions::new().write(true).open(&segment.path);
                    shorter.and_then(|file| file.set_len(offset)).map_err(failed("shorten", &segment.path))?;
                    let name = segment_name(place, segment_first, tail.next - 1);
                    fs::rename(&segment.path, &name).map_err(failed("move", &segment.path))?;
                }
            }
        }
        Ok((tail, id))
    }

    /// Reads what others appended since.
    fn catch_up(&mut self, place: &Place, id: &str) -> Result<(), LedgerError> {
        let path = place.directory.join(CURRENT);
        let ours = self.file.metadata().map_err(failed("look at", &path))?;
        let is_same = fs::metadata(&path).is_ok_and(|found| identity(&found) == identity(&ours));
        if is_same && ours.len() == self.offset {
            return Ok(());
        }
        // Another file, or more or less in it: from the head on, as when it was opened. What was signed before must be
        // there still.
        let (next, hash) = (self.next, self.hash);
        let Some((found, tail)) = Tail::load(place)? else { return Err(LedgerError::Cut { head: next }) };
        if found != id || tail.next < next || tail.next == next && tail.hash != hash {
            return Err(LedgerError::Replaced);
        }
        *self = tail;
        Ok(())
    }

    /// Reads lines from the offset on for as long as they hold together, and gives what is behind them.
    fn read_on(&mut self, id: &str) -> Result<Vec<u8>, LedgerError> {
        let path = Path::new(CURRENT);
        let mut bytes = Vec::new();
        self.file.seek(SeekFrom::Start(self.offset)).map_err(failed("read", path))?;
        self.file.read_to_end(&mut bytes).map_err(failed("read", path))?;
        let mut rest = bytes.as_slice();
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let line = &rest[..end];
            let Ok(link) = serde_json::from_slice::<Link<'_>>(line) else { break };
            if link.seq != self.next || link.prev != self.hash || link.ledger != id {
                break;
            }
            self.next += 1;
            self.hash = Hash::of(line);
            self.offset += end as u64 + 1;
            rest = &rest[end + 1..];
        }
        Ok(rest.to_vec())
    }

    /// Moves what is no line, or hangs in the air, out of the way; nothing is lost.
    fn put_aside(&self, place: &Place, torn: &[u8]) -> Result<(), LedgerError> {
        if torn.is_empty() {
            return Ok(());
        }
        let path = place.directory.join(format!("torn-{:012}-{}", self.next, &Hash::of(torn).to_string()[..8]));
        let mut options = OpenOptions::new();
        let mut file =
            open(options.write(true).create(true).truncate(true).mode(0o600), &path).map_err(failed("make", &path))?;
        file.write_all(torn).and_then(|()| file.sync_all()).map_err(failed("write", &path))?;
        let current = place.directory.join(CURRENT);
        self.file.set_len(self.offset).and_then(|()| self.file.sync_all()).map_err(failed("shorten", &current))
    }

    /// Writes lines, then the head. What cannot be written whole is taken back.
    fn append<'a>(
        &mut self,
        place: &Place,
        id: &str,
        news: impl IntoIterator<Item = &'a News>,
        key: &SecretKey,
        durability: Durability,
    ) -> Result<Head, LedgerError> {
        let mut text = Vec::new();
        let (mut next, mut hash, mut at) = (self.next, self.hash, Timestamp::UNIX_EPOCH);
        let mut line_of = |event: &str, when, ids: &Ids, details: &serde_json::Map<_, _>| {
            let entry = Entry {
                seq: next,
                prev: hash,
                ledger: id.to_owned(),
                at: when,
                event: event.to_owned(),
                ids: ids.clone(),
                details: details.clone(),
            };
            let line = entry.to_line()?;
            if line.len() > LINE_BYTES_MAX {
                return Err(LedgerError::TooLong);
            }
            next += 1;
            hash = Hash::of(&line);
            text.extend_from_slice(&line);
            text.push(b'\n');
            Ok(())
        };
        let mut left = self.left.clone();
        for one in news {
            if let Some(left) = left.take() {
                let details = json!({
                    "unsigned": left.n_unsigned,
                    "torn_bytes": left.torn_bytes,
                    "torn_sha256": left.torn_hash,
                });
                let gap = News::new(Event::LedgerRecovered, one.at, Ids::default(), details);
                line_of(gap.event.name(), gap.at, &gap.ids, &gap.details)?;
            }
            line_of(one.event.name(), one.at, &one.ids, &one.details)?;
            at = at.max(one.at);
        }
        if self.offset >= SEGMENT_BYTES_MAX {
            self.begin_segment(place)?;
        }
        let path = place.directory.join(CURRENT);
        let written = self.file.write_all(&text).and_then(|()| match durability {
            Durability::Synced => self.file.sync_data(),
            Durability::Written => Ok(()),
        });
        if let Err(error) = written {
            // If even this fails, the next to come finds what is torn.
            let _or_later = self.file.set_len(self.offset);
            return Err(failed("write", &path)(error));
        }
        (self.next, self.hash, self.left) = (next, hash, None);
        self.offset += text.len() as u64;
        self.sign(place, id, key, at)
    }

    /// Signs how far it has come, in one of the two places in turn.
    fn sign(&self, place: &Place, id: &str, key: &SecretKey, at: Timestamp) -> Result<Head, LedgerError> {
        let head = Head::sign(key, id, (self.next - 1, self.hash), (self.segment, self.offset), at);
        let slot = SLOT_BYTES as u64 * (head.seq % 2);
        self.head_file.write_all_at(&head::slot(&head), slot).map_err(failed("write", &place.head))?;
        Ok(head)
    }

    /// Closes the file and begins another.
    fn begin_segment(&mut self, place: &Place) -> Result<(), LedgerError> {
        let path = place.directory.join(CURRENT);
        let name = segment_name(place, self.segment, self.next - 1);
        self.file.sync_all().map_err(failed("write", &path))?;
        fs::rename(&path, &name).map_err(failed("move", &path))?;
        let left = self.left.take();
        *self = Tail { left, ..Tail::at(place, self.next, 0, self.next, self.hash)? };
        sync_directory(&place.directory)
    }
}

/// What a file is called that nothing is appended to any more.
fn segment_name(place: &Place, first: u64, last: u64) -> PathBuf {
    place.directory.join(format!("{first:012}-{last:012}.jsonl"))
}

fn sync_directory(path: &Path) -> Result<(), LedgerError> {
    File::open(path).and_then(|directory| directory.sync_all()).map_err(failed("write", path))
}

/// Whether the last line that was signed is the one that is there.
fn check_last_line(path: &Path, head: &Head) -> Result<(), LedgerError> {
    const LOOK: u64 = 16 << 10;
    let file = open(OpenOptions::new().read(true), path).map_err(failed("open", path))?;
    for look in [LOOK, LINE_BYTES_MAX as u64 + 2] {
        let from = head.offset.saturating_sub(look);
        let mut bytes = vec![0; usize::try_from(head.offset - from).expect("a line")];
        file.read_exact_at(&mut bytes, from).map_err(failed("read", path))?;
        let Some(lines) = bytes.strip_suffix(b"\n") else { break };
        let start = lines.iter().rposition(|byte| *byte == b'\n').map(|at| at + 1);
        if let Some(start) = start.or((from == 0).then_some(0)) {
            let is_signed = Hash::of(&lines[start..]) == head.hash;
            return if is_signed { Ok(()) } else { Err(LedgerError::Changed { seq: head.seq }) };
        }
    }
    Err(LedgerError::Changed { seq: head.seq })
}

/// A file of a ledger.
#[derive(Clone, Debug)]
pub struct Segment {
    /// Where it is.
    pub path: PathBuf,
    /// Its first line.
    pub first: u64,
    /// How long it is.
    pub bytes: u64,
}

/// The files of a ledger, in order.
pub fn segments(directory: &Path) -> Result<Vec<Segment>, LedgerError> {
    let mut found = Vec::new();
    let mut current = None;
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
        entries => entries.map_err(failed("read", directory))?,
    };
    for entry in entries {
        let entry = entry.map_err(failed("read", directory))?;
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        let bytes = fs::symlink_metadata(&path).map_err(failed("look at", &path))?.len();
        if name == CURRENT {
            current = Some((path, bytes));
        } else if let Some((first, _)) = name.strip_suffix(".jsonl").and_then(|name| name.split_once('-'))
            && let Ok(first) = first.parse()
        {
            found.push(Segment { path, first, bytes });
        }
    }
    found.sort_unstable_by_key(|segment| segment.first);
    if let Some((path, bytes)) = current {
        // Its name does not say what it begins with.
        let first = first_seq(&path)?.unwrap_or(u64::MAX);
        found.push(Segment { path, first, bytes });
    }
    Ok(found)
}

fn first_seq(path: &Path) -> Result<Option<u64>, LedgerError> {
    let file = open(OpenOptions::new().read(true), path).map_err(failed("open", path))?;
    let line = Lines::of(file).next().transpose().map_err(failed("read", path))?.unwrap_or_default();
    Ok(serde_json::from_slice::<Link<'_>>(line.trim_ascii_end()).ok().map(|link| link.seq))
}

/// The lines of a file, each with its newline if it has one, none of them too long.
pub struct Lines {
    file: BufReader<File>,
}

impl Lines {
    /// From where the file stands.
    pub fn of(file: File) -> Lines {
        Lines { file: BufReader::with_capacity(1 << 20, file) }
    }
}

impl Iterator for Lines {
    type Item = io::Result<Vec<u8>>;

    fn next(&mut self) -> Option<io::Result<Vec<u8>>> {
        let mut line = Vec::with_capacity(1024);
        let most = LINE_BYTES_MAX as u64 + 1;
        match (&mut self.file).take(most).read_until(b'\n', &mut line) {
            Ok(0) => None,
            Ok(_) => Some(Ok(line)),
            Err(error) => Some(Err(error)),
        }
    }
}

/// The head that is on record.
pub fn head(place: &Place) -> Result<Option<Head>, LedgerError> {
    read_head(place)
}

/// Where a reader stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Position {
    /// The first line of the file.
    pub segment: u64,
    /// Where in it.
    pub offset: u64,
}

/// Reads entries from a position on, in order, until `take` says no; gives where it stands then. What a writer is in the
/// middle of is not read yet.
pub fn read_from(
    place: &Place,
    from: Position,
    mut take: impl FnMut(Entry, Hash) -> bool,
) -> Result<Position, LedgerError> {
    let Some(head) = read_head(place)? else { return Ok(from) };
    let mut at = from;
    for segment in segments(&place.directory)? {
        if segment.first < from.segment || segment.first == u64::MAX {
            continue;
        }
        if segment.first > at.segment || segment.first == 0 && at.offset == 0 {
            at = Position { segment: segment.first, offset: 0 };
        }
        let mut file = open(OpenOptions::new().read(true), &segment.path).map_err(failed("open", &segment.path))?;
        file.seek(SeekFrom::Start(at.offset)).map_err(failed("read", &segment.path))?;
        for line in Lines::of(file) {
            let line = line.map_err(failed("read", &segment.path))?;
            let Some(text) = line.strip_suffix(b"\n") else { return Ok(at) };
            let Ok(entry) = Entry::read(text) else { return Ok(at) };
            if entry.seq > head.seq || !take(entry, Hash::of(text)) {
                return Ok(at);
            }
            at.offset += line.len() as u64;
        }
    }
    Ok(at)
}

#[cfg(test)]
mod tests;
