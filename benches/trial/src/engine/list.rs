//! Doubly linked list over small integers, for usage orders.
//!
//! Every operation takes constant time. The caller links a number at most once and removes only linked numbers.

/// Marker for the absence of a number.
const NIL: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Links {
    previous: u32,
    next: u32,
}

/// Ordered numbers. Each number up to the maximum takes eight bytes, linked or not.
pub(crate) struct List {
    links: Vec<Links>,
    head: u32,
    tail: u32,
    len: u32,
}

impl List {
    pub(crate) fn new() -> Self {
        Self { links: Vec::new(), head: NIL, tail: NIL, len: 0 }
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    pub(crate) fn push_front(&mut self, number: u32) {
        self.link(number, NIL, self.head);
    }

    pub(crate) fn push_back(&mut self, number: u32) {
        self.link(number, self.tail, NIL);
    }

    pub(crate) fn pop_front(&mut self) -> Option<u32> {
        let number = self.head;
        if number == NIL {
            return None;
        }
        self.remove(number);
        Some(number)
    }

    /// Unlinks a number.
    pub(crate) fn remove(&mut self, number: u32) {
        let Links { previous, next } = self.links[number as usize];
        match previous {
            NIL => self.head = next,
            _ => self.links[previous as usize].next = next,
        }
        match next {
            NIL => self.tail = previous,
            _ => self.links[next as usize].previous = previous,
        }
        self.len -= 1;
    }

    /// Iterates from front to back.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> {
        let linked = |number: u32| (number != NIL).then_some(number);
        std::iter::successors(linked(self.head), move |number| linked(self.links[*number as usize].next))
    }

    fn link(&mut self, number: u32, previous: u32, next: u32) {
        if self.links.len() <= number as usize {
            self.links.resize(number as usize + 1, Links { previous: NIL, next: NIL });
        }
        self.links[number as usize] = Links { previous, next };
        match previous {
            NIL => self.head = number,
            _ => self.links[previous as usize].next = number,
        }
        match next {
            NIL => self.tail = number,
            _ => self.links[next as usize].previous = number,
        }
        self.len += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::List;

    #[test]
    fn numbers_are_linked_and_removed_at_any_position() {
        let mut list = List::new();
        [3, 1, 4].into_iter().for_each(|number| list.push_back(number));
        list.push_front(5);
        assert_eq!(list.iter().collect::<Vec<_>>(), [5, 3, 1, 4]);
        list.remove(1);
        list.remove(4);
        list.push_back(0);
        assert_eq!((list.pop_front(), list.len()), (Some(5), 2));
        assert_eq!(list.iter().collect::<Vec<_>>(), [3, 0]);
        assert_eq!((list.pop_front(), list.pop_front(), list.pop_front(), list.len()), (Some(3), Some(0), None, 0));
    }
}
