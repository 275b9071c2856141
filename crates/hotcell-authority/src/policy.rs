//! The capability matrix: what can be permitted at all.
//!
//! ```text
//! policy.toml ──read──▶ Policy: phases, repos, groups of commands, capabilities; its digest
//!                          │ every example of every group was tried
//!                          ▼
//!        Capability::admits(lease)      Capability::permits(command)
//! ```
//!
//! A lease is issued under one capability, and carries the digest of the whole file: under another text it is nothing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use jiff::SignedDuration;
use serde::{Deserialize, Serialize};

use crate::command::{self, Command, CommandPattern, Lookup};
use crate::key::digest;
use crate::lease::{Network, Terms};
use crate::limits::LimitsMax;
use crate::scope::{PathPattern, PathPatternError, PathScope, Repos};
use crate::trust::Role;

/// What holds where there is no `policy.toml`.
pub const DEFAULT_POLICY: &str = include_str!("default_policy.toml");

/// The policy's text is bounded.
pub const POLICY_BYTES_MAX: u64 = 1 << 20;

/// The whole matrix.
#[derive(Clone, Debug)]
pub struct Policy {
    digest: String,
    matrix: Matrix,
    scopes: BTreeMap<String, PathScope>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Matrix {
    version: u32,
    #[serde(default)]
    phases: BTreeMap<String, Phase>,
    #[serde(default)]
    repos: Repos,
    #[serde(default)]
    groups: BTreeMap<String, Group>,
    #[serde(default)]
    capabilities: BTreeMap<String, Capability>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Phase {
    status: Status,
    why: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Status {
    Enabled,
    Pending,
}

/// A group of commands, and examples of what it means.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// What it is for.
    pub why: String,
    /// What may be run.
    pub commands: Vec<CommandPattern>,
    /// What of it may not.
    #[serde(default)]
    pub deny: Vec<CommandPattern>,
    /// Commands it must allow.
    #[serde(default)]
    pub allows: Vec<String>,
    /// Commands it must refuse.
    #[serde(default)]
    pub refuses: Vec<String>,
}

/// One row of the matrix: what a lease can be issued for.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Capability {
    /// What it is for.
    pub why: String,
    /// The phase it belongs to.
    pub phase: String,
    /// Whether a run without a lease may issue itself one.
    #[serde(default)]
    pub self_issued: bool,
    /// Which commands.
    pub groups: Vec<String>,
    /// Which paths may be read.
    #[serde(default)]
    pub paths_allowlist: Vec<PathPattern>,
    /// Which may be written as well.
    #[serde(default)]
    pub paths_writable: Vec<PathPattern>,
    /// Which may not.
    #[serde(default)]
    pub paths_denylist: Vec<PathPattern>,
    /// Which variables may be set; `*` is any.
    #[serde(default)]
    pub env_allowlist: Vec<String>,
    /// What may be connected to.
    #[serde(default)]
    pub network: Network,
    /// For how long at most.
    #[serde(default = "ten")]
    pub minutes_max: u32,
    /// Whose signatures a lease needs besides its issuer's.
    #[serde(default)]
    pub approvals: Vec<Role>,
    /// How much.
    #[serde(default)]
    pub limits: LimitsMax,
}

fn ten() -> u32 {
    10
}

/// Why a text is no policy.
#[derive(Debug, thiserror::Error)]
pub enum PolicyError {
    /// It is not the TOML of one.
    #[error("it is not a policy")]
    Toml(#[from] toml::de::Error),
    /// It is not text.
    #[error("it is not text")]
    NotText,
    /// Made for another hotcell.
    #[error("it is a policy of version {0}, and this hotcell knows version 1")]
    Version(u32),
    /// A name that stands for nothing.
    #[error("the capability `{capability}` names the {kind} `{name}`, which there is not")]
    Unknown {
        /// Whose.
        capability: String,
        /// What it is.
        kind: &'static str,
        /// What it is called.
        name: String,
    },
    /// An example that does not hold.
    #[error("the group `{group}` says that it {} `{example}`, and it {}", says(*allows), says(!*allows))]
    Example {
        /// Whose.
        group: String,
        /// Which.
        example: String,
        /// What it is an example of.
        allows: bool,
    },
    /// An example that is no command.
    #[error("the group `{group}` has the example `{example}`, which is no command")]
    NotACommand {
        /// Whose.
        group: String,
        /// Which.
        example: String,
    },
    /// A pattern for paths that stands for nothing.
    #[error("the capability `{capability}` has a path that stands for nothing")]
    Path {
        /// Whose.
        capability: String,
        /// What is wrong with it.
        source: PathPatternError,
    },
    /// A directory that is not absolute.
    #[error("the repository `{name}` is `{}`, which is not absolute", path.display())]
    Repo {
        /// Which.
        name: String,
        /// What it stands for.
        path: PathBuf,
    },
    /// Nothing could ever be issued.
    #[error("the capability `{0}` lets leases last no time")]
    NoTime(String),
}

fn says(allows: bool) -> &'static str {
    if allows { "allows" } else { "refuses" }
}

/// Why a capability does not permit something: in the words that are said of a lease.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Beyond {
    /// Its phase is not enabled.
    Phase(String),
    /// A command.
    Command(String),
    /// A path.
    Path(String),
    /// A variable.
    Env(String),
    /// The network.
    Network,
    /// A limit: its name, what was asked for, the most there is.
    Limit(&'static str, String, String),
    /// It lasts for too long.
    Time,
}

impl Policy {
    /// Reads a policy and tries all its examples.
    pub fn read(text: &[u8]) -> Result<Policy, PolicyError> {
        let matrix: Matrix = toml::from_str(std::str::from_utf8(text).map_err(|_| PolicyError::NotText)?)?;
        if matrix.version != 1 {
            return Err(PolicyError::Version(matrix.version));
        }
        for (name, path) in &matrix.repos {
            if !path.is_absolute() || path.components().any(|part| part.as_os_str() == "..") {
                return Err(PolicyError::Repo { name: name.clone(), path: path.clone() });
            }
        }
        for (name, group) in &matrix.groups {
            group.try_examples(name)?;
        }
        let mut scopes = BTreeMap::new();
        for (name, capability) in &matrix.capabilities {
            let unknown =
                |kind, what: &String| PolicyError::Unknown { capability: name.clone(), kind, name: what.clone() };
            if !matrix.phases.contains_key(&capability.phase) {
                return Err(unknown("phase", &capability.phase));
            }
            if let Some(group) = capability.groups.iter().find(|group| !matrix.groups.contains_key(*group)) {
                return Err(unknown("group", group));
            }
            if capability.minutes_max == 0 {
                return Err(PolicyError::NoTime(name.clone()));
            }
            let scope = PathScope::new(
                &capability.paths_allowlist,
                &capability.paths_writable,
                &capability.paths_denylist,
                &matrix.repos,
            );
            let scope = scope.map_err(|source| PolicyError::Path { capability: name.clone(), source })?;
            scopes.insert(name.clone(), scope);
        }
        Ok(Policy { digest: digest(text), matrix, scopes })
    }

