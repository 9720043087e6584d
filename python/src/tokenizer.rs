//! Tokenizer of a model with its chat template, from the gateway.

use std::path::PathBuf;

use pointsman_gateway::tokens::PromptTokenizer;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::Failure;

/// Tokenizer of a model with its chat template. Token ids are 32-bit integers in bytes, in the order of the machine.
#[pyclass(frozen, module = "pointsman._native")]
pub(crate) struct Tokenizer(PromptTokenizer);

#[pymethods]
impl Tokenizer {
    /// Reads the files. Blocks, without the interpreter lock.
    #[new]
    #[pyo3(signature = (tokenizer_file, chat_template_file=None))]
    fn new(py: Python<'_>, tokenizer_file: PathBuf, chat_template_file: Option<PathBuf>) -> PyResult<Self> {
        let loaded = py.detach(|| PromptTokenizer::load(&tokenizer_file, chat_template_file.as_deref()));
        loaded.map(Self).map_err(|error| Failure::new("StartError", "tokenizer", error.to_string()).raise(py))
    }

    /// Token ids of a text.
    fn text<'py>(&self, py: Python<'py>, text: String) -> PyResult<Bound<'py, PyBytes>> {
        ids(py, py.detach(|| self.0.text(&text)))
    }

    /// Token ids of a conversation, the JSON object of a chat completion request.
    fn chat<'py>(&self, py: Python<'py>, body: String) -> PyResult<Bound<'py, PyBytes>> {
        ids(py, py.detach(|| self.0.chat(body)))
    }
}

fn ids(py: Python<'_>, ids: Result<Vec<u32>, String>) -> PyResult<Bound<'_, PyBytes>> {
    let ids = ids.map_err(|error| Failure::new("InvalidArgument", "no_tokens", error).raise(py))?;
    PyBytes::new_with(py, 4 * ids.len(), |bytes| {
        bytes.chunks_exact_mut(4).zip(&ids).for_each(|(bytes, id)| bytes.copy_from_slice(&id.to_ne_bytes()));
        Ok(())
    })
}
