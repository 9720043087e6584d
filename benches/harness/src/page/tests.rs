use super::html::page;
use crate::compare::Comparison;
use crate::compare::tests::summary;
use crate::results::RankSample;
use crate::results::tests::{request, run};
use crate::results::{Series, Summary};
use crate::suite::Row;

/// A run on three ranks, with all data for plots.
fn plotted(policy: &str, seed: u64, times: f64) -> Summary {
    let mut run = run((0..1_000).map(|number| request(10 * number)).collect());
    let sample = |number: u64| RankSample {
        at_us: number * 20_000,
        rank: (number % 3) as u32,
        requests: (number % 7) as u32,
        prompt_tokens_total: 1_000 * number,
        cached_tokens_total: 400 * number,
    };
    run.rank_samples = (0..500).map(sample).collect();
    run.ranks = 3;
    Summary { series: Some(Series::of(&run)), ..summary(policy, seed, times) }
}

fn section(title: &str, runs: Vec<(&str, Vec<Summary>)>) -> Row {
    let runs = runs.into_iter().map(|(name, runs)| (name.to_owned(), runs)).collect();
    Row { name: title.into(), why: "Why it is there.".into(), comparison: Comparison::of_runs(runs) }
}

fn both() -> Row {
    let runs = |policy, times| (1..=3).map(|seed| plotted(policy, seed, times * seed as f64)).collect();
    section("chat", vec![("kv", runs("kv", 1.0)), ("latency", runs("latency", 0.8))])
}

#[test]
fn a_page_is_self_contained() {
    let html = page(&[both()]).expect("a page");
    let without_namespace = html.replace("xmlns=\"http://www.w3.org/2000/svg\"", "");
    for outside in ["http:", "https:", "//", "<script", "<link", "@import", "url(", "src="] {
        assert!(!without_namespace.contains(outside), "{outside}");
    }
    assert_eq!(html.matches("<svg").count(), html.matches("</svg>").count());
}

#[test]
fn a_page_contains_all_plots_units_and_ratios() {
    let html = page(&[both()]).expect("a page");
    for title in [
        "Time to first token",
        "Time per token, mean of an answer",
        "Gaps between tokens",
        "End-to-end time",
        "Requests in flight",
        "Hit rate",
        "kv: load",
        "latency: load by rank",
        "latency: hit rate by rank",
    ] {
        assert!(html.contains(&format!("<h3>{title}</h3>")), "{title}");
    }
    for words in ["% of requests or gaps", "time, seconds", "requests a rank", "hit rate, %", "× 0.800 [0.800, 0.800]"]
    {
        assert!(html.contains(words), "{words}");
    }
    assert_eq!(html.matches("<figure>").count(), 6 + 2 * 3);
}

#[test]
fn external_text_is_escaped() {
    let evil = "<script>alert('x')</script>&\"";
    let run = Summary { workload: evil.into(), command: evil.into(), policy: evil.into(), ..plotted(evil, 1, 1.0) };
    let html = page(&[section(evil, vec![(evil, vec![run])])]).expect("a page");
    assert!(!html.contains("<script") && !html.contains("alert('x')"));
    assert!(html.contains("&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&amp;&quot;"));
}

#[test]
fn several_workloads_have_an_overview_and_plots_require_series() {
    let bare =
        section("agents", vec![("kv", vec![summary("kv", 1, 1.0)]), ("random", vec![summary("random", 1, 3.0)])]);
    let html = page(&[both(), bare]).expect("a page");
    assert!(html.contains("<a href=\"#w1\">agents</a>") && html.contains("<section id=\"w1\">"));
    assert!(html.contains(" worse in TTFT mean") && html.contains("created without <code>--series</code>"));
    assert_eq!(page(&[both()]).expect("a page"), page(&[both()]).expect("a page"));
}
