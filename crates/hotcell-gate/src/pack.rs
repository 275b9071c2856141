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
//! every pack. Whoever works on a tree has a [`Claim`] on it alone and a lock on the pack, and first takes back what
//! was left half-way in that tree. Whoever takes a pack up raises its `fence`: one that was stopped for so long that its
//! locks were taken from it does not write to the pack any more.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use hotcell_base::exact::{hex, unhex};
use hotcell_base::text::shown_path;
use hotcell_base::{ExactPath, PackId, RunId};
use hotcell_cell::claim::{Claim, Use};
use hotcell_cell::tree::{self, Node, Tree};
use jiff::Timestamp;
use rustix::fs::{FileType, OFlags};
use serde::{Deserialize, Serialize};

use crate::blobs::sync_all;
use crate::diff::{Diff, Entry};
use crate::home::Home;
use crate::live::{Hold, ProcessName};
use crate::originals;
use crate::plain;
use crate::record::{RecordError, Runs, replace_durably};
use crate::select::{Selection, select};
use crate::transition::{self, Conflict, Contents, Step, Stopped, Transition};

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
    /// Its device and inode: another directory of that name is another tree.
    pub workspace_id: (u64, u64),
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
    /// Entries of one number were names of one file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub linked_before: Option<u64>,
    /// Another name of the file that was there, which is not among these entries.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub other_name_before: Option<ExactPath>,
    /// Extended attributes of a directory that was there, in hexadecimal.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub attributes: Vec<(String, String)>,
}

/// What applying did.
#[derive(Debug)]
pub struct Applied {
    /// The pack that takes it back; none if there was nothing to do.
    pub pack: Option<Pack>,
    /// Pipes, sockets and devices, which are not applied.
    pub left_out: Vec<PathBuf>,
    /// Files that somebody wrote to while they were replaced, and where they are kept.
    pub saved: Vec<Conflict>,
    /// What was half-way in this tree before.
    pub recovered: Vec<Recovered>,
}

/// What taking a diff back did.
#[derive(Debug)]
pub struct Undone {
    /// Which.
    pub pack: Pack,
    /// Files that somebody wrote to meanwhile, and where they are kept; and what could not be given back to its owner.
    pub saved: Vec<Conflict>,
    /// What was half-way in this tree before.
    pub recovered: Vec<Recovered>,
}

