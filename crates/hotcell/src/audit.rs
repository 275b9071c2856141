//! `hotcell audit`: what was allowed, refused and done, and whether anything of it was changed.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

use hotcell_authority::TrustStore;
use hotcell_base::text::shown;
use hotcell_gate::authority::{ledger_place, store};
use hotcell_gate::{Authority, AuthorityError, Home, Keys};
use hotcell_ledger::audit::Auditor;
use hotcell_ledger::file::{self, Lines, Place, Position};
use hotcell_ledger::{Audit, Entry, Head, Ledger};
use jiff::Timestamp;
use serde_json::json;

use crate::cli::authority::{
    AuditCommand, AuditExportArgs, AuditRecoverArgs, AuditShowArgs, AuditTailArgs, AuditVerifyArgs, AuditWitnessArgs,
};
use crate::error::Failure;
use crate::{screen, witness};

/// How often a followed ledger is looked at.
const FOLLOW_EVERY: Duration = Duration::from_millis(200);

pub(crate) fn audit(host: &hotcell_cell::Host, home: &Home, command: &AuditCommand) -> Result<u8, Failure> {
    match command {
        AuditCommand::Tail(args) => tail(home, args),
        AuditCommand::Show(args) => show(home, args),
        AuditCommand::Verify(args) => verify(host, home, args),
        AuditCommand::Export(args) => export(home, args),
        AuditCommand::Witness(args) => witness_to(host, home, args),
        AuditCommand::Recover(args) => recover(home, args),
    }
}

fn ledger_failed(error: hotcell_ledger::LedgerError) -> Failure {
    AuthorityError::from(error).into()
}

/// One line a person reads.
fn line(entry: &Entry) -> String {
    let ids = &entry.ids;
    let about = ids.run_id.as_ref().map(|id| id.to_string());
    let about = about.or_else(|| ids.lease_id.as_ref().map(|id| id.to_string()));
    let about = about.or_else(|| ids.kid.as_ref().map(|id| id.to_string())).unwrap_or_default();
    let text = |name: &str| entry.details.get(name).and_then(|value| value.as_str()).map(str::to_owned);
    let words =
        entry.details.get("command").or_else(|| entry.details.get("commands")).and_then(|value| value.as_array());
    let words = words.map(|words| words.iter().filter_map(|word| word.as_str()).collect::<Vec<_>>().join(" "));
    let more = text("reason").or_else(|| text("outcome")).or(words).unwrap_or_default();
    let more: String = if more.chars().count() > 60 { more.chars().take(59).chain(['…']).collect() } else { more };
    // To the second; the entry has the rest.
    let at = entry.at.strftime("%Y-%m-%d %H:%M:%S");
    format!("{:>6}  {at}  {:<24} {:<28} {}", entry.seq, shown(&entry.event), shown(about), shown(more))
}

fn tail(home: &Home, args: &AuditTailArgs) -> Result<u8, Failure> {
    let place = ledger_place(home);
    let is_wanted = |entry: &Entry| {
        let ids = &entry.ids;
        let names = [
            ids.run_id.as_ref().map(|id| id.as_str()),
            ids.lease_id.as_ref().map(|id| id.as_str()),
            ids.kid.as_ref().map(|id| id.as_str()),
            ids.attempt_id.as_deref(),
            ids.intent_id.as_deref(),
        ];
        args.about.as_deref().is_none_or(|about| names.contains(&Some(about)))
            && args.event.as_deref().is_none_or(|event| entry.event.starts_with(event))
    };
    let print = |entry: &Entry| {
        let text = if args.json { serde_json::to_vec(entry).expect("plain data") } else { line(entry).into_bytes() };
        screen::answer([text, b"\n".to_vec()].concat())
    };
    let mut last: VecDeque<Entry> = VecDeque::new();
    let mut position = file::read_from(&place, Position::default(), |entry, _| {
        if is_wanted(&entry) {
            last.push_back(entry);
            if last.len() > args.n {
                last.pop_front();
            }
        }
        true
    })
    .map_err(ledger_failed)?;
    last.iter().try_for_each(print)?;
    if !args.follow {
        return Ok(0);
    }
    loop {
        std::thread::sleep(FOLLOW_EVERY);
        let mut more = Vec::new();
        position = file::read_from(&place, position, |entry, _| {
            more.push(entry);
            true
        })
        .map_err(ledger_failed)?;
        more.iter().filter(|entry| is_wanted(entry)).try_for_each(print)?;
    }
}

