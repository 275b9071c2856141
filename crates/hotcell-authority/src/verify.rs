//! The one verifier: a text becomes a [`ValidLease`] here, or a [`Refusal`], and nowhere else.
//!
//! The signature is checked before anything the lease says is believed. Then each question has its place, and the first one
//! that fails is the answer. Time, revocations, counts and parents are facts that the caller passes in; whether the
//! lease was still good a moment later is the caller's to watch.

use std::path::PathBuf;

use hotcell_base::LeaseId;
use hotcell_base::text::{shown, shown_path};
use jiff::Timestamp;

use crate::command::{Command, Lookup};
use crate::lease::{Audience, Lease, LeaseError};
use crate::limits::LeaseLimits;
use crate::policy::{Beyond, Policy, Row, is_variable};
use crate::scope::{Access, PathScope};
use crate::trust::{Role, Stage, TrustStore};

/// So many leases may be made of one another.
pub const PARENTS_MAX: usize = 8;

/// What the caller knows of leases besides their text.
pub trait Known {
    /// Whether it was revoked.
    fn is_revoked(&self, id: &LeaseId) -> bool;
    /// How many runs there were under it, or under any made of it.
    fn runs_used(&self, id: &LeaseId) -> u32;
    /// The text of a lease that another was made of.
    fn text(&self, id: &LeaseId) -> Option<Vec<u8>>;
}

/// Under which circumstances a lease is looked at.
#[derive(Clone, Copy)]
pub struct Circumstances<'a> {
    /// What is known of leases.
    pub known: &'a dyn Known,
    /// Whose signatures count; none if there is no such file.
    pub trust: Option<&'a TrustStore>,
    /// What can be permitted.
    pub policy: &'a Policy,
    /// Where this is.
    pub here: &'a Audience,
    /// When this is.
    pub now: Timestamp,
}

/// What somebody wants to do under a lease.
#[derive(Clone, Copy)]
pub struct Ask<'a> {
    /// The command.
    pub command: Command<'a>,
    /// Finds what a pattern's first word stands for.
    pub lookup: Lookup<'a>,
    /// Paths of the host that it would see, without links, and whether it would write to them.
    pub paths: &'a [(PathBuf, Access)],
    /// Variables that it would be given.
    pub env: &'a [Vec<u8>],
}

