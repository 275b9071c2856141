//! Ids: what a run is called, on disk and in every message.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The name of a run: `run-YYYYMMDD-HHMMSS-xxxxxx`, UTC, so that names sort by time.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RunId(String);

/// Letters of the random part: no vowels, so no words; nothing that looks like something else.
const LETTERS: &[u8; 32] = b"0123456789bcdfghjkmnpqrstvwxyz_-";
/// Of the 32, only these are used: a name must not look like a flag or need quoting.
const N_LETTERS: u64 = 30;
const RANDOM_LEN: usize = 6;

impl RunId {
    /// Names a run after the UTC second it began (`YYYYMMDD-HHMMSS`) and some random bits.
    pub fn new(second: &str, random: u64) -> RunId {
        let mut name = format!("run-{second}-");
        let mut rest = random;
        for _ in 0..RANDOM_LEN {
            let idx = usize::try_from(rest % N_LETTERS).expect("below 30");
            name.push(char::from(LETTERS[idx]));
            rest /= N_LETTERS;
        }
        RunId(name)
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Text that is not a run id.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("`{0}` is not a run id such as run-20261115-080512-k3v9qd")]
pub struct NotARunId(pub String);

impl FromStr for RunId {
    type Err = NotARunId;

    fn from_str(text: &str) -> Result<RunId, NotARunId> {
        let digits = |part: &str, len: usize| part.len() == len && part.bytes().all(|byte| byte.is_ascii_digit());
        let is_id = match text.split('-').collect::<Vec<_>>()[..] {
            ["run", date, time, random] => {
                digits(date, 8)
                    && digits(time, 6)
                    && random.len() == RANDOM_LEN
                    && random.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
            }
            _ => false,
        };
        if is_id { Ok(RunId(text.to_owned())) } else { Err(NotARunId(text.to_owned())) }
    }
}

impl TryFrom<String> for RunId {
    type Error = NotARunId;
    fn try_from(text: String) -> Result<RunId, NotARunId> {
        text.parse()
    }
}

impl From<RunId> for String {
    fn from(id: RunId) -> String {
        id.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_reads_back_and_nothing_else_does() {
        for random in [0, 1, u64::MAX, 0x1234_5678_9abc_def0] {
            let id = RunId::new("20261115-080512", random);
            assert_eq!(id.as_str().parse::<RunId>(), Ok(id.clone()));
        }
        for wrong in ["", "run", "run-1-2-3", "../../etc", "run-20261115-080512-ABCDEF", "run-20261115-080512-abcdefg"]
        {
            assert!(wrong.parse::<RunId>().is_err(), "{wrong}");
        }
    }
}
