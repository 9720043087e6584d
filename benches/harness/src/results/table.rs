//! Tables of text with aligned columns: words to the left, figures to the right.

use std::io::{self, Write};

/// Rows of cells; the first row is the header.
#[derive(Clone, Debug, Default)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
    words: Vec<usize>,
}

impl Table {
    /// Creates a table with this header. `words` are the numbers of the columns with words.
    pub(crate) fn new(words: &[usize], head: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let mut table = Self { rows: Vec::new(), words: words.to_vec() };
        table.push(head);
        table
    }

    /// Adds a row.
    pub(crate) fn push(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) {
        self.rows.push(cells.into_iter().map(Into::into).collect());
    }

    /// Writes the table with two spaces between columns.
    pub(crate) fn write(&self, mut out: impl Write) -> io::Result<()> {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or_default();
        let width = |column: usize| {
            self.rows
                .iter()
                .filter_map(|row| row.get(column))
                .map(|cell| cell.chars().count())
                .max()
                .unwrap_or_default()
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
                line += if column == 0 { "" } else { "  " };
                line +=
                    &if self.words.contains(&column) { format!("{cell:<width$}") } else { format!("{cell:>width$}") };
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }
}
