//! Leases: signed, expiring permission to run named commands on named paths within limits.
//!
//! ```text
//! Terms ──Draft──sign──▶ Lease ──text──▶ LEASE-….json ──verify(now, …)──▶ ValidLease ──expire | revoke──▶ over
//!                          └──attenuate──▶ a narrower one, which ends with it
//! ```
//!
//! What is signed is the canonical JSON (RFC 8785) of the lease without `sig` and `cosigners`; a cosigner signs the
//! lease with `sig` and with what it says of itself. A lease has one text: whatever reads the same and is written otherwise
//! is refused, so that no byte of a file can be changed.
//!
//! Not here: whether a lease holds now ([`mod@crate::verify`]), and what enforces it (`hotcell-gate`, `hotcell-cell`).

use hotcell_base::{CanonicalError, LeaseId, to_canonical};
use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use crate::command::CommandPattern;
use crate::key::{KeyId, SecretKey, Signature, digest};
use crate::limits::LeaseLimits;
use crate::scope::{PathPattern, PathPatternError, PathScope, Repos};
use crate::trust::Role;

/// The longest text of a lease.
pub const LEASE_BYTES_MAX: usize = 256 << 10;
const KIND: &str = "hotcell-lease/1";

/// What may be connected to. The more there is, the greater it is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Network {
    /// Nothing.
    #[default]
    DenyAll,
}

/// What a lease is about. An empty list allows nothing.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scope {
    /// Paths that may be read.
    pub paths_allowlist: Vec<PathPattern>,
    /// Paths that may be written as well.
    pub paths_writable: Vec<PathPattern>,
    /// Paths that may not, where the two above are wider.
    pub paths_denylist: Vec<PathPattern>,
    /// Commands that may be run.
    pub commands_allowlist: Vec<CommandPattern>,
    /// Variables that may be set.
    pub env_allowlist: Vec<String>,
    /// What may be connected to.
    pub network: Network,
}

/// Where a lease may be used. What is not said may be any.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Audience {
    /// The home, by the id of its ledger.
    pub home: Option<String>,
    /// The machine.
    pub host: Option<String>,
    /// The boot of the machine.
    pub boot: Option<String>,
}

impl Audience {
    /// Whether one that is here is among those that are meant.
    pub fn includes(&self, here: &Audience) -> bool {
        let is_meant = |meant: &Option<String>, found: &Option<String>| meant.is_none() || meant == found;
        is_meant(&self.home, &here.home) && is_meant(&self.host, &here.host) && is_meant(&self.boot, &here.boot)
    }
}

/// The lease that another was made of.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parent {
    /// Which.
    pub lease_id: LeaseId,
    /// The digest of its signed text.
    pub digest: String,
}

/// Who signed.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sig {
    /// `Ed25519`, and nothing else.
    pub alg: Alg,
    /// The key.
    pub kid: KeyId,
    /// The signature.
    pub value: Signature,
}

/// How something is signed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Alg {
    /// The one there is.
    Ed25519,
}

/// Somebody who approved.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cosigner {
    /// As whom.
    pub role: Role,
    /// Who, in words.
    pub id: String,
    /// When.
    pub timestamp: Timestamp,
    /// The signature.
    pub sig: Sig,
}

/// What may be done, without saying when, by whom or for whom.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Terms {
    /// The row of the matrix it falls under.
    pub capability: String,
    /// What.
    pub scope: Scope,
    /// How much.
    pub limits: LeaseLimits,
}

impl Terms {
    /// The paths on this machine.
    pub fn paths(&self, repos: &Repos) -> Result<PathScope, PathPatternError> {
        let scope = &self.scope;
        PathScope::new(&scope.paths_allowlist, &scope.paths_writable, &scope.paths_denylist, repos)
    }
}

/// Everything of a lease that is signed.
#[derive(Clone, PartialEq, Debug)]
pub struct Draft {
    /// Its name.
    pub lease_id: LeaseId,
    /// Why it is there, if it is there for something that was proposed.
    pub intent_id: Option<String>,
    /// Who asked for it.
    pub actor: String,
    /// Where it may be used.
    pub audience: Audience,
    /// From when.
    pub issued_at: Timestamp,
    /// Until when.
    pub expires_at: Timestamp,
    /// What may be done.
    pub terms: Terms,
    /// Under which policy.
    pub policy_digest: String,
    /// What it was made of.
    pub parent: Option<Parent>,
}

