//! Python functions used by chat templates.
//!
//! `json.dumps`, its float format, and `strftime` in UTC, with the same output as Python for JSON values.
//! `minijinja_contrib` has the methods of strings, lists and dictionaries.

use std::fmt::Write as _;

use jiff::Timestamp;
use jiff::fmt::strtime::{BrokenDownTime, Config};
use jiff::tz::TimeZone;
use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Error, ErrorKind, Value};

/// Maximum nesting for `tojson`; received JSON and template values are shallower.
const DEPTH_MAX: usize = 192;

/// Format options of `json.dumps`.
struct Style {
    ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sorted: bool,
}

/// The `tojson` filter of chat templates: no HTML escapes, and Python's arguments.
pub(super) fn tojson(value: &Value, arguments: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let arguments = arguments.into_values();
    let (placed, named): (&[Value], Kwargs) = from_args(&arguments)?;
    let argument = |place: usize, name| match placed.get(place) {
        Some(value) => Ok::<Value, Error>(value.clone()),
        None => Ok(named.get::<Option<Value>>(name)?.unwrap_or(Value::from(()))),
    };
    let ascii = argument(0, "ensure_ascii")?.is_true();
    let indent = indent_of(&argument(1, "indent")?)?;
    let separators = argument(2, "separators")?;
    let sorted = argument(3, "sort_keys")?.is_true();
    named.assert_all_used()?;
    let (item, key) = if separators.is_none() {
        let item = if indent.is_some() { "," } else { ", " };
        (item.to_owned(), ": ".to_owned())
    } else {
        (separators.get_item_by_index(0)?.to_string(), separators.get_item_by_index(1)?.to_string())
    };
    let mut out = String::new();
    dump(&mut out, value, &Style { ascii, indent, item, key, sorted }, 0)?;
    Ok(out)
}

/// One level of indentation; `None` for a single line.
fn indent_of(value: &Value) -> Result<Option<String>, Error> {
    if value.is_none() {
        return Ok(None);
    }
    if let Some(text) = value.as_str() {
        return Ok(Some(text.to_owned()));
    }
    let spaces = usize::try_from(value.clone())?;
    let width = (spaces <= 64).then(|| " ".repeat(spaces));
    width.map(Some).ok_or_else(|| invalid("indent is larger than 64"))
}

fn dump(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        return Err(invalid("the value is nested too deeply for JSON"));
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number if value.is_integer() => write!(out, "{value}").expect("writing to a string cannot fail"),
        ValueKind::Number => out.push_str(&float(f64::try_from(value.clone())?)),
        ValueKind::String => string(out, value.as_str().unwrap_or_default(), style.ascii),
        ValueKind::Seq | ValueKind::Iterable => list(out, value, style, depth)?,
        ValueKind::Map => map(out, value, style, depth)?,
        // The kind enum of the template engine may grow.
        _ => return Err(invalid("the value has no JSON")),
    }
    Ok(())
}

fn list(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    out.push('[');
    let mut any = false;
    for item in value.try_iter()? {
        separate(out, style, depth + 1, any);
        any = true;
        dump(out, &item, style, depth + 1)?;
    }
    close(out, style, depth, any, ']');
    Ok(())
}

fn map(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    let mut keys: Vec<Value> = value.try_iter()?.collect();
    if style.sorted {
        keys.sort();
    }
    out.push('{');
    let any = !keys.is_empty();
    for (n, key) in keys.into_iter().enumerate() {
        separate(out, style, depth + 1, n > 0);
        match key.as_str() {
            Some(text) => string(out, text, style.ascii),
            // Python writes other keys as strings of their JSON.
            None => {
                out.push('"');
                dump(out, &key, style, depth + 1)?;
                out.push('"');
            }
        }
        out.push_str(&style.key);
        dump(out, &value.get_item(&key)?, style, depth + 1)?;
    }
    close(out, style, depth, any, '}');
    Ok(())
}

fn separate(out: &mut String, style: &Style, depth: usize, any: bool) {
    if any {
        out.push_str(&style.item);
    }
    line(out, style, depth);
}

fn close(out: &mut String, style: &Style, depth: usize, any: bool, bracket: char) {
    if any {
        line(out, style, depth);
    }
    out.push(bracket);
}

