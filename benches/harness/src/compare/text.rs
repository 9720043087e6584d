//! Text form of a comparison. Each ratio is printed with its interval, if it has one.

use std::io::{self, Write};

use super::{Comparison, Contender, Figure, Ratio};
use crate::results::table::Table;
use crate::results::text::{percent, time};

impl Comparison {
    /// Writes the comparison as text: each figure's mean over the seeds, and ratios to the first contender.
    ///
    /// # Errors
    /// `out` fails.
    pub fn write_text(&self, mut out: impl Write) -> io::Result<()> {
        let Some((first, run)) = self.contenders.first().and_then(|first| Some((first, first.runs.first()?))) else {
            return writeln!(out, "nothing to compare");
        };
        writeln!(
            out,
            "{}: {} workers of {} ranks, {} requests measured, seeds {}",
            run.workload,
            run.workers,
            run.dp_size,
            run.requests,
            self.seeds.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")
        )?;
        let head = || std::iter::once("").chain(Figure::ALL.map(Figure::title));
        let mut means = Table::new(&[0], head());
        let mut ratios = Table::new(&[0], head());
        for contender in &self.contenders {
            means.push(row(contender, |figure| shown(figure, contender.mean(figure))));
        }
        for contender in self.contenders.iter().skip(1) {
            ratios.push(row(contender, |figure| contender.ratios.get(&figure).map_or_else(|| "–".to_owned(), ratio)));
        }
        writeln!(out, "\nmeans over seeds")?;
        means.write(&mut out)?;
        if self.contenders.len() > 1 {
            writeln!(out, "\nratios to {}, with 95 % intervals over {} seeds", first.name, self.seeds.len())?;
            ratios.write(&mut out)?;
        }
        Ok(())
    }
}

fn row(contender: &Contender, cell: impl Fn(Figure) -> String) -> Vec<String> {
    std::iter::once(contender.name.clone()).chain(Figure::ALL.into_iter().map(cell)).collect()
}

/// Formats a figure with its unit.
pub(crate) fn shown(figure: Figure, value: Option<f64>) -> String {
    match value {
        Some(value) if figure.is_time() => time(value),
        Some(value) => percent(Some(value)),
        None => "–".to_owned(),
    }
}

/// Formats a ratio with its interval.
pub(crate) fn ratio(of: &Ratio) -> String {
    match of.interval {
        Some((low, high)) => format!("{:.3} [{low:.3}, {high:.3}]", of.ratio),
        None => format!("{:.3}", of.ratio),
    }
}
