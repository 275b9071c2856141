//! Rollback packs: what is needed to take an applied diff back, kept before anything is touched.
//!
//! ```text
//!            ┌──────────── stopped or failed ───────────▶ rolled back
//! applying ──┴─▶ applied ─▶ undoing ─▶ undone
//!                              └── stopped: finished at the next start
//! ```
//!
//! `rollback/<id>/manifest.json` has every path before and after; `rollback/<id>/originals/` has the files themselves.
//! `rollback/unfinished/<id>` stands while a walk is under way, so that the next start finds it without looking at
//! every pack. Whoever works on a tree holds the lock of its directory; whoever takes a pack over raises its `fence`,
//! and nobody with a lower one writes to it any more.

use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use hotcell_base::{ExactPath, Glob, PackId, RunId};
use hotcell_cell::changes::Kind;
use hotcell_cell::tree::{Node, Tree};
use jiff::Timestamp;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::blobs::{digest, sync_all};
use crate::diff::{Diff, Entry};
use crate::home::Home;
use crate::live::ProcessName;
use crate::record::{RecordError, Runs, replace_durably};
use crate::transition::{self, Conflict, Contents, Step, Transition};

/// Where a pack is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Being applied, or stopped in the middle of it.
    Applying,
    /// In the tree.
    Applied,
    /// Being taken back, or stopped in the middle of it.
    Undoing,
    /// Taken back.
    Undone,
    /// Never got into the tree: applying it failed or was stopped, and the tree is as it was.
    RolledBack,
    /// Stopped in the middle, and somebody else changed the tree since: what is theirs was left alone.
    Stuck,
}

/// A set of changes that was applied.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Pack {
    /// Its name.
    pub pack_id: PackId,
    /// The run it came from.
    pub run_id: RunId,
    /// The tree.
    pub workspace: ExactPath,
    /// Where it is in its life.
    pub state: State,
    /// Raised by whoever takes it over.
    pub fence: u64,
    /// Who works on it, or did.
    pub holder: ProcessName,
    /// When it was made.
    pub created_at: Timestamp,
    /// Every path, sorted.
    pub entries: Vec<PackEntry>,
}

/// One path of a pack.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PackEntry {
    /// Below the tree.
    pub path: ExactPath,
    /// What was there; none for nothing.
    pub before: Option<Node>,
    /// What is there once it is applied.
    pub after: Option<Node>,
    /// Who owned what was there.
    pub owner: Option<(u32, u32)>,
    /// Entries of one number are names of one file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hard_link: Option<u64>,
    /// Another name of the file it becomes, which is there and stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_to: Option<ExactPath>,
    /// Whether a file was made anew, and the original is kept.
    #[serde(default)]
    pub replaced: bool,
}

/// What of a diff is to be applied.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Only what matches one of these; everything if there are none.
    pub only: Vec<Glob>,
    /// Nothing that matches one of these.
    pub except: Vec<Glob>,
    /// Control files that may be changed.
    pub allow_control: Vec<PathBuf>,
}

/// What applying did.
#[derive(Debug)]
pub struct Applied {
    /// The pack that takes it back; none if there was nothing to do.
    pub pack: Option<Pack>,
    /// Pipes, sockets and devices, which are not applied.
    pub left_out: Vec<PathBuf>,
}

