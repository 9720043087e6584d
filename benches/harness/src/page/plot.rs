//! Plots as inline SVG: lines, bands and grids of cells.
//!
//! Text and axes use the text colour of the page, so that they are visible on light and dark pages. Plots contain no
//! external text. Legends are part of the page, so that they cannot cover a plot.

use std::fmt::Write;

use plotters::chart::{ChartBuilder, ChartContext};
use plotters::coord::cartesian::Cartesian2d;
use plotters::coord::ranged1d::Ranged;
use plotters::prelude::{Color, IntoDrawingArea, IntoFont, PathElement, Polygon, RGBColor, SVGBackend};

use super::axis::Axis;

/// Colours that are distinguishable with any colour vision and visible on white and black: those of Okabe and Ito
/// ("Color Universal Design", 2008), without black and yellow.
const PALETTE: [RGBColor; 6] = [
    RGBColor(0x00, 0x72, 0xB2),
    RGBColor(0xD5, 0x5E, 0x00),
    RGBColor(0x00, 0x9E, 0x73),
    RGBColor(0xCC, 0x79, 0xA7),
    RGBColor(0xE6, 0x9F, 0x00),
    RGBColor(0x56, 0xB4, 0xE9),
];

/// Dash patterns of lines, for readers who cannot distinguish colours, and for more lines than colours.
const DASHES: [&str; 7] = ["", "14 6", "4 5", "20 5 4 5", "9 4", "3 9", "24 8"];

/// Placeholder for the text colour of the page until the SVG is complete.
const INK: RGBColor = RGBColor(1, 2, 3);

/// Number of opacity levels of cells.
const LEVELS: usize = 10;

/// Width of a plot in pixels; pages show it at half the size or less.
const WIDTH: u32 = 960;

type Chart<'a> = ChartContext<'a, SVGBackend<'a>, Cartesian2d<Axis, Axis>>;

/// A plot was not drawn; contains the error of the drawing library.
#[derive(Debug, thiserror::Error)]
#[error("cannot draw a plot: {0}")]
pub struct PlotError(String);

fn failed(error: impl std::fmt::Display) -> PlotError {
    PlotError(error.to_string())
}

/// A line with gaps between its pieces.
pub(super) struct Polyline {
    /// Index of the contender.
    pub(super) which: usize,
    /// Pieces of the line.
    pub(super) pieces: Vec<Vec<(f64, f64)>>,
}

/// CSS colour of a contender.
pub(super) fn colour(which: usize) -> String {
    css(colour_of(which))
}

fn colour_of(which: usize) -> RGBColor {
    PALETTE[which % PALETTE.len()]
}

/// Placeholder for a contender's colour and dash pattern until the SVG is complete. The drawing library has no dash
/// patterns.
fn stand_in(which: usize) -> RGBColor {
    RGBColor(2, 3, (which % 256) as u8)
}

fn css(RGBColor(red, green, blue): RGBColor) -> String {
    format!("#{red:02X}{green:02X}{blue:02X}")
}

/// Short piece of a contender's line, for a legend.
pub(super) fn key(which: usize) -> String {
    format!(
        r#"<svg class="key" viewBox="0 0 60 10" aria-hidden="true"><line x1="0" y1="5" x2="60" y2="5" stroke="{}" stroke-width="5"{}/></svg>"#,
        colour(which),
        dash(which)
    )
}

