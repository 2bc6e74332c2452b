//! The kernels of a fixpoint whose lengths stay on the device.

#![allow(clippy::missing_safety_doc)]

use xlog_cuda::sim::KernelArgs;
use xlog_cuda::sim::KernelSlice::{Read, Write};
use xlog_cuda::{DeviceStream, Result};

use super::super::{Column, EMPTY};
use super::twins::{Word, add, matches, places, store, words, words_mut};
use super::{Grid, Kernels, length, mask, reads, updates, writes};

/// The kernels of this file.
pub(super) const NAMES: &[&str] = &["begin_round", "extend_pairs"];

/// How far a search goes in a set before it counts as full.
const MAX_PROBES: usize = 256;

/// The maximum number of threads of a round: beyond, each takes several pairs.
const MAX_THREADS: usize = 1 << 18;

/// Words of the state of a fixpoint.
pub const PAIRS: usize = 0;
/// The entries of the set.
pub const ENTRIES: usize = 1;
/// Not 0 where something did not fit.
pub const OVERFLOW: usize = 2;
/// Rounds that had pairs.
pub const ROUNDS: usize = 3;
/// The number of words.
pub const STATE_WORDS: usize = 4;

/// The buffers of one round.
#[derive(Clone, Copy, Debug)]
pub struct Round<'a> {
    /// The pairs to extend.
    pub pairs: &'a Column<u64>,
    /// Where new pairs go; as long as `pairs`.
    pub fresh: &'a Column<u64>,
    /// The edges.
    pub table: &'a Column<u64>,
    /// Everything that was found.
    pub set: &'a Column<u64>,
    /// The state of the fixpoint.
    pub state: &'a Column<u64>,
    /// The number of new pairs.
    pub found: &'a Column<u64>,
}

fn word(words: &[Word], at: usize) -> u64 {
    words.get(at).map_or(0, |word| u64::from_le_bytes(*word))
}

impl Kernels {
    /// Begins a round: what the round before found is what this one extends.
    pub unsafe fn begin_round(&self, stream: &DeviceStream, round: Round<'_>) -> Result<()> {
        let capacity = round.pairs.len();
        let arguments = [updates(round.state), updates(round.found), length(capacity)];
        let twin = move |args: &mut KernelArgs<'_>| {
            let [Write(state), Write(found)] = args.slices() else { return };
            let (state, found) = (words_mut(state), words_mut(found));
            let new = word(found, 0);
            let pairs = new.min(capacity as u64);
            if new > capacity as u64 {
                store(state, OVERFLOW, 1_u64.to_le_bytes());
            }
            store(state, PAIRS, pairs.to_le_bytes());
            if let Some(entries) = state.get_mut(ENTRIES) {
                add(entries, new);
            }
            if let Some(rounds) = state.get_mut(ROUNDS) {
                add(rounds, u64::from(pairs > 0));
            }
            store(found, 0, [0; 8]);
        };
        // SAFETY: these are the kernel's arguments; the caller answers for the memory and the order.
        unsafe { self.launch(stream, "begin_round", Grid::rows(1), arguments, twin) }
    }

    /// Extends each pair by the edges that go on from it, and keeps what the set did not have.
    pub unsafe fn extend_pairs(&self, stream: &DeviceStream, round: Round<'_>) -> Result<()> {
        let Round { pairs, fresh, table, set, state, found } = round;
        let capacity = pairs.len().min(fresh.len());
        let arguments = [
            reads(pairs),
            updates(state),
            reads(table),
            mask(table),
            updates(set),
            mask(set),
            writes(fresh),
            updates(found),
            length(capacity),
        ];
        let twin = move |args: &mut KernelArgs<'_>| {
            let [Read(pairs), Write(state), Read(table), Write(set), Write(fresh), Write(found)] =
                args.slices()
            else {
                return;
            };
            let (pairs, table, state) = (words(pairs), words(table), words_mut(state));
            let (set, fresh) = (words_mut(set), words_mut(fresh));
            let [found, ..] = words_mut(found) else { return };
            for pair in pairs.iter().take(word(state, PAIRS) as usize) {
                let pair = u64::from_le_bytes(*pair);
                for entry in matches(table, pair as u32) {
                    let value = (pair >> 32 << 32) | (entry & u64::from(u32::MAX));
                    match insert_bounded(set, value) {
                        Some(true) => {
                            let at = u64::from_le_bytes(*found) as usize;
                            if at < capacity {
                                store(fresh, at, value.to_le_bytes());
                            }
                            add(found, 1);
                        }
                        Some(false) => {}
                        None => store(state, OVERFLOW, 1_u64.to_le_bytes()),
                    }
                }
            }
        };
        let grid = Grid::rows(capacity.min(MAX_THREADS));
        // SAFETY: these are the kernel's arguments; the caller answers for the memory and the order.
        unsafe { self.launch(stream, "extend_pairs", grid, arguments, twin) }
    }
}

/// Puts a value into a set; `None` where there is no place near its own.
fn insert_bounded(set: &mut [Word], value: u64) -> Option<bool> {
    for place in places(set, value).take(MAX_PROBES) {
        match u64::from_le_bytes(set[place]) {
            EMPTY => {
                set[place] = value.to_le_bytes();
                return Some(true);
            }
            other if other == value => return Some(false),
            _ => {}
        }
    }
    None
}
