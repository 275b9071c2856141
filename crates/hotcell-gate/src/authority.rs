//! What a home may permit, and who says so: its keys, its policy, its ledger, its store.
//!
//! Everything that is decided here is told to the ledger first; what cannot be told does not happen.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use hotcell_authority::lease::DraftError;
use hotcell_authority::policy::POLICY_BYTES_MAX;
use hotcell_authority::{Audience, DEFAULT_POLICY, Policy, PolicyError, digest};
use hotcell_base::text::shown_path;
use hotcell_ledger::file::{Durability, Place};
use hotcell_ledger::{Event, Head, Ids, Ledger, LedgerError, News};
use hotcell_store::{Store, StoreError};
use jiff::Timestamp;
use serde_json::json;

use crate::home::Home;
use crate::keys::{KeyRing, Keys, KeysError};
use crate::leases::Leases;
use crate::live::boot_id;
use crate::plain;
use crate::record::RecordError;

/// Why nothing can be permitted here.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// There is no key that can be used.
    #[error("there is no key to sign with")]
    Keys(#[from] KeysError),
    /// The policy cannot be read.
    #[error("cannot read the policy `{}`", shown_path(path))]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The policy is none.
    #[error("the policy `{}` cannot be used", shown_path(path))]
    Policy {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<PolicyError>,
    },
    /// The ledger cannot be written, so nothing happens.
    #[error("the ledger cannot be written")]
    Ledger(#[from] LedgerError),
    /// The store cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A lease cannot be made.
    #[error("the lease cannot be made")]
    Draft(#[from] DraftError),
    /// A lease cannot be kept.
    #[error("the lease cannot be kept")]
    Keep(#[from] RecordError),
}

/// The authority of a home, opened.
#[derive(Debug)]
pub struct Authority {
    home: Home,
    ring: KeyRing,
    policy: Policy,
    ledger: Ledger,
    here: Audience,
    /// Opened when it is first asked for: most runs need nothing of it.
    store: Mutex<Option<Store>>,
}

impl Authority {
    /// Opens it. On first use a key is made, and a ledger begins.
    pub fn open(home: &Home) -> Result<Authority, AuthorityError> {
        let now = Timestamp::now();
        let ring = Keys::of(home).ring(now)?;
        let policy = policy(home)?.0;
        let id = format!("{:016x}", crate::door::random());
        let ledger = Ledger::open(&ledger_place(home), &id, &ring.key, now)?;
        let here = Audience { home: Some(ledger.id().to_owned()), host: host_id(), boot: Some(boot_id()) };
        let store = Mutex::new(None);
        let authority = Authority { home: home.clone(), ring, policy, ledger, here, store };
        if authority.ring.is_new {
            let ids = Ids { kid: Some(authority.ring.key.id().clone()), ..Ids::default() };
            let details = json!({ "role": "human", "public": authority.ring.key.public() });
            authority.tell(vec![News::new(Event::KeyCreated, now, ids, details)])?;
        }
        Ok(authority)
    }

    /// The key that signs, and all that are trusted.
    pub fn ring(&self) -> &KeyRing {
        &self.ring
    }

    /// What can be permitted.
    pub fn policy(&self) -> &Policy {
        &self.policy
    }

    /// Where this is.
    pub fn here(&self) -> &Audience {
        &self.here
    }

    /// The leases of this home.
    pub fn leases(&self) -> Leases<'_> {
        Leases::of(self, &self.home)
    }

    /// Tells what happened. When this returns, a power cut does not take it back.
    pub fn tell(&self, news: Vec<News>) -> Result<Head, AuthorityError> {
        Ok(self.ledger.append(news, &self.ring.key, Durability::Synced)?)
    }

    /// Asks the store, which is up to date then.
    pub fn with_store<T>(&self, ask: impl FnOnce(&mut Store) -> Result<T, StoreError>) -> Result<T, AuthorityError> {
        let mut held = self.store.lock().unwrap_or_else(PoisonError::into_inner);
        let store = match held.as_mut() {
            Some(store) => {
                store.catch_up()?;
                store
            }
            None => held.insert(store(&self.home)?),
        };
        Ok(ask(store)?)
    }
}

/// Where the ledger of a home is, and its head, which is kept apart.
pub fn ledger_place(home: &Home) -> Place {
    Place { directory: home.path().join("ledger"), head: home.path().join("head") }
}

/// The store of a home, up to date.
pub fn store(home: &Home) -> Result<Store, StoreError> {
    let mut store = Store::open(&home.path().join("hotcell.db"), ledger_place(home))?;
    store.catch_up()?;
    Ok(store)
}

/// The policy of a home and its text; where there is no file, the one that is built in, and no path.
pub fn policy(home: &Home) -> Result<(Policy, String, Option<PathBuf>), AuthorityError> {
    let path = home.path().join("policy.toml");
    match read_policy(&path) {
        Ok(None) => {
            let policy = Policy::read(DEFAULT_POLICY.as_bytes()).expect("a test reads it");
            Ok((policy, DEFAULT_POLICY.to_owned(), None))
        }
        Ok(Some(text)) => match Policy::read(&text) {
            Ok(policy) => Ok((policy, String::from_utf8_lossy(&text).into_owned(), Some(path))),
            Err(source) => Err(AuthorityError::Policy { path, source: Box::new(source) }),
        },
        Err(source) => Err(AuthorityError::Unreadable { path, source }),
    }
}

fn read_policy(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Ok(file) if file.len() > POLICY_BYTES_MAX => return Err(io::ErrorKind::FileTooLarge.into()),
        _ => {}
    }
    plain::read(path).map(Some)
}

/// A name for this machine that does not give its own away.
fn host_id() -> Option<String> {
    let machine = fs::read_to_string("/etc/machine-id").ok().filter(|text| !text.trim().is_empty())?;
    Some(digest(format!("hotcell {}", machine.trim()).as_bytes())[7..23].to_owned())
}
