//! Places for decoys: a mount needs something to be mounted on, so where a control file does not exist on the host, an
//! empty thing stands while the cell does.
//!
//! Cells that share a directory share these. Each has a shared claim on the directory; the last one to give it back
//! removes them, through the directory it made them in, wherever that is by now.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode};

use crate::claim::{Claim, Use};
use crate::control::{Decoy, PLACEHOLDER_DIRECTORY, PLACEHOLDER_SOCKET, is_placeholder};
use crate::plan::{GuardedTree, Plan};
use crate::wall::Wall;

/// The placeholders of one cell.
#[derive(Default, Debug)]
pub(crate) struct Placeholders {
    trees: Vec<Tree>,
}

#[derive(Debug)]
struct Tree {
    claim: Claim,
    directory: File,
    names: Vec<PathBuf>,
}

impl Placeholders {
    /// Makes what is missing.
    pub(super) fn make(plan: &Plan) -> io::Result<Placeholders> {
        let mut placeholders = Placeholders::default();
        if plan.asks_for(Wall::Root) {
            for tree in plan.guarded.iter().filter(|tree| tree.in_place) {
                placeholders.add(tree)?;
            }
        }
        Ok(placeholders)
    }

    fn add(&mut self, tree: &GuardedTree) -> io::Result<()> {
        let directory = File::open(&tree.source)?;
        let claim = Claim::take(directory.as_fd(), Use::Shared)?;
        let names = tree.decoys.iter().map(|(path, _)| path.clone()).collect();
        // Listed first: a failure half-way removes what was made.
        self.trees.push(Tree { claim, directory, names });
        let directory = &self.trees[self.trees.len() - 1].directory;
        for (path, kind) in &tree.decoys {
            let made = match kind {
                Decoy::Directory => rustix::fs::mkdirat(directory, path, Mode::from_raw_mode(PLACEHOLDER_DIRECTORY)),
                Decoy::File | Decoy::Closed => {
                    let mode = Mode::from_raw_mode(PLACEHOLDER_SOCKET);
                    rustix::fs::mknodat(directory, path, FileType::Socket, mode, 0)
                }
            };
            match made {
                // Another cell's, or made since by somebody who will find the decoy's mount in its way.
                Ok(()) | Err(rustix::io::Errno::EXIST) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

impl Drop for Placeholders {
    fn drop(&mut self) {
        for tree in self.trees.drain(..) {
            let Tree { claim, directory, names } = tree;
            claim.last_one_out(|| {
                for name in &names {
                    remove_from(&directory, name);
                }
            });
        }
    }
}

/// Removes a placeholder, and nothing else: a directory only if it is empty, a socket only if it has our mode.
fn remove_from(directory: &File, name: &Path) {
    let Ok(stat) = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) else { return };
    let mode = stat.st_mode & 0o7777;
    let flags = match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory if mode == PLACEHOLDER_DIRECTORY => AtFlags::REMOVEDIR,
        FileType::Socket if mode == PLACEHOLDER_SOCKET => AtFlags::empty(),
        _ => return,
    };
    // Something is in it by now, or it is gone: either way it is not ours any more.
    let _left = rustix::fs::unlinkat(directory, name, flags);
}

/// Removes what a cell that was killed left; nothing else, whatever the paths are. The paths that are left, because
/// another cell stands on them.
pub fn remove(paths: &[PathBuf]) -> Vec<PathBuf> {
    let mut left = Vec::new();
    for path in paths.iter().filter(|path| is_placeholder(path)) {
        if let (Some(Ok(directory)), Some(name)) = (path.parent().map(File::open), path.file_name())
            && let Ok(claim) = Claim::take(directory.as_fd(), Use::Shared)
        {
            claim.last_one_out(|| remove_from(&directory, Path::new(name)));
        }
        if is_placeholder(path) {
            left.push(path.clone());
        }
    }
    left
}
