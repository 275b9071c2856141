//! `hotcell lease`: permission to run commands, for a while.

use std::ffi::OsStr;

use hotcell_authority::{Ask, Audience, Lease, LeaseLimits, Scope, Terms};
use hotcell_base::text::shown;
use hotcell_base::units::show_duration;
use hotcell_cell::Host;
use hotcell_gate::leases::{self, IssueError, Issued, Wish};
use hotcell_gate::{Authority, Home};
use hotcell_store::{LeaseFilter, LeaseRow};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use crate::cli::authority::{
    LeaseArgs, LeaseAttenuateArgs, LeaseCommand, LeaseIssueArgs, LeaseListArgs, LeaseRevokeArgs, LeaseVerifyArgs,
    TermsArgs,
};
use crate::error::{Failure, lease_hint};
use crate::policy::{Words, find};
use crate::screen;

pub(crate) fn lease(host: &Host, home: &Home, command: &LeaseCommand) -> Result<u8, Failure> {
    match command {
        LeaseCommand::Issue(args) => issue(home, args),
        LeaseCommand::Attenuate(args) => attenuate(home, args),
        LeaseCommand::Verify(args) => verify(host, home, args),
        LeaseCommand::Show(args) => show(home, args),
        LeaseCommand::List(args) => list(home, args),
        LeaseCommand::Revoke(args) => revoke(home, args),
    }
}

fn user() -> String {
    std::env::var("USER").ok().filter(|name| !name.is_empty()).unwrap_or_else(|| "owner".to_owned())
}

/// Minutes as they were asked for, to the second.
fn lasts(minutes: f64) -> SignedDuration {
    SignedDuration::try_from_secs_f64((minutes * 60.0).min(1e15)).unwrap_or(SignedDuration::MAX)
}

fn issue(home: &Home, args: &LeaseIssueArgs) -> Result<u8, Failure> {
    let terms = &args.terms;
    if terms.command.is_empty() {
        return Err(Failure::Usage {
            message: "a lease names at least one command".to_owned(),
            hint: "say which: hotcell lease issue --command 'pytest -q **' --path DIR".to_owned(),
        });
    }
    let authority = Authority::open(home)?;
    let audience = match &args.audience {
        Some(home) => Audience { home: Some(home.clone()), host: None, boot: None },
        None => authority.here().clone(),
    };
    let wish = Wish {
        terms: Terms {
            capability: args.capability.clone().unwrap_or_default(),
            scope: scope(terms),
            limits: terms.limits(LeaseLimits::default()),
        },
        lasts: lasts(terms.minutes.unwrap_or(10.0)),
        intent_id: terms.intent.clone(),
        actor: terms.actor.clone().unwrap_or_else(user),
        audience,
        parent: None,
    };
    let issued = authority.leases().issue(wish)?;
    say_issued(home, &issued, terms.json)
}

fn scope(terms: &TermsArgs) -> Scope {
    Scope {
        paths_allowlist: terms.path.clone(),
        paths_writable: terms.write.clone(),
        paths_denylist: terms.deny.clone(),
        commands_allowlist: terms.command.clone(),
        env_allowlist: terms.env.clone(),
        ..Scope::default()
    }
}

/// What is not said is as it is in the parent; what is said is checked against it.
fn attenuate(home: &Home, args: &LeaseAttenuateArgs) -> Result<u8, Failure> {
    let authority = Authority::open(home)?;
    let text = leases::text(home, &args.lease).map_err(IssueError::Parent)?;
    let checked = authority.leases().check(&text, None, &json!({ "attenuate": true }))?;
    let valid = checked.map_err(IssueError::Parent)?;
    let (parent, terms) = (valid.lease().clone(), &args.terms);
    let mut asked = scope(terms);
    let old = &parent.scope;
    if asked.commands_allowlist.is_empty() {
        asked.commands_allowlist.clone_from(&old.commands_allowlist);
    }
    if asked.paths_allowlist.is_empty() && asked.paths_writable.is_empty() {
        asked.paths_allowlist.clone_from(&old.paths_allowlist);
        asked.paths_writable.clone_from(&old.paths_writable);
    }
    if asked.env_allowlist.is_empty() {
        asked.env_allowlist.clone_from(&old.env_allowlist);
    }
    let added = asked.paths_denylist.into_iter().filter(|path| !old.paths_denylist.contains(path));
    asked.paths_denylist = old.paths_denylist.iter().cloned().chain(added).collect();
    let left = parent.expires_at.duration_since(Timestamp::now());
    let wish = Wish {
        terms: Terms { capability: parent.capability.clone(), scope: asked, limits: terms.limits(parent.limits) },
        // To the second before, as the beginning of a lease is written.
        lasts: terms.minutes.map_or(left, lasts).min(left),
        intent_id: terms.intent.clone().or_else(|| parent.intent_id.clone()),
        actor: terms.actor.clone().unwrap_or_else(|| parent.actor.clone()),
        audience: parent.audience.clone(),
        parent: Some(parent),
    };
    let issued = authority.leases().issue(wish)?;
    say_issued(home, &issued, terms.json)
}