/// Why a diff was not applied or taken back. The tree is as it was, unless it says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// Not everything that changed is known.
    #[error("not all that {0} changed is known, so that it cannot be applied as a whole")]
    Truncated(RunId),
    /// Control files among the changes.
    #[error("changes to control files: {}", .0.len())]
    Control(Vec<PathBuf>),
    /// A path that was allowed and is no control file of this diff.
    #[error("`{}` is no control file among the changes", shown_path(.0))]
    NotControl(PathBuf),
    /// What would be closed to whoever applies it, and could not be looked at again.
    #[error("changes that would be closed to you, and could not be taken back: {}", .0.len())]
    Closed(Vec<PathBuf>),
    /// A pack that is half-way cannot be forgotten.
    #[error("{0} is half-way, and is needed to lead the tree back")]
    Needed(PackId),
    /// The tree is not as it was.
    #[error("nothing was changed; paths of `{}` that are not as they were: {}", shown_path(workspace), conflicts.len())]
    Conflicts {
        /// Which tree.
        workspace: PathBuf,
        /// Which paths.
        conflicts: Vec<Conflict>,
    },
    /// Somebody else works on the tree.
    #[error("`{}` is in use: a run writes to it, or another apply or undo is under way", shown_path(.0))]
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
    #[error("cannot look at `{}`", shown_path(path))]
    Tree {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Something failed on the way, and the tree is as it was.
    #[error("the changes could not be made; the tree is as it was")]
    Failed {
        /// What went wrong.
        source: io::Error,
        /// What somebody wrote meanwhile, and where it is kept.
        saved: Vec<Conflict>,
    },
    /// Somebody else changed the tree since it was stopped; what is theirs was left alone.
    #[error("{} of {pack} could not be taken back; the rest was", conflicts.len())]
    Stuck {
        /// Which.
        pack: PackId,
        /// What was left alone.
        conflicts: Vec<Conflict>,
    },
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

/// What going back came to.
struct Back {
    /// What somebody else changed, and was left alone.
    conflicts: Vec<Conflict>,
    /// What somebody wrote meanwhile, and where it is kept.
    saved: Vec<Conflict>,
}

/// Why there was no going back.
struct NotBack {
    /// Whether anything was touched.
    has_begun: bool,
    source: io::Error,
}

impl Back {
    fn all(self) -> Vec<Conflict> {
        self.conflicts.into_iter().chain(self.saved).collect()
    }
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

    /// Packs whose manifest cannot be read: the way back is lost, and that must be said.
    pub fn damaged(&self) -> Vec<PackId> {
        let entries = fs::read_dir(&self.directory).into_iter().flatten().flatten();
        let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<PackId>().ok());
        let is_damaged = |id: &PackId| {
            let is_marked = self.unfinished().join(id.as_str()).exists();
            !is_marked && self.place(id).join("manifest.json").exists() && self.read(id).is_err()
        };
        ids.filter(is_damaged).collect()
    }

    /// The pack with this id, or the newest of this run that can be undone.
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
        // What can be undone comes first, then what can be tried again.
        let newest = |state| of_run.iter().position(|pack| pack.state == state);
        let at = newest(State::Applied).or_else(|| newest(State::Stuck)).unwrap_or(0);
        if of_run.is_empty() { Err(not_found()) } else { Ok(of_run.swap_remove(at)) }
    }

    fn read(&self, id: &PackId) -> Result<Pack, PackError> {
        let path = self.place(id).join("manifest.json");
        let text = plain::read(&path).map_err(|source| RecordError::Read { path: path.clone(), source })?;
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
            return Ok(Applied { pack: None, left_out, saved: Vec::new(), recovered: Vec::new() });
        }
        refuse_closed(&entries)?;
        let (tree, _claim) = open(workspace, diff.workspace_id)?;
        let recovered = self.recover_all_in(&tree, diff.workspace_id)?;
        let moved = entries.iter().filter(|entry| entry.moved).map(|entry| Conflict {
            path: entry.path.0.clone(),
            why: "was changed on the host while the run went on".to_owned(),
        });
        let moved: Vec<Conflict> = moved.collect();
        if !moved.is_empty() {
            return Err(PackError::Conflicts { workspace: workspace.clone(), conflicts: moved });
        }
        let mut pack = new_pack(diff, &entries);
        let cannot_look = |source| PackError::Tree { path: workspace.clone(), source };
        let conflicts = transition::conflicts(&tree, &pack.steps(Way::Apply)).map_err(cannot_look)?;
        if !conflicts.is_empty() {
            return Err(PackError::Conflicts { workspace: workspace.clone(), conflicts });
        }
        add_closed_parents(&tree, &mut pack).map_err(cannot_look)?;
        let _hold = self.begin(&tree, &mut pack)?;
        let steps = pack.steps(Way::Apply);
        let blobs = diff.blobs();
        let contents = |step: &Step| match &step.to {
            Some(Node::File { sha256: Some(sha256), .. }) => blobs.open(sha256).map(Contents::New),
            _ => Err(io::Error::other("no contents were kept")),
        };
        let walk = Transition { tree: &tree, steps: &steps, tag: pack.pack_id.as_str(), contents: &contents };
        let stopped = match walk.perform() {
            Ok(saved) => {
                pack.state = State::Applied;
                match self.write(&pack) {
                    Ok(()) => {
                        // A mark that stays is taken away by the next start.
                        let _harmless = unmark(&self.unfinished(), &pack.pack_id);
                        return Ok(Applied { pack: Some(pack), left_out, saved, recovered });
                    }
                    // In the tree and not on record: that is not applied.
                    Err(error) => Stopped {
                        begun: steps.iter().map(|step| step.number).collect(),
                        source: io::Error::other(error),
                    },
                }
            }
            Err(stopped) => stopped,
        };
        pack.state = State::Applying;
        // What is on record must not say that it is applied while it is taken back.
        let is_on_record = self.read(&pack.pack_id).is_ok_and(|on_record| on_record.state == State::Applying);
        if !is_on_record && self.write(&pack).is_err() {
            return Err(PackError::Halfway { pack: pack.pack_id, source: stopped.source });
        }
        let begun: Vec<Step> = steps.into_iter().filter(|step| stopped.begun.contains(&step.number)).collect();
        match self.go_back(&tree, &mut pack, &begun, State::RolledBack) {
            Ok(back) if back.conflicts.is_empty() => {
                Err(PackError::Failed { source: stopped.source, saved: back.saved })
            }
            Ok(back) => Err(PackError::Stuck { pack: pack.pack_id, conflicts: back.all() }),
            Err(back) => {
                let source = io::Error::other(format!("{}; and on the way back: {}", stopped.source, back.source));
                Err(PackError::Halfway { pack: pack.pack_id, source })
            }
        }
    }

    /// Takes an applied diff back: exactly, or not at all. One that is stuck is tried again.
    pub fn undo(&self, name: &str) -> Result<Undone, PackError> {
        let found = self.find(name)?;
        let (tree, _claim) = open(&found.workspace.0, found.workspace_id)?;
        let recovered = self.recover_all_in(&tree, found.workspace_id)?;
        let _hold = self.hold(&found)?;
        // Again, now that nobody else can be at it.
        let mut pack = self.read(&found.pack_id)?;
        let (workspace, was) = (pack.workspace.0.clone(), pack.state);
        match was {
            State::Applied => {
                let cannot_look = |source| PackError::Tree { path: workspace.clone(), source };
                let conflicts = transition::conflicts(&tree, &pack.steps(Way::Undo)).map_err(cannot_look)?;
                if !conflicts.is_empty() {
                    return Err(PackError::Conflicts { workspace, conflicts });
                }
            }
            State::Stuck => {}
            state => return Err(PackError::NotApplied { pack: pack.pack_id, state }),
        }
        // What is needed is looked at before anything is touched.
        let steps = pack.steps(Way::Apply);
        for step in steps.iter().filter(|step| pack.entries[step.number].replaced) {
            let original = originals::open(&self.original(&pack.pack_id, step.number), step.from.as_ref());
            original.map_err(|source| PackError::Failed { source, saved: Vec::new() })?;
        }
        mark(&self.unfinished(), &pack.pack_id)?;
        pack.state = State::Undoing;
        pack.fence += 1;
        pack.holder = ProcessName::own();
        self.write(&pack)?;
        match self.go_back(&tree, &mut pack, &steps, State::Undone) {
            Ok(back) if back.conflicts.is_empty() => {
                let mut saved = back.saved;
                saved.extend(not_given_back(&tree, &pack));
                Ok(Undone { pack, saved, recovered })
            }
            Ok(back) => Err(PackError::Stuck { pack: pack.pack_id, conflicts: back.all() }),
            // Nothing was touched: it is what it was, and is not undone by itself some day.
            Err(back) if !back.has_begun => {
                self.finish(&mut pack, was)?;
                Err(PackError::Failed { source: back.source, saved: Vec::new() })
            }
            Err(back) => Err(PackError::Halfway { pack: pack.pack_id, source: back.source }),
        }
    }

    /// Forgets a pack, and with it the way back; what somebody wrote meanwhile, and where it is kept. One that is being
    /// worked on, or is half-way in a tree that is still there, is not forgotten.
    pub fn forget(&self, name: &str) -> Result<(Pack, Vec<Conflict>), PackError> {
        let found = self.find(name)?;
        let tree = match open(&found.workspace.0, found.workspace_id) {
            Err(PackError::Tree { .. }) => None,
            opened => Some(opened?),
        };
        let _hold = self.hold(&found)?;
        let pack = self.read(&found.pack_id)?;
        let mut saved = Vec::new();
        if let Some((tree, _claim)) = &tree {
            if matches!(pack.state, State::Applying | State::Undoing) {
                return Err(PackError::Needed(pack.pack_id));
            }
            let cannot_look = |source| PackError::Tree { path: pack.workspace.0.clone(), source };
            saved = self.rescue_originals(tree, &pack).map_err(cannot_look)?;
        }
        self.remove(&pack.pack_id)?;
        Ok((pack, saved))
    }

    /// Keeps everybody else from a pack.
    fn hold(&self, pack: &Pack) -> Result<Hold, PackError> {
        let place = self.place(&pack.pack_id);
        Hold::take(&place).map_err(|source| match source.kind() {
            io::ErrorKind::WouldBlock => PackError::Busy(pack.workspace.0.clone()),
            _ => RecordError::Read { path: place, source }.into(),
        })
    }

    /// Packs that somebody began to work on and does not any more.
    pub fn abandoned(&self) -> Vec<PackId> {
        let marks = fs::read_dir(self.unfinished()).into_iter().flatten().flatten();
        let ids = marks.filter_map(|entry| entry.file_name().to_str()?.parse::<PackId>().ok());
        let is_abandoned = |id: &PackId| match self.read(id) {
            Ok(pack) => !pack.holder.is_alive_in(&self.place(id)),
            // Not written yet, or damaged: then clearing it away fails, and says so.
            Err(_) => self.is_unborn(id) || self.place(id).join("manifest.json").exists(),
        };
        ids.filter(is_abandoned).collect()
    }

    /// Deals with a pack whose hotcell died half-way: the tree goes back to what it was. None if somebody is at it, or
    /// nothing was to be done.
    pub fn recover(&self, id: &PackId) -> Result<Option<Recovered>, PackError> {
        if self.is_unborn(id) {
            return self.remove(id).map(|()| None);
        }
        let seen = self.read(id)?;
        if seen.holder.is_alive_in(&self.place(id)) {
            return Ok(None);
        }
        let (tree, _claim) = open(&seen.workspace.0, seen.workspace_id)?;
        self.recover_in(&tree, &seen)
    }

    /// Deals with all packs that were left half-way in a tree of ours. What is newer may rest on what is taken back.
    fn recover_all_in(&self, tree: &Tree, workspace_id: (u64, u64)) -> Result<Vec<Recovered>, PackError> {
        let mut recovered = Vec::new();
        for id in self.abandoned() {
            if let Ok(pack) = self.read(&id)
                && pack.workspace_id == workspace_id
            {
                recovered.extend(self.recover_in(tree, &pack)?);
            }
        }
        Ok(recovered)
    }

    fn recover_in(&self, tree: &Tree, seen: &Pack) -> Result<Option<Recovered>, PackError> {
        let id = &seen.pack_id;
        let _hold = match self.hold(seen) {
            Err(PackError::Busy(_)) => return Ok(None),
            held => held?,
        };
        // Again, now that nobody else can be at it.
        let mut pack = self.read(id)?;
        let end = match pack.state {
            State::Applying => State::RolledBack,
            State::Undoing => State::Undone,
            state => {
                // It was done but for this.
                self.finish(&mut pack, state)?;
                return Ok(None);
            }
        };
        pack.fence += 1;
        pack.holder = ProcessName::own();
        self.write(&pack)?;
        let steps = pack.steps(Way::Apply);
        let back = self.go_back(tree, &mut pack, &steps, end);
        let back = back.map_err(|back| PackError::Halfway { pack: id.clone(), source: back.source })?;
        Ok(Some(Recovered { pack_id: id.clone(), state: pack.state, conflicts: back.all() }))
    }

    /// Whether a pack was begun, never written, and left: nothing was touched.
    fn is_unborn(&self, id: &PackId) -> bool {
        // One that cannot be looked at may be there.
        if !matches!(self.place(id).join("manifest.json").try_exists(), Ok(false)) {
            return false;
        }
        let mark = plain::read(&self.unfinished().join(id.as_str())).unwrap_or_default();
        serde_json::from_slice::<ProcessName>(&mark).is_ok_and(|holder| !holder.is_alive_in(&self.place(id)))
    }

    fn remove(&self, id: &PackId) -> Result<(), PackError> {
        let place = self.place(id);
        if place.exists() {
            fs::remove_dir_all(&place).map_err(|source| RecordError::Write { path: place, source })?;
        }
        unmark(&self.unfinished(), id)
    }

    /// Keeps what is needed to go back, and writes down that the walk begins.
    fn begin(&self, tree: &Tree, pack: &mut Pack) -> Result<Hold, PackError> {
        let place = self.place(&pack.pack_id);
        let cannot = |source| RecordError::Write { path: place.clone(), source };
        DirBuilder::new().mode(0o700).create(&place).map_err(cannot)?;
        // Before the mark: whoever finds that one looks who holds this.
        let hold = Hold::take(&place).map_err(cannot)?;
        let kept = mark(&self.unfinished(), &pack.pack_id)
            .and_then(|()| self.keep_originals(tree, pack).map_err(|source| cannot(source).into()))
            .and_then(|()| self.write(pack));
        if let Err(error) = kept {
            // Nothing was touched: leave nothing behind, or leave it to the next start.
            let _found_later = self.remove(&pack.pack_id);
            return Err(error);
        }
        Ok(hold)
    }

    fn keep_originals(&self, tree: &Tree, pack: &mut Pack) -> io::Result<()> {
        let place = self.place(&pack.pack_id);
        DirBuilder::new().recursive(true).mode(0o700).create(place.join("originals"))?;
        let steps = pack.steps(Way::Apply);
        for (entry, mut step) in pack.entries.iter_mut().zip(steps) {
            let path = &entry.path.0;
            if entry.before.is_some() {
                let (directory, name) = tree.place(path)?;
                let stat = rustix::fs::statat(directory, name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW)?;
                entry.owner = Some((stat.st_uid, stat.st_gid));
            }
            match &entry.before {
                Some(node @ Node::File { .. }) => {
                    entry.linked_before = originals::shared_number(tree, path);
                    // Names are parted from one file, or joined to one, by making it anew.
                    step.replace = step.hard_link.is_some() || entry.linked_before.is_some();
                    entry.replaced = step.replaces() || !matches!(step.to, Some(Node::File { .. }));
                    if entry.replaced {
                        let kept = self.original(&pack.pack_id, step.number);
                        let name = shown_path(path);
                        originals::save(tree, path, &kept, node).map_err(|error| {
                            io::Error::new(error.kind(), format!("keeping `{name}` failed: {error}"))
                        })?;
                    }
                }
                Some(Node::Directory { .. }) => {
                    let attributes = tree::attributes(&File::from(tree.directory(path)?));
                    entry.attributes = attributes.iter().map(|(name, value)| (hex(name), hex(value))).collect();
                }
                _ => {}
            }
        }
        find_other_names(tree, pack)?;
        sync_all(&place)
    }

    /// Leads the tree to what it was before these steps, from wherever it is.
    fn go_back(&self, tree: &Tree, pack: &mut Pack, steps: &[Step], end: State) -> Result<Back, NotBack> {
        let back_again = format!("{}-back", pack.pack_id);
        let begun = |source| NotBack { has_begun: true, source };
        // Whatever is in staging may be of any step, begun or not.
        let all = pack.steps(Way::Apply);
        let mut saved = transition::settle(tree, &all, pack.pack_id.as_str()).map_err(begun)?;
        saved.extend(transition::settle(tree, &all, &back_again).map_err(begun)?);
        let (mut back, mut conflicts) = transition::backward(tree, steps).map_err(begun)?;
        self.join_names(tree, pack, &all, &mut back).map_err(begun)?;
        let contents = |step: &Step| originals::open(&self.original(&pack.pack_id, step.number), step.to.as_ref());
        let walk = Transition { tree, steps: &back, tag: &back_again, contents: &contents };
        if !back.is_empty() {
            match walk.perform() {
                Ok(more) => saved.extend(more),
                Err(stopped) => {
                    let has_begun = !stopped.begun.is_empty();
                    if !has_begun {
                        transition::settle(tree, &all, &back_again).map_err(begun)?;
                    }
                    return Err(NotBack { has_begun, source: stopped.source });
                }
            }
        }
        // What is said to be as it was is looked at once more.
        let left_alone: BTreeSet<PathBuf> = conflicts.iter().map(|conflict| conflict.path.clone()).collect();
        for step in steps.iter().filter(|step| !left_alone.contains(&step.path)) {
            if !transition::is_at_start(tree, step).map_err(begun)? {
                let why = "is not what it was".to_owned();
                conflicts.push(Conflict { path: step.path.clone(), why });
            }
        }
        let state = if conflicts.is_empty() { end } else { State::Stuck };
        if state != State::Stuck {
            saved.extend(self.rescue_originals(tree, pack).map_err(begun)?);
        }
        // The tree first: with the record of it, the originals go.
        rustix::fs::syncfs(tree.root()).map_err(|errno| begun(errno.into()))?;
        self.finish(pack, state).map_err(|error| begun(io::Error::other(error)))?;
        Ok(Back { conflicts, saved })
    }

    /// Says of each file that comes back which others it was one with.
    fn join_names(&self, tree: &Tree, pack: &Pack, all: &[Step], back: &mut [Step]) -> io::Result<()> {
        // One that was never replaced still is the file.
        let coming: BTreeSet<usize> = back.iter().map(|step| step.number).collect();
        let mut staying: BTreeMap<u64, PathBuf> = BTreeMap::new();
        for step in all.iter().filter(|step| !coming.contains(&step.number)) {
            if let Some(number) = pack.entries[step.number].linked_before
                && !staying.contains_key(&number)
                && transition::is_at_start(tree, step)?
            {
                staying.insert(number, step.path.clone());
            }
        }
        for step in back {
            let entry = &pack.entries[step.number];
            step.hard_link = entry.linked_before;
            let other = entry.other_name_before.as_ref().map(|path| path.0.clone());
            step.link_to = other.or_else(|| staying.get(&entry.linked_before?).cloned());
        }
        Ok(())
    }

    /// A process that had a file open may have gone on writing to it: what it wrote is not thrown away with the pack.
    fn rescue_originals(&self, tree: &Tree, pack: &Pack) -> io::Result<Vec<Conflict>> {
        let mut saved = Vec::new();
        for (number, entry) in pack.entries.iter().enumerate().filter(|(_, entry)| entry.replaced) {
            let original = self.original(&pack.pack_id, number);
            let kept = originals::rescue(tree, &original, &entry.path.0, entry.before.as_ref())?;
            if let Some(kept) = kept {
                let kept = shown_path(&kept);
                let why = format!("was written to after it was replaced; that is kept as `{kept}`");
                saved.push(Conflict { path: entry.path.0.clone(), why });
            }
        }
        Ok(saved)
    }

    fn finish(&self, pack: &mut Pack, state: State) -> Result<(), PackError> {
        pack.state = state;
        self.write(pack)?;
        if matches!(state, State::Undone | State::RolledBack) {
            // The tree has them again; kept by another name they would change with it.
            let originals = self.place(&pack.pack_id).join("originals");
            match fs::remove_dir_all(&originals) {
                Err(source) if source.kind() != io::ErrorKind::NotFound => {
                    return Err(RecordError::Write { path: originals, source }.into());
                }
                _ => {}
            }
        }
        unmark(&self.unfinished(), &pack.pack_id)
    }
}

