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
//! A control file that is a link makes all that it leads through and to, inside the tree, control files as well.
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
const DIRECTORIES: &[&str] = &[
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
    ".windsurf",
    ".continue",
    ".kiro",
    ".gemini",
    ".agents",
    ".hotcell",
];

/// Files that do, in any directory.
const FILES: &[&str] = &[
    ".gitmodules",
    ".pre-commit-config.yaml",
    ".mcp.json",
    ".cursorrules",
    ".windsurfrules",
    ".clinerules",
    ".aider.conf.yml",
    ".envrc",
    ".nvimrc",
    ".exrc",
    ".dir-locals.el",
];

/// Files that are read from a home directory alone.
const HOME_FILES: &[&str] = &[
    ".gitconfig",
    ".profile",
    ".bashrc",
    ".bash_aliases",
    ".bash_profile",
    ".bash_login",
    ".bash_logout",
    ".cshrc",
    ".tcshrc",
    ".login",
    ".logout",
    ".kshrc",
    ".mkshrc",
    ".zshenv",
    ".zshrc",
    ".zprofile",
    ".zlogin",
    ".zlogout",
    ".vimrc",
    ".emacs",
];

/// What is obeyed below `.config`.
const IN_CONFIG: &[&str] = &["fish", "git", "nvim", "autostart", "systemd"];

/// So many directories are looked into for control files.
pub const DIRECTORIES_SEEN_MAX: usize = 100_000;
/// So many control files are made read-only, each by a mount of its own.
pub const GUARDED_MAX: usize = 256;

/// Which control files of a tree a run may touch.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Control {
    /// Relative to the tree.
    allowed: Vec<PathBuf>,
    /// What control files that are links lead through and to.
    linked: Vec<PathBuf>,
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
    /// Directories that could not be listed: one can be entered by whoever knows the names in it.
    pub(crate) closed: Vec<PathBuf>,
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
        Control { allowed, linked: Vec::new() }
    }

    /// Guards what these links, which were found, lead through and to; those of it that are there and no links.
    pub(crate) fn follow_links(&mut self, root: &Path, findings: &Findings) -> Vec<Found> {
        let mut targets = Vec::new();
        for link in findings.list.iter().filter(|found| found.kind == FileType::Symlink) {
            for path in led_through(root, &link.path).into_iter().filter(|path| !is_control(path)) {
                let is_new = !self.linked.contains(&path);
                if is_new && let Ok(file) = root.join(&path).symlink_metadata() {
                    let kind = FileType::from_raw_mode(file.mode());
                    if kind != FileType::Symlink {
                        targets.push(Found { path: path.clone(), kind, identity: (file.dev(), file.ino()) });
                    }
                }
                self.linked.push(path);
            }
        }
        targets
    }

    /// Whether a path is, or is below, a control file that is not allowed to be touched.
    pub fn guards(&self, path: &Path) -> bool {
        let is_linked = || self.linked.iter().any(|linked| path.starts_with(linked));
        (is_control(path) || is_linked()) && !self.allowed.iter().any(|allowed| path.starts_with(allowed))
    }

    /// Whether a control file is reached through this path: a directory that, replaced, would lead it elsewhere.
    pub(crate) fn leads_through(&self, path: &Path) -> bool {
        self.linked.iter().any(|linked| linked.starts_with(path))
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
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    findings.closed.push(at);
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
                if is_control_in(at.file_name(), name) {
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
        let files = FILES.iter().chain(HOME_FILES.iter().filter(|_| is_home));
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
pub fn is_control_file(path: &Path) -> bool {
    is_control(path) && !path.parent().is_some_and(is_control)
}

/// Whether a path is, or is below, a control file.
pub fn is_control(path: &Path) -> bool {
    let mut above = None;
    path.components().any(|part| {
        let Component::Normal(name) = part else { return false };
        is_control_in(above.replace(name), name)
    })
}

/// Whether a name is that of a control file, in a directory of this name.
fn is_control_in(above: Option<&OsStr>, name: &OsStr) -> bool {
    // Some filesystems do not tell `.Git` from `.git`.
    let is = |control: &&str| name.as_bytes().eq_ignore_ascii_case(control.as_bytes());
    let is_in_config = above.is_some_and(|above| above.as_bytes().eq_ignore_ascii_case(b".config"));
    DIRECTORIES.iter().chain(FILES).chain(HOME_FILES).any(&is) || is_in_config && IN_CONFIG.iter().any(is)
}

/// Every link that a path below a directory leads through, and where it ends, as long as that is below it.
fn led_through(root: &Path, path: &Path) -> Vec<PathBuf> {
    const LINKS_MAX: usize = 40;
    let parts = |path: &Path| path.iter().map(OsStr::to_owned).collect::<VecDeque<_>>();
    let (mut ahead, mut at, mut found) = (parts(path), PathBuf::new(), Vec::new());
    while let Some(part) = ahead.pop_front() {
        if part == "." {
            continue;
        }
        if part == ".." {
            if !at.pop() {
                return found;
            }
            continue;
        }
        let here = at.join(&part);
        let Ok(target) = std::fs::read_link(root.join(&here)) else {
            at = here;
            continue;
        };
        found.push(here);
        let below =
            if target.is_absolute() { target.strip_prefix(root).map(Path::to_owned) } else { Ok(target.clone()) };
        let (Ok(below), true) = (below, found.len() < LINKS_MAX) else { return found };
        if target.is_absolute() {
            at = PathBuf::new();
        }
        let mut next = parts(&below);
        next.append(&mut ahead);
        ahead = next;
    }
    if !at.as_os_str().is_empty() {
        found.push(at);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_control_file_is_known_by_any_part_of_its_path() {
        let control = Control::default();
        for path in [".git", ".git/hooks/pre-commit", "sub/.vscode/tasks.json", ".GIT", "a/b/.bashrc", ".config/fish/a"]
        {
            assert!(control.guards(Path::new(path)), "{path}");
        }
        for path in ["git", "src/main.rs", ".gitignore", ".github/workflows/ci.yml", "bashrc", ".config/app", "fish/a"]
        {
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

    #[test]
    fn what_a_control_file_leads_to_is_one_and_so_is_the_way() {
        let tree = tempfile::tempdir().expect("a directory");
        std::fs::create_dir_all(tree.path().join("meta/git/hooks")).expect("made");
        let link = |target: &str, path: &str| {
            std::os::unix::fs::symlink(target, tree.path().join(path)).expect("made");
        };
        link("way/git", ".git");
        link("./meta", "way");
        link("/etc/profile", ".profile");
        link(".envrc", ".envrc");
        let mut control = Control::default();
        let findings = control.find(tree.path()).expect("read");
        let targets = control.follow_links(tree.path(), &findings);
        assert_eq!(targets.iter().map(|one| one.path.as_path()).collect::<Vec<_>>(), [Path::new("meta/git")]);
        for path in ["way", "meta/git", "meta/git/hooks/x"] {
            assert!(control.guards(Path::new(path)), "{path}");
        }
        assert!(!control.guards(Path::new("meta")) && control.leads_through(Path::new("meta")));
        assert!(!control.guards(Path::new("meta/other")) && !control.leads_through(Path::new("other")));
    }
}
