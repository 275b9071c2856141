//! Control files: what other programs of the user's obey. A hook, an editor's task or a shell's start-up file that a
//! guest leaves behind runs later, outside, with the user's rights.
//!
//! ```text
//!              there already              not there yet
//! ro           read-only, as all          cannot be made
//! cow          read-only                  made in the copy, reported, never applied
//! rw           read-only                  at the top, a decoy in its place: writes land in scratch and are reported
//! ```
//!
//! Whoever means it names the path: `--allow-control .git`. Then git works inside, and the decoys of files are such
//! that it passes over them: they cannot be opened, and nothing is reported.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, Mode};

use crate::tree::{self, DIRECTORY, Tree};
use crate::view::FileId;

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

/// Of the files, those that are obeyed in any directory. The others are read from a home directory alone.
const OBEYED_ANYWHERE: &[&str] =
    &[".gitmodules", ".pre-commit-config.yaml", ".mcp.json", ".envrc", ".exrc", ".dir-locals.el"];

/// So many directories are looked into for control files.
pub const DIRECTORIES_SEEN_MAX: usize = 100_000;
/// So many control files are made read-only, each by a mount of its own.
pub const GUARDED_MAX: usize = 256;

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
    pub(crate) identity: FileId,
}

/// The guarded control files of a tree.
#[derive(Default)]
pub(crate) struct Findings {
    /// Nearest first.
    pub(crate) list: Vec<Found>,
    /// Whether the tree was too large to find them all.
    pub(crate) truncated: bool,
}

/// What stands in place of a control file that does not exist.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Decoy {
    /// A directory.
    Directory,
    /// A file.
    File,
    /// Something that cannot be opened: where git itself works, it takes no notice of it.
    Closed,
}

impl Control {
    /// Guards all but these, which are relative to the tree.
    pub(crate) fn new(allowed: Vec<PathBuf>) -> Control {
        Control { allowed }
    }

    /// Whether a path is, or is below, a control file that is not allowed to be touched.
    pub fn guards(&self, path: &Path) -> bool {
        is_control(path) && !self.allowed.iter().any(|allowed| path.starts_with(allowed))
    }

    /// The guarded control files of a tree. Links are not followed.
    pub(crate) fn find(&self, root: &Path) -> io::Result<Findings> {
        let mut findings = Findings::default();
        let tree = Tree::of(rustix::fs::open(root, DIRECTORY, Mode::empty())?);
        let mut queue = VecDeque::from([PathBuf::new()]);
        let mut n_seen = 0;
        while let Some(at) = queue.pop_front() {
            n_seen += 1;
            if n_seen > DIRECTORIES_SEEN_MAX {
                findings.truncated = true;
                break;
            }
            let directory = match tree.directory(&at) {
                Ok(directory) => directory,
                // One that cannot be listed can be entered by whoever knows the names in it.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    findings.truncated = true;
                    continue;
                }
                // Gone meanwhile, or another mount, which is not shown.
                Err(_) => continue,
            };
            for entry in rustix::fs::Dir::read_from(&directory)?.flatten() {
                let name = OsStr::from_bytes(entry.file_name().to_bytes());
                if name == "." || name == ".." {
                    continue;
                }
                let path = at.join(name);
                if is_control_name(name) {
                    let Ok(Some(stat)) = tree::stat(directory.as_fd(), name) else { continue };
                    let is_place = at.as_os_str().is_empty() && is_placeholder(&root.join(&path));
                    if !self.guards(&path) || is_place {
                        continue;
                    }
                    if findings.list.len() == GUARDED_MAX {
                        findings.truncated = true;
                        return Ok(findings);
                    }
                    let (kind, identity) = (FileType::from_raw_mode(stat.st_mode), (stat.st_dev, stat.st_ino));
                    findings.list.push(Found { path, kind, identity });
                } else if matches!(entry.file_type(), FileType::Directory | FileType::Unknown) {
                    queue.push_back(path);
                }
            }
        }
        Ok(findings)
    }

    /// Control files that could be made at the top of a tree, and what stands in their place.
    pub(crate) fn absent(&self, root: &Path, is_home: bool) -> Vec<(PathBuf, Decoy)> {
        // Whoever works with git inside would otherwise find files it did not make.
        let file = if self.guards(Path::new(".git")) { Decoy::File } else { Decoy::Closed };
        let directories = DIRECTORIES.iter().map(|name| (PathBuf::from(name), Decoy::Directory));
        let files = FILES.iter().filter(|name| is_home || OBEYED_ANYWHERE.contains(name));
        let all = directories.chain(files.map(|name| (PathBuf::from(name), file)));
        let is_absent = |path: &Path| path.symlink_metadata().is_err() || is_placeholder(path);
        all.filter(|(path, _)| self.guards(path) && is_absent(&root.join(path))).collect()
    }
}

/// The modes of placeholders, on which decoys are mounted: a directory, and a socket nobody listens on, which git and
/// other programs pass over. Nobody makes things like these.
pub(crate) const PLACEHOLDER_DIRECTORY: u32 = 0o1700;
pub(crate) const PLACEHOLDER_SOCKET: u32 = 0o1000;

/// Whether a path is a place for a decoy, made for a cell that runs now or was killed.
pub(crate) fn is_placeholder(path: &Path) -> bool {
    let us = rustix::process::geteuid().as_raw();
    path.symlink_metadata().is_ok_and(|file| {
        let mode = file.mode() & 0o7777;
        let is_empty = || std::fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
        let is_place = file.is_dir() && mode == PLACEHOLDER_DIRECTORY && is_empty()
            || file.file_type().is_socket() && mode == PLACEHOLDER_SOCKET;
        is_place && file.uid() == us
    })
}

/// Whether a path names a control file itself, and not something in it.
pub(crate) fn is_control_file(path: &Path) -> bool {
    path.file_name().is_some_and(is_control_name) && !path.parent().is_some_and(is_control)
}

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
        let control = Control::new(vec![".git".into(), "sub/.vscode".into()]);
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
        let paths: Vec<&Path> = found.list.iter().map(|one| one.path.as_path()).collect();
        assert_eq!(paths, [Path::new(".vscode"), Path::new("a/b/.git")]);
    }
}
