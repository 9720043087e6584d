//! HTML page of results: tables, latency distributions, load and hit rates over time.
//!
//! The page is self-contained. It shows the results of other subcommands, read from their JSON.

mod axis;
mod escaped;
mod html;
mod inputs;
mod plot;
mod sections;

use std::fs;
use std::path::PathBuf;

use clap::Args;

use crate::{Failed, unusable};

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

impl Page {
    /// Writes the page.
    ///
    /// # Errors
    /// A file cannot be read or contains no results, or the page cannot be written.
    pub fn write(&self) -> Result<(), Failed> {
        let page = html::page(&inputs::read(&self.input)?)?;
        fs::write(&self.output, page).map_err(unusable("write", &self.output))
    }
}

#[cfg(test)]
mod tests;
