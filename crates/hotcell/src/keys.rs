//! `hotcell key`: who signs, and who is trusted.

use hotcell_authority::{KeyId, PublicKey, Role, Stage, TrustStore};
use hotcell_base::text::shown;
use hotcell_gate::{Authority, AuthorityError, Home, Keys};
use hotcell_ledger::{Event, Ids, News};
use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use crate::cli::authority::KeyCommand;
use crate::error::Failure;
use crate::screen;

pub(crate) fn key(home: &Home, command: &KeyCommand) -> Result<u8, Failure> {
    let keys = Keys::of(home);
    let now = Timestamp::now();
    match command {
        KeyCommand::Init(args) => {
            let role = Role::from(args.role);
            if !role.may_issue() {
                return Err(Failure::Usage {
                    message: "a reviewer's key issues no leases, so nothing could run in this home".to_owned(),
                    hint: "make it a human's or an issuer's, and trust the reviewer's: hotcell key trust".to_owned(),
                });
            }
            let ring = keys.init(role, &args.name, now).map_err(AuthorityError::from)?;
            let (kid, public) = (ring.key.id().clone(), ring.key.public());
            drop(ring);
            tell(home, Event::KeyCreated, &kid, json!({ "role": role, "public": public }))?;
            say(args.json, &kid, "made", &json!({ "role": role, "public": public }))?;
        }
        KeyCommand::List(args) => list(&keys, args.json)?,
        KeyCommand::Rotate(args) => {
            // Opened first: what cannot be told is not done.
            Authority::open(home)?;
            let (old, ring) = keys.rotate(now).map_err(AuthorityError::from)?;
            let (kid, public) = (ring.key.id().clone(), ring.key.public());
            drop(ring);
            tell(home, Event::KeyRotated, &kid, json!({ "old": old, "public": public }))?;
            say(args.json, &kid, "signs from now on", &json!({ "old": old, "public": public }))?;
        }
        KeyCommand::Trust(args) => {
            let public = PublicKey::try_from(args.public.clone()).map_err(|error| Failure::Usage {
                message: format!("`{}`: {error}", shown(&args.public)),
                hint: "print it where it was made: hotcell key list".to_owned(),
            })?;
            let role = Role::from(args.role);
            let until = args.days.map(|days| now + SignedDuration::from_hours(24 * i64::from(days)));
            Authority::open(home)?;
            let kid = keys.trust_key(public, role, &args.name, now, until).map_err(AuthorityError::from)?;
            tell(home, Event::KeyTrusted, &kid, json!({ "role": role, "name": args.name, "until": until }))?;
            say(args.json, &kid, "is trusted", &json!({ "role": role, "name": args.name, "until": until }))?;
        }
        KeyCommand::Revoke(args) => {
            Authority::open(home)?;
            // Somebody has to sign that it is revoked.
            let replaced = if keys.current_id().map_err(AuthorityError::from)?.as_ref() == Some(&args.kid) {
                let (_, ring) = keys.rotate(now).map_err(AuthorityError::from)?;
                let new = ring.key.id().clone();
                drop(ring);
                tell(home, Event::KeyRotated, &new, json!({ "old": args.kid }))?;
                Some(new)
            } else {
                None
            };
            keys.revoke(&args.kid, now).map_err(AuthorityError::from)?;
            tell(home, Event::KeyRevoked, &args.kid, json!({ "replaced_by": replaced }))?;
            say(args.json, &args.kid, "is trusted no more", &json!({ "replaced_by": replaced }))?;
        }
    }
    Ok(0)
}

fn tell(home: &Home, event: Event, kid: &KeyId, details: Value) -> Result<(), Failure> {
    let ids = Ids { kid: Some(kid.clone()), ..Ids::default() };
    Authority::open(home)?.tell(vec![News::new(event, Timestamp::now(), ids, details)])?;
    Ok(())
}

fn say(as_json: bool, kid: &KeyId, what: &str, details: &Value) -> Result<(), Failure> {
    if as_json {
        let mut object = details.clone();
        object["kid"] = kid.as_str().into();
        return screen::answer(format!("{object:#}\n"));
    }
    screen::answer(format!("{kid} {what}\n"))
}

fn list(keys: &Keys, as_json: bool) -> Result<(), Failure> {
    let trust = keys.trust().map_err(AuthorityError::from)?.unwrap_or_default();
    let current = keys.current_id().map_err(AuthorityError::from)?;
    if as_json {
        let list: Vec<Value> = trust
            .keys()
            .map(|(kid, key)| {
                let mut object = serde_json::to_value(key).expect("plain data");
                object["kid"] = kid.as_str().into();
                object["signs"] = (Some(kid) == current.as_ref()).into();
                object
            })
            .collect();
        return screen::answer(format!("{:#}\n", Value::from(list)));
    }
    if trust.keys().next().is_none() {
        screen::note("no keys yet; one is made on first use, or now: hotcell key init");
        return Ok(());
    }
    screen::answer(table(&trust, current.as_ref()))
}

fn table(trust: &TrustStore, current: Option<&KeyId>) -> String {
    let mut rows = vec![["KEY", "ROLE", "NAME", "STAGE", "FROM", "UNTIL", "PUBLIC"].map(str::to_owned).to_vec()];
    for (kid, key) in trust.keys() {
        let stage = match key.stage {
            Stage::Current if Some(kid) == current => "signs",
            Stage::Current => "trusted",
            Stage::Previous => "previous",
            Stage::Retired => "retired",
            Stage::Revoked => "revoked",
        };
        rows.push(vec![
            kid.to_string(),
            key.role.name().to_owned(),
            shown(&key.name),
            stage.to_owned(),
            key.valid_from.to_string(),
            key.valid_until.map(|until| until.to_string()).unwrap_or_default(),
            key.public.to_string(),
        ]);
    }
    screen::table(&rows)
}
