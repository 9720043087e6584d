//! Condition for the end of a router's start.

use super::DiscoveryStatus;
use crate::error::StartError;

/// Result of a start that waits for `wanted` workers from `sources` discovery sources; `None` while it must wait.
///
/// A source sends its last set before it closes, so a start fails only after all sources have closed.
///
/// ```
/// use pointsman::error::StartError;
/// use pointsman::internals::membership::initial_workers;
///
/// assert_eq!(initial_workers(1, 1, 0, &[]), Some(Ok(())));
/// assert_eq!(initial_workers(1, 0, 0, &[]), Some(Err(StartError::NoSource { registered: 0, wanted: 1 })));
/// assert_eq!(initial_workers(1, 1, 1, &[]), None); // the source is not followed yet
/// ```
#[must_use]
pub fn initial_workers(
    wanted: u32,
    registered: usize,
    sources: usize,
    statuses: &[DiscoveryStatus],
) -> Option<Result<(), StartError>> {
    let is_enough = registered >= wanted as usize;
    if sources == 0 {
        return Some(if is_enough { Ok(()) } else { Err(StartError::NoSource { registered, wanted }) });
    }
    if statuses.len() < sources {
        return None;
    }
    if is_enough {
        return Some(Ok(()));
    }
    let all_closed = statuses.iter().all(|status| status.closed);
    all_closed.then_some(Err(StartError::SourceClosed { registered, wanted }))
}
