//! Plots of one workload.
//!
//! Plots of several policies share their axes, so that they are visually comparable.

use std::fmt::{self, Write};

use super::axis::Axis;
use super::escaped::Escaped;
use super::plot::{self, Band, Polyline};
use crate::compare::Comparison;
use crate::results::Series;

/// Series of one contender.
struct Plotted<'a> {
    which: usize,
    name: &'a str,
    series: &'a Series,
}

/// All plots of `comparison`. Each contender is represented by its first run with series.
pub(super) fn plots(html: &mut String, comparison: &Comparison) -> fmt::Result {
    let plotted: Vec<Plotted<'_>> = (comparison.contenders.iter().enumerate())
        .filter_map(|(which, contender)| {
            let series = contender.runs.iter().find_map(|run| run.series.as_ref())?;
            Some(Plotted { which, name: &contender.name, series })
        })
        .collect();
    if plotted.is_empty() {
        html.push_str("<p>No plots: these results were created without <code>--series</code>.</p>\n");
        return Ok(());
    }
    legend(html, &plotted)?;
    html.push_str("<div class=\"grid\">\n");
    latencies(html, &plotted)?;
    over_time(html, &plotted)?;
    html.push_str("</div>\n");
    by_rank(html, &plotted)
}

fn legend(html: &mut String, plotted: &[Plotted<'_>]) -> fmt::Result {
    html.push_str("<p class=\"legend\">");
    for Plotted { which, name, .. } in plotted {
        write!(html, "<span>{}{}</span>", plot::key(*which), Escaped(name))?;
    }
    html.push_str("</p>\n");
    Ok(())
}

fn figure(html: &mut String, title: &str, svg: &str, caption: &str) -> fmt::Result {
    let title = Escaped(title);
    let svg = svg.replacen("<svg ", &format!("<svg role=\"img\" aria-label=\"{title}\" "), 1);
    writeln!(html, "<figure><h3>{title}</h3>{svg}<figcaption>{caption}</figcaption></figure>")
}

fn latencies(html: &mut String, plotted: &[Plotted<'_>]) -> fmt::Result {
    type Curve = fn(&Series) -> &Vec<(f64, f64)>;
    for (title, axis_title, curve) in [
        ("Time to first token", "TTFT", (|series| &series.ttft) as Curve),
        ("Time per token, mean of an answer", "ITL", |series| &series.itl),
        ("Gaps between tokens", "gap", |series| &series.token_gap),
        ("End-to-end time", "end to end", |series| &series.e2e),
    ] {
        let times = || plotted.iter().flat_map(|plotted| curve(plotted.series)).map(|(_, seconds)| *seconds);
        let (least, most) = (times().fold(f64::INFINITY, f64::min), times().fold(0.0, f64::max));
        if most <= 0.0 {
            continue;
        }
        let line = |of: &Plotted<'_>| Polyline { which: of.which, pieces: vec![curve(of.series).clone()] };
        let lines: Vec<_> = plotted.iter().map(line).collect();
        let svg = plot::lines(&Axis::shares(), &Axis::times(axis_title, least, most), None, &lines);
        figure(html, title, &svg, "So many per cent are no slower. Each nine takes as much room.")?;
    }
    Ok(())
}

/// Middle times of a run's bins.
fn middles(series: &Series, bins: usize) -> Vec<f64> {
    (0..bins).map(|bin| (bin as f64 + 0.5) * series.bin_seconds).collect()
}

fn clock(plotted: &[Plotted<'_>]) -> Axis {
    let end = |of: &Plotted<'_>| of.series.bin_seconds * of.series.in_flight.len() as f64;
    Axis::clock(plotted.iter().map(end).fold(0.0, f64::max))
}

fn over_time(html: &mut String, plotted: &[Plotted<'_>]) -> fmt::Result {
    let shaded = plotted.first().map(|first| first.series.measured_from_seconds);
    let clock = clock(plotted);
    let most = plotted.iter().flat_map(|of| &of.series.in_flight).copied().fold(0.0, f64::max);
    let line = |of: &Plotted<'_>| {
        let values = of.series.in_flight.iter().copied();
        let points = middles(of.series, of.series.in_flight.len()).into_iter().zip(values);
        Polyline { which: of.which, pieces: vec![points.collect()] }
    };
    let lines: Vec<_> = plotted.iter().map(line).collect();
    let svg = plot::lines(&clock, &Axis::from_zero("requests", most), shaded, &lines);
    figure(html, "Requests in flight", &svg, "Sent and not ended. The shaded part only warms caches.")?;

    let lines: Vec<_> = plotted.iter().map(|of| Polyline { which: of.which, pieces: pieces(of.series) }).collect();
    if lines.iter().any(|line| !line.pieces.is_empty()) {
        let svg = plot::lines(&clock, &Axis::percent("hit rate, %"), shaded, &lines);
        figure(html, "Hit rate", &svg, "Prompt tokens found cached, of those admitted at the time.")?;
    }
    Ok(())
}

/// The known parts of the hit rate. A single bin between gaps is drawn as a line of the bin's width, because a point is
/// invisible.
fn pieces(series: &Series) -> Vec<Vec<(f64, f64)>> {
    let points: Vec<_> = middles(series, series.hit_rate.len()).into_iter().zip(&series.hit_rate).collect();
    let known = |piece: &[(f64, &Option<f64>)]| {
        let points: Vec<_> = piece.iter().filter_map(|(at, rate)| Some((*at, (**rate)?))).collect();
        let half = series.bin_seconds / 2.0;
        if let [(at, rate)] = points[..] { vec![(at - half, rate), (at + half, rate)] } else { points }
    };
    points.split(|(_, rate)| rate.is_none()).filter(|piece| !piece.is_empty()).map(known).collect()
}

/// Load and hit rate of the ranks, for each policy.
fn by_rank(html: &mut String, plotted: &[Plotted<'_>]) -> fmt::Result {
    let most = plotted.iter().flat_map(|of| &of.series.rank_requests_max).copied().fold(0.0, f64::max);
    let clock = clock(plotted);
    for Plotted { which, name, series } in plotted.iter().filter(|of| !of.series.rank_requests_max.is_empty()) {
        html.push_str("<div class=\"grid\">\n");
        let at = middles(series, series.rank_requests_max.len());
        let band = Band {
            which: *which,
            at: &at,
            least: &series.rank_requests_min,
            mean: &series.rank_requests_mean,
            most: &series.rank_requests_max,
        };
        let requests = Axis::from_zero("requests a rank", most);
        let svg = plot::band(&clock, &requests, Some(series.measured_from_seconds), &band);
        let caption = "The line is the mean over ranks, the band reaches from the emptiest rank to the fullest.";
        figure(html, &format!("{name}: load"), &svg, caption)?;
        if !series.ranks.is_empty() {
            let full = most.max(f64::MIN_POSITIVE);
            let load = |requests: &Vec<f64>| requests.iter().map(|requests| Some(requests / full)).collect();
            let rows: Vec<_> = series.ranks.iter().map(|rank| load(&rank.requests)).collect();
            let svg = plot::cells(*which, &clock, series.bin_seconds, &rows);
            let caption = format!("Full colour: {most:.0} requests, the most under any policy. Grey: none.");
            figure(html, &format!("{name}: load by rank"), &svg, &caption)?;
            let rows: Vec<_> = series.ranks.iter().map(|rank| rank.hit_rate.clone()).collect();
            let svg = plot::cells(*which, &clock, series.bin_seconds, &rows);
            let caption = "Full colour: all prompt tokens cached. Grey: none of them. Blank: no prompt admitted.";
            figure(html, &format!("{name}: hit rate by rank"), &svg, caption)?;
        }
        html.push_str("</div>\n");
    }
    Ok(())
}
