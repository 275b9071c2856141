//! Every reason, in its order; every byte of a lease; and leases made of leases.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use jiff::SignedDuration;
use proptest::prelude::*;

use super::*;
use crate::command::CommandPattern;
use crate::key::SecretKey;
use crate::lease::{Draft, Parent, Scope, Terms};

const NOW: i64 = 1_800_000_000;

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(NOW + second).expect("a time")
}

fn id(letter: u64) -> LeaseId {
    LeaseId::new("20270115-080000", letter)
}

const POLICY: &str = r#"
version = 1
[phases.staging]
status = "enabled"
why = "tests"
[phases.production]
status = "pending"
why = "tests"
[repos]
calyx = "/srv/calyx"
[groups.run]
why = "tests"
commands = ["pytest **", "python3 **"]
deny = ["python3 -c **"]
allows = ["pytest -q"]
refuses = ["python3 -c x", "id"]
[capabilities.exec_staging]
why = "tests"
phase = "staging"
groups = ["run"]
paths_allowlist = ["/srv", "/data"]
paths_writable = ["/srv/calyx/out"]
paths_denylist = ["/srv/calyx/secrets"]
env_allowlist = ["PYTHONPATH", "CI_*"]
limits = { mem_quota_mb = 4096, runs_max = 10 }
[capabilities.deploy]
why = "tests"
phase = "production"
groups = ["run"]
[capabilities.two_keys]
why = "tests"
phase = "staging"
groups = ["run"]
approvals = ["human", "reviewer"]
"#;

/// A world with keys, a policy, and what is known of leases.
struct World {
    issuer: SecretKey,
    human: SecretKey,
    reviewer: SecretKey,
    trust: Option<TrustStore>,
    policy: Policy,
    here: Audience,
    now: Timestamp,
    revoked: Vec<LeaseId>,
    used: BTreeMap<LeaseId, u32>,
    texts: BTreeMap<LeaseId, Vec<u8>>,
}

impl Known for World {
    fn is_revoked(&self, id: &LeaseId) -> bool {
        self.revoked.contains(id)
    }
    fn runs_used(&self, id: &LeaseId) -> u32 {
        self.used.get(id).copied().unwrap_or(0)
    }
    fn text(&self, id: &LeaseId) -> Option<Vec<u8>> {
        self.texts.get(id).cloned()
    }
}

impl World {
    fn new() -> World {
        let [issuer, human, reviewer] = [1, 2, 3].map(|seed| SecretKey::from_seed(&[seed; 32]));
        let mut trust = TrustStore::default();
        for (key, role) in [(&issuer, Role::Issuer), (&human, Role::Human), (&reviewer, Role::Reviewer)] {
            trust.trust(key.public(), role, role.name().to_owned(), at(-1000), None).expect("new");
        }
        let here = Audience { home: Some("h".into()), host: Some("m".into()), boot: Some("b".into()) };
        World {
            issuer,
            human,
            reviewer,
            trust: Some(trust),
            policy: Policy::read(POLICY.as_bytes()).expect("a policy"),
            here,
            now: at(60),
            revoked: Vec::new(),
            used: BTreeMap::new(),
            texts: BTreeMap::new(),
        }
    }

    fn draft(&self, letter: u64) -> Draft {
        let patterns = |texts: &[&str]| texts.iter().map(|text| text.parse().expect("a path")).collect();
        let scope = Scope {
            paths_allowlist: patterns(&["repo://calyx/tools/*", "/data"]),
            paths_writable: patterns(&["repo://calyx/out"]),
            paths_denylist: patterns(&["repo://calyx/secrets"]),
            commands_allowlist: vec![
                "pytest -q **".parse().expect("a pattern"),
                "python3 **".parse().expect("a pattern"),
            ],
            env_allowlist: vec!["PYTHONPATH".to_owned()],
            network: crate::Network::DenyAll,
        };
        let limits = LeaseLimits { runs_max: 3, ..LeaseLimits::default() };
        Draft {
            lease_id: id(letter),
            intent_id: Some("INT-20270115-001".to_owned()),
            actor: "tests".to_owned(),
            audience: self.here.clone(),
            issued_at: at(0),
            expires_at: at(300),
            terms: Terms { capability: "exec_staging".to_owned(), scope, limits },
            policy_digest: self.policy.digest().to_owned(),
            parent: None,
        }
    }

