//! Places for decoys: a mount needs something to be mounted on, so where a control file does not exist on the host, an
//! empty thing with no permissions stands while the cell does.
//!
//! Cells that share a directory share these. Each holds a shared lock on the directory; whoever gets it alone when its
//! cell is over removes them.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;

use crate::control::{PLACEHOLDER_MODE, is_placeholder};
use crate::plan::Plan;
use crate::wall::Wall;

/// Whoever removes placeholders holds the lock for a moment.
const LOCK_WAIT: Duration = Duration::from_secs(5);

/// The placeholders of one cell.
#[derive(Default)]
pub(super) struct Placeholders {
    locks: Vec<File>,
    paths: Vec<PathBuf>,
}

impl Placeholders {
    /// Makes what is missing.
    pub(super) fn make(plan: &Plan) -> io::Result<Placeholders> {
        let mut placeholders = Placeholders::default();
        if !plan.asks_for(Wall::Root) {
            return Ok(placeholders);
        }
        for tree in plan.guarded.iter().filter(|tree| !tree.decoys.is_empty()) {
            placeholders.locks.push(shared(&tree.source)?);
            for (path, directory) in &tree.decoys {
                let path = tree.source.join(path);
                // Listed first: a failure half-way removes what was made.
                placeholders.paths.push(path.clone());
                let made = if *directory {
                    DirBuilder::new().mode(PLACEHOLDER_MODE).create(&path)
                } else {
                    OpenOptions::new().write(true).create_new(true).mode(PLACEHOLDER_MODE).open(&path).map(drop)
                };
                match made {
                    Ok(()) => {}
                    // Another cell's, or made since by somebody who will find the decoy's mount in its way.
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(placeholders)
    }
}

impl Drop for Placeholders {
    fn drop(&mut self) {
        // Ours must not be in the way of the lock that removing takes.
        self.locks.clear();
        remove(&self.paths);
    }
}

fn shared(directory: &Path) -> io::Result<File> {
    let file = File::open(directory)?;
    let give_up = Instant::now() + LOCK_WAIT;
    loop {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) if Instant::now() < give_up => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Removes placeholders that no living cell needs; nothing else, whatever the paths are. The paths that are left.
pub fn remove(paths: &[PathBuf]) -> Vec<PathBuf> {
    let mut left = Vec::new();
    for path in paths.iter().filter(|path| is_placeholder(path)) {
        let alone = path.parent().and_then(|parent| {
            let directory = File::open(parent).ok()?;
            rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive).ok()?;
            Some(directory)
        });
        let removed = alone.is_some() && (fs::remove_dir(path).is_ok() || fs::remove_file(path).is_ok());
        if !removed {
            left.push(path.clone());
        }
    }
    left
}