    /// The digest of its text.
    pub fn digest(&self) -> &str {
        &self.digest
    }

    /// What `repo://NAME/` stands for.
    pub fn repos(&self) -> &Repos {
        &self.matrix.repos
    }

    /// All capabilities, by name.
    pub fn capabilities(&self) -> impl Iterator<Item = Row<'_>> {
        self.matrix.capabilities.iter().map(|(name, capability)| Row { policy: self, name, capability })
    }

    /// A capability by its name.
    pub fn capability(&self, name: &str) -> Option<Row<'_>> {
        let (name, capability) = self.matrix.capabilities.get_key_value(name)?;
        Some(Row { policy: self, name, capability })
    }

    /// The one that a run without a lease issues itself leases of.
    pub fn own(&self) -> Option<Row<'_>> {
        self.capabilities().find(|row| row.capability.self_issued && row.is_enabled())
    }

    /// All groups, by name.
    pub fn groups(&self) -> impl Iterator<Item = (&str, &Group)> {
        self.matrix.groups.iter().map(|(name, group)| (name.as_str(), group))
    }

    /// The phases: name, whether it is enabled, why.
    pub fn phases(&self) -> impl Iterator<Item = (&str, bool, &str)> {
        self.matrix
            .phases
            .iter()
            .map(|(name, phase)| (name.as_str(), phase.status == Status::Enabled, phase.why.as_str()))
    }
}

/// A capability in its policy.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    policy: &'a Policy,
    /// Its name.
    pub name: &'a str,
    /// What it says.
    pub capability: &'a Capability,
}

impl<'a> Row<'a> {
    /// Whether its phase is enabled.
    pub fn is_enabled(&self) -> bool {
        self.policy.matrix.phases.get(&self.capability.phase).is_some_and(|phase| phase.status == Status::Enabled)
    }

