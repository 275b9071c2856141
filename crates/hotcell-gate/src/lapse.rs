//! When a run that was let in must end after all: its lease is over, or was taken back.
//!
//! The end of a lease is a time of the wall clock. That clock can be set, and stands still for no one; so the run is held to the
//! same moment by the clock that cannot be set, and whichever comes first ends it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use hotcell_authority::Refusal;
use hotcell_base::Outcome;
use hotcell_cell::Plan;
use hotcell_cell::limits::LimitTooSmall;
use jiff::Timestamp;

use crate::door::Admitted;
use crate::home::Home;
use crate::leases::{revocation, within};
use crate::permit::Permit;

/// What ends a run besides its own limits.
#[derive(Clone, Debug)]
pub(crate) struct Lapse {
    expires_at: Timestamp,
    deadline: Instant,
    /// Marks of the lease, of those it was made of, and of the session's. If one is there, it was revoked.
    marks: Vec<PathBuf>,
    /// Whether the lease ends before the run's time limit does: then that is what ended it.
    pub(crate) shortened: bool,
}

impl Lapse {
    /// The plan within what is granted and left, and what ends it.
    pub(crate) fn of(
        home: &Home,
        permit: &Permit,
        plan: Plan,
        session: Option<&Admitted<'_>>,
    ) -> Result<(Plan, Lapse), LimitTooSmall> {
        let expires_at = permit.lease.expires_at();
        let left = left(expires_at, Timestamp::now());
        let mut limits = within(plan.limits(), permit.lease.limits());
        let shortened = left < limits.time;
        limits.time = limits.time.min(left);
        let plan = if limits == *plan.limits() { plan } else { plan.narrowed(limits)? };
        let ancestors = permit.lease.ancestors().iter().map(|(id, _)| id);
        let ids = [permit.lease.id()].into_iter().chain(ancestors).map(|id| revocation(home, id));
        let session = session.into_iter().flat_map(|session| session.lapse().marks.iter().cloned());
        let marks = ids.chain(session).collect();
        Ok((plan, Lapse { expires_at, deadline: Instant::now() + left, marks, shortened }))
    }

    /// Why it cannot begin any more, if it cannot.
    pub(crate) fn refusal(&self) -> Option<Refusal> {
        self.check().map(|outcome| match outcome {
            Outcome::LeaseRevoked => Refusal::Revoked,
            _ => Refusal::Expired,
        })
    }

    /// How the run ends, if it must.
    pub(crate) fn check(&self) -> Option<Outcome> {
        // What cannot be looked at counts as revoked.
        if self.marks.iter().any(|mark| !matches!(mark.try_exists(), Ok(false))) {
            return Some(Outcome::LeaseRevoked);
        }
        is_over(self.expires_at, self.deadline, Timestamp::now(), Instant::now()).then_some(Outcome::LeaseExpired)
    }
}

/// Whether either clock says that it is over.
fn is_over(expires_at: Timestamp, deadline: Instant, now: Timestamp, moment: Instant) -> bool {
    now >= expires_at || moment >= deadline
}

/// What is left of a lease.
fn left(expires_at: Timestamp, now: Timestamp) -> Duration {
    Duration::try_from(expires_at.duration_since(now)).unwrap_or(Duration::ZERO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whichever_clock_is_first_ends_it() {
        let at = |second| Timestamp::from_second(1_800_000_000 + second).expect("a time");
        let began = Instant::now();
        let expires_at = at(100);
        let deadline = began + left(expires_at, at(0));
        let is_over =
            |wall: i64, moved: u64| is_over(expires_at, deadline, at(wall), began + Duration::from_secs(moved));
        assert!(!is_over(99, 99));
        assert!(is_over(100, 100));
        assert!(is_over(100, 5), "the wall clock was set forward, or the machine slept");
        assert!(is_over(20, 100), "the wall clock was set back");
        assert!(!is_over(20, 99));
        assert_eq!(left(expires_at, at(100)), Duration::ZERO);
        assert_eq!(left(expires_at, at(500)), Duration::ZERO);
    }
}
