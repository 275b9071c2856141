//! Diffs: what a copy-on-write run would change, kept as data beside its logs.
//!
//! ```text
//! runs/<id>/diff/manifest.json    every difference, before and after
//! runs/<id>/diff/blobs/<sha256>   new contents of files, and old contents of small ones
//! ```
//!
//! Nothing here touches the workspace; that is [`crate::pack`].

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use hotcell_base::{ExactPath, RunId};
use hotcell_cell::changes::{Changes, Kind, Layer};
use hotcell_cell::plan::Workspace;
use hotcell_cell::tree::{Node, Tree};
use serde::{Deserialize, Serialize};

use crate::blobs::Blobs;
use crate::home::Home;
use crate::plain;
use crate::record::{RecordError, Runs, replace};

/// A file of the host's up to this size is kept as it was, so that the difference can be shown line by line for ever.
pub const SHOWN_BYTES_MAX: u64 = 1 << 20;
/// And all of them together.
const OLD_BYTES_MAX: u64 = 64 << 20;

/// All differences of a run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Diff {
    /// Which run.
    pub run_id: RunId,
    /// The host's directory it would change.
    pub workspace: ExactPath,
    /// Its device and inode.
    pub workspace_id: (u64, u64),
    /// Whether more changed than is listed. Such a diff is not applied.
    pub truncated: bool,
    /// Sorted by path.
    pub entries: Vec<Entry>,
    /// Where it is kept.
    #[serde(skip)]
    directory: PathBuf,
}

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    /// Below the workspace.
    pub path: ExactPath,
    /// How it differs.
    pub kind: Kind,
    /// What the host had there.
    pub before: Option<Node>,
    /// What the run left there.
    pub after: Option<Node>,
    /// What it left there and nobody gets.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stripped: Vec<String>,
    /// Entries of one number are names of one file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hard_link: Option<u64>,
    /// Another name of this file that was there before and is as it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_to: Option<ExactPath>,
    /// Whether it is a control file that the run was not allowed to touch.
    #[serde(default, skip_serializing_if = "is_false")]
    pub control: bool,
    /// Whether the host's own changed while the run went on.
    #[serde(default, skip_serializing_if = "is_false")]
    pub moved: bool,
}

fn is_false(value: &bool) -> bool {
    !value
}

/// Why there is no diff.
#[derive(Debug, thiserror::Error)]
pub enum DiffError {
    /// The record cannot be had.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A run that leaves none.
    #[error("run {run} left no changes to look at: its workspace was `{mode}`")]
    NoCopy {
        /// Which.
        run: RunId,
        /// How its workspace appeared inside.
        mode: String,
    },
    /// A run that is not over, or did not get to the end.
    #[error("run {run} left no changes to look at: {why}")]
    NotKept {
        /// Which.
        run: RunId,
        /// Why not.
        why: &'static str,
    },
}

/// Keeps what a run changed, all of it or nothing.
pub(crate) fn keep(
    artifacts: &Path,
    run: &RunId,
    workspace: &Workspace,
    changes: &Changes,
    layer: &Layer,
) -> io::Result<()> {
    let directory = artifacts.join("diff");
    DirBuilder::new().mode(0o700).create(&directory)?;
    let kept = keep_in(&directory, run, workspace, changes, layer);
    if kept.is_err() {
        // On a full disk, what was kept so far would take the record's place.
        let _as_far_as_can_be = fs::remove_dir_all(&directory);
    }
    kept
}

fn keep_in(directory: &Path, run: &RunId, workspace: &Workspace, changes: &Changes, layer: &Layer) -> io::Result<()> {
    let blobs = Blobs::of(directory.join("blobs"));
    blobs.make()?;
    // Removed while the run went on, it has no old contents to show.
    let host = Tree::open(&workspace.path).ok();
    let mut old_bytes = OLD_BYTES_MAX;
    for change in &changes.list {
        if let Some(Node::File { sha256: Some(sha256), .. }) = &change.after {
            blobs.keep(&layer.file(&change.path)?, sha256)?;
        }
        if let Some(Node::File { sha256: Some(sha256), size, .. }) = &change.before
            && *size <= SHOWN_BYTES_MAX.min(old_bytes)
            && let Some(Ok(file)) = host.as_ref().map(|host| host.file(&change.path))
        {
            // The host's own may have moved on: then the old contents cannot be shown, and nothing is lost by that.
            if blobs.keep(&file, sha256).is_ok() {
                old_bytes -= size;
            }
        }
    }
    let entries = changes.list.iter().map(|change| Entry {
        path: ExactPath(change.path.clone()),
        kind: change.kind,
        before: change.before.clone(),
        after: change.after.clone(),
        stripped: change.stripped.clone(),
        hard_link: change.hard_link,
        link_to: change.link_to.as_deref().map(ExactPath::from),
        control: change.control,
        moved: change.moved,
    });
    let diff = Diff {
        run_id: run.clone(),
        workspace: ExactPath(workspace.path.clone()),
        workspace_id: workspace.identity(),
        truncated: changes.truncated,
        entries: entries.collect(),
        directory: PathBuf::new(),
    };
    let text = serde_json::to_vec_pretty(&diff).expect("plain data");
    replace(&directory.join("manifest.json"), &text).map_err(io::Error::other)
}

impl Diff {
    /// The diff of a run.
    pub fn of(home: &Home, run: &str) -> Result<Diff, DiffError> {
        let runs = Runs::of(home);
        let record = runs.find(run)?;
        let run = record.run_id.clone();
        if record.workspace.mode != "cow" {
            return Err(DiffError::NoCopy { run, mode: record.workspace.mode });
        }
        let directory = runs.directory(&run).join("diff");
        let path = directory.join("manifest.json");
        let text = match plain::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let why = if record.outcome.is_none() { "it is not over" } else { "it did not get to its end" };
                return Err(DiffError::NotKept { run, why });
            }
            read => read.map_err(|source| RecordError::Read { path: path.clone(), source })?,
        };
        let damaged = |source| RecordError::Damaged { path, source };
        let mut diff: Diff = serde_json::from_slice(&text).map_err(damaged)?;
        diff.directory = directory;
        Ok(diff)
    }

    pub(crate) fn blobs(&self) -> Blobs {
        Blobs::of(self.directory.join("blobs"))
    }

    /// The contents of a file before or after, if they were kept and are not too long to be shown.
    pub fn contents(&self, node: &Node) -> Option<Vec<u8>> {
        match node {
            Node::File { sha256: Some(sha256), size, .. } if *size <= SHOWN_BYTES_MAX => {
                self.blobs().read(sha256, SHOWN_BYTES_MAX).ok()
            }
            _ => None,
        }
    }
}
