//! W3C trace context of a request: the header `traceparent`.
//!
//! Reference: W3C Recommendation "Trace Context", level 1. `tracestate` passes unchanged.

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::trace::{SpanContext, TraceFlags, TraceState};

/// Trace, parent span and sampling decision.
pub(crate) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// The context in the headers; `None` without a valid one.
pub(crate) fn client_context(headers: &HeaderMap) -> Option<SpanContext> {
    let mut values = headers.get_all(TRACEPARENT).iter();
    let value = values.next().filter(|_| values.next().is_none())?.to_str().ok()?;
    let mut parts = value.split('-');
    let (version, trace_id, span_id, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let version = hex(version, 2)?;
    // Later versions may have more parts.
    if version == 0xff || (version == 0 && parts.next().is_some()) {
        return None;
    }
    let span_id = u64::try_from(hex(span_id, 16)?).ok()?;
    let flags = TraceFlags::default().with_sampled(hex(flags, 2)? & 1 != 0);
    let context = SpanContext::new(hex(trace_id, 32)?.into(), span_id.into(), flags, true, TraceState::NONE);
    context.is_valid().then_some(context)
}

/// The header for the next hop.
pub(crate) fn header(context: &SpanContext) -> HeaderValue {
    let (trace_id, span_id) = (context.trace_id(), context.span_id());
    let header = format!("00-{trace_id}-{span_id}-{:02}", u8::from(context.is_sampled()));
    HeaderValue::try_from(header).expect("hexadecimal digits and hyphens")
}

/// Lower-case hexadecimal digits of this number.
fn hex(digits: &str, count: usize) -> Option<u128> {
    let is_hex = digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    (digits.len() == count && is_hex).then(|| u128::from_str_radix(digits, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(values: &[&str]) -> Option<SpanContext> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(TRACEPARENT, HeaderValue::from_str(value).expect("ASCII"));
        }
        client_context(&headers)
    }

    #[test]
    fn only_valid_contexts_are_read() {
        let valid = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let expected = context(&[valid]).expect("valid");
        assert_eq!(expected.trace_id(), 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c_u128.into());
        assert_eq!(expected.span_id(), 0xb7ad_6b71_6920_3331_u64.into());
        assert!(expected.is_sampled() && expected.is_remote());
        let expected = Some(expected);
        assert_eq!(context(&[&valid.replacen("00-", "cc-", 1)]), expected, "a later version");
        assert_eq!(context(&[&format!("{}-more", valid.replacen("00-", "cc-", 1))]), expected);
        let invalid = [
            valid.replacen("00-", "ff-", 1),
            valid.replace("0af7", "0AF7"),
            valid.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
            valid.replace("b7ad6b7169203331", &"0".repeat(16)),
            valid.replace("b7ad6b7169203331", "b7ad6b716920333"),
            format!("{valid}-more"),
            valid[..valid.len() - 1].to_owned(),
            String::new(),
        ];
        for value in &invalid {
            assert_eq!(context(&[value]), None, "{value}");
        }
        assert_eq!(context(&[valid, valid]), None, "two contexts");
        assert_eq!(context(&[]), None);
    }

    #[test]
    fn headers_round_trip() {
        let value = "00-0af7651916cd43dd8448eb211c80319c-00000000000000ab-00";
        assert_eq!(header(&context(&[value]).expect("valid")), value);
    }
}
