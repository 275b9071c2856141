//! `hotcell cp`: files into a session, and out of one.
//!
//! The guest may change both ends while this goes on: the inside is its own, and so is whatever it may write to here. So
//! every file is reached from its directory, which is open, by a name that is no link; what is opened is looked at once
//! more; and a path that is given here must not lead through a link the guest could have made. Inside, everything is done
//! with the guest's id and in its root, by a thread of its own. What is copied is bounded in files and bytes.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};

use hotcell_base::Bytes;
use hotcell_base::text::{shown, shown_path};
use hotcell_cell::control::is_control_file;
use hotcell_gate::Home;
use hotcell_gate::session::{Client, Root};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
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
        (Place::Here(from), Place::Inside(session, to)) => {
            let (inside, here) = enter(home, session)?;
            Copy::new(&here, &inside).copy(from, to)
        }
        (Place::Inside(session, from), Place::Here(to)) => {
            let (inside, here) = enter(home, session)?;
            Copy::new(&inside, &here).copy(from, to)
        }
        _ => {
            return Err(Failure::Usage {
                message: "one of the two is a path in a session, and the other is not".to_owned(),
                hint: "write it so: hotcell cp FILE SESSION:/tmp/FILE, or the other way round".to_owned(),
            });
        }
    };
    let copied = copied.map_err(|Failed { path, source }| Failure::Io {
        message: format!("cannot copy `{}`", shown_path(&path)),
        hint: Some("look at it: ls -la DIRECTORY, or from inside: hotcell exec SESSION -- ls -la DIRECTORY".to_owned()),
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
    /// Files, directories and links.
    n_entries: u64,
    n_bytes: u64,
    left_out: Vec<(PathBuf, &'static str)>,
}

impl Copied {
    /// It is an error to have copied nothing.
    fn of_something(mut self) -> Result<Copied, Failed> {
        match self.left_out.pop() {
            Some((path, why)) if self.n_entries == 0 => Err(failed(&path)(io::Error::other(why))),
            left_out => {
                self.left_out.extend(left_out);
                Ok(self)
            }
        }
    }

    fn count(&mut self, path: &Path, n_bytes: u64) -> Result<(), Failed> {
        self.n_entries += 1;
        self.n_bytes += n_bytes;
        if self.n_entries > FILES_MAX || self.n_bytes > BYTES_MAX {
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

/// Both ends of a copy.
fn enter(home: &Home, session: &str) -> Result<(Side, Side), Failure> {
    let root = Client::connect(home, session)?.root()?;
    let here = Side::Here { writable: root.writable.clone() };
    let inside = Inside::new(root).map_err(|source| Failure::Io {
        message: format!("cannot enter the session `{}`", shown(session)),
        hint: Some("see whether it is there: hotcell ls --sessions".to_owned()),
        source,
    })?;
    Ok((Side::Inside(inside), here))
}

/// One end of a copy.
enum Side {
    /// Ours. The guest may write to these directories.
    Here { writable: Vec<PathBuf> },
    /// The guest's.
    Inside(Inside),
}

type Deed = Box<dyn FnOnce() + Send>;

/// The inside of a session, as its guest sees it.
struct Inside {
    deeds: Sender<Deed>,
    root: Arc<OwnedFd>,
    /// Where paths that do not begin at the root begin.
    directory: PathBuf,
}

impl Inside {
    fn new(root: Root) -> io::Result<Inside> {
        let (deeds, to_do) = mpsc::channel::<Deed>();
        let (entered, is_entered) = mpsc::channel();
        let owner = root.owner;
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
            to_do.into_iter().for_each(|deed| deed());
        })?;
        is_entered.recv().map_err(io::Error::other)??;
        Ok(Inside { deeds, root: Arc::new(root.root), directory: root.directory })
    }
}

/// Where something is: in an open directory, under a name; or, without one, the directory itself.
type Found = (Arc<OwnedFd>, Option<OsString>);

const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

impl Side {
    /// Does something with the rights of this side.
    fn act<T: Send + 'static>(&self, deed: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
        let Side::Inside(inside) = self else { return deed() };
        let (done, result) = mpsc::channel();
        let deed: Deed = Box::new(move || {
            let _nobody_waits = done.send(deed());
        });
        inside.deeds.send(deed).map_err(|_| io::Error::other("the thread inside is gone"))?;
        result.recv().map_err(io::Error::other)?
    }

    /// Finds a path that was given. Only here is a whole path looked up. A link of ours at its end is followed to what is
    /// copied, and into a directory, but never to a file that would be written.
    fn find(&self, path: &Path, is_source: bool) -> io::Result<Found> {
        let path = match self {
            Side::Here { writable } => match (path.parent(), path.file_name()) {
                (Some(parent), Some(name)) if !is_source && !path.is_dir() => {
                    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
                    resolve(parent, writable)?.join(name)
                }
                _ => resolve(path, writable)?,
            },
            Side::Inside(inside) => inside.directory.join(path),
        };
        let name = path.components().next_back().and_then(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            _ => None,
        });
        let directory = if name.is_some() { path.parent().unwrap_or(Path::new("/")).to_owned() } else { path };
        let opened = match self {
            // It has no links; if there is one now, it was put there meanwhile.
            Side::Here { .. } => {
                let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
                rustix::fs::openat2(rustix::fs::CWD, &directory, DIRECTORY, Mode::empty(), resolve)?
            }
            Side::Inside(inside) => {
                let root = Arc::clone(&inside.root);
                self.act(move || open_in_root(&root, &directory))?
            }
        };
        Ok((Arc::new(opened), name))
    }

    /// Looks at a name in a directory, and opens it if it is a plain file or a directory.
    fn look(&self, directory: &Arc<OwnedFd>, name: &OsStr) -> io::Result<Entry> {
        let (directory, name) = (Arc::clone(directory), name.to_owned());
        self.act(move || {
            let kind = |stat: rustix::fs::Stat| FileType::from_raw_mode(stat.st_mode);
            // Devices and pipes are not even opened.
            let seen = kind(rustix::fs::statat(&*directory, &name, AtFlags::SYMLINK_NOFOLLOW)?);
            let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            Ok(match seen {
                FileType::RegularFile | FileType::Directory => {
                    let opened = rustix::fs::openat(&*directory, &name, flags, Mode::empty())?;
                    let stat = rustix::fs::fstat(&opened)?;
                    let mode = Mode::from_raw_mode(stat.st_mode & 0o777);
                    match kind(stat) {
                        FileType::RegularFile => Entry::File(File::from(opened), mode),
                        FileType::Directory => Entry::Directory(Arc::new(opened), mode),
                        _ => Entry::Other,
                    }
                }
                FileType::Symlink => {
                    let target = rustix::fs::readlinkat(&*directory, &name, Vec::new())?;
                    Entry::Link(PathBuf::from(OsStr::from_bytes(target.to_bytes())))
                }
                _ => Entry::Other,
            })
        })
    }

    fn names(&self, directory: &Arc<OwnedFd>) -> io::Result<Vec<OsString>> {
        let directory = Arc::clone(directory);
        self.act(move || {
            let mut names = Vec::new();
            for entry in rustix::fs::Dir::read_from(&*directory)? {
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

    /// Opens a directory in another; a link is none.
    fn directory(&self, directory: &Arc<OwnedFd>, name: &OsStr) -> io::Result<Arc<OwnedFd>> {
        let (directory, name) = (Arc::clone(directory), name.to_owned());
        self.act(move || Ok(Arc::new(rustix::fs::openat(&*directory, &name, DIRECTORY, Mode::empty())?)))
    }

    /// Opens a directory in another, which is made if it is not there.
    fn make_directory(&self, directory: &Arc<OwnedFd>, name: &OsStr, mode: Mode) -> io::Result<Arc<OwnedFd>> {
        let (within, made) = (Arc::clone(directory), name.to_owned());
        // One closed to its owner could not be filled.
        match self.act(move || Ok(rustix::fs::mkdirat(&*within, &made, mode | Mode::RWXU)?)) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => self.directory(directory, name),
        }
    }

    fn make_link(&self, directory: &Arc<OwnedFd>, name: &OsStr, target: PathBuf) -> io::Result<()> {
        let (directory, name) = (Arc::clone(directory), name.to_owned());
        self.act(move || match rustix::fs::symlinkat(&target, &*directory, &name) {
            // The same one may be there already.
            Err(Errno::EXIST) => {
                let there = rustix::fs::readlinkat(&*directory, &name, Vec::new());
                let is_same = there.is_ok_and(|there| there.to_bytes() == target.as_os_str().as_bytes());
                if is_same { Ok(()) } else { Err(Errno::EXIST.into()) }
            }
            made => Ok(made?),
        })
    }

    /// Writes a file of at most so many bytes and one more, which shows that there were more.
    fn write(&self, directory: &Arc<OwnedFd>, name: &OsStr, mode: Mode, source: File, most: u64) -> io::Result<u64> {
        let (directory, name) = (Arc::clone(directory), name.to_owned());
        let mut source = source.take(most.saturating_add(1));
        match self {
            Side::Here { .. } => replace(&directory, &name, mode, &mut source),
            // What is there may be a mount of its own, which nothing can be put in the place of.
            Side::Inside(_) => self.act(move || {
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
                let mut target = File::from(rustix::fs::openat(&*directory, &name, flags, mode)?);
                // Not cut short before it is known to be a plain file.
                if !target.metadata()?.is_file() {
                    return Err(io::Error::other("there is something that is not a plain file"));
                }
                target.set_len(0)?;
                io::copy(&mut source, &mut target)
            }),
        }
    }
}

/// Copies bytes beside where they go, and puts them there in one step: no link of that name is followed.
fn replace(directory: &OwnedFd, name: &OsStr, mode: Mode, source: &mut impl Read) -> io::Result<u64> {
    // A device, a pipe or a link is not what anybody means to lose.
    match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile => {
            return Err(io::Error::other("there is something that is not a plain file"));
        }
        _ => {}
    }
    let draft = format!(".hotcell-cp-{}.tmp", std::process::id());
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let written = rustix::fs::openat(directory, &draft, flags, mode).map_err(io::Error::from).and_then(|target| {
        let n = io::copy(source, &mut File::from(target))?;
        rustix::fs::renameat(directory, &draft, directory, name)?;
        Ok(n)
    });
    if written.is_err() {
        // There only if the copy was begun.
        let _absent = rustix::fs::unlinkat(directory, &draft, AtFlags::empty());
    }
    written
}

/// Opens a directory of the guest's; no link in its path leads out of the root.
fn open_in_root(root: &OwnedFd, path: &Path) -> io::Result<OwnedFd> {
    const TRIES: usize = 1000;
    const FLAGS: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    for _ in 0..TRIES {
        match rustix::fs::openat2(root, path, FLAGS, Mode::empty(), resolve) {
            // The guest moved something on the way.
            Err(Errno::AGAIN) => {}
            opened => return Ok(opened?),
        }
    }
    Err(io::Error::other("it does not hold still"))
}

/// The path without links, dots and `..`; its last part need not exist. A link in a directory that the guest may write to
/// could lead anywhere, and is refused.
fn resolve(path: &Path, writable: &[PathBuf]) -> io::Result<PathBuf> {
    const LINKS_MAX: usize = 40;
    let owned = |part: Component<'_>| part.as_os_str().to_owned();
    let whole = std::path::absolute(path)?;
    let mut parts: Vec<OsString> = whole.components().rev().map(owned).collect();
    let (mut resolved, mut n_links) = (PathBuf::from("/"), 0);
    while let Some(part) = parts.pop() {
        match Path::new(&part).components().next() {
            Some(Component::ParentDir) => {
                resolved.pop();
                continue;
            }
            Some(Component::Normal(_)) => {}
            Some(Component::RootDir) => {
                resolved = PathBuf::from("/");
                continue;
            }
            _ => continue,
        }
        let next = resolved.join(&part);
        match std::fs::read_link(&next) {
            Ok(target) => {
                n_links += 1;
                if writable.iter().any(|tree| resolved.starts_with(tree)) {
                    return Err(io::Error::other(format!(
                        "the session can write to `{}`, where `{}` is a link: name what it leads to, having looked",
                        shown_path(&resolved),
                        shown_path(&next)
                    )));
                }
                if n_links > LINKS_MAX {
                    return Err(Errno::LOOP.into());
                }
                parts.extend(target.components().rev().map(owned));
            }
            // Not a link, or not there, which is for whoever opens it to say.
            Err(_) => resolved = next,
        }
    }
    Ok(resolved)
}

enum Entry {
    File(File, Mode),
    Directory(Arc<OwnedFd>, Mode),
    Link(PathBuf),
    Other,
}

/// Which file it is, whatever it is called.
fn identity(file: &OwnedFd) -> Option<(u64, u64)> {
    rustix::fs::fstat(file).ok().map(|stat| (stat.st_dev, stat.st_ino))
}

/// A copy from one side to the other.
struct Copy<'a> {
    from: &'a Side,
    to: &'a Side,
    /// Which directory the first one is copied to: it may be in what is copied.
    goes_to: Option<(u64, u64)>,
    copied: Copied,
}

/// Where a copy is at: both paths as they are shown, and where it is in what is copied.
struct At {
    from: PathBuf,
    to: PathBuf,
    below: PathBuf,
    depth: u32,
}

impl At {
    fn join(&self, name: &OsStr) -> At {
        let [from, to, below] = [&self.from, &self.to, &self.below].map(|path| path.join(name));
        At { from, to, below, depth: self.depth + 1 }
    }
}

impl<'a> Copy<'a> {
    fn new(from: &'a Side, to: &'a Side) -> Copy<'a> {
        Copy { from, to, goes_to: None, copied: Copied::default() }
    }

    fn copy(mut self, from: &Path, to: &Path) -> Result<Copied, Failed> {
        let (source, name) = self.from.find(from, true).map_err(failed(from))?;
        let (target, new_name) = self.to.find(to, false).map_err(failed(to))?;
        // Into a directory that is there already, under its own name.
        let (into, new_name) = match new_name {
            None => (Some(target.clone()), None),
            Some(new_name) => (self.to.directory(&target, &new_name).ok(), Some(new_name)),
        };
        let at = At { from: from.to_owned(), to: to.to_owned(), below: PathBuf::new(), depth: 0 };
        match (name, into, new_name) {
            (Some(name), Some(into), _) => {
                // Under the name it was given by, which may be that of a link to it.
                let new_name = from.file_name().unwrap_or(&name);
                self.entry((&source, &name), (&into, new_name), &at)?;
            }
            (Some(name), None, Some(new_name)) => self.entry((&source, &name), (&target, &new_name), &at)?,
            (None, Some(into), _) => self.all_of(&source, &into, &at)?,
            (None, None, Some(new_name)) => {
                let into = self.to.make_directory(&target, &new_name, Mode::RWXU).map_err(failed(to))?;
                self.all_of(&source, &into, &at)?;
            }
            (_, None, None) => unreachable!("a directory without a name is one that is there"),
        }
        self.copied.of_something()
    }

    fn all_of(&mut self, source: &Arc<OwnedFd>, target: &Arc<OwnedFd>, at: &At) -> Result<(), Failed> {
        self.copied.count(&at.from, 0)?;
        if at.depth >= DEPTH_MAX {
            return Err(failed(&at.from)(io::Error::other("it is too deep")));
        }
        for name in self.from.names(source).map_err(failed(&at.from))? {
            self.entry((source, &name), (target, &name), &at.join(&name))?;
        }
        Ok(())
    }

    fn entry(
        &mut self,
        (source, name): (&Arc<OwnedFd>, &OsStr),
        (target, new_name): (&Arc<OwnedFd>, &OsStr),
        at: &At,
    ) -> Result<(), Failed> {
        let is_out = matches!(self.to, Side::Here { .. });
        // What was named is wanted.
        if is_out && at.depth > 0 && is_control_file(&at.below) {
            return self.leave_out(at, "it steers programs outside; copy it by its own name, having read it");
        }
        match self.from.look(source, name).map_err(failed(&at.from))? {
            Entry::File(file, mode) => {
                let most = BYTES_MAX.saturating_sub(self.copied.n_bytes);
                let n = self.to.write(target, new_name, mode, file, most).map_err(failed(&at.to))?;
                self.copied.n_files += 1;
                self.copied.count(&at.from, n)
            }
            Entry::Directory(directory, mode) => {
                if self.goes_to.is_some() && identity(&directory) == self.goes_to {
                    return self.leave_out(at, "it is where the copy goes");
                }
                let into = self.to.make_directory(target, new_name, mode).map_err(failed(&at.to))?;
                if self.goes_to.is_none() {
                    self.goes_to = identity(&into);
                }
                self.all_of(&directory, &into, at)
            }
            Entry::Link(link) if !is_out || at.depth > 0 && stays_within(&at.below, &link) => {
                self.to.make_link(target, new_name, link).map_err(failed(&at.to))?;
                self.copied.count(&at.from, 0)
            }
            Entry::Link(_) => self.leave_out(at, "it is a link out of what is copied"),
            Entry::Other => self.leave_out(at, "it is neither a file, a directory nor a link"),
        }
    }

    fn leave_out(&mut self, at: &At, why: &'static str) -> Result<(), Failed> {
        self.copied.left_out.push((at.from.clone(), why));
        Ok(())
    }
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
        let mut copied = Copied { n_entries: FILES_MAX - 1, ..Copied::default() };
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
