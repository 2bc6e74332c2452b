//! The transitive closure of a graph by semi-naive joins.
//!
//! A round joins the pairs that the previous round found with the edges and keeps the new ones: `(x, y)` and an edge from `y`
//! to `z` make `(x, z)`. The pairs of a round are split into one part per stream. Each part is joined on its own stream, another
//! one in each round, into a buffer of exactly the counted size. One hash set, which grows when necessary, holds all pairs; the
//! parts are inserted one after another. Parts, counts and candidates are dropped as soon as their last launch is queued. The
//! host reads two numbers of each part in each round: the candidates, and how many of them were new.

use xlog_cuda::device_runtime::Access;
use xlog_cuda::{Result, StreamId};

use super::numbers::seed_for;
use super::touched::touch;
use super::{Column, EMPTY, Session, Verdict, address, host, table_places, tile_sums};

/// A random graph with fewer edges than vertices, so that paths end: about nine vertices are reachable from each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fixpoint {
    /// Edges, from 1 to [`MAX_ROWS`](super::MAX_ROWS).
    pub rows: usize,
    /// Their seed.
    pub seed: u64,
}

/// Pairs that the previous round found.
struct PairRange {
    pairs: Column<u64>,
    /// The number of pairs; the buffer may be longer.
    len: usize,
}

struct Counted {
    part: PairRange,
    counts: Column<u32>,
    sums: Column<u64>,
    step: usize,
}

/// A part that was inserted into the set.
struct Inserted {
    fresh: Column<u64>,
    count: Column<u64>,
    step: usize,
}

/// All pairs found.
struct Set {
    places: Column<u64>,
    len: usize,
}

impl Fixpoint {
    /// Returns the seed of the edges.
    pub fn edge_seed(&self) -> u64 {
        seed_for(self.seed, 4)
    }

    /// Returns the number of vertices: a tenth more than edges.
    pub fn vertices(&self) -> u32 {
        u32::try_from(self.rows + self.rows / 9 + 1).unwrap_or(u32::MAX)
    }

    /// Queues the generation of the edges in a buffer of their length.
    #[allow(unsafe_code)]
    pub(super) fn generate(
        &self,
        session: &Session<'_>,
        stream: StreamId,
        edges: &Column<u64>,
    ) -> Result<()> {
        session
            .launch("generate_edges", stream)
            .write(edges)
            .moves(edges.size_bytes())
            // SAFETY: the launch names the buffer.
            .run(|kernels, stream| unsafe {
                kernels.generate_edges(stream, edges, self.edge_seed(), self.vertices())
            })
    }

    /// Generates the edges and runs all rounds, on the streams of the session from step `first` on. Returns the pairs, which the
    /// device may still be writing, and the number of rounds.
    pub fn run(&self, session: &Session<'_>, first: usize) -> Result<(Column<u64>, u32)> {
        let (edges, mut set, mut parts) = self.start(session, first)?;
        let mut rounds = 0;
        while !parts.is_empty() {
            rounds += 1;
            let counted = parts
                .into_iter()
                .enumerate()
                .map(|(part, pairs)| count(session, first + part + rounds as usize, pairs, &edges))
                .collect::<Result<Vec<_>>>()?;
            let mut inserted = Vec::with_capacity(counted.len());
            // All counts are read first: the work queued afterwards needs no further read.
            let matches = counted
                .iter()
                .map(|part| session.read_last(session.stream(part.step), &part.sums))
                .collect::<Result<Vec<_>>>()?;
            for (part, matches) in counted.into_iter().zip(matches) {
                inserted.extend(expand(session, part, matches as usize, &edges, &mut set)?);
            }
            session.sample_pool();
            parts = Vec::with_capacity(inserted.len());
            for part in inserted {
                parts.extend(finish_insert(session, part, &mut set)?);
            }
        }
        let stream = session.stream(first + 3);
        let count = session.alloc::<u64>(stream, 1, "fixpoint count")?;
        session.fill(stream, &count, 0)?;
        Ok((collect(session, stream, &set.places, set.len, &count)?, rounds))
    }

