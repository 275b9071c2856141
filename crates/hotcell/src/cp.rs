//! `hotcell cp`: files into a session, and out of one.
//!
//! Everything inside is done with the guest's own rights, by a thread that has no others: what the guest may not read or
//! write, neither does this. No link of the guest's leads out of its root, none is followed at the end of a path, nothing
//! but plain files is opened for reading, and what comes out is bounded in files and bytes.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Component, Path, PathBuf};
use std::sync::mpsc::{self, Sender};

use hotcell_base::Bytes;
use hotcell_base::text::{shown, shown_path};
use hotcell_cell::control::is_control_file;
use hotcell_gate::Home;
use hotcell_gate::session::Client;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags};
use rustix::process::{Gid, Uid};
use serde_json::json;

use crate::cli::CpArgs;
use crate::error::Failure;
use crate::screen;

/// What comes out at most.
const BYTES_MAX: u64 = 16 << 30;
const FILES_MAX: u64 = 1_000_000;
const DEPTH_MAX: u32 = 200;

pub(crate) fn cp(home: &Home, args: &CpArgs) -> Result<(), Failure> {
    let (from, to) = (Place::parse(&args.from), Place::parse(&args.to));
    let copied = match (&from, &to) {
        (Place::Here(from), Place::Inside(session, to)) => enter(home, session)?.copy_in(from, to),
        (Place::Inside(session, from), Place::Here(to)) => enter(home, session)?.copy_out(from, to),
        _ => {
            return Err(Failure::Usage {
                message: "one of the two is a path in a session, and the other is not".to_owned(),
                hint: "write it so: hotcell cp FILE SESSION:/tmp/FILE, or the other way round".to_owned(),
            });
        }
    };
    let copied = copied.map_err(|Failed { path, source }| Failure::Io {
        message: format!("cannot copy `{}`", shown_path(&path)),
        hint: Some("look at it from inside: hotcell exec SESSION -- ls -la DIRECTORY".to_owned()),
        source,
    })?;
    if args.json {
        let left_out: Vec<String> =
            copied.left_out.iter().map(|(path, why)| format!("{}: {why}", shown_path(path))).collect();
        let object = json!({ "files": copied.n_files, "bytes": copied.n_bytes, "left_out": left_out });
        return screen::answer(format!("{object:#}\n"));
    }
    for (path, why) in &copied.left_out {
        screen::note(&format!("left out `{}`: {why}", shown_path(path)));
    }
    screen::note(&format!(
        "copied {}, {}",
        screen::count(usize::try_from(copied.n_files).unwrap_or(usize::MAX), "file"),
        Bytes(copied.n_bytes)
    ));
    Ok(())
}

enum Place {
    Here(PathBuf),
    Inside(String, PathBuf),
}

impl Place {
    /// `SESSION:PATH`, or a path of ours: what has a slash before its first colon is one.
    fn parse(text: &OsStr) -> Place {
        let bytes = text.as_bytes();
        let colon = bytes.iter().position(|byte| *byte == b':').filter(|at| *at > 0 && !bytes[..*at].contains(&b'/'));
        match colon {
            Some(at) => {
                let session = String::from_utf8_lossy(&bytes[..at]).into_owned();
                Place::Inside(session, PathBuf::from(OsStr::from_bytes(&bytes[at + 1..])))
            }
            None => Place::Here(PathBuf::from(text)),
        }
    }
}

/// What was copied.
#[derive(Default, Debug)]
struct Copied {
    n_files: u64,
    n_bytes: u64,
    left_out: Vec<(PathBuf, &'static str)>,
}

impl Copied {
    /// It is an error to have copied nothing.
    fn of_something(mut self) -> Result<Copied, Failed> {
        match self.left_out.pop() {
            Some((path, why)) if self.n_files == 0 => Err(failed(&path)(io::Error::other(why))),
            left_out => {
                self.left_out.extend(left_out);
                Ok(self)
            }
        }
    }

