//! What any cell needs, made while it is not yet known which cell that will be: a program that runs one cell and ends
//! has so little time that two processors should work on it.

use std::io;
use std::sync::{Mutex, PoisonError};

use hotcell_sys::program::Image;
use hotcell_sys::spawner::Spawner;

use crate::host::Host;
use crate::launch::{self, Label};
use crate::plan::{Identity, Plan};
use crate::wall::Wall;

/// A spawner that is at it.
#[derive(Debug)]
pub(crate) struct Early {
    pub(crate) spawner: Spawner,
    pub(crate) image: Image<Label>,
    identity: Identity,
}

static EARLY: Mutex<Option<Early>> = Mutex::new(None);

/// Begins with what the next cell of this process needs in any case. If there is none, it ends with the process.
///
/// # Errors
/// If nothing can be started; whoever runs a cell hears of that again, and more.
pub fn begin(host: &Host) -> io::Result<()> {
    let plan = Plan::of_walls(host);
    let image = launch::early(&plan).image();
    let mut spawner = Spawner::start()?;
    spawner.begin(&image)?;
    let early = Early { spawner, image, identity: plan.identity };
    *EARLY.lock().unwrap_or_else(PoisonError::into_inner) = Some(early);
    Ok(())
}

/// What was begun, if it is of use to a plan.
pub(crate) fn take(plan: &Plan) -> Option<Early> {
    let early = EARLY.lock().unwrap_or_else(PoisonError::into_inner).take()?;
    let needs_user = matches!(plan.identity, Identity::Own { .. });
    let needed =
        [Some(Wall::Net), Some(Wall::Ipc), Some(Wall::Uts), Some(Wall::Time), needs_user.then_some(Wall::User)];
    let is_fit = early.identity == plan.identity && needed.into_iter().flatten().all(|wall| plan.asks_for(wall));
    is_fit.then_some(early)
}
