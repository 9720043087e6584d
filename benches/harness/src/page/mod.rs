//! One HTML page of results: tables, latency distributions, load and hit rates over time.
//!
//! Owns what a reader sees of runs that others made. Promises a page that needs nothing but itself. Leaves running, and
//! every figure, to those whose JSON it reads.

mod axis;
mod html;
mod inputs;
mod plot;
mod sections;

use std::fs;
use std::io;
use std::path::PathBuf;

use clap::Args;

pub use html::HtmlError;
pub use inputs::InputError;
pub use plot::PlotError;

/// One page of what runs gave.
#[derive(Args, Clone, Debug)]
pub struct Page {
    /// Results of `simulate`, `load`, `compare` or `suite`, as --json writes them; with --series there are plots
    #[arg(long, required = true, num_args = 1.., value_name = "FILE")]
    pub input: Vec<PathBuf>,
    /// The page to write
    #[arg(long, value_name = "FILE")]
    pub output: PathBuf,
}

/// Why there is no page.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    /// Results cannot be read.
    #[error(transparent)]
    Input(#[from] InputError),
    /// The page cannot be put together.
    #[error(transparent)]
    Html(#[from] HtmlError),
    /// It cannot be kept.
    #[error("cannot write {path}: {source}")]
    Write {
        /// The page.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl Page {
    /// Writes the page.
    ///
    /// # Errors
    /// A file cannot be read or holds no results, or the page cannot be written.
    pub fn write(&self) -> Result<(), PageError> {
        let page = html::page(&inputs::read(&self.input)?)?;
        fs::write(&self.output, page).map_err(|source| PageError::Write { path: self.output.clone(), source })
    }
}

#[cfg(test)]
mod tests;
