//! Follower of an engine's response: reports its progress to the placement.

use std::sync::{Mutex, PoisonError};

use pointsman::{AnswerKind, AnswerReader};
use pyo3::prelude::*;

use crate::placement::Placement;

/// Reads a response as it passes, and reports the first token, output blocks and cached tokens to a placement.
#[pyclass(frozen, module = "pointsman")]
pub(crate) struct AnswerFollower {
    placement: Py<Placement>,
    kind: AnswerKind,
    block_size: u64,
    progress: Mutex<Progress>,
}

struct Progress {
    reader: AnswerReader,
    /// Output blocks reported so far.
    output_blocks: u64,
    has_reported_cached: bool,
}

#[pymethods]
impl AnswerFollower {
    #[new]
    fn new(placement: Py<Placement>, content_type: &str, block_size: u64) -> Self {
        let kind = AnswerKind::of_content_type(content_type.as_bytes());
        let progress = Progress { reader: AnswerReader::new(kind), output_blocks: 0, has_reported_cached: false };
        Self { placement, kind, block_size: block_size.max(1), progress: Mutex::new(progress) }
    }

    /// Reads the next bytes of the response.
    fn read(&self, py: Python<'_>, chunk: &[u8]) -> PyResult<()> {
        self.follow(py, |reader| reader.read(chunk))
    }

    /// Reads the end of the response.
    fn end(&self, py: Python<'_>) -> PyResult<()> {
        self.follow(py, AnswerReader::end)
    }

    /// Output tokens so far.
    #[getter]
    fn output_tokens(&self) -> u64 {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner).reader.output_tokens()
    }

    /// Whether the end mark of the response has arrived.
    #[getter]
    fn is_complete(&self) -> bool {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner).reader.is_complete()
    }

    /// Cached prompt tokens, as the engine reports them.
    #[getter]
    fn cached_tokens(&self) -> Option<u32> {
        let progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        progress.reader.usage().and_then(|usage| usage.cached_tokens)
    }
}

impl AnswerFollower {
    fn follow(&self, py: Python<'_>, read: impl FnOnce(&mut AnswerReader)) -> PyResult<()> {
        let (is_generating, new_blocks, cached) = {
            let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
            read(&mut progress.reader);
            let blocks = progress.reader.output_tokens() / self.block_size;
            let new_blocks = blocks.saturating_sub(progress.output_blocks);
            progress.output_blocks = blocks.max(progress.output_blocks);
            let cached = progress.reader.usage().and_then(|usage| usage.cached_tokens);
            let cached = cached.filter(|_| !progress.has_reported_cached);
            progress.has_reported_cached |= cached.is_some();
            (self.kind == AnswerKind::Events && progress.reader.is_generating(), new_blocks, cached)
        };
        let report = |placement: &pointsman::Placement| {
            // A response that is not streamed arrives at its end, which does not date the prefill.
            if is_generating {
                placement.prefill_completed();
            }
            for _ in 0..new_blocks {
                drop(placement.output_block(None)); // valid without a decay
            }
            if let Some(cached) = cached {
                placement.delivered_cached_tokens(cached);
            }
        };
        self.placement.get().report(py, report).map(drop)
    }
}
