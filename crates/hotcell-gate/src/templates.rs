//! Templates of a home: programs that were loaded once, kept for the runs that come after.
//!
//! ```text
//! templates/<boot>-<digest>/template.json   what it is, and the files it was made of
//!                           memory          what it had in memory
//! ```
//!
//! One is used again while it is what would be made: the same program, request and environment on the same boot, and
//! every file it was made of unchanged. It was made by code that nobody trusts, and is as trusted as that: it is restored
//! behind all walls of the run.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use hotcell_base::exact::hex;
use hotcell_cell::template::{Snapshot, Source, Template, TemplateError};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::home::Home;
use crate::live::{ProcessName, boot_id};
use crate::plain;

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
    pub is_kept: bool,
}

#[derive(Serialize, Deserialize)]
struct Kept {
    sources: Vec<Source>,
    snapshot: Snapshot,
}

impl Templates {
    /// The templates of this home.
    pub fn of(home: &Home) -> Templates {
        Templates { directory: home.path().join("templates") }
    }

    /// The template for which `parts` say all that it depends on beside its files; if there is none, it is made.
    pub fn get(
        &self,
        parts: &[Vec<u8>],
        make: impl FnOnce(File) -> Result<Template, TemplateError>,
    ) -> Result<Found, TemplateError> {
        let name = name(parts);
        let path = self.directory.join(&name);
        if let Some(template) = load(&path) {
            return Ok(Found { template, is_kept: true });
        }
        let failed = |what| move |source| TemplateError::Io { what, source };
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.directory)
            .map_err(failed("a place for templates cannot be made"))?;
        self.make_room();
        let draft = Draft::new(&self.directory).map_err(failed("a place for the template cannot be made"))?;
        let memory = File::options().read(true).write(true).create_new(true).mode(0o600).open(draft.0.join("memory"));
        let template = make(memory.map_err(failed("the template's memory cannot be kept"))?)?;
        let kept = Kept { sources: template.sources().to_vec(), snapshot: template.snapshot().clone() };
        let text = serde_json::to_vec(&kept).expect("plain data");
        fs::write(draft.0.join("template.json"), text).map_err(failed("the template cannot be written down"))?;
        // One that is stale, or that another made meanwhile, makes way; whoever uses it has it open.
        let _absent = fs::rename(&path, draft.0.with_extension("old"));
        let _absent = fs::remove_dir_all(draft.0.with_extension("old"));
        fs::rename(&draft.0, &path).map_err(failed("the template cannot be kept"))?;
        Ok(Found { template, is_kept: false })
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
fn load(path: &Path) -> Option<Template> {
    let kept: Kept = serde_json::from_slice(&plain::read(&path.join("template.json")).ok()?).ok()?;
    if !kept.sources.iter().all(Source::is_unchanged) {
        return None;
    }
    let memory = plain::open(&path.join("memory")).ok()?;
    // What is used stays longest; one of which that cannot be noted is as good.
    let _as_before = File::options()
        .write(true)
        .open(path.join("template.json"))
        .and_then(|file| file.set_modified(SystemTime::now()));
    Template::load(kept.snapshot, memory, kept.sources).ok()
}

fn boot() -> String {
    boot_id().chars().take(8).collect()
}

fn name(parts: &[Vec<u8>]) -> String {
    let mut digest = Sha256::new();
    let kernel = rustix::system::uname();
    let always = [kernel.release().to_bytes(), kernel.version().to_bytes(), env!("CARGO_PKG_VERSION").as_bytes()];
    for part in always.into_iter().chain(parts.iter().map(Vec::as_slice)) {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    format!("{}-{}", boot(), &hex(&digest.finalize())[..32])
}

/// A directory that goes unless it was renamed.
struct Draft(PathBuf);

impl Draft {
    fn new(place: &Path) -> io::Result<Draft> {
        let path = place.join(format!("draft-{}", ProcessName::own().file_name()));
        let _absent = fs::remove_dir_all(&path);
        DirBuilder::new().mode(0o700).create(&path)?;
        Ok(Draft(path))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        let _renamed = fs::remove_dir_all(&self.0);
    }
}