/// Finds other names of files that are to be replaced, so that they can be joined again where a copy is all that is
/// kept. A tree too large to look through keeps its files, and loses that they were one.
fn find_other_names(tree: &Tree, pack: &mut Pack) -> io::Result<()> {
    let mut wanted: BTreeSet<u64> = pack.entries.iter().filter_map(|entry| entry.linked_before).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let changed: BTreeSet<PathBuf> = pack.entries.iter().map(|entry| entry.path.0.clone()).collect();
    let mut found: BTreeMap<u64, PathBuf> = BTreeMap::new();
    let (mut queue, mut n_seen) = (VecDeque::from([PathBuf::new()]), 0);
    while let Some(at) = queue.pop_front() {
        // One that is gone meanwhile, or that we may not list, has no names to be found.
        let (Ok(directory), Ok(names)) = (tree.directory(&at), tree.names(&at)) else { continue };
        for name in names {
            n_seen += 1;
            let path = at.join(&name);
            let stat = rustix::fs::statat(&directory, &name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW);
            let Ok(stat) = stat else { continue };
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => queue.push_back(path),
                FileType::RegularFile if wanted.contains(&stat.st_ino) && !changed.contains(&path) => {
                    wanted.remove(&stat.st_ino);
                    found.insert(stat.st_ino, path);
                }
                _ => {}
            }
        }
        if wanted.is_empty() || n_seen > NAMES_SEEN_MAX {
            break;
        }
    }
    for entry in &mut pack.entries {
        let other = entry.linked_before.and_then(|number| found.get(&number));
        entry.other_name_before = other.map(|path| path.as_path().into());
    }
    Ok(())
}

