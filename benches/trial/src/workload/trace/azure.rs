//! Azure's LLM inference traces of 2023 and 2024 (<https://github.com/Azure/AzurePublicDataset>).
//!
//! The format is a table with the header `TIMESTAMP,ContextTokens,GeneratedTokens`. Times have the form `2023-11-16
//! 18:17:03.9799600`. The fraction may be absent or have up to nine digits, and a UTC offset may follow (`+00:00`,
//! `Z`).
//!
//! The traces contain arrivals and lengths only, so **prefixes are synthetic**. By the seed, each request starts or
//! continues a conversation with equal probability. A continuation draws one of the last 256 conversations. If that
//! conversation, prompts and answers, is shorter than the request's prompt, the prompt is the conversation and a unique
//! suffix. All other requests start a conversation: one of 32 system prompts, with a preference for low numbers, 64 to
//! 1,024 tokens long but at most half of the prompt, and a unique suffix. The resulting reuse is an assumption. Use it
//! to compare routers, not as Azure's hit rate.

use std::collections::VecDeque;

use super::lines::Lines;
use super::{Rule, collect, input_length, output_length};
use crate::workload::generate::Texts;
use crate::workload::{Request, Rng, Segment, WorkloadError};

const HEADER: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";

/// Number of conversations that requests may continue.
const LIVE: usize = 256;
const SYSTEM_PROMPTS: u32 = 32;
const SYSTEM_TOKENS: std::ops::RangeInclusive<u32> = 64..=1_024;

pub(super) fn is_header(line: &str) -> bool {
    line.split(',').map(str::trim).eq(HEADER.split(','))
}

/// The first `limit` requests.
pub(super) fn requests(lines: &mut Lines, limit: usize, seed: u64) -> Result<Vec<Request>, WorkloadError> {
    if !lines.current().is_some_and(is_header) {
        return Err(lines.broken(&format!("the header is not {HEADER}")));
    }
    lines.next()?;
    let mut prefixes = Prefixes::new(seed);
    collect(lines, |line| parse(line, &mut prefixes), |read| read.len() >= limit)
}

fn parse(line: &str, prefixes: &mut Prefixes) -> Result<Request, Rule> {
    let columns: Vec<&str> = line.split(',').map(str::trim).collect();
    let [time, input, output] = columns[..] else {
        return Err(format!("{} columns, must be 3: {HEADER}", columns.len()));
    };
    let number =
        |field, value: &str| value.parse().map_err(|_| format!("{field} is {value:?}, must be a whole number"));
    let arrival_us = date_us(time)
        .ok_or_else(|| format!("TIMESTAMP is {time:?}, must be a date and time such as 2023-11-16 18:17:03.9799600"))?;
    let input_tokens = input_length("ContextTokens", number("ContextTokens", input)?)?;
    let output_tokens = output_length("GeneratedTokens", number("GeneratedTokens", output)?)?;
    let (session, prompt) = prefixes.prompt(input_tokens, output_tokens);
    Ok(Request { arrival_us, prompt, output_tokens, session: Some(session) })
}

/// A conversation with all its prompts and answers.
struct TraceConversation {
    session: u64,
    segments: Vec<Segment>,
}

/// Synthetic conversations, by the rule in the module documentation.
struct Prefixes {
    rng: Rng,
    texts: Texts,
    systems: Vec<Segment>,
    /// The latest conversations, oldest first.
    live: VecDeque<TraceConversation>,
    opened: u64,
}

impl Prefixes {
    fn new(seed: u64) -> Self {
        let (mut rng, mut texts) = (Rng::stream(seed, 0), Texts::new(seed, "azure"));
        let systems = (0..SYSTEM_PROMPTS).map(|_| texts.fresh(rng.within(SYSTEM_TOKENS))).collect();
        Self { rng, texts, systems, live: VecDeque::new(), opened: 0 }
    }

    /// Generates a prompt of `input` tokens, whose answer has `output` tokens, and returns it with its conversation.
    fn prompt(&mut self, input: u32, output: u32) -> (u64, Vec<Segment>) {
        let mut conversation = self.draw(input);
        let segments: u32 = conversation.segments.iter().map(|segment| segment.tokens).sum();
        conversation.segments.push(self.texts.fresh(input - segments));
        let (session, prompt) = (conversation.session, conversation.segments.clone());
        conversation.segments.push(self.texts.fresh(output));
        if self.live.len() == LIVE {
            self.live.pop_front();
        }
        self.live.push_back(conversation);
        (session, prompt)
    }

    /// Draws a conversation of fewer than `input` tokens.
    fn draw(&mut self, input: u32) -> TraceConversation {
        let continues = self.rng.below(2) == 1;
        let drawn = self.rng.below(LIVE as u32) as usize;
        let known =
            self.live.get(drawn).map(|live| live.segments.iter().map(|segment| u64::from(segment.tokens)).sum());
        if continues && known.is_some_and(|segments: u64| segments < u64::from(input)) {
            return self.live.remove(drawn).expect("parsed before");
        }
        self.opened += 1;
        let system = self.rng.below(SYSTEM_PROMPTS).min(self.rng.below(SYSTEM_PROMPTS));
        let Segment { id, tokens } = self.systems[system as usize];
        let system = Segment { id, tokens: tokens.min(input / 2) };
        TraceConversation { session: self.opened, segments: if system.tokens > 0 { vec![system] } else { Vec::new() } }
    }
}

