//! W3C trace context of a request: the header `traceparent`.
//!
//! Reference: W3C Recommendation "Trace Context", level 1. `tracestate` passes unchanged.

use axum::http::{HeaderMap, HeaderName, HeaderValue};

/// Trace, parent span and sampling decision.
pub(crate) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Bit of the flags that marks a sampled trace.
const SAMPLED: u8 = 1;

/// Trace context of a client, or of an own span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TraceContext {
    pub(crate) trace_id: u128,
    pub(crate) span_id: u64,
    pub(crate) flags: u8,
}

impl TraceContext {
    /// The context in the headers; `None` without a valid one.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(TRACEPARENT).iter();
        let value = values.next()?.to_str().ok()?;
        if values.next().is_some() {
            return None;
        }
        let mut parts = value.split('-');
        let (version, trace_id, span_id, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let version = hex(version, 2)?;
        // Later versions may have more parts.
        if version == 0xff || (version == 0 && parts.next().is_some()) {
            return None;
        }
        let context = Self {
            trace_id: hex(trace_id, 32)?,
            span_id: u64::try_from(hex(span_id, 16)?).ok()?,
            flags: u8::try_from(hex(flags, 2)?).ok()?,
        };
        (context.trace_id != 0 && context.span_id != 0).then_some(context)
    }

    /// The trace id as in the header.
    pub(crate) fn trace_id(&self) -> String {
        format!("{:032x}", self.trace_id)
    }

    pub(crate) fn is_sampled(&self) -> bool {
        self.flags & SAMPLED != 0
    }

    /// The header for the next hop.
    pub(crate) fn header(&self) -> HeaderValue {
        let Self { trace_id, span_id, flags } = self;
        let header = format!("00-{trace_id:032x}-{span_id:016x}-{:02x}", flags & SAMPLED);
        HeaderValue::try_from(header).expect("hexadecimal digits and hyphens")
    }
}

/// Lower-case hexadecimal digits of this number.
fn hex(digits: &str, count: usize) -> Option<u128> {
    let is_hex = digits.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    (digits.len() == count && is_hex).then(|| u128::from_str_radix(digits, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(values: &[&str]) -> Option<TraceContext> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(TRACEPARENT, HeaderValue::from_str(value).expect("ASCII"));
        }
        TraceContext::of(&headers)
    }

    #[test]
    fn only_valid_contexts_are_read() {
        let valid = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let expected = TraceContext {
            trace_id: 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c,
            span_id: 0xb7ad_6b71_6920_3331,
            flags: 1,
        };
        assert_eq!(context(&[valid]), Some(expected));
        assert_eq!(expected.trace_id(), "0af7651916cd43dd8448eb211c80319c");
        assert_eq!(context(&[&valid.replacen("00-", "cc-", 1)]), Some(expected), "a later version");
        assert_eq!(context(&[&format!("{}-more", valid.replacen("00-", "cc-", 1))]), Some(expected));
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
        assert_eq!(context(&[value]).expect("valid").header(), value);
    }
}
