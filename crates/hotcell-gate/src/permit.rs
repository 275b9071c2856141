//! From a request to a permission: which lease a run has, whether it allows what the plan would do, and what of it is
//! enforced how.
//!
//! A command, a variable or a limit is in the plan or it is not; what is not allowed is refused before anything is made.
//! Paths are enforced by what is mounted: a path that was asked for and is not in scope is refused, and what a scope denies
//! below one that is must be covered, or the run is refused.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use hotcell_authority::scope::Place;
use hotcell_authority::{
    Access, Ask, Command, CommandPattern, Lease, LeaseLimits, PathScope, Refusal, Repos, Scope, Terms, ValidLease,
};
use hotcell_base::text::{shown, shown_path};
use hotcell_cell::{Plan, needs};
use hotcell_ledger::{News, redact};
use hotcell_store::Store;
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use crate::authority::Authority;
use crate::door::GateError;
use crate::leases::{Wish, checked_news, limits_for, within};

/// Under what a run is to be let in.
#[derive(Clone, Debug, Default)]
pub enum Permission {
    /// A short lease that the run issues itself, with the key of whoever asked for it, as far as the policy lets it.
    #[default]
    Own,
    /// This one.
    Lease(Vec<u8>),
}

/// A permission that was checked.
#[derive(Debug)]
pub(crate) struct Permit {
    pub(crate) lease: ValidLease,
    pub(crate) text: Vec<u8>,
    /// What is to be told of it, once the run has a name.
    pub(crate) news: Vec<News>,
    pub(crate) is_own: bool,
}

/// How much longer than its time limit a run's own lease lasts: for its turn to come, and for its end.
const OWN_SLACK: SignedDuration = SignedDuration::from_mins(10);
/// So many paths are looked at to find what a pattern stands for.
const PATHS_MAX: usize = 4096;

impl Authority {
    /// Checks that a plan may run. A refusal is told to the ledger.
    pub(crate) fn permit(
        &self,
        plan: &Plan,
        permission: &Permission,
        lasts: SignedDuration,
    ) -> Result<Permit, GateError> {
        let now = Timestamp::now();
        let words: Vec<Vec<u8>> = plan.argv().iter().map(|word| word.as_bytes().to_vec()).collect();
        let asked = asked(plan);
        let paths: Vec<(PathBuf, Access)> = plan
            .shows()
            .iter()
            .map(|(path, writable)| (path.clone(), if *writable { Access::Write } else { Access::Read }))
            .collect();
        let env: Vec<Vec<u8>> = plan.asked().iter().map(|name| name.clone().into_vec()).collect();
        let lookup = |word: &str| plan.find(OsStr::new(word));
        let program = plan.program().map(needs::in_real_directory).unwrap_or_default();
        let ask =
            Ask { command: Command { words: &words, program: &program }, lookup: &lookup, paths: &paths, env: &env };
        // A cell that stays has no command of its own; each of those that come later is asked for by itself.
        let ask = if words.is_empty() { None } else { Some(ask) };
        let leases = self.leases();
        let (text, mut news, checked) = match permission {
            Permission::Own => {
                let wish = self.own(plan, &paths, lasts)?;
                let issued = leases.draw_up(wish, now).map_err(GateError::from)?;
                let checked = leases.verify(&issued.text, ask.as_ref(), &leases.records(None), now);
                let news = issued.news(true);
                (issued.text, vec![news], checked)
            }
            Permission::Lease(text) => {
                let check =
                    |store: &mut Store| Ok(leases.verify(text, ask.as_ref(), &leases.records(Some(store)), now));
                (text.clone(), Vec::new(), self.with_store(check)?)
            }
        };
        let checked = checked.and_then(|lease| match uncovered(plan, lease.paths()) {
            Some(path) => Err(Refusal::Path(path)),
            None => enough(plan, lease.limits()).map(|()| lease),
        });
        news.push(checked_news(&text, &checked, &asked));
        match checked {
            Ok(lease) => {
                let is_own = matches!(permission, Permission::Own);
                Ok(Permit { lease, text, news, is_own })
            }
            Err(refusal) => {
                // Refused either way; that it could not be told is the worse news.
                self.tell(news)?;
                Err(GateError::Refused { command: shown(words.first().cloned().unwrap_or_default()), source: refusal })
            }
        }
    }

