//! Storage media of events: their tiers and their writers.

use super::Finding;
use crate::protocol::StorageTier;

/// Storage tier of a medium name, in any case. Engines with a single medium omit the name.
pub(super) fn tier(medium: Option<&[u8]>) -> Result<StorageTier, Finding> {
    let Some(name) = medium.filter(|name| *name != b"GPU") else { return Ok(StorageTier::Device) };
    let is = |known: &[&str]| known.iter().any(|known| name.eq_ignore_ascii_case(known.as_bytes()));
    if is(&["GPU"]) {
        Ok(StorageTier::Device)
    } else if is(&["CPU", "CPU_PINNED", "CPU_TIER1", "CPU_TIER2"]) {
        Ok(StorageTier::HostPinned)
    } else if is(&["STORAGE", "DISK", "FS", "OBJ"]) {
        Ok(StorageTier::Disk)
    } else if is(&["EXTERNAL", "REMOTE"]) {
        Ok(StorageTier::External)
    } else {
        Err(Finding::UnknownMedium)
    }
}

/// Whether a connector beside the engine's own cache writes the medium. A clear of the engine's cache leaves it.
pub(super) fn is_of_connector(medium: Option<&[u8]>) -> bool {
    let known: [&[u8]; 5] = [b"CPU", b"STORAGE", b"FS", b"OBJ", b"REMOTE"];
    medium.is_some_and(|name| known.iter().any(|known| name.eq_ignore_ascii_case(known)))
}
