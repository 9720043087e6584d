//! A pair of contenders from the view of the product: the policy `latency`, or the endpoint of `--url`.

use std::collections::BTreeMap;

use super::{Contender, Figure, Ratio, TIE, Verdict, worse};

/// One contender relative to another.
pub(crate) struct View<'a> {
    /// The product, if it is one of both; else the other one than the first.
    pub(crate) subject: &'a str,
    pub(crate) reference: &'a str,
    /// Ratios of the subject's figures to those of the reference.
    pub(crate) ratios: BTreeMap<Figure, Ratio>,
}

impl<'a> View<'a> {
    /// The view of a pair. `other` has its ratios to `first`.
    pub(crate) fn of(first: &'a Contender, other: &'a Contender) -> Self {
        if is_product(&first.name) && other.name.split('+').next() != Some("latency") {
            let inverse = |(figure, ratio): (&Figure, &Ratio)| (*figure, ratio.inverse());
            let ratios = other.ratios.iter().map(inverse).collect();
            return Self { subject: &first.name, reference: &other.name, ratios };
        }
        Self { subject: &other.name, reference: &first.name, ratios: other.ratios.clone() }
    }

    /// A sentence with the deciding figures and all that differ clearly and by more than 2 %.
    pub(crate) fn headline(&self) -> String {
        let mut shown = Vec::new();
        for (figure, ratio) in Figure::ALL.into_iter().filter_map(|figure| Some((figure, self.ratios.get(&figure)?))) {
            let differs = (ratio.ratio - 1.0).abs() > TIE && !is_unclear(ratio);
            if Figure::DECIDING.contains(&figure) || differs {
                let reference = if shown.is_empty() { self.reference } else { "" };
                shown.push(difference(figure, ratio, reference));
            }
        }
        if shown.is_empty() {
            return format!("{}: not comparable with {}", self.subject, self.reference);
        }
        format!("{}: {}", self.subject, shown.join(", "))
    }

    /// A word with the figures in which the subject is worse.
    pub(crate) fn judgement(&self) -> String {
        let worse = worse(&self.ratios).into_iter().map(Figure::title).collect::<Vec<_>>().join(", ");
        let beside = if worse.is_empty() { String::new() } else { format!(", worse in {worse}") };
        match Verdict::of(&self.ratios) {
            Some(Verdict::Wins) => format!("{} better{beside}", self.subject),
            Some(Verdict::Ties) => format!("{} equal{beside}", self.subject),
            Some(Verdict::Loses) => format!("{} worse in {worse}", self.subject),
            None => format!("{} not comparable{beside}", self.subject),
        }
    }
}

/// Whether the interval contains 1.
fn is_unclear(of: &Ratio) -> bool {
    of.interval.is_some_and(|(low, high)| low < 1.0 && high > 1.0)
}

fn is_product(name: &str) -> bool {
    name.split('+').next() == Some("latency") || name.contains("://")
}

/// A figure's difference in words, such as `TTFT mean 1.60 times shorter than kv`; the reference may be empty.
fn difference(figure: Figure, of: &Ratio, reference: &str) -> String {
    let ratio = &of.ratio;
    let (less, more) = if figure.is_time() { ("shorter", "longer") } else { ("lower", "higher") };
    let (factor, word) = if *ratio < 1.0 { (1.0 / ratio, less) } else { (*ratio, more) };
    let to =
        |conjunction: &str| if reference.is_empty() { String::new() } else { format!(" {conjunction} {reference}") };
    if factor < 1.005 {
        return format!("{} equal{}", figure.title(), to("to"));
    }
    let doubt = if is_unclear(of) { " (the interval contains 1)" } else { "" };
    format!("{} {factor:.2} times {word}{}{doubt}", figure.title(), to("than"))
}

#[cfg(test)]
mod tests {
    use super::super::tests::comparison;
    use super::*;

    fn views(factors: &[(&str, f64)]) -> Vec<(String, String)> {
        let of = comparison(factors);
        let (first, others) = of.contenders.split_first().expect("contenders");
        others.iter().map(|other| View::of(first, other)).map(|view| (view.headline(), view.judgement())).collect()
    }

    #[test]
    fn the_product_is_the_subject_in_either_order() {
        let shorter = "latency: TTFT mean 1.25 times shorter than kv, TTFT p99 1.25 times shorter, \
                       end-to-end mean 1.25 times shorter, end-to-end p99 1.25 times shorter, ITL p99 1.25 times shorter";
        for factors in [[("kv", 1.0), ("latency", 0.8)], [("latency", 0.8), ("kv", 1.0)]] {
            assert_eq!(views(&factors), [(shorter.to_owned(), "latency better".to_owned())]);
        }
    }

    #[test]
    fn a_worse_product_is_reported_as_plainly() {
        for factors in [[("kv", 1.0), ("latency+seed=7", 1.5)], [("latency+seed=7", 1.5), ("kv", 1.0)]] {
            let [(headline, judgement)] = &views(&factors)[..] else { panic!("one pair") };
            assert!(headline.starts_with("latency+seed=7: TTFT mean 1.50 times longer than kv, "), "{headline}");
            assert!(judgement.starts_with("latency+seed=7 worse in TTFT mean, "), "{judgement}");
        }
    }
}
