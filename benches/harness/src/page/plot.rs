//! Plots as inline SVG: lines, bands and grids of cells.
//!
//! Text and axes use the text colour of the page, so that they are visible on light and dark pages. Plots contain no
//! external text. Legends are part of the page, so that they cannot cover a plot.

use std::fmt::Write;

use super::axis::Axis;

/// Colours that are distinguishable with any colour vision and visible on white and black: those of Okabe and Ito
/// ("Color Universal Design", 2008), without black and yellow.
const PALETTE: [&str; 6] = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"];

/// Dash patterns of lines, for readers who cannot distinguish colours, and for more lines than colours.
const DASHES: [&str; 7] = ["", "14 6", "4 5", "20 5 4 5", "9 4", "3 9", "24 8"];

/// Number of opacity levels of cells.
const LEVELS: usize = 10;

/// Width of a plot in pixels; pages show it at half the size or less.
const WIDTH: f64 = 960.0;

/// Edges of the area within the axes. The lower edge depends on the height of the plot.
const LEFT: f64 = 156.0;
const RIGHT: f64 = 920.0;
const TOP: f64 = 16.0;

/// Height of the tick labels and the title of the horizontal axis.
const LABELS: f64 = 104.0;

/// A line with gaps between its pieces.
pub(super) struct Polyline {
    /// Index of the contender.
    pub(super) which: usize,
    /// Pieces of the line.
    pub(super) pieces: Vec<Vec<(f64, f64)>>,
}

/// CSS colour of a contender.
pub(super) fn colour(which: usize) -> &'static str {
    PALETTE[which % PALETTE.len()]
}