    fn lease(&self, letter: u64) -> Lease {
        self.draft(letter).sign(&self.issuer).expect("a lease")
    }

    fn circumstances(&self) -> Circumstances<'_> {
        Circumstances { known: self, trust: self.trust.as_ref(), policy: &self.policy, here: &self.here, now: self.now }
    }

    fn verify(&self, text: &[u8]) -> Result<ValidLease, Refusal> {
        verify(text, None, &self.circumstances())
    }

    #[track_caller]
    fn refuses(&self, lease: &Lease, reason: &str) {
        let refusal = self.verify(&lease.to_text()).expect_err("refused");
        assert_eq!(refusal.to_string(), reason);
    }

    fn ask(&self, lease: &Lease, line: &str, paths: &[(&str, Access)], env: &[&str]) -> Result<ValidLease, Refusal> {
        let words: Vec<Vec<u8>> = line.split(' ').map(|word| word.as_bytes().to_vec()).collect();
        let program = Path::new("/usr/bin").join(line.split(' ').next().expect("a word"));
        let lookup = |word: &str| Some(Path::new("/usr/bin").join(word));
        let paths: Vec<(PathBuf, Access)> = paths.iter().map(|(path, access)| (PathBuf::from(path), *access)).collect();
        let env: Vec<Vec<u8>> = env.iter().map(|name| name.as_bytes().to_vec()).collect();
        let command = Command { words: &words, program: &program };
        let ask = Ask { command, lookup: &lookup, paths: &paths, env: &env };
        verify(&lease.to_text(), Some(&ask), &self.circumstances())
    }
}

#[test]
fn a_good_lease_holds_from_its_first_second_to_before_its_last() {
    let mut world = World::new();
    let lease = world.lease(1);
    for (second, expected) in
        [(-1, Some("Lease issued in future")), (0, None), (299, None), (300, Some("Lease expired"))]
    {
        world.now = at(second);
        let refusal = world.verify(&lease.to_text()).err().map(|refusal| refusal.to_string());
        assert_eq!(refusal.as_deref(), expected, "at {second}");
    }
}

#[test]
fn the_first_reason_is_the_one_that_is_given() {
    // Each world has all the defects of those below it, and the lease as well.
    let mut world = World::new();
    let mut draft = world.draft(1);
    draft.audience.home = Some("another".into());
    let lease = draft.clone().sign(&world.issuer).expect("a lease");
    world.refuses(&lease, "Lease is for another home");
    draft.policy_digest = "sha256:other".into();
    let lease = draft.clone().sign(&world.issuer).expect("a lease");
    world.refuses(&lease, "Policy digest mismatch");
    world.revoked.push(id(1));
    world.refuses(&lease, "Lease revoked");
    world.now = at(1000);
    world.refuses(&lease, "Lease expired");
    world.now = at(-10);
    world.refuses(&lease, "Lease issued in future");
    let mut forged = lease.clone();
    forged.actor = "somebody else".into();
    world.refuses(&forged, "Invalid signature");
    let stranger = SecretKey::from_seed(&[9; 32]);
    let foreign = draft.clone().sign(&stranger).expect("a lease");
    world.refuses(&foreign, &format!("Unknown key ID: {}", stranger.id()));
    world.trust = None;
    world.refuses(&foreign, "Trust keys file not found");
    assert_eq!(world.verify(b"{}").expect_err("refused").to_string(), "Lease not readable");
    assert_eq!(Refusal::NotFound.to_string(), "Lease file not found");
}

