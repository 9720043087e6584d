//! Matrix of the suite: families of workloads, loads, fleet sizes and conditions.
//!
//! The data are in `suite.toml`. A case of the matrix is an [`Entry`]: a name and arguments of `simulate`. The arrival
//! rate of a case is its load (a share of the peer's saturation rate) times that rate per rank, times the number of
//! ranks and the capacity left by its condition.
//!
//! Held-back families run with held-back seeds only, so that a tuning run cannot include them by accident.

use std::collections::BTreeMap;
use std::str::FromStr;

use clap::Args;
use serde::Deserialize;

use super::Entry;
use crate::Failed;

/// Families, loads, conditions and seeds of the suite.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Matrix {
    /// Loads as shares of the peer's saturation rate.
    loads: Vec<f64>,
    /// Fleet sizes in ranks.
    ranks: Vec<u32>,
    /// Maximum number of requests of a case.
    requests_max: u32,
    /// Seeds for tuning.
    tuning_seeds: Vec<u64>,
    /// Seeds for the final check.
    held_back_seeds: Vec<u64>,
    family: Vec<Family>,
    condition: Vec<Condition>,
}

/// A family of workloads that differ in rate and size only.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Family {
    name: String,
    why: String,
    /// Generator and settings, without rate and size.
    workload: String,
    /// Setting for the size of the workload.
    #[serde(default = "requests")]
    count: String,
    /// Mean number of requests per unit of `count`.
    #[serde(default = "one")]
    requests_each: f64,
    /// Number of requests per rank.
    requests_per_rank: u32,
    /// Settings that grow with the fleet, as values per rank.
    #[serde(default)]
    per_rank: BTreeMap<String, u32>,
    /// Saturation rate of the peer on 8 ranks, in requests per second and rank.
    saturation: f64,
    /// Whether the family is kept for the final check.
    #[serde(default)]
    held_back: bool,
}

/// A condition of the fleet.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Condition {
    name: String,
    why: String,
    /// Arguments of `simulate`; `{half}` is the range of workers of the fleet's upper half.
    #[serde(default)]
    arguments: String,
    /// Capacity of the fleet relative to the same number of default ranks.
    #[serde(default = "one")]
    capacity: f64,
}

fn requests() -> String {
    "requests".to_owned()
}

fn one() -> f64 {
    1.0
}

/// Seeds of the runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seeds {
    /// This number of seeds.
    Count(u32),
    /// All seeds for tuning.
    Tuning,
    /// All seeds of the final check.
    HeldBack,
}

impl FromStr for Seeds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "tuning" => Ok(Self::Tuning),
            "held-back" => Ok(Self::HeldBack),
            count => match count.parse() {
                Ok(count @ 1..=1_000) => Ok(Self::Count(count)),
                Ok(_) | Err(_) => Err("must be tuning, held-back or a count from 1 to 1000".to_owned()),
            },
        }
    }
}

/// Selection of cases of the matrix.
#[derive(Args, Clone, Debug)]
pub struct Selection {
    /// Families of the matrix, or all; held-back families require --seeds held-back
    #[arg(long, value_delimiter = ',', value_name = "FAMILY,...")]
    pub families: Vec<String>,
    /// Loads as shares of the peer's saturation rate [default: those of the matrix]
    #[arg(long, value_delimiter = ',', value_name = "SHARE,...", value_parser = share)]
    pub loads: Vec<f64>,
    /// Fleet sizes in ranks, or 0 for all of the matrix
    #[arg(long, value_delimiter = ',', value_name = "RANKS,...", default_value = "8")]
    pub ranks: Vec<u32>,
    /// Conditions of the matrix, or all
    #[arg(long, value_delimiter = ',', value_name = "CONDITION,...", default_value = "plain")]
    pub conditions: Vec<String>,
    /// Seeds of each case: tuning, held-back, or a number of seeds (with --families: the first tuning seeds)
    #[arg(long, default_value = "1", value_name = "SEEDS")]
    pub seeds: Seeds,
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.01..=100.0).contains(share));
    share.ok_or_else(|| "must be a share from 0.01 to 100".to_owned())
}

impl Matrix {
    /// Cases of `selection`, in order of families, ranks, loads and conditions.
    ///
    /// # Errors
    /// A family or a condition is unknown, or a held-back family is selected without held-back seeds.
    pub fn cases(&self, selection: &Selection) -> Result<Vec<Entry>, Failed> {
        let families = chosen(&self.family, &selection.families, |family| &family.name)?;
        let is_named = |family: &Family| selection.families.contains(&family.name);
        let is_final = selection.seeds == Seeds::HeldBack;
        if let Some(family) = families.iter().find(|family| family.held_back && !is_final && is_named(family)) {
            let name = &family.name;
            let rule = format!("family {name} is held back for the final check and requires --seeds held-back");
            return Err(rule.into());
        }
        let conditions = chosen(&self.condition, &selection.conditions, |condition| &condition.name)?;
        let loads = if selection.loads.is_empty() { &self.loads } else { &selection.loads };
        let ranks = if selection.ranks.contains(&0) { &self.ranks } else { &selection.ranks };
        let mut cases = Vec::new();
        for family in families.into_iter().filter(|family| is_final || !family.held_back) {
            for &ranks in ranks {
                for &load in loads {
                    cases.extend(conditions.iter().map(|condition| self.case(family, ranks, load, condition)));
                }
            }
        }
        Ok(cases)
    }