    /// Generates the edges, hashes them and inserts them into the set, in one part per stream: they are the pairs of the first round.
    #[allow(unsafe_code)]
    fn start(
        &self,
        session: &Session<'_>,
        first: usize,
    ) -> Result<(Column<u64>, Set, Vec<PairRange>)> {
        let stream = |step: usize| session.stream(first + step);
        let rows = self.rows;
        let edges = session.alloc::<u64>(stream(0), rows, "fixpoint edges")?;
        self.generate(session, stream(0), &edges)?;
        let table = session.alloc::<u64>(stream(1), table_places(rows), "fixpoint edge table")?;
        session.fill(stream(1), &table, EMPTY as u8)?;
        session
            .launch("build_pairs", stream(1))
            .read(&edges)
            .read_write(&table)
            .moves(rows * 24)
            // SAFETY: the table has an empty slot for every edge, and the launch names all its buffers.
            .run(|kernels, stream| unsafe { kernels.build_pairs(stream, &edges, &table) })?;

        let places = session.alloc::<u64>(stream(2), table_places(rows), "fixpoint set")?;
        session.fill(stream(2), &places, EMPTY as u8)?;
        let mut set = Set { places, len: 0 };
        let inserted = insert(session, first + 2, edges, &set)?;
        let parts = finish_insert(session, inserted, &mut set)?;
        let parts = parts.map_or_else(|| Ok(Vec::new()), |part| split(session, first, &part))?;
        Ok((table, set, parts))
    }

    /// Compares pairs with the closure that the host finds by a search from every vertex, on `threads` threads.
    pub fn verify(&self, pairs: &[u64], threads: usize) -> Verdict {
        let expected = host::closure::expected(self, threads);
        let found = host::closure::fingerprint(pairs, threads);
        let wrong = if found.count != expected.count {
            Some(format!("there are {} pairs instead of {}", found.count, expected.count))
        } else if found != expected {
            Some("the pairs are as many as there must be, but others".to_owned())
        } else {
            None
        };
        Verdict { rows: pairs.len() as u64, expected: expected.count, wrong }
    }
}

/// Copies a part into one per stream.
#[allow(unsafe_code)]
fn split(session: &Session<'_>, first: usize, whole: &PairRange) -> Result<Vec<PairRange>> {
    let each = whole.len.div_ceil(session.streams()).max(1);
    (0..whole.len)
        .step_by(each)
        .enumerate()
        .map(|(part, start)| {
            let stream = session.stream(first + part);
            let len = each.min(whole.len - start);
            let pairs = session.alloc::<u64>(stream, len, "fixpoint pairs")?;
            let bytes = pairs.size_bytes();
            let from = address(&whole.pairs) + (start * size_of::<u64>()) as u64;
            // The written buffer is named first: the event that ends the use of the whole, which another stream owns, then also covers
            // the write. A stream that waits for that event needs no second wait.
            session.launch("copy", stream).write(&pairs).read(&whole.pairs).moves(bytes * 2).run(
                |_, stream| {
                    touch(from, bytes, Access::Read);
                    touch(address(&pairs), bytes, Access::Write);
                    // SAFETY: both ranges are live and `bytes` long, and the launch names both buffers.
                    unsafe { stream.copy_dtod(address(&pairs), from, bytes) }
                },
            )?;
            Ok(PairRange { pairs, len })
        })
        .collect()
}

/// Counts the edges that continue each pair.
#[allow(unsafe_code)]
fn count(
    session: &Session<'_>,
    step: usize,
    part: PairRange,
    edges: &Column<u64>,
) -> Result<Counted> {
    let stream = session.stream(step);
    let PairRange { pairs, len } = &part;
    let counts = session.alloc::<u32>(stream, *len, "fixpoint counts")?;
    let sums = session.alloc::<u64>(stream, tile_sums(*len), "fixpoint sums")?;
    session
        .launch("count_pairs", stream)
        .read(pairs)
        .read(edges)
        .write(&counts)
        .write(&sums)
        .moves(len * 20)
        .run(|kernels, stream| {
            // SAFETY: there is a count for every pair and a sum for every tile, and the launch names all its buffers.
            unsafe { kernels.count_pairs(stream, pairs, *len, edges, &counts, &sums) }
        })?;
    session.scan_sums(stream, &sums)?;
    Ok(Counted { part, counts, sums, step })
}