#[test]
fn only_keys_that_may_issue_do() {
    let mut world = World::new();
    let by_reviewer = world.draft(1).sign(&world.reviewer).expect("a lease");
    world.refuses(&by_reviewer, &format!("Key {} is a reviewer's, who issues no leases", world.reviewer.id()));
    assert!(world.verify(&world.draft(1).sign(&world.human).expect("a lease").to_text()).is_ok());
    let lease = world.lease(1);
    let mut trust = world.trust.clone().expect("a store");
    trust.rotate(world.issuer.id(), SecretKey::from_seed(&[4; 32]).public(), at(30)).expect("known");
    world.trust = Some(trust.clone());
    assert!(world.verify(&lease.to_text()).is_ok(), "issued before the rotation");
    let mut late = world.draft(2);
    late.issued_at = at(40);
    world.refuses(
        &late.sign(&world.issuer).expect("a lease"),
        &format!("Key {} was not valid when the lease was issued", world.issuer.id()),
    );
    trust.rotate(SecretKey::from_seed(&[4; 32]).id(), SecretKey::from_seed(&[5; 32]).public(), at(50)).expect("known");
    world.trust = Some(trust.clone());
    world.refuses(&lease, &format!("Key {} is retired", world.issuer.id()));
    trust.revoke(world.issuer.id(), at(55)).expect("known");
    world.trust = Some(trust);
    world.refuses(&lease, &format!("Key {} was revoked", world.issuer.id()));
}

#[test]
fn whoever_signs_nothing_goes_beyond_the_policy() {
    let world = World::new();
    let wider = |change: &dyn Fn(&mut Draft), reason: &str| {
        let mut draft = world.draft(1);
        change(&mut draft);
        let lease = draft.sign(&world.human).expect("a lease");
        world.refuses(&lease, &format!("Not in policy: {reason}"));
    };
    wider(&|draft| draft.terms.capability = "root".into(), "capability `root`");
    wider(&|draft| draft.terms.capability = "deploy".into(), "the phase `production` is not enabled");
    wider(&|draft| draft.terms.scope.commands_allowlist.push("**".parse().expect("one")), "the command `**`");
    wider(&|draft| draft.terms.scope.paths_allowlist.push("/etc".parse().expect("one")), "the path `/etc`");
    wider(&|draft| draft.terms.scope.paths_writable.push("/data".parse().expect("one")), "the path `/data`");
    wider(
        &|draft| draft.terms.scope.paths_allowlist.push("repo://calyx/secrets/x".parse().expect("one")),
        "the path `/srv/calyx/secrets/x`",
    );
    wider(&|draft| draft.terms.scope.env_allowlist.push("HOME".into()), "the variable `HOME`");
    wider(&|draft| draft.terms.limits.mem_quota_mb = 5000, "mem_quota_mb 5000, which is at most 4096");
    wider(&|draft| draft.terms.limits.runs_max = 11, "runs_max 11, which is at most 10");
    wider(&|draft| draft.expires_at = at(601), "so long a time");
}

#[test]
fn what_may_be_done_is_what_both_lease_and_policy_allow() {
    let world = World::new();
    let lease = world.lease(1);
    let ok = |line: &str, paths: &[(&str, Access)], env: &[&str]| world.ask(&lease, line, paths, env).is_ok();
    assert!(ok(
        "pytest -q tests",
        &[("/srv/calyx/tools/x", Access::Read), ("/srv/calyx/out/y", Access::Write)],
        &["PYTHONPATH"]
    ));
    let refusal = |line: &str, paths: &[(&str, Access)], env: &[&str]| {
        world.ask(&lease, line, paths, env).expect_err("refused").to_string()
    };
    assert_eq!(refusal("pytest -x", &[], &[]), "Command not in allowlist: pytest -x");
    assert_eq!(refusal("bash -c id", &[], &[]), "Command not in allowlist: bash -c id");
    assert_eq!(refusal("python3 -c id", &[], &[]), "Command not in allowlist: python3 -c id", "the policy denies it");
    assert_eq!(refusal("pytest -q", &[("/etc/passwd", Access::Read)], &[]), "Path not in allowlist: /etc/passwd");
    assert_eq!(
        refusal("pytest -q", &[("/srv/calyx/secrets/k", Access::Read)], &[]),
        "Path not in allowlist: /srv/calyx/secrets/k"
    );
    assert_eq!(refusal("pytest -q", &[("/data/x", Access::Write)], &[]), "Path not writable under lease: /data/x");
    assert_eq!(refusal("pytest -q", &[], &["LD_PRELOAD"]), "Env not in allowlist: LD_PRELOAD");
    // The command before the path, the path before the variable.
    assert!(refusal("id", &[("/etc", Access::Read)], &["X"]).starts_with("Command"));
    assert!(refusal("pytest -q", &[("/etc", Access::Read)], &["X"]).starts_with("Path"));
}

