//! The kernels: parameters, launch shape, arguments, and the body on a simulated device.

#![allow(clippy::missing_safety_doc, clippy::too_many_arguments)]

use xlog_cuda::sim::KernelArgs;
use xlog_cuda::sim::KernelSlice::{Read, Write};
use xlog_cuda::{DeviceStream, Result};

use super::super::numbers::{edge, key, number};
use super::super::{Column, EMPTY, TILE};
use super::twins::{
    add, count_matches, digit, halves, halves_mut, insert, insert_unique, low, store, words,
    words_mut, write_matches,
};
use super::{
    DIGITS, Grid, Kernels, SORT_TILE, length, mask, reads, reads_first, scalar, updates, writes,
};

/// Defines the kernels as functions of [`Kernels`], and lists their names.
macro_rules! kernels {
    ($(
        $(#[$doc:meta])*
        fn $name:ident($($parameter:ident: $kind:ty),*) over $grid:expr;
        passes [$($passed:expr),*];
        as |$args:ident| $twin:block
    )*) => {
        pub(super) const NAMES: &[&str] = &[$(stringify!($name)),*];

        impl Kernels {$(
            $(#[$doc])*
            pub unsafe fn $name(&self, stream: &DeviceStream, $($parameter: $kind),*) -> Result<()> {
                let twin = move |$args: &mut KernelArgs<'_>| $twin;
                // SAFETY: these are the kernel's arguments; the caller guarantees access to the memory and its order.
                unsafe { self.launch(stream, stringify!($name), $grid, [$($passed),*], twin) }
            }
        )*}
    };
}

kernels! {
    /// `out[i] =` the key of row `i`.
    fn generate_keys(out: &Column<u32>, seed: u64, domain: u32) over Grid::rows(out.len());
    passes [writes(out), length(out.len()), scalar(seed), scalar(domain)];
    as |args| {
        for (row, out) in halves_mut(args.bytes_mut(0)).iter_mut().enumerate() {
            *out = key(seed, row as u64, domain).to_le_bytes();
        }
    }

    /// `out[i] =` the edge of row `i`.
    fn generate_edges(out: &Column<u64>, seed: u64, vertices: u32) over Grid::rows(out.len());
    passes [writes(out), length(out.len()), scalar(seed), scalar(vertices)];
    as |args| {
        for (row, out) in words_mut(args.bytes_mut(0)).iter_mut().enumerate() {
            *out = edge(seed, row as u64, vertices).to_le_bytes();
        }
    }

    /// `out[i] =` the number of row `i`.
    fn generate_numbers(out: &Column<u64>, seed: u64) over Grid::rows(out.len());
    passes [writes(out), length(out.len()), scalar(seed)];
    as |args| {
        for (row, out) in words_mut(args.bytes_mut(0)).iter_mut().enumerate() {
            *out = number(seed, row as u64).to_le_bytes();
        }
    }

    /// Inserts each key with its row into the table, the key in the high half.
    fn build_rows(keys: &Column<u32>, table: &Column<u64>) over Grid::rows(keys.len());
    passes [reads(keys), length(keys.len()), updates(table), mask(table)];
    as |args| {
        let [Read(keys), Write(table)] = args.slices() else { return };
        let table = words_mut(table);
        for (row, key) in halves(keys).iter().enumerate() {
            let key = u64::from(u32::from_le_bytes(*key));
            insert(table, key, (key << 32) | row as u64);
        }
    }

    /// Inserts each pair into the table, keyed by its high half.
    fn build_pairs(pairs: &Column<u64>, table: &Column<u64>) over Grid::rows(pairs.len());
    passes [reads(pairs), length(pairs.len()), updates(table), mask(table)];
    as |args| {
        let [Read(pairs), Write(table)] = args.slices() else { return };
        let table = words_mut(table);
        for pair in words(pairs) {
            let pair = u64::from_le_bytes(*pair);
            insert(table, pair >> 32, pair);
        }
    }

    /// `counts[i] =` the number of entries of key `i` in the table; `sums[t] =` the sum of tile `t`.
    fn count_rows(keys: &Column<u32>, table: &Column<u64>, counts: &Column<u32>, sums: &Column<u64>)
    over Grid::tiles(keys.len(), TILE);
    passes [
        reads(keys), length(keys.len()), reads(table), mask(table), writes(counts), writes(sums)
    ];
    as |args| {
        let [Read(keys), Read(table), Write(counts), Write(sums)] = args.slices() else {
            return;
        };
        let keys = halves(keys).iter().map(|key| u32::from_le_bytes(*key));
        count_matches(keys, words(table), counts, sums);
    }

    /// `counts[i] =` the number of entries of the low half of pair `i`, for the first `len` pairs; `sums[t] =` the sum of tile `t`.
    fn count_pairs(
        pairs: &Column<u64>, len: usize, table: &Column<u64>, counts: &Column<u32>,
        sums: &Column<u64>
    ) over Grid::tiles(len, TILE);
    passes [
        reads_first(pairs, len), length(len), reads(table), mask(table), writes(counts),
        writes(sums)
    ];
    as |args| {
        let [Read(pairs), Read(table), Write(counts), Write(sums)] = args.slices() else {
            return;
        };
        count_matches(words(pairs).iter().map(low), words(table), counts, sums);
    }

    /// Writes the matches of `count_rows`, each tile from the offset in its sum: the row in the table in the high half, the row of
    /// the key in the low one.
    fn write_rows(
        keys: &Column<u32>, table: &Column<u64>, counts: &Column<u32>, sums: &Column<u64>,
        out: &Column<u64>
    ) over Grid::tiles(keys.len(), TILE);
    passes [
        reads(keys), length(keys.len()), reads(table), mask(table), reads(counts), reads(sums),
        writes(out)
    ];
    as |args| {
        let [Read(keys), Read(table), _, Read(sums), Write(out)] = args.slices() else {
            return;
        };
        let keys = halves(keys).iter().map(|key| u32::from_le_bytes(*key));
        let pair = |row, entry: u64| (entry << 32) | row as u64;
        write_matches(keys, words(table), words(sums), words_mut(out), pair);
    }

    /// Writes the matches of `count_pairs`, each tile from the offset in its sum: the high half of the pair, the low half of the entry.
    fn write_pairs(
        pairs: &Column<u64>, len: usize, table: &Column<u64>, counts: &Column<u32>,
        sums: &Column<u64>, out: &Column<u64>
    ) over Grid::tiles(len, TILE);
    passes [
        reads_first(pairs, len), length(len), reads(table), mask(table), reads(counts), reads(sums),
        writes(out)
    ];
    as |args| {
        let [Read(pairs), Read(table), _, Read(sums), Write(out)] = args.slices() else {
            return;
        };
        let pairs = words(pairs);
        let pair = |row: usize, entry: u64| {
            let from = u64::from_le_bytes(pairs[row]) >> 32;
            (from << 32) | (entry & 0xffff_ffff)
        };
        write_matches(pairs.iter().map(low), words(table), words(sums), words_mut(out), pair);
    }

    /// `sums[t] =` the sum of `counts` over tile `t`.
    fn sum_tiles(counts: &Column<u32>, sums: &Column<u64>) over Grid::tiles(counts.len(), TILE);
    passes [reads(counts), length(counts.len()), writes(sums)];
    as |args| {
        let [Read(counts), Write(sums)] = args.slices() else { return };
        for (tile, sum) in halves(counts).chunks(TILE).zip(words_mut(sums)) {
            let total: u64 =
                tile.iter().map(|count| u64::from(u32::from_le_bytes(*count))).sum();
            *sum = total.to_le_bytes();
        }
    }

    /// Replaces each sum by that of all before it; the last element becomes the total.
    fn scan_sums(sums: &Column<u64>) over Grid::rows(1);
    passes [updates(sums), length(sums.len().saturating_sub(1))];
    as |args| {
        let mut before = 0_u64;
        let sums = words_mut(args.bytes_mut(0));
        let tiles = sums.len().saturating_sub(1);
        for (tile, sum) in sums.iter_mut().enumerate() {
            let here = if tile < tiles { u64::from_le_bytes(*sum) } else { 0 };
            *sum = before.to_le_bytes();
            before = before.wrapping_add(here);
        }
    }

    /// `offsets[i] =` the sum of all counts before `i`, using the sums of the tiles.
    fn spread_sums(counts: &Column<u32>, sums: &Column<u64>, offsets: &Column<u32>)
    over Grid::tiles(counts.len(), TILE);
    passes [reads(counts), length(counts.len()), reads(sums), writes(offsets)];
    as |args| {
        let [Read(counts), Read(sums), Write(offsets)] = args.slices() else { return };
        let tiles = halves(counts).chunks(TILE).zip(halves_mut(offsets).chunks_mut(TILE));
        for ((counts, offsets), sum) in tiles.zip(words(sums)) {
            let mut before = low(sum);
            for (count, offset) in counts.iter().zip(offsets) {
                *offset = before.to_le_bytes();
                before = before.wrapping_add(u32::from_le_bytes(*count));
            }
        }
    }

    /// Inserts each value that the set lacks, and appends it to `fresh`, whose length is in `count`.
    fn insert_new(values: &Column<u64>, set: &Column<u64>, fresh: &Column<u64>, count: &Column<u64>)
    over Grid::rows(values.len());
    passes [
        reads(values), length(values.len()), updates(set), mask(set), writes(fresh), updates(count)
    ];
    as |args| {
        let [Read(values), Write(set), Write(fresh), Write(count)] = args.slices() else {
            return;
        };
        let (set, fresh) = (words_mut(set), words_mut(fresh));
        let [count, ..] = words_mut(count) else { return };
        for value in words(values) {
            let number = u64::from_le_bytes(*value);
            if insert_unique::<1>(set, number, number, usize::MAX) == Some(true) {
                store(fresh, u64::from_le_bytes(*count) as usize, *value);
                add(count, 1);
            }
        }
    }

    /// Inserts all values of a set into a larger one.
    fn rehash(set: &Column<u64>, larger: &Column<u64>) over Grid::rows(set.len());
    passes [reads(set), length(set.len()), updates(larger), mask(larger)];
    as |args| {
        let [Read(set), Write(larger)] = args.slices() else { return };
        let larger = words_mut(larger);
        for value in words(set).iter().map(|word| u64::from_le_bytes(*word)) {
            if value != EMPTY {
                insert(larger, value, value);
            }
        }
    }

    /// Lists a set; the first word of `count`, initially 0, becomes its length.
    fn collect(set: &Column<u64>, out: &Column<u64>, count: &Column<u64>)
    over Grid::tiles(set.len(), TILE);
    passes [reads(set), length(set.len()), writes(out), updates(count)];
    as |args| {
        let [Read(set), Write(out), Write(count)] = args.slices() else { return };
        let out = words_mut(out);
        let [count, ..] = words_mut(count) else { return };
        for value in words(set).iter().filter(|value| **value != EMPTY.to_le_bytes()) {
            store(out, u64::from_le_bytes(*count) as usize, *value);
            add(count, 1);
        }
    }

    /// `counts[digit][tile] =` how many numbers of the tile have that digit: the eight bits from `shift` on.
    fn count_digits(numbers: &Column<u64>, shift: u32, counts: &Column<u32>)
    over Grid::tiles(numbers.len(), SORT_TILE);
    passes [reads(numbers), length(numbers.len()), scalar(shift), writes(counts)];
    as |args| {
        let [Read(numbers), Write(counts)] = args.slices() else { return };
        let counts = halves_mut(counts);
        let tiles = counts.len() / DIGITS;
        for (tile, numbers) in words(numbers).chunks(SORT_TILE).enumerate() {
            let mut found = [0_u32; DIGITS];
            numbers.iter().for_each(|number| found[digit(number, shift)] += 1);
            for (digit, found) in found.iter().enumerate() {
                counts[digit * tiles + tile] = found.to_le_bytes();
            }
        }
    }

    /// Moves each number to the offset of its digit in its tile; the sort is stable.
    fn scatter_digits(numbers: &Column<u64>, shift: u32, offsets: &Column<u32>, out: &Column<u64>)
    over Grid::tiles(numbers.len(), SORT_TILE);
    passes [reads(numbers), length(numbers.len()), scalar(shift), reads(offsets), writes(out)];
    as |args| {
        let [Read(numbers), Read(offsets), Write(out)] = args.slices() else { return };
        let (offsets, out) = (halves(offsets), words_mut(out));
        let tiles = offsets.len() / DIGITS;
        for (tile, numbers) in words(numbers).chunks(SORT_TILE).enumerate() {
            let mut next: [usize; DIGITS] = std::array::from_fn(|digit| {
                u32::from_le_bytes(offsets[digit * tiles + tile]) as usize
            });
            for number in numbers {
                let next = &mut next[digit(number, shift)];
                store(out, *next, *number);
                *next += 1;
            }
        }
    }
}
