//! Patterns for paths, and which of several decides.
//!
//! ```text
//! /srv/data             the file, or the directory with all below it
//! /srv/data/*           every entry of it with all below; not the directory itself (`/**` at the end means the same)
//! repo://calyx/tools    below the directory that the policy calls `calyx`
//! ```
//!
//! The narrowest pattern that covers a path decides whether it may be read, and likewise whether it may be written;
//! among equals, the one that forbids. A scope is within another only if no path can be reached by it that the other
//! keeps away.

use std::collections::BTreeMap;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A pattern for paths, as it is written.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PathPattern {
    repo: Option<String>,
    parts: Vec<Part>,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Part {
    Is(String),
    Any,
}

/// Text that is no pattern for paths.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PathPatternError {
    /// It begins nowhere.
    #[error("the path pattern `{0}` is neither absolute nor `repo://NAME/…`")]
    Relative(String),
    /// It leads back.
    #[error("the path pattern `{0}` has a `.` or `..` in it")]
    Dots(String),
    /// A star within a name, or `**` in the middle.
    #[error("the path pattern `{0}` has a star that is not a name of its own; write /dir/* or /dir/**")]
    Star(String),
    /// The policy has no directory of that name.
    #[error("the policy has no repository `{0}`")]
    UnknownRepo(String),
}

/// What `repo://NAME/` stands for.
pub type Repos = BTreeMap<String, PathBuf>;

impl FromStr for PathPattern {
    type Err = PathPatternError;

    fn from_str(text: &str) -> Result<PathPattern, PathPatternError> {
        let relative = || PathPatternError::Relative(text.to_owned());
        let (repo, path) = match text.strip_prefix("repo://") {
            Some(rest) => {
                let (name, path) = rest.split_once('/').unwrap_or((rest, ""));
                let is_name = |letter: char| letter.is_alphanumeric() || "-_.".contains(letter);
                if name.is_empty() || !name.chars().all(is_name) {
                    return Err(relative());
                }
                (Some(name.to_owned()), path)
            }
            None => (None, text.strip_prefix('/').ok_or_else(relative)?),
        };
        let names: Vec<&str> = path.split('/').filter(|name| !name.is_empty()).collect();
        let mut parts = Vec::with_capacity(names.len());
        for (idx, name) in names.iter().enumerate() {
            parts.push(match *name {
                "." | ".." => return Err(PathPatternError::Dots(text.to_owned())),
                "*" => Part::Any,
                "**" if idx + 1 == names.len() => Part::Any,
                name if name.contains('*') => return Err(PathPatternError::Star(text.to_owned())),
                name => Part::Is(name.to_owned()),
            });
        }
        Ok(PathPattern { repo, parts })
    }
}

impl fmt::Display for PathPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(repo) = &self.repo {
            write!(f, "repo://{repo}")?;
        }
        for part in &self.parts {
            match part {
                Part::Any => f.write_str("/*")?,
                Part::Is(name) => write!(f, "/{name}")?,
            }
        }
        if self.parts.is_empty() { f.write_str("/") } else { Ok(()) }
    }
}

impl TryFrom<String> for PathPattern {
    type Error = PathPatternError;
    fn try_from(text: String) -> Result<PathPattern, PathPatternError> {
        text.parse()
    }
}

impl From<PathPattern> for String {
    fn from(pattern: PathPattern) -> String {
        pattern.to_string()
    }
}

impl PathPattern {
    /// What it stands for on this machine.
    pub fn place(&self, repos: &Repos) -> Result<Place, PathPatternError> {
        let mut parts = Vec::new();
        if let Some(repo) = &self.repo {
            let root = repos.get(repo).ok_or_else(|| PathPatternError::UnknownRepo(repo.clone()))?;
            parts.extend(names(root).map(|name| Some(name.to_vec())));
        }
        parts.extend(self.parts.iter().map(|part| match part {
            Part::Any => None,
            Part::Is(name) => Some(name.clone().into_bytes()),
        }));
        Ok(Place { parts })
    }
}

fn names(path: &Path) -> impl Iterator<Item = &[u8]> {
    path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name.as_bytes()),
        _ => None,
    })
}

/// A pattern for absolute paths.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Place {
    /// Names from the root on; none stands for any one name.
    parts: Vec<Option<Vec<u8>>>,
}

impl Place {
    /// Whether the path is meant, or is below one that is. It must be absolute, without links and dots.
    pub fn covers(&self, path: &Path) -> bool {
        let mut names = names(path);
        self.parts.iter().all(|part| names.next().is_some_and(|name| part.as_ref().is_none_or(|part| part == name)))
    }

