//! What a lease lets a run use.

use hotcell_base::Cpus;
use serde::{Deserialize, Serialize};

/// Limits of a lease. Each is the most that a run under it may have; a run may ask for less.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeaseLimits {
    /// Processors.
    #[serde(with = "cpus")]
    pub cpu_quota: Cpus,
    /// Memory, in MiB.
    pub mem_quota_mb: u64,
    /// Time, in seconds. A lease that ends sooner ends the run sooner.
    pub wallclock_timeout_s: u64,
    /// Open descriptors of one process.
    pub fd_limit: u32,
    /// Processes and threads.
    pub pids_limit: u32,
    /// What is written to disk, in MiB.
    pub disk_quota_mb: u64,
    /// What is written to stdout and stderr, in MiB.
    pub output_limit_mb: u64,
    /// How many runs there may be under it and under all leases made of it.
    pub runs_max: u32,
}

impl Default for LeaseLimits {
    fn default() -> LeaseLimits {
        LeaseLimits {
            cpu_quota: Cpus { milli: 1000 },
            mem_quota_mb: 2048,
            wallclock_timeout_s: 600,
            fd_limit: 512,
            pids_limit: 256,
            disk_quota_mb: 1024,
            output_limit_mb: 64,
            runs_max: 100,
        }
    }
}

/// Limits of the policy: as those of a lease, and without a limit where there is none.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsMax {
    /// Processors.
    #[serde(with = "cpus::optional")]
    pub cpu_quota: Option<Cpus>,
    /// Memory, in MiB.
    pub mem_quota_mb: Option<u64>,
    /// Time, in seconds.
    pub wallclock_timeout_s: Option<u64>,
    /// Open descriptors of one process.
    pub fd_limit: Option<u32>,
    /// Processes and threads.
    pub pids_limit: Option<u32>,
    /// What is written to disk, in MiB.
    pub disk_quota_mb: Option<u64>,
    /// What is written to stdout and stderr, in MiB.
    pub output_limit_mb: Option<u64>,
    /// Runs.
    pub runs_max: Option<u32>,
}

impl LeaseLimits {
    /// The narrower of the two, in each respect.
    pub fn min(self, other: LeaseLimits) -> LeaseLimits {
        LeaseLimits {
            cpu_quota: Cpus { milli: self.cpu_quota.milli.min(other.cpu_quota.milli) },
            mem_quota_mb: self.mem_quota_mb.min(other.mem_quota_mb),
            wallclock_timeout_s: self.wallclock_timeout_s.min(other.wallclock_timeout_s),
            fd_limit: self.fd_limit.min(other.fd_limit),
            pids_limit: self.pids_limit.min(other.pids_limit),
            disk_quota_mb: self.disk_quota_mb.min(other.disk_quota_mb),
            output_limit_mb: self.output_limit_mb.min(other.output_limit_mb),
            runs_max: self.runs_max.min(other.runs_max),
        }
    }

    /// The first respect in which these are wider than the others: its name and both values.
    pub fn wider_than(&self, most: &LeaseLimits) -> Option<(&'static str, String, String)> {
        let (ours, theirs) = (self.listed(), most.listed());
        let wider = ours.iter().zip(&theirs).find(|((_, ours), (_, theirs))| ours > theirs)?;
        let shown = |(name, value): (&str, u64)| match name {
            "cpu_quota" => Cpus { milli: u32::try_from(value).unwrap_or(u32::MAX) }.to_string(),
            _ => value.to_string(),
        };
        Some((wider.0.0, shown(*wider.0), shown(*wider.1)))
    }

    /// Each with its name; none may be nothing.
    pub fn listed(&self) -> [(&'static str, u64); 8] {
        [
            ("cpu_quota", self.cpu_quota.milli.into()),
            ("mem_quota_mb", self.mem_quota_mb),
            ("wallclock_timeout_s", self.wallclock_timeout_s),
            ("fd_limit", self.fd_limit.into()),
            ("pids_limit", self.pids_limit.into()),
            ("disk_quota_mb", self.disk_quota_mb),
            ("output_limit_mb", self.output_limit_mb),
            ("runs_max", self.runs_max.into()),
        ]
    }
}

impl LimitsMax {
    /// The narrower of the two, in each respect.
    pub fn clamp(&self, limits: LeaseLimits) -> LeaseLimits {
        let most = LeaseLimits {
            cpu_quota: self.cpu_quota.unwrap_or(limits.cpu_quota),
            mem_quota_mb: self.mem_quota_mb.unwrap_or(limits.mem_quota_mb),
            wallclock_timeout_s: self.wallclock_timeout_s.unwrap_or(limits.wallclock_timeout_s),
            fd_limit: self.fd_limit.unwrap_or(limits.fd_limit),
            pids_limit: self.pids_limit.unwrap_or(limits.pids_limit),
            disk_quota_mb: self.disk_quota_mb.unwrap_or(limits.disk_quota_mb),
            output_limit_mb: self.output_limit_mb.unwrap_or(limits.output_limit_mb),
            runs_max: self.runs_max.unwrap_or(limits.runs_max),
        };
        limits.min(most)
    }
}

/// Processors as a number, `1.0` or `0.25`, to the thousandth.
mod cpus {
    use hotcell_base::Cpus;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
    pub(super) fn serialize<S: Serializer>(cpus: &Cpus, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_f64(f64::from(cpus.milli) / 1000.0)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Cpus, D::Error> {
        let number = f64::deserialize(deserializer)?;
        number.to_string().parse().map_err(D::Error::custom)
    }

    pub(super) mod optional {
        use super::*;

        pub(crate) fn serialize<S: Serializer>(cpus: &Option<Cpus>, serializer: S) -> Result<S::Ok, S::Error> {
            match cpus {
                Some(cpus) => super::serialize(cpus, serializer),
                None => serializer.serialize_none(),
            }
        }

        pub(crate) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Cpus>, D::Error> {
            super::deserialize(deserializer).map(Some)
        }
    }
}
