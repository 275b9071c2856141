//! Runs one command behind real walls.
//!
//! ```text
//! Builder ──plan(&host)──▶ Plan ──run()──▶ Report
//!   wish      facts         decided          measured outside
//! ```
//!
//! [`Cell::builder`] has the one short example. A [`Plan`] is pure data; running it builds every wall
//! it asks for, tries each from inside, and only then starts the command. A wall that does not stand
//! stops the run: there is no fallback that is not written in the [`Report`].
//!
//! Where to look: the syscall filter is [`seccomp`], the mount list is [`view`], the order in which
//! walls go up is `launch`, the kill path is `run::Supervisor::end`.
//!
//! Not here: names, files and records of runs (`hotcell-gate`).

pub mod cgroup;
pub mod changes;
pub mod claim;
pub mod control;
pub mod doctor;
pub mod host;
mod landlock;
mod launch;
pub mod limits;
pub mod needs;
pub mod plan;
pub mod pool;
pub mod report;
pub mod run;
pub mod seccomp;
pub mod session;
pub mod template;
pub mod tree;
pub mod view;
pub mod wall;
mod watch;

pub use host::{Host, HostError};
pub use limits::{Limit, Limits};
pub use plan::{Builder, Cell, Exec, Mode, MountRequest, Plan, PlanError};
pub use pool::Pool;
pub use report::Report;
pub use run::{Observer, Remote, RemoteEnd, RunError, Stdin, Stream, remote};
pub use session::Session;
pub use template::Template;
pub use wall::{Standing, Wall};
