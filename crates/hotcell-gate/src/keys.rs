//! Key files: one key that signs, and the keys that are trusted.
//!
//! ```text
//! keys/<kid>.key   0600, the secret half of the key that signs
//! keys/current     its name
//! trust.json       the public halves, whose they are, and how long they count
//! ```
//!
//! A key is made on first use. Its file is in the home, which no cell sees.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use hotcell_authority::key::KeyError;
use hotcell_authority::trust::TrustError;
use hotcell_authority::{KeyId, PublicKey, Role, SecretKey, TrustStore};
use hotcell_base::text::shown_path;
use jiff::Timestamp;

use crate::home::Home;
use crate::plain;
use crate::record::{RecordError, replace_durably};

/// The keys of a home.
#[derive(Clone, Debug)]
pub struct Keys {
    directory: PathBuf,
    trust: PathBuf,
}

/// Why a key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// A file cannot be read.
    #[error("cannot read `{}`", shown_path(path))]
    Read {
        /// Which.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// A file cannot be written.
    #[error(transparent)]
    Write(#[from] RecordError),
    /// Others could have read it.
    #[error("the key `{}` can be read by others (mode {mode:o})", shown_path(path))]
    NotPrivate {
        /// Which.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// It is no key, or not the one that its name says.
    #[error("`{}` is not the key it is said to be", shown_path(path))]
    Key {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        source: KeyError,
    },
    /// The trust store is none, or refuses.
    #[error("the trust store `{}` cannot be used", shown_path(path))]
    Trust {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        source: TrustError,
    },
    /// There is a key already.
    #[error("there is a key already, {0}")]
    Exists(KeyId),
    /// There is no key yet.
    #[error("there is no key yet")]
    None,
}

/// The key that signs, and all that are trusted.
#[derive(Debug)]
pub struct KeyRing {
    /// Signs.
    pub key: SecretKey,
    /// Whose signatures count.
    pub trust: TrustStore,
    /// Whether it was made just now.
    pub is_new: bool,
}

impl Keys {
    /// The keys of this home.
    pub fn of(home: &Home) -> Keys {
        Keys { directory: home.path().join("keys"), trust: home.path().join("trust.json") }
    }

    /// Where the trust store is.
    pub fn trust_path(&self) -> &Path {
        &self.trust
    }

    /// Everything that is trusted; none if there is no such file.
    pub fn trust(&self) -> Result<Option<TrustStore>, KeysError> {
        match plain::read(&self.trust) {
            Ok(text) => self.read_trust(&text).map(Some),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(KeysError::Read { path: self.trust.clone(), source }),
        }
    }

    fn read_trust(&self, text: &[u8]) -> Result<TrustStore, KeysError> {
        TrustStore::read(text).map_err(|source| KeysError::Trust { path: self.trust.clone(), source })
    }

    /// The name of the key that signs.
    pub fn current_id(&self) -> Result<Option<KeyId>, KeysError> {
        let path = self.directory.join("current");
        match plain::read(&path) {
            Ok(text) => {
                let text = String::from_utf8_lossy(&text).trim().to_owned();
                text.parse().map(Some).map_err(|source| KeysError::Key { path, source })
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(KeysError::Read { path, source }),
        }
    }

    /// The key that signs, and all that are trusted; on first use, one is made for the person this home belongs to.
    pub fn ring(&self, now: Timestamp) -> Result<KeyRing, KeysError> {
        if let Some(ring) = self.existing()? {
            return Ok(ring);
        }
        let _one_at_a_time = self.lock()?;
        match self.existing()? {
            Some(ring) => Ok(ring),
            None => self.make(Role::Human, "owner", now),
        }
    }

    fn existing(&self) -> Result<Option<KeyRing>, KeysError> {
        let Some(id) = self.current_id()? else { return Ok(None) };
        let key = self.secret(&id)?;
        let Some(trust) = self.trust()? else {
            return Err(KeysError::Read { path: self.trust.clone(), source: io::ErrorKind::NotFound.into() });
        };
        Ok(Some(KeyRing { key, trust, is_new: false }))
    }

    /// Makes the first key.
    pub fn init(&self, role: Role, name: &str, now: Timestamp) -> Result<KeyRing, KeysError> {
        let _one_at_a_time = self.lock()?;
        match self.current_id()? {
            Some(id) => Err(KeysError::Exists(id)),
            None => self.make(role, name, now),
        }
    }

    fn make(&self, role: Role, name: &str, now: Timestamp) -> Result<KeyRing, KeysError> {
        let mut trust = self.trust()?.unwrap_or_default();
        // One that was being made when something ended is made to its end.
        let key = match self.begun() {
            Some(key) => key,
            None => self.put(SecretKey::from_seed(&seed()))?,
        };
        if trust.get(key.id()).is_none() {
            let trusted = trust.trust(key.public(), role, name.to_owned(), to_the_second(now), None);
            trusted.map_err(|source| KeysError::Trust { path: self.trust.clone(), source })?;
        }
        self.appoint(&key, &trust)?;
        Ok(KeyRing { key, trust, is_new: true })
    }

    /// Puts a new key in the place of the one that signs, whose secret half is gone from then on.
    pub fn rotate(&self, now: Timestamp) -> Result<(KeyId, KeyRing), KeysError> {
        let _one_at_a_time = self.lock()?;
        let old = self.current_id()?.ok_or(KeysError::None)?;
        let key = self.put(SecretKey::from_seed(&seed()))?;
        let mut trust = self.trust()?.unwrap_or_default();
        let rotated = trust.rotate(&old, key.public(), to_the_second(now));
        rotated.map_err(|source| KeysError::Trust { path: self.trust.clone(), source })?;
        self.appoint(&key, &trust)?;
        let path = self.secret_path(&old);
        fs::remove_file(&path).map_err(|source| RecordError::Write { path, source })?;
        Ok((old, KeyRing { key, trust, is_new: true }))
    }

    /// Trusts somebody else's key.
    pub fn trust_key(
        &self,
        public: PublicKey,
        role: Role,
        name: &str,
        from: Timestamp,
        until: Option<Timestamp>,
    ) -> Result<KeyId, KeysError> {
        self.change(|trust| trust.trust(public, role, name.to_owned(), to_the_second(from), until))
    }

    /// Trusts a key no more. The one that signs is replaced first.
    pub fn revoke(&self, id: &KeyId, now: Timestamp) -> Result<(), KeysError> {
        self.change(|trust| trust.revoke(id, to_the_second(now)))
    }

    fn change<T>(&self, change: impl FnOnce(&mut TrustStore) -> Result<T, TrustError>) -> Result<T, KeysError> {
        let _one_at_a_time = self.lock()?;
        let mut trust = self.trust()?.unwrap_or_default();
        let changed = change(&mut trust).map_err(|source| KeysError::Trust { path: self.trust.clone(), source })?;
        replace_durably(&self.trust, &trust.to_text())?;
        Ok(changed)
    }

    /// A key in a home where none signs yet.
    fn begun(&self) -> Option<SecretKey> {
        let names = fs::read_dir(&self.directory).ok()?.flatten().map(|entry| entry.file_name());
        let ids = names.filter_map(|name| name.to_str()?.strip_suffix(".key")?.parse::<KeyId>().ok());
        ids.into_iter().find_map(|id| self.secret(&id).ok())
    }

    /// Keeps the secret half of a key.
    fn put(&self, key: SecretKey) -> Result<SecretKey, KeysError> {
        let path = self.secret_path(key.id());
        let write = || {
            let mut options = OpenOptions::new();
            let mut file = plain::open_with(options.write(true).create_new(true).mode(0o600), &path)?;
            file.write_all(key.to_text().as_bytes())?;
            file.sync_all()
        };
        write().map_err(|source| RecordError::Write { path: path.clone(), source })?;
        Ok(key)
    }

    /// Lets a key sign: trusted first, and then by its name.
    fn appoint(&self, key: &SecretKey, trust: &TrustStore) -> Result<(), KeysError> {
        replace_durably(&self.trust, &trust.to_text())?;
        replace_durably(&self.directory.join("current"), format!("{}\n", key.id()).as_bytes())?;
        Ok(())
    }

    fn secret_path(&self, id: &KeyId) -> PathBuf {
        self.directory.join(format!("{id}.key"))
    }

    fn secret(&self, id: &KeyId) -> Result<SecretKey, KeysError> {
        let path = self.secret_path(id);
        let unreadable = |source| KeysError::Read { path: path.clone(), source };
        let mut file = plain::open(&path).map_err(unreadable)?;
        let mode = file.metadata().map_err(unreadable)?.mode();
        if mode & 0o077 != 0 {
            return Err(KeysError::NotPrivate { path, mode: mode & 0o7777 });
        }
        // Of the size it has, so that it is never moved, and wiped when it is dropped.
        let mut text = zeroize::Zeroizing::new(String::with_capacity(128));
        (&mut file).take(128).read_to_string(&mut text).map_err(unreadable)?;
        let key = SecretKey::read(&text).map_err(|source| KeysError::Key { path: path.clone(), source })?;
        if key.id() != id {
            let source = KeyError::WrongName { given: id.clone(), found: key.id().clone() };
            return Err(KeysError::Key { path, source });
        }
        Ok(key)
    }

    fn lock(&self) -> Result<File, KeysError> {
        let failed = |source| RecordError::Write { path: self.directory.clone(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(&self.directory).map_err(failed)?;
        let directory = File::open(&self.directory).map_err(failed)?;
        directory.lock().map_err(failed)?;
        Ok(directory)
    }
}

/// What leases are written to.
fn to_the_second(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).expect("a time that was one before")
}

fn seed() -> zeroize::Zeroizing<[u8; 32]> {
    let mut seed = zeroize::Zeroizing::new([0; 32]);
    let taken = rustix::rand::getrandom(&mut *seed, rustix::rand::GetRandomFlags::empty());
    assert_eq!(taken, Ok(seed.len()), "the kernel has random bits");
    seed
}