fn line(out: &mut String, style: &Style, depth: usize) {
    if let Some(indent) = &style.indent {
        out.push('\n');
        (0..depth).for_each(|_| out.push_str(indent));
    }
}

/// JSON of a string; equal in Python and serde for ASCII.
fn string(out: &mut String, text: &str, ascii: bool) {
    let quoted = serde_json::to_string(text).expect("strings have JSON");
    if !ascii || quoted.is_ascii() {
        out.push_str(&quoted);
        return;
    }
    for c in quoted.chars() {
        if c.is_ascii() {
            out.push(c);
        } else {
            for unit in c.encode_utf16(&mut [0; 2]) {
                write!(out, "\\u{unit:04x}").expect("writing to a string cannot fail");
            }
        }
    }
}

/// A float in the format of Python's `repr`: shortest digits, with an exponent below 1e-4 and from 1e16 on.
fn float(value: f64) -> String {
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').expect("floats are printed with an exponent here");
    let exponent: i32 = exponent.parse().expect("exponents are small integers");
    if (-4..16).contains(&exponent) {
        let plain = format!("{value}");
        return if plain.contains('.') { plain } else { format!("{plain}.0") };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// `strftime` in UTC for `now_s` seconds since 1970. Unknown directives stay unchanged.
pub(super) fn strftime(format: &str, now_s: u64) -> String {
    let now = i64::try_from(now_s).ok().and_then(|now_s| Timestamp::from_second(now_s).ok()).unwrap_or_default();
    let time = BrokenDownTime::from(&now.to_zoned(TimeZone::UTC));
    time.to_string_with_config(&Config::new().lenient(true), format).expect("a lenient format cannot fail")
}

fn invalid(message: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

#[cfg(test)]
mod tests {
    use minijinja::Environment;

    use super::*;

    /// Expected values are the output of CPython 3.11 for the same expressions.
    #[test]
    fn json_matches_python() {
        let mut env = Environment::new();
        env.add_filter("tojson", tojson);
        let value: Value = serde_json::from_str(
            r#"{"b": [1, 2.0, 1e16, 1e-5, 0.0001], "a": {"é<&>": "x\u0001\n\"😀"}, "n": null, "e": [], "o": {}}"#,
        )
        .unwrap();
        let cases = [
            (
                "v|tojson",
                r#"{"b": [1, 2.0, 1e+16, 1e-05, 0.0001], "a": {"é<&>": "x\u0001\n\"😀"}, "n": null, "e": [], "o": {}}"#,
            ),
            (
                "v|tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true)",
                r#"{"a":{"\u00e9<&>":"x\u0001\n\"\ud83d\ude00"},"b":[1,2.0,1e+16,1e-05,0.0001],"e":[],"n":null,"o":{}}"#,
            ),
            ("v.a|tojson(indent=2)", "{\n  \"é<&>\": \"x\\u0001\\n\\\"😀\"\n}"),
            ("[1, {'k': []}]|tojson(indent=4)", "[\n    1,\n    {\n        \"k\": []\n    }\n]"),
        ];
        for (expression, expected) in cases {
            let shown =
                env.render_str(&format!("{{{{ {expression} }}}}"), minijinja::context! { v => value.clone() }).unwrap();
            assert_eq!(shown, expected, "{expression}");
        }
        assert!(env.render_str("{{ missing|tojson }}", ()).is_err());
    }

    #[test]
    fn dates_match_the_calendar() {
        let format = "%Y-%m-%d %H:%M:%S %A %a %B %b %j %y %I %p %-d %e %% %!";
        // `date -u -d @SECONDS` with the same format.
        let leap_day = "2024-02-29 13:05:09 Thursday Thu February Feb 060 24 01 PM 29 29 % %!";
        assert_eq!(strftime(format, 1_709_211_909), leap_day);
        assert_eq!(strftime("%d %b %Y %a %I %p", 0), "01 Jan 1970 Thu 12 AM");
        assert_eq!(strftime("%F", 4_107_542_399), "2100-02-28");
        assert_eq!(strftime("%F", 4_107_542_400), "2100-03-01");
    }
}
