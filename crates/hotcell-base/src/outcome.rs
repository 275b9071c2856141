//! Outcomes: the typed way a run ended, decided outside the cell.

use std::fmt;

use serde::{Deserialize, Serialize};

/// How a run ended. Exactly one applies, and it is never guessed from an exit code.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The command ended by itself, with an exit code.
    Exited,
    /// The command was ended by a signal that was not ours.
    Signaled,
    /// The wall-clock or cpu-time limit was reached.
    Timeout,
    /// The memory limit was reached.
    Oom,
    /// The limit on processes and threads was reached.
    Pids,
    /// The disk limit was reached.
    Disk,
    /// More output came than the run may write.
    OutputLimit,
    /// The lease ended while the command ran.
    LeaseExpired,
    /// The lease was revoked while the command ran.
    LeaseRevoked,
    /// A lease or policy refused the run.
    PolicyDenied,
    /// There is no such command.
    NotFound,
    /// The command is there and cannot be executed.
    NotExecutable,
    /// Somebody asked for the end of the run.
    Killed,
    /// Hotcell or the machine failed; the command did not run or was ended.
    PlatformError,
    /// We crashed between the start and the record: what happened is not known.
    Unknown,
}

impl Outcome {
    /// Every outcome there is.
    pub const ALL: &[Outcome] = &[
        Outcome::Exited,
        Outcome::Signaled,
        Outcome::Timeout,
        Outcome::Oom,
        Outcome::Pids,
        Outcome::Disk,
        Outcome::OutputLimit,
        Outcome::LeaseExpired,
        Outcome::LeaseRevoked,
        Outcome::PolicyDenied,
        Outcome::NotFound,
        Outcome::NotExecutable,
        Outcome::Killed,
        Outcome::PlatformError,
        Outcome::Unknown,
    ];

    /// The name used in JSON, in `exit_code.txt`'s neighbours and on the screen.
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Exited => "exited",
            Outcome::Signaled => "signaled",
            Outcome::Timeout => "timeout",
            Outcome::Oom => "oom",
            Outcome::Pids => "pids",
            Outcome::Disk => "disk",
            Outcome::OutputLimit => "output_limit",
            Outcome::LeaseExpired => "lease_expired",
            Outcome::LeaseRevoked => "lease_revoked",
            Outcome::PolicyDenied => "policy_denied",
            Outcome::NotFound => "not_found",
            Outcome::NotExecutable => "not_executable",
            Outcome::Killed => "killed",
            Outcome::PlatformError => "platform_error",
            Outcome::Unknown => "unknown",
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
