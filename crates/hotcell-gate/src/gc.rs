//! What crashes leave, and how it goes away.
//!
//! A cell's processes, mounts and namespaces end with its supervisor; the kernel sees to that. What can be left are
//! names: a cgroup, a record without an end, places for decoys, a change that was stopped half-way. Each is known to
//! be ours by a record of ours, and to be nobody's any more by the pid, start time and boot of the hotcell that made it.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hotcell_base::{Outcome, PackId, RunId};
use hotcell_cell::run::placeholders;

use crate::authority::Authority;
use crate::evidence;
use crate::home::Home;
use crate::live::{LiveCell, ProcessName};
use crate::lock::HomeLock;
use crate::pack::{Packs, Recovered};
use crate::queue;
use crate::record::Runs;
use crate::session::Sessions;

/// One thing that was left.
#[derive(Clone, Debug)]
pub enum Leftover {
    /// A cell whose hotcell is gone: its cgroups, its places for decoys, its record without an end.
    Cell(Box<LiveCell>),
    /// A run without an end that no cell belongs to.
    Run(RunId),
    /// A directory for a run that was never recorded.
    Unrecorded(PathBuf),
    /// Half a file of ours.
    Draft(PathBuf),
    /// A change to a workspace that was stopped half-way.
    Pack(PackId),
    /// Scratch of a `doctor` or a `selftest`, or of a template that was not finished.
    Scratch(PathBuf),
    /// The place of a session whose host is gone.
    Session(PathBuf),
}

impl Leftover {
    /// What it is, in a word, and which.
    pub fn describe(&self) -> (&'static str, String) {
        match self {
            Leftover::Cell(cell) => {
                let n_groups = cell.cgroups.iter().filter(|group| group.exists()).count();
                ("cell", format!("{} with {n_groups} cgroups", cell.run_id))
            }
            Leftover::Run(id) => ("run", format!("{id} has no end")),
            Leftover::Unrecorded(path) => ("unrecorded", path.display().to_string()),
            Leftover::Draft(path) => ("draft", path.display().to_string()),
            Leftover::Pack(id) => ("pack", format!("{id} was stopped half-way")),
            Leftover::Scratch(path) => ("scratch", path.display().to_string()),
            Leftover::Session(path) => ("session", path.display().to_string()),
        }
    }
}

/// What clearing up did.
#[derive(Debug, Default)]
pub struct Cleared {
    /// Whether another hotcell is at it.
    pub is_busy: bool,
    /// Why nothing can be cleared away here at all.
    pub error: Option<io::Error>,
    /// Runs whose end is not known.
    pub unknown: Vec<RunId>,
    /// Changes that were stopped half-way.
    pub packs: Vec<Recovered>,
    /// Directories that are not there any more. If they were moved, a cell's placeholders went with them.
    pub astray: Vec<PathBuf>,
    /// What could not be cleared away, and why.
    pub failed: Vec<(Leftover, io::Error)>,
}

/// Everything that was left in this home, and by selftests in this directory for temporary files. Nothing is touched.
pub fn survey(home: &Home, temporary: &Path) -> Vec<Leftover> {
    let mut found = at_hand(home);
    let (runs, packs) = (Runs::of(home), Packs::of(home));
    for entry in entries(&home.runs()) {
        let Some(id) = entry.file_name().to_str().and_then(|name| name.parse::<RunId>().ok()) else { continue };
        let record = runs.read(&id);
        // After the record: a run that began a moment ago has a cell before it has a record.
        let has_cell = LiveCell::find(home, &id).is_some();
        match record {
            Ok(record) if record.outcome.is_none() && !has_cell => found.push(Leftover::Run(id)),
            Ok(_) => {}
            // Made a moment ago, it is about to be recorded.
            Err(error) if error.is_absence() && !has_cell && is_old(&entry.path()) => {
                found.push(Leftover::Unrecorded(entry.path()));
            }
            Err(_) => {}
        }
        found.extend(drafts(&entry.path()));
    }
    // The marks of unfinished ones are among what is at hand.
    for entry in entries(&home.rollback()).iter().filter(|entry| entry.file_name() != "unfinished") {
        let has_manifest = !matches!(entry.path().join("manifest.json").try_exists(), Ok(false));
        let is_marked = packs.unfinished().join(entry.file_name()).exists();
        if !has_manifest && !is_marked && is_old(&entry.path()) {
            found.push(Leftover::Unrecorded(entry.path()));
        }
        found.extend(drafts(&entry.path()));
    }
    found.extend(queue::left_tickets(home).into_iter().map(Leftover::Draft));
    found.extend(scratch(home.path(), "doctor-"));
    found.extend(scratch(&home.path().join("templates"), "draft-"));
    found.extend(scratch(temporary, "hotcell-selftest-"));
    found
}

