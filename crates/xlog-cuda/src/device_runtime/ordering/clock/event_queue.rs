//! A contiguous queue whose entries are filled in place. The last entry, which is read most, needs no copy.

/// The minimum capacity.
const MIN_SLOTS: usize = 8;

/// Entries in the order of insertion.
#[derive(Debug)]
pub(crate) struct EventQueue<T> {
    /// The entries are `first..end`. Other slots hold old values.
    slots: Vec<T>,
    /// 0 while there is no entry.
    first: usize,
    end: usize,
}

impl<T: Default> EventQueue<T> {
    pub(crate) const fn new() -> Self {
        Self { slots: Vec::new(), first: 0, end: 0 }
    }

    #[inline(always)]
    pub(crate) fn len(&self) -> usize {
        self.end - self.first
    }

    /// Appends an entry, which the caller fills in.
    #[inline(always)]
    pub(crate) fn push(&mut self) -> &mut T {
        if self.end >= self.slots.len() {
            self.make_room();
        }
        let at = self.end;
        self.end += 1;
        &mut self.slots[at]
    }

    /// Creates space at the end: by moving the entries to the front, or by growing.
    #[cold]
    #[inline(never)]
    fn make_room(&mut self) {
        // Moves if at least as many slots are free as entries move, so each entry moves about once.
        if self.first != 0 && self.first >= self.len() {
            self.close_up();
        } else {
            let slots = (2 * self.slots.len()).max(MIN_SLOTS);
            self.slots.resize_with(slots, T::default);
        }
    }

    /// Moves the entries to the front.
    fn close_up(&mut self) {
        self.slots.rotate_left(self.first);
        self.end -= self.first;
        self.first = 0;
    }

    #[inline(always)]
    pub(crate) fn last(&self) -> Option<&T> {
        // Without an entry the end is 0.
        self.slots.get(self.end.wrapping_sub(1))
    }

    #[inline(always)]
    pub(crate) fn last_mut(&mut self) -> Option<&mut T> {
        self.slots.get_mut(self.end.wrapping_sub(1))
    }

    pub(crate) fn as_slice(&self) -> &[T] {
        self.slots.get(self.first..self.end).unwrap_or_default()
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [T] {
        self.slots.get_mut(self.first..self.end).unwrap_or_default()
    }

    /// Drops the first `count` entries.
    pub(crate) fn drop_front(&mut self, count: usize) {
        self.first += count;
        if self.first >= self.end {
            self.clear();
        }
    }

    pub(crate) fn clear(&mut self) {
        (self.first, self.end) = (0, 0);
    }

    pub(crate) fn retain(&mut self, mut is_kept: impl FnMut(&T) -> bool) {
        self.close_up();
        let mut kept = 0;
        for at in 0..self.end {
            if is_kept(&self.slots[at]) {
                self.slots.swap(kept, at);
                kept += 1;
            }
        }
        self.end = kept;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    /// Compares with a `VecDeque` over random steps.
    #[test]
    fn it_is_a_queue_whatever_is_pushed_taken_and_dropped() {
        for seed in 1..200_u64 {
            let mut state = seed;
            let mut next = |below: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040);
                (state >> 33) % below
            };
            let (mut event_queue, mut queue) = (EventQueue::new(), VecDeque::new());
            for step in 0..200 {
                match next(9) {
                    0..4 => {
                        *event_queue.push() = step;
                        queue.push_back(step);
                    }
                    4..8 => {
                        let count = next(3).min(queue.len() as u64) as usize;
                        queue.drain(..count);
                        event_queue.drop_front(count);
                    }
                    _ if next(8) == 0 => {
                        event_queue.retain(|entry| entry % 3 != 0);
                        queue.retain(|entry| entry % 3 != 0);
                    }
                    _ => {}
                }
                assert_eq!(
                    event_queue.as_slice(),
                    queue.make_contiguous(),
                    "seed {seed}, step {step}"
                );
                assert_eq!((event_queue.len(), event_queue.last()), (queue.len(), queue.back()));
                assert_eq!(event_queue.last_mut(), queue.back_mut());
                assert_eq!(event_queue.as_mut_slice(), queue.make_contiguous());
            }
        }
    }
}
