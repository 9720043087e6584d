//! Columns of the tables of all comparisons. Figures are medians, which are insensitive to a temporary slowdown of the
//! machine.

use std::io::{self, Write};

use serde::Serialize;

/// Median of the values; the mean of the middle two for an even number, none without values.
///
/// ```
/// use pointsman_versus::columns::median;
///
/// assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
/// assert_eq!(median([4.0, 1.0]), Some(2.5));
/// assert_eq!(median([]), None);
/// ```
#[must_use]
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() % 2 {
        1 => Some(values[middle]),
        _ => Some(f64::midpoint(*values.get(middle.checked_sub(1)?)?, values[middle])),
    }
}

/// One figure of a run. Runs at the same position of two lists are a pair.
#[derive(Debug)]
pub struct Column<R> {
    /// Title in a table.
    pub title: &'static str,
    decimals: usize,
    /// Figure of a run, if it was measured.
    pub figure: fn(&R) -> Option<f64>,
}

impl<R> Column<R> {
    /// A figure shown with this number of decimals.
    pub const fn new(title: &'static str, decimals: usize, figure: fn(&R) -> Option<f64>) -> Self {
        Self { title, decimals, figure }
    }

    /// Median of `runs`; none without runs, or if it was not measured in one.
    #[must_use]
    pub fn median(&self, runs: &[R]) -> Option<f64> {
        median(runs.iter().map(self.figure).collect::<Option<Vec<f64>>>()?)
    }

    /// The median of `runs`, as displayed.
    #[must_use]
    pub fn shown(&self, runs: &[R]) -> String {
        shown(self.median(runs), self.decimals)
    }

    /// Ratios of two lists of runs, pair by pair.
    #[must_use]
    pub fn ratios(&self, ours: &[R], theirs: &[R]) -> Option<Vec<f64>> {
        ours.iter().zip(theirs).map(|(ours, theirs)| Some((self.figure)(ours)? / (self.figure)(theirs)?)).collect()
    }

    /// Median of the pairs' ratios.
    #[must_use]
    pub fn ratio(&self, ours: &[R], theirs: &[R]) -> Option<f64> {
        median(self.ratios(ours, theirs)?)
    }
}

/// A figure with this number of decimals, or a dash.
#[must_use]
pub fn shown(figure: Option<f64>, decimals: usize) -> String {
    figure.map_or("-".to_owned(), |figure| format!("{figure:.decimals$}"))
}

/// Row of a Markdown table.
#[must_use]
pub fn row(cells: &[String]) -> String {
    format!("| {} |\n", cells.join(" | "))
}

/// Head of a Markdown table: the titles `first`, those of the columns, and `last`.
#[must_use]
pub fn head<R>(first: &[&str], columns: &[Column<R>], last: &[&str]) -> String {
    let titles = columns.iter().map(|column| column.title);
    let cells: Vec<String> =
        first.iter().copied().chain(titles).chain(last.iter().copied()).map(str::to_owned).collect();
    format!("{}{}|\n", row(&cells), "|---".repeat(cells.len()))
}

/// Prints the table, or `runs` as one JSON object with the table on standard error.
///
/// # Errors
/// The output cannot be written.
pub fn print(table: &str, runs: &impl Serialize, json: bool) -> io::Result<()> {
    if !json {
        return write!(io::stdout(), "{table}");
    }
    write!(io::stderr(), "{table}")?;
    serde_json::to_writer(io::stdout(), runs)?;
    writeln!(io::stdout())
}