#[test]
fn runs_are_counted() {
    let mut world = World::new();
    let lease = world.lease(1);
    world.used.insert(id(1), 2);
    assert!(world.verify(&lease.to_text()).is_ok());
    world.used.insert(id(1), 3);
    world.refuses(&lease, "Run count exhausted");
}

#[test]
fn approvals_are_by_different_people_and_all_of_them_are_good() {
    let world = World::new();
    let mut draft = world.draft(1);
    draft.terms.capability = "two_keys".into();
    draft.terms.scope = Scope { commands_allowlist: vec!["pytest -q".parse().expect("a pattern")], ..Scope::default() };
    let lease = draft.sign(&world.issuer).expect("a lease");
    world.refuses(&lease, "Missing human cosigner");
    let mut one = lease.clone();
    one.cosign(&world.human, Role::Human, "ann".into(), at(10)).expect("signed");
    world.refuses(&one, "Missing reviewer cosigner");
    let mut two = one.clone();
    two.cosign(&world.reviewer, Role::Reviewer, "bob".into(), at(20)).expect("signed");
    assert!(world.verify(&two.to_text()).is_ok());
    let mut twice = one.clone();
    twice.cosign(&world.human, Role::Human, "ann".into(), at(20)).expect("signed");
    world.refuses(&twice, "Invalid cosignature of ann");
    let mut posing = one.clone();
    posing.cosign(&world.human, Role::Reviewer, "ann".into(), at(20)).expect("signed");
    world.refuses(&posing, "Invalid cosignature of ann");
    let mut changed = two.clone();
    changed.cosigners[1].id = "eve".into();
    world.refuses(&changed, "Invalid cosignature of eve");
    let mut own = lease.clone();
    own.cosign(&world.issuer, Role::Issuer, "ci".into(), at(20)).expect("signed");
    world.refuses(&own, "Invalid cosignature of ci");
    let mut early = lease.clone();
    early.cosign(&world.human, Role::Human, "ann".into(), at(90)).expect("signed");
    world.refuses(&early, "Invalid cosignature of ann");
}

#[test]
fn every_byte_counts() {
    let mut world = World::new();
    let mut draft = world.draft(1);
    draft.terms.capability = "two_keys".into();
    draft.terms.scope = Scope { commands_allowlist: vec!["pytest -q".parse().expect("one")], ..Scope::default() };
    let mut two_keys = draft.sign(&world.issuer).expect("a lease");
    two_keys.cosign(&world.human, Role::Human, "ann".into(), at(10)).expect("signed");
    two_keys.cosign(&world.reviewer, Role::Reviewer, "bob".into(), at(20)).expect("signed");
    world.texts.insert(id(1), world.lease(1).to_text());
    let child = child(&world, |_| {});
    for lease in [world.lease(1), two_keys, child] {
        let text = lease.to_text();
        assert!(world.verify(&text).is_ok(), "the control: as it is, it holds");
        for idx in 0..text.len() {
            // Each bit, and letters that mean something in JSON.
            let flips = (0..8).map(|bit| text[idx] ^ (1 << bit));
            for byte in flips.chain(*b" \n\t0\"{}[],:") {
                let mut changed = text.clone();
                changed[idx] = byte;
                assert!(changed == text || world.verify(&changed).is_err(), "byte {idx} as {byte:#x}");
            }
            assert!(world.verify(&text[..idx]).is_err(), "cut at {idx}");
            let mut longer = text.clone();
            longer.insert(idx, b' ');
            assert!(world.verify(&longer).is_err(), "a space at {idx}");
        }
        let twice = String::from_utf8(text).expect("text").replacen("{", "{\n  \"actor\": \"eve\",", 1);
        assert!(world.verify(twice.as_bytes()).is_err(), "a field twice");
    }
}

#[test]
fn another_way_of_signing_is_none() {
    let world = World::new();
    let text = String::from_utf8(world.lease(1).to_text()).expect("text");
    for alg in ["none", "None", "HS256", "ed25519", ""] {
        let changed = text.replace("\"Ed25519\"", &format!("\"{alg}\""));
        assert_eq!(world.verify(changed.as_bytes()).expect_err("refused").to_string(), "Lease not readable", "{alg}");
    }
    // Signed by one that is trusted, in the name of another that is.
    let mut confused = world.lease(1);
    confused.sig.kid = world.human.id().clone();
    world.refuses(&confused, "Invalid signature");
}

