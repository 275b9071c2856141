//! Keys: Ed25519, and a name for each that is made of the key itself, so that none can be taken for another.

use std::fmt;
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use ed25519_dalek::{Signer as _, SigningKey, VerifyingKey};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

/// The name of a key: `ed25519-` and the beginning of the hash of its public half.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct KeyId(String);

const KIND: &str = "ed25519-";
const HASH_LEN: usize = 16;

/// Text that is no key, no name of one, or no signature.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum KeyError {
    /// Not a name.
    #[error("`{0}` is not the name of a key, such as ed25519-0123456789abcdef")]
    NotAnId(String),
    /// Not 32 bytes in base64, or no point of the curve.
    #[error("it is not an Ed25519 key in base64")]
    NotAKey,
    /// The name belongs to another key.
    #[error("the key is called {found} and not {given}")]
    WrongName {
        /// What it was called.
        given: KeyId,
        /// What it is called.
        found: KeyId,
    },
}

impl KeyId {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for KeyId {
    type Err = KeyError;

    fn from_str(text: &str) -> Result<KeyId, KeyError> {
        let is_hex = |letter: u8| matches!(letter, b'0'..=b'9' | b'a'..=b'f');
        match text.strip_prefix(KIND) {
            Some(hash) if hash.len() == HASH_LEN && hash.bytes().all(is_hex) => Ok(KeyId(text.to_owned())),
            _ => Err(KeyError::NotAnId(text.to_owned())),
        }
    }
}

impl TryFrom<String> for KeyId {
    type Error = KeyError;
    fn try_from(text: String) -> Result<KeyId, KeyError> {
        text.parse()
    }
}

impl From<KeyId> for String {
    fn from(id: KeyId) -> String {
        id.0
    }
}

/// A key that signatures are checked with.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PublicKey(VerifyingKey);

impl PublicKey {
    /// Its name.
    pub fn id(&self) -> KeyId {
        let hash = hex(&Sha256::digest(self.0.as_bytes()));
        KeyId(format!("{KIND}{}", &hash[..HASH_LEN]))
    }

    /// Whether this is the signature of that text, by the strict rules: one text and one key have one signature.
    pub fn verifies(&self, text: &[u8], signature: &Signature) -> bool {
        let signature = ed25519_dalek::Signature::from_bytes(&signature.0);
        self.0.verify_strict(text, &signature).is_ok()
    }
}

impl TryFrom<String> for PublicKey {
    type Error = KeyError;
    fn try_from(text: String) -> Result<PublicKey, KeyError> {
        let bytes: [u8; 32] = decoded(&text).ok_or(KeyError::NotAKey)?;
        VerifyingKey::from_bytes(&bytes).map(PublicKey).map_err(|_| KeyError::NotAKey)
    }
}

impl From<PublicKey> for String {
    fn from(key: PublicKey) -> String {
        BASE64.encode(key.0.as_bytes())
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&BASE64.encode(self.0.as_bytes()))
    }
}

/// A signature.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Signature([u8; 64]);

impl TryFrom<String> for Signature {
    type Error = KeyError;
    fn try_from(text: String) -> Result<Signature, KeyError> {
        decoded(&text).map(Signature).ok_or(KeyError::NotAKey)
    }
}

impl From<Signature> for String {
    fn from(signature: Signature) -> String {
        BASE64.encode(signature.0)
    }
}

/// Exactly so many bytes, in the only base64 there is of them.
fn decoded<const N: usize>(text: &str) -> Option<[u8; N]> {
    BASE64.decode(text).ok()?.try_into().ok()
}

/// A key that signs. It is wiped from memory when it is dropped, and shown nowhere.
pub struct SecretKey {
    key: SigningKey,
    id: KeyId,
}

impl SecretKey {
    /// The key of this seed, which is random and nobody else's.
    pub fn from_seed(seed: &[u8; 32]) -> SecretKey {
        let key = SigningKey::from_bytes(seed);
        let id = PublicKey(key.verifying_key()).id();
        SecretKey { key, id }
    }

    /// The key in a file's text.
    pub fn read(text: &str) -> Result<SecretKey, KeyError> {
        let bytes = Zeroizing::new(BASE64.decode(text.trim()).map_err(|_| KeyError::NotAKey)?);
        let seed: &[u8; 32] = bytes.as_slice().try_into().map_err(|_| KeyError::NotAKey)?;
        Ok(SecretKey::from_seed(seed))
    }

    /// The text for a file that nobody else can read.
    pub fn to_text(&self) -> Zeroizing<String> {
        let seed = Zeroizing::new(self.key.to_bytes());
        let mut text = Zeroizing::new(BASE64.encode(seed.as_slice()));
        text.push('\n');
        text
    }

    /// Its name.
    pub fn id(&self) -> &KeyId {
        &self.id
    }

    /// The half that everybody may know.
    pub fn public(&self) -> PublicKey {
        PublicKey(self.key.verifying_key())
    }

    /// Signs a text.
    pub fn sign(&self, text: &[u8]) -> Signature {
        Signature(self.key.sign(text).to_bytes())
    }
}

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretKey({})", self.id)
    }
}

/// A hash as it is written: `sha256:` and 64 letters.
pub fn digest(bytes: &[u8]) -> String {
    format!("sha256:{}", hex(&Sha256::digest(bytes)))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_reads_back_and_shows_nothing() {
        let key = SecretKey::from_seed(&[7; 32]);
        let read = SecretKey::read(&key.to_text()).expect("a key");
        assert_eq!(read.id(), key.id());
        assert_eq!(read.sign(b"x"), key.sign(b"x"));
        assert_eq!(format!("{key:?}"), format!("SecretKey({})", key.id()));
        assert_eq!(key.id().as_str().parse::<KeyId>().as_ref(), Ok(key.id()));
        assert!(SecretKey::read("AAAA").is_err());
    }

    #[test]
    fn known_answers() {
        // RFC 8032, section 7.1, tests 1 and 2.
        let seed = |text: &str| {
            let bytes: Vec<u8> =
                (0..32).map(|idx| u8::from_str_radix(&text[2 * idx..2 * idx + 2], 16).expect("hex")).collect();
            <[u8; 32]>::try_from(bytes).expect("32 bytes")
        };
        let key = SecretKey::from_seed(&seed("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60"));
        assert!(hex(&key.sign(b"").0).starts_with("e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"));
        let key = SecretKey::from_seed(&seed("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"));
        assert!(
            hex(&key.sign(&[0x72]).0).starts_with("92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da")
        );
        assert!(key.public().verifies(&[0x72], &key.sign(&[0x72])));
        assert!(!key.public().verifies(&[0x73], &key.sign(&[0x72])));
    }

    #[test]
    fn a_signature_has_one_text() {
        let key = SecretKey::from_seed(&[1; 32]);
        let text = String::from(key.sign(b"x"));
        assert!(Signature::try_from(text.clone()).is_ok());
        // The last letter before the padding has bits that no byte uses: set, they are another text of the same bytes.
        let bent = text.replace("==", "").chars().rev().collect::<String>();
        let last = bent.chars().next().expect("a letter");
        let next = char::from(u8::try_from(last).expect("ASCII") + 1);
        let bent: String = format!("{}{next}==", &text[..text.len() - 3]);
        assert!(Signature::try_from(bent).is_err());
        assert!(Signature::try_from(text.replace("==", "")).is_err());
    }
}
