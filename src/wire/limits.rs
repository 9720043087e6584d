//! Size limits of the decoder.

/// Size limits of one batch and of the state kept between batches.
///
/// ```
/// use pointsman::internals::wire::DecoderLimits;
///
/// let limits = DecoderLimits { payload_bytes_max: 1 << 20, ..DecoderLimits::default() };
/// assert_eq!(limits.nesting_max, 16);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DecoderLimits {
    /// Bytes of a batch. Default: 16 MiB.
    pub payload_bytes_max: usize,
    /// Decoded events of a batch. Default: 1,048,576.
    pub events_max: usize,
    /// Block hashes of one event. Default: 2,097,152, more than a batch of the default size has: LMCache names all its
    /// blocks in one removal after a loss.
    pub hashes_max: usize,
    /// Tokens of one event. Default: 4,194,304.
    pub tokens_max: usize,
    /// Extra keys of one event. Default: 65,536.
    pub keys_max: usize,
    /// Nesting levels of arrays and maps inside one field of an event, at most 32. Default: 16.
    pub nesting_max: usize,
    /// Remembered blocks with an adapter or salt, 40 to 80 bytes each. Default: 1,048,576.
    pub namespaces_max: usize,
    /// Tokens of the pages of an engine whose blocks are smaller than the pool's, 12 to 32 bytes each. Default: 16,777,216.
    pub folded_tokens_max: usize,
}

impl Default for DecoderLimits {
    fn default() -> Self {
        Self {
            payload_bytes_max: 16 << 20,
            events_max: 1 << 20,
            hashes_max: 1 << 21,
            tokens_max: 1 << 22,
            keys_max: 1 << 16,
            nesting_max: 16,
            namespaces_max: 1 << 20,
            folded_tokens_max: 1 << 24,
        }
    }
}
