//! Real files: what is written, what crashes leave, and every kind of damage.

use std::sync::Arc;

use hotcell_authority::{Role, TrustStore};
use proptest::prelude::*;

use super::*;
use crate::audit::{Audit, Auditor, Damage};

struct Bench {
    directory: tempfile::TempDir,
    place: Place,
    key: SecretKey,
    trust: TrustStore,
}

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + second).expect("a time")
}

fn news(n: i64) -> News {
    let details = json!({ "n": n, "text": "x".repeat(usize::try_from(n % 90).expect("small")) });
    News::new(Event::ExecStarted, at(n), Ids::default(), details)
}

impl Bench {
    fn new() -> Bench {
        Bench::with_key(1)
    }

    fn with_key(seed: u8) -> Bench {
        let directory = tempfile::tempdir().expect("a directory");
        let place = Place { directory: directory.path().join("ledger"), head: directory.path().join("head") };
        let key = SecretKey::from_seed(&[seed; 32]);
        let mut trust = TrustStore::default();
        trust.trust(key.public(), Role::Human, "me".into(), at(-1), None).expect("new");
        Bench { directory, place, key, trust }
    }

    fn open(&self) -> Result<Ledger, LedgerError> {
        Ledger::open(&self.place, "0123456789abcdef", &self.key, at(0))
    }

    fn filled(n: i64) -> Bench {
        let bench = Bench::new();
        let ledger = bench.open().expect("opened");
        for n in 1..=n {
            ledger.append(vec![news(n)], &bench.key, Durability::Written).expect("written");
        }
        bench
    }

    fn audit_with(&self, witnesses: &[Head], trust: &TrustStore) -> Audit {
        let head = head(&self.place).expect("readable");
        let mut auditor = Auditor::new(head.iter().chain(witnesses));
        for segment in segments(&self.place.directory).expect("readable") {
            for line in Lines::of(File::open(&segment.path).expect("there")) {
                auditor.line(&line.expect("readable"));
            }
        }
        auditor.finish(head.as_ref(), witnesses, trust)
    }

    fn audit(&self) -> Audit {
        self.audit_with(&[], &self.trust)
    }

    #[track_caller]
    fn finds(&self, damage: Damage, seq: impl Into<Option<u64>>) {
        let finding = self.audit().finding.expect("found");
        assert_eq!((finding.damage, finding.seq), (damage, seq.into()), "{}", finding.why);
    }

    fn current(&self) -> PathBuf {
        self.place.directory.join(CURRENT)
    }

    fn lines(&self) -> Vec<String> {
        fs::read_to_string(self.current()).expect("text").lines().map(str::to_owned).collect()
    }

    fn put(&self, lines: &[String]) {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        fs::write(self.current(), text).expect("written");
    }
}

#[test]
fn what_is_appended_is_there_in_order_and_holds_together() {
    let bench = Bench::filled(500);
    let audit = bench.audit();
    assert_eq!((audit.n_valid, &audit.finding), (501, &None));
    assert!(segments(&bench.place.directory).expect("readable").len() > 3, "it goes on in further files");
    let mut seen = Vec::new();
    let position = read_from(&bench.place, Position::default(), |entry, _| {
        seen.push(entry);
        true
    });
    let position = position.expect("readable");
    assert_eq!(seen.len(), 501);
    assert!(seen.iter().enumerate().all(|(idx, entry)| entry.seq == idx as u64));
    assert_eq!((seen[0].event.as_str(), seen[7].details["n"].as_i64()), ("ledger_event.CREATED", Some(7)));
    // Whoever stopped there goes on from there.
    let ledger = bench.open().expect("opened");
    ledger.append(vec![news(501), news(502)], &bench.key, Durability::Synced).expect("written");
    let mut more = Vec::new();
    read_from(&bench.place, position, |entry, _| {
        more.push(entry.seq);
        true
    })
    .expect("readable");
    assert_eq!(more, [501, 502]);
}