    /// Seeds of `selection`.
    ///
    /// # Errors
    /// More seeds are requested than the matrix has for tuning.
    pub fn seeds(&self, selection: &Selection) -> Result<Vec<u64>, Failed> {
        match selection.seeds {
            Seeds::Tuning => Ok(self.tuning_seeds.clone()),
            Seeds::HeldBack => Ok(self.held_back_seeds.clone()),
            Seeds::Count(count) => {
                let known = self.tuning_seeds.len();
                let seeds = self.tuning_seeds.get(..count as usize);
                let rule = || format!("--seeds is {count}, the matrix has {known} seeds for tuning");
                Ok(seeds.map(<[u64]>::to_vec).ok_or_else(rule)?)
            }
        }
    }

    fn case(&self, family: &Family, ranks: u32, load: f64, condition: &Condition) -> Entry {
        let rate = load * family.saturation * f64::from(ranks) * condition.capacity;
        let requests = family.requests_per_rank.saturating_mul(ranks).min(self.requests_max);
        let count = (f64::from(requests) / family.requests_each).ceil();
        let mut workload = family.workload.clone();
        workload += if workload.contains(':') { "," } else { ":" };
        workload += &format!("rate={rate:.4},{}={count}", family.count);
        for (setting, value) in &family.per_rank {
            workload += &format!(",{setting}={}", value.saturating_mul(ranks));
        }
        let conditions = condition.arguments.replace("{half}", &format!("{}-{ranks}", ranks / 2 + 1));
        Entry {
            name: format!("{}/{ranks}/{load}/{}", family.name, condition.name),
            why: format!("{} {}", family.why, condition.why),
            arguments: format!("--workload {workload} --workers {ranks} {conditions}"),
            trace: false,
        }
    }
}

/// Items with one of `names`, in order of `items`; all for no names or `all`.
fn chosen<'a, T>(items: &'a [T], names: &[String], name: impl Fn(&T) -> &String) -> Result<Vec<&'a T>, Failed> {
    if names.is_empty() || names.iter().any(|name| name == "all") {
        return Ok(items.iter().collect());
    }
    if let Some(unknown) = names.iter().find(|wanted| items.iter().all(|item| name(item) != *wanted)) {
        let known = items.iter().map(|item| name(item).as_str()).collect::<Vec<_>>().join(", ");
        return Err(format!("unknown workload {unknown:?}; known are {known}").into());
    }
    Ok(items.iter().filter(|item| names.contains(name(item))).collect())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::matrix;
    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        selection: Selection,
    }

    fn selection(line: &str) -> Selection {
        Line::parse_from(["test"].into_iter().chain(line.split_whitespace())).selection
    }

    #[test]
    fn every_case_is_a_valid_command_line_with_a_unique_name() {
        let all = selection("--families all --ranks 0 --conditions all --seeds held-back");
        let cases = matrix().expect("a list").cases(&all).expect("cases");
        let mut names: Vec<&str> = cases.iter().map(|case| case.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), cases.len());
        for case in &cases {
            let simulate = case.simulate(None).expect(&case.name).expect("no trace");
            simulate.setup(1).expect(&case.name);
            assert!(simulate.source.workload.is_some(), "{}", case.name);
        }
    }

    #[test]
    fn half_of_the_seeds_and_two_families_are_held_back() {
        let matrix = matrix().expect("a list");
        assert_eq!(matrix.tuning_seeds.len(), matrix.held_back_seeds.len());
        assert!(matrix.tuning_seeds.iter().all(|seed| !matrix.held_back_seeds.contains(seed)));
        let held_back = |line| {
            let cases = matrix.cases(&selection(line)).expect("cases");
            let is_held_back =
                |family: &&Family| cases.iter().any(|case| case.name.starts_with(&format!("{}/", family.name)));
            matrix.family.iter().filter(|family| family.held_back).filter(is_held_back).count()
        };
        assert_eq!(held_back("--families all --seeds tuning"), 0);
        assert_eq!(held_back("--families all --seeds held-back"), 2);
        let name = &matrix.family.iter().find(|family| family.held_back).expect("one").name;
        let error = matrix.cases(&selection(&format!("--families {name}"))).expect_err("refused").to_string();
        assert!(error.contains(name) && error.contains("--seeds held-back"), "{error}");
    }

    #[test]
    fn rates_follow_load_ranks_and_capacity() {
        let mut matrix = matrix().expect("a list");
        matrix.family.truncate(1);
        matrix.family[0].saturation = 2.0;
        let rate = |line: &str| {
            let cases = matrix.cases(&selection(line)).expect("cases");
            let (_, rest) = cases[0].arguments.split_once("rate=").expect("a rate");
            rest.split(',').next().expect("a rate").parse::<f64>().expect("a number")
        };
        assert_eq!(rate("--loads 0.5 --ranks 16"), 16.0);
        assert_eq!(rate("--loads 1 --ranks 8 --conditions unequal"), 12.0);
    }
}