/// Why a diff was not applied or taken back. The tree is as it was, unless it says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// Not everything that changed is known.
    #[error("run {0} changed more than is listed, so that it cannot be applied as a whole")]
    Truncated(RunId),
    /// Control files among the changes.
    #[error("{} of the changes are to control files", .0.len())]
    Control(Vec<PathBuf>),
    /// The tree is not as it was.
    #[error("{} paths of `{}` are not as they were; nothing was changed", conflicts.len(), workspace.display())]
    Conflicts {
        /// Which tree.
        workspace: PathBuf,
        /// Which paths.
        conflicts: Vec<Conflict>,
    },
    /// Somebody else works on the tree.
    #[error("`{}` is in use: a run writes to it, or another apply or undo is under way", .0.display())]
    Busy(PathBuf),
    /// There is no such pack.
    #[error("there is no rollback pack `{0}`")]
    NotFound(String),
    /// A pack that cannot be taken back.
    #[error("{pack} cannot be undone: it is {}", words(*state))]
    NotApplied {
        /// Which.
        pack: PackId,
        /// Where it is in its life.
        state: State,
    },
    /// The tree cannot be looked at.
    #[error("cannot look at `{}`", path.display())]
    Tree {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Something failed on the way, and the tree is as it was.
    #[error("the changes could not be made; the tree is as it was")]
    Failed(#[source] io::Error),
    /// Something failed on the way, and so did going back.
    #[error("{pack} was stopped half-way; the next start of hotcell goes on")]
    Halfway {
        /// Which.
        pack: PackId,
        /// What the kernel said.
        source: io::Error,
    },
    /// The pack cannot be kept, so nothing is changed.
    #[error(transparent)]
    Record(#[from] RecordError),
}

fn words(state: State) -> &'static str {
    match state {
        State::Applying => "being applied",
        State::Applied => "applied",
        State::Undoing => "being undone",
        State::Undone => "undone already",
        State::RolledBack => "not applied: it was rolled back",
        State::Stuck => "stuck half-way, and the tree was changed by others since",
    }
}

/// The packs of a home.
#[derive(Clone, Debug)]
pub struct Packs {
    directory: PathBuf,
    runs: Runs,
}

/// A pack that was found half-way and dealt with.
#[derive(Debug)]
pub struct Recovered {
    /// Which.
    pub pack_id: PackId,
    /// What became of it.
    pub state: State,
    /// What somebody else changed, and was left alone.
    pub conflicts: Vec<Conflict>,
}

impl Packs {
    /// The packs of this home.
    pub fn of(home: &Home) -> Packs {
        Packs { directory: home.rollback(), runs: Runs::of(home) }
    }

    /// Where packs that are being worked on are marked.
    pub(crate) fn unfinished(&self) -> PathBuf {
        self.directory.join("unfinished")
    }

    fn place(&self, id: &PackId) -> PathBuf {
        self.directory.join(id.as_str())
    }

    fn original(&self, id: &PackId, number: usize) -> PathBuf {
        self.place(id).join("originals").join(number.to_string())
    }

    /// All packs, newest first.
    pub fn list(&self) -> Vec<Pack> {
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<PackId>().ok());
        let mut packs: Vec<Pack> = ids.filter_map(|id| self.read(&id).ok()).collect();
        packs.sort_unstable_by_key(|pack| std::cmp::Reverse(pack.created_at));
        packs
    }

    /// The pack with this id, or the newest one applied of this run.
    pub fn find(&self, name: &str) -> Result<Pack, PackError> {
        let not_found = || PackError::NotFound(name.to_owned());
        if let Ok(id) = name.parse::<PackId>() {
            return if self.place(&id).exists() { self.read(&id) } else { Err(not_found()) };
        }
        let run = self.runs.find(name).map_err(|error| match error {
            RecordError::NotFound(_) => not_found(),
            other => other.into(),
        })?;
        let mut of_run: Vec<Pack> = self.list().into_iter().filter(|pack| pack.run_id == run.run_id).collect();
        let applied = of_run.iter().position(|pack| pack.state == State::Applied).unwrap_or(0);
        if of_run.is_empty() { Err(not_found()) } else { Ok(of_run.swap_remove(applied)) }
    }

    fn read(&self, id: &PackId) -> Result<Pack, PackError> {
        let path = self.place(id).join("manifest.json");
        let text = fs::read(&path).map_err(|source| RecordError::Read { path: path.clone(), source })?;
        Ok(serde_json::from_slice(&text).map_err(|source| RecordError::Damaged { path, source })?)
    }

    /// Writes a pack, unless somebody has taken it over.
    fn write(&self, pack: &Pack) -> Result<(), PackError> {
        if let Ok(now) = self.read(&pack.pack_id)
            && now.fence > pack.fence
        {
            return Err(PackError::Busy(pack.workspace.0.clone()));
        }
        let text = serde_json::to_vec_pretty(pack).expect("plain data");
        Ok(replace_durably(&self.place(&pack.pack_id).join("manifest.json"), &text)?)
    }

    /// Applies a diff: all of what is selected, or nothing.
    pub fn apply(&self, diff: &Diff, selection: &Selection) -> Result<Applied, PackError> {
        if diff.truncated {
            return Err(PackError::Truncated(diff.run_id.clone()));
        }
        let workspace = &diff.workspace.0;
        let (entries, left_out) = select(diff, selection)?;
        if entries.is_empty() {
            return Ok(Applied { pack: None, left_out });
        }
        let (tree, _lock) = open(workspace)?;
        let moved = entries.iter().filter(|entry| entry.moved).map(|entry| Conflict {
            path: entry.path.0.clone(),
            why: "was changed on the host while the run went on".to_owned(),
        });
        let moved: Vec<Conflict> = moved.collect();
        if !moved.is_empty() {
            return Err(PackError::Conflicts { workspace: workspace.clone(), conflicts: moved });
        }
        let mut pack = new_pack(diff, &entries);
        let mut steps = pack.steps(Way::Apply);
        let cannot_look = |source| PackError::Tree { path: workspace.clone(), source };
        let conflicts = transition::conflicts(&tree, &steps).map_err(cannot_look)?;
        if !conflicts.is_empty() {
            return Err(PackError::Conflicts { workspace: workspace.clone(), conflicts });
        }
        self.begin(&tree, &mut pack, &mut steps)?;
        let blobs = diff.blobs();
        let contents = |step: &Step| match &step.to {
            Some(Node::File { sha256: Some(sha256), .. }) => blobs.open(sha256).map(Contents::New),
            _ => Err(io::Error::other("no contents were kept")),
        };
        let walk = Transition { tree: &tree, steps: &steps, tag: pack.pack_id.as_str(), contents: &contents };
        if let Err(source) = walk.perform() {
            let went_back = self.go_back(&tree, &mut pack, State::RolledBack);
            return Err(match went_back {
                Ok(conflicts) if conflicts.is_empty() => PackError::Failed(source),
                _ => PackError::Halfway { pack: pack.pack_id, source },
            });
        }
        self.finish(&mut pack, State::Applied)?;
        Ok(Applied { pack: Some(pack), left_out })
    }

    /// Takes an applied diff back: exactly, or not at all.
    pub fn undo(&self, name: &str) -> Result<Pack, PackError> {
        let found = self.find(name)?;
        let (tree, _lock) = open(&found.workspace.0)?;
        // Again, now that nobody else can be at it.
        let mut pack = self.read(&found.pack_id)?;
        if pack.state != State::Applied {
            return Err(PackError::NotApplied { pack: pack.pack_id, state: pack.state });
        }
        let workspace = pack.workspace.0.clone();
        let steps = pack.steps(Way::Undo);
        let cannot_look = |source| PackError::Tree { path: workspace.clone(), source };
        let conflicts = transition::conflicts(&tree, &steps).map_err(cannot_look)?;
        if !conflicts.is_empty() {
            return Err(PackError::Conflicts { workspace, conflicts });
        }
        mark(&self.unfinished(), &pack.pack_id)?;
        pack.state = State::Undoing;
        pack.holder = ProcessName::own();
        self.write(&pack)?;
        match self.go_back(&tree, &mut pack, State::Undone) {
            Ok(_) => Ok(pack),
            Err(source) => Err(PackError::Halfway { pack: pack.pack_id, source }),
        }
    }

    /// Packs that somebody began to work on and does not any more.
    pub fn abandoned(&self) -> Vec<PackId> {
        let marks = fs::read_dir(self.unfinished()).into_iter().flatten().flatten();
        let ids = marks.filter_map(|entry| entry.file_name().to_str()?.parse::<PackId>().ok());
        let is_abandoned = |id: &PackId| match self.read(id) {
            Ok(pack) => !pack.holder.is_alive(),
            Err(_) => self.is_unborn(id),
        };
        ids.filter(is_abandoned).collect()
    }

    /// Deals with a pack whose hotcell died half-way: the tree goes back to what it was. None if somebody is at it, or
    /// nothing was to be done.
    pub fn recover(&self, id: &PackId) -> Result<Option<Recovered>, PackError> {
        if self.is_unborn(id) {
            return self.forget(id).map(|()| None);
        }
        let seen = self.read(id)?;
        if seen.holder.is_alive() {
            return Ok(None);
        }
        let (tree, _lock) = open(&seen.workspace.0)?;
        // Again, now that nobody else can be at it.
        let mut pack = self.read(id)?;
        let end = match pack.state {
            _ if pack.holder.is_alive() => return Ok(None),
            State::Applying => State::RolledBack,
            State::Undoing => State::Undone,
            State::Applied | State::Undone | State::RolledBack | State::Stuck => {
                // It was done but for this.
                unmark(&self.unfinished(), id)?;
                return Ok(None);
            }
        };
        pack.fence += 1;
        pack.holder = ProcessName::own();
        self.write(&pack)?;
        let cannot = |source| PackError::Halfway { pack: id.clone(), source };
        let conflicts = self.go_back(&tree, &mut pack, end).map_err(cannot)?;
        Ok(Some(Recovered { pack_id: id.clone(), state: pack.state, conflicts }))
    }

    /// Whether a pack was begun, never written, and left: nothing was touched.
    fn is_unborn(&self, id: &PackId) -> bool {
        if self.place(id).join("manifest.json").exists() {
            return false;
        }
        let mark = fs::read(self.unfinished().join(id.as_str())).unwrap_or_default();
        serde_json::from_slice::<ProcessName>(&mark).is_ok_and(|holder| !holder.is_alive())
    }

    /// Removes a pack that was never written.
    fn forget(&self, id: &PackId) -> Result<(), PackError> {
        let place = self.place(id);
        if place.exists() {
            fs::remove_dir_all(&place).map_err(|source| RecordError::Write { path: place, source })?;
        }
        unmark(&self.unfinished(), id)
    }

    /// Keeps what is needed to go back, and writes down that the walk begins.
    fn begin(&self, tree: &Tree, pack: &mut Pack, steps: &mut [Step]) -> Result<(), PackError> {
        mark(&self.unfinished(), &pack.pack_id)?;
        let place = self.place(&pack.pack_id);
        let cannot = |source| RecordError::Write { path: place.clone(), source };
        let kept = self.keep_originals(tree, pack, steps).map_err(cannot);
        let kept = kept.map_err(PackError::from).and_then(|()| self.write(pack));
        if kept.is_err() {
            // Nothing was touched: leave nothing behind, or leave it to the next start.
            let _found_later = self.forget(&pack.pack_id);
        }
        kept
    }

    fn keep_originals(&self, tree: &Tree, pack: &mut Pack, steps: &mut [Step]) -> io::Result<()> {
        let place = self.place(&pack.pack_id);
        DirBuilder::new().recursive(true).mode(0o700).create(place.join("originals"))?;
        for (entry, step) in pack.entries.iter_mut().zip(steps) {
            if entry.before.is_some() {
                let (directory, name) = tree.place(&entry.path.0)?;
                let stat = rustix::fs::statat(directory, name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW)?;
                entry.owner = Some((stat.st_uid, stat.st_gid));
                step.owner = entry.owner;
            }
            if let Some(Node::File { .. }) = &entry.before {
                // Names are parted from one file, or joined to one, by making it anew.
                step.replace = step.hard_link.is_some() || transition::has_other_names(tree, &entry.path.0);
                entry.replaced = step.replaces() || !matches!(step.to, Some(Node::File { .. }));
                if entry.replaced {
                    transition::save(tree, &entry.path.0, &self.original(&pack.pack_id, step.number))?;
                }
            }
        }
        sync_all(&place)
    }

    /// Leads the tree to what it was before the pack, from wherever it is.
    fn go_back(&self, tree: &Tree, pack: &mut Pack, end: State) -> io::Result<Vec<Conflict>> {
        let (steps, mut conflicts) = transition::backward(tree, &pack.steps(Way::Apply))?;
        let contents = |step: &Step| {
            let path = self.original(&pack.pack_id, step.number);
            let wanted = match &step.to {
                Some(Node::File { sha256: Some(sha256), .. }) => sha256,
                _ => return Err(io::Error::other("no original was kept")),
            };
            let is_wanted = |file: &File| digest(file).is_ok_and(|found| found == *wanted);
            // The file itself, unless it was changed through another of its names.
            if File::open(&path).is_ok_and(|file| is_wanted(&file)) {
                return Ok(Contents::Same(path));
            }
            let copy = File::open(transition::copy_of(&path))?;
            if is_wanted(&copy) {
                Ok(Contents::Copy(copy))
            } else {
                Err(io::Error::other("a kept original is not what its digest says"))
            }
        };
        // Directories somebody put something into cannot go.
        let steps: Vec<Step> =
            steps.into_iter().filter(|step| !keeps_others_files(tree, step, pack, &mut conflicts)).collect();
        let walk = Transition { tree, steps: &steps, tag: pack.pack_id.as_str(), contents: &contents };
        walk.clear_staging()?;
        walk.perform()?;
        let state = if conflicts.is_empty() { end } else { State::Stuck };
        self.finish(pack, state).map_err(io::Error::other)?;
        Ok(conflicts)
    }

    fn finish(&self, pack: &mut Pack, state: State) -> Result<(), PackError> {
        pack.state = state;
        self.write(pack)?;
        if matches!(state, State::Undone | State::RolledBack) {
            // The tree has them again; kept by another name they would change with it.
            let originals = self.place(&pack.pack_id).join("originals");
            fs::remove_dir_all(&originals).map_err(|source| RecordError::Write { path: originals, source })?;
        }
        unmark(&self.unfinished(), &pack.pack_id)
    }
}

