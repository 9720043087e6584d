//! Names and labels of a metrics page, without the values.
//!
//! Malformed lines are skipped. Linear in the size of the page.

/// One sample: `name{label="value",...} ...`.
pub(super) struct Sample<'a> {
    pub(super) name: &'a str,
    labels: &'a str,
}

/// The samples whose names start with `prefix`, in order.
pub(super) fn samples<'a>(page: &'a str, prefix: &'static str) -> impl Iterator<Item = Sample<'a>> {
    page.lines().filter(move |line| line.starts_with(prefix)).map(|line| {
        let end = line.find(['{', ' ', '\t']).unwrap_or(line.len());
        Sample { name: &line[..end], labels: line[end..].strip_prefix('{').unwrap_or_default() }
    })
}

impl<'a> Sample<'a> {
    /// The value of a label, without unescaping; the required labels contain no escapes.
    pub(super) fn label(&self, name: &str) -> Option<&'a str> {
        let mut rest = self.labels;
        loop {
            let (label, after) = rest.split_once("=\"")?;
            if label.contains('}') {
                return None; // the labels are over
            }
            let end = end_of_value(after)?;
            if label.trim_matches([' ', ',']) == name {
                return Some(&after[..end]);
            }
            rest = &after[end + 1..];
        }
    }
}

/// Position of the closing quote of a value: the first unescaped one.
fn end_of_value(text: &str) -> Option<usize> {
    let mut is_escaped = false;
    text.bytes().position(|byte| {
        let ends = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        ends
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_found_after_any_prefix() {
        let page =
            "# HELP a b\na:x{path=\"c:\\\\\",say=\"\\\"n=\\\"}\" , n=\"7\",} 1.0 123\na:y 2\nb:z{n=\"8\"} 1\na:w{";
        let found: Vec<_> = samples(page, "a:").map(|sample| (sample.name, sample.label("n"))).collect();
        assert_eq!(found, [("a:x", Some("7")), ("a:y", None), ("a:w", None)]);
        let sample = samples("a{x=\"1\"} 1 # n=\"2\"", "a").next().expect("one");
        assert_eq!((sample.label("x"), sample.label("n")), (Some("1"), None));
    }
}