/// Directories of ours that are named after a process which is gone.
fn scratch(place: &Path, prefix: &str) -> Vec<Leftover> {
    let us = rustix::process::geteuid().as_raw();
    let is_nobodys = |entry: &fs::DirEntry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        // One process may have several, with a number each.
        let maker = name.strip_prefix(prefix).and_then(|rest| rest.split('.').next()).and_then(ProcessName::parse);
        let is_ours = fs::symlink_metadata(entry.path()).is_ok_and(|file| file.is_dir() && file.uid() == us);
        is_ours && maker.is_some_and(|maker| !maker.is_alive())
    };
    entries(place).iter().filter(|entry| is_nobodys(entry)).map(|entry| Leftover::Scratch(entry.path())).collect()
}

/// Clears away everything that [`survey`] finds.
pub fn clear(home: &Home, temporary: &Path) -> Cleared {
    hotcell_cell::claim::tidy();
    clear_found(home, |home| survey(home, temporary))
}

/// Clears away what the last crash is likely to have left: quick enough for every start.
pub fn sweep(home: &Home) -> Cleared {
    clear_found(home, at_hand)
}

/// What can be found without looking at every run.
fn at_hand(home: &Home) -> Vec<Leftover> {
    let mut found = cells(home);
    found.extend(unfinished_packs(home));
    found.extend(Sessions::of(home).left().into_iter().map(Leftover::Session));
    found
}

fn clear_found(home: &Home, look: impl Fn(&Home) -> Vec<Leftover>) -> Cleared {
    let mut cleared = Cleared::default();
    if look(home).is_empty() {
        return cleared;
    }
    let lock = match HomeLock::take(home) {
        Ok(Some(lock)) => lock,
        Ok(None) => {
            cleared.is_busy = true;
            return cleared;
        }
        Err(error) => {
            cleared.error = Some(error);
            return cleared;
        }
    };
    // Again: what was there before may be done already.
    for leftover in look(home) {
        if !lock.holds() {
            cleared.is_busy = true;
            break;
        }
        if let Err(error) = clear_one(home, &leftover, &mut cleared) {
            cleared.failed.push((leftover, error));
        }
    }
    cleared
}

fn clear_one(home: &Home, leftover: &Leftover, cleared: &mut Cleared) -> io::Result<()> {
    match leftover {
        Leftover::Cell(cell) => {
            let removable: Vec<PathBuf> = cell.cgroups.iter().filter(|path| is_ours(path)).cloned().collect();
            hotcell_cell::cgroup::remove_all(&removable).map_err(io::Error::other)?;
            let places: Vec<PathBuf> = cell.placeholders.iter().map(|path| path.0.clone()).collect();
            if !placeholders::remove(&places).is_empty() {
                return Err(io::Error::other("another cell still uses its decoys"));
            }
            let parents: BTreeSet<&Path> = places.iter().filter_map(|place| place.parent()).collect();
            cleared.astray.extend(parents.into_iter().filter(|parent| !parent.exists()).map(Path::to_owned));
            end_unknown(home, &cell.run_id, true, cleared)?;
            for draft in drafts(&Runs::of(home).directory(&cell.run_id)) {
                clear_one(home, &draft, cleared)?;
            }
            LiveCell::forget(home, &cell.run_id);
            Ok(())
        }
        Leftover::Run(id) => end_unknown(home, id, false, cleared),
        Leftover::Unrecorded(path) => gone(fs::remove_dir_all(path)),
        Leftover::Scratch(path) => {
            open_up(path);
            gone(fs::remove_dir_all(path))
        }
        Leftover::Session(path) => gone(Sessions::of(home).clear(path)),
        Leftover::Draft(path) => gone(fs::remove_file(path)),
        Leftover::Pack(id) => {
            let recovered = Packs::of(home).recover(id).map_err(io::Error::other)?;
            cleared.packs.extend(recovered);
            Ok(())
        }
    }
}