    fn count(&mut self, path: &Path, n_bytes: u64) -> Result<(), Failed> {
        self.n_files += 1;
        self.n_bytes += n_bytes;
        if self.n_files > FILES_MAX || self.n_bytes > BYTES_MAX {
            return Err(failed(path)(io::Error::other("there is more than is ever copied at once")));
        }
        Ok(())
    }
}

#[derive(Debug)]
struct Failed {
    path: PathBuf,
    source: io::Error,
}

fn failed(path: &Path) -> impl Fn(io::Error) -> Failed {
    let path = path.to_owned();
    move |source| Failed { path: path.clone(), source }
}

fn enter(home: &Home, session: &str) -> Result<Inside, Failure> {
    let (root, owner, directory) = Client::connect(home, session)?.root()?;
    Inside::new(root, owner, directory).map_err(|source| Failure::Io {
        message: format!("cannot enter the session `{}`", shown(session)),
        hint: Some("see whether it is there: hotcell ls --sessions".to_owned()),
        source,
    })
}

type Deed = Box<dyn FnOnce(&OwnedFd) + Send>;

/// The inside of a session, as its guest sees it.
struct Inside {
    deeds: Sender<Deed>,
    /// Where paths that do not begin at the root begin.
    directory: PathBuf,
}

impl Inside {
    fn new(root: OwnedFd, owner: u32, directory: PathBuf) -> io::Result<Inside> {
        let (deeds, to_do) = mpsc::channel::<Deed>();
        let (entered, is_entered) = mpsc::channel();
        std::thread::Builder::new().spawn(move || {
            let become_guest = || {
                if rustix::process::geteuid().is_root() {
                    let (uid, gid) = (Uid::from_raw(owner), Gid::from_raw(owner));
                    rustix::thread::set_thread_groups(&[])?;
                    rustix::thread::set_thread_res_gid(gid, gid, gid)?;
                    rustix::thread::set_thread_res_uid(uid, uid, uid)?;
                }
                Ok::<(), io::Error>(())
            };
            let became = become_guest();
            let is_guest = became.is_ok();
            if entered.send(became).is_err() || !is_guest {
                return;
            }
            for deed in to_do {
                deed(&root);
            }
        })?;
        is_entered.recv().map_err(io::Error::other)??;
        Ok(Inside { deeds, directory })
    }

    /// Does something with the guest's rights and no others.
    fn act<T: Send + 'static>(&self, deed: impl FnOnce(&OwnedFd) -> io::Result<T> + Send + 'static) -> io::Result<T> {
        let (done, result) = mpsc::channel();
        let deed: Deed = Box::new(move |root| {
            let _nobody_waits = done.send(deed(root));
        });
        self.deeds.send(deed).map_err(|_| io::Error::other("the thread inside is gone"))?;
        result.recv().map_err(io::Error::other)?
    }

    /// Opens a path of the guest's; no link in it leads out of the root, and none is followed at its end.
    fn open(&self, path: &Path, flags: OFlags, mode: Mode) -> io::Result<OwnedFd> {
        let path = self.directory.join(path);
        self.act(move |root| {
            let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
            let wait = if flags.contains(OFlags::PATH) { OFlags::empty() } else { OFlags::NONBLOCK };
            let flags = flags | wait | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            loop {
                match rustix::fs::openat2(root, &path, flags, mode, resolve) {
                    // The guest moved something on the way.
                    Err(rustix::io::Errno::AGAIN) => {}
                    opened => return Ok(opened?),
                }
            }
        })
    }

    fn directory(&self, path: &Path) -> io::Result<OwnedFd> {
        self.open(path, OFlags::PATH | OFlags::DIRECTORY, Mode::empty())
    }

    fn is_directory(&self, path: &Path) -> bool {
        self.directory(path).is_ok()
    }

    fn copy_in(&self, from: &Path, to: &Path) -> Result<Copied, Failed> {
        let from = std::fs::canonicalize(from).map_err(failed(from))?;
        let name = from.file_name().map(OsStr::to_owned).unwrap_or_else(|| OsString::from("."));
        let to = if self.is_directory(to) { to.join(name) } else { to.to_owned() };
        let mut copied = Copied::default();
        self.put(&from, &to, &mut copied, DEPTH_MAX)?;
        copied.of_something()
    }