/// Whether a directory that should go holds what is not of this pack.
fn keeps_others_files(tree: &Tree, step: &Step, pack: &Pack, conflicts: &mut Vec<Conflict>) -> bool {
    let goes = step.from.as_ref().is_some_and(Node::is_directory) && !step.to.as_ref().is_some_and(Node::is_directory);
    if !goes {
        return false;
    }
    let is_ours = |path: &Path| pack.entries.iter().any(|entry| entry.path.0 == path);
    let names = tree.names(&step.path).unwrap_or_default();
    let others: Vec<PathBuf> = names.iter().map(|name| step.path.join(name)).filter(|path| !is_ours(path)).collect();
    let why = "was put into a directory that should go";
    conflicts.extend(others.iter().map(|path| Conflict { path: path.clone(), why: why.to_owned() }));
    !others.is_empty()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Apply,
    Undo,
}

impl Pack {
    fn steps(&self, way: Way) -> Vec<Step> {
        let steps = self.entries.iter().enumerate().map(|(number, entry)| {
            let (from, to) = match way {
                Way::Apply => (entry.before.clone(), entry.after.clone()),
                Way::Undo => (entry.after.clone(), entry.before.clone()),
            };
            let link_to = entry.link_to.as_ref().map(|path| path.0.clone()).filter(|_| way == Way::Apply);
            let hard_link = entry.hard_link.filter(|_| way == Way::Apply);
            let (path, owner, replace) = (entry.path.0.clone(), entry.owner, entry.replaced);
            Step { number, path, from, to, hard_link, link_to, replace, owner }
        });
        steps.collect()
    }
}

