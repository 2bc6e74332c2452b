//! The kernels as closures over declared ranges, for a simulated device.
//!
//! Buffers are bytes here, as device memory is; numbers in them are little endian. A closure sees its ranges and nothing else.

#![allow(unsafe_code)]

use xlog_cuda::driver::Access;
use xlog_cuda::sim::{KernelArgs, KernelSlice, SimKernel};
use xlog_cuda::{DeviceStream, Result};

use super::super::numbers::{edge, key, mix, number};
use super::super::touched::touch;
use super::super::{Column, EMPTY, TILE};
use super::{DIGITS, Kernels, SORT_TILE};

/// The kernels of a simulated device; there is nothing to load.
#[derive(Debug)]
pub(super) struct Simulated;

/// A declared range.
type Range = (u64, usize, Access);

fn reads<T>(column: &Column<T>) -> Range {
    (column.ptr(), column.size_bytes(), Access::Read)
}

fn writes<T>(column: &Column<T>) -> Range {
    (column.ptr(), column.size_bytes(), Access::Write)
}

fn changes<T>(column: &Column<T>) -> Range {
    (column.ptr(), column.size_bytes(), Access::ReadWrite)
}

/// The first `len` elements of eight bytes.
fn reads_first(column: &Column<u64>, len: usize) -> Range {
    (column.ptr(), column.size_bytes().min(len * size_of::<u64>()), Access::Read)
}

