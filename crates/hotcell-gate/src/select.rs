//! Selections: which changes of a diff are to be applied.

use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use hotcell_base::Glob;
use hotcell_cell::changes::Kind;
use hotcell_cell::control;
use hotcell_cell::needs::normal;
use hotcell_cell::tree::Node;

use crate::diff::{Diff, Entry};
use crate::pack::PackError;

/// What of a diff is to be applied.
#[derive(Clone, Debug, Default)]
pub struct Selection {
    /// Only what matches one of these; everything if there are none.
    pub only: Vec<Glob>,
    /// Nothing that matches one of these.
    pub except: Vec<Glob>,
    /// Control files that may be changed: relative to the workspace, or full paths.
    pub allow_control: Vec<PathBuf>,
}

/// Picks the entries to apply, with the directories they need.
pub(crate) fn select(diff: &Diff, selection: &Selection) -> Result<(Vec<Entry>, Vec<PathBuf>), PackError> {
    let allowed = allowed(diff, selection)?;
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
    let (mut entries, mut left_out, mut control) = (Vec::new(), BTreeSet::<PathBuf>::new(), Vec::new());
    for entry in chosen {
        let is_allowed = allowed.iter().any(|allowed| entry.path.0.starts_with(allowed));
        let is_special = |node: &Option<Node>| matches!(node, Some(Node::Special { .. }));
        // What is gone below a name that is left out stays, too.
        let is_below = entry.path.0.ancestors().any(|above| left_out.contains(above));
        if is_special(&entry.after) || is_special(&entry.before) || is_below {
            left_out.insert(entry.path.0.clone());
        } else if entry.control && !is_allowed {
            control.push(entry.path.0.clone());
        } else {
            entries.push(entry.clone());
        }
    }
    if control.is_empty() { Ok((entries, left_out.into_iter().collect())) } else { Err(PackError::Control(control)) }
}

/// The allowed control files, relative to the workspace. One that is none is a mistake somebody should know of.
fn allowed(diff: &Diff, selection: &Selection) -> Result<Vec<PathBuf>, PackError> {
    let relative = |path: &PathBuf| {
        let full = normal(&diff.workspace.0.join(path));
        let below = full.strip_prefix(&diff.workspace.0).ok().map(Path::to_owned);
        let is_among =
            |below: &PathBuf| diff.entries.iter().any(|entry| entry.control && entry.path.0.starts_with(below));
        below
            .filter(|below| control::is_control(below))
            .filter(is_among)
            .ok_or_else(|| PackError::NotControl(path.clone()))
    };
    selection.allow_control.iter().map(relative).collect()
}
