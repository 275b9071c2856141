//! Paths written down exactly: text where they are text, hexadecimal where they are not.

use std::ffi::OsString;
use std::fmt::Write;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// A path that reads back byte for byte from JSON.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub struct ExactPath(pub PathBuf);

/// How it is written.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Written {
    Text(String),
    Bytes { hex: String },
}

impl From<ExactPath> for Written {
    fn from(path: ExactPath) -> Written {
        match path.0.into_os_string().into_string() {
            Ok(text) => Written::Text(text),
            Err(bytes) => Written::Bytes { hex: hex(bytes.as_bytes()) },
        }
    }
}

impl TryFrom<Written> for ExactPath {
    type Error = &'static str;

    fn try_from(written: Written) -> Result<ExactPath, &'static str> {
        match written {
            Written::Text(text) => Ok(ExactPath(text.into())),
            Written::Bytes { hex } => {
                let bytes = unhex(&hex).ok_or("a path's bytes are not written in hexadecimal")?;
                Ok(ExactPath(OsString::from_vec(bytes).into()))
            }
        }
    }
}

impl From<&Path> for ExactPath {
    fn from(path: &Path) -> ExactPath {
        ExactPath(path.to_owned())
    }
}

/// Bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        write!(text, "{byte:02x}").expect("a String takes any text");
        text
    })
}

/// Bytes from hexadecimal.
pub fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits: Vec<u32> = text.chars().map(|letter| letter.to_digit(16)).collect::<Option<_>>()?;
    if !digits.len().is_multiple_of(2) {
        return None;
    }
    digits.chunks(2).map(|pair| u8::try_from(pair[0] * 16 + pair[1]).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_path_reads_back(bytes: Vec<u8>) {
            let path = ExactPath(OsString::from_vec(bytes).into());
            let written = serde_json::to_string(&path).expect("plain data");
            prop_assert_eq!(serde_json::from_str::<ExactPath>(&written).expect("its own writing"), path);
        }
    }

    #[test]
    fn text_stays_text() {
        let written = serde_json::to_string(&ExactPath("a\nb/ü".into())).expect("plain data");
        assert_eq!(written, "\"a\\nb/ü\"");
        assert!(serde_json::from_str::<ExactPath>("{\"hex\":\"0\"}").is_err());
    }
}
