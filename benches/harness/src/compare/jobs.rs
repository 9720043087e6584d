//! Parallel execution with a deterministic result.

use std::num::NonZeroUsize;
use std::sync::Mutex;
use std::thread;

/// Applies `work` to each of `items` on `jobs` threads and returns the results in order. After a failure, no more items
/// are started.
///
/// # Errors
/// The error of the first failed item, in order of `items`.
///
/// # Panics
/// `work` panics.
pub(crate) fn in_parallel<T: Sync, R: Send, E: Send>(
    items: &[T],
    jobs: NonZeroUsize,
    work: impl Fn(&T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let left = Mutex::new(items.iter().enumerate());
    let done: Mutex<Vec<(usize, Result<R, E>)>> = Mutex::new(Vec::with_capacity(items.len()));
    let next = || left.lock().expect("no thread panics while it holds the lock").next();
    thread::scope(|scope| {
        for _ in 0..jobs.get().min(items.len()) {
            scope.spawn(|| {
                while let Some((place, item)) = next() {
                    let outcome = work(item);
                    if outcome.is_err() {
                        left.lock().expect("no thread panics while it holds the lock").by_ref().for_each(drop);
                    }
                    done.lock().expect("no thread panics while it holds the lock").push((place, outcome));
                }
            });
        }
    });
    let mut done = done.into_inner().expect("no thread panicked");
    done.sort_by_key(|(place, _)| *place);
    done.into_iter().map(|(_, outcome)| outcome).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_keep_the_order_of_their_items() {
        let items: Vec<u32> = (0..100).collect();
        for jobs in [1, 3, 200] {
            let jobs = NonZeroUsize::new(jobs).expect("not 0");
            assert_eq!(
                in_parallel(&items, jobs, |item| Ok::<_, ()>(item * 2)),
                Ok((0..100).map(|of| of * 2).collect())
            );
        }
        assert_eq!(in_parallel(&[], NonZeroUsize::MIN, |_: &u32| Ok::<_, ()>(0)), Ok(vec![]));
    }
}
