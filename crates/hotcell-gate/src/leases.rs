//! Leases of a home: issuing, finding, checking, taking back.
//!
//! ```text
//! leases/LEASE-….json         as issued
//! leases/revoked/LEASE-…      it was revoked; whoever runs under it looks for this
//! ```

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use hotcell_authority::lease::{LEASE_BYTES_MAX, LeaseError};
use hotcell_authority::policy::Beyond;
use hotcell_authority::{
    Ask, Audience, Circumstances, Draft, Known, Lease, LeaseLimits, Parent, Refusal, Terms, TrustStore, ValidLease,
    verify,
};
use hotcell_base::LeaseId;
use hotcell_base::text::shown;
use hotcell_ledger::file::{Position, read_from};
use hotcell_ledger::{Event, Ids, News};
use hotcell_store::Store;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use crate::authority::{Authority, AuthorityError, ledger_place};
use crate::home::Home;
use crate::plain;
use crate::record::RecordError;

/// The leases of a home.
#[derive(Clone, Copy, Debug)]
pub struct Leases<'a> {
    authority: &'a Authority,
    home: &'a Home,
}

/// What is to be leased, and for how long.
#[derive(Clone, Debug)]
pub struct Wish {
    /// What may be done; the capability may be left empty, and is then the first that admits it.
    pub terms: Terms,
    /// For how long.
    pub lasts: SignedDuration,
    /// What for.
    pub intent_id: Option<String>,
    /// Who asks.
    pub actor: String,
    /// Where it may be used.
    pub audience: Audience,
    /// What it is made of.
    pub parent: Option<Lease>,
}

/// A lease that was issued.
#[derive(Clone, Debug)]
pub struct Issued {
    /// Itself.
    pub lease: Lease,
    /// Its text.
    pub text: Vec<u8>,
    /// What it was shortened from, because the policy has a maximum.
    pub clamped_from: Option<SignedDuration>,
}

/// Why a lease was not issued.
#[derive(Debug, thiserror::Error)]
pub enum IssueError {
    /// No capability admits it.
    #[error("no capability of the policy admits it: {0}")]
    Beyond(Beyond),
    /// There is no such capability.
    #[error("the policy has no capability `{0}`")]
    NoCapability(String),
    /// It would grant more than what it is made of.
    #[error("it would grant more than {parent}: {wider}")]
    Wider {
        /// What it is made of.
        parent: LeaseId,
        /// In which respect.
        wider: String,
    },
    /// What it is made of does not hold.
    #[error("the lease it is made of does not hold")]
    Parent(#[source] Refusal),
    /// It could not be signed, told or kept.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
}

impl<'a> Leases<'a> {
    pub(crate) fn of(authority: &'a Authority, home: &'a Home) -> Leases<'a> {
        Leases { authority, home }
    }

    /// Issues a lease: its name is taken, the ledger is told, and then it is there. Cut short between the two, there is a
    /// name without a lease.
    pub fn issue(&self, wish: Wish) -> Result<Issued, IssueError> {
        loop {
            let issued = self.draw_up(wish.clone(), Timestamp::now())?;
            let path = path(self.home, &issued.lease.lease_id);
            let failed = |source| AuthorityError::Keep(RecordError::Write { path: path.clone(), source });
            DirBuilder::new().recursive(true).mode(0o700).create(self.home.path().join("leases")).map_err(failed)?;
            let mut options = OpenOptions::new();
            let taken = plain::open_with(options.write(true).create_new(true).mode(0o600), &path);
            let mut file = match taken {
                // Another lease of this second drew the same letters: draw again.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                taken => taken.map_err(failed)?,
            };
            self.authority.tell(vec![issued.news(false)])?;
            file.write_all(&issued.text).and_then(|()| file.sync_all()).map_err(failed)?;
            return Ok(issued);
        }
    }