    /// Whether everything it covers is covered by the other.
    pub fn is_within(&self, wider: &Place) -> bool {
        let is_part = |(narrow, wide): (&Option<Vec<u8>>, &Option<Vec<u8>>)| wide.is_none() || narrow == wide;
        self.parts.len() >= wider.parts.len() && self.parts.iter().zip(&wider.parts).all(is_part)
    }

    /// Whether some path is covered by both.
    pub fn meets(&self, other: &Place) -> bool {
        self.parts.iter().zip(&other.parts).all(|(a, b)| a.is_none() || b.is_none() || a == b)
    }

    /// The longest path that has no star in it: what is looked at to find what the pattern stands for.
    pub fn fixed(&self) -> PathBuf {
        let mut path = PathBuf::from("/");
        for part in self.parts.iter().map_while(Option::as_ref) {
            path.push(std::ffi::OsStr::from_bytes(part));
        }
        path
    }

    /// How many names below [`Place::fixed`] there are to find, and which of them are given.
    pub fn open(&self) -> &[Option<Vec<u8>>] {
        let n_fixed = self.parts.iter().take_while(|part| part.is_some()).count();
        &self.parts[n_fixed..]
    }

    /// How narrow: with more names, and with fewer stars among as many.
    fn narrowness(&self) -> (usize, usize) {
        (self.parts.len(), self.parts.iter().flatten().count())
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in &self.parts {
            let name = part.as_ref().map_or_else(|| "*".to_owned(), hotcell_base::text::shown);
            write!(f, "/{name}")?;
        }
        if self.parts.is_empty() { f.write_str("/") } else { Ok(()) }
    }
}

/// Which paths may be read and written.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct PathScope {
    /// May be read.
    pub read: Vec<Place>,
    /// May be read and written.
    pub write: Vec<Place>,
    /// May not.
    pub deny: Vec<Place>,
}

/// What may be done with a path.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Access {
    /// Nothing: it is not there.
    None,
    /// It can be read.
    Read,
    /// It can be read and written.
    Write,
}

impl PathScope {
    /// The scope these patterns make.
    pub fn new(
        read: &[PathPattern],
        write: &[PathPattern],
        deny: &[PathPattern],
        repos: &Repos,
    ) -> Result<PathScope, PathPatternError> {
        let places =
            |patterns: &[PathPattern]| patterns.iter().map(|pattern| pattern.place(repos)).collect::<Result<_, _>>();
        Ok(PathScope { read: places(read)?, write: places(write)?, deny: places(deny)? })
    }

    /// What may be done with this path, which is absolute and without links and dots.
    pub fn access(&self, path: &Path) -> Access {
        let narrowest = |places: &mut dyn Iterator<Item = &Place>| {
            places.filter(|place| place.covers(path)).map(Place::narrowness).max()
        };
        let denied = narrowest(&mut self.deny.iter());
        // `None` is less than anything: what nobody speaks of is not granted, and among equals the denial holds.
        if narrowest(&mut self.write.iter()) > denied {
            Access::Write
        } else if narrowest(&mut self.read.iter().chain(&self.write)) > denied {
            Access::Read
        } else {
            Access::None
        }
    }

