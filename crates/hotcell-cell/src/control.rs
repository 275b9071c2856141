//! Control files: what other programs of the user's obey. A hook, an editor's task or a shell's start-up file that a
//! guest leaves behind runs later, outside, with the user's rights.
//!
//! ```text
//!              there already              not there yet
//! ro           read-only, as all          cannot be made
//! cow          read-only                  made in the copy, reported, never applied
//! rw           read-only                  a decoy in its place: writes land in scratch and are reported
//! ```
//!
//! Whoever means it names the path: `--allow-control .git`.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, Mode};

use crate::tree::{self, DIRECTORY};

/// Directories that steer a version control system, an editor or an agent.
pub const DIRECTORIES: &[&str] = &[
    ".git",
    ".hg",
    ".svn",
    ".husky",
    ".githooks",
    ".vscode",
    ".idea",
    ".zed",
    ".devcontainer",
    ".claude",
    ".codex",
    ".cursor",
    ".gemini",
    ".agents",
    ".hotcell",
];

/// Files that do.
pub const FILES: &[&str] = &[
    ".gitmodules",
    ".gitconfig",
    ".pre-commit-config.yaml",
    ".mcp.json",
    ".envrc",
    ".profile",
    ".bashrc",
    ".bash_profile",
    ".bash_login",
    ".bash_logout",
    ".zshenv",
    ".zshrc",
    ".zprofile",
    ".zlogin",
    ".zlogout",
    ".vimrc",
    ".exrc",
    ".emacs",
    ".dir-locals.el",
];

/// So many directories are looked into for control files.
const DIRECTORIES_SEEN_MAX: usize = 4096;
/// So many control files are made read-only, each by a mount of its own.
pub const GUARDED_MAX: usize = 128;

/// Which control files of a tree a run may touch.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Control {
    /// Relative to the tree.
    allowed: Vec<PathBuf>,
}

/// A control file that was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Found {
    /// Relative to the tree.
    pub(crate) path: PathBuf,
    pub(crate) kind: FileType,
}

impl Control {
    /// Guards all but these, which are given relative to the tree or by their full path.
    pub(crate) fn new(root: &Path, allowed: &[PathBuf]) -> Control {
        let below = allowed.iter().map(|path| path.strip_prefix(root).unwrap_or(path).to_owned());
        Control { allowed: below.collect() }
    }

    /// Whether a path is, or is below, a control file that is not allowed to be touched.
    pub fn guards(&self, path: &Path) -> bool {
        is_control(path) && !self.allowed.iter().any(|allowed| path.starts_with(allowed))
    }

    /// The guarded control files of a tree, nearest first. Links are not followed.
    pub(crate) fn find(&self, root: &Path) -> io::Result<Vec<Found>> {
        let mut found = Vec::new();
        let mut queue: VecDeque<(OwnedFd, PathBuf)> = VecDeque::new();
        queue.push_back((rustix::fs::open(root, DIRECTORY, Mode::empty())?, PathBuf::new()));
        let mut n_seen = 0;
        while let Some((directory, at)) = queue.pop_front() {
            n_seen += 1;
            for entry in rustix::fs::Dir::read_from(&directory)?.flatten() {
                let name = OsStr::from_bytes(entry.file_name().to_bytes());
                if name == "." || name == ".." {
                    continue;
                }
                let path = at.join(name);
                let kind = match entry.file_type() {
                    FileType::Unknown => match tree::stat(directory.as_fd(), name) {
                        Ok(Some(stat)) => FileType::from_raw_mode(stat.st_mode),
                        _ => continue,
                    },
                    kind => kind,
                };
                if is_control_name(name) {
                    if self.guards(&path) && found.len() < GUARDED_MAX && !is_placeholder(&root.join(&path)) {
                        found.push(Found { path, kind });
                    }
                } else if kind == FileType::Directory
                    && n_seen + queue.len() < DIRECTORIES_SEEN_MAX
                    && queue.len() < OPEN_MAX
                    // One we may not look into is one the guest may not write into either.
                    && let Ok(below) = rustix::fs::openat(&directory, name, DIRECTORY, Mode::empty())
                {
                    queue.push_back((below, path));
                }
            }
        }
        Ok(found)
    }

    /// Control files that could be made at the top of a tree, and whether each is a directory.
    pub(crate) fn absent(&self, root: &Path) -> Vec<(PathBuf, bool)> {
        let directories = DIRECTORIES.iter().map(|name| (PathBuf::from(name), true));
        let all = directories.chain(FILES.iter().map(|name| (PathBuf::from(name), false)));
        let is_absent = |path: &Path| path.symlink_metadata().is_err() || is_placeholder(path);
        all.filter(|(path, _)| self.guards(path) && is_absent(&root.join(path))).collect()
    }
}

/// The mode of a placeholder, on which a decoy is mounted: sticky and nothing else. Nobody makes files like this.
pub(crate) const PLACEHOLDER_MODE: u32 = 0o1000;

/// Whether a path is a place for a decoy, made for a cell that runs now or was killed.
pub(crate) fn is_placeholder(path: &Path) -> bool {
    let us = rustix::process::geteuid().as_raw();
    path.symlink_metadata().is_ok_and(|file| {
        let is_empty = file.is_dir() || file.is_file() && file.len() == 0;
        is_empty && file.uid() == us && file.mode() & 0o7777 == PLACEHOLDER_MODE
    })
}

/// Directories waiting to be looked into, each an open descriptor.
const OPEN_MAX: usize = 256;

/// Whether a path is, or is below, a control file.
pub(crate) fn is_control(path: &Path) -> bool {
    path.components().any(|part| matches!(part, Component::Normal(name) if is_control_name(name)))
}

fn is_control_name(name: &OsStr) -> bool {
    // Some filesystems do not tell `.Git` from `.git`.
    DIRECTORIES.iter().chain(FILES).any(|control| name.as_bytes().eq_ignore_ascii_case(control.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_control_file_is_known_by_any_part_of_its_path() {
        let control = Control::default();
        for path in [".git", ".git/hooks/pre-commit", "sub/.vscode/tasks.json", ".GIT", "a/b/.bashrc"] {
            assert!(control.guards(Path::new(path)), "{path}");
        }
        for path in ["git", "src/main.rs", ".gitignore", ".github/workflows/ci.yml", "bashrc"] {
            assert!(!control.guards(Path::new(path)), "{path}");
        }
    }

    #[test]
    fn what_is_allowed_is_allowed_with_all_below_it_and_nothing_beside_it() {
        let control = Control::new(Path::new("/w"), &["/w/.git".into(), "sub/.vscode".into()]);
        for path in [".git", ".git/config", "sub/.vscode/x"] {
            assert!(!control.guards(Path::new(path)), "{path}");
        }
        for path in [".vscode", "sub/.git", ".gitmodules"] {
            assert!(control.guards(Path::new(path)), "{path}");
        }
    }

    #[test]
    fn what_is_there_is_found_at_any_depth_and_links_are_not_followed() {
        let tree = tempfile::tempdir().expect("a directory");
        for path in ["a/b/.git/hooks", ".vscode", "plain"] {
            std::fs::create_dir_all(tree.path().join(path)).expect("made");
        }
        std::os::unix::fs::symlink("/", tree.path().join("out")).expect("made");
        let found = Control::default().find(tree.path()).expect("read");
        let paths: Vec<&Path> = found.iter().map(|one| one.path.as_path()).collect();
        assert_eq!(paths, [Path::new(".vscode"), Path::new("a/b/.git")]);
    }
}