fn child(world: &World, change: impl Fn(&mut Draft)) -> Lease {
    let parent = Lease::read(&world.texts[&id(1)]).expect("a lease");
    let mut draft = world.draft(2);
    draft.issued_at = at(10);
    draft.expires_at = at(200);
    draft.parent = Some(Parent { lease_id: id(1), digest: parent.digest() });
    change(&mut draft);
    draft.sign(&world.issuer).expect("a lease")
}

#[test]
fn a_child_ends_with_its_parent_and_grants_no_more() {
    let mut world = World::new();
    let parent = world.lease(1);
    world.texts.insert(id(1), parent.to_text());
    let good = child(&world, |_| {});
    assert_eq!(world.verify(&good.to_text()).expect("it holds").ancestors(), [(id(1), 3)]);
    let name = id(1);
    let wider = |change: &dyn Fn(&mut Draft), reason: &str| {
        world.refuses(&child(&world, change), &format!("Parent lease {name}: does not grant {reason}"));
    };
    wider(
        &|draft| draft.terms.scope.commands_allowlist.push("pytest **".parse().expect("one")),
        "the command `pytest **`",
    );
    wider(&|draft| draft.terms.scope.paths_allowlist.push("/srv/x".parse().expect("one")), "its paths");
    wider(&|draft| draft.terms.scope.env_allowlist.push("CI_X".into()), "the variable `CI_X`");
    wider(&|draft| draft.terms.limits.runs_max = 4, "its runs_max: 4, and not 3");
    wider(&|draft| draft.expires_at = at(301), &format!("its end, {}, and not {}", at(301), at(300)));
    wider(&|draft| draft.issued_at = at(-1), &format!("its beginning, {}, and not {}", at(-1), at(0)));
    wider(&|draft| draft.audience.boot = None, "where it may be used");
    world.used.insert(id(1), 3);
    world.refuses(&good, &format!("Parent lease {name}: Run count exhausted"));
    world.used.clear();
    world.revoked.push(id(1));
    world.refuses(&good, &format!("Parent lease {name}: Lease revoked"));
    world.revoked.clear();
    let mut other = parent.clone();
    other.cosigners.clear();
    other.sig.value = world.issuer.sign(b"something else");
    world.texts.insert(id(1), other.to_text());
    world.refuses(&good, &format!("Parent lease {name}: is another one"));
    world.texts.clear();
    world.refuses(&good, &format!("Parent lease {name}: Lease file not found"));
}

#[test]
fn a_lease_of_no_time_or_no_limit_cannot_be_made() {
    let world = World::new();
    let refused = |change: &dyn Fn(&mut Draft)| {
        let mut draft = world.draft(1);
        change(&mut draft);
        draft.sign(&world.issuer).expect_err("refused").to_string()
    };
    assert_eq!(refused(&|draft| draft.expires_at = draft.issued_at), "a lease lasts for a positive time, and not 0s");
    assert_eq!(
        refused(&|draft| draft.expires_at = draft.issued_at - SignedDuration::from_secs(5)),
        "a lease lasts for a positive time, and not 5s ago"
    );
    assert_eq!(
        refused(&|draft| draft.terms.limits.runs_max = 0),
        "the limit runs_max is 0, with which nothing can run"
    );
    assert_eq!(refused(&|draft| draft.terms.scope.commands_allowlist.clear()), "a lease names at least one command");
}

#[test]
fn the_default_policy_holds_its_own_examples() {
    let policy = Policy::read(crate::DEFAULT_POLICY.as_bytes()).expect("a policy");
    assert_eq!(policy.own().map(|row| row.name), Some("own"));
    for (example, wrong) in [("make -j2 all", "bash"), ("git push", "git status")] {
        assert!(crate::DEFAULT_POLICY.contains(example));
        let text = crate::DEFAULT_POLICY.replace(example, wrong);
        assert!(matches!(Policy::read(text.as_bytes()), Err(crate::PolicyError::Example { .. })), "{wrong}");
    }
    let unknown = crate::DEFAULT_POLICY.replace("minutes_max", "minuets_max");
    assert!(matches!(Policy::read(unknown.as_bytes()), Err(crate::PolicyError::Toml(_))));
    let version = crate::DEFAULT_POLICY.replace("version = 1", "version = 2");
    assert!(matches!(Policy::read(version.as_bytes()), Err(crate::PolicyError::Version(2))));
}