fn queue<const N: usize>(
    stream: &DeviceStream,
    name: &'static str,
    ranges: [Range; N],
    body: impl FnOnce(&mut KernelArgs<'_>) + Send + 'static,
) -> Result<()> {
    ranges.iter().for_each(|&(ptr, bytes, access)| touch(ptr, bytes, access));
    let kernel =
        ranges.into_iter().fold(SimKernel::new(name, body), |kernel, (ptr, bytes, access)| {
            kernel.arg(ptr, bytes, access)
        });
    stream.launch_sim(kernel)
}

type Word = [u8; 8];
type Half = [u8; 4];

fn words(bytes: &[u8]) -> &[Word] {
    bytes.as_chunks().0
}

fn words_mut(bytes: &mut [u8]) -> &mut [Word] {
    bytes.as_chunks_mut().0
}

fn halves(bytes: &[u8]) -> &[Half] {
    bytes.as_chunks().0
}

fn halves_mut(bytes: &mut [u8]) -> &mut [Half] {
    bytes.as_chunks_mut().0
}

/// The places of a table from where a key's search begins, over its end and on from its start.
fn places(table: &[Word], of: u64) -> impl Iterator<Item = usize> + use<> {
    let mask = table.len().wrapping_sub(1);
    let first = mix(of) as usize;
    (0..table.len()).map(move |step| first.wrapping_add(step) & mask)
}

fn insert(table: &mut [Word], of: u64, entry: u64) {
    let empty = places(table, of).find(|place| u64::from_le_bytes(table[*place]) == EMPTY);
    if let Some(place) = empty {
        table[place] = entry.to_le_bytes();
    }
}

/// Puts a value into a set; false when it was there.
fn insert_unique(set: &mut [Word], value: u64) -> bool {
    for place in places(set, value) {
        match u64::from_le_bytes(set[place]) {
            EMPTY => {
                set[place] = value.to_le_bytes();
                return true;
            }
            other if other == value => return false,
            _ => {}
        }
    }
    false
}

/// The entries of a key.
fn matches(table: &[Word], key: u32) -> impl Iterator<Item = u64> {
    places(table, u64::from(key))
        .map(|place| u64::from_le_bytes(table[place]))
        .take_while(|entry| *entry != EMPTY)
        .filter(move |entry| entry >> 32 == u64::from(key))
}

/// Counts the matches of keys, and sums them up by tiles.
fn count(keys: impl Iterator<Item = u32>, table: &[Word], counts: &mut [u8], sums: &mut [u8]) {
    let sums = words_mut(sums);
    sums.fill([0; 8]);
    for (row, (key, count)) in keys.zip(halves_mut(counts)).enumerate() {
        let found = matches(table, key).count() as u32;
        *count = found.to_le_bytes();
        add(&mut sums[row / TILE], u64::from(found));
    }
}

fn add(word: &mut Word, more: u64) {
    *word = u64::from_le_bytes(*word).wrapping_add(more).to_le_bytes();
}

/// Writes the matches of keys, each tile from where its sum says.
fn write(
    keys: impl Iterator<Item = u32>,
    table: &[Word],
    sums: &[Word],
    out: &mut [Word],
    pair: impl Fn(usize, u64) -> u64,
) {
    let mut next = 0;
    for (row, key) in keys.enumerate() {
        if row % TILE == 0 {
            next = u64::from_le_bytes(sums[row / TILE]) as usize;
        }
        for entry in matches(table, key) {
            store(out, next, pair(row, entry).to_le_bytes());
            next = next.wrapping_add(1);
        }
    }
}

/// Stores at a place that was read from the device. Memory that something else writes at the same time may lead anywhere; what is
/// out of the range is dropped, since nothing outside it may be touched.
fn store(out: &mut [Word], at: usize, word: Word) {
    if let Some(place) = out.get_mut(at) {
        *place = word;
    }
}

fn low(word: &Word) -> u32 {
    u64::from_le_bytes(*word) as u32
}

fn digit(word: &Word, shift: u32) -> usize {
    (u64::from_le_bytes(*word) >> shift) as usize % DIGITS
}

impl Kernels for Simulated {
    unsafe fn generate_keys(
        &self,
        stream: &DeviceStream,
        out: &Column<u32>,
        seed: u64,
        domain: u32,
    ) -> Result<()> {
        queue(stream, "generate_keys", [writes(out)], move |args| {
            for (row, out) in halves_mut(args.bytes_mut(0)).iter_mut().enumerate() {
                *out = key(seed, row as u64, domain).to_le_bytes();
            }
        })
    }

    unsafe fn generate_edges(
        &self,
        stream: &DeviceStream,
        out: &Column<u64>,
        seed: u64,
        vertices: u32,
    ) -> Result<()> {
        queue(stream, "generate_edges", [writes(out)], move |args| {
            for (row, out) in words_mut(args.bytes_mut(0)).iter_mut().enumerate() {
                *out = edge(seed, row as u64, vertices).to_le_bytes();
            }
        })
    }

    unsafe fn generate_numbers(
        &self,
        stream: &DeviceStream,
        out: &Column<u64>,
        seed: u64,
    ) -> Result<()> {
        queue(stream, "generate_numbers", [writes(out)], move |args| {
            for (row, out) in words_mut(args.bytes_mut(0)).iter_mut().enumerate() {
                *out = number(seed, row as u64).to_le_bytes();
            }
        })
    }

    unsafe fn build_rows(
        &self,
        stream: &DeviceStream,
        keys: &Column<u32>,
        table: &Column<u64>,
    ) -> Result<()> {
        queue(stream, "build_rows", [reads(keys), changes(table)], |args| {
            let [KernelSlice::Read(keys), KernelSlice::Write(table)] = args.slices() else {
                return;
            };
            let table = words_mut(table);
            for (row, key) in halves(keys).iter().enumerate() {
                let key = u64::from(u32::from_le_bytes(*key));
                insert(table, key, (key << 32) | row as u64);
            }
        })
    }

    unsafe fn build_pairs(
        &self,
        stream: &DeviceStream,
        pairs: &Column<u64>,
        table: &Column<u64>,
    ) -> Result<()> {
        queue(stream, "build_pairs", [reads(pairs), changes(table)], |args| {
            let [KernelSlice::Read(pairs), KernelSlice::Write(table)] = args.slices() else {
                return;
            };
            let table = words_mut(table);
            for pair in words(pairs) {
                let pair = u64::from_le_bytes(*pair);
                insert(table, pair >> 32, pair);
            }
        })
    }

    unsafe fn count_rows(
        &self,
        stream: &DeviceStream,
        keys: &Column<u32>,
        table: &Column<u64>,
        counts: &Column<u32>,
        sums: &Column<u64>,
    ) -> Result<()> {
        let ranges = [reads(keys), reads(table), writes(counts), writes(sums)];
        queue(stream, "count_rows", ranges, |args| {
            let [
                KernelSlice::Read(keys),
                KernelSlice::Read(table),
                KernelSlice::Write(counts),
                KernelSlice::Write(sums),
            ] = args.slices()
            else {
                return;
            };
            let keys = halves(keys).iter().map(|key| u32::from_le_bytes(*key));
            count(keys, words(table), counts, sums);
        })
    }

    unsafe fn count_pairs(
        &self,
        stream: &DeviceStream,
        pairs: &Column<u64>,
        len: usize,
        table: &Column<u64>,
        counts: &Column<u32>,
        sums: &Column<u64>,
    ) -> Result<()> {
        let ranges = [reads_first(pairs, len), reads(table), writes(counts), writes(sums)];
        queue(stream, "count_pairs", ranges, |args| {
            let [
                KernelSlice::Read(pairs),
                KernelSlice::Read(table),
                KernelSlice::Write(counts),
                KernelSlice::Write(sums),
            ] = args.slices()
            else {
                return;
            };
            count(words(pairs).iter().map(low), words(table), counts, sums);
        })
    }

    unsafe fn write_rows(
        &self,
        stream: &DeviceStream,
        keys: &Column<u32>,
        table: &Column<u64>,
        counts: &Column<u32>,
        sums: &Column<u64>,
        out: &Column<u64>,
    ) -> Result<()> {
        let ranges = [reads(keys), reads(table), reads(counts), reads(sums), writes(out)];
        queue(stream, "write_rows", ranges, |args| {
            let [
                KernelSlice::Read(keys),
                KernelSlice::Read(table),
                _,
                KernelSlice::Read(sums),
                KernelSlice::Write(out),
            ] = args.slices()
            else {
                return;
            };
            let keys = halves(keys).iter().map(|key| u32::from_le_bytes(*key));
            let pair = |row, entry: u64| (entry << 32) | row as u64;
            write(keys, words(table), words(sums), words_mut(out), pair);
        })
    }

    unsafe fn write_pairs(
        &self,
        stream: &DeviceStream,
        pairs: &Column<u64>,
        len: usize,
        table: &Column<u64>,
        counts: &Column<u32>,
        sums: &Column<u64>,
        out: &Column<u64>,
    ) -> Result<()> {
        let ranges =
            [reads_first(pairs, len), reads(table), reads(counts), reads(sums), writes(out)];
        queue(stream, "write_pairs", ranges, |args| {
            let [
                KernelSlice::Read(pairs),
                KernelSlice::Read(table),
                _,
                KernelSlice::Read(sums),
                KernelSlice::Write(out),
            ] = args.slices()
            else {
                return;
            };
            let pairs = words(pairs);
            let pair = |row: usize, entry: u64| {
                let from = u64::from_le_bytes(pairs[row]) >> 32;
                (from << 32) | (entry & 0xffff_ffff)
            };
            write(pairs.iter().map(low), words(table), words(sums), words_mut(out), pair);
        })
    }

    unsafe fn sum_tiles(
        &self,
        stream: &DeviceStream,
        counts: &Column<u32>,
        sums: &Column<u64>,
    ) -> Result<()> {
        queue(stream, "sum_tiles", [reads(counts), writes(sums)], |args| {
            let [KernelSlice::Read(counts), KernelSlice::Write(sums)] = args.slices() else {
                return;
            };
            for (tile, sum) in halves(counts).chunks(TILE).zip(words_mut(sums)) {
                let total: u64 =
                    tile.iter().map(|count| u64::from(u32::from_le_bytes(*count))).sum();
                *sum = total.to_le_bytes();
            }
        })
    }

    unsafe fn scan_sums(&self, stream: &DeviceStream, sums: &Column<u64>) -> Result<()> {
        queue(stream, "scan_sums", [changes(sums)], |args| {
            let mut before = 0_u64;
            let sums = words_mut(args.bytes_mut(0));
            let tiles = sums.len().saturating_sub(1);
            for (tile, sum) in sums.iter_mut().enumerate() {
                let here = if tile < tiles { u64::from_le_bytes(*sum) } else { 0 };
                *sum = before.to_le_bytes();
                before = before.wrapping_add(here);
            }
        })
    }

    unsafe fn spread_sums(
        &self,
        stream: &DeviceStream,
        counts: &Column<u32>,
        sums: &Column<u64>,
        offsets: &Column<u32>,
    ) -> Result<()> {
        let ranges = [reads(counts), reads(sums), writes(offsets)];
        queue(stream, "spread_sums", ranges, |args| {
            let [KernelSlice::Read(counts), KernelSlice::Read(sums), KernelSlice::Write(offsets)] =
                args.slices()
            else {
                return;
            };
            let tiles = halves(counts).chunks(TILE).zip(halves_mut(offsets).chunks_mut(TILE));
            for ((counts, offsets), sum) in tiles.zip(words(sums)) {
                let mut before = low(sum);
                for (count, offset) in counts.iter().zip(offsets) {
                    *offset = before.to_le_bytes();
                    before = before.wrapping_add(u32::from_le_bytes(*count));
                }
            }
        })
    }

    unsafe fn insert_new(
        &self,
        stream: &DeviceStream,
        values: &Column<u64>,
        set: &Column<u64>,
        fresh: &Column<u64>,
        count: &Column<u64>,
    ) -> Result<()> {
        let ranges = [reads(values), changes(set), writes(fresh), changes(count)];
        queue(stream, "insert_new", ranges, |args| {
            let [
                KernelSlice::Read(values),
                KernelSlice::Write(set),
                KernelSlice::Write(fresh),
                KernelSlice::Write(count),
            ] = args.slices()
            else {
                return;
            };
            let (set, fresh) = (words_mut(set), words_mut(fresh));
            let [count, ..] = words_mut(count) else { return };
            for value in words(values) {
                if insert_unique(set, u64::from_le_bytes(*value)) {
                    store(fresh, u64::from_le_bytes(*count) as usize, *value);
                    add(count, 1);
                }
            }
        })
    }

    unsafe fn rehash(
        &self,
        stream: &DeviceStream,
        set: &Column<u64>,
        larger: &Column<u64>,
    ) -> Result<()> {
        queue(stream, "rehash", [reads(set), changes(larger)], |args| {
            let [KernelSlice::Read(set), KernelSlice::Write(larger)] = args.slices() else {
                return;
            };
            let larger = words_mut(larger);
            for value in words(set).iter().map(|word| u64::from_le_bytes(*word)) {
                if value != EMPTY {
                    insert(larger, value, value);
                }
            }
        })
    }

    unsafe fn collect(
        &self,
        stream: &DeviceStream,
        set: &Column<u64>,
        out: &Column<u64>,
        count: &Column<u64>,
    ) -> Result<()> {
        queue(stream, "collect", [reads(set), writes(out), changes(count)], |args| {
            let [KernelSlice::Read(set), KernelSlice::Write(out), KernelSlice::Write(count)] =
                args.slices()
            else {
                return;
            };
            let out = words_mut(out);
            let [count, ..] = words_mut(count) else { return };
            for value in words(set).iter().filter(|value| **value != EMPTY.to_le_bytes()) {
                store(out, u64::from_le_bytes(*count) as usize, *value);
                add(count, 1);
            }
        })
    }

    unsafe fn count_digits(
        &self,
        stream: &DeviceStream,
        numbers: &Column<u64>,
        shift: u32,
        counts: &Column<u32>,
    ) -> Result<()> {
        queue(stream, "count_digits", [reads(numbers), writes(counts)], move |args| {
            let [KernelSlice::Read(numbers), KernelSlice::Write(counts)] = args.slices() else {
                return;
            };
            let counts = halves_mut(counts);
            let tiles = counts.len() / DIGITS;
            for (tile, numbers) in words(numbers).chunks(SORT_TILE).enumerate() {
                let mut found = [0_u32; DIGITS];
                numbers.iter().for_each(|number| found[digit(number, shift)] += 1);
                for (digit, found) in found.iter().enumerate() {
                    counts[digit * tiles + tile] = found.to_le_bytes();
                }
            }
        })
    }

    unsafe fn scatter_digits(
        &self,
        stream: &DeviceStream,
        numbers: &Column<u64>,
        shift: u32,
        offsets: &Column<u32>,
        out: &Column<u64>,
    ) -> Result<()> {
        let ranges = [reads(numbers), reads(offsets), writes(out)];
        queue(stream, "scatter_digits", ranges, move |args| {
            let [KernelSlice::Read(numbers), KernelSlice::Read(offsets), KernelSlice::Write(out)] =
                args.slices()
            else {
                return;
            };
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
        })
    }
}
