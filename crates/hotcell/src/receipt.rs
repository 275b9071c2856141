//! `hotcell receipt`: signed statements of what ran.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use hotcell_base::exact::hex;
use hotcell_base::text::shown;
use hotcell_gate::{Home, Runs};
use hotcell_ledger::receipt::{RECEIPT_BYTES_MAX, ReceiptError};
use hotcell_ledger::{Envelope, Statement};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::cli::authority::{ReceiptCommand, ReceiptVerifyArgs};
use crate::error::Failure;
use crate::{audit, screen};

pub(crate) fn receipt(home: &Home, command: &ReceiptCommand) -> Result<u8, Failure> {
    match command {
        ReceiptCommand::Verify(args) => verify(home, args),
        ReceiptCommand::Show(args) => {
            let path = find(home, &args.receipt)?;
            let text = read(&path)?;
            let trust = audit::trust(home, None)?;
            let statement = open(&path, &text).and_then(|envelope| {
                envelope.verify(&trust).map_err(|error| Failure::Refused {
                    message: format!("`{}`: {error}", path.display()),
                    hint: "see who is trusted: hotcell key list".to_owned(),
                })
            })?;
            screen::answer(format!("{:#}\n", serde_json::to_value(&statement).expect("plain data")))?;
            Ok(0)
        }
    }
}

/// A receipt is a file, or that of a run.
fn find(home: &Home, name: &str) -> Result<PathBuf, Failure> {
    let path = PathBuf::from(name);
    if path.is_file() {
        return Ok(path);
    }
    let runs = Runs::of(home);
    Ok(runs.directory(&runs.find(name)?.run_id).join("receipt.json"))
}

fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    let failed = |source| Failure::Io {
        message: format!("cannot read `{}`", path.display()),
        hint: Some("a run has one when it is over: hotcell ls".to_owned()),
        source,
    };
    let mut text = Vec::new();
    let most = RECEIPT_BYTES_MAX as u64 + 1;
    File::open(path).and_then(|file| file.take(most).read_to_end(&mut text)).map_err(failed)?;
    Ok(text)
}

fn open(path: &Path, text: &[u8]) -> Result<Envelope, Failure> {
    Envelope::read(text).map_err(|error| Failure::Refused {
        message: format!("`{}`: {error}", path.display()),
        hint: "give the receipt.json of a run".to_owned(),
    })
}

/// A file of a receipt, and how it compares.
fn compare(directory: &Path, name: &str, sha256: &str) -> &'static str {
    // Names are ours, and lead nowhere else.
    if name.starts_with('/') || name.split('/').any(|part| part == "..") {
        return "not a name";
    }
    let mut file = match File::open(directory.join(name)) {
        Ok(file) => file,
        Err(_) => return "missing",
    };
    let mut digest = Sha256::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => digest.update(&buffer[..n]),
            Err(_) => return "unreadable",
        }
    }
    if hex(&digest.finalize()) == sha256 { "as it was" } else { "changed" }
}

fn verify(home: &Home, args: &ReceiptVerifyArgs) -> Result<u8, Failure> {
    let path = find(home, &args.receipt)?;
    let text = read(&path)?;
    let trust = audit::trust(home, args.trust.as_deref())?;
    let checked: Result<(Envelope, Statement), ReceiptError> =
        Envelope::read(&text).and_then(|envelope| envelope.verify(&trust).map(|statement| (envelope, statement)));
    let (envelope, statement) = match checked {
        Ok(checked) => checked,
        Err(error) => {
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            screen::answer(match args.json {
                true => format!("{:#}\n", json!({ "valid": false, "reason": error.to_string(), "cause": cause })),
                false => format!("{error}\n"),
            })?;
            return Ok(1);
        }
    };
    let directory = fs::canonicalize(&path).ok().and_then(|path| path.parent().map(Path::to_owned)).unwrap_or_default();
    let files: Vec<(&str, &str)> = statement
        .subject
        .iter()
        .filter(|_| !args.alone)
        .map(|subject| {
            let sha256 = subject.digest.get("sha256").map_or("", String::as_str);
            (subject.name.as_str(), compare(&directory, &subject.name, sha256))
        })
        .collect();
    let is_valid = files.iter().all(|(_, how)| *how == "as it was");
    let kid = envelope.signatures.first().map(|signature| signature.keyid.to_string()).unwrap_or_default();
    let predicate = &statement.predicate;
    if args.json {
        let files: Vec<Value> = files.iter().map(|(name, how)| json!({ "name": name, "state": how })).collect();
        let object = json!({ "valid": is_valid, "kid": kid, "files": files, "predicate": predicate });
        screen::answer(format!("{object:#}\n"))?;
        return Ok(u8::from(!is_valid));
    }
    let word = |name: &str| shown(predicate[name].as_str().unwrap_or("none"));
    let mut answer = format!(
        "{}: {} {} under {}, signed by {kid}\n",
        if is_valid { "Valid" } else { "Not as it was" },
        word("run_id"),
        word("outcome"),
        word("lease_id"),
    );
    for (name, how) in files {
        answer.push_str(&format!("  {:<20} {how}\n", shown(name)));
    }
    screen::answer(answer)?;
    Ok(u8::from(!is_valid))
}
