//! The kernels of a fixpoint whose lengths stay on the device.
//!
//! The state is one buffer: a count for `collect`, an overflow flag, and a counter of pairs for each round of a batch and the one
//! after. Round `r` extends the number of pairs in counter `r`, up to the capacity, and adds what it finds to counter `r + 1`.
//!
//! Table and set are hash tables of buckets, which a thread reads at once: probing begins at the first slot of a bucket.

#![allow(clippy::missing_safety_doc)]

use xlog_cuda::sim::KernelArgs;
use xlog_cuda::sim::KernelSlice::{Read, Write};
use xlog_cuda::{DeviceStream, Result};

use super::super::{Column, EMPTY};
use super::twins::{Word, add, insert_unique, matches, store, words, words_mut};
use super::{Grid, Kernels, length, mask, reads, updates, writes};

pub(super) const NAMES: &[&str] = &["clear_fixpoint", "insert_edges", "extend_pairs", "next_batch"];

/// The probe length at which a set counts as full.
const MAX_PROBES: usize = 256;

/// Slots per bucket, as in the CUDA source.
const BUCKET: usize = 8;

/// The maximum number of threads of a round: about a thousand per processor of a large GPU. Beyond, each takes several pairs.
const MAX_THREADS: usize = 1 << 17;

/// The minimum number of threads of a round, which may extend more pairs than expected.
const MIN_THREADS: usize = 1 << 11;

/// The maximum number of threads that clear the tables.
const MAX_CLEARING: usize = 1 << 18;

/// The word of the state that is nonzero if the set was full. Word 0 is the count of `collect`.
pub const OVERFLOW: usize = 1;
/// The counter of the first round of a batch; those of further rounds follow.
pub const FOUND: usize = 2;

/// Returns the words of a state for batches of `rounds` rounds.
#[must_use]
pub const fn state_words(rounds: usize) -> usize {
    FOUND + rounds + 1
}

/// The buffers of one round.
#[derive(Clone, Copy, Debug)]
pub struct Round<'a> {
    /// The number of the round in its batch.
    pub number: usize,
    /// The expected number of pairs to extend; the round gets about one thread for each.
    pub expected: usize,
    /// The pairs to extend.
    pub pairs: &'a Column<u64>,
    /// Receives the new pairs; as long as `pairs`.
    pub fresh: &'a Column<u64>,
    /// The edges.
    pub table: &'a Column<u64>,
    /// All pairs found.
    pub set: &'a Column<u64>,
    /// The state of the fixpoint.
    pub state: &'a Column<u64>,
}

fn word(words: &[Word], at: usize) -> u64 {
    words.get(at).map_or(0, |word| u64::from_le_bytes(*word))
}

