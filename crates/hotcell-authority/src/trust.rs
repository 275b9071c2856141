//! The trust store: whose signatures count, and for what.
//!
//! ```text
//! trust ─▶ current ──rotate──▶ previous ──rotate──▶ retired
//!             └────────────── revoke ──────────────▶ revoked
//! ```
//!
//! A current and a previous key may have issued what is used now. A retired one is kept so that what it signed in its
//! time can still be checked. Nothing that a revoked one signed counts any more.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::key::{KeyError, KeyId, PublicKey};

/// Whose key it is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// A person's, who may issue leases and approve.
    Human,
    /// One that reviews and approves, and issues nothing.
    Reviewer,
    /// One that issues leases, and approves nothing.
    Issuer,
}

impl Role {
    /// Whether leases signed by it count.
    pub fn may_issue(self) -> bool {
        matches!(self, Role::Human | Role::Issuer)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Role::Human => "human",
            Role::Reviewer => "reviewer",
            Role::Issuer => "issuer",
        }
    }
}

/// Where a key is in its life.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Stage {
    /// It signs.
    Current,
    /// Its successor signs; what it issued is still good.
    Previous,
    /// What it signed can be checked, and is not good for anything new.
    Retired,
    /// Nothing it signed counts.
    Revoked,
}

/// A key that is known.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trusted {
    /// The key.
    pub public: PublicKey,
    /// Whose.
    pub role: Role,
    /// Who that is, in words.
    pub name: String,
    /// Where it is in its life.
    pub stage: Stage,
    /// From when its signatures count.
    pub valid_from: Timestamp,
    /// Until when, if that is known.
    pub valid_until: Option<Timestamp>,
}

/// All keys that are known, by name.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrustStore {
    keys: BTreeMap<KeyId, Trusted>,
}

/// What cannot be a trust store, or be done with one.
#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    /// Not the JSON of one.
    #[error("it is not a trust store")]
    Json(#[from] serde_json::Error),
    /// A key under another's name.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// It is there already.
    #[error("the key {0} is known already, as {1}")]
    Known(KeyId, &'static str),
    /// It is not there.
    #[error("there is no key {0}")]
    Unknown(KeyId),
}

impl TrustStore {
    /// Reads a store, and sees to it that each key has its own name.
    pub fn read(text: &[u8]) -> Result<TrustStore, TrustError> {
        let store: TrustStore = serde_json::from_slice(text)?;
        for (given, trusted) in &store.keys {
            let found = trusted.public.id();
            if found != *given {
                return Err(KeyError::WrongName { given: given.clone(), found }.into());
            }
        }
        Ok(store)
    }

    /// The text of its file.
    pub fn to_text(&self) -> Vec<u8> {
        let mut text = serde_json::to_vec_pretty(self).expect("plain data");
        text.push(b'\n');
        text
    }

    /// A key by its name.
    pub fn get(&self, id: &KeyId) -> Option<&Trusted> {
        self.keys.get(id)
    }

    /// All of them, by name.
    pub fn keys(&self) -> impl Iterator<Item = (&KeyId, &Trusted)> {
        self.keys.iter()
    }

    /// Trusts a key from now on.
    pub fn trust(
        &mut self,
        public: PublicKey,
        role: Role,
        name: String,
        valid_from: Timestamp,
        valid_until: Option<Timestamp>,
    ) -> Result<KeyId, TrustError> {
        let id = public.id();
        if let Some(known) = self.keys.get(&id) {
            return Err(TrustError::Known(id, known.role.name()));
        }
        self.keys.insert(id.clone(), Trusted { public, role, name, stage: Stage::Current, valid_from, valid_until });
        Ok(id)
    }

    /// Puts one key in the place of another: the old one becomes the previous, and the previous one is retired.
    pub fn rotate(&mut self, old: &KeyId, public: PublicKey, now: Timestamp) -> Result<KeyId, TrustError> {
        let Some(known) = self.keys.get(old) else { return Err(TrustError::Unknown(old.clone())) };
        let (role, name) = (known.role, known.name.clone());
        let new = self.trust(public, role, name.clone(), now, None)?;
        for (id, trusted) in &mut self.keys {
            if trusted.role == role && trusted.name == name && trusted.stage == Stage::Previous {
                trusted.stage = Stage::Retired;
            }
            if id == old && trusted.stage == Stage::Current {
                trusted.stage = Stage::Previous;
                trusted.valid_until = Some(now);
            }
        }
        Ok(new)
    }

    /// Trusts a key no more, nor anything it ever signed.
    pub fn revoke(&mut self, id: &KeyId, now: Timestamp) -> Result<(), TrustError> {
        let trusted = self.keys.get_mut(id).ok_or_else(|| TrustError::Unknown(id.clone()))?;
        trusted.stage = Stage::Revoked;
        trusted.valid_until = Some(trusted.valid_until.map_or(now, |until| until.min(now)));
        Ok(())
    }
}

impl Trusted {
    /// Whether what it signed at this moment counts now.
    pub fn counts(&self, signed_at: Timestamp) -> bool {
        let is_late = self.valid_until.is_some_and(|until| signed_at > until);
        self.stage != Stage::Revoked && self.valid_from <= signed_at && !is_late
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::SecretKey;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    #[test]
    fn a_rotation_keeps_the_previous_key_and_retires_the_one_before() {
        let [a, b, c] = [1, 2, 3].map(|seed| SecretKey::from_seed(&[seed; 32]).public());
        let mut store = TrustStore::default();
        let first = store.trust(a, Role::Human, "me".into(), at(0), None).expect("new");
        let second = store.rotate(&first, b, at(10)).expect("rotated");
        let third = store.rotate(&second, c, at(20)).expect("rotated");
        let stage = |id: &KeyId| store.get(id).expect("known").stage;
        assert_eq!([&first, &second, &third].map(stage), [Stage::Retired, Stage::Previous, Stage::Current]);
        let counts = |id: &KeyId, second| store.get(id).expect("known").counts(at(second));
        assert!(counts(&first, 5) && !counts(&first, 11), "what it signed in its time, and nothing later");
        assert!(!counts(&third, 19), "nothing before it was there");
    }

    #[test]
    fn nothing_a_revoked_key_signed_counts() {
        let key = SecretKey::from_seed(&[1; 32]).public();
        let mut store = TrustStore::default();
        let id = store.trust(key, Role::Issuer, "ci".into(), at(0), None).expect("new");
        assert!(store.get(&id).expect("known").counts(at(5)));
        store.revoke(&id, at(10)).expect("known");
        assert!(!store.get(&id).expect("known").counts(at(5)));
    }

    #[test]
    fn a_key_under_anothers_name_is_refused() {
        let [a, b] = [1, 2].map(|seed| SecretKey::from_seed(&[seed; 32]).public());
        let mut store = TrustStore::default();
        store.trust(a.clone(), Role::Human, "me".into(), at(0), None).expect("new");
        let text = String::from_utf8(store.to_text()).expect("text");
        assert_eq!(TrustStore::read(text.as_bytes()).expect("a store"), store);
        let swapped = text.replace(&a.to_string(), &b.to_string());
        assert!(matches!(TrustStore::read(swapped.as_bytes()), Err(TrustError::Key(KeyError::WrongName { .. }))));
    }
}