    /// Signs a lease within the policy. Nobody knows of it yet.
    pub(crate) fn draw_up(&self, wish: Wish, now: Timestamp) -> Result<Issued, IssueError> {
        let Wish { mut terms, mut lasts, intent_id, actor, audience, parent } = wish;
        let policy = self.authority.policy();
        let row = if terms.capability.is_empty() {
            // For others, and not for whoever asks: those are not what a run issues itself.
            let rows = policy.capabilities().filter(|row| !row.capability.self_issued);
            let mut first = None;
            let found = rows.into_iter().find(|row| {
                let shorter = lasts.min(row.lasts_most());
                let admitted = row.admits(&Terms { capability: row.name.to_owned(), ..terms.clone() }, shorter);
                admitted.map_err(|beyond| first.get_or_insert(beyond).clone()).is_ok()
            });
            found.ok_or_else(|| match first {
                Some(beyond) => IssueError::Beyond(beyond),
                None => IssueError::NoCapability("that can be leased".to_owned()),
            })?
        } else {
            let named = policy.capability(&terms.capability);
            named.ok_or_else(|| IssueError::NoCapability(terms.capability.clone()))?
        };
        terms.capability = row.name.to_owned();
        let clamped_from = (lasts > row.lasts_most()).then_some(lasts);
        lasts = lasts.min(row.lasts_most());
        row.admits(&terms, lasts).map_err(IssueError::Beyond)?;
        let issued_at = Timestamp::from_second(now.as_second()).expect("a time that was one before");
        let expires_at = issued_at.checked_add(lasts).unwrap_or(Timestamp::MAX);
        let draft = Draft {
            lease_id: LeaseId::new(&now.strftime("%Y%m%d-%H%M%S").to_string(), crate::door::random()),
            intent_id,
            actor,
            audience,
            issued_at,
            expires_at,
            terms,
            policy_digest: policy.digest().to_owned(),
            parent: parent.as_ref().map(|parent| Parent { lease_id: parent.lease_id.clone(), digest: parent.digest() }),
        };
        let lease = draft.sign(&self.authority.ring().key).map_err(AuthorityError::from)?;
        if let Some(parent) = parent
            && let Some(wider) = lease.wider_than(&parent, policy.repos())
        {
            return Err(IssueError::Wider { parent: parent.lease_id, wider });
        }
        let text = lease.to_text();
        Ok(Issued { lease, text, clamped_from })
    }

    /// The text of a lease that was named, wherever this home has it. That there is none is told.
    pub fn find(&self, name: &str, asked: &Value) -> Result<Result<Vec<u8>, Refusal>, AuthorityError> {
        let found = told_text(self.home, name);
        if let Err(refusal) = &found {
            let mut news = News::new(Event::LeaseDenied, Timestamp::now(), Ids::default(), Value::Null);
            news.details.insert("lease".to_owned(), hotcell_ledger::redact::word(&shown(name)).into());
            news.details.insert("asked".to_owned(), asked.clone());
            news.details.insert("code".to_owned(), refusal.code().into());
            news.details.insert("reason".to_owned(), refusal.to_string().into());
            self.authority.tell(vec![news])?;
        }
        Ok(found)
    }

    /// Checks a lease against everything this home knows, and tells how that went.
    pub fn check(
        &self,
        text: &[u8],
        ask: Option<&Ask<'_>>,
        asked: &Value,
    ) -> Result<Result<ValidLease, Refusal>, AuthorityError> {
        let check = |store: &mut Store| Ok(self.verify(text, ask, &self.records(Some(store)), Timestamp::now()));
        let checked = self.authority.with_store(check)?;
        self.authority.tell(vec![checked_news(text, &checked, asked)])?;
        Ok(checked)
    }

    /// Checks a lease, and tells nobody.
    pub(crate) fn verify(
        &self,
        text: &[u8],
        ask: Option<&Ask<'_>>,
        known: &dyn Known,
        now: Timestamp,
    ) -> Result<ValidLease, Refusal> {
        let trust: &TrustStore = &self.authority.ring().trust;
        let (policy, here) = (self.authority.policy(), self.authority.here());
        verify(text, ask, &Circumstances { known, trust: Some(trust), policy, here, now })
    }