    fn put(&self, from: &Path, to: &Path, copied: &mut Copied, depth: u32) -> Result<(), Failed> {
        let data = std::fs::symlink_metadata(from).map_err(failed(from))?;
        let mode = Mode::from_raw_mode(data.mode() & 0o777);
        let (parent, name) = (to.parent().unwrap_or(Path::new("/")).to_owned(), to.file_name().map(OsStr::to_owned));
        let name = name.ok_or_else(|| failed(to)(rustix::io::Errno::INVAL.into()))?;
        if data.is_dir() {
            if !self.is_directory(to) {
                let directory = self.directory(&parent).map_err(failed(to))?;
                // For whoever copies into it; a directory closed to its owner could not be filled.
                let made = self.act(move |_| Ok(rustix::fs::mkdirat(&directory, &name, mode | Mode::RWXU)?));
                made.map_err(failed(to))?;
            }
            copied.count(from, 0)?;
            if depth == 0 {
                return Err(failed(from)(io::Error::other("it is too deep")));
            }
            for entry in std::fs::read_dir(from).map_err(failed(from))? {
                let name = entry.map_err(failed(from))?.file_name();
                self.put(&from.join(&name), &to.join(&name), copied, depth - 1)?;
            }
        } else if data.is_symlink() {
            let target = std::fs::read_link(from).map_err(failed(from))?;
            let directory = self.directory(&parent).map_err(failed(to))?;
            let made = self.act(move |_| Ok(rustix::fs::symlinkat(&target, &directory, &name)?));
            made.map_err(failed(to))?;
            copied.count(from, 0)?;
        } else if data.is_file() {
            let mut source = File::open(from).map_err(failed(from))?;
            // Not cut short before it is known to be a plain file.
            let target = self.open(to, OFlags::WRONLY | OFlags::CREATE, mode).map_err(failed(to))?;
            let copied_bytes = self.act(move |_| {
                let mut target = plain_file(target)?;
                target.set_len(0)?;
                io::copy(&mut source, &mut target)
            });
            copied.count(from, copied_bytes.map_err(failed(to))?)?;
        } else {
            copied.left_out.push((from.to_owned(), "it is neither a file, a directory nor a link"));
        }
        Ok(())
    }

    fn copy_out(&self, from: &Path, to: &Path) -> Result<Copied, Failed> {
        let source = self.open(from, OFlags::RDONLY, Mode::empty()).map_err(failed(from))?;
        let name = from.components().next_back().and_then(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            _ => None,
        });
        let to = match name {
            Some(name) if to.is_dir() => to.join(name),
            _ => to.to_owned(),
        };
        let mut copied = Copied::default();
        self.take(source, from, Path::new(""), &to, &mut copied, DEPTH_MAX)?;
        copied.of_something()
    }

    /// Copies an open file or directory. `below` is where it is in what is copied.
    fn take(
        &self,
        source: OwnedFd,
        from: &Path,
        below: &Path,
        to: &Path,
        copied: &mut Copied,
        depth: u32,
    ) -> Result<(), Failed> {
        let stat = rustix::fs::fstat(&source).map_err(|errno| failed(from)(errno.into()))?;
        let mode = stat.st_mode & 0o777;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => copied.count(from, take_file(source, to, mode, copied).map_err(failed(to))?),
            FileType::Directory => {
                match std::fs::create_dir(to) {
                    Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(to)(error)),
                    Err(error) if !std::fs::symlink_metadata(to).is_ok_and(|data| data.is_dir()) => {
                        return Err(failed(to)(error));
                    }
                    _ => {}
                }
                copied.count(from, 0)?;
                if depth == 0 {
                    return Err(failed(from)(io::Error::other("it is too deep")));
                }
                for name in self.names(&source).map_err(failed(from))? {
                    self.take_entry(
                        &source,
                        &name,
                        (&from.join(&name), &below.join(&name), &to.join(&name)),
                        copied,
                        depth,
                    )?;
                }
                std::fs::set_permissions(to, std::fs::Permissions::from_mode(mode | 0o700)).map_err(failed(to))
            }
            _ => {
                copied.left_out.push((from.to_owned(), "it is neither a file nor a directory"));
                Ok(())
            }
        }
    }

    fn take_entry(
        &self,
        directory: &OwnedFd,
        name: &OsStr,
        (from, below, to): (&Path, &Path, &Path),
        copied: &mut Copied,
        depth: u32,
    ) -> Result<(), Failed> {
        if is_control_file(below) {
            copied
                .left_out
                .push((from.to_owned(), "it steers programs outside; copy it by its own name, having read it"));
            return Ok(());
        }
        let directory = directory.try_clone().map_err(failed(from))?;
        let name = name.to_owned();
        let opened = self.act(move |_| {
            let stat = rustix::fs::statat(&directory, &name, AtFlags::SYMLINK_NOFOLLOW)?;
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            Ok(match FileType::from_raw_mode(stat.st_mode) {
                FileType::RegularFile | FileType::Directory => {
                    Entry::Open(rustix::fs::openat(&directory, &name, flags, Mode::empty())?)
                }
                FileType::Symlink => {
                    let target = rustix::fs::readlinkat(&directory, &name, Vec::new())?;
                    Entry::Link(PathBuf::from(OsStr::from_bytes(target.to_bytes())))
                }
                _ => Entry::Other,
            })
        });
        match opened {
            Ok(Entry::Open(source)) => self.take(source, from, below, to, copied, depth - 1),
            Ok(Entry::Link(target)) if stays_within(below, &target) => {
                std::os::unix::fs::symlink(&target, to).map_err(failed(to))?;
                copied.count(from, 0)
            }
            Ok(Entry::Link(_)) => {
                copied.left_out.push((from.to_owned(), "it is a link out of what is copied"));
                Ok(())
            }
            Ok(Entry::Other) => {
                copied.left_out.push((from.to_owned(), "it is neither a file, a directory nor a link"));
                Ok(())
            }
            Err(source) => Err(failed(from)(source)),
        }
    }

    fn names(&self, directory: &OwnedFd) -> io::Result<Vec<OsString>> {
        let directory = directory.try_clone()?;
        self.act(move |_| {
            let mut names = Vec::new();
            for entry in rustix::fs::Dir::read_from(&directory)? {
                let entry = entry?;
                let name = OsStr::from_bytes(entry.file_name().to_bytes());
                if name != "." && name != ".." {
                    names.push(name.to_owned());
                }
            }
            names.sort_unstable();
            Ok(names)
        })
    }
}

