//! Compares bounded clocks with clocks that forget nothing.

use std::collections::BTreeMap;

use super::stream_clock::{Begun, ClockHeader, StreamClock};

/// The full vector clock of a stream.
type Full = BTreeMap<usize, u64>;

/// Streams with clocks of `N` entries, and with full clocks.
struct Streams<const N: usize> {
    clocks: Vec<StreamClock<usize, Box<ClockHeader>, N>>,
    full: Vec<Full>,
    /// The full clock at each event.
    events: Vec<Full>,
    waits: Waits,
}

/// How often a stream had to follow another one.
#[derive(Clone, Copy, Default)]
struct Waits {
    inserted: u64,
    /// The waits that a full clock would have elided.
    added: u64,
    elided: u64,
}

impl<const N: usize> Streams<N> {
    fn new(count: usize) -> Self {
        let clock = |slot| StreamClock::new(slot as u32, Box::default());
        Self {
            clocks: (0..count).map(clock).collect(),
            full: vec![Full::new(); count],
            events: Vec::new(),
            waits: Waits::default(),
        }
    }

    /// Records an event on `stream`, as the driver does when the clock has begun it.
    fn record(&mut self, stream: usize, begun: Begun<usize>) -> usize {
        let mut brings = self.full[stream].clone();
        brings.insert(stream, begun.covers);
        let event = begun.recycled.unwrap_or(self.events.len());
        if event == self.events.len() {
            self.events.push(brings);
        } else {
            self.events[event] = brings;
        }
        self.clocks[stream].recorded(begun.covers, event);
        event
    }

    /// Work of `stream` that finishes and has its event at once; returns its stamp.
    fn work(&mut self, stream: usize) -> u64 {
        let begun = self.clocks[stream].begin();
        self.record(stream, begun);
        begun.covers
    }

    /// Makes `stream` follow `stamp` of `other`, as a runtime stream does.
    fn follow(&mut self, stream: usize, other: usize, stamp: u64) {
        let is_ordered = self.full[stream].get(&other).is_some_and(|known| *known >= stamp);
        let (slot, clock) = (other as u32, &self.clocks[stream]);
        if clock.covers(slot, stamp) {
            assert!(is_ordered, "stream {stream} omits a wait for {stamp} of stream {other}");
            self.waits.elided += 1;
            return;
        }
        self.waits.inserted += 1;
        self.waits.added += u64::from(is_ordered);
        let mut joined_clock = None;
        let cover = self.clocks[other].find_or_begin(stamp, stream as u32, &mut joined_clock);
        let event = match cover.event {
            Some(event) if cover.recorded => {
                self.clocks[other].unpin();
                event
            }
            recycled => self.record(other, Begun { covers: cover.covers, recycled }),
        };
        for (of, brought) in self.events[event].clone() {
            let known = self.full[stream].entry(of).or_default();
            *known = brought.max(*known);
        }
        self.clocks[stream].join(slot, cover.covers, &joined_clock);
        assert!(self.clocks[stream].covers(slot, stamp), "the wait brought the entry back");
    }

    /// Checks that every claim of a clock is true.
    fn check(&self) {
        for (stream, full) in self.full.iter().enumerate() {
            for other in (0..self.full.len()).filter(|other| *other != stream) {
                let known = full.get(&other).copied().unwrap_or(0);
                let claims = self.clocks[stream].covers(other as u32, known + 1);
                assert!(!claims, "stream {stream} claims more of {other} than {known}");
            }
        }
    }
}

/// A random program: streams work, and follow recent and old work of others.
fn run<const N: usize>(seed: u64, count: usize) -> Waits {
    let mut state = seed;
    let mut next = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040);
        (state >> 33) as usize % below
    };
    let mut streams = Streams::<N>::new(count);
    let mut done: Vec<(usize, u64)> = Vec::new();
    for step in 0..400 {
        let stream = next(count);
        if done.is_empty() || next(3) == 0 {
            let stamp = streams.work(stream);
            done.push((stream, stamp));
        } else {
            let back = if next(4) == 0 { done.len() } else { done.len().min(2 * count) };
            let (other, stamp) = done[done.len() - 1 - next(back)];
            if other != stream {
                streams.follow(stream, other, stamp);
            }
        }
        if step % 16 == 0 {
            streams.check();
        }
    }
    streams.check();
    streams.waits
}

#[test]
fn a_forgotten_entry_adds_a_wait_and_never_omits_one() {
    let mut added = [0; 3];
    for seed in 0..300 {
        let count = 3 + seed as usize % 60;
        let of = [run::<1>(seed, count), run::<2>(seed, count), run::<16>(seed, count)];
        for (sum, waits) in added.iter_mut().zip(of) {
            *sum += waits.added;
        }
    }
    let [one, two, sixteen] = added;
    assert!(one > two && two > sixteen && sixteen > 0, "{added:?} waits were added");
}

/// Passes one block around a ring: each stream follows the one before it.
fn ring<const N: usize>(count: usize) -> Waits {
    let mut streams = Streams::<N>::new(count);
    let mut last: Option<(usize, u64)> = None;
    for turn in 0..8 * count {
        let stream = turn % count;
        if let Some((before, stamp)) = last {
            streams.follow(stream, before, stamp);
        }
        last = Some((stream, streams.work(stream)));
        // The work of every stream of the ring happened before, and with few streams that is known.
        for back in 1..count.min(turn) {
            let other = (turn - back) % count;
            let stamp = streams.clocks[other].now() - 1;
            streams.follow(stream, other, stamp);
        }
    }
    streams.waits
}

#[test]
fn up_to_sixteen_streams_in_turn_wait_once_a_turn() {
    for count in 2..=16 {
        let waits = ring::<16>(count);
        assert_eq!(waits.added, 0, "{count} streams");
        assert_eq!(waits.inserted, 8 * count as u64 - 1, "{count} streams");
    }
    let waits = ring::<16>(40);
    assert!(waits.added > 0 && waits.elided > 0, "forgotten entries are waited for");
}
