//! A queue for starting cells: many may live at once, few are being built at once, and whoever came first is built
//! first.
//!
//! ```text
//! tickets   0  1  2  3  4  5  6  7 …        with four lanes, ticket 5 waits for ticket 1 and for nobody else
//! lane      0  1  2  3  0  1  2  3 …
//! ```
//!
//! Each ticket is a file that its holder has locked until its cell stands; the lock goes with the process, so a crash
//! in the queue holds nobody up. A thousand hotcells started at once each wait for one other: nobody polls, and nobody
//! overtakes in a lane.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use hotcell_cell::RemoteEnd;

use crate::home::Home;
use crate::plain;

/// Building walls is work for a processor; twice as many as there are keep all of them busy.
const LANES_A_PROCESSOR: u64 = 2;
const LANES_MIN: u64 = 4;

/// What a ticket says when its turn has come.
const BUILDING: &[u8] = b"building";

/// Whoever takes longer to build a cell is stopped, or stuck on a dead disk: the lane does not wait for it.
const TURN_MAX: Duration = Duration::from_secs(40);

/// A turn to build a cell. Dropping it lets the next in the lane go on.
pub(crate) struct Turn {
    path: PathBuf,
    // Locked: closing it lets go.
    file: File,
}

impl Drop for Turn {
    fn drop(&mut self) {
        // Gone before it is unlocked: who comes later finds nothing to wait for. One that stays is unlocked all the same.
        let _harmless = fs::remove_file(&self.path);
    }
}

impl Turn {
    /// Draws a ticket and waits for its turn. An error of kind `Interrupted` if the caller asked for the end meanwhile.
    pub(crate) fn wait(home: &Home, remote: Option<&RemoteEnd>) -> io::Result<Turn> {
        // Those this process may use; std would read the files of its cgroup as well.
        let n_processors = rustix::thread::sched_getaffinity(None).map_or(1, |set| u64::from(set.count()));
        Turn::wait_in(home.queue(), (n_processors * LANES_A_PROCESSOR).max(LANES_MIN), remote)
    }

    fn wait_in(directory: PathBuf, n_lanes: u64, remote: Option<&RemoteEnd>) -> io::Result<Turn> {
        DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
        let (turn, ticket) = Turn::draw(&directory, n_lanes)?;
        let before = directory.join(ticket.wrapping_sub(n_lanes).to_string());
        let file = match plain::open(&before) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return turn.begin().map(|()| turn),
            opened => opened?,
        };
        if file.try_lock_shared().is_err() {
            wait_for(file, &before, remote)?;
        }
        // Left by a crash, or about to be removed by its holder.
        let _either_way = fs::remove_file(&before);
        turn.begin()?;
        Ok(turn)
    }

    /// Says that the wait is over and the building begins.
    fn begin(&self) -> io::Result<()> {
        (&self.file).write_all(BUILDING)
    }

    /// Takes the next number and locks its file, both at once. What a crash left of the last ones is cleared away: nobody
    /// may ever come to wait for it.
    fn draw(directory: &Path, n_lanes: u64) -> io::Result<(Turn, u64)> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).mode(0o600);
        let mut next = plain::open_with(options.truncate(false), &directory.join("next"))?;
        next.lock()?;
        let mut text = String::new();
        next.read_to_string(&mut text)?;
        let ticket = text.trim().parse::<u64>().unwrap_or(0);
        for before in ticket.saturating_sub(n_lanes)..ticket {
            let path = directory.join(before.to_string());
            if is_left(&path) {
                let _either_way = fs::remove_file(&path);
            }
        }
        let path = directory.join(ticket.to_string());
        // One of this number is from before a loss of the counter; nobody waits for it in earnest.
        let file = plain::open_with(options.truncate(true), &path)?;
        // Whoever clears up may be looking at it for a moment.
        file.lock()?;
        next.seek(SeekFrom::Start(0))?;
        next.write_all(format!("{:<20}", ticket + 1).as_bytes())?;
        Ok((Turn { path, file }, ticket))
    }
}