enum Entry {
    Open(OwnedFd),
    Link(PathBuf),
    Other,
}

fn plain_file(fd: OwnedFd) -> io::Result<File> {
    let file = File::from(fd);
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a plain file"));
    }
    Ok(file)
}

/// Copies a file's bytes beside where they go, and puts them there in one step: no link of that name is followed.
fn take_file(source: OwnedFd, to: &Path, mode: u32, copied: &Copied) -> io::Result<u64> {
    let source = plain_file(source)?;
    let directory = to.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut name = OsString::from(".");
    name.push(to.file_name().unwrap_or_default());
    name.push(format!(".{}.tmp", std::process::id()));
    let draft = directory.join(name);
    let write = || {
        let mut target = File::options().write(true).create_new(true).mode(mode).open(&draft)?;
        // One byte more than may come shows that there is more.
        let n = io::copy(&mut source.take(BYTES_MAX.saturating_sub(copied.n_bytes) + 1), &mut target)?;
        target.flush()?;
        std::fs::rename(&draft, to)?;
        Ok(n)
    };
    let written = write();
    if written.is_err() {
        // There only if the copy was begun.
        let _absent = std::fs::remove_file(&draft);
    }
    written
}

/// Whether a link at `below`, in what is copied, leads to something in what is copied.
fn stays_within(below: &Path, target: &Path) -> bool {
    let mut depth = below.components().count().saturating_sub(1);
    let mut has_gone_down = false;
    for component in target.components() {
        match component {
            Component::Normal(_) => has_gone_down = true,
            Component::CurDir => {}
            // What was gone down through may itself be a link: up from there is anywhere.
            Component::ParentDir if depth > 0 && !has_gone_down => depth -= 1,
            _ => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_copied_is_bounded_in_bytes_and_in_files() {
        let mut copied = Copied { n_bytes: BYTES_MAX - 1, ..Copied::default() };
        assert!(copied.count(Path::new("a"), 1).is_ok());
        assert!(copied.count(Path::new("b"), 1).is_err());
        let mut copied = Copied { n_files: FILES_MAX - 1, ..Copied::default() };
        assert!(copied.count(Path::new("a"), 0).is_ok());
        assert!(copied.count(Path::new("b"), 0).is_err());
    }

    #[test]
    fn a_link_stays_within_only_if_nothing_could_lead_it_out() {
        let stays = |below: &str, target: &str| stays_within(Path::new(below), Path::new(target));
        assert!(stays("a", "b") && stays("d/a", "../b") && stays("a", "d/e"));
        assert!(!stays("a", "/b") && !stays("a", "../b") && !stays("d/a", "../../b"));
        // What is gone down through may be a link itself.
        assert!(!stays("a", "d/../b") && !stays("d/e/a", "x/../../../y"));
    }
}
