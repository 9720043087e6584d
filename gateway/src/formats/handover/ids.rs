//! Identifiers of a transfer.

/// Number of bootstrap rooms: rooms have 63 bits.
const ROOMS: u64 = 1 << 63;

/// Bootstrap room on one prefill rank, from random bits.
///
/// SGLang's default rule `follow_bootstrap_room` maps a room to the rank `room % dp_size`. Ranks outside `dp_size` wrap
/// around, and a `dp_size` of 0 counts as 1.
///
/// ```
/// use pointsman_gateway::formats::handover::bootstrap_room;
///
/// let room = bootstrap_room(u64::MAX, 4, 3);
/// assert_eq!(room % 4, 3);
/// assert!(room < 1 << 63);
/// ```
pub fn bootstrap_room(random: u64, dp_size: u32, rank: u32) -> u64 {
    let dp_size = u64::from(dp_size.max(1));
    let room = random % rooms_of_all_ranks(dp_size);
    room - room % dp_size + u64::from(rank) % dp_size
}

/// Room of the `prompt_idx`-th prompt of a batch: distinct for each prompt, on the rank of the first room, within 63
/// bits.
pub(super) fn batch_room(first: u64, dp_size: u32, prompt_idx: usize) -> u64 {
    let dp_size = u64::from(dp_size.max(1));
    let rooms = rooms_of_all_ranks(dp_size);
    let step = (prompt_idx as u64 % (rooms / dp_size)) * dp_size;
    (first % rooms + step) % rooms
}

/// Largest number of rooms, at most 2^63, that is a multiple of `dp_size`. A remainder by it keeps the rank.
fn rooms_of_all_ranks(dp_size: u64) -> u64 {
    ROOMS - ROOMS % dp_size
}

/// Request id of both legs for vLLM's P2P NCCL connector, which reads the addresses from it.
///
/// ```
/// use pointsman_gateway::formats::handover::p2p_request_id;
///
/// let id = p2p_request_id("10.0.0.1:21001", "10.0.0.2:22001", "5f0c");
/// assert_eq!(id, "___prefill_addr_10.0.0.1:21001___decode_addr_10.0.0.2:22001_5f0c");
/// ```
pub fn p2p_request_id(prefill_address: &str, decode_address: &str, unique: &str) -> String {
    format!("___prefill_addr_{prefill_address}___decode_addr_{decode_address}_{unique}")
}