/// Parses a date and time as µs since the year 0.
fn date_us(text: &str) -> Option<u64> {
    let (date, time) = text.split_once([' ', 'T'])?;
    let [year, month, day] = numbers(date, '-', [4, 2, 2])?;
    let (time, offset_min) = match time.find(['Z', '+', '-']) {
        Some(at) => (&time[..at], offset_min(&time[at..])?),
        None => (time, 0),
    };
    let (clock, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let [hour, minute, second] = numbers(clock, ':', [2, 2, 2])?;
    let known = (1..=12).contains(&month) && (1..=31).contains(&day) && hour < 24 && minute < 60 && second < 61;
    if !known || !(1..=9).contains(&fraction.len()) || !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let fraction_us: i64 = format!("{fraction:0<6}")[..6].parse().ok()?;
    let seconds = (days(year, month, day) * 24 + hour) * 3_600 + (minute - offset_min) * 60 + second;
    u64::try_from(seconds * 1_000_000 + fraction_us).ok()
}

/// Offset from UTC in minutes, given as `Z`, `+01:00` or `-01:00`.
fn offset_min(text: &str) -> Option<i64> {
    if text == "Z" {
        return Some(0);
    }
    let [hours, minutes] = numbers(&text[1..], ':', [2, 2])?;
    let ahead = hours * 60 + minutes;
    Some(if text.starts_with('-') { -ahead } else { ahead })
}

/// Parses numbers of fixed digit counts, separated by `between`.
fn numbers<const N: usize>(text: &str, between: char, digits: [usize; N]) -> Option<[i64; N]> {
    let parts: Vec<&str> = text.split(between).collect();
    let plain = |(part, digits): (&&str, usize)| part.len() == digits && part.bytes().all(|b| b.is_ascii_digit());
    if parts.len() != N || !parts.iter().zip(digits).all(plain) {
        return None;
    }
    let mut found = [0; N];
    for (number, part) in found.iter_mut().zip(parts) {
        *number = part.parse().ok()?;
    }
    Some(found)
}

/// Days of the Gregorian calendar since 1 March of the year 0, so that a leap day is the last day of its year.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let (year, month) = if month < 3 { (year - 1, month + 9) } else { (year, month - 3) };
    // March to July have 153 days, and so do August to December.
    365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_of_both_trace_years_are_parsed_to_the_microsecond() {
        let us = |text: &str| date_us(text).expect("a time");
        let gap = |from: &str, to: &str| us(to) - us(from);
        assert_eq!(gap("2023-11-16 18:17:03.9799600", "2023-11-16 18:17:04.0319600"), 52_000);
        assert_eq!(gap("2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:01+00:00"), 990_070);
        assert_eq!(gap("2024-02-28 23:59:59", "2024-03-01 00:00:00"), 86_401_000_000);
        assert_eq!(gap("2023-02-28 23:59:59", "2023-03-01 00:00:00"), 1_000_000);
        assert_eq!(gap("2023-12-31T23:59:59.5Z", "2024-01-01 01:00:00+01:00"), 500_000);
    }

    #[test]
    fn invalid_lines_are_rejected_with_a_reason() {
        let time = "2023-11-16 18:17:03.9799600";
        for (line, expected) in [
            (format!("{time},12"), "2 columns, must be 3"),
            (format!("{time},0,3"), "ContextTokens is 0"),
            (format!("{time},4,x"), "GeneratedTokens is \"x\", must be a whole number"),
            (format!("{time},99999999,1"), "ContextTokens is 99999999, must be 1 to 16777216"),
            ("2023-13-16 18:17:03,1,1".to_owned(), "TIMESTAMP is \"2023-13-16 18:17:03\", must be a date"),
            ("yesterday,1,1".to_owned(), "TIMESTAMP is \"yesterday\""),
            ("2023-11-16 18:17:03.,1,1".to_owned(), "TIMESTAMP"),
            ("2023-11-16 18:17:03.é,1,1".to_owned(), "TIMESTAMP"),
        ] {
            let error = parse(&line, &mut Prefixes::new(1)).expect_err(&line).to_string();
            assert!(error.contains(expected), "{line}: {error}");
        }
    }

    #[test]
    fn prompts_have_their_lengths_and_half_of_them_continue_conversations() {
        let mut prefixes = Prefixes::new(5);
        let mut rng = Rng::new(6);
        for _ in 0..2_000 {
            let (input, output) = (rng.within(1..=4_000), rng.within(1..=500));
            let (_, prompt) = prefixes.prompt(input, output);
            assert_eq!(prompt.iter().map(|segment| segment.tokens).sum::<u32>(), input);
            assert!(prompt.iter().all(|segment| segment.tokens > 0));
        }
        assert!((1_000..1_700).contains(&prefixes.opened), "{}", prefixes.opened);
    }
}
