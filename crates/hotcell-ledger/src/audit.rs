//! The audit: reads a whole ledger and says whether anything was changed, and what.
//!
//! Works from the lines, the head that was kept apart, public keys, and heads that were kept elsewhere. The chain shows an
//! edit, a deletion, an insertion, a reordering and a splice; the head shows that the end was cut off, that an old copy was put
//! back, or that the whole chain was made anew; its signature shows that it was made anew by somebody else.

use std::collections::{BTreeMap, BTreeSet};

use hotcell_authority::TrustStore;
use serde::Serialize;

use crate::chain::Hash;
use crate::entry::Link;
use crate::head::{Head, HeadFault};

/// What kind of damage it is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Damage {
    /// A line is not JSON of ours.
    Unreadable,
    /// A line is not the one that the next one names.
    Edited,
    /// Lines are missing in the middle.
    Deleted,
    /// Lines are there that were not.
    Inserted,
    /// Lines are in another order.
    Reordered,
    /// Lines are of another ledger.
    Spliced,
    /// Lines are missing at the end, or an old copy was put back.
    Truncated,
    /// The chain holds together, and is not the one that was signed.
    Rewritten,
    /// The head is signed by nobody we trust.
    ForeignHead,
    /// The head was changed.
    ForgedHead,
    /// There is no head.
    MissingHead,
    /// The last lines are covered by no head: a crash, or somebody who has no key.
    Unsigned,
}

impl Damage {
    /// The name for people and programs.
    pub fn name(self) -> &'static str {
        match self {
            Damage::Unreadable => "unreadable",
            Damage::Edited => "edited",
            Damage::Deleted => "deleted",
            Damage::Inserted => "inserted",
            Damage::Reordered => "reordered",
            Damage::Spliced => "spliced",
            Damage::Truncated => "truncated",
            Damage::Rewritten => "rewritten",
            Damage::ForeignHead => "foreign_head",
            Damage::ForgedHead => "forged_head",
            Damage::MissingHead => "missing_head",
            Damage::Unsigned => "unsigned",
        }
    }
}

/// The first thing that is wrong.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    /// What kind.
    pub damage: Damage,
    /// The first line that is not as it was, by its number, where it has one.
    pub seq: Option<u64>,
    /// In words.
    pub why: String,
}

/// What an audit found.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Audit {
    /// How many lines hold together from the beginning.
    pub n_valid: u64,
    /// The hash of the last of them.
    pub hash: Option<Hash>,
    /// The ledger's id.
    pub ledger: Option<String>,
    /// What is wrong, if anything.
    pub finding: Option<Finding>,
}

/// Reads lines, one after the other, and remembers what the heads will ask for.
#[derive(Debug)]
pub struct Auditor {
    next: u64,
    hash: Hash,
    ledger: Option<String>,
    /// Hashes that a head or a witness will ask for.
    asked: BTreeMap<u64, Option<Hash>>,
    /// Everything from the first line that does not fit on, to tell what happened.
    rest: Vec<Option<(u64, Hash, String)>>,
}

