//! Python module of the router: the native half of the package `pointsman`.
//!
//! Contains the running router and its placements as Python classes, and the bridge from its futures to event loops. The
//! Python half (`python/pointsman`) has the coroutines, the exceptions and the documentation.

mod answer;
mod bridge;
mod buffer;
mod deliveries;
mod discovery;
mod errors;
mod extensions;
mod inputs;
mod logs;
mod metrics;
mod placement;
mod process;
mod router;
mod startup;
mod tokenizer;

use pyo3::prelude::*;

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::answer::AnswerFollower;
    #[pymodule_export]
    use super::bridge::Pending;
    #[pymodule_export]
    use super::inputs::block_hashes;
    #[pymodule_export]
    use super::metrics::metrics;
    #[pymodule_export]
    use super::placement::Placement;
    #[pymodule_export]
    use super::process::shut_down;
    #[pymodule_export]
    use super::router::{NativeRouter, start};
    #[pymodule_export]
    use super::tokenizer::Tokenizer;
    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