    /// What is known of leases, with the store.
    pub(crate) fn records<'b>(&'b self, store: Option<&'b Store>) -> Records<'b> {
        Records { leases: *self, store }
    }

    /// Takes a lease back, with all that were made of it. Whatever runs under them is ended.
    pub fn revoke(&self, id: &LeaseId, reason: Option<&str>) -> Result<(), AuthorityError> {
        let ids =
            Ids { lease_id: Some(id.clone()), kid: Some(self.authority.ring().key.id().clone()), ..Ids::default() };
        let details = json!({ "reason": reason.map(hotcell_ledger::redact::word) });
        self.authority.tell(vec![News::new(Event::LeaseRevoked, Timestamp::now(), ids, details)])?;
        let path = revocation(self.home, id);
        let mark = || {
            path.parent().map_or(Ok(()), |place| DirBuilder::new().recursive(true).mode(0o700).create(place))?;
            plain::open_with(OpenOptions::new().write(true).create(true).truncate(false).mode(0o600), &path).map(drop)
        };
        mark().map_err(|source: io::Error| AuthorityError::Keep(RecordError::Write { path: path.clone(), source }))
    }
}

/// The text of a lease: of this home by its id, or of a file.
pub fn text(home: &Home, name: &str) -> Result<Vec<u8>, Refusal> {
    if let Ok(id) = name.parse::<LeaseId>() {
        return plain::read(&path(home, &id)).map_err(|_| Refusal::NotFound);
    }
    let path = Path::new(name);
    match fs::metadata(path) {
        Ok(file) if file.len() > LEASE_BYTES_MAX as u64 => {
            Err(LeaseError::TooLong(usize::try_from(file.len()).unwrap_or(usize::MAX)).into())
        }
        // A file of the caller's choice, which may be a link.
        Ok(file) if file.is_file() => fs::read(path).map_err(|_| Refusal::NotFound),
        _ => Err(Refusal::NotFound),
    }
}

/// The text of a lease, wherever this home has it: one that a run issued itself is in the ledger alone.
pub fn told_text(home: &Home, name: &str) -> Result<Vec<u8>, Refusal> {
    let (Err(Refusal::NotFound), Ok(id)) = (text(home, name), name.parse::<LeaseId>()) else { return text(home, name) };
    let mut found = None;
    let read = read_from(&ledger_place(home), Position::default(), |entry, _| {
        if entry.ids.lease_id.as_ref() == Some(&id) && entry.event == Event::LeaseIssued.name() {
            found = entry.details.get("lease").and_then(Value::as_str).map(|text| text.as_bytes().to_vec());
        }
        found.is_none()
    });
    // What cannot be read has not been found.
    read.ok().and(found).ok_or(Refusal::NotFound)
}

/// Where a lease of this home is.
pub fn path(home: &Home, id: &LeaseId) -> PathBuf {
    home.path().join("leases").join(format!("{id}.json"))
}

/// The mark of a lease that was revoked.
pub(crate) fn revocation(home: &Home, id: &LeaseId) -> PathBuf {
    home.path().join("leases/revoked").join(id.as_str())
}

/// What this home knows of leases besides their text. What cannot be read counts against them.
pub(crate) struct Records<'a> {
    leases: Leases<'a>,
    /// None for a lease that was made just now: nobody else can have used it.
    store: Option<&'a Store>,
}

impl Known for Records<'_> {
    fn is_revoked(&self, id: &LeaseId) -> bool {
        let Some(store) = self.store else { return false };
        !matches!(revocation(self.leases.home, id).try_exists(), Ok(false)) || store.is_revoked(id).unwrap_or(true)
    }

    fn runs_used(&self, id: &LeaseId) -> u32 {
        self.store.map_or(0, |store| store.runs_used(id).unwrap_or(u32::MAX))
    }

    fn text(&self, id: &LeaseId) -> Option<Vec<u8>> {
        plain::read(&path(self.leases.home, id)).ok()
    }
}

