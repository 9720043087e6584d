//! Request traces of the Mooncake project (<https://github.com/kvcache-ai/Mooncake>, FAST'25 release).
//!
//! Each line is a JSON object: `timestamp` (ms), `input_length` and `output_length` (tokens), `hash_ids`. Each hash id
//! stands for 512 tokens. Equal ids mean equal tokens after an equal prefix; the last id is truncated to
//! `input_length`. A hash id becomes the [`Segment`]'s id, so equal ids give equal tokens for any seed.
//!
//! The clock of these traces is coarse: it ticks about every 3 seconds, and up to dozens of requests have the timestamp
//! of one tick. Unmodified timestamps would create bursts that did not exist. Therefore the requests of one timestamp
//! are spread evenly up to the next one, over at most one tick: n requests are 1/n of that time apart. The tick length
//! is derived from the data, as the median gap between different timestamps. A trace with a fine clock, where few
//! requests share a timestamp, is unchanged within a typical gap. A trace with a single timestamp stays a burst.

use serde::Deserialize;

use super::lines::Lines;
use super::{Rule, collect, input_length, output_length, time_us, wrong_hash_ids};
use crate::workload::{Request, Segment, WorkloadError};

/// Number of tokens per hash id.
pub const TOKENS_PER_ID: u32 = 512;

#[derive(Deserialize)]
struct MooncakeLine {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

/// At least the first `limit` requests. All requests of the last tick are read, because their count determines the
/// spread.
pub(super) fn requests(lines: &mut Lines, limit: usize) -> Result<Vec<Request>, WorkloadError> {
    // One request after the tick is needed to determine the length of the tick.
    let enough = |read: &[Request]| {
        let last = limit.checked_sub(1).and_then(|last| read.get(last));
        limit == 0 || last.is_some_and(|last| read.last().is_some_and(|read| read.arrival_us > last.arrival_us))
    };
    let mut requests = collect(lines, parse, enough)?;
    requests.sort_by_key(|request| request.arrival_us);
    spread(&mut requests);
    Ok(requests)
}

/// Parses a line as a request at its timestamp.
fn parse(line: &str) -> Result<Request, Rule> {
    let line: MooncakeLine = serde_json::from_str(line).map_err(|error| error.to_string())?;
    let tokens = input_length("input_length", line.input_length)?;
    Ok(Request {
        arrival_us: time_us(line.timestamp, 1e3)?,
        prompt: segments(tokens, &line.hash_ids)?,
        output_tokens: output_length("output_length", line.output_length)?,
        session: None,
    })
}

fn segments(input_length: u32, hash_ids: &[u64]) -> Result<Vec<Segment>, Rule> {
    let needed = input_length.div_ceil(TOKENS_PER_ID) as usize;
    if hash_ids.len() != needed {
        return Err(wrong_hash_ids(input_length, needed, hash_ids.len()));
    }
    let starts = (0..input_length).step_by(TOKENS_PER_ID as usize);
    let segment = |(&id, start)| Segment { id, tokens: TOKENS_PER_ID.min(input_length - start) };
    Ok(hash_ids.iter().zip(starts).map(segment).collect())
}

/// Spreads sorted requests with equal timestamps over the following tick.
fn spread(requests: &mut [Request]) {
    let mut gaps: Vec<u64> = requests.windows(2).map(|pair| pair[1].arrival_us - pair[0].arrival_us).collect();
    gaps.retain(|gap| *gap > 0);
    gaps.sort_unstable();
    let Some(&tick_us) = gaps.get(gaps.len() / 2) else { return };
    let mut rest = requests;
    while let Some(first) = rest.first() {
        let at_us = first.arrival_us;
        let count = rest.partition_point(|request| request.arrival_us == at_us);
        let (tick, later) = rest.split_at_mut(count);
        let span_us = later.first().map_or(tick_us, |next| tick_us.min(next.arrival_us - at_us));
        for (index, request) in (0_u64..).zip(tick) {
            request.arrival_us = at_us + span_us * index / count as u64;
        }
        rest = later;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"timestamp": 1.5, "input_length": 700, "output_length": 5, "hash_ids": [4, 9]}"#;

    #[test]
    fn equal_ids_give_equal_tokens_and_the_last_is_truncated() {
        let tokens = |line: &str| parse(line).expect("good line").tokens();
        let first = tokens(GOOD);
        assert_eq!(first.len(), 700);
        let second = tokens(&GOOD.replace("[4, 9]", "[4, 8]"));
        assert_eq!(first[..512], second[..512]);
        assert_ne!(first[512..], second[512..]);
        assert_eq!(first[..], tokens(&GOOD.replace("700", "1024"))[..700]);
        let request = parse(GOOD).expect("good line");
        assert_eq!((request.arrival_us, request.output_tokens), (1_500, 5));
    }

    #[test]
    fn invalid_lines_are_rejected_with_a_reason() {
        let cases = [
            (GOOD.replace("700", "1025"), "input_length 1025 needs 3 hash_ids, found 2"),
            (GOOD.replace("700", "512"), "input_length 512 needs 1 hash_ids, found 2"),
            (GOOD.replace("700", "0"), "input_length is 0, must be 1 to 16777216"),
            (GOOD.replace("700", "99999999999"), "input_length is 99999999999, must be 1 to 16777216"),
            (GOOD.replace(": 5", ": 16777217"), "output_length is 16777217, must be 0 to 16777216"),
            (GOOD.replace("700", "-1"), "invalid value: integer `-1`"),
            (GOOD.replace("1.5", "-1.5"), "timestamp is -1.5, must be a time"),
            (GOOD.replace("1.5", "1e300"), "must be a time"),
            (GOOD.replace("hash_ids", "hashes"), "missing field `hash_ids`"),
            (GOOD.replace("timestamp", "time"), "missing field `timestamp`"),
            (GOOD[..20].to_owned(), "EOF"),
        ];
        for (line, expected) in cases {
            let error = parse(&line).expect_err(&line).to_string();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }

    fn spread_ms(times: &[u64]) -> Vec<u64> {
        let request = |ms| Request { arrival_us: ms * 1_000, prompt: Vec::new(), output_tokens: 1, session: None };
        let mut requests: Vec<Request> = times.iter().map(|&ms| request(ms)).collect();
        spread(&mut requests);
        requests.iter().map(|request| request.arrival_us / 1_000).collect()
    }

    #[test]
    fn requests_of_a_tick_are_spread_up_to_the_next() {
        // The clock ticks after 3000 and 2999 ms and then pauses: the spread is limited to one tick.
        let coarse = [0, 0, 0, 3_000, 3_000, 5_999, 15_000, 15_000];
        assert_eq!(spread_ms(&coarse), [0, 1_000, 2_000, 3_000, 4_499, 5_999, 15_000, 16_500]);
    }

    #[test]
    fn fine_clocks_and_bursts_are_unchanged() {
        assert_eq!(spread_ms(&[0, 70, 75, 160, 230]), [0, 70, 75, 160, 230]);
        assert_eq!(spread_ms(&[5, 5, 5]), [5, 5, 5]);
    }
}