/// Tickets of hotcells that are gone.
pub(crate) fn left_tickets(home: &Home) -> Vec<PathBuf> {
    let entries = fs::read_dir(home.queue()).into_iter().flatten().flatten();
    let tickets = entries.filter(|entry| entry.file_name().to_str().is_some_and(|name| name.parse::<u64>().is_ok()));
    tickets.map(|entry| entry.path()).filter(|path| is_left(path)).collect()
}

/// Whether nobody holds a ticket.
fn is_left(path: &Path) -> bool {
    plain::open(path).is_ok_and(|file| file.try_lock_shared().is_ok())
}

/// Waits until a ticket's holder lets go or takes too long to build, or until the caller asks for the end.
fn wait_for(file: File, ticket: &Path, remote: Option<&RemoteEnd>) -> io::Result<()> {
    let (done, is_done) = io::pipe()?;
    // Left behind if the caller gives up; it ends with its predecessor's turn.
    thread::spawn(move || {
        let _gone_either_way = file.lock_shared();
        drop(is_done);
    });
    loop {
        if RemoteEnd::wait_or_end(remote, &done, TURN_MAX)? || is_overdue(ticket) {
            return Ok(());
        }
    }
}

/// Whether a ticket's holder began to build long ago. One that still waits itself holds its place.
fn is_overdue(ticket: &Path) -> bool {
    let is_building = plain::read(ticket).is_ok_and(|text| text == BUILDING);
    let begun = fs::metadata(ticket).and_then(|file| file.modified()).ok();
    is_building && begun.and_then(|begun| begun.elapsed().ok()).is_some_and(|age| age >= TURN_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn in_each_lane_the_first_to_come_is_the_first_to_go() {
        let home = tempfile::tempdir().expect("a directory");
        let directory = home.path().join("queue");
        let (n_lanes, n_tickets) = (3, 30);
        let mut held: Vec<Turn> =
            (0..n_lanes).map(|_| Turn::wait_in(directory.clone(), n_lanes, None).expect("a turn")).collect();
        let (sender, served) = mpsc::channel();
        for number in 0..n_tickets {
            let (sender, directory) = (sender.clone(), directory.clone());
            let drawn = fs::read_to_string(directory.join("next")).expect("a counter");
            thread::spawn(move || {
                let turn = Turn::wait_in(directory, n_lanes, None).expect("a turn");
                sender.send((number, turn)).expect("the test listens");
            });
            // The next one comes when this one has its ticket.
            while fs::read_to_string(home.path().join("queue/next")).expect("a counter") == drawn {
                thread::sleep(Duration::from_millis(1));
            }
        }
        assert!(served.recv_timeout(Duration::from_millis(50)).is_err(), "somebody overtook");
        let mut order = Vec::new();
        while order.len() < usize::try_from(n_tickets).expect("few") {
            // Letting one go lets exactly one come: the next of its lane.
            drop(held.remove(0));
            let (number, turn) = served.recv_timeout(Duration::from_secs(10)).expect("the next");
            order.push(number);
            held.push(turn);
        }
        assert_eq!(order, (0..n_tickets).collect::<Vec<_>>());
        drop(held);
        let left: Vec<_> = fs::read_dir(&directory).expect("there").flatten().map(|entry| entry.file_name()).collect();
        assert_eq!(left, ["next"]);
    }

    #[test]
    fn whoever_dies_in_the_queue_holds_nobody_up() {
        let home = tempfile::tempdir().expect("a directory");
        let directory = home.path().join("queue");
        let (first, _) = {
            DirBuilder::new().create(&directory).expect("made");
            Turn::draw(&directory, 1).expect("a ticket")
        };
        // As a crash leaves it: unlocked, and still there.
        let path = first.path.clone();
        drop(first);
        File::create(&path).expect("the file of the dead");
        assert!(Turn::wait_in(directory, 1, None).is_ok());
        assert!(!path.exists());
    }
}