/// So many names are looked at for other names of a file.
const NAMES_SEEN_MAX: usize = 200_000;

/// Directories whose owner took the right to work in them from themselves: opened for the walk, and closed again with
/// it or after a crash, for which they must be on record.
fn add_closed_parents(tree: &Tree, pack: &mut Pack) -> io::Result<()> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let known: BTreeSet<PathBuf> = pack.entries.iter().map(|entry| entry.path.0.clone()).collect();
    let parents = known.iter().filter_map(|path| path.parent()).filter(|parent| !parent.as_os_str().is_empty());
    let parents: BTreeSet<&Path> = parents.filter(|parent| !known.contains(*parent)).collect();
    for parent in parents {
        if let Some(node @ Node::Directory { mode }) = tree.node(parent, &mut 0)?
            && mode & 0o300 != 0o300
        {
            let node = Some(node);
            pack.entries.push(PackEntry::new(parent.into(), node.clone(), node));
        }
    }
    pack.entries.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(())
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
            let unhex = |(name, value): &(String, String)| Some((unhex(name)?, unhex(value)?));
            let attributes = entry.attributes.iter().filter_map(unhex).collect();
            Step { number, path, from, to, hard_link, link_to, replace, owner, attributes }
        });
        steps.collect()
    }
}

impl PackEntry {
    fn new(path: ExactPath, before: Option<Node>, after: Option<Node>) -> PackEntry {
        PackEntry {
            path,
            before,
            after,
            owner: None,
            hard_link: None,
            link_to: None,
            replaced: false,
            linked_before: None,
            other_name_before: None,
            attributes: Vec::new(),
        }
    }
}

