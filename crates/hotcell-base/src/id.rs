//! Ids: what a run, a lease or a rollback pack is called, on disk and in every message.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Letters of the random part: no vowels, so no words; nothing that looks like something else.
const LETTERS: &[u8; 30] = b"0123456789bcdfghjkmnpqrstvwxyz";
const RANDOM_LEN: usize = 6;

/// Text that is not an id of the kind that was asked for.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("`{text}` is not an id such as {kind}-20261115-080512-k3v9qd")]
pub struct NotAnId {
    /// What was given.
    pub text: String,
    /// What its first word should be.
    pub kind: &'static str,
}

fn name(kind: &str, second: &str, random: u64) -> String {
    let mut name = format!("{kind}-{second}-");
    let (mut rest, n_letters) = (random, LETTERS.len() as u64);
    for _ in 0..RANDOM_LEN {
        let idx = usize::try_from(rest % n_letters).expect("below 30");
        name.push(char::from(LETTERS[idx]));
        rest /= n_letters;
    }
    name
}

fn is_name(kind: &str, text: &str) -> bool {
    let digits = |part: &str, len: usize| part.len() == len && part.bytes().all(|byte| byte.is_ascii_digit());
    match text.split('-').collect::<Vec<_>>()[..] {
        [first, date, time, random] => {
            first == kind
                && digits(date, 8)
                && digits(time, 6)
                && random.len() == RANDOM_LEN
                && random.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
        }
        _ => false,
    }
}

/// An id is `<kind>-YYYYMMDD-HHMMSS-xxxxxx`, UTC, so that names sort by time.
macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// Names a thing after the UTC second it began (`YYYYMMDD-HHMMSS`) and some random bits.
            pub fn new(second: &str, random: u64) -> $name {
                $name(name($kind, second, random))
            }

            /// The id as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl FromStr for $name {
            type Err = NotAnId;

            fn from_str(text: &str) -> Result<$name, NotAnId> {
                let not = || NotAnId { text: text.to_owned(), kind: $kind };
                if is_name($kind, text) { Ok($name(text.to_owned())) } else { Err(not()) }
            }
        }

        impl TryFrom<String> for $name {
            type Error = NotAnId;
            fn try_from(text: String) -> Result<$name, NotAnId> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> String {
                id.0
            }
        }
    };
}

id!(
    /// The name of a run.
    RunId,
    "run"
);
id!(
    /// The name of a rollback pack: one set of changes that was applied.
    PackId,
    "apply"
);

id!(
    /// The name of a lease.
    LeaseId,
    "LEASE"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_reads_back_and_nothing_else_does() {
        for random in [0, 1, u64::MAX, 0x1234_5678_9abc_def0] {
            let id = RunId::new("20261115-080512", random);
            assert_eq!(id.as_str().parse::<RunId>(), Ok(id.clone()));
        }
        assert!("run-20261115-080512-k3v9qd".parse::<PackId>().is_err());
        for wrong in ["", "run", "run-1-2-3", "../../etc", "run-20261115-080512-ABCDEF", "run-20261115-080512-abcdefg"]
        {
            assert!(wrong.parse::<RunId>().is_err(), "{wrong}");
        }
    }
}