/// Changes of a lease, some of which make it narrower and some of which do not.
#[derive(Clone, Debug)]
enum Change {
    Command(CommandPattern),
    DropCommand,
    Path(String),
    DropPath,
    Write(String),
    Deny(String),
    Env(String),
    Memory(u64),
    Runs(u32),
    End(i64),
}

fn a_change() -> impl Strategy<Value = Change> {
    let commands = ["pytest -q", "pytest -q **", "pytest **", "python3 x", "python3 **", "pytest -q a *"];
    let paths = [
        "/srv/calyx/tools",
        "/srv/calyx/tools/*",
        "/srv/calyx/tools/a",
        "/data",
        "/data/x",
        "/srv",
        "/srv/calyx/out/z",
        "/srv/calyx/*/a",
        "/srv/calyx/secrets",
    ];
    let path = move || prop::sample::select(paths.to_vec()).prop_map(str::to_owned);
    prop_oneof![
        prop::sample::select(commands.to_vec()).prop_map(|text| Change::Command(text.parse().expect("a pattern"))),
        Just(Change::DropCommand),
        path().prop_map(Change::Path),
        Just(Change::DropPath),
        path().prop_map(Change::Write),
        path().prop_map(Change::Deny),
        prop::sample::select(vec!["PYTHONPATH", "CI_A", "HOME"]).prop_map(|name| Change::Env(name.to_owned())),
        (1_u64..4000).prop_map(Change::Memory),
        (1_u32..5).prop_map(Change::Runs),
        (20_i64..400).prop_map(Change::End),
    ]
}

fn changed(draft: &mut Draft, change: &Change) {
    let scope = &mut draft.terms.scope;
    let path = |text: &String| text.parse().expect("a path");
    match change {
        Change::Command(pattern) => scope.commands_allowlist.push(pattern.clone()),
        Change::DropCommand => scope.commands_allowlist.truncate(1),
        Change::Path(text) => scope.paths_allowlist.push(path(text)),
        Change::DropPath => scope.paths_allowlist.truncate(1),
        Change::Write(text) => scope.paths_writable.push(path(text)),
        Change::Deny(text) => scope.paths_denylist.push(path(text)),
        Change::Env(name) => scope.env_allowlist.push(name.clone()),
        Change::Memory(mb) => draft.terms.limits.mem_quota_mb = *mb,
        Change::Runs(n) => draft.terms.limits.runs_max = *n,
        Change::End(second) => draft.expires_at = at(*second),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    /// Whatever a child is made of: if it holds, then everything it allows was allowed before.
    #[test]
    fn attenuation_never_widens(
        changes in prop::collection::vec(a_change(), 0..4),
        line in prop::sample::select(vec!["pytest -q", "pytest -q a b", "pytest -x", "python3 x", "python3 y z"]),
        path in prop::sample::select(vec!["/srv/calyx/tools/a/b", "/srv/calyx/tools", "/data/x", "/data/y", "/srv/other", "/srv/calyx/out/z", "/srv/calyx/secrets/a", "/srv/calyx/b/a"]),
        writes: bool,
        name in prop::sample::select(vec!["PYTHONPATH", "CI_A", "HOME"]),
        second in 0_i64..400,
    ) {
        let mut world = World::new();
        let parent = world.lease(1);
        world.texts.insert(id(1), parent.to_text());
        let child = child(&world, |draft| changes.iter().for_each(|change| changed(draft, change)));
        world.now = at(second);
        let wanted = if writes { Access::Write } else { Access::Read };
        for paths in [&[(path, wanted)][..], &[]] {
            if let Ok(valid) = world.ask(&child, line, paths, &[name]) {
                let above = world.ask(&parent, line, paths, &[name]);
                prop_assert!(above.is_ok(), "{:?}", above.err());
                prop_assert!(valid.limits().wider_than(&parent.limits).is_none());
                prop_assert!(valid.expires_at() <= parent.expires_at);
            }
        }
    }
}
