//! Heads: how far a ledger had come, signed. Whoever has one can tell whether what it says was taken back.

use hotcell_authority::{KeyId, SecretKey, Signature, TrustStore};
use hotcell_base::{CanonicalError, to_canonical};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::chain::Hash;

const KIND: &str = "hotcell-head/1";

/// A signed head.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Head {
    r#type: String,
    /// Of which ledger.
    pub ledger: String,
    /// The last line.
    pub seq: u64,
    /// Its hash.
    pub hash: Hash,
    /// The first line of the file that it is in.
    pub segment: u64,
    /// Where in that file it ends.
    pub offset: u64,
    /// When.
    pub at: Timestamp,
    /// By whom.
    pub kid: KeyId,
    /// The signature of everything else.
    pub sig: Signature,
}

/// What is signed.
#[derive(Serialize)]
struct Signed<'a> {
    r#type: &'a str,
    ledger: &'a str,
    seq: u64,
    hash: Hash,
    segment: u64,
    offset: u64,
    at: Timestamp,
    kid: &'a KeyId,
}

/// What is wrong with a head by itself.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum HeadFault {
    /// Nobody we know signed it.
    #[error("the head is signed by {0}, which is not trusted")]
    Key(KeyId),
    /// It was changed.
    #[error("the head's signature is not that of {0}")]
    Signature(KeyId),
}

impl Head {
    /// Signs how far a ledger has come.
    pub fn sign(
        key: &SecretKey,
        ledger: &str,
        (seq, hash): (u64, Hash),
        (segment, offset): (u64, u64),
        at: Timestamp,
    ) -> Head {
        let (kid, ledger) = (key.id().clone(), ledger.to_owned());
        let mut head =
            Head { r#type: KIND.to_owned(), ledger, seq, hash, segment, offset, at, kid, sig: key.sign(b"") };
        head.sig = key.sign(&head.signed_text().expect("its numbers are small"));
        head
    }

    fn signed_text(&self) -> Result<Vec<u8>, CanonicalError> {
        let Head { r#type, ledger, seq, hash, segment, offset, at, kid, .. } = self;
        to_canonical(&Signed {
            r#type,
            ledger,
            seq: *seq,
            hash: *hash,
            segment: *segment,
            offset: *offset,
            at: *at,
            kid,
        })
    }

    /// Whether somebody we know signed it. A key that has left its office since is as good: it had it then.
    pub fn check(&self, trust: &TrustStore) -> Result<(), HeadFault> {
        let trusted = trust.get(&self.kid).filter(|trusted| trusted.role.may_issue() && trusted.counts(self.at));
        let trusted = trusted.ok_or_else(|| HeadFault::Key(self.kid.clone()))?;
        let is_signed =
            self.r#type == KIND && self.signed_text().is_ok_and(|text| trusted.public.verifies(&text, &self.sig));
        if is_signed { Ok(()) } else { Err(HeadFault::Signature(self.kid.clone())) }
    }

    /// Its text: one line.
    pub fn to_text(&self) -> Vec<u8> {
        let mut text = serde_json::to_vec(self).expect("plain data");
        text.push(b'\n');
        text
    }

    /// Reads a head.
    pub fn read(text: &[u8]) -> Result<Head, serde_json::Error> {
        serde_json::from_slice(text)
    }
}

/// The two places a head is written to in turn, so that one of them is always whole.
pub(crate) const SLOT_BYTES: usize = 1024;

/// The newer of the heads in these two places.
pub(crate) fn newest(slots: &[u8]) -> Option<Head> {
    let heads = slots.chunks(SLOT_BYTES).filter_map(|slot| Head::read(slot.trim_ascii_end()).ok());
    heads.max_by_key(|head| head.seq)
}

/// A head as it is written to its place: the text, and spaces to its end.
pub(crate) fn slot(head: &Head) -> Vec<u8> {
    let mut text = head.to_text();
    text.resize(SLOT_BYTES, b' ');
    text[SLOT_BYTES - 1] = b'\n';
    text
}