/// Colour and dash pattern of a contender's lines.
fn stroke(which: usize) -> String {
    let dash = DASHES[which % DASHES.len()];
    let dash = if dash.is_empty() { String::new() } else { format!(r#" stroke-dasharray="{dash}""#) };
    format!(r#"stroke="{}"{dash}"#, colour(which))
}

/// Short piece of a contender's line, for a legend.
pub(super) fn key(which: usize) -> String {
    format!(
        r#"<svg class="key" viewBox="0 0 60 10" aria-hidden="true"><line x1="0" y1="5" x2="60" y2="5" stroke-width="5" {}/></svg>"#,
        stroke(which)
    )
}

/// Draws several lines. The part of the plot before `shaded_until` is shaded.
pub(super) fn lines(x: &Axis, y: &Axis, shaded_until: Option<f64>, lines: &[Polyline]) -> String {
    let mut plot = Plot::new(520.0, x, y, shaded_until);
    for line in lines {
        for piece in &line.pieces {
            plot.line(piece.iter().copied(), &stroke(line.which));
        }
    }
    plot.finish()
}

/// The area between two lines, with a third line for the mean.
pub(super) struct Band<'a> {
    /// Index of the contender.
    pub(super) which: usize,
    /// Times.
    pub(super) at: &'a [f64],
    /// Lower line.
    pub(super) least: &'a [f64],
    /// Mean.
    pub(super) mean: &'a [f64],
    /// Upper line.
    pub(super) most: &'a [f64],
}

/// Draws one band. The part of the plot before `shaded_until` is shaded.
pub(super) fn band(x: &Axis, y: &Axis, shaded_until: Option<f64>, band: &Band<'_>) -> String {
    let mut plot = Plot::new(520.0, x, y, shaded_until);
    let (colour, times) = (colour(band.which), || band.at.iter().copied());
    let above = times().zip(band.most.iter().copied());
    plot.area(above.chain(times().zip(band.least.iter().copied()).rev()), colour, 0.3);
    plot.line(times().zip(band.mean.iter().copied()), &format!(r#"stroke="{colour}""#));
    plot.finish()
}

/// Draws a grid of cells: one row per rank, one column per time, with each value from 0 to 1 as opacity. Cells without
/// a value stay empty; cells of 0 are light grey.
pub(super) fn cells(which: usize, x: &Axis, column: f64, rows: &[Vec<Option<f64>>]) -> String {
    let y = Axis::ranks(rows.len());
    let mut plot = Plot::new((rows.len() as f64 * 18.0).clamp(300.0, 1_200.0) + 120.0, x, &y, None);
    let mut paths = vec![String::new(); LEVELS + 1];
    for (rank, row) in rows.iter().enumerate() {
        let (top, bottom) = (plot.y(rank as f64 + 1.0), plot.y(rank as f64));
        let mut start = 0;
        for run in row.chunk_by(|one, next| level(*one) == level(*next)) {
            let (left, right) = (plot.x(start as f64 * column), plot.x((start + run.len()) as f64 * column));
            start += run.len();
            if let Some(level) = level(run[0]) {
                paths[level] += &format!("M{left:.1} {top:.1}H{right:.1}V{bottom:.1}H{left:.1}Z");
            }
        }
    }
    for (level, path) in paths.iter().enumerate().filter(|(_, path)| !path.is_empty()) {
        let (fill, opacity) =
            if level == 0 { ("currentColor", 0.1) } else { (colour(which), level as f64 / LEVELS as f64) };
        plot.push(format_args!(r#"<path fill="{fill}" fill-opacity="{opacity}" d="{path}"/>"#));
    }
    plot.finish()
}

fn level(value: Option<f64>) -> Option<usize> {
    value.map(|value| (value.clamp(0.0, 1.0) * LEVELS as f64).round() as usize)
}

/// A plot with its axes.
struct Plot<'a> {
    svg: String,
    x: &'a Axis,
    y: &'a Axis,
    bottom: f64,
}

impl<'a> Plot<'a> {
    fn new(height: f64, x: &'a Axis, y: &'a Axis, shaded_until: Option<f64>) -> Self {
        let mut plot = Self { svg: String::new(), x, y, bottom: height - LABELS };
        let bottom = plot.bottom;
        plot.push(format_args!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-size="33" fill="currentColor">"#
        ));
        let grid = r#"stroke="currentColor" stroke-opacity="0.15""#;
        for (value, name) in x.ticks() {
            let at = plot.x(*value);
            plot.push(format_args!(r#"<path {grid} d="M{at:.1} {TOP}V{bottom}"/>"#));
            plot.text(at, bottom + 38.0, "middle", "", name);
        }
        for (value, name) in y.ticks() {
            let at = plot.y(*value);
            plot.push(format_args!(r#"<path {grid} d="M{LEFT} {at:.1}H{RIGHT}"/>"#));
            plot.text(LEFT - 12.0, at + 11.0, "end", "", name);
        }
        let axes = r#"fill="none" stroke="currentColor" stroke-opacity="0.6""#;
        plot.push(format_args!(r#"<path {axes} d="M{LEFT} {TOP}V{bottom}H{RIGHT}"/>"#));
        plot.text(f64::midpoint(LEFT, RIGHT), bottom + 84.0, "middle", "", x.title());
        plot.text(-f64::midpoint(TOP, bottom), 38.0, "middle", r#" transform="rotate(-90)""#, y.title());
        if let Some(until) = shaded_until.filter(|until| *until > 0.0) {
            let corners = [(0.0, y.end()), (until, y.end()), (until, y.start()), (0.0, y.start())];
            plot.area(corners.into_iter(), "currentColor", 0.07);
        }
        plot
    }

    fn x(&self, value: f64) -> f64 {
        LEFT + self.x.place(value) * (RIGHT - LEFT)
    }

    fn y(&self, value: f64) -> f64 {
        self.bottom - self.y.place(value) * (self.bottom - TOP)
    }

    /// Appends one line of SVG.
    fn push(&mut self, element: std::fmt::Arguments<'_>) {
        // Writing to a string always succeeds.
        let _ = writeln!(self.svg, "{element}");
    }

    fn text(&mut self, x: f64, y: f64, anchor: &str, attributes: &str, text: &str) {
        self.push(format_args!(r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}"{attributes}>{text}</text>"#));
    }

    fn points(&self, points: impl Iterator<Item = (f64, f64)>) -> String {
        points.map(|(x, y)| format!("{:.1},{:.1} ", self.x(x), self.y(y))).collect()
    }

    fn line(&mut self, points: impl Iterator<Item = (f64, f64)>, stroke: &str) {
        let points = self.points(points);
        self.push(format_args!(r#"<polyline fill="none" stroke-width="4" {stroke} points="{points}"/>"#));
    }

    fn area(&mut self, points: impl Iterator<Item = (f64, f64)>, fill: &str, opacity: f64) {
        let points = self.points(points);
        self.push(format_args!(r#"<polygon opacity="{opacity}" fill="{fill}" points="{points}"/>"#));
    }

    fn finish(mut self) -> String {
        self.svg += "</svg>";
        self.svg
    }
}