fn show(home: &Home, args: &AuditShowArgs) -> Result<u8, Failure> {
    let mut found = None;
    file::read_from(&ledger_place(home), Position::default(), |entry, hash| {
        let is_it = entry.seq == args.seq;
        if is_it {
            found = Some((entry, hash));
        }
        !is_it
    })
    .map_err(ledger_failed)?;
    let Some((entry, hash)) = found else {
        return Err(Failure::Refused {
            message: format!("there is no entry {}", args.seq),
            hint: "see the last ones: hotcell audit tail".to_owned(),
        });
    };
    let mut object = serde_json::to_value(&entry).expect("plain data");
    object["hash"] = hash.to_string().into();
    screen::answer(format!("{object:#}\n"))?;
    Ok(0)
}

fn export(home: &Home, args: &AuditExportArgs) -> Result<u8, Failure> {
    for segment in file::segments(&ledger_place(home).directory).map_err(ledger_failed)? {
        let opened = File::open(&segment.path).map_err(|source| unreadable(&segment.path, source))?;
        for line in Lines::of(opened) {
            let line = line.map_err(|source| unreadable(&segment.path, source))?;
            let is_wanted =
                args.from == 0 || Entry::read(line.trim_ascii_end()).is_ok_and(|entry| entry.seq >= args.from);
            if is_wanted {
                screen::answer(line)?;
            }
        }
    }
    Ok(0)
}

fn unreadable(path: &Path, source: std::io::Error) -> Failure {
    let message = format!("cannot read `{}`", path.display());
    Failure::Io { message, hint: Some("look at the rights there: ls -l on it".to_owned()), source }
}

/// Reads a whole ledger and compares it with its head and with what was kept elsewhere.
pub(crate) fn check(place: &Place, witnesses: &[Head], trust: &TrustStore) -> Result<Audit, Failure> {
    let head = file::head(place).map_err(ledger_failed)?;
    let mut auditor = Auditor::new(head.iter().chain(witnesses));
    for segment in file::segments(&place.directory).map_err(ledger_failed)? {
        let opened = File::open(&segment.path).map_err(|source| unreadable(&segment.path, source))?;
        for line in Lines::of(opened) {
            auditor.line(&line.map_err(|source| unreadable(&segment.path, source))?);
        }
    }
    Ok(auditor.finish(head.as_ref(), witnesses, trust))
}

fn verify(host: &hotcell_cell::Host, home: &Home, args: &AuditVerifyArgs) -> Result<u8, Failure> {
    let place = match (&args.ledger, &args.head) {
        (Some(directory), Some(head)) => Place { directory: directory.clone(), head: head.clone() },
        _ => ledger_place(home),
    };
    let trust = trust(home, args.trust.as_deref())?;
    let mut witnesses = Vec::new();
    for path in &args.witness {
        let text = fs::read(path).map_err(|source| unreadable(path, source))?;
        witnesses.push(witness::read(&text, &path.display().to_string())?);
    }
    if let Some(name) = &args.git {
        let text = witness::from_git(host, home, name)?;
        witnesses.push(witness::read(&text, name)?);
    }
    let mut audit = check(&place, &witnesses, &trust)?;
    // How far the store had read is one more witness, if it is there.
    if args.ledger.is_none() && audit.finding.is_none() {
        audit.finding = behind_store(home, &place)?;
    }
    if args.json {
        let mut object = serde_json::to_value(&audit).expect("plain data");
        object["valid"] = audit.finding.is_none().into();
        object["witnesses"] = witnesses.len().into();
        screen::answer(format!("{object:#}\n"))?;
        return Ok(u8::from(audit.finding.is_some()));
    }
    match &audit.finding {
        None => {
            let hash = audit.hash.map(|hash| hash.to_string()).unwrap_or_default();
            let against = match witnesses.len() {
                0 => String::new(),
                n => format!(" and {}", screen::count(n, "witness").replace("witnesss", "witnesses")),
            };
            screen::answer(format!("whole: {} entries, as the signed head{against} says\n{hash}\n", audit.n_valid))?;
            Ok(0)
        }
        Some(finding) => {
            let place = finding.seq.map(|seq| format!(" at entry {seq}")).unwrap_or_default();
            screen::answer(format!("{}{place}: {}\n", finding.damage.name(), finding.why))?;
            screen::note(
                "hint: see what is there: hotcell audit export; accept what is left: hotcell audit recover --yes",
            );
            Ok(1)
        }
    }
}

