//! A list of mostly at most one entry, which is all that the fast paths read. Further entries are on the heap, and
//! their memory is kept.

/// Entries in the order of insertion.
#[derive(Debug)]
pub(crate) struct SmallList<T> {
    first: Option<T>,
    /// None or empty while there is no first entry.
    #[allow(clippy::box_collection, reason = "one word, so that a list is short")]
    rest: Option<Box<Vec<T>>>,
}

impl<T> Default for SmallList<T> {
    fn default() -> Self {
        Self { first: None, rest: None }
    }
}

impl<T> SmallList<T> {
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    #[inline(always)]
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.first.iter().chain(self.rest())
    }

    /// The first entry.
    #[inline(always)]
    pub(crate) fn first(&self) -> Option<&T> {
        self.first.as_ref()
    }

    /// Whether there is at most one entry.
    #[inline(always)]
    pub(crate) fn has_at_most_one(&self) -> bool {
        self.rest().is_empty()
    }

    /// Empties a list of at most one entry.
    #[inline(always)]
    pub(crate) fn clear_single(&mut self) {
        self.first = None;
    }

    /// Replaces a list of at most one entry by this one.
    #[inline(always)]
    pub(crate) fn set_single(&mut self, entry: T) {
        self.first = Some(entry);
    }

    #[inline(always)]
    fn rest(&self) -> &[T] {
        match &self.rest {
            None => &[],
            Some(rest) => rest,
        }
    }

    /// Runs `body` with each entry until it fails.
    #[inline(always)]
    pub(crate) fn try_each<E>(&self, mut body: impl FnMut(&T) -> Result<(), E>) -> Result<(), E> {
        let Some(first) = &self.first else { return Ok(()) };
        body(first)?;
        if self.rest.is_none() { Ok(()) } else { self.rest().iter().try_for_each(body) }
    }

    #[inline(always)]
    pub(crate) fn push(&mut self, entry: T) {
        if self.first.is_none() {
            self.first = Some(entry);
        } else {
            self.push_further(entry);
        }
    }

    #[cold]
    fn push_further(&mut self, entry: T) {
        self.rest.get_or_insert_default().push(entry);
    }

    /// The first entry for which `is_it` holds.
    #[inline(always)]
    pub(crate) fn find_mut(&mut self, mut is_it: impl FnMut(&T) -> bool) -> Option<&mut T> {
        if let Some(first) = &mut self.first
            && is_it(first)
        {
            return Some(first);
        }
        self.rest.as_mut()?.iter_mut().find(|entry| is_it(entry))
    }

    /// Removes the first entry for which `is_it` holds, and returns what `part` makes of it in place.
    #[inline(always)]
    pub(crate) fn remove_first<R>(
        &mut self,
        mut is_it: impl FnMut(&T) -> bool,
        part: impl FnOnce(&T) -> R,
    ) -> Option<R> {
        let first = self.first.as_ref()?;
        if is_it(first) {
            let taken = part(first);
            self.first = None;
            if self.rest.is_some() {
                self.move_up();
            }
            return Some(taken);
        }
        self.remove_further(is_it).map(|entry| part(&entry))
    }

    #[cold]
    fn remove_further(&mut self, is_it: impl FnMut(&T) -> bool) -> Option<T> {
        let rest = self.rest.as_mut()?;
        let at = rest.iter().position(is_it)?;
        Some(rest.remove(at))
    }

    #[inline(always)]
    pub(crate) fn retain(&mut self, mut is_kept: impl FnMut(&T) -> bool) {
        let Some(first) = &self.first else { return };
        if !is_kept(first) {
            self.first = None;
        }
        if let Some(rest) = &mut self.rest {
            rest.retain(is_kept);
            self.move_up();
        }
    }

    /// Moves the second entry up after the first was removed.
    #[cold]
    fn move_up(&mut self) {
        if self.first.is_none()
            && let Some(rest) = &mut self.rest
            && !rest.is_empty()
        {
            self.first = Some(rest.remove(0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with a `Vec` over random steps.
    #[test]
    fn it_is_a_list_whatever_is_pushed_taken_and_dropped() {
        for seed in 1..200_u64 {
            let mut state = seed;
            let mut next = |below: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040);
                (state >> 33) % below
            };
            let (mut small_list, mut list) = (SmallList::default(), Vec::new());
            for step in 0..60 {
                match next(5) {
                    0 | 1 => {
                        let entry = next(6);
                        small_list.push(entry);
                        list.push(entry);
                    }
                    2 => {
                        let entry = next(6);
                        let at = list.iter().position(|e| *e == entry);
                        assert_eq!(
                            small_list.remove_first(|e| *e == entry, |e| *e),
                            at.map(|at| list.remove(at))
                        );
                    }
                    3 => {
                        let entry = next(6);
                        small_list.retain(|e| *e != entry);
                        list.retain(|e| *e != entry);
                    }
                    _ => {
                        let (entry, now) = (next(6), next(6));
                        let at = list.iter().position(|e| *e == entry);
                        let found = small_list.find_mut(|e| *e == entry);
                        assert_eq!(found.is_some(), at.is_some());
                        if let (Some(found), Some(at)) = (found, at) {
                            (*found, list[at]) = (now, now);
                        }
                    }
                }
                assert_eq!(
                    small_list.iter().copied().collect::<Vec<_>>(),
                    list,
                    "seed {seed}, {step}"
                );
                assert_eq!(small_list.is_empty(), list.is_empty());
                let mut met = Vec::new();
                let outcome = small_list.try_each(|entry| {
                    met.push(*entry);
                    if *entry == 3 { Err(()) } else { Ok(()) }
                });
                let upto = list.iter().position(|e| *e == 3);
                assert_eq!(outcome.is_err(), upto.is_some());
                assert_eq!(met, list[..upto.map_or(list.len(), |at| at + 1)]);
            }
        }
    }
}
