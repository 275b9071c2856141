//! Templates of a home: programs that were loaded once, kept for the runs that come after.
//!
//! ```text
//! templates/<boot>-<digest>/template.json   what it is, and the files it was made of
//!                           memory          what it had in memory
//! ```
//!
//! One is used again while it is what would be made: the same program, request and environment on the same boot, and
//! every file it says it was made of unchanged. It was made by code that nobody trusts, and is as trusted as that: it is restored
//! behind all walls of the run.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

use hotcell_base::exact::hex;
use hotcell_cell::template::{Snapshot, Source, Template};
use hotcell_cell::{Plan, RemoteEnd};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use crate::blobs::digest;
use crate::door::{Gate, GateError};
use crate::evidence;
use crate::home::Home;
use crate::live::{ProcessName, boot_id};
use crate::record::RecordError;

/// The templates of a home.
#[derive(Clone, Debug)]
pub struct Templates {
    directory: PathBuf,
}

/// A template and whether it had to be made.
#[derive(Debug)]
pub struct Found {
    /// Itself.
    pub template: Template,
    /// Whether it was there already.
    pub was_kept: bool,
    /// Whether it is there for the next.
    pub is_kept: bool,
    /// SHA-256 of what it has in memory.
    pub sha256: String,
}

#[derive(Serialize, Deserialize)]
struct Kept {
    sources: Vec<Source>,
    snapshot: Snapshot,
    sha256: String,
}

impl Templates {
    /// The templates of this home.
    pub fn of(home: &Home) -> Templates {
        Templates { directory: home.path().join("templates") }
    }

    /// The template that a plan makes; if there is none, it is made, with `trial` as [`Template::warm`] has it.
    pub fn get(
        &self,
        gate: &Gate,
        plan: &Plan,
        trial: &[&str],
        remote: Option<&RemoteEnd>,
    ) -> Result<Found, GateError> {
        let path = self.directory.join(name(plan));
        if let Some(found) = load(&path) {
            return Ok(found);
        }
        let failed = |path: &Path| {
            let path = path.to_owned();
            move |source| RecordError::Write { path, source }
        };
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&self.directory);
        made.map_err(failed(&self.directory))?;
        self.make_room();
        let draft = Draft::new(&self.directory).map_err(failed(&self.directory))?;
        let memory = File::options().read(true).write(true).create_new(true).mode(0o600).open(draft.0.join("memory"));
        let memory = memory.map_err(failed(&draft.0))?;
        let template = gate.warm(plan, memory.try_clone().map_err(failed(&draft.0))?, trial, remote)?;
        let sha256 = digest(&memory).map_err(failed(&draft.0))?;
        let (sources, snapshot) = (template.sources().to_vec(), template.snapshot().clone());
        let text = serde_json::to_vec(&Kept { sources, snapshot, sha256: sha256.clone() }).expect("plain data");
        // One that cannot be kept serves this run all the same.
        let is_kept = fs::write(draft.0.join("template.json"), text).and_then(|()| self.put(&draft, &path)).is_ok();
        Ok(Found { template, was_kept: false, is_kept, sha256 })
    }

    /// Puts a template in its place. One that is stale, or that another made meanwhile, makes way; whoever uses it has it
    /// open.
    fn put(&self, draft: &Draft, path: &Path) -> io::Result<()> {
        let old = Draft::place(&self.directory);
        let _absent = fs::rename(path, &old);
        let put = fs::rename(&draft.0, path);
        let _absent = fs::remove_dir_all(&old);
        put
    }

    /// Removes what was in memory before the machine was started, which is of no use any more, and what was used longest
    /// ago, if there are many.
    fn make_room(&self) {
        let ours = boot();
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten().map(|entry| entry.path());
        let is_of = |path: &PathBuf, start: &str| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(start))
        };
        let kept = entries.filter(|path| !is_of(path, "draft-"));
        let (mut now, before): (Vec<PathBuf>, Vec<PathBuf>) = kept.partition(|path| is_of(path, &ours));
        let used = |path: &PathBuf| fs::metadata(path.join("template.json")).and_then(|file| file.modified()).ok();
        now.sort_by_key(|path| std::cmp::Reverse(used(path)));
        for path in before.iter().chain(now.iter().skip(KEPT_MAX - 1)) {
            // What cannot be removed now is tried again by the next.
            let _later = fs::remove_dir_all(path);
        }
    }
}

/// So many templates are kept.
const KEPT_MAX: usize = 16;

/// The template in a directory, if there is one and nothing it was made of has changed.
fn load(path: &Path) -> Option<Found> {
    // Both files of one directory, whatever is put in its place meanwhile.
    let directory = File::open(path).ok()?;
    let open = |name: &str, flags: OFlags| {
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        rustix::fs::openat(&directory, name, flags, rustix::fs::Mode::empty()).map(File::from)
    };
    let (mut list, memory) = (open("template.json", OFlags::RDWR).ok()?, open("memory", OFlags::RDONLY).ok()?);
    let mut text = Vec::new();
    list.read_to_end(&mut text).ok()?;
    let Kept { sources, snapshot, sha256 } = serde_json::from_slice::<Kept>(&text).ok()?;
    let is_whole = memory.metadata().is_ok_and(|file| file.len() >= snapshot.bytes());
    if !is_whole || !sources.iter().all(Source::is_unchanged) {
        return None;
    }
    // What is used stays longest; one of which that cannot be noted is as good.
    let _as_before = list.set_modified(SystemTime::now());
    let template = Template::load(snapshot, memory, sources).ok()?;
    Some(Found { template, was_kept: true, is_kept: true, sha256 })
}

fn boot() -> String {
    boot_id().chars().take(8).collect()
}

/// All that a template depends on, but for the contents of files.
fn name(plan: &Plan) -> String {
    let kernel = rustix::system::uname();
    let always = [kernel.release().to_bytes(), kernel.version().to_bytes(), env!("CARGO_PKG_VERSION").as_bytes()];
    let parts = always.map(<[u8]>::to_vec).into_iter().chain(evidence::parts(plan));
    format!("{}-{}", boot(), &hex(&evidence::hashed(parts))[..32])
}

/// A directory that goes unless it was renamed.
struct Draft(PathBuf);

impl Draft {
    fn new(directory: &Path) -> io::Result<Draft> {
        let path = Draft::place(directory);
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Draft(path))
    }

    /// A name that nobody else uses, and that tells whose it is.
    fn place(directory: &Path) -> PathBuf {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        directory.join(format!("draft-{}.{number}", ProcessName::own().file_name()))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        let _renamed = fs::remove_dir_all(&self.0);
    }
}