fn say_issued(home: &Home, issued: &Issued, as_json: bool) -> Result<u8, Failure> {
    let lease = &issued.lease;
    if let Some(asked) = issued.clamped_from {
        screen::note(&format!(
            "clamped  {} was asked for; the capability {} gives at most {}",
            span(asked),
            lease.capability,
            span(lease.lasts())
        ));
    }
    if as_json {
        screen::answer(&issued.text)?;
        return Ok(0);
    }
    screen::answer(format!("{}\n", lease.lease_id))?;
    screen::note(&format!(
        "issued   until {} ({}), {} runs, under {}\n         {}\n         use it: hotcell run --lease {} -- COMMAND",
        lease.expires_at,
        span(lease.lasts()),
        lease.limits.runs_max,
        lease.capability,
        leases::path(home, &lease.lease_id).display(),
        lease.lease_id,
    ));
    Ok(0)
}

fn span(time: SignedDuration) -> String {
    std::time::Duration::try_from(time).map_or_else(|_| "no time".to_owned(), show_duration)
}

fn verify(host: &Host, home: &Home, args: &LeaseVerifyArgs) -> Result<u8, Failure> {
    let authority = Authority::open(home)?;
    let checked = match authority.leases().find(&args.lease, &Value::Null)? {
        Ok(text) => {
            let words = Words::new(host, &args.command);
            let lookup = |word: &str| find(host, OsStr::new(word));
            let ask = Ask { command: words.command(), lookup: &lookup, paths: &[], env: &[] };
            let ask = (!args.command.is_empty()).then_some(&ask);
            let shown: Vec<String> = args.command.iter().map(|word| shown(word.as_encoded_bytes())).collect();
            let asked = json!({ "command": hotcell_ledger::redact::command(&shown) });
            authority.leases().check(&text, ask, &asked)?
        }
        Err(refusal) => Err(refusal),
    };
    match checked {
        Ok(valid) => {
            let lease = valid.lease();
            let left = span(SignedDuration::from_secs(lease.expires_at.duration_since(Timestamp::now()).as_secs()));
            if args.json {
                let object = json!({ "valid": true, "lease_id": lease.lease_id, "expires_at": lease.expires_at, "reason": "Valid" });
                screen::answer(format!("{object:#}\n"))?;
            } else {
                screen::answer(format!("Valid: {}, signed by {}, for {left} more\n", lease.lease_id, lease.sig.kid))?;
            }
            Ok(0)
        }
        Err(refusal) => {
            let cause = std::error::Error::source(&refusal).map(ToString::to_string);
            if args.json {
                let object = json!({
                    "valid": false, "reason": refusal.to_string(), "code": refusal.code(), "cause": cause, "hint": lease_hint(&refusal),
                });
                screen::answer(format!("{object:#}\n"))?;
            } else {
                screen::answer(format!("{refusal}\n"))?;
                let cause = cause.map(|cause| format!("  cause: {cause}\n")).unwrap_or_default();
                screen::note(&format!("{cause}hint: {}", lease_hint(&refusal)));
            }
            Ok(1)
        }
    }
}

fn show_lease(lease: &Lease, row: Option<&LeaseRow>) -> String {
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut add = |name: &str, value: String| rows.push(vec![name.to_owned(), value]);
    add("lease", lease.lease_id.to_string());
    add("status", status(lease.issued_at, lease.expires_at, row).to_owned());
    add("for", shown(&lease.actor));
    if let Some(intent) = &lease.intent_id {
        add("intent", shown(intent));
    }
    add("capability", shown(&lease.capability));
    add("issued", format!("{} by {}", lease.issued_at, lease.sig.kid));
    add("expires", lease.expires_at.to_string());
    let scope = &lease.scope;
    for (name, values) in [
        ("command", scope.commands_allowlist.iter().map(|command| shown(command.to_string())).collect::<Vec<_>>()),
        ("read", scope.paths_allowlist.iter().map(|path| shown(path.to_string())).collect()),
        ("write", scope.paths_writable.iter().map(|path| shown(path.to_string())).collect()),
        ("deny", scope.paths_denylist.iter().map(|path| shown(path.to_string())).collect()),
        ("env", scope.env_allowlist.iter().map(shown).collect()),
    ] {
        for value in values {
            add(name, value);
        }
    }
    add("network", "deny_all".to_owned());
    for (name, value) in lease.limits.listed() {
        add(
            "limit",
            if name == "cpu_quota" { format!("{name} {}", lease.limits.cpu_quota) } else { format!("{name} {value}") },
        );
    }
    if let Some(row) = row {
        add("runs", format!("{} of {} used", row.runs_used, row.runs_max));
    }
    add("policy", lease.policy_digest.clone());
    if let Some(parent) = &lease.parent {
        add("made of", parent.lease_id.to_string());
    }
    for cosigner in &lease.cosigners {
        add("approved", format!("{} {} by {}", cosigner.timestamp, shown(&cosigner.id), cosigner.sig.kid));
    }
    screen::table(&rows)
}