    /// Whether no path can be reached by this one that the other keeps away. Where that cannot be told from the
    /// patterns alone, it is not.
    pub fn is_within(&self, wider: &PathScope) -> bool {
        let keeps_denials = wider.deny.iter().all(|denied| self.deny.contains(denied));
        // A grant of ours could reach into what the other denies, where it is the narrower of the two. So it must be
        // backed by one of the other's that is narrower as well.
        let is_backed = |grant: &Place, by: &Place| {
            let beats = |denied: &Place| by.narrowness() > denied.narrowness();
            let matters = |denied: &&Place| denied.meets(grant) && denied.narrowness() <= grant.narrowness();
            grant.is_within(by) && wider.deny.iter().filter(matters).all(beats)
        };
        let reads = self.read.iter().all(|grant| wider.read.iter().chain(&wider.write).any(|by| is_backed(grant, by)));
        let writes = self.write.iter().all(|grant| wider.write.iter().any(|by| is_backed(grant, by)));
        keeps_denials && reads && writes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn scope(read: &[&str], write: &[&str], deny: &[&str]) -> PathScope {
        let repos = Repos::from([("calyx".to_owned(), PathBuf::from("/srv/calyx"))]);
        let parse = |texts: &[&str]| texts.iter().map(|text| text.parse().expect("a pattern")).collect::<Vec<_>>();
        PathScope::new(&parse(read), &parse(write), &parse(deny), &repos).expect("a scope")
    }

    #[test]
    fn the_narrowest_decides_and_among_equals_the_denial() {
        let mixed = scope(&["/a", "repo://calyx/tools/*"], &["/a/out"], &["/a/secret", "/a/out/keys", "/b"]);
        for (path, access) in [
            ("/a", Access::Read),
            ("/a/x/y", Access::Read),
            ("/a/secret", Access::None),
            ("/a/secret/x", Access::None),
            ("/a/out/x", Access::Write),
            ("/a/out/keys/x", Access::None),
            ("/ab", Access::None),
            ("/b/c", Access::None),
            ("/srv/calyx/tools", Access::None),
            ("/srv/calyx/tools/x", Access::Read),
            ("/srv/calyx/tools/x/y", Access::Read),
            ("/srv/calyx", Access::None),
            ("/", Access::None),
        ] {
            assert_eq!(mixed.access(Path::new(path)), access, "{path}");
        }
        assert_eq!(scope(&["/a"], &[], &["/a"]).access(Path::new("/a/b")), Access::None);
        assert_eq!(scope(&["/a/b/c"], &[], &["/a/b"]).access(Path::new("/a/b/c/d")), Access::Read);
    }

    #[test]
    fn what_is_no_pattern_is_refused() {
        for text in ["", "a/b", "repo://", "repo://a b/c", "~/x", "http://x/y"] {
            assert!(matches!(text.parse::<PathPattern>(), Err(PathPatternError::Relative(_))), "{text}");
        }
        for text in ["/a/../b", "/./a"] {
            assert!(matches!(text.parse::<PathPattern>(), Err(PathPatternError::Dots(_))), "{text}");
        }
        for text in ["/a*", "/a/**/b"] {
            assert!(matches!(text.parse::<PathPattern>(), Err(PathPatternError::Star(_))), "{text}");
        }
        let unknown: PathPattern = "repo://nowhere/x".parse().expect("a pattern");
        assert_eq!(unknown.place(&Repos::new()), Err(PathPatternError::UnknownRepo("nowhere".to_owned())));
    }

    #[test]
    fn a_grant_within_a_denial_is_not_within() {
        let parent = scope(&["/a"], &[], &["/a/b"]);
        assert!(!scope(&["/a/b/c"], &[], &["/a/b"]).is_within(&parent));
        assert!(!scope(&["/a/*/c"], &[], &["/a/b"]).is_within(&parent), "it meets the denial");
        assert!(!scope(&["/a/x"], &[], &[]).is_within(&parent), "the denial must stay");
        assert!(scope(&["/a/x"], &[], &["/a/b", "/a/x/y"]).is_within(&parent));
        assert!(!scope(&[], &["/a/x"], &["/a/b"]).is_within(&parent), "reading is not writing");
    }

    fn a_place() -> impl Strategy<Value = Place> {
        let part = prop_oneof![4 => prop::sample::select(vec!["a", "b"]).prop_map(Some), 1 => Just(None)];
        prop::collection::vec(part, 0..4)
            .prop_map(|parts| Place { parts: parts.into_iter().map(|part| part.map(|name| name.into())).collect() })
    }

    fn a_scope() -> impl Strategy<Value = PathScope> {
        let places = || prop::collection::vec(a_place(), 0..3);
        (places(), places(), places()).prop_map(|(read, write, deny)| PathScope { read, write, deny })
    }

    /// Every path of up to four names.
    fn paths() -> Vec<PathBuf> {
        let mut all = vec![PathBuf::from("/")];
        for _ in 0..4 {
            let longer: Vec<PathBuf> =
                all.iter().flat_map(|path| ["a", "b", "c"].map(|name| path.join(name))).collect();
            all.extend(longer);
            all.sort();
            all.dedup();
        }
        all
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn a_narrower_scope_reaches_nothing_more(wide in a_scope(), mut narrow in a_scope(), keeps: bool) {
            if keeps {
                narrow.deny.extend(wide.deny.iter().cloned());
            }
            if narrow.is_within(&wide) {
                for path in paths() {
                    prop_assert!(narrow.access(&path) <= wide.access(&path), "{path:?}");
                }
            }
            prop_assert!(wide.is_within(&wide) || !wide.deny.is_empty());
        }

        #[test]
        fn a_pattern_reads_back(parts in prop::collection::vec(prop::option::of("[a-z.]{3}"), 0..4), repo in prop::option::of("[a-z]{3}")) {
            let parts = parts.into_iter().map(|part| part.map_or(Part::Any, Part::Is)).collect();
            let pattern = PathPattern { repo, parts };
            prop_assert_eq!(pattern.to_string().parse::<PathPattern>(), Ok(pattern));
        }
    }
}
