//! The home directory: where runs and records are kept.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use hotcell_base::text::shown_path;

use crate::plain;

/// An opened home.
#[derive(Clone, Debug)]
pub struct Home {
    path: PathBuf,
}

/// Why a home cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HomeError {
    /// It cannot be made.
    #[error("cannot make the home directory `{}`", shown_path(path))]
    Make {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// Others could read or change what is in it.
    #[error("the home directory `{}` belongs to user {owner}, not to user {us}", shown_path(path))]
    NotOurs {
        /// Which.
        path: PathBuf,
        /// Who owns it.
        owner: u32,
        /// Who we are.
        us: u32,
    },
    /// It is something else.
    #[error("the home `{}` is not a directory", shown_path(path))]
    NotADirectory {
        /// Which.
        path: PathBuf,
    },
    /// It is somebody else's directory: nothing of ours is in it.
    #[error("`{}` has files in it and is not a home of hotcell's", shown_path(path))]
    NotAHome {
        /// Which.
        path: PathBuf,
    },
    /// Somebody put it there.
    #[error("the home `{}` was found above this directory, and is not known to be yours", shown_path(path))]
    Unknown {
        /// Which.
        path: PathBuf,
    },
    /// Others may look into it.
    #[error("the home directory `{}` can be entered by others (mode {mode:o})", shown_path(path))]
    NotPrivate {
        /// Which.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
}

impl Home {
    /// Opens a home that was found in a directory above the caller's. A repository or a guest can put a directory of
    /// that name anywhere, with whatever it likes in it; so it is used only if it is empty, or if it is known: written
    /// down in `known`, a file of the user's outside any tree, when it was empty. Where nothing can be remembered, none is.
    pub fn discover(path: &Path, known: Option<&Path>) -> Result<Home, HomeError> {
        let unreadable = |source| HomeError::Make { path: path.to_owned(), source };
        let is_empty = fs::read_dir(path).map_err(unreadable)?.next().is_none();
        let text = |path: &Path| plain::read(path).map(|text| String::from_utf8_lossy(&text).into_owned());
        let list = known.map(|known| text(known).unwrap_or_default()).unwrap_or_default();
        let path = fs::canonicalize(path).map_err(unreadable)?;
        // A word only the two of them share: a directory can be made again under the same name, and even be given the
        // same number.
        let token = path.join("token");
        let word = text(&token).unwrap_or_default();
        let is_known = word.len() >= 16 && list.lines().any(|line| line == format!("{word} {}", path.display()));
        let Some(known) = known.filter(|_| is_known || is_empty) else {
            return Err(HomeError::Unknown { path });
        };
        if !is_known {
            let word = format!("{:016x}", crate::door::random());
            // Remembered first: cut short between the two, it is empty and new to us again.
            let write = || {
                known.parent().map_or(Ok(()), fs::create_dir_all)?;
                let mut file = fs::OpenOptions::new().append(true).create(true).mode(0o600).open(known)?;
                io::Write::write_all(&mut file, format!("{word} {}\n", path.display()).as_bytes())?;
                fs::write(&token, &word)
            };
            write().map_err(|source| HomeError::Make { path: known.to_owned(), source })?;
        }
        Home::open(&path)
    }

    /// Opens a home, making it on first use, for its owner alone.
    pub fn open(path: &Path) -> Result<Home, HomeError> {
        let make = |path: &Path| {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(path)
                .map_err(|source| HomeError::Make { path: path.to_owned(), source })
        };
        if path.exists() && !path.is_dir() {
            return Err(HomeError::NotADirectory { path: path.to_owned() });
        }
        let cannot = |source| HomeError::Make { path: path.to_owned(), source };
        if path.is_dir() {
            // A directory that was there before is used as it is or not at all: nothing of it is changed.
            let is_empty = fs::read_dir(path).map_err(cannot)?.next().is_none();
            if !is_empty && !path.join("runs").is_dir() && !path.join("token").is_file() {
                return Err(HomeError::NotAHome { path: path.to_owned() });
            }
        } else {
            make(path)?;
        }
        let path = fs::canonicalize(path).map_err(cannot)?;
        let home = fs::metadata(&path).map_err(|source| HomeError::Make { path: path.clone(), source })?;
        let us = rustix::process::geteuid().as_raw();
        if home.uid() != us {
            return Err(HomeError::NotOurs { path, owner: home.uid(), us });
        }
        if home.mode() & 0o077 != 0 {
            return Err(HomeError::NotPrivate { path, mode: home.mode() & 0o7777 });
        }
        let home = Home { path };
        for part in [home.runs(), home.cells(), home.rollback(), home.rollback().join("unfinished")] {
            make(&part)?;
            // A link here would have records written wherever somebody chose.
            let is_own = fs::symlink_metadata(&part).is_ok_and(|part| part.is_dir() && part.uid() == us);
            if !is_own {
                return Err(HomeError::NotADirectory { path: part });
            }
        }
        Ok(home)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Records and artifacts of runs.
    pub fn runs(&self) -> PathBuf {
        self.path.join("runs")
    }

    /// Who waits to build a cell.
    pub(crate) fn queue(&self) -> PathBuf {
        self.path.join("queue")
    }

    /// Rollback packs.
    pub fn rollback(&self) -> PathBuf {
        self.path.join("rollback")
    }

    /// Cells that are alive now, for whoever comes after a crash.
    pub fn cells(&self) -> PathBuf {
        self.path.join("cells")
    }
}