/// In a word; a lease that was changed may say what it likes, which `verify` finds.
fn status(issued_at: Timestamp, expires_at: Timestamp, row: Option<&LeaseRow>) -> &'static str {
    let now = Timestamp::now();
    let is_revoked = row.is_some_and(|row| row.revoked_at.is_some());
    match () {
        () if is_revoked => "revoked",
        () if expires_at <= now => "expired",
        () if issued_at > now => "pending",
        () => "active",
    }
}

fn show(home: &Home, args: &LeaseArgs) -> Result<u8, Failure> {
    let not_found = |refusal: hotcell_authority::Refusal| Failure::Refused {
        message: format!("`{}`: {refusal}", shown(&args.lease)),
        hint: lease_hint(&refusal),
    };
    let text = leases::told_text(home, &args.lease).map_err(not_found)?;
    if args.json {
        screen::answer(&text)?;
        return Ok(0);
    }
    let lease = Lease::read(&text).map_err(|error| not_found(error.into()))?;
    let row = hotcell_gate::authority::store(home).and_then(|store| store.lease(&lease.lease_id));
    let row = row.map_err(hotcell_gate::AuthorityError::from)?;
    screen::answer(show_lease(&lease, row.as_ref()))?;
    Ok(0)
}

fn list(home: &Home, args: &LeaseListArgs) -> Result<u8, Failure> {
    let filter =
        LeaseFilter { self_issued: args.all, active_at: (!args.all).then(Timestamp::now), limit: Some(args.limit) };
    let rows = hotcell_gate::authority::store(home).and_then(|store| store.leases(&filter));
    let rows = rows.map_err(hotcell_gate::AuthorityError::from)?;
    let time = |text: &str| text.parse::<Timestamp>().unwrap_or(Timestamp::UNIX_EPOCH);
    let state = |row: &LeaseRow| status(time(&row.issued_at), time(&row.expires_at), Some(row));
    if args.json {
        let list: Vec<Value> = rows
            .iter()
            .map(|row| {
                json!({
                    "lease_id": row.lease_id, "status": state(row), "actor": row.actor, "intent_id": row.intent_id,
                    "capability": row.capability, "issued_at": row.issued_at, "expires_at": row.expires_at,
                    "time_remaining_s": time(&row.expires_at).duration_since(Timestamp::now()).as_secs().max(0),
                    "parent": row.parent, "runs_used": row.runs_used, "runs_max": row.runs_max,
                    "self_issued": row.self_issued, "revoked_at": row.revoked_at, "commands": row.commands,
                })
            })
            .collect();
        screen::answer(format!("{:#}\n", Value::from(list)))?;
        return Ok(0);
    }
    if rows.is_empty() {
        screen::note(
            "no leases that hold now; see the others: hotcell lease list --all; issue one: hotcell lease issue --help",
        );
        return Ok(0);
    }
    let mut table = vec![["LEASE", "STATUS", "FOR", "EXPIRES", "RUNS", "COMMANDS"].map(str::to_owned).to_vec()];
    for row in &rows {
        let commands = row.commands.join(", ");
        let commands: String =
            if commands.chars().count() > 50 { commands.chars().take(49).chain(['…']).collect() } else { commands };
        table.push(vec![
            row.lease_id.clone(),
            state(row).to_owned(),
            shown(&row.actor),
            row.expires_at.clone(),
            format!("{}/{}", row.runs_used, row.runs_max),
            shown(commands),
        ]);
    }
    screen::answer(screen::table(&table))?;
    Ok(0)
}

fn revoke(home: &Home, args: &LeaseRevokeArgs) -> Result<u8, Failure> {
    let authority = Authority::open(home)?;
    authority.leases().revoke(&args.lease, args.reason.as_deref())?;
    let below = authority.with_store(|store| store.descendants(&args.lease))?;
    if args.json {
        screen::answer(format!("{:#}\n", json!({ "lease_id": args.lease, "revoked": true, "descendants": below })))?;
    } else {
        screen::answer(format!("{} is revoked\n", args.lease))?;
        if !below.is_empty() {
            screen::note(&format!("         with it {} that were made of it: {}", below.len(), below.join(", ")));
        }
    }
    Ok(0)
}
