//! Replies of engines to audit requests.

use std::collections::BTreeSet;

use crate::index::BlockDigest;
use crate::protocol::{EngineHash, StorageTier};

/// Number that requests the digest from a replay socket, in place of the first message.
pub const DIGEST_REQUEST: u64 = u64::MAX - 1;

/// Number that requests the names.
pub const NAMES_REQUEST: u64 = u64::MAX - 2;

/// First bytes of a digest: then sum and number of blocks, 8 bytes each, big-endian.
const DIGEST_MAGIC: &[u8] = b"KVD1";

/// First bytes of names: then 9 bytes each, the tier (0 to 3) and the name, big-endian.
const NAMES_MAGIC: &[u8] = b"KVN1";

/// A block of a rank: its tier and its name at the engine.
pub type BlockName = (StorageTier, EngineHash);

/// Reply of an engine to an audit request.
///
/// ```
/// use pointsman::internals::index::BlockDigest;
/// use pointsman::EngineContents;
///
/// let digest = EngineContents::Digest(BlockDigest { sum: 7, blocks: 2 });
/// assert_eq!(EngineContents::decode(&digest.encode()), Some(digest));
/// assert_eq!(EngineContents::decode(b"KVD1"), None);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineContents {
    /// Digest of the cache.
    Digest(BlockDigest),
    /// All blocks of the cache.
    Names(BTreeSet<BlockName>),
}

impl EngineContents {
    /// Encoded reply of an engine with these blocks to an audit request; `None` for numbers that are no audit request.
    ///
    /// ```
    /// use pointsman::EngineContents;
    /// use pointsman::protocol::{EngineHash, StorageTier};
    ///
    /// let blocks = || [(StorageTier::Device, EngineHash(7))].into_iter();
    /// let names = EngineContents::reply(u64::MAX - 2, blocks()).expect("the request for names");
    /// assert_eq!(EngineContents::decode(&names), Some(EngineContents::Names(blocks().collect())));
    /// assert_eq!(EngineContents::reply(0, blocks()), None);
    /// ```
    #[must_use]
    pub fn reply(request: u64, blocks: impl Iterator<Item = BlockName>) -> Option<Vec<u8>> {
        let contents = match request {
            DIGEST_REQUEST => Self::Digest(blocks.collect()),
            NAMES_REQUEST => Self::Names(blocks.collect()),
            _ => return None,
        };
        Some(contents.encode())
    }

    /// Decodes a payload; `None` if it is malformed.
    #[must_use]
    pub fn decode(payload: &[u8]) -> Option<Self> {
        if let Some(rest) = payload.strip_prefix(DIGEST_MAGIC) {
            let (sum, blocks) = rest.split_first_chunk()?;
            let digest =
                BlockDigest { sum: u64::from_be_bytes(*sum), blocks: u64::from_be_bytes(blocks.try_into().ok()?) };
            return Some(Self::Digest(digest));
        }
        let entries = payload.strip_prefix(NAMES_MAGIC)?.chunks(9);
        let name = |entry: &[u8]| {
            let (tier, name) = entry.split_first()?;
            let tier = *StorageTier::ALL.get(usize::from(*tier))?;
            Some((tier, EngineHash(u64::from_be_bytes(name.try_into().ok()?))))
        };
        entries.map(name).collect::<Option<_>>().map(Self::Names)
    }

    /// The payload.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        match self {
            Self::Digest(BlockDigest { sum, blocks }) => {
                [DIGEST_MAGIC, &sum.to_be_bytes(), &blocks.to_be_bytes()].concat()
            }
            Self::Names(names) => {
                let mut payload = NAMES_MAGIC.to_vec();
                for (tier, name) in names {
                    let number = StorageTier::ALL.iter().position(|of| of == tier).unwrap_or_default();
                    payload.push(u8::try_from(number).unwrap_or_default());
                    payload.extend(name.0.to_be_bytes());
                }
                payload
            }
        }
    }
}