impl Issued {
    /// What is told of it.
    pub(crate) fn news(&self, self_issued: bool) -> News {
        let lease = &self.lease;
        let ids = Ids {
            lease_id: Some(lease.lease_id.clone()),
            intent_id: lease.intent_id.clone(),
            kid: Some(lease.sig.kid.clone()),
            ..Ids::default()
        };
        let commands: Vec<String> = lease
            .scope
            .commands_allowlist
            .iter()
            .map(|command| hotcell_ledger::redact::word(&command.to_string()))
            .collect();
        let details = json!({
            "actor": lease.actor,
            "capability": lease.capability,
            "issued_at": lease.issued_at,
            "expires_at": lease.expires_at,
            "parent": lease.parent.as_ref().map(|parent| &parent.lease_id),
            "runs_max": lease.limits.runs_max,
            "self_issued": self_issued,
            "commands": commands,
            "policy_digest": lease.policy_digest,
            "lease_digest": hotcell_authority::digest(&self.text),
            // One that a run issued itself is kept nowhere else.
            "lease": self_issued.then(|| String::from_utf8_lossy(&self.text)),
            "clamped_from_s": self.clamped_from.map(|lasts| lasts.as_secs()),
        });
        News::new(Event::LeaseIssued, lease.issued_at, ids, details)
    }
}

/// What is told of a check. Of a text that is no lease, its digest is all there is to tell.
pub(crate) fn checked_news(text: &[u8], checked: &Result<ValidLease, Refusal>, asked: &Value) -> News {
    let now = Timestamp::now();
    let read = Lease::read(text).ok();
    let ids = Ids {
        lease_id: read.as_ref().map(|lease| lease.lease_id.clone()),
        intent_id: read.as_ref().and_then(|lease| lease.intent_id.clone()),
        kid: read.as_ref().map(|lease| lease.sig.kid.clone()),
        ..Ids::default()
    };
    let mut details = json!({ "lease_digest": hotcell_authority::digest(text), "asked": asked });
    match checked {
        Ok(_) => News::new(Event::LeaseVerified, now, ids, details),
        Err(refusal) => {
            details["code"] = refusal.code().into();
            details["reason"] = hotcell_ledger::redact::word(&refusal.to_string()).into();
            News::new(Event::LeaseDenied, now, ids, details)
        }
    }
}

/// Limits of a lease within which a run of these limits fits, with no more room than whole numbers make.
pub(crate) fn limits_for(limits: &hotcell_cell::Limits, runs_max: u32) -> LeaseLimits {
    let mib = |bytes: u64| bytes.div_ceil(1 << 20).max(1);
    LeaseLimits {
        cpu_quota: limits.cpus,
        mem_quota_mb: mib(limits.memory.0),
        wallclock_timeout_s: limits.time.as_secs() + u64::from(limits.time.subsec_nanos() > 0),
        fd_limit: limits.fds,
        pids_limit: limits.pids,
        disk_quota_mb: mib(limits.disk.0),
        output_limit_mb: mib(limits.output.0),
        runs_max,
    }
}

/// The narrower of what a run asks for and what its lease grants, in each respect.
pub(crate) fn within(asked: &hotcell_cell::Limits, granted: &LeaseLimits) -> hotcell_cell::Limits {
    use hotcell_base::{Bytes, Cpus};
    let mib = |n: u64| Bytes(n.saturating_mul(1 << 20));
    hotcell_cell::Limits {
        time: asked.time.min(std::time::Duration::from_secs(granted.wallclock_timeout_s)),
        cpus: Cpus { milli: asked.cpus.milli.min(granted.cpu_quota.milli) },
        memory: asked.memory.min(mib(granted.mem_quota_mb)),
        pids: asked.pids.min(granted.pids_limit),
        fds: asked.fds.min(granted.fd_limit),
        disk: asked.disk.min(mib(granted.disk_quota_mb)),
        output: asked.output.min(mib(granted.output_limit_mb)),
        cpu_time: asked.cpu_time,
        file_size: asked.file_size,
    }
}
