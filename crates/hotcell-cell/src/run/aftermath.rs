//! What a cell left: changes of its workspace's copy, and control files it made or tried to make.
//!
//! Looked at when the last process of the cell is gone and its scratch filesystem is still held.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use rustix::fs::{AtFlags, FileType};

use super::station::Raised;
use super::{Observer, RunError, platform};
use crate::changes::{self, Changes, Marks};
use crate::control::{Control, Findings, Found, is_placeholder};
use crate::launch;
use crate::plan::{GuardedTree, Identity, Mode, Plan};
use crate::report::ControlAttempt;
use crate::tree::{self, DIRECTORY};

/// Both.
pub(crate) fn all(
    plan: &Plan,
    cell: &Raised,
    since: (i64, i64),
    observer: &mut dyn Observer,
) -> Result<(Option<Changes>, Vec<ControlAttempt>), RunError> {
    let scratch = cell.scratch.as_ref().map(AsFd::as_fd);
    let changes = changes(plan, scratch, since, observer)?;
    let control = control_attempts(plan, scratch, changes.as_ref());
    Ok((changes, control))
}

/// Lists what a copy-on-write workspace would change, and shows it to the observer.
fn changes(
    plan: &Plan,
    scratch: Option<BorrowedFd<'_>>,
    since: (i64, i64),
    observer: &mut dyn Observer,
) -> Result<Option<Changes>, RunError> {
    let workspace = plan.workspace.as_ref().filter(|workspace| workspace.mode == Mode::Cow);
    let (Some(workspace), Some(scratch)) = (workspace, scratch) else { return Ok(None) };
    let marks = if plan.identity == Identity::Fresh { Marks::Trusted } else { Marks::User };
    let everything = Control::default();
    let control = plan.guarded.first().map_or(&everything, |tree| &tree.control);
    let context = changes::Context { marks, control, since };
    let upper = rustix::fs::openat(scratch, "upper", DIRECTORY, rustix::fs::Mode::empty());
    let listed =
        upper.map_err(io::Error::from).and_then(|upper| changes::list(upper.as_fd(), &workspace.path, &context));
    let (changes, layer) = listed.map_err(platform("the changes of the workspace cannot be listed"))?;
    observer.changed(&changes, &layer).map_err(platform("the changes of the workspace cannot be kept"))?;
    Ok(Some(changes))
}

/// Control files the cell made, or tried to.
fn control_attempts(plan: &Plan, scratch: Option<BorrowedFd<'_>>, changes: Option<&Changes>) -> Vec<ControlAttempt> {
    let mut attempts = Vec::new();
    let workspace = plan.workspace.as_ref().map(|workspace| workspace.path.clone()).unwrap_or_default();
    let in_copy = changes.iter().flat_map(|changes| &changes.list).filter(|change| change.control);
    attempts.extend(in_copy.map(|change| ControlAttempt { path: workspace.join(&change.path), blocked: true }));
    let mut number = 0;
    for tree in plan.guarded.iter().filter(|tree| tree.in_place) {
        for (path, _) in &tree.decoys {
            if scratch.is_some_and(|scratch| decoy_was_used(scratch, number)) {
                attempts.push(ControlAttempt { path: tree.target.join(path), blocked: true });
            }
            number += 1;
        }
        attempts.extend(changed_in_place(tree));
    }
    attempts
}

/// Control files of a tree that is written in place which are not what they were: further down there is no place for
/// decoys, a directory can be renamed with what is guarded in it, and whoever replaces a file on the host takes its
/// guard away with it.
fn changed_in_place(tree: &GuardedTree) -> Vec<ControlAttempt> {
    let mut paths = Vec::new();
    for guarded in &tree.existing {
        let path = tree.source.join(&guarded.path);
        let now = path.symlink_metadata().ok().map(|file| (file.dev(), file.ino()));
        if now != Some(guarded.identity) {
            paths.push(guarded.path.clone());
        }
    }
    for (decoy, _) in &tree.decoys {
        let path = tree.source.join(decoy);
        if path.symlink_metadata().is_ok() && !is_placeholder(&path) {
            paths.push(decoy.clone());
        }
    }
    // One that cannot be looked at any more is as doubtful as one that is too large.
    let nothing_known = Findings { truncated: true, ..Findings::default() };
    let findings = tree.control.find(&tree.source).unwrap_or(nothing_known);
    let is_known = |found: &Found| {
        let is = |guarded: &Found| guarded.path == found.path && guarded.identity == found.identity;
        tree.existing.iter().any(is) || paths.contains(&found.path)
    };
    let new: Vec<PathBuf> =
        findings.list.iter().filter(|found| !is_known(found)).map(|found| found.path.clone()).collect();
    paths.extend(new);
    paths.extend(findings.closed);
    if findings.truncated {
        // More than could be looked at: the whole tree is in doubt.
        paths.push(PathBuf::new());
    }
    paths.into_iter().map(|path| ControlAttempt { path: tree.target.join(path), blocked: false }).collect()
}

fn decoy_was_used(scratch: BorrowedFd<'_>, number: usize) -> bool {
    let path = format!("{}/{number}", launch::DECOYS);
    let Ok(stat) = rustix::fs::statat(scratch, &path, AtFlags::SYMLINK_NOFOLLOW) else { return false };
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return stat.st_size > 0;
    }
    let directory = rustix::fs::openat(scratch, &path, DIRECTORY, rustix::fs::Mode::empty());
    // One that was closed was touched.
    directory.map_or(true, |directory| tree::names(directory.as_fd(), 1).is_ok_and(|names| !names.is_empty()))
}