/// Why a lease does not hold, or does not allow what was asked.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    /// There is none.
    #[error("Lease file not found")]
    NotFound,
    /// It is none.
    #[error("Lease not readable")]
    Unreadable(#[from] LeaseError),
    /// Nobody is trusted.
    #[error("Trust keys file not found")]
    NoTrust,
    /// Nobody we know signed it.
    #[error("Unknown key ID: {0}")]
    UnknownKey(String),
    /// Whoever signed it is not trusted any more, was not then, or may not issue leases.
    #[error("Key {kid} {problem}")]
    Key {
        /// Which.
        kid: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// It was not signed, or changed since.
    #[error("Invalid signature")]
    Signature,
    /// Its time has not come.
    #[error("Lease issued in future")]
    Future,
    /// Its time is over.
    #[error("Lease expired")]
    Expired,
    /// It was taken back.
    #[error("Lease revoked")]
    Revoked,
    /// It was issued under another policy.
    #[error("Policy digest mismatch")]
    PolicyDigest,
    /// It says more than the policy permits.
    #[error("Not in policy: {0}")]
    Policy(String),
    /// It is for use elsewhere.
    #[error("Lease is for another {0}")]
    Audience(&'static str),
    /// It lacks an approval.
    #[error("Missing {0} cosigner")]
    Approval(&'static str),
    /// An approval is none.
    #[error("Invalid cosignature of {0}")]
    Cosignature(String),
    /// The command is not allowed.
    #[error("Command not in allowlist: {0}")]
    Command(String),
    /// A path is not allowed.
    #[error("Path not in allowlist: {0}")]
    Path(String),
    /// A path may be read and not written.
    #[error("Path not writable under lease: {0}")]
    ReadOnly(String),
    /// A variable is not allowed.
    #[error("Env not in allowlist: {0}")]
    Env(String),
    /// It leaves less than can be run with.
    #[error("Limit under lease: {0}")]
    Limit(String),
    /// All its runs are used up.
    #[error("Run count exhausted")]
    Exhausted,
    /// What it was made of does not hold.
    #[error("Parent lease {id}: {problem}")]
    Parent {
        /// Which.
        id: LeaseId,
        /// What is wrong with it.
        problem: String,
    },
}

impl Refusal {
    /// The name for programs.
    pub fn code(&self) -> &'static str {
        match self {
            Refusal::NotFound => "not_found",
            Refusal::Unreadable(_) => "unreadable",
            Refusal::NoTrust => "no_trust",
            Refusal::UnknownKey(_) => "unknown_key",
            Refusal::Key { .. } => "key",
            Refusal::Signature => "signature",
            Refusal::Future => "future",
            Refusal::Expired => "expired",
            Refusal::Revoked => "revoked",
            Refusal::PolicyDigest => "policy_digest",
            Refusal::Policy(_) => "policy",
            Refusal::Audience(_) => "audience",
            Refusal::Approval(_) => "approval",
            Refusal::Cosignature(_) => "cosignature",
            Refusal::Command(_) => "command",
            Refusal::Path(_) => "path",
            Refusal::ReadOnly(_) => "read_only",
            Refusal::Env(_) => "env",
            Refusal::Limit(_) => "limit",
            Refusal::Exhausted => "exhausted",
            Refusal::Parent { .. } => "parent",
        }
    }
}

/// A lease that holds. Not `Clone`, and made by [`verify`] alone: whoever has one has seen it checked.
#[derive(Debug)]
pub struct ValidLease {
    lease: Lease,
    ancestors: Vec<(LeaseId, u32)>,
    paths: PathScope,
}

impl ValidLease {
    /// Its name.
    pub fn id(&self) -> &LeaseId {
        &self.lease.lease_id
    }

    /// What it says.
    pub fn lease(&self) -> &Lease {
        &self.lease
    }

    /// The leases it was made of, nearest first, each with the most runs there may be under it. It ends with any of them.
    pub fn ancestors(&self) -> &[(LeaseId, u32)] {
        &self.ancestors
    }

    /// When it ends, which is not later than any it was made of.
    pub fn expires_at(&self) -> Timestamp {
        self.lease.expires_at
    }

    /// How much may be used.
    pub fn limits(&self) -> &LeaseLimits {
        &self.lease.limits
    }

    /// The paths that may be used.
    pub fn paths(&self) -> &PathScope {
        &self.paths
    }
}

/// Checks a lease, and that it allows what is asked, if anything is.
pub fn verify(text: &[u8], ask: Option<&Ask<'_>>, in_: &Circumstances<'_>) -> Result<ValidLease, Refusal> {
    let lease = Lease::read(text)?;
    holds(&lease, in_)?;
    let row = in_.policy.capability(&lease.capability);
    let row = row.ok_or_else(|| Refusal::Policy(format!("capability `{}`", lease.capability)))?;
    let paths = lease.terms().paths(in_.policy.repos()).map_err(|error| Refusal::Path(error.to_string()))?;
    if let Some(ask) = ask {
        allows(&lease, row, &paths, ask)?;
    }
    if in_.known.runs_used(&lease.lease_id) >= lease.limits.runs_max {
        return Err(Refusal::Exhausted);
    }
    let ancestors = ancestors(&lease, in_)?;
    Ok(ValidLease { lease, ancestors, paths })
}

/// Whether a lease holds by itself, here and now.
fn holds(lease: &Lease, in_: &Circumstances<'_>) -> Result<(), Refusal> {
    let trust = in_.trust.ok_or(Refusal::NoTrust)?;
    let kid = &lease.sig.kid;
    let key = trust.get(kid).ok_or_else(|| Refusal::UnknownKey(kid.to_string()))?;
    let text = lease.signed_text().map_err(LeaseError::from)?;
    if !key.public.verifies(&text, &lease.sig.value) {
        return Err(Refusal::Signature);
    }
    // From here on, somebody we know said what the lease says.
    let refused = |problem| Refusal::Key { kid: kid.to_string(), problem };
    if key.stage == Stage::Revoked {
        return Err(refused("was revoked"));
    }
    if key.stage == Stage::Retired {
        return Err(refused("is retired"));
    }
    if !key.role.may_issue() {
        return Err(refused("is a reviewer's, who issues no leases"));
    }
    if !key.counts(lease.issued_at) {
        return Err(refused("was not valid when the lease was issued"));
    }
    if lease.issued_at > in_.now {
        return Err(Refusal::Future);
    }
    // At its end it is over.
    if lease.expires_at <= in_.now {
        return Err(Refusal::Expired);
    }
    if in_.known.is_revoked(&lease.lease_id) {
        return Err(Refusal::Revoked);
    }
    if lease.policy_digest != in_.policy.digest() {
        return Err(Refusal::PolicyDigest);
    }
    if !lease.audience.includes(in_.here) {
        let differs = |meant: &Option<String>, found: &Option<String>| meant.is_some() && meant != found;
        let (meant, here) = (&lease.audience, in_.here);
        return Err(Refusal::Audience(match () {
            () if differs(&meant.home, &here.home) => "home",
            () if differs(&meant.host, &here.host) => "machine",
            () => "boot of this machine",
        }));
    }
    within_policy(lease, in_)?;
    approved(lease, trust, in_)
}

/// Whoever signed it: it grants nothing that the policy does not.
fn within_policy(lease: &Lease, in_: &Circumstances<'_>) -> Result<(), Refusal> {
    let row = in_.policy.capability(&lease.capability);
    let row = row.ok_or_else(|| Refusal::Policy(format!("capability `{}`", lease.capability)))?;
    row.admits(&lease.terms(), lease.lasts()).map_err(|beyond| Refusal::Policy(beyond.to_string()))
}

/// Whether all signatures on it are good, and all that are needed are there, each by somebody else.
fn approved(lease: &Lease, trust: &TrustStore, in_: &Circumstances<'_>) -> Result<(), Refusal> {
    let mut keys = vec![&lease.sig.kid];
    for cosigner in &lease.cosigners {
        let bad = || Refusal::Cosignature(shown(&cosigner.id));
        let kid = &cosigner.sig.kid;
        let key = trust.get(kid).ok_or_else(|| Refusal::UnknownKey(kid.to_string()))?;
        let text = lease.approved_text(cosigner).map_err(LeaseError::from)?;
        let is_good = key.role == cosigner.role
            && key.counts(cosigner.timestamp)
            && matches!(key.stage, Stage::Current | Stage::Previous)
            && cosigner.timestamp <= in_.now
            && cosigner.timestamp >= lease.issued_at
            && !keys.contains(&kid)
            && key.public.verifies(&text, &cosigner.sig.value);
        if !is_good {
            return Err(bad());
        }
        keys.push(kid);
    }
    let needed = in_.policy.capability(&lease.capability).map(|row| row.capability.approvals.as_slice());
    let has = |role: &Role| lease.cosigners.iter().filter(|cosigner| cosigner.role == *role).count();
    let wants = |role: &Role| needed.unwrap_or_default().iter().filter(|needed| *needed == role).count();
    match needed.unwrap_or_default().iter().find(|role| has(role) < wants(role)) {
        Some(role) => Err(Refusal::Approval(role.name())),
        None => Ok(()),
    }
}

/// Whether this may be done under it. The policy has the last word on each command: it may deny what its patterns allow.
fn allows(lease: &Lease, row: Row<'_>, paths: &PathScope, ask: &Ask<'_>) -> Result<(), Refusal> {
    let is_listed = lease.scope.commands_allowlist.iter().any(|pattern| pattern.matches(&ask.command, ask.lookup));
    if !is_listed || row.permits(&ask.command, ask.lookup).is_none() {
        let line: Vec<String> = ask.command.words.iter().map(shown).collect();
        return Err(Refusal::Command(line.join(" ")));
    }
    for (path, wanted) in ask.paths {
        let access = paths.access(path).min(row.paths().access(path));
        match access {
            Access::None => return Err(Refusal::Path(shown_path(path))),
            access if access < *wanted => return Err(Refusal::ReadOnly(shown_path(path))),
            _ => {}
        }
    }
    let is_variable =
        |name: &&Vec<u8>| std::str::from_utf8(name).is_ok_and(|name| is_variable(name, &lease.scope.env_allowlist));
    match ask.env.iter().find(|name| !is_variable(name)) {
        Some(name) => Err(Refusal::Env(shown(name))),
        None => Ok(()),
    }
}

/// Walks up to the first lease, each of which must hold and be as wide.
fn ancestors(lease: &Lease, in_: &Circumstances<'_>) -> Result<Vec<(LeaseId, u32)>, Refusal> {
    let mut found: Vec<(LeaseId, u32)> = Vec::new();
    let mut child = lease.clone();
    while let Some(parent) = child.parent.clone() {
        let id = parent.lease_id;
        let refused = |problem: String| Refusal::Parent { id: id.clone(), problem };
        if found.len() >= PARENTS_MAX {
            return Err(refused(format!("more than {PARENTS_MAX} leases were made of one another")));
        }
        let text = in_.known.text(&id).ok_or_else(|| refused(Refusal::NotFound.to_string()))?;
        let above = Lease::read(&text).map_err(|error| refused(Refusal::from(error).to_string()))?;
        if above.lease_id != id || above.digest() != parent.digest {
            return Err(refused("is another one".to_owned()));
        }
        holds(&above, in_).map_err(|refusal| refused(refusal.to_string()))?;
        if in_.known.runs_used(&id) >= above.limits.runs_max {
            return Err(refused(Refusal::Exhausted.to_string()));
        }
        if let Some(wider) = child.wider_than(&above, in_.policy.repos()) {
            return Err(refused(format!("does not grant {wider}")));
        }
        found.push((id, above.limits.runs_max));
        child = above;
    }
    Ok(found)
}

impl std::fmt::Display for Beyond {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Beyond::Phase(phase) => write!(f, "the phase `{phase}` is not enabled"),
            Beyond::Command(command) => write!(f, "the command `{command}`"),
            Beyond::Path(path) => write!(f, "the path `{path}`"),
            Beyond::Env(name) => write!(f, "the variable `{name}`"),
            Beyond::Network => write!(f, "the network"),
            Beyond::Limit(name, asked, most) => write!(f, "{name} {asked}, which is at most {most}"),
            Beyond::Time => write!(f, "so long a time"),
        }
    }
}

#[cfg(test)]
mod tests;