    /// The paths.
    pub fn paths(&self) -> &'a PathScope {
        &self.policy.scopes[self.name]
    }

    /// The longest a lease of it lasts.
    pub fn lasts_most(&self) -> SignedDuration {
        SignedDuration::from_mins(self.capability.minutes_max.into())
    }

    fn groups(&self) -> impl Iterator<Item = (&'a str, &'a Group)> {
        let groups = &self.policy.matrix.groups;
        self.capability
            .groups
            .iter()
            .filter_map(|name| groups.get_key_value(name))
            .map(|(name, group)| (name.as_str(), group))
    }

    /// The group that allows this command, unless any denies it.
    pub fn permits(&self, command: &Command<'_>, lookup: Lookup<'_>) -> Option<&'a str> {
        let is_denied = self.groups().any(|(_, group)| group.denies(command, lookup));
        let allowed = self.groups().find(|(_, group)| group.allows(command, lookup)).map(|(name, _)| name);
        allowed.filter(|_| !is_denied)
    }

    /// Whether a lease on these terms may be issued at all: if not, the first thing that is beyond.
    pub fn admits(&self, terms: &Terms, lasts: SignedDuration) -> Result<(), Beyond> {
        if !self.is_enabled() {
            return Err(Beyond::Phase(self.capability.phase.clone()));
        }
        let is_in_a_group = |pattern: &&CommandPattern| {
            self.groups().any(|(_, group)| group.commands.iter().any(|wider| pattern.is_within(wider)))
        };
        if let Some(pattern) = terms.scope.commands_allowlist.iter().find(|pattern| !is_in_a_group(pattern)) {
            return Err(Beyond::Command(pattern.to_string()));
        }
        self.admits_paths(terms)?;
        let scope = &terms.scope;
        if let Some(name) = scope.env_allowlist.iter().find(|name| !is_variable(name, &self.capability.env_allowlist)) {
            return Err(Beyond::Env(name.clone()));
        }
        if scope.network > self.capability.network {
            return Err(Beyond::Network);
        }
        let most = self.capability.limits.clamp(terms.limits);
        if let Some((name, asked, most)) = terms.limits.wider_than(&most) {
            return Err(Beyond::Limit(name, asked, most));
        }
        if lasts > self.lasts_most() { Err(Beyond::Time) } else { Ok(()) }
    }

    fn admits_paths(&self, terms: &Terms) -> Result<(), Beyond> {
        let paths = terms.paths(&self.policy.matrix.repos).map_err(|error| Beyond::Path(error.to_string()))?;
        if paths.is_within(self.paths()) {
            return Ok(());
        }
        // Which one: the first that is beyond by itself.
        let alone = |read: Vec<_>, write: Vec<_>| PathScope { read, write, deny: paths.deny.clone() };
        let beyond = |scope: &PathScope| !scope.is_within(self.paths());
        let read = paths.read.iter().find(|place| beyond(&alone(vec![(*place).clone()], vec![])));
        let write = paths.write.iter().find(|place| beyond(&alone(vec![], vec![(*place).clone()])));
        let which =
            read.or(write).map_or_else(|| "what the policy denies is not denied".to_owned(), ToString::to_string);
        Err(Beyond::Path(which))
    }
}

/// Whether a variable may be set: by its name, by a beginning with a star behind it, or because any may.
pub(crate) fn is_variable(name: &str, allowlist: &[String]) -> bool {
    allowlist.iter().any(|allowed| match allowed.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => name == allowed,
    })
}

impl Group {
    fn allows(&self, command: &Command<'_>, lookup: Lookup<'_>) -> bool {
        self.commands.iter().any(|pattern| pattern.matches(command, lookup))
    }

    fn denies(&self, command: &Command<'_>, lookup: Lookup<'_>) -> bool {
        self.deny.iter().any(|pattern| pattern.forbids(command, lookup))
    }

    fn try_examples(&self, name: &str) -> Result<(), PolicyError> {
        // Examples are words on paper: every program is where its name says.
        let lookup = |word: &str| Some(Path::new("/usr/bin").join(word));
        let examples = self.allows.iter().map(|example| (example, true));
        for (example, allows) in examples.chain(self.refuses.iter().map(|example| (example, false))) {
            let words = command::split(example).filter(|words| !words.is_empty());
            let Some(words) = words else {
                return Err(PolicyError::NotACommand { group: name.to_owned(), example: example.clone() });
            };
            let program = match &words[0].0 {
                path if path.contains('/') => PathBuf::from(path),
                word => Path::new("/usr/bin").join(word),
            };
            let words: Vec<Vec<u8>> = words.into_iter().map(|(word, _)| word.into_bytes()).collect();
            let command = Command { words: &words, program: &program };
            if (self.allows(&command, &lookup) && !self.denies(&command, &lookup)) != allows {
                return Err(PolicyError::Example { group: name.to_owned(), example: example.clone(), allows });
            }
        }
        Ok(())
    }
}
