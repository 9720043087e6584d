//! Figures of a router outside this workspace for cases of the matrix, computed once and kept in a file.
//!
//! The file is written after each case, and existing cases are kept, so that an interrupted computation continues.

use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{Entry, Selection, matrix};
use crate::compare::jobs::in_parallel;
use crate::results::{SCHEMA_VERSION, Summary};
use crate::simulate::Simulate;
use crate::{Failed, unusable};

/// Runs of one router by case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Baseline {
    /// [`SCHEMA_VERSION`] of the program that wrote it.
    pub schema_version: u32,
    /// Name of the router.
    pub router: String,
    /// Runs of each case, by its name, in order of seeds.
    pub cases: BTreeMap<String, Vec<Summary>>,
}

impl Baseline {
    /// Reads a file.
    ///
    /// # Errors
    /// The file cannot be read, or another version of this program wrote it.
    pub fn read(path: &Path) -> Result<Self, Failed> {
        let bytes = fs::read(path).map_err(unusable("read", path))?;
        let baseline: Self = serde_json::from_slice(&bytes).map_err(unusable("read", path))?;
        if baseline.schema_version == SCHEMA_VERSION {
            return Ok(baseline);
        }
        let found = baseline.schema_version;
        Err(unusable("read", path)(format!("schema_version is {found}, this program reads {SCHEMA_VERSION}")))
    }

    /// Runs of `case` with `seeds` of the same `workload`.
    ///
    /// # Errors
    /// A run is missing, or it was computed for a different workload.
    pub fn runs(&self, case: &str, seeds: &[u64], workload: &str) -> Result<Vec<Summary>, Failed> {
        let runs = self.cases.get(case).map_or(&[][..], Vec::as_slice);
        let find = |seed: &u64| {
            let run = runs.iter().find(|run| run.seed == *seed && run.workload == workload);
            let missing = || format!("the baseline has no run of case {case} with seed {seed} and the same workload");
            Ok(run.cloned().ok_or_else(missing)?)
        };
        seeds.iter().map(find).collect()
    }

    /// Adds the missing runs of `selection` to the file at `path`, with at most `jobs` in parallel.
    ///
    /// # Errors
    /// The selection is invalid, `run` fails, or the file cannot be read or written.
    pub fn extend(
        path: &Path,
        router: &str,
        selection: &Selection,
        jobs: NonZeroUsize,
        run: impl Fn(&Simulate, u64) -> Result<Summary, Failed> + Sync,
    ) -> Result<(), Failed> {
        let matrix = matrix()?;
        let (cases, seeds) = (matrix.cases(selection)?, matrix.seeds(selection)?);
        let mut baseline = if path.exists() {
            Self::read(path)?
        } else {
            Self { schema_version: SCHEMA_VERSION, router: router.to_owned(), cases: BTreeMap::new() }
        };
        for case in cases {
            let Some(simulate) = case.simulate(None)? else { continue };
            let workload = simulate.source.workload_name();
            let is_missing = |seed: &u64| baseline.runs(&case.name, &[*seed], &workload).is_err();
            let missing: Vec<u64> = seeds.iter().copied().filter(is_missing).collect();
            let failed = |source| format!("case {}: {source}", case.name);
            let added = in_parallel(&missing, jobs, |seed| run(&simulate, *seed)).map_err(failed)?;
            baseline.add(&case, &workload, added);
            let text = serde_json::to_vec(&baseline).map_err(unusable("write", path))?;
            fs::write(path, text).map_err(unusable("write", path))?;
        }
        Ok(())
    }

    /// Adds runs of `case` and removes those of an earlier workload.
    fn add(&mut self, case: &Entry, workload: &str, added: Vec<Summary>) {
        let runs = self.cases.entry(case.name.clone()).or_default();
        runs.retain(|run| run.workload == workload);
        runs.extend(added);
        runs.sort_by_key(|run| run.seed);
    }
}
