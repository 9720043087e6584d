//! Order of arrivals: each request at its time, or after the ends of earlier ones.

use std::collections::VecDeque;
use std::ops::Range;

use pointsman_trial::workload::{Arrivals, Link, Workload};

/// Requests that wait for the ends of others.
#[derive(Debug, Default)]
pub(super) struct Feed {
    /// Requests of a closed loop that wait for the end of any other.
    waiting: Range<usize>,
    /// By request: its place in a program; empty without programs.
    links: Vec<Link>,
    /// By request: number of earlier calls that have not ended.
    before: Vec<usize>,
    /// By request: calls that wait for its end.
    next: Vec<Vec<usize>>,
    /// By program: number of calls that have not ended.
    left: Vec<usize>,
    /// First calls that wait for the end of a program.
    starts: VecDeque<usize>,
}

impl Feed {
    /// Creates the feed of `workload`, and the arrivals that wait for nothing: times in µs and requests.
    pub(super) fn new(workload: &Workload) -> (Self, Vec<(u64, usize)>) {
        let count = workload.requests.len();
        let at = |request: usize| (workload.requests[request].arrival_us, request);
        match &workload.arrivals {
            Arrivals::OpenLoop => (Self::default(), (0..count).map(at).collect()),
            Arrivals::Concurrency(inflight) => {
                let first = count.min(inflight.get() as usize);
                (Self { waiting: first..count, ..Self::default() }, (0..first).map(|request| (0, request)).collect())
            }
            Arrivals::Causal { links, programs } => {
                let mut feed = Self::of_programs(&links[..count]);
                let live = programs.map_or(count, |programs| programs.get() as usize).min(feed.starts.len());
                let first =
                    feed.starts.drain(..live).map(|start| if programs.is_some() { (0, start) } else { at(start) });
                let first = first.collect();
                (feed, first)
            }
        }
    }

    fn of_programs(links: &[Link]) -> Self {
        let programs = links.iter().map(|link| link.program as usize + 1).max().unwrap_or_default();
        let (mut next, mut left) = (vec![Vec::new(); links.len()], vec![0; programs]);
        for (request, link) in links.iter().enumerate() {
            link.after.iter().for_each(|before| next[*before as usize].push(request));
            left[link.program as usize] += 1;
        }
        let before: Vec<usize> = links.iter().map(|link| link.after.len()).collect();
        let starts = (0..links.len()).filter(|request| before[*request] == 0).collect();
        Self { waiting: 0..0, links: links.to_vec(), before, next, left, starts }
    }

    /// Place of a request in its program.
    pub(super) fn link(&self, request: usize) -> Option<&Link> {
        self.links.get(request)
    }

    /// Arrivals that follow the end of `request`: delays in µs and requests.
    pub(super) fn ended(&mut self, request: usize) -> Vec<(u64, usize)> {
        let Some(link) = self.links.get(request) else {
            return self.waiting.next().map(|next| (0, next)).into_iter().collect();
        };
        let mut arrivals = Vec::new();
        for next in std::mem::take(&mut self.next[request]) {
            self.before[next] -= 1;
            if self.before[next] == 0 {
                arrivals.push((self.links[next].gap_us, next));
            }
        }
        let left = &mut self.left[link.program as usize];
        *left -= 1;
        if *left == 0 {
            arrivals.extend(self.starts.pop_front().map(|start| (0, start)));
        }
        arrivals
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use pointsman_trial::workload::Request;

    use super::*;

    fn workload(links: Vec<Link>, programs: Option<NonZeroU32>) -> Workload {
        let request =
            |at: usize| Request { arrival_us: 10 * at as u64, prompt: vec![], output_tokens: 1, session: None };
        let requests = (0..links.len()).map(request).collect();
        Workload { name: String::new(), requests, arrivals: Arrivals::Causal { links, programs }, trace_checksum: None }
    }

    #[test]
    fn parents_wait_for_their_last_child_and_programs_for_a_free_place() {
        let link = |program, after: &[u32], gap_us| Link { program, after: after.to_vec(), gap_us, is_stop: false };
        let links = vec![link(0, &[], 0), link(0, &[0], 3), link(0, &[0], 4), link(0, &[1, 2], 5), link(1, &[], 0)];
        let (mut feed, first) = Feed::new(&workload(links.clone(), NonZeroU32::new(1)));
        assert_eq!(first, [(0, 0)]);
        assert_eq!(feed.ended(0), [(3, 1), (4, 2)]);
        assert_eq!((feed.ended(2), feed.ended(1), feed.ended(3)), (vec![], vec![(5, 3)], vec![(0, 4)]));
        assert_eq!(feed.ended(4), []);
        let (mut feed, first) = Feed::new(&workload(links, None));
        assert_eq!(first, [(0, 0), (40, 4)]);
        assert_eq!(feed.ended(4), []);
    }
}