/// Whether the store has read more, or something else, than the ledger has now: then an old copy was put back.
fn behind_store(home: &Home, place: &Place) -> Result<Option<hotcell_ledger::Finding>, Failure> {
    if !home.path().join("hotcell.db").exists() {
        return Ok(None);
    }
    let store = hotcell_store::Store::open(&home.path().join("hotcell.db"), place.clone());
    let Some((seq, hash)) = store.and_then(|store| store.has_read()).map_err(AuthorityError::from)? else {
        return Ok(None);
    };
    let mut found = None;
    file::read_from(place, Position::default(), |entry, found_hash| {
        if entry.seq == seq {
            found = Some(found_hash.to_string());
        }
        entry.seq < seq
    })
    .map_err(ledger_failed)?;
    let finding = |damage, why| hotcell_ledger::Finding { damage, seq: Some(seq), why };
    use hotcell_ledger::Damage;
    Ok(match found {
        None => {
            Some(finding(Damage::Truncated, format!("the store has read {} entries, and there are fewer", seq + 1)))
        }
        Some(found) if found != hash => {
            Some(finding(Damage::Rewritten, format!("entry {seq} is not the one that the store has read")))
        }
        Some(_) => None,
    })
}

/// Whose signatures count.
pub(crate) fn trust(home: &Home, elsewhere: Option<&Path>) -> Result<TrustStore, Failure> {
    match elsewhere {
        Some(path) => {
            let text = fs::read(path).map_err(|source| unreadable(path, source))?;
            TrustStore::read(&text).map_err(|error| Failure::Refused {
                message: format!("`{}`: {error}", path.display()),
                hint: "give the trust.json of a home, or a copy of one".to_owned(),
            })
        }
        None => Ok(Keys::of(home).trust().map_err(AuthorityError::from)?.unwrap_or_default()),
    }
}

fn witness_to(host: &hotcell_cell::Host, home: &Home, args: &AuditWitnessArgs) -> Result<u8, Failure> {
    // What a crash left is signed first.
    Authority::open(home)?;
    let head = file::head(&ledger_place(home)).map_err(ledger_failed)?;
    let Some(head) = head else {
        return Err(Failure::Refused {
            message: "there is no ledger yet".to_owned(),
            hint: "run something first: hotcell run -- true".to_owned(),
        });
    };
    let to = match (&args.file, &args.git) {
        (Some(path), _) => {
            let failed = |source| Failure::Io {
                message: format!("cannot write `{}`", path.display()),
                hint: Some("choose another place: hotcell audit witness FILE".to_owned()),
                source,
            };
            fs::write(path, head.to_text()).map_err(failed)?;
            path.display().to_string()
        }
        (None, Some(name)) => {
            witness::to_git(host, home, name, &head)?;
            name.clone()
        }
        (None, None) => unreachable!("the parser asks for one"),
    };
    screen::answer(format!("{} entries, {}\n", head.seq + 1, head.hash))?;
    screen::note(&format!("witness  {to}, signed by {}", head.kid));
    Ok(0)
}

fn recover(home: &Home, args: &AuditRecoverArgs) -> Result<u8, Failure> {
    let place = ledger_place(home);
    let audit = check(&place, &[], &trust(home, None)?)?;
    let Some(finding) = &audit.finding else {
        screen::answer("whole: there is nothing to recover\n")?;
        return Ok(0);
    };
    if !args.yes {
        screen::answer(format!("{}: {}\n", finding.damage.name(), finding.why))?;
        screen::note(&format!(
            "{} entries hold together and would be kept; what is missing stays missing: hotcell audit recover --yes",
            audit.n_valid
        ));
        return Ok(1);
    }
    let ring = Keys::of(home).ring(Timestamp::now()).map_err(AuthorityError::from)?;
    let head = Ledger::recover(&place, &ring.key, Timestamp::now()).map_err(ledger_failed)?;
    // What the store has read may never have been.
    store(home).map_err(AuthorityError::from)?;
    let object = json!({ "kept": head.seq, "hash": head.hash });
    screen::answer(format!("{} entries are kept; entry {} says what was lost\n", object["kept"], head.seq))?;
    Ok(0)
}
