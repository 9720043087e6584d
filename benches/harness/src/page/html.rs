//! HTML form of the page.
//!
//! The page is self-contained: it uses neither the network nor scripts. All external text is [`Escaped`].

use std::fmt::{self, Write};

use super::escaped::Escaped;
use super::plot;
use super::sections;
use crate::compare::text::{ratio, shown};
use crate::compare::view::View;
use crate::compare::{Comparison, Contender, Figure};
use crate::results::Summary;
use crate::results::text::{percent, time};
use crate::suite::Row;

/// System colours follow the browser's light or dark mode.
const STYLE: &str = "
:root { color-scheme: light dark; }
body { font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; padding: 0 1rem; max-width: 1560px;
       background: Canvas; color: CanvasText; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; } h3 { font-size: 1rem; margin: 0 0 .4rem; }
code { font-size: .85rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; margin: .8rem 0; }
th, td { padding: .3rem .5rem; text-align: right; border-bottom: 1px solid #8885; vertical-align: top; }
th:first-child, td:first-child { text-align: left; white-space: nowrap; }
td { white-space: nowrap; } td small { display: block; opacity: .75; }
td:first-child small { white-space: normal; max-width: 17rem; }
.word { text-align: left; white-space: normal; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 1rem; margin: 1rem 0; }
figure { margin: 0; padding: .8rem; border: 1px solid #8885; border-radius: 6px; }
figure svg { width: 100%; height: auto; display: block; }
figcaption { font-size: .85rem; opacity: .8; margin-top: .3rem; }
.legend span { margin-right: 1.4rem; white-space: nowrap; } .key { width: 42px; height: 8px; margin-right: .4rem; }
.warnings { border-left: 4px solid #D55E00; padding: .2rem 1rem; margin: .8rem 0; } .warnings li { margin: .2rem 0; }
.facts { font-size: .9rem; } .facts dt { float: left; clear: left; width: 9rem; opacity: .75; }
.facts dd { margin: 0 0 .2rem 9rem; }
";

/// Creates the whole page.
pub(super) fn page(sections: &[Row]) -> Result<String, fmt::Error> {
    let mut html = String::new();
    write!(
        html,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>Pointsman bench report</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>Pointsman bench report</h1>\n"
    )?;
    if sections.len() > 1 {
        overview(&mut html, sections)?;
    }
    for (number, section) in sections.iter().enumerate() {
        write!(html, "<section id=\"w{number}\">\n<h2>{}</h2>\n", Escaped(&section.name))?;
        if !section.why.is_empty() {
            writeln!(html, "<p>{}</p>", Escaped(&section.why))?;
        }
        warnings(&mut html, &section.comparison)?;
        policies(&mut html, &section.comparison)?;
        sections::plots(&mut html, &section.comparison)?;
        facts(&mut html, &section.comparison)?;
        html.push_str("</section>\n");
    }
    html.push_str("</body>\n</html>\n");
    Ok(html)
}

/// Overview of all workloads: ratios of mean times to the first policy, and verdicts.
fn overview(html: &mut String, sections: &[Row]) -> fmt::Result {
    html.push_str("<div class=\"scroll\"><table>\n<tr><th>workload</th><th class=\"word\">policy</th>");
    for figure in Figure::ALL {
        write!(html, "<th>{}</th>", figure.title())?;
    }
    html.push_str("<th class=\"word\">verdict</th></tr>\n");
    for (number, section) in sections.iter().enumerate() {
        for cells in section.verdicts() {
            let [workload, policy, figures @ .., verdict] = &cells[..] else { continue };
            write!(html, "<tr><td><a href=\"#w{number}\">{}</a></td>", Escaped(workload))?;
            write!(html, "<td class=\"word\">{}</td>", Escaped(policy))?;
            figures.iter().try_for_each(|figure| write!(html, "<td>{figure}</td>"))?;
            writeln!(html, "<td class=\"word\">{}</td></tr>", Escaped(verdict))?;
        }
    }
    html.push_str("</table></div>\n");
    Ok(())
}

fn warnings(html: &mut String, comparison: &Comparison) -> fmt::Result {
    let warnings = comparison.warnings();
    if warnings.is_empty() {
        return Ok(());
    }
    html.push_str("<div class=\"warnings\"><strong>Validity warnings</strong><ul>\n");
    for warning in warnings {
        writeln!(html, "<li>{}</li>", Escaped(&warning))?;
    }
    html.push_str("</ul></div>\n");
    Ok(())
}

fn policies(html: &mut String, comparison: &Comparison) -> fmt::Result {
    html.push_str("<div class=\"scroll\"><table>\n<tr><th>policy</th>");
    let others = ["goodput", "load, max over mean", "queue p99", "regret mean", "predicted TTFT off by"];
    for title in Figure::ALL.map(Figure::title).iter().chain(&others) {
        write!(html, "<th>{title}</th>")?;
    }
    html.push_str("</tr>\n");
    for (which, contender) in comparison.contenders.iter().enumerate() {
        let reference = || "reference of the comparison".to_owned();
        let others = comparison.contenders.first().filter(|_| which > 0);
        let verdict = others.map_or_else(reference, |first| View::of(first, contender).judgement());
        let (key, name) = (plot::key(which), Escaped(&contender.name));
        write!(html, "<tr><td>{key}{name}<small>{}</small></td>", Escaped(&verdict))?;
        for figure in Figure::ALL {
            let ratio = contender.ratios.get(&figure).map(|of| format!("<small>× {}</small>", ratio(of)));
            let ratio = ratio.unwrap_or_default();
            write!(html, "<td>{}{ratio}</td>", shown(figure, contender.mean(figure)))?;
        }
        for cell in other_cells(contender) {
            write!(html, "<td>{cell}</td>")?;
        }
        html.push_str("</tr>\n");
    }
    html.push_str("</table></div>\n");
    Ok(())
}

fn other_cells(contender: &Contender) -> [String; 5] {
    let mean = |of: fn(&Summary) -> Option<f64>| {
        let values: Option<Vec<f64>> = contender.runs.iter().map(of).collect();
        let values = values.filter(|values| !values.is_empty())?;
        Some(values.iter().sum::<f64>() / values.len() as f64)
    };
    let unknown = || "–".to_owned();
    let share = |of: Option<f64>| of.map_or_else(unknown, |of| percent(Some(of)));
    let times = |of: Option<f64>| of.map_or_else(unknown, time);
    [
        share(mean(|run| Some(run.goodput?.share))),
        mean(|run| run.load_max_over_mean).map_or_else(unknown, |spread| format!("{spread:.2}")),
        times(mean(|run| Some(run.queue_seconds?.p99))),
        times(mean(|run| Some(run.regret_seconds?.mean))),
        share(mean(|run| run.predicted_ttft_error?.mean_absolute_relative)),
    ]
}

fn facts(html: &mut String, comparison: &Comparison) -> fmt::Result {
    let Some(run) = comparison.contenders.first().and_then(|first| first.runs.first()) else {
        return Ok(());
    };
    let seeds = comparison.seeds.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    let limits = run.goodput.map_or_else(
        || "none counted".to_owned(),
        |of| format!("first token within {} ms, {} ms a token", of.limits.ttft_ms, of.limits.itl_ms),
    );
    html.push_str("<dl class=\"facts\">\n");
    for (name, value) in [
        ("workload", run.workload.clone()),
        ("trace checksum", run.trace_checksum.clone().unwrap_or_else(|| "generated".to_owned())),
        ("fleet", format!("{} workers of {} ranks", run.workers, run.dp_size)),
        ("requests", format!("{} measured after {} to warm", run.requests, run.warmup_requests)),
        ("throughput", format!("{:.2} requests a second over {:.1} s", run.requests_per_second, run.duration_seconds)),
        ("seeds", seeds),
        ("goodput", limits),
        ("machine", format!("{} cores of {}, Linux {}", run.machine.cores, run.machine.cpu, run.machine.kernel)),
        ("commit", run.commit.clone()),
    ] {
        writeln!(html, "<dt>{name}</dt><dd>{}</dd>", Escaped(&value))?;
    }
    writeln!(html, "<dt>command</dt><dd><code>{}</code></dd>", Escaped(&run.command))?;
    html.push_str("</dl>\n");
    Ok(())
}
