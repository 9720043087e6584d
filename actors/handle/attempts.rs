//! Limits of the attempts of a request that is lost with an actor.

use std::time::Duration;

use crate::error::RouteError;

/// Maximum wait of one attempt for the restart of the lost actor.
pub(super) const RESTART_WAIT: Duration = Duration::from_millis(200);

/// Maximum number of losses with a restart after each.
const LOSSES_MAX: u32 = 6;

/// Maximum number of waits in a row without a restart: five seconds, longer than a restart on an overloaded machine.
const WAITS_MAX: u32 = 25;

/// Attempts of one request.
#[derive(Default)]
pub(super) struct Attempts {
    made: u32,
    losses: u32,
    waits: u32,
}

impl Attempts {
    pub(super) fn is_first(&self) -> bool {
        self.made == 0
    }

    /// Counts a lost attempt, and whether an actor restarted within [`RESTART_WAIT`]. Returns an error when no further
    /// attempt is due.
    pub(super) fn count_lost(&mut self, restarted: bool) -> Result<(), RouteError> {
        self.made += 1;
        (self.losses, self.waits) = if restarted { (self.losses + 1, 0) } else { (self.losses, self.waits + 1) };
        let is_over = self.losses == LOSSES_MAX || self.waits == WAITS_MAX;
        if is_over { Err(RouteError::Lost { attempts: self.made }) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each attempt before a slow restart counted like one that was lost with the actor. On an overloaded machine some
    /// requests that had survived five deaths of the scheduler ended with `Lost`.
    #[test]
    fn attempts_before_a_slow_restart_are_no_losses() {
        let mut attempts = Attempts::default();
        assert!(attempts.is_first());
        for _death in 1..6 {
            assert!((0..20).all(|_| attempts.count_lost(false).is_ok()));
            assert_eq!(attempts.count_lost(true), Ok(()));
        }
        assert!(!attempts.is_first());
        assert_eq!(attempts.count_lost(true), Err(RouteError::Lost { attempts: 106 }));
    }

    #[test]
    fn an_actor_that_does_not_restart_ends_its_requests() {
        let mut attempts = Attempts::default();
        assert!((1..25).all(|_| attempts.count_lost(false).is_ok()));
        assert_eq!(attempts.count_lost(false), Err(RouteError::Lost { attempts: 25 }));
    }
}
