//! HTML page of results: tables, latency distributions, load and hit rates over time.
//!
//! The page is self-contained. It shows the results of other subcommands, read from their JSON.

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

/// Creates one page from results.
#[derive(Args, Clone, Debug)]
pub struct Page {
    /// Results of `simulate`, `load`, `compare` or `suite` in --json format; plots require --series
    #[arg(long, required = true, num_args = 1.., value_name = "FILE")]
    pub input: Vec<PathBuf>,
    /// Output file of the page
    #[arg(long, value_name = "FILE")]
    pub output: PathBuf,
}

/// Errors of creating a page.
#[derive(Debug, thiserror::Error)]
pub enum PageError {
    /// The results cannot be read.
    #[error(transparent)]
    Input(#[from] InputError),
    /// The page cannot be created.
    #[error(transparent)]
    Html(#[from] HtmlError),
    /// The page cannot be written.
    #[error("cannot write {path}: {source}")]
    Write {
        /// Path of the page.
        path: PathBuf,
        /// Error from the operating system.
        source: io::Error,
    },
}

impl Page {
    /// Writes the page.
    ///
    /// # Errors
    /// A file cannot be read or contains no results, or the page cannot be written.
    pub fn write(&self) -> Result<(), PageError> {
        let page = html::page(&inputs::read(&self.input)?)?;
        fs::write(&self.output, page).map_err(|source| PageError::Write { path: self.output.clone(), source })
    }
}

#[cfg(test)]
mod tests;