/// A signed lease. Whether it holds is another question.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lease {
    r#type: String,
    /// Its name.
    pub lease_id: LeaseId,
    /// Why it is there.
    pub intent_id: Option<String>,
    /// Who asked for it.
    pub actor: String,
    /// Under which row of the matrix.
    pub capability: String,
    /// Where it may be used.
    pub audience: Audience,
    /// From when.
    pub issued_at: Timestamp,
    /// Until when.
    pub expires_at: Timestamp,
    /// What may be done.
    pub scope: Scope,
    /// How much.
    pub limits: LeaseLimits,
    /// Under which policy.
    pub policy_digest: String,
    /// What it was made of.
    pub parent: Option<Parent>,
    /// Who issued it.
    pub sig: Sig,
    /// Who approved it.
    pub cosigners: Vec<Cosigner>,
}

/// Why a text is no lease.
#[derive(Debug, thiserror::Error)]
pub enum LeaseError {
    /// It is too long to be one.
    #[error("a lease has at most {LEASE_BYTES_MAX} bytes, and this has {0}")]
    TooLong(usize),
    /// It is not the JSON of one.
    #[error("it is not a lease")]
    Json(#[from] serde_json::Error),
    /// Made for another hotcell.
    #[error("it is a `{0}`, and this hotcell knows `{KIND}`")]
    Kind(String),
    /// It says the same in other letters.
    #[error("it is not written as leases are: letters between its parts were changed")]
    Form,
    /// It has a number that cannot be signed.
    #[error(transparent)]
    Canonical(#[from] CanonicalError),
}

/// Why a lease cannot be made.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum DraftError {
    /// It would be over before it begins.
    #[error("a lease lasts for a positive time, and not {0}")]
    NoTime(String),
    /// A limit of nothing.
    #[error("the limit {0} is 0, with which nothing can run")]
    NoLimit(&'static str),
    /// Nothing could be run.
    #[error("a lease names at least one command")]
    NoCommand,
    /// A number that cannot be written exactly.
    #[error("the limit {0} is too large to be written exactly")]
    TooLarge(&'static str),
}

/// What everybody signs, in the order of no importance: the canonical form sorts it.
#[derive(Serialize)]
struct Signed<'a> {
    r#type: &'a str,
    lease_id: &'a LeaseId,
    intent_id: &'a Option<String>,
    actor: &'a str,
    capability: &'a str,
    audience: &'a Audience,
    issued_at: Timestamp,
    expires_at: Timestamp,
    scope: &'a Scope,
    limits: &'a LeaseLimits,
    policy_digest: &'a str,
    parent: &'a Option<Parent>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sig: Option<&'a Sig>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cosigner: Option<Approval<'a>>,
}

/// What a cosigner says of itself.
#[derive(Serialize)]
struct Approval<'a> {
    role: Role,
    id: &'a str,
    timestamp: Timestamp,
    kid: &'a KeyId,
}

impl Draft {
    /// Signs it. What it says is fixed from here on.
    pub fn sign(self, key: &SecretKey) -> Result<Lease, DraftError> {
        let lasts = self.expires_at.duration_since(self.issued_at);
        if lasts <= SignedDuration::ZERO {
            return Err(DraftError::NoTime(format!("{lasts:#}")));
        }
        for (name, value) in self.terms.limits.listed() {
            if value == 0 {
                return Err(DraftError::NoLimit(name));
            }
            if value >= 1 << 53 {
                return Err(DraftError::TooLarge(name));
            }
        }
        if self.terms.scope.commands_allowlist.is_empty() {
            return Err(DraftError::NoCommand);
        }
        // To the second, as it is written.
        let whole = |time: Timestamp| Timestamp::from_second(time.as_second()).expect("a time that was one before");
        let unsigned = Sig { alg: Alg::Ed25519, kid: key.id().clone(), value: key.sign(b"") };
        let mut lease = Lease {
            r#type: KIND.to_owned(),
            lease_id: self.lease_id,
            intent_id: self.intent_id,
            actor: self.actor,
            capability: self.terms.capability,
            audience: self.audience,
            issued_at: whole(self.issued_at),
            expires_at: whole(self.expires_at),
            scope: self.terms.scope,
            limits: self.terms.limits,
            policy_digest: self.policy_digest,
            parent: self.parent,
            sig: unsigned,
            cosigners: Vec::new(),
        };
        let text = lease.signed_text().expect("its numbers are small");
        lease.sig.value = key.sign(&text);
        Ok(lease)
    }
}

impl Lease {
    /// Reads a lease. Nothing of it is believed yet.
    pub fn read(text: &[u8]) -> Result<Lease, LeaseError> {
        if text.len() > LEASE_BYTES_MAX {
            return Err(LeaseError::TooLong(text.len()));
        }
        let lease: Lease = serde_json::from_slice(text)?;
        if lease.r#type != KIND {
            return Err(LeaseError::Kind(lease.r#type));
        }
        if lease.to_text() == text { Ok(lease) } else { Err(LeaseError::Form) }
    }

    /// Its one text.
    pub fn to_text(&self) -> Vec<u8> {
        let mut text = serde_json::to_vec_pretty(self).expect("plain data");
        text.push(b'\n');
        text
    }

    /// What its issuer signs.
    pub(crate) fn signed_text(&self) -> Result<Vec<u8>, CanonicalError> {
        to_canonical(&self.signed(None, None))
    }

    /// What somebody who approves it signs.
    pub(crate) fn approved_text(&self, by: &Cosigner) -> Result<Vec<u8>, CanonicalError> {
        let Cosigner { role, id, timestamp, sig } = by;
        let approval = Approval { role: *role, id, timestamp: *timestamp, kid: &sig.kid };
        to_canonical(&self.signed(Some(&self.sig), Some(approval)))
    }

    fn signed<'a>(&'a self, sig: Option<&'a Sig>, cosigner: Option<Approval<'a>>) -> Signed<'a> {
        Signed {
            r#type: &self.r#type,
            lease_id: &self.lease_id,
            intent_id: &self.intent_id,
            actor: &self.actor,
            capability: &self.capability,
            audience: &self.audience,
            issued_at: self.issued_at,
            expires_at: self.expires_at,
            scope: &self.scope,
            limits: &self.limits,
            policy_digest: &self.policy_digest,
            parent: &self.parent,
            sig,
            cosigner,
        }
    }