fn new_pack(diff: &Diff, entries: &[Entry]) -> Pack {
    let created_at = Timestamp::now();
    let entries = entries.iter().map(|entry| PackEntry {
        hard_link: entry.hard_link,
        link_to: entry.link_to.clone(),
        ..PackEntry::new(entry.path.clone(), entry.before.clone(), entry.after.clone())
    });
    Pack {
        pack_id: PackId::new(&created_at.strftime("%Y%m%d-%H%M%S").to_string(), crate::door::random()),
        run_id: diff.run_id.clone(),
        workspace: diff.workspace.clone(),
        workspace_id: diff.workspace_id,
        state: State::Applying,
        fence: 1,
        holder: ProcessName::own(),
        created_at,
        entries: entries.collect(),
    }
}

/// Opens a tree for ourselves alone. It must be the directory that was meant, whatever has its name now.
fn open(workspace: &Path, id: (u64, u64)) -> Result<(Tree, Claim), PackError> {
    let cannot = |source| PackError::Tree { path: workspace.to_owned(), source };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory =
        rustix::fs::open(workspace, flags, rustix::fs::Mode::empty()).map_err(|errno| cannot(errno.into()))?;
    let stat = rustix::fs::fstat(&directory).map_err(|errno| cannot(errno.into()))?;
    if (stat.st_dev, stat.st_ino) != id {
        return Err(cannot(io::Error::other("it is another directory than the one the run worked in")));
    }
    let claim = match Claim::take(directory.as_fd(), Use::Alone) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(PackError::Busy(workspace.to_owned())),
        taken => taken.map_err(cannot)?,
    };
    Ok((Tree::of(directory), claim))
}

