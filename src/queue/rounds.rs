//! Deficit round robin over the classes with a dispatchable request.
//!
//! Holds each class's quantum and remaining deficit, and the class served last. Shares are proportional to the quanta,
//! independent of request costs, with the bound documented at [`Queue`](super::Queue). The queue provides the next
//! request of a class.

/// The ring of classes.
#[derive(Debug)]
pub(super) struct Rounds {
    quanta_tokens: Box<[u64]>,
    deficits_tokens: Box<[u64]>,
    last: usize,
}

impl Rounds {
    /// Creates the ring with at least one quantum. The first class is served first.
    pub(super) fn new(quanta_tokens: impl Iterator<Item = u32>) -> Self {
        let quanta_tokens: Box<[u64]> = quanta_tokens.map(|quantum| u64::from(quantum.max(1))).collect();
        let deficits_tokens = vec![0; quanta_tokens.len()].into();
        Self { last: quanta_tokens.len() - 1, quanta_tokens, deficits_tokens }
    }

    /// The class to serve next; its deficit is charged with the cost of its next request. `cost` returns the cost of a
    /// class's next dispatchable request, if any, and must be consistent between calls. Returns `None` if no class has
    /// such a request.
    pub(super) fn next(&mut self, mut cost: impl FnMut(usize) -> Option<u64>) -> Option<usize> {
        let left = self.deficits_tokens[self.last];
        let continues = left > 0 && cost(self.last).is_some_and(|cost| cost <= left);
        let next = if continues {
            self.last
        } else {
            match self.walk(&mut cost) {
                Some(class) => class,
                None => {
                    self.skip_rounds(&mut cost)?;
                    self.walk(&mut cost).expect("one round after the skipped ones serves a class")
                }
            }
        };
        self.deficits_tokens[next] -= cost(next).expect("the selected class has a dispatchable request");
        self.last = next;
        Some(next)
    }

    /// One round, starting after the class served last: serves the first class with a sufficient deficit; others
    /// receive a quantum and are served if it is then sufficient.
    fn walk(&mut self, cost: &mut impl FnMut(usize) -> Option<u64>) -> Option<usize> {
        let classes = self.quanta_tokens.len();
        (1..=classes).map(|step| (self.last + step) % classes).find(|&class| {
            cost(class).is_some_and(|cost| {
                let deficit = &mut self.deficits_tokens[class];
                if *deficit < cost {
                    *deficit += self.quanta_tokens[class];
                }
                cost <= *deficit
            })
        })
    }

    /// Grants the quanta of all rounds in which no class can be served, in one step. The following round is walked
    /// class by class. Granting its quantum to all classes at once would favour the classes after the one served in it,
    /// which would receive another quantum later (up to a fifth of their share if costs exceed quanta).
    fn skip_rounds(&mut self, cost: &mut impl FnMut(usize) -> Option<u64>) -> Option<()> {
        let classes = || 0..self.quanta_tokens.len();
        let rounds = classes()
            .filter_map(|class| {
                let missing = cost(class)?.saturating_sub(self.deficits_tokens[class]);
                Some(missing.div_ceil(self.quanta_tokens[class]))
            })
            .min()?;
        for class in classes().filter(|&class| cost(class).is_some()) {
            self.deficits_tokens[class] += self.quanta_tokens[class] * rounds.saturating_sub(1);
        }
        Some(())
    }

    /// Resets the deficit of a class without requests; otherwise it could later flood the others.
    pub(super) fn forget(&mut self, class: usize) {
        self.deficits_tokens[class] = 0;
    }

    pub(super) fn deficit_tokens(&self, class: usize) -> u64 {
        self.deficits_tokens[class]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The classes of `n` dispatches if class `i` always has a request that costs `costs[i]`.
    fn served(rounds: &mut Rounds, costs: &[Option<u64>], n: usize) -> Vec<usize> {
        (0..n).map_while(|_| rounds.next(|class| costs[class])).collect()
    }

    #[test]
    fn rounds_without_a_dispatch_are_skipped_in_one_step() {
        let mut rounds = Rounds::new([1, 2].into_iter());
        assert_eq!(served(&mut rounds, &[Some(1 << 31), Some(1 << 32)], 2), [0, 1]);
        assert_eq!((rounds.deficit_tokens(0), rounds.deficit_tokens(1)), (0, 0));
    }
}
