//! Which class sends next: deficit round robin over the classes that can.
//!
//! Owns each class's quantum, what is left of what it was given (its deficit), and which class was served last. Promises
//! shares in the proportion of the quanta, whatever the requests cost, and the bound that [`Queue`](super::Queue) states.
//! Leaves to the queue what a class's next request is and whether it can be sent.

/// The ring of classes.
#[derive(Debug)]
pub(super) struct Rounds {
    quanta_tokens: Box<[u64]>,
    deficits_tokens: Box<[u64]>,
    last: usize,
}

impl Rounds {
    /// Classes with these quanta, of which the first is served first. There is at least one.
    pub(super) fn new(quanta_tokens: impl Iterator<Item = u32>) -> Self {
        let quanta_tokens: Box<[u64]> = quanta_tokens.map(|quantum| u64::from(quantum.max(1))).collect();
        let deficits_tokens = vec![0; quanta_tokens.len()].into();
        Self { last: quanta_tokens.len() - 1, quanta_tokens, deficits_tokens }
    }

    /// The class whose turn it is, charged with the cost of its next request. `cost` says what a class's next request
    /// costs, if it has one that can be sent; none if no class has. It must answer the same each time it is asked.
    pub(super) fn next(&mut self, mut cost: impl FnMut(usize) -> Option<u64>) -> Option<usize> {
        let left = self.deficits_tokens[self.last];
        let goes_on = left > 0 && cost(self.last).is_some_and(|cost| cost <= left);
        let next = if goes_on {
            self.last
        } else {
            match self.walk(&mut cost) {
                Some(class) => class,
                None => {
                    self.skip_rounds(&mut cost)?;
                    self.walk(&mut cost).expect("after the rounds skipped one more is enough for somebody")
                }
            }
        };
        self.deficits_tokens[next] -= cost(next).expect("it has a request that can be sent");
        self.last = next;
        Some(next)
    }

    /// One round, from behind the class served last: whoever can pay is served, whoever cannot is given a quantum, and
    /// served if that is enough.
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

    /// Gives at once what the rounds would give in which nobody can be served yet. The one after them is left to be
    /// walked: giving its quantum to all at once would favour whoever comes behind the class that is served in it, who
    /// would be given another one when the ring gets there (by up to a fifth of its share, where costs exceed quanta).
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

    /// The class has nothing left to send: what it saved is void, or it could flood the others later.
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

    /// Who is served, `n` times, if class `i` always has a request that costs `costs[i]`.
    fn served(rounds: &mut Rounds, costs: &[Option<u64>], n: usize) -> Vec<usize> {
        (0..n).map_while(|_| rounds.next(|class| costs[class])).collect()
    }

    #[test]
    fn shares_are_those_of_the_worked_example() {
        let mut rounds = Rounds::new([512, 128].into_iter());
        let order = served(&mut rounds, &[Some(128), Some(128)], 320);
        assert_eq!(order[..10], [0, 0, 0, 0, 1, 0, 0, 0, 0, 1]);
        let first = order.iter().filter(|class| **class == 0).count();
        assert!((254..=257).contains(&first), "{first}");
    }

    #[test]
    fn rounds_in_which_nobody_can_pay_are_skipped_in_one_step() {
        let mut rounds = Rounds::new([1, 2].into_iter());
        assert_eq!(served(&mut rounds, &[Some(1 << 31), Some(1 << 32)], 2), [0, 1]);
        assert_eq!((rounds.deficit_tokens(0), rounds.deficit_tokens(1)), (0, 0));
    }

    #[test]
    fn skipped_rounds_give_what_walked_ones_would() {
        // In round three the second class can pay; the third has been given two quanta by then, not three.
        let mut rounds = Rounds::new([10, 10, 10].into_iter());
        assert_eq!(served(&mut rounds, &[Some(45), Some(25), Some(100)], 1), [1]);
        let left: Vec<u64> = (0..3).map(|class| rounds.deficit_tokens(class)).collect();
        assert_eq!(left, [30, 5, 20]);
    }

    #[test]
    fn who_cannot_send_is_given_nothing_and_keeps_what_it_has() {
        let mut rounds = Rounds::new([100, 100].into_iter());
        assert_eq!(served(&mut rounds, &[Some(30), Some(30)], 2), [0, 0]);
        assert_eq!(served(&mut rounds, &[None, Some(100)], 5), [1; 5]);
        assert_eq!((rounds.deficit_tokens(0), rounds.deficit_tokens(1)), (40, 0));
        assert!(served(&mut rounds, &[None, None], 1).is_empty());
        rounds.forget(0);
        assert_eq!(rounds.deficit_tokens(0), 0);
    }
}
