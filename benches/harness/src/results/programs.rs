//! Figures of agent programs: time of a whole task, throughput, and sum of the live contexts.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Distribution, RequestRecord, Run};

/// Figures of programs that start after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ProgramFigures {
    /// Time from the arrival of the first call of a program to its last answer, gaps included.
    pub task_seconds: Distribution,
    /// Calls per hour, from the first start of a measured program to the last, while all programs of a closed loop live.
    pub calls_per_hour: f64,
    /// Mean sum of the contexts of live programs over the same time, in tokens: for each, the prompt of its newest call.
    pub context_tokens: f64,
}

impl ProgramFigures {
    /// Computes the figures of `run`; none without programs.
    pub(super) fn of(run: &Run) -> Option<Self> {
        let mut programs = BTreeMap::<u32, Vec<&RequestRecord>>::new();
        for record in &run.requests {
            programs.entry(record.program?).or_default().push(record);
        }
        programs.values_mut().for_each(|calls| calls.sort_by_key(|call| call.due_us));
        let warm = run.measured().first()?.program?;
        let warm = if run.warmup_requests == 0 { warm } else { warm + 1 };
        let span = |calls: &[&RequestRecord]| {
            let end_us = calls.iter().filter_map(|call| call.ended_us).max();
            (calls[0].due_us, end_us.unwrap_or(calls[0].due_us))
        };
        let measured = || programs.range(warm..).map(|(_, calls)| span(calls));
        let (from_us, to_us) = (measured().map(|(start, _)| start).min()?, measured().map(|(start, _)| start).max()?);
        let hours = to_us.saturating_sub(from_us).max(1) as f64 / 3.6e9;
        let ended = run.requests.iter().filter(|call| call.ended_us.is_some_and(|end| (from_us..to_us).contains(&end)));
        let mut context_us = 0.0;
        for calls in programs.values() {
            let end_us = span(calls).1;
            for (number, call) in calls.iter().enumerate() {
                let until_us = calls.get(number + 1).map_or(end_us, |next| next.due_us).clamp(from_us, to_us);
                context_us += call.prompt_tokens as f64 * until_us.saturating_sub(call.due_us.max(from_us)) as f64;
            }
        }
        Some(Self {
            task_seconds: Distribution::of_us(measured().map(|(start, end)| end - start))?,
            calls_per_hour: ended.count() as f64 / hours,
            context_tokens: context_us / (hours * 3.6e9),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{request, run};
    use super::*;

    #[test]
    fn a_task_lasts_from_its_first_call_to_its_last_answer() {
        let call = |program, at_ms| RequestRecord { program: Some(program), ..request(at_ms) };
        let run = run(vec![call(0, 0), call(0, 1_000), call(1, 500), call(1, 3_000), call(2, 2_000)]);
        let figures = ProgramFigures::of(&run).expect("programs");
        let task = figures.task_seconds;
        assert_eq!((task.count, task.p50, task.p99), (3, 1.6, 3.1));
        assert_eq!(figures.calls_per_hour, 3.0 * 1_800.0);
        assert_eq!(figures.context_tokens, 1_000.0 * (1.6 + 1.5) / 2.0);
        assert_eq!(ProgramFigures::of(&super::super::tests::run(vec![request(0)])), None);
    }
}