/// Writes the candidates of a part, on the stream after the one that counted them, and inserts them into the set; returns
/// `None` if there are none.
#[allow(unsafe_code)]
fn expand(
    session: &Session<'_>,
    counted: Counted,
    matches: usize,
    edges: &Column<u64>,
    set: &mut Set,
) -> Result<Option<Inserted>> {
    let Counted { part: PairRange { pairs, len }, counts, sums, step } = counted;
    if matches == 0 {
        return Ok(None);
    }
    let step = step + 1;
    let stream = session.stream(step);
    let candidates = session.alloc::<u64>(stream, matches, "fixpoint candidates")?;
    session
        .launch("write_pairs", stream)
        .read(&pairs)
        .read(edges)
        .read(&counts)
        .read(&sums)
        .write(&candidates)
        .moves(len * 20 + matches * 8)
        .run(|kernels, stream| {
            // SAFETY: the buffer has exactly the counted size, and the launch names all its buffers.
            unsafe { kernels.write_pairs(stream, &pairs, len, edges, &counts, &sums, &candidates) }
        })?;
    drop((pairs, counts, sums));
    // Until the host reads how many candidates are new, all count as new.
    set.len += matches;
    grow(session, step, set)?;
    insert(session, step, candidates, set).map(Some)
}

/// Grows the set so that it holds everything that may be in it.
#[allow(unsafe_code)]
fn grow(session: &Session<'_>, step: usize, set: &mut Set) -> Result<()> {
    if table_places(set.len) <= set.places.len() {
        return Ok(());
    }
    let stream = session.stream(step);
    let larger = session.alloc::<u64>(stream, table_places(set.len), "fixpoint set")?;
    session.fill(stream, &larger, EMPTY as u8)?;
    session
        .launch("rehash", stream)
        .read(&set.places)
        .read_write(&larger)
        .moves(set.places.size_bytes() * 2)
        // SAFETY: the larger set has an empty slot for every value of the smaller one, and the launch names both.
        .run(|kernels, stream| unsafe { kernels.rehash(stream, &set.places, &larger) })?;
    set.places = larger;
    Ok(())
}

/// Inserts values into the set and keeps the new ones.
#[allow(unsafe_code)]
fn insert(session: &Session<'_>, step: usize, values: Column<u64>, set: &Set) -> Result<Inserted> {
    let stream = session.stream(step);
    let fresh = session.alloc::<u64>(stream, values.len(), "fixpoint pairs")?;
    let count = session.alloc::<u64>(stream, 1, "fixpoint count")?;
    session.fill(stream, &count, 0)?;
    session
        .launch("insert_new", stream)
        .read(&values)
        .read_write(&set.places)
        .write(&fresh)
        .read_write(&count)
        .moves(values.size_bytes() * 3)
        .run(|kernels, stream| {
            // SAFETY: set and buffer have space for all values, and the launch names all its buffers.
            unsafe { kernels.insert_new(stream, &values, &set.places, &fresh, &count) }
        })?;
    Ok(Inserted { fresh, count, step })
}

/// Reads how many values were new; `None` if none was.
fn finish_insert(
    session: &Session<'_>,
    inserted: Inserted,
    set: &mut Set,
) -> Result<Option<PairRange>> {
    let Inserted { fresh, count, step } = inserted;
    let len = session.read_last(session.stream(step), &count)? as usize;
    let taken = if set.len == 0 { 0 } else { fresh.len() };
    set.len = set.len.saturating_sub(taken) + len;
    Ok((len > 0).then_some(PairRange { pairs: fresh, len }))
}

/// Lists a set of `len` pairs in a buffer of exactly its size. The first word of `count` is 0.
#[allow(unsafe_code)]
pub(super) fn collect(
    session: &Session<'_>,
    stream: StreamId,
    set: &Column<u64>,
    len: usize,
    count: &Column<u64>,
) -> Result<Column<u64>> {
    let pairs = session.alloc::<u64>(stream, len, "fixpoint closure")?;
    session
        .launch("collect", stream)
        .read(set)
        .write(&pairs)
        .read_write(count)
        .moves(set.size_bytes() + pairs.size_bytes())
        // SAFETY: from a count of 0 the buffer holds all of the set, and the launch names all its buffers.
        .run(|kernels, stream| unsafe { kernels.collect(stream, set, &pairs, count) })?;
    Ok(pairs)
}
