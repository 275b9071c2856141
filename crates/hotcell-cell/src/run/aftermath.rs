//! What a cell left: changes of its workspace's copy, and control files it made or tried to make.
//!
//! Looked at when the last process of the cell is gone and its scratch filesystem is still held.

use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{AtFlags, FileType};

use super::supervisor::LiveCell;
use super::{Observer, RunError, platform};
use crate::changes::{self, Changes, Marks};
use crate::control::Control;
use crate::launch;
use crate::plan::{Identity, Mode, Plan};
use crate::report::ControlAttempt;
use crate::tree::{self, DIRECTORY};

/// Lists what a copy-on-write workspace would change, and shows it to the observer.
pub(super) fn changes(
    plan: &Plan,
    cell: &LiveCell<'_>,
    observer: &mut dyn Observer,
) -> Result<Option<Changes>, RunError> {
    let workspace = plan.workspace.as_ref().filter(|workspace| workspace.mode == Mode::Cow);
    let (Some(workspace), Some(scratch)) = (workspace, &cell.scratch) else { return Ok(None) };
    let marks = if plan.identity == Identity::Fresh { Marks::Trusted } else { Marks::User };
    let everything = Control::default();
    let control = plan.guarded.first().map_or(&everything, |tree| &tree.control);
    let context = changes::Context { marks, control, since: cell.since };
    let upper = rustix::fs::openat(scratch, "upper", DIRECTORY, rustix::fs::Mode::empty());
    let listed =
        upper.map_err(io::Error::from).and_then(|upper| changes::list(upper.as_fd(), &workspace.path, &context));
    let (changes, layer) = listed.map_err(platform("the changes of the workspace cannot be listed"))?;
    observer.changed(&changes, &layer).map_err(platform("the changes of the workspace cannot be kept"))?;
    Ok(Some(changes))
}

/// Control files the cell made, or tried to.
pub(super) fn control_attempts(plan: &Plan, cell: &LiveCell<'_>, changes: Option<&Changes>) -> Vec<ControlAttempt> {
    let mut attempts = Vec::new();
    let workspace = plan.workspace.as_ref().map(|workspace| workspace.path.clone()).unwrap_or_default();
    let in_copy = changes.iter().flat_map(|changes| &changes.list).filter(|change| change.control);
    attempts.extend(in_copy.map(|change| ControlAttempt { path: workspace.join(&change.path), blocked: true }));
    let mut number = 0;
    for tree in plan.guarded.iter().filter(|tree| !tree.decoys.is_empty()) {
        for (path, _) in &tree.decoys {
            if decoy_was_used(cell, number) {
                attempts.push(ControlAttempt { path: tree.target.join(path), blocked: true });
            }
            number += 1;
        }
        // Further down there is no place for decoys: what was made there is there.
        let known = |path: &Path| {
            tree.existing.iter().any(|(found, _)| found.path == path)
                || tree.decoys.iter().any(|(decoy, _)| decoy == path)
        };
        let found = tree.control.find(&tree.source).unwrap_or_default();
        let new = found.into_iter().filter(|found| !known(&found.path));
        attempts.extend(new.map(|found| ControlAttempt { path: tree.target.join(found.path), blocked: false }));
    }
    attempts
}

fn decoy_was_used(cell: &LiveCell<'_>, number: usize) -> bool {
    let Some(scratch) = &cell.scratch else { return false };
    let path = format!("{}/{number}", launch::DECOYS);
    let Ok(stat) = rustix::fs::statat(scratch, &path, AtFlags::SYMLINK_NOFOLLOW) else { return false };
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return stat.st_size > 0;
    }
    let directory = rustix::fs::openat(scratch, &path, DIRECTORY, rustix::fs::Mode::empty());
    // One that was closed was touched.
    directory.map_or(true, |directory| tree::names(directory.as_fd(), 1).is_ok_and(|names| !names.is_empty()))
}
