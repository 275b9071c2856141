//! Receipts: a signed statement of what ran, under which lease, with which result.
//!
//! An in-toto statement in a DSSE envelope, so that whoever knows those formats can read and check it without us. What is
//! signed are the very bytes that are kept: nothing has to be written again in the same way.

use std::collections::BTreeMap;

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use hotcell_authority::{KeyId, SecretKey, Signature, TrustStore};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What the payload of an envelope is.
pub const PAYLOAD_TYPE: &str = "application/vnd.in-toto+json";
const STATEMENT_TYPE: &str = "https://in-toto.io/Statement/v1";
/// What a statement of ours says.
pub const PREDICATE_TYPE: &str = "urn:hotcell:run:v1";
/// The longest receipt.
pub const RECEIPT_BYTES_MAX: usize = 4 << 20;

/// A DSSE envelope.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Envelope {
    /// What it holds.
    #[serde(rename = "payloadType")]
    pub payload_type: String,
    /// In base64.
    pub payload: String,
    /// By whom.
    pub signatures: Vec<EnvelopeSignature>,
}

/// A signature of an envelope.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EnvelopeSignature {
    /// The key.
    pub keyid: KeyId,
    /// The signature.
    pub sig: Signature,
}

/// An in-toto statement.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Statement {
    /// Which form.
    #[serde(rename = "_type")]
    pub r#type: String,
    /// What it is about.
    pub subject: Vec<Subject>,
    /// What kind of thing it says.
    #[serde(rename = "predicateType")]
    pub predicate_type: String,
    /// What it says.
    pub predicate: Value,
}

/// A file and its digest.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Subject {
    /// What it is called.
    pub name: String,
    /// By algorithm.
    pub digest: BTreeMap<String, String>,
}

/// Why a receipt is none.
#[derive(Debug, thiserror::Error)]
pub enum ReceiptError {
    /// It is too long to be one.
    #[error("a receipt has at most {RECEIPT_BYTES_MAX} bytes, and this has {0}")]
    TooLong(usize),
    /// It is not the JSON of one.
    #[error("it is not a receipt")]
    Json(#[from] serde_json::Error),
    /// It holds something else.
    #[error("it holds a `{0}`, and no statement of a run")]
    Type(String),
    /// It holds nothing that can be read.
    #[error("its payload is not base64")]
    Payload,
    /// Nobody signed it.
    #[error("it is signed by nobody")]
    Unsigned,
    /// Nobody we know signed it.
    #[error("Unknown key ID: {0}")]
    UnknownKey(KeyId),
    /// Whoever signed it is not trusted for the time it speaks of.
    #[error("the key {0} was not valid when the receipt was signed")]
    Key(KeyId),
    /// It was not signed, or changed since.
    #[error("Invalid signature")]
    Signature,
    /// It does not say when it was made.
    #[error("it does not say when the run ended")]
    NoTime,
}

impl Statement {
    /// What is to be said of these files.
    pub fn new(files: impl IntoIterator<Item = (String, String)>, predicate: Value) -> Statement {
        let subject = |(name, sha256)| Subject { name, digest: BTreeMap::from([("sha256".to_owned(), sha256)]) };
        Statement {
            r#type: STATEMENT_TYPE.to_owned(),
            subject: files.into_iter().map(subject).collect(),
            predicate_type: PREDICATE_TYPE.to_owned(),
            predicate,
        }
    }

    /// Signs it.
    pub fn sign(&self, key: &SecretKey) -> Envelope {
        let payload = serde_json::to_vec(self).expect("plain data");
        let sig = key.sign(&pre_authentication(PAYLOAD_TYPE, &payload));
        Envelope {
            payload_type: PAYLOAD_TYPE.to_owned(),
            payload: BASE64.encode(payload),
            signatures: vec![EnvelopeSignature { keyid: key.id().clone(), sig }],
        }
    }
}

impl Envelope {
    /// Reads an envelope. Nothing of it is believed yet.
    pub fn read(text: &[u8]) -> Result<Envelope, ReceiptError> {
        if text.len() > RECEIPT_BYTES_MAX {
            return Err(ReceiptError::TooLong(text.len()));
        }
        Ok(serde_json::from_slice(text)?)
    }

    /// Its text.
    pub fn to_text(&self) -> Vec<u8> {
        let mut text = serde_json::to_vec_pretty(self).expect("plain data");
        text.push(b'\n');
        text
    }

    /// What it says, if somebody we know signed it.
    pub fn verify(&self, trust: &TrustStore) -> Result<Statement, ReceiptError> {
        if self.payload_type != PAYLOAD_TYPE {
            return Err(ReceiptError::Type(self.payload_type.clone()));
        }
        let payload = BASE64.decode(&self.payload).map_err(|_| ReceiptError::Payload)?;
        let text = pre_authentication(&self.payload_type, &payload);
        if self.signatures.is_empty() {
            return Err(ReceiptError::Unsigned);
        }
        for EnvelopeSignature { keyid, sig } in &self.signatures {
            let key = trust.get(keyid).ok_or_else(|| ReceiptError::UnknownKey(keyid.clone()))?;
            if !key.public.verifies(&text, sig) {
                return Err(ReceiptError::Signature);
            }
        }
        let statement: Statement = serde_json::from_slice(&payload)?;
        if statement.r#type != STATEMENT_TYPE || statement.predicate_type != PREDICATE_TYPE {
            return Err(ReceiptError::Type(statement.predicate_type));
        }
        let ended_at = statement.predicate["ended_at"].as_str().and_then(|text| text.parse::<Timestamp>().ok());
        let ended_at = ended_at.ok_or(ReceiptError::NoTime)?;
        for EnvelopeSignature { keyid, .. } in &self.signatures {
            let counts = trust.get(keyid).is_some_and(|key| key.role.may_issue() && key.counts(ended_at));
            if !counts {
                return Err(ReceiptError::Key(keyid.clone()));
            }
        }
        Ok(statement)
    }
}

/// What DSSE signs: the type and the payload, each with its length, so that neither can be taken for a part of the other.
fn pre_authentication(payload_type: &str, payload: &[u8]) -> Vec<u8> {
    let mut text = format!("DSSEv1 {} {payload_type} {} ", payload_type.len(), payload.len()).into_bytes();
    text.extend_from_slice(payload);
    text
}