impl Auditor {
    /// An audit that will be asked about these heads.
    pub fn new<'a>(heads: impl IntoIterator<Item = &'a Head>) -> Auditor {
        let asked = heads.into_iter().map(|head| (head.seq, None)).collect();
        Auditor { next: 0, hash: Hash::NONE, ledger: None, asked, rest: Vec::new() }
    }

    /// The next line, with its newline: one without was not written whole, or was cut.
    pub fn line(&mut self, line: &[u8]) {
        let text = line.strip_suffix(b"\n");
        let link = text.and_then(|text| serde_json::from_slice::<Link<'_>>(text).ok());
        if !self.rest.is_empty() {
            self.rest.push(link.map(|link| (link.seq, link.prev, link.ledger.into_owned())));
            return;
        }
        match link {
            Some(link)
                if link.seq == self.next
                    && link.prev == self.hash
                    && self.ledger.as_deref().is_none_or(|ledger| ledger == link.ledger) =>
            {
                if self.ledger.is_none() {
                    self.ledger = Some(link.ledger.into_owned());
                }
                self.hash = Hash::of(text.unwrap_or(line));
                if let Some(asked) = self.asked.get_mut(&self.next) {
                    *asked = Some(self.hash);
                }
                self.next += 1;
            }
            link => self.rest.push(link.map(|link| (link.seq, link.prev, link.ledger.into_owned()))),
        }
    }

    /// What is wrong in the chain by itself.
    fn broken(&mut self) -> Option<Finding> {
        let first = self.rest.first()?;
        let next = self.next;
        let finding = |damage, seq, why: String| Some(Finding { damage, seq: Some(seq), why });
        let Some((seq, prev, ledger)) = first else {
            return finding(Damage::Unreadable, next, format!("line {next} cannot be read"));
        };
        if self.ledger.as_ref().is_some_and(|ours| ours != ledger) {
            return finding(Damage::Spliced, next, format!("line {next} is of another ledger, {ledger}"));
        }
        let behind: Vec<u64> = self.rest.iter().flatten().map(|(seq, ..)| *seq).collect();
        let distinct: BTreeSet<u64> = behind.iter().copied().collect();
        let is_twice = distinct.len() < behind.len() || distinct.iter().any(|seq| *seq < next);
        let last = distinct.iter().next_back().copied().unwrap_or(next);
        let is_complete = distinct.len() as u64 == (last + 1).saturating_sub(next);
        match seq {
            _ if is_twice => {
                finding(Damage::Inserted, next.min(*seq), format!("line {} is there more than once", next.min(*seq)))
            }
            seq if *seq != next && is_complete => {
                finding(Damage::Reordered, next, format!("line {seq} is in the place of line {next}"))
            }
            seq if *seq > next => finding(Damage::Deleted, next, format!("lines {next} to {} are missing", seq - 1)),
            // Its number fits and its link does not: the line before was changed, or this one was.
            _ if next == 0 => finding(Damage::Edited, 0, format!("line 0 names {prev} as the one before it")),
            _ => finding(
                Damage::Edited,
                next - 1,
                format!("line {} is not the one that line {next} was written after", next - 1),
            ),
        }
    }

    /// What is to be said of the whole, with the head that was kept apart and those that were kept elsewhere.
    pub fn finish(mut self, head: Option<&Head>, witnesses: &[Head], trust: &TrustStore) -> Audit {
        let finding = self.broken().or_else(|| {
            let heads = head.map(|head| (head, "head")).into_iter();
            let heads = heads.chain(witnesses.iter().map(|witness| (witness, "witness")));
            let Some(head) = head else {
                let why = "there is no head, which says where the ledger ends".to_owned();
                return Some(Finding { damage: Damage::MissingHead, seq: None, why });
            };
            let wrong = heads.filter_map(|(head, name)| self.against(head, name, trust)).next();
            wrong.or_else(|| {
                (self.next > head.seq + 1).then(|| Finding {
                    damage: Damage::Unsigned,
                    seq: Some(head.seq + 1),
                    why: format!("lines {} to {} are covered by no signed head", head.seq + 1, self.next - 1),
                })
            })
        });
        let hash = (self.next > 0).then_some(self.hash);
        Audit { n_valid: self.next, hash, ledger: self.ledger.take(), finding }
    }

    fn against(&self, head: &Head, name: &str, trust: &TrustStore) -> Option<Finding> {
        let finding = |damage, seq, why| Some(Finding { damage, seq, why });
        match head.check(trust) {
            Err(HeadFault::Key(kid)) => {
                return finding(
                    Damage::ForeignHead,
                    None,
                    format!("the {name} is signed by {kid}, which is not trusted"),
                );
            }
            Err(HeadFault::Signature(kid)) => {
                return finding(Damage::ForgedHead, None, format!("the {name}'s signature is not that of {kid}"));
            }
            Ok(()) => {}
        }
        if self.ledger.as_ref().is_some_and(|ledger| *ledger != head.ledger) {
            let why = format!(
                "the {name} is of the ledger {}, and this is {}",
                head.ledger,
                self.ledger.as_deref().unwrap_or_default()
            );
            return finding(Damage::Spliced, Some(0), why);
        }
        if head.seq >= self.next {
            let why = format!("the {name} says that there are {} lines, and there are {}", head.seq + 1, self.next);
            return finding(Damage::Truncated, Some(self.next), why);
        }
        match self.asked.get(&head.seq) {
            Some(Some(found)) if *found != head.hash => finding(
                Damage::Rewritten,
                Some(head.seq),
                format!("line {} is not the one that the {name} was signed for", head.seq),
            ),
            _ => None,
        }
    }
}