fn dash(which: usize) -> String {
    let dash = DASHES[which % DASHES.len()];
    if dash.is_empty() { String::new() } else { format!(r#" stroke-dasharray="{dash}""#) }
}

/// Draws several lines. The part of the plot before `shaded_until` is shaded.
pub(super) fn lines(x: &Axis, y: &Axis, shaded_until: Option<f64>, lines: &[Polyline]) -> Result<String, PlotError> {
    let mut svg = draw(520, x, y, |chart| {
        shade(chart, x, y, shaded_until)?;
        for line in lines {
            for piece in &line.pieces {
                let style = stand_in(line.which).stroke_width(4);
                chart.draw_series([PathElement::new(piece.clone(), style)]).map_err(failed)?;
            }
        }
        Ok(String::new())
    })?;
    for line in lines {
        let stroke = |colour: &str| format!(r#" stroke="{colour}""#);
        let drawn = stroke(&colour(line.which)) + &dash(line.which);
        svg = svg.replace(&stroke(&css(stand_in(line.which))), &drawn);
    }
    Ok(svg)
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
pub(super) fn band(x: &Axis, y: &Axis, shaded_until: Option<f64>, band: &Band<'_>) -> Result<String, PlotError> {
    draw(520, x, y, |chart| {
        shade(chart, x, y, shaded_until)?;
        let place = |(at, value): (&f64, &f64)| (*at, *value);
        let (above, below) = (band.at.iter().zip(band.most), band.at.iter().zip(band.least).rev());
        let outline: Vec<_> = above.chain(below).map(place).collect();
        let colour = colour_of(band.which);
        chart.draw_series([Polygon::new(outline, colour.mix(0.3))]).map_err(failed)?;
        let mean: Vec<_> = band.at.iter().zip(band.mean).map(place).collect();
        chart.draw_series([PathElement::new(mean, colour.stroke_width(4))]).map_err(failed)?;
        Ok(String::new())
    })
}

fn shade(chart: &mut Chart<'_>, x: &Axis, y: &Axis, until: Option<f64>) -> Result<(), PlotError> {
    if let Some(until) = until.filter(|until| *until > 0.0) {
        let (left, right, span) = (x.range().start, until, y.range());
        let corners = vec![(left, span.start), (right, span.start), (right, span.end), (left, span.end)];
        chart.draw_series([Polygon::new(corners, INK.mix(0.07))]).map_err(failed)?;
    }
    Ok(())
}

/// Draws a grid of cells: one row per rank, one column per time, with each value from 0 to 1 as opacity. Cells without
/// a value stay empty; cells of 0 are light grey.
pub(super) fn cells(which: usize, x: &Axis, column: f64, rows: &[Vec<Option<f64>>]) -> Result<String, PlotError> {
    let y = Axis::ranks(rows.len());
    let height = u32::try_from(rows.len()).unwrap_or(u32::MAX).saturating_mul(18).clamp(300, 1_200) + 120;
    draw(height, x, &y, |chart| {
        let mut paths = vec![String::new(); LEVELS + 1];
        for (rank, row) in rows.iter().enumerate() {
            let mut start = 0;
            for run in row.chunk_by(|one, next| level(*one) == level(*next)) {
                let (from, until) = (start as f64 * column, (start + run.len()) as f64 * column);
                start += run.len();
                if let Some(level) = level(run[0]) {
                    let (left, top) = chart.backend_coord(&(from.min(x.end()), rank as f64 + 1.0));
                    let (right, bottom) = chart.backend_coord(&(until.min(x.end()), rank as f64));
                    // Writing to a string always succeeds.
                    let _ = write!(paths[level], "M{left} {top}H{right}V{bottom}H{left}Z");
                }
            }
        }
        let path = |(level, path): (usize, &String)| {
            let fill = if level == 0 { "currentColor".to_owned() } else { colour(which) };
            let opacity = if level == 0 { 0.1 } else { level as f64 / LEVELS as f64 };
            (!path.is_empty()).then(|| format!("<path fill=\"{fill}\" fill-opacity=\"{opacity}\" d=\"{path}\"/>\n"))
        };
        Ok(paths.iter().enumerate().filter_map(path).collect())
    })
}

fn level(value: Option<f64>) -> Option<usize> {
    value.map(|value| (value.clamp(0.0, 1.0) * LEVELS as f64).round() as usize)
}

/// Draws axes and the content of `draw_in`, then appends the SVG that it returns.
fn draw(
    height: u32,
    x: &Axis,
    y: &Axis,
    draw_in: impl FnOnce(&mut Chart<'_>) -> Result<String, PlotError>,
) -> Result<String, PlotError> {
    let mut svg = String::new();
    let more = {
        let root = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
        let mut builder = ChartBuilder::on(&root);
        builder.margin(16).margin_right(40).x_label_area_size(88).y_label_area_size(140);
        let mut chart = builder.build_cartesian_2d(x.clone(), y.clone()).map_err(failed)?;
        let font = || ("sans-serif", 33).into_font().color(&INK);
        chart
            .configure_mesh()
            .x_labels(x.tick_count())
            .y_labels(y.tick_count())
            .x_desc(x.title())
            .y_desc(y.title())
            .axis_style(INK.mix(0.6))
            .bold_line_style(INK.mix(0.15))
            .light_line_style(INK.mix(0.0))
            .label_style(font())
            .axis_desc_style(font())
            .draw()
            .map_err(failed)?;
        let more = draw_in(&mut chart)?;
        drop(chart);
        root.present().map_err(failed)?;
        more
    };
    let body = svg.trim_end().strip_suffix("</svg>").unwrap_or(&svg).replace(&css(INK), "currentColor");
    Ok(format!("{body}{more}</svg>"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_match_the_colours_and_dashes_of_their_legends() {
        let of = |which| Polyline { which, pieces: vec![vec![(0.0, 1.0), (0.9, 2.0)], vec![(0.95, 3.0), (0.99, 9.0)]] };
        let svg = lines(&Axis::shares(), &Axis::times("TTFT", 1.0, 9.0), None, &[of(0), of(1)]).expect("drawn");
        assert_eq!(svg.matches(r##"stroke="#0072B2""##).count(), 2);
        assert_eq!(svg.matches(r##"stroke="#D55E00" stroke-dasharray="14 6""##).count(), 2);
        assert!(key(1).contains(r##"stroke="#D55E00" stroke-width="5" stroke-dasharray="14 6""##));
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>") && !svg.contains("#010203"));
        assert!(svg.contains("currentColor") && svg.contains("99.9"));
    }

    #[test]
    fn cells_of_equal_opacity_share_a_path_and_empty_cells_have_none() {
        let rows = vec![vec![Some(1.0), Some(1.0), None, Some(0.0)], vec![Some(0.52), Some(0.48), Some(1.0), None]];
        let svg = cells(0, &Axis::clock(40.0), 10.0, &rows).expect("drawn");
        let path = |opacity: &str| {
            let found = svg.lines().find(|line| line.contains(&format!(r#"fill-opacity="{opacity}""#)));
            found.map_or(0, |line| line.matches('M').count())
        };
        assert_eq!((path("1"), path("0.5"), path("0.1")), (2, 1, 1), "{svg}");
    }

    #[test]
    fn a_band_fills_the_area_between_its_lines() {
        let (at, values) = ([0.0, 1.0, 2.0], [1.0, 2.0, 3.0]);
        let of = Band { which: 2, at: &at, least: &[0.0; 3], mean: &values, most: &[4.0; 3] };
        let svg = band(&Axis::clock(2.0), &Axis::from_zero("requests", 4.0), Some(0.5), &of).expect("drawn");
        assert!(svg.contains(r##"<polygon opacity="0.3" fill="#009E73""##), "{svg}");
        assert!(svg.contains(r#"<polygon opacity="0.07" fill="currentColor""#), "{svg}");
    }
}
