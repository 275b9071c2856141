//! `key`, `policy`, `lease`, `audit`, `receipt`, `demo`: who may run what, and what is known of it.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use hotcell_authority::{CommandPattern, KeyId, LeaseLimits, PathPattern, Role};
use hotcell_base::{Bytes, Cpus, LeaseId, units};

#[derive(Subcommand, Debug)]
pub(crate) enum KeyCommand {
    /// Make the key that signs for this home, which is made on first use otherwise
    Init(KeyInitArgs),
    /// List the keys that are trusted
    List(JsonArgs),
    /// Put a new key in the place of the one that signs
    Rotate(JsonArgs),
    /// Trust somebody else's key
    Trust(KeyTrustArgs),
    /// Trust a key no more, nor anything it ever signed
    Revoke(KeyRevokeArgs),
}

#[derive(Args, Debug)]
pub(crate) struct JsonArgs {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct KeyInitArgs {
    /// Whose it is
    #[arg(long, value_enum, default_value = "human")]
    pub(crate) role: RoleArg,
    /// Who that is, in words
    #[arg(long, default_value = "owner")]
    pub(crate) name: String,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct KeyTrustArgs {
    /// The public key, in base64, as `key list` prints it
    #[arg(value_name = "PUBLIC")]
    pub(crate) public: String,
    /// Whose it is
    #[arg(long, value_enum)]
    pub(crate) role: RoleArg,
    /// Who that is, in words
    #[arg(long)]
    pub(crate) name: String,
    /// For how long [default: until it is revoked]
    #[arg(long, value_name = "DAYS")]
    pub(crate) days: Option<u32>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct KeyRevokeArgs {
    /// The key's name
    #[arg(value_name = "KID")]
    pub(crate) kid: KeyId,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum RoleArg {
    /// A person, who may issue leases and approve
    Human,
    /// Reviews and approves, and issues nothing
    Reviewer,
    /// Issues leases, and approves nothing
    Issuer,
}

impl From<RoleArg> for Role {
    fn from(role: RoleArg) -> Role {
        match role {
            RoleArg::Human => Role::Human,
            RoleArg::Reviewer => Role::Reviewer,
            RoleArg::Issuer => Role::Issuer,
        }
    }
}

#[derive(Subcommand, Debug)]
pub(crate) enum PolicyCommand {
    /// Check the policy and its examples, and which capability permits a command
    Check(PolicyCheckArgs),
    /// Print the policy that is in force
    Show(JsonArgs),
}

#[derive(Args, Debug)]
pub(crate) struct PolicyCheckArgs {
    /// Another policy than the one that is in force
    #[arg(long, value_name = "FILE")]
    pub(crate) policy: Option<PathBuf>,
    /// Only this capability
    #[arg(long, value_name = "NAME")]
    pub(crate) capability: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// The command and its arguments
    #[arg(value_name = "COMMAND", trailing_var_arg = true, value_parser = clap::value_parser!(OsString))]
    pub(crate) command: Vec<OsString>,
}

#[derive(Subcommand, Debug)]
pub(crate) enum LeaseCommand {
    /// Issue a lease: permission to run commands, for a while
    Issue(LeaseIssueArgs),
    /// Check a lease: whether it holds, here and now
    Verify(LeaseVerifyArgs),
    /// Show what a lease says
    Show(LeaseArgs),
    /// List leases, newest first
    List(LeaseListArgs),
    /// Issue a narrower lease of another, which ends with it
    Attenuate(LeaseAttenuateArgs),
    /// Take a lease back, with all that were made of it; whatever runs under them is ended
    Revoke(LeaseRevokeArgs),
}

/// What a lease is about.
#[derive(Args, Debug)]
pub(crate) struct TermsArgs {
    /// For so many minutes
    #[arg(long, value_name = "N", allow_hyphen_values = true, value_parser = minutes)]
    pub(crate) minutes: Option<f64>,
    /// A command that may be run: words, `*` for any one, a last `**` for any further ones
    #[arg(long, value_name = "PATTERN")]
    pub(crate) command: Vec<CommandPattern>,
    /// A path that may be read: absolute, or repo://NAME/…
    #[arg(long, value_name = "PATH")]
    pub(crate) path: Vec<PathPattern>,
    /// A path that may be written as well
    #[arg(long, value_name = "PATH")]
    pub(crate) write: Vec<PathPattern>,
    /// A path that may not, where the two above are wider
    #[arg(long, value_name = "PATH")]
    pub(crate) deny: Vec<PathPattern>,
    /// A variable that may be set
    #[arg(long, value_name = "NAME")]
    pub(crate) env: Vec<String>,
    /// Time of one run [default: 10m]
    #[arg(long, value_name = "TIME", value_parser = units::duration, help_heading = "Limits")]
    pub(crate) time: Option<Duration>,
    /// Share of the processors [default: 1]
    #[arg(long, value_name = "N", help_heading = "Limits")]
    pub(crate) cpus: Option<Cpus>,
    /// Memory [default: 2GiB]
    #[arg(long, value_name = "SIZE", help_heading = "Limits")]
    pub(crate) memory: Option<Bytes>,
    /// Processes and threads [default: 256]
    #[arg(long, value_name = "N", help_heading = "Limits")]
    pub(crate) pids: Option<u32>,
    /// Open descriptors of one process [default: 512]
    #[arg(long, value_name = "N", help_heading = "Limits")]
    pub(crate) fds: Option<u32>,
    /// What is written to disk [default: 1GiB]
    #[arg(long, value_name = "SIZE", help_heading = "Limits")]
    pub(crate) disk: Option<Bytes>,
    /// What is written to stdout and stderr [default: 64MiB]
    #[arg(long, value_name = "SIZE", help_heading = "Limits")]
    pub(crate) output: Option<Bytes>,
    /// How many runs there may be [default: 100]
    #[arg(long, value_name = "N", help_heading = "Limits")]
    pub(crate) runs: Option<u32>,
    /// Who it is for, in words [default: the user]
    #[arg(long, value_name = "NAME")]
    pub(crate) actor: Option<String>,
    /// What it is for
    #[arg(long, value_name = "ID")]
    pub(crate) intent: Option<String>,
    /// Print the lease, and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}

impl TermsArgs {
    /// These limits, with what was asked for in their place.
    pub(crate) fn limits(&self, default: LeaseLimits) -> LeaseLimits {
        // Down, so that no more is granted than was said; but something is.
        let mib = |size: Bytes| (size.0 >> 20).max(u64::from(size.0 > 0));
        LeaseLimits {
            cpu_quota: self.cpus.unwrap_or(default.cpu_quota),
            mem_quota_mb: self.memory.map_or(default.mem_quota_mb, mib),
            wallclock_timeout_s: self.time.map_or(default.wallclock_timeout_s, |time| time.as_secs().max(1)),
            fd_limit: self.fds.unwrap_or(default.fd_limit),
            pids_limit: self.pids.unwrap_or(default.pids_limit),
            disk_quota_mb: self.disk.map_or(default.disk_quota_mb, mib),
            output_limit_mb: self.output.map_or(default.output_limit_mb, mib),
            runs_max: self.runs.unwrap_or(default.runs_max),
        }
    }
}

/// A time in minutes, of which there must be some.
fn minutes(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(minutes) if minutes > 0.0 && minutes.is_finite() => Ok(minutes),
        Ok(_) => Err("a lease lasts for a positive time".to_owned()),
        Err(_) => Err("it is not a number of minutes".to_owned()),
    }
}

#[derive(Args, Debug)]
pub(crate) struct LeaseIssueArgs {
    #[command(flatten)]
    pub(crate) terms: TermsArgs,
    /// The row of the policy it falls under [default: the first that admits it]
    #[arg(long, value_name = "NAME")]
    pub(crate) capability: Option<String>,
    /// For use in another home, by its id, on any machine [default: this home on this machine, until it is started again]
    #[arg(long, value_name = "HOME")]
    pub(crate) audience: Option<String>,
}

#[derive(Args, Debug)]
pub(crate) struct LeaseAttenuateArgs {
    /// The lease to make it of: a file or an id
    pub(crate) lease: String,
    #[command(flatten)]
    pub(crate) terms: TermsArgs,
}

#[derive(Args, Debug)]
pub(crate) struct LeaseVerifyArgs {
    /// A file or an id
    pub(crate) lease: String,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// A command: whether the lease allows it
    #[arg(value_name = "COMMAND", trailing_var_arg = true, value_parser = clap::value_parser!(OsString))]
    pub(crate) command: Vec<OsString>,
}

#[derive(Args, Debug)]
pub(crate) struct LeaseArgs {
    /// A file or an id
    pub(crate) lease: String,
    /// Print the lease as it is
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct LeaseListArgs {
    /// Those too that are over, were revoked, or that runs issued themselves
    #[arg(long)]
    pub(crate) all: bool,
    /// At most so many
    #[arg(long, short = 'n', value_name = "N", default_value_t = 20)]
    pub(crate) limit: usize,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct LeaseRevokeArgs {
    /// Its id
    pub(crate) lease: LeaseId,
    /// Why, in words
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Subcommand, Debug)]
pub(crate) enum AuditCommand {
    /// Print the last entries
    Tail(AuditTailArgs),
    /// Show one entry whole
    Show(AuditShowArgs),
    /// Find out whether anything was changed: works offline, from the files and public keys
    Verify(AuditVerifyArgs),
    /// Print all entries as they are, one on a line
    Export(AuditExportArgs),
    /// Write the signed head somewhere else, to check against later
    Witness(AuditWitnessArgs),
    /// Take what is left of a damaged ledger for the whole, and say so in it
    Recover(AuditRecoverArgs),
}

#[derive(Args, Debug)]
pub(crate) struct AuditTailArgs {
    /// So many
    #[arg(short = 'n', value_name = "N", default_value_t = 20)]
    pub(crate) n: usize,
    /// Go on as more come
    #[arg(long, short = 'f')]
    pub(crate) follow: bool,
    /// Only about this run or lease
    #[arg(long, value_name = "ID")]
    pub(crate) about: Option<String>,
    /// Only events whose name begins so: lease_event, exec_event.KILLED
    #[arg(long, value_name = "NAME")]
    pub(crate) event: Option<String>,
    /// Print entries as they are
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct AuditShowArgs {
    /// Its number
    pub(crate) seq: u64,
}

#[derive(Args, Debug)]
pub(crate) struct AuditVerifyArgs {
    /// A head that was written elsewhere by `audit witness`
    #[arg(long, value_name = "FILE")]
    pub(crate) witness: Vec<PathBuf>,
    /// A git ref that `audit witness --git` wrote, in this repository
    #[arg(long, value_name = "REF")]
    pub(crate) git: Option<String>,
    /// Public keys from elsewhere, instead of the home's own trust.json
    #[arg(long, value_name = "FILE")]
    pub(crate) trust: Option<PathBuf>,
    /// A copy of a ledger, instead of the home's own
    #[arg(long, value_name = "DIR", requires = "head")]
    pub(crate) ledger: Option<PathBuf>,
    /// The head that goes with the copy
    #[arg(long, value_name = "FILE", requires = "ledger")]
    pub(crate) head: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct AuditExportArgs {
    /// From this entry on
    #[arg(long, value_name = "SEQ", default_value_t = 0)]
    pub(crate) from: u64,
}

#[derive(Args, Debug)]
pub(crate) struct AuditWitnessArgs {
    /// A file to write it to
    #[arg(value_name = "FILE", required_unless_present = "git")]
    pub(crate) file: Option<PathBuf>,
    /// A ref of the git repository we are in, such as refs/hotcell/witness
    #[arg(long, value_name = "REF", conflicts_with = "file")]
    pub(crate) git: Option<String>,
}

#[derive(Args, Debug)]
pub(crate) struct AuditRecoverArgs {
    /// Really: what is missing stays missing
    #[arg(long)]
    pub(crate) yes: bool,
}

#[derive(Subcommand, Debug)]
pub(crate) enum ReceiptCommand {
    /// Check a receipt, and the files it is about: works offline
    Verify(ReceiptVerifyArgs),
    /// Show what a receipt says
    Show(ReceiptShowArgs),
}

#[derive(Args, Debug)]
pub(crate) struct ReceiptVerifyArgs {
    /// A receipt, or a run
    #[arg(value_name = "FILE|RUN")]
    pub(crate) receipt: String,
    /// Public keys from elsewhere, instead of the home's own trust.json
    #[arg(long, value_name = "FILE")]
    pub(crate) trust: Option<PathBuf>,
    /// Only the signature, and not the files beside it
    #[arg(long)]
    pub(crate) alone: bool,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct ReceiptShowArgs {
    /// A receipt, or a run
    #[arg(value_name = "FILE|RUN")]
    pub(crate) receipt: String,
}

#[derive(Subcommand, Debug)]
pub(crate) enum DemoCommand {
    /// Issue, verify, run, watch, keep, audit; and what happens when something is wrong
    Lease(JsonArgs),
}