#[test]
fn many_threads_and_many_processes_write_one_chain_and_share_syncs() {
    let bench = Arc::new(Bench::new());
    // Each of these has its own descriptors, as another process would.
    let ledgers: Vec<Arc<Ledger>> = (0..3).map(|_| Arc::new(bench.open().expect("opened"))).collect();
    let threads: Vec<_> = (0..12_i64)
        .map(|idx| {
            let (bench, ledger) = (Arc::clone(&bench), Arc::clone(&ledgers[usize::try_from(idx % 3).expect("small")]));
            std::thread::spawn(move || {
                for n in 0..25 {
                    let head = ledger.append(vec![news(100 * idx + n); 2], &bench.key, Durability::Synced);
                    assert!(head.expect("written").seq > 0);
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    assert_eq!((bench.audit().n_valid, bench.audit().finding), (1 + 12 * 25 * 2, None));
}

#[test]
fn every_kind_of_damage_is_found_and_named() {
    let n = 20;
    let changed = |change: &dyn Fn(&mut Vec<String>)| {
        let bench = Bench::filled(n);
        assert_eq!(bench.audit().finding, None, "the control: as it is, it is whole");
        let mut lines = bench.lines();
        change(&mut lines);
        bench.put(&lines);
        bench
    };
    changed(&|lines| lines[7] = lines[7].replace("\"n\":7", "\"n\":8")).finds(Damage::Edited, 7);
    changed(&|lines| lines[20] = lines[20].replace("\"n\":20", "\"n\":21")).finds(Damage::Rewritten, 20);
    changed(&|lines| drop(lines.remove(7))).finds(Damage::Deleted, 7);
    changed(&|lines| lines.insert(7, lines[3].clone())).finds(Damage::Inserted, 3);
    changed(&|lines| lines.swap(7, 9)).finds(Damage::Reordered, 7);
    changed(&|lines| lines[7] = "{}".into()).finds(Damage::Unreadable, 7);
    changed(&|lines| lines.truncate(10)).finds(Damage::Truncated, 10);
    changed(&Vec::clear).finds(Damage::Truncated, 0);
    // A line of a forger's own, with the right number and link.
    changed(&|lines| {
        let hash = Hash::of(lines[20].as_bytes());
        let forged = Entry { seq: 21, prev: hash, ..Entry::read(lines[20].as_bytes()).expect("an entry") };
        lines.push(String::from_utf8(forged.to_line().expect("exact")).expect("text"));
    })
    .finds(Damage::Unsigned, 21);
    // The whole chain made anew with one thing changed.
    changed(&|lines| {
        let mut prev = Hash::NONE;
        for line in lines.iter_mut() {
            let mut entry = Entry::read(line.replace("\"n\":7", "\"n\":8").as_bytes()).expect("an entry");
            entry.prev = prev;
            *line = String::from_utf8(entry.to_line().expect("exact")).expect("text");
            prev = Hash::of(line.as_bytes());
        }
    })
    .finds(Damage::Rewritten, 20);
}

#[test]
fn parts_of_other_ledgers_are_found() {
    let (ours, theirs) = (Bench::filled(20), Bench::with_key(2));
    let ledger = Ledger::open(&theirs.place, "fedcba9876543210", &theirs.key, at(0)).expect("opened");
    for n in 1..=20 {
        ledger.append(vec![news(n)], &theirs.key, Durability::Written).expect("written");
    }
    let (mut lines, others) = (ours.lines(), theirs.lines());
    lines.splice(10.., others[10..].iter().cloned());
    ours.put(&lines);
    ours.finds(Damage::Spliced, 10);
    // All of it, with the head that goes with it: signed by nobody we know.
    ours.put(&others);
    fs::copy(&theirs.place.head, &ours.place.head).expect("copied");
    ours.finds(Damage::ForeignHead, None);
}

#[test]
fn an_old_copy_is_found_by_the_head_or_by_a_witness() {
    let bench = Bench::filled(10);
    let (old, old_head) = (fs::read(bench.current()).expect("there"), fs::read(&bench.place.head).expect("there"));
    bench.open().expect("opened").append(vec![news(11)], &bench.key, Durability::Synced).expect("written");
    let witness = head(&bench.place).expect("readable").expect("there");
    assert_eq!(bench.audit_with(std::slice::from_ref(&witness), &bench.trust).finding, None);
    fs::write(bench.current(), &old).expect("written");
    bench.finds(Damage::Truncated, 11);
    // With the old head as well, the ledger by itself is whole. Whoever kept a newer head knows better.
    fs::write(&bench.place.head, &old_head).expect("written");
    assert_eq!(bench.audit().finding, None);
    let finding = bench.audit_with(std::slice::from_ref(&witness), &bench.trust).finding.expect("found");
    assert_eq!((finding.damage, finding.seq), (Damage::Truncated, Some(11)));
    // And if it went on from the old copy, it went another way.
    bench.open().expect("opened").append(vec![news(12), news(13)], &bench.key, Durability::Synced).expect("written");
    let finding = bench.audit_with(&[witness], &bench.trust).finding.expect("found");
    assert_eq!(finding.damage, Damage::Rewritten);
}

#[test]
fn a_head_that_was_changed_or_signed_by_another_is_no_head() {
    let bench = Bench::filled(5);
    let text = fs::read_to_string(&bench.place.head).expect("text");
    let newest = head(&bench.place).expect("readable").expect("there");
    let mut forged = newest.clone();
    forged.at = at(999);
    fs::write(&bench.place.head, forged.to_text()).expect("written");
    bench.finds(Damage::ForgedHead, None);
    let stranger = SecretKey::from_seed(&[9; 32]);
    let signed =
        Head::sign(&stranger, &newest.ledger, (newest.seq, newest.hash), (newest.segment, newest.offset), at(5));
    fs::write(&bench.place.head, signed.to_text()).expect("written");
    bench.finds(Damage::ForeignHead, None);
    fs::remove_file(&bench.place.head).expect("removed");
    bench.finds(Damage::MissingHead, None);
    assert!(matches!(bench.open(), Err(LedgerError::NoHead)), "nothing is appended to it");
    fs::write(&bench.place.head, text).expect("written");
    assert_eq!(bench.audit().finding, None, "the control");
}

#[test]
fn nothing_is_appended_to_what_was_damaged_until_somebody_says_so() {
    let bench = Bench::filled(10);
    let lines = bench.lines();
    bench.put(&lines[..8]);
    assert!(matches!(bench.open(), Err(LedgerError::Cut { head: 11 })));
    let mut edited = lines.clone();
    edited[10] = edited[10].replace("\"n\":10", "\"n\":99");
    bench.put(&edited);
    assert!(matches!(bench.open(), Err(LedgerError::Changed { seq: 10 })));
    // One that is open notices as well.
    bench.put(&lines);
    let ledger = bench.open().expect("opened");
    bench.put(&lines[..8]);
    let refused = ledger.append(vec![news(11)], &bench.key, Durability::Written);
    assert!(matches!(refused, Err(LedgerError::Cut { .. })), "{refused:?}");
    let head = Ledger::recover(&bench.place, &bench.key, at(50)).expect("recovered");
    assert_eq!(head.seq, 8);
    assert_eq!(bench.audit().finding, None);
    let last = Entry::read(bench.lines()[8].as_bytes()).expect("an entry");
    assert_eq!((last.event.as_str(), last.details["head_said"].as_u64()), ("ledger_event.RECOVERED", Some(10)));
    assert!(ledger.append(vec![news(11)], &bench.key, Durability::Written).is_err(), "who had it open opens it anew");
    bench.open().expect("opened").append(vec![news(11)], &bench.key, Durability::Written).expect("written");
}

#[test]
fn what_holds_together_before_a_damage_is_kept_in_any_file() {
    for (idx, line) in [(0, 0), (0, 7), (1, 0), (1, 5), (2, 3)] {
        let bench = Bench::filled(400);
        let files = segments(&bench.place.directory).expect("readable");
        assert!(files.len() > 3, "VOID: {} files", files.len());
        let text = fs::read_to_string(&files[idx].path).expect("text");
        let mut lines: Vec<&str> = text.lines().collect();
        lines[line] = "damaged";
        fs::write(&files[idx].path, format!("{}\n", lines.join("\n"))).expect("written");
        let n_valid = bench.audit().n_valid;
        assert!(bench.audit().finding.is_some(), "VOID");
        let head = Ledger::recover(&bench.place, &bench.key, at(500)).expect("recovered");
        assert_eq!(
            (head.seq, bench.audit().n_valid, bench.audit().finding),
            (n_valid, n_valid + 1, None),
            "{idx} {line}"
        );
        bench.open().expect("opened").append(vec![news(1)], &bench.key, Durability::Synced).expect("written");
        assert_eq!(bench.audit().finding, None);
    }
}

#[test]
fn a_directory_in_the_place_of_another_is_noticed() {
    let bench = Bench::filled(3);
    let ledger = bench.open().expect("opened");
    let moved = bench.directory.path().join("moved");
    fs::rename(&bench.place.directory, &moved).expect("moved");
    fs::create_dir(&bench.place.directory).expect("made");
    for file in fs::read_dir(&moved).expect("there").flatten() {
        fs::copy(file.path(), bench.place.directory.join(file.file_name())).expect("copied");
    }
    assert!(matches!(ledger.append(vec![news(4)], &bench.key, Durability::Written), Err(LedgerError::Replaced)));
}

#[test]
fn what_cannot_be_written_whole_is_taken_back() {
    let bench = Bench::filled(3);
    let ledger = bench.open().expect("opened");
    let long = News::new(Event::ExecStarted, at(4), Ids::default(), json!({ "x": "x".repeat(LINE_BYTES_MAX) }));
    assert!(matches!(ledger.append(vec![news(4), long], &bench.key, Durability::Written), Err(LedgerError::TooLong)));
    assert_eq!(bench.audit().n_valid, 4);
    ledger.append(vec![news(4)], &bench.key, Durability::Written).expect("written");
    assert_eq!((bench.audit().n_valid, bench.audit().finding), (5, None));
}

#[test]
fn a_crash_between_two_steps_is_said_and_nothing_is_lost() {
    for n_unsigned in [0, 1, 3] {
        for torn in ["", "{\"seq\":", "\0\0\0\0", "{}\n", "{\"seq\":99,\"prev\":\"00\",\"ledger\":\"x\"}\n"] {
            let bench = Bench::filled(10);
            let before = fs::read(&bench.place.head).expect("there");
            let ledger = bench.open().expect("opened");
            for n in 0..n_unsigned {
                ledger.append(vec![news(11 + n)], &bench.key, Durability::Written).expect("written");
            }
            // As if the head had not been written any more, and a line only in part.
            fs::write(&bench.place.head, before).expect("written");
            OpenOptions::new()
                .append(true)
                .open(bench.current())
                .and_then(|mut file| file.write_all(torn.as_bytes()))
                .expect("written");
            let ledger = bench.open().expect("opened");
            ledger.append(vec![news(50)], &bench.key, Durability::Synced).expect("written");
            assert_eq!(bench.audit().finding, None, "{n_unsigned} {torn:?}");
            let lines = bench.lines();
            let gap = Entry::read(lines[lines.len() - 2].as_bytes()).expect("an entry");
            let was_whole = n_unsigned == 0 && torn.is_empty();
            assert_eq!(gap.event == "ledger_event.RECOVERED", !was_whole);
            if !was_whole {
                assert_eq!(gap.details["unsigned"].as_i64(), Some(n_unsigned));
                assert_eq!(gap.details["torn_bytes"].as_u64(), Some(torn.len() as u64));
            }
            let aside = fs::read_dir(&bench.place.directory).expect("there").flatten();
            let aside = aside.filter(|file| file.file_name().to_string_lossy().starts_with("torn-")).count();
            assert_eq!(aside, usize::from(!torn.is_empty()), "what was torn is kept");
        }
    }
}

#[test]
fn a_crash_while_a_ledger_begins_leaves_one_that_can_begin() {
    for n_bytes in 0.. {
        let bench = Bench::filled(0);
        let whole = fs::read(bench.current()).expect("there");
        if n_bytes > whole.len() {
            break;
        }
        fs::write(bench.current(), &whole[..n_bytes]).expect("written");
        fs::remove_file(&bench.place.head).expect("removed");
        let ledger = bench.open().unwrap_or_else(|error| panic!("after {n_bytes} bytes: {error}"));
        assert_eq!(bench.audit().finding, None, "its head is there before anything else is");
        ledger.append(vec![news(1)], &bench.key, Durability::Synced).expect("written");
        assert_eq!(bench.audit().finding, None, "after {n_bytes} bytes");
    }
}

#[test]
fn a_crash_while_a_new_file_is_begun_loses_nothing() {
    let bench = Bench::filled(1);
    let ledger = bench.open().expect("opened");
    let mut n = 1;
    while fs::metadata(bench.current()).expect("there").len() < SEGMENT_BYTES_MAX {
        n += 1;
        ledger.append(vec![news(n)], &bench.key, Durability::Written).expect("written");
    }
    let name = bench.place.directory.join(format!("{:012}-{:012}.jsonl", 0, n));
    fs::rename(bench.current(), &name).expect("moved");
    // Neither with the new file missing nor with it empty.
    for make in [false, true] {
        if make {
            fs::write(bench.current(), "").expect("written");
        }
        assert_eq!(bench.audit().finding, None);
        drop(bench.open().expect("opened"));
    }
    ledger
        .append(vec![news(n + 1)], &bench.key, Durability::Written)
        .expect("the one that had it open goes on as well");
    bench.open().expect("opened").append(vec![news(n + 2)], &bench.key, Durability::Written).expect("written");
    assert_eq!((bench.audit().n_valid, bench.audit().finding), (u64::try_from(n).expect("positive") + 3, None));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    /// Whatever is done to the bytes of a ledger: it is found.
    #[test]
    fn any_change_of_the_lines_is_found(idx in any::<prop::sample::Index>(), flip in 1_u8..=255, cut in any::<bool>()) {
        let bench = Bench::filled(12);
        let mut bytes = fs::read(bench.current()).expect("there");
        let idx = idx.index(bytes.len());
        if cut {
            bytes.truncate(idx);
        } else {
            bytes[idx] ^= flip;
        }
        fs::write(bench.current(), bytes).expect("written");
        prop_assert!(bench.audit().finding.is_some());
    }
}