impl Kernels {
    /// Clears the table and the set, and zeroes the state.
    pub unsafe fn clear_fixpoint(
        &self,
        stream: &DeviceStream,
        table: &Column<u64>,
        set: &Column<u64>,
        state: &Column<u64>,
    ) -> Result<()> {
        let arguments = [
            writes(table),
            length(table.len()),
            writes(set),
            length(set.len()),
            writes(state),
            length(state.len()),
        ];
        let twin = |args: &mut KernelArgs<'_>| {
            let [Write(table), Write(set), Write(state)] = args.slices() else { return };
            words_mut(table).fill(EMPTY.to_le_bytes());
            words_mut(set).fill(EMPTY.to_le_bytes());
            words_mut(state).fill([0; 8]);
        };
        let grid = Grid::rows(set.len().min(MAX_CLEARING));
        // SAFETY: these are the kernel's arguments; the caller guarantees access to the memory and its order.
        unsafe { self.launch(stream, "clear_fixpoint", grid, arguments, twin) }
    }

    /// Inserts each edge into the table, keyed by its high half, and into the set; the distinct edges are the pairs of the first
    /// round. The table has an empty slot for every edge.
    pub unsafe fn insert_edges(
        &self,
        stream: &DeviceStream,
        edges: &Column<u64>,
        first: Round<'_>,
    ) -> Result<()> {
        let Round { pairs, table, set, state, .. } = first;
        let capacity = pairs.len();
        let arguments = [
            reads(edges),
            length(edges.len()),
            updates(table),
            mask(table),
            updates(set),
            mask(set),
            writes(pairs),
            updates(state),
            length(capacity),
        ];
        let twin = move |args: &mut KernelArgs<'_>| {
            let [Read(edges), Write(table), Write(set), Write(pairs), Write(state)] = args.slices()
            else {
                return;
            };
            let (table, set) = (words_mut(table), words_mut(set));
            let mut list = List { pairs: words_mut(pairs), state: words_mut(state), counter: 0 };
            for edge in words(edges) {
                let edge = u64::from_le_bytes(*edge);
                let limit = table.len();
                if insert_unique::<BUCKET>(table, edge >> 32, edge, limit) == Some(true) {
                    list.take(edge, insert_unique::<BUCKET>(set, edge, edge, MAX_PROBES), capacity);
                }
            }
        };
        let grid = Grid::rows(edges.len().min(MAX_THREADS));
        // SAFETY: these are the kernel's arguments; the caller guarantees access to the memory and its order.
        unsafe { self.launch(stream, "insert_edges", grid, arguments, twin) }
    }

    /// Extends each pair by the edges that continue it, and keeps the new pairs.
    pub unsafe fn extend_pairs(&self, stream: &DeviceStream, round: Round<'_>) -> Result<()> {
        let Round { number, expected, pairs, fresh, table, set, state } = round;
        let capacity = pairs.len().min(fresh.len());
        let arguments = [
            reads(pairs),
            updates(state),
            length(number),
            reads(table),
            mask(table),
            updates(set),
            mask(set),
            writes(fresh),
            length(capacity),
        ];
        let twin = move |args: &mut KernelArgs<'_>| {
            let [Read(pairs), Write(state), Read(table), Write(set), Write(fresh)] = args.slices()
            else {
                return;
            };
            let (pairs, table, set) = (words(pairs), words(table), words_mut(set));
            let state = words_mut(state);
            let len = (word(state, FOUND + number) as usize).min(capacity);
            let mut list = List { pairs: words_mut(fresh), state, counter: number + 1 };
            for pair in pairs.iter().take(len) {
                let pair = u64::from_le_bytes(*pair);
                for entry in matches::<BUCKET>(table, pair as u32) {
                    let value = (pair >> 32 << 32) | (entry & u64::from(u32::MAX));
                    list.take(
                        value,
                        insert_unique::<BUCKET>(set, value, value, MAX_PROBES),
                        capacity,
                    );
                }
            }
        };
        let threads = expected.checked_next_power_of_two().unwrap_or(capacity).min(capacity);
        let grid = Grid::rows(threads.clamp(MIN_THREADS, MAX_THREADS));
        // SAFETY: these are the kernel's arguments; the caller guarantees access to the memory and its order.
        unsafe { self.launch(stream, "extend_pairs", grid, arguments, twin) }
    }

    /// Begins a further batch: the last counter becomes the first, and the others 0.
    pub unsafe fn next_batch(&self, stream: &DeviceStream, state: &Column<u64>) -> Result<()> {
        let arguments = [updates(state), length(state.len())];
        let twin = |args: &mut KernelArgs<'_>| {
            let Some(counters) = words_mut(args.bytes_mut(0)).get_mut(FOUND..) else { return };
            let last = counters.iter().rfind(|counter| **counter != [0; 8]).copied();
            counters.fill([0; 8]);
            store(counters, 0, last.unwrap_or_default());
        };
        // SAFETY: these are the kernel's arguments; the caller guarantees access to the memory and its order.
        unsafe { self.launch(stream, "next_batch", Grid::rows(1), arguments, twin) }
    }
}

/// The list of a round's new pairs, and the state with its counter.
struct List<'a> {
    pairs: &'a mut [Word],
    state: &'a mut [Word],
    counter: usize,
}

impl List<'_> {
    /// Appends a value that was inserted; beyond the capacity it is only counted.
    fn take(&mut self, value: u64, inserted: Option<bool>, capacity: usize) {
        match inserted {
            Some(true) => {
                let Some(counter) = self.state.get_mut(FOUND + self.counter) else { return };
                let at = u64::from_le_bytes(*counter) as usize;
                if at < capacity {
                    store(self.pairs, at, value.to_le_bytes());
                }
                add(counter, 1);
            }
            Some(false) => {}
            None => store(self.state, OVERFLOW, 1_u64.to_le_bytes()),
        }
    }
}