/// Refuses what an ordinary user could not look at again: the way back would be closed with it.
fn refuse_closed(entries: &[Entry]) -> Result<(), PackError> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let is_closed = |entry: &&Entry| match entry.after {
        Some(Node::File { mode, .. }) => mode & 0o400 == 0,
        Some(Node::Directory { mode }) => mode & 0o500 != 0o500,
        _ => false,
    };
    let closed: Vec<PathBuf> = entries.iter().filter(is_closed).map(|entry| entry.path.0.clone()).collect();
    if closed.is_empty() { Ok(()) } else { Err(PackError::Closed(closed)) }
}

/// What is back and belongs to somebody else than before: only root gives files away.
fn not_given_back(tree: &Tree, pack: &Pack) -> Vec<Conflict> {
    let mut found = Vec::new();
    for entry in pack.entries.iter().filter(|entry| entry.before.is_some()) {
        let stat = tree.place(&entry.path.0).and_then(|(directory, name)| {
            Ok(rustix::fs::statat(directory, name, rustix::fs::AtFlags::SYMLINK_NOFOLLOW)?)
        });
        if let (Ok(stat), Some((uid, gid))) = (stat, entry.owner)
            && (stat.st_uid, stat.st_gid) != (uid, gid)
        {
            let why = format!("belongs to {}:{} now; it belonged to {uid}:{gid}", stat.st_uid, stat.st_gid);
            found.push(Conflict { path: entry.path.0.clone(), why });
        }
    }
    found
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