/// Picks the entries to apply, with the directories they need.
fn select(diff: &Diff, selection: &Selection) -> Result<(Vec<Entry>, Vec<PathBuf>), PackError> {
    use std::os::unix::ffi::OsStrExt;
    let matches =
        |globs: &[Glob], entry: &Entry| globs.iter().any(|glob| glob.matches(entry.path.0.as_os_str().as_bytes()));
    let mut picked: Vec<bool> = diff
        .entries
        .iter()
        .map(|entry| {
            (selection.only.is_empty() || matches(&selection.only, entry)) && !matches(&selection.except, entry)
        })
        .collect();
    // What is picked needs the new directories it is in.
    for idx in 0..diff.entries.len() {
        if picked[idx] {
            for above in diff.entries[idx].path.0.ancestors().skip(1) {
                if let Ok(at) = diff.entries.binary_search_by(|entry| entry.path.0.as_path().cmp(above)) {
                    let entry = &diff.entries[at];
                    let is_new = matches!(entry.kind, Kind::Added | Kind::TypeChanged);
                    picked[at] |= is_new && entry.after.as_ref().is_some_and(Node::is_directory);
                }
            }
        }
    }
    let chosen = diff.entries.iter().zip(picked).filter(|(_, picked)| *picked).map(|(entry, _)| entry);
    let (mut entries, mut left_out, mut control) = (Vec::new(), Vec::new(), Vec::new());
    for entry in chosen {
        let allowed = selection.allow_control.iter().any(|allowed| entry.path.0.starts_with(allowed));
        if matches!(entry.after, Some(Node::Special { .. })) {
            left_out.push(entry.path.0.clone());
        } else if entry.control && !allowed {
            control.push(entry.path.0.clone());
        } else {
            entries.push(entry.clone());
        }
    }
    if control.is_empty() { Ok((entries, left_out)) } else { Err(PackError::Control(control)) }
}