    /// What a run issues itself: exactly what it is about to do.
    fn own(&self, plan: &Plan, paths: &[(PathBuf, Access)], lasts: SignedDuration) -> Result<Wish, GateError> {
        let row = self.policy().own().ok_or_else(|| GateError::Refused {
            command: plan.argv().first().map(|word| shown(word.as_bytes())).unwrap_or_default(),
            source: Refusal::Policy("a capability that a run may issue itself".to_owned()),
        })?;
        let pattern = |path: &Path| path.to_str().and_then(|path| path.parse().ok());
        // What is no text cannot be written down exactly, and what looks like a secret must not be: a lease of a run's own is
        // told whole. The run itself is checked all the same.
        let words: Option<Vec<&str>> = plan.argv().iter().map(|word| word.to_str()).collect();
        let program = plan.program().and_then(Path::to_str);
        let exactly = match (words, program) {
            (Some(words), Some(program)) if !words.is_empty() && redact::command(&words) == words => {
                Some(CommandPattern::exactly([program].into_iter().chain(words[1..].iter().copied())))
            }
            _ => None,
        };
        let any_of_program = || program.map(|program| CommandPattern::exactly([program]).and_more());
        let anything = || "**".parse().expect("a pattern");
        let command = exactly.or_else(any_of_program).unwrap_or_else(anything);
        let places = |wanted: Access| {
            let paths = paths.iter().filter(move |(_, access)| *access == wanted);
            paths.map(|(path, _)| pattern(path).unwrap_or_else(|| "/".parse().expect("a pattern"))).collect()
        };
        let scope = Scope {
            paths_allowlist: places(Access::Read),
            paths_writable: places(Access::Write),
            paths_denylist: row.capability.paths_denylist.clone(),
            commands_allowlist: vec![command],
            env_allowlist: plan.asked().iter().map(|name| name.to_string_lossy().into_owned()).collect(),
            network: hotcell_authority::Network::DenyAll,
        };
        let runs_max = if plan.argv().is_empty() { 1_000_000 } else { 1 };
        let limits = limits_for(plan.limits(), runs_max);
        let terms = Terms { capability: row.name.to_owned(), scope, limits };
        let actor = format!("uid:{}", rustix::process::geteuid().as_raw());
        let lasts = lasts.checked_add(OWN_SLACK).unwrap_or(lasts);
        Ok(Wish { terms, lasts, intent_id: None, actor, audience: self.here().clone(), parent: None })
    }
}

/// What was asked for, in the words of the ledger: without secrets.
fn asked(plan: &Plan) -> Value {
    let shows =
        plan.shows().iter().map(|(path, writable)| json!([shown_path(path), if *writable { "write" } else { "read" }]));
    json!({
        "command": redacted(plan),
        "paths": shows.collect::<Vec<_>>(),
        "env": plan.asked().iter().map(|name| shown(name.as_bytes())).collect::<Vec<_>>(),
    })
}

/// A command without its secrets.
pub(crate) fn redacted(plan: &Plan) -> Vec<String> {
    redact::command(&plan.argv().iter().map(|word| shown(word.as_bytes())).collect::<Vec<_>>())
}

/// Whether anything can run with what a lease grants. The disk of a session is as large as it is, and cannot be less for one
/// command.
fn enough(plan: &Plan, granted: &LeaseLimits) -> Result<(), Refusal> {
    let (asked, limits) = (plan.limits(), within(plan.limits(), granted));
    if plan.is_exec() && limits.disk < asked.disk {
        return Err(Refusal::Limit(format!("the session's disk is {}, and it grants {}", asked.disk, limits.disk)));
    }
    limits.check().map_err(|error| Refusal::Limit(error.to_string()))
}

/// The first path that would be seen although it is denied: below one that is shown, and not covered.
fn uncovered(plan: &Plan, scope: &PathScope) -> Option<String> {
    for denied in &scope.deny {
        for path in match found(denied) {
            Some(paths) => paths,
            None => return Some(format!("{denied} (it stands for too many paths)")),
        } {
            let is_shown = plan.shows().iter().any(|(shown, _)| path.starts_with(shown));
            let is_covered = plan.hidden().iter().any(|hidden| path.starts_with(hidden));
            if is_shown && !is_covered && scope.access(&path) == Access::None {
                return Some(shown_path(&path));
            }
        }
    }
    None
}

/// The paths a pattern stands for now; none if there are too many to tell.
fn found(place: &Place) -> Option<Vec<PathBuf>> {
    let mut paths = vec![place.fixed()];
    for part in place.open() {
        let mut next = Vec::new();
        for path in &paths {
            match part {
                Some(name) => next.push(path.join(OsStr::from_bytes(name))),
                None => next.extend(fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path())),
            }
            if next.len() > PATHS_MAX {
                return None;
            }
        }
        paths = next;
    }
    paths.retain(|path| fs::symlink_metadata(path).is_ok());
    Some(paths)
}

/// What a lease's scope means for a cell.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct View {
    /// To be shown at their own paths, if nothing else was asked for; and whether they may be written.
    pub show: Vec<(PathBuf, bool)>,
    /// To be covered.
    pub hide: Vec<PathBuf>,
}

/// What a lease says is to be seen. Nothing of the lease is believed yet: the gate checks it, and the plan against it.
pub fn view(text: &[u8], repos: &Repos) -> View {
    let Some(scope) = Lease::read(text).ok().and_then(|lease| lease.terms().paths(repos).ok()) else {
        return View::default();
    };
    let real = |path: PathBuf| fs::canonicalize(path).ok().filter(|path| path.parent().is_some());
    let all = |places: &[Place]| -> Vec<PathBuf> {
        places.iter().flat_map(|place| found(place).unwrap_or_default()).filter_map(real).collect()
    };
    let hide: Vec<PathBuf> = all(&scope.deny).into_iter().filter(|path| scope.access(path) == Access::None).collect();
    let mut show: Vec<(PathBuf, bool)> = Vec::new();
    let write = all(&scope.write).into_iter().map(|path| (path, true));
    for (path, writable) in write.chain(all(&scope.read).into_iter().map(|path| (path, false))) {
        let is_granted = scope.access(&path) >= if writable { Access::Write } else { Access::Read };
        let is_there =
            show.iter().any(|(above, above_writable)| path.starts_with(above) && *above_writable >= writable);
        if is_granted && !is_there {
            show.push((path, writable));
        }
    }
    // The outer ones first: an inner one is mounted upon them.
    show.sort();
    View { show, hide }
}
