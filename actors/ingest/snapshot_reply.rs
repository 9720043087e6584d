//! Reply to a query for the contents of a rank.

use tokio::sync::oneshot;

use crate::index::RankDump;
use crate::snapshot::RankSnapshot;

/// Position and identity of the rank without events, and the reply of the index with the contents: `None` if the index
/// has lost them. Dropped if the rank has no usable contents.
pub(crate) type SnapshotReply = oneshot::Sender<(RankSnapshot, oneshot::Receiver<Option<RankDump>>)>;