    /// The digest by which another lease says that it was made of this one.
    pub fn digest(&self) -> String {
        let text = to_canonical(&self.signed(Some(&self.sig), None));
        digest(&text.unwrap_or_default())
    }

    /// What it says may be done.
    pub fn terms(&self) -> Terms {
        Terms { capability: self.capability.clone(), scope: self.scope.clone(), limits: self.limits }
    }

    /// How long it lasts from beginning to end.
    pub fn lasts(&self) -> SignedDuration {
        self.expires_at.duration_since(self.issued_at)
    }

    /// The lease, approved by one more.
    pub fn cosign(&mut self, key: &SecretKey, role: Role, id: String, now: Timestamp) -> Result<(), CanonicalError> {
        let timestamp = Timestamp::from_second(now.as_second()).expect("a time that was one before");
        let sig = Sig { alg: Alg::Ed25519, kid: key.id().clone(), value: key.sign(b"") };
        let mut cosigner = Cosigner { role, id, timestamp, sig };
        cosigner.sig.value = key.sign(&self.approved_text(&cosigner)?);
        self.cosigners.push(cosigner);
        Ok(())
    }

    /// The first respect in which this is wider than the lease it is to be made of.
    pub fn wider_than(&self, parent: &Lease, repos: &Repos) -> Option<String> {
        let commands = &parent.scope.commands_allowlist;
        let is_wider = |pattern: &&CommandPattern| !commands.iter().any(|wider| pattern.is_within(wider));
        if let Some(pattern) = self.scope.commands_allowlist.iter().find(is_wider) {
            return Some(format!("the command `{pattern}`"));
        }
        let (ours, theirs) = match (self.terms().paths(repos), parent.terms().paths(repos)) {
            (Ok(ours), Ok(theirs)) => (ours, theirs),
            (Err(error), _) | (_, Err(error)) => return Some(error.to_string()),
        };
        if !ours.is_within(&theirs) {
            return Some("its paths".to_owned());
        }
        let variables = &parent.scope.env_allowlist;
        if let Some(name) = self.scope.env_allowlist.iter().find(|name| !crate::policy::is_variable(name, variables)) {
            return Some(format!("the variable `{name}`"));
        }
        if self.scope.network > parent.scope.network {
            return Some("its network".to_owned());
        }
        if let Some((name, ours, theirs)) = self.limits.wider_than(&parent.limits) {
            return Some(format!("its {name}: {ours}, and not {theirs}"));
        }
        if self.expires_at > parent.expires_at {
            return Some(format!("its end, {}, and not {}", self.expires_at, parent.expires_at));
        }
        if self.issued_at < parent.issued_at {
            return Some(format!("its beginning, {}, and not {}", self.issued_at, parent.issued_at));
        }
        if self.capability != parent.capability {
            return Some(format!("its capability `{}`, and not `{}`", self.capability, parent.capability));
        }
        (!parent.audience.includes(&self.audience)).then(|| "where it may be used".to_owned())
    }
}