fn new_pack(diff: &Diff, entries: &[Entry]) -> Pack {
    let created_at = Timestamp::now();
    let entries = entries.iter().map(|entry| PackEntry {
        path: entry.path.clone(),
        before: entry.before.clone(),
        after: entry.after.clone(),
        owner: None,
        hard_link: entry.hard_link,
        link_to: entry.link_to.clone(),
        replaced: false,
    });
    Pack {
        pack_id: PackId::new(&created_at.strftime("%Y%m%d-%H%M%S").to_string(), crate::door::random()),
        run_id: diff.run_id.clone(),
        workspace: diff.workspace.clone(),
        state: State::Applying,
        fence: 1,
        holder: ProcessName::own(),
        created_at,
        entries: entries.collect(),
    }
}

/// How long to wait for whoever works on the tree.
const LOCK_WAIT: Duration = Duration::from_secs(2);

/// Opens a tree for ourselves alone.
fn open(workspace: &Path) -> Result<(Tree, File), PackError> {
    let cannot = |source| PackError::Tree { path: workspace.to_owned(), source };
    let link = fs::symlink_metadata(workspace).map_err(cannot)?;
    if !link.is_dir() {
        return Err(cannot(io::Error::other("it is not a directory any more")));
    }
    let directory = File::open(workspace).map_err(cannot)?;
    let opened = directory.metadata().map_err(cannot)?;
    if (opened.dev(), opened.ino()) != (link.dev(), link.ino()) {
        return Err(cannot(io::Error::other("it was replaced while it was opened")));
    }
    let give_up = Instant::now() + LOCK_WAIT;
    loop {
        match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < give_up => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(PackError::Busy(workspace.to_owned())),
            Err(errno) => return Err(cannot(errno.into())),
        }
    }
    Ok((Tree::open(workspace).map_err(cannot)?, directory))
}

/// Writes down that a walk is under way, and whose it is.
fn mark(directory: &Path, id: &PackId) -> Result<(), PackError> {
    let path = directory.join(id.as_str());
    let text = serde_json::to_vec(&ProcessName::own()).expect("plain data");
    Ok(replace_durably(&path, &text)?)
}

fn unmark(directory: &Path, id: &PackId) -> Result<(), PackError> {
    let path = directory.join(id.as_str());
    match fs::remove_file(&path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(RecordError::Write { path, source }.into()),
        _ => Ok(()),
    }
}