/// A selftest closes directories of its own, and may have died before it opened them again.
fn open_up(directory: &Path) {
    use std::os::unix::fs::PermissionsExt;
    let _as_far_as_we_may = fs::set_permissions(directory, fs::Permissions::from_mode(0o700));
    for entry in entries(directory).iter().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        open_up(&entry.path());
    }
}

/// What is gone already went with something else.
fn gone(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Writes down that nobody knows how a run ended, and tells the ledger. One that was never recorded goes. With a cell that was
/// left, the end may be on record and not told.
fn end_unknown(home: &Home, id: &RunId, has_cell: bool, cleared: &mut Cleared) -> io::Result<()> {
    let runs = Runs::of(home);
    let mut record = match runs.read(id) {
        Err(error) if error.is_absence() => return gone(fs::remove_dir_all(runs.directory(id))),
        // Damaged: whoever wants it gone removes it by hand.
        Err(_) => return Ok(()),
        Ok(record) => record,
    };
    if LiveCell::find(home, id).is_some_and(|cell| cell.is_alive(home)) {
        return Ok(());
    }
    let is_unknown = record.outcome.is_none();
    if is_unknown {
        record.outcome = Some(Outcome::Unknown);
        record.error = Some("hotcell ended before the run did; the cell was killed with it".to_owned());
    }
    if is_unknown || has_cell {
        let authority = Authority::open(home).map_err(io::Error::other)?;
        authority.tell(evidence::ended(&record, None, true)).map_err(io::Error::other)?;
    }
    if is_unknown {
        runs.write(&record).map_err(io::Error::other)?;
        cleared.unknown.push(id.clone());
    }
    Ok(())
}

/// Cells whose hotcell is gone, and half-written records of them.
fn cells(home: &Home) -> Vec<Leftover> {
    let mut found = drafts(&home.cells());
    for entry in entries(&home.cells()) {
        match LiveCell::read(&entry.path()) {
            Some(cell) if !cell.is_alive(home) => found.push(Leftover::Cell(Box::new(cell))),
            Some(_) => {}
            // Damaged, as a power cut leaves it: what it said is lost, and so is its cell.
            None if entry.path().extension().is_some_and(|extension| extension == "json") && is_old(&entry.path()) => {
                found.push(Leftover::Draft(entry.path()));
            }
            None => {}
        }
    }
    found
}

fn unfinished_packs(home: &Home) -> Vec<Leftover> {
    let packs = Packs::of(home);
    let mut found = drafts(&packs.unfinished());
    found.extend(packs.abandoned().into_iter().map(Leftover::Pack));
    found
}

fn drafts(directory: &Path) -> Vec<Leftover> {
    // `name.<pid>-<start time>-<pid namespace>.tmp`
    let is_nobodys = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(".tmp"));
        let writer = name.and_then(|name| name.rsplit_once('.')).and_then(|(_, writer)| ProcessName::parse(writer));
        writer.is_some_and(|writer| !writer.is_alive())
    };
    entries(directory).into_iter().map(|entry| entry.path()).filter(is_nobodys).map(Leftover::Draft).collect()
}

/// A directory is recorded a moment after it is made; after a minute it will not be any more.
fn is_old(path: &Path) -> bool {
    let age = fs::symlink_metadata(path).and_then(|file| file.modified()).ok().and_then(|made| made.elapsed().ok());
    age.is_some_and(|age| age > Duration::from_secs(60))
}

fn entries(directory: &Path) -> Vec<fs::DirEntry> {
    fs::read_dir(directory).into_iter().flatten().flatten().collect()
}

/// A recorded path is only removed if it has the shape of a group we make.
fn is_ours(path: &Path) -> bool {
    let is_plain = path.components().all(|part| !matches!(part, std::path::Component::ParentDir));
    is_plain
        && path.starts_with("/sys/fs/cgroup")
        && path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("hotcell-"))
}
