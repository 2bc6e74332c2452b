//! A hash join of two tables that never leave the device.
//!
//! Keys are generated, the first table is hashed, and the matches of each row of the second are counted. The counts are summed
//! on the device, and the pairs are written into a buffer of exactly their number. The host reads only that number.

use xlog_cuda::Result;

use super::numbers::seed_for;
use super::{Column, EMPTY, Session, Verdict, host, table_places, tile_sums};

/// Two tables of equal size, whose keys are uniform over as many values: a row has one match on average.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Join {
    /// Rows of each table, from 1 to [`MAX_ROWS`](super::MAX_ROWS).
    pub rows: usize,
    /// The seed of the keys.
    pub seed: u64,
}

impl Join {
    /// Returns the seed of the first table, which is hashed.
    pub fn build_seed(&self) -> u64 {
        seed_for(self.seed, 1)
    }

    /// Returns the seed of the second table.
    pub fn probe_seed(&self) -> u64 {
        seed_for(self.seed, 2)
    }

    /// Returns the exclusive upper bound of the keys.
    pub fn domain(&self) -> u32 {
        u32::try_from(self.rows).unwrap_or(u32::MAX)
    }

    /// Runs the join, its steps on the streams of the session from step `first` on. Returns the pairs of rows, which the device may
    /// still be writing: the row of the first table in the high half, that of the second in the low one.
    #[allow(unsafe_code)]
    pub fn run(&self, session: &Session<'_>, first: usize) -> Result<Column<u64>> {
        let rows = self.rows;
        let stream = |step: usize| session.stream(first + step);
        let build = self.keys(session, first, self.build_seed())?;
        let probe = self.keys(session, first + 1, self.probe_seed())?;

        let table = session.alloc::<u64>(stream(2), table_places(rows), "join table")?;
        session.fill(stream(2), &table, EMPTY as u8)?;
        session
            .launch("build_rows", stream(2))
            .read(&build)
            .read_write(&table)
            .moves(rows * 20)
            // SAFETY: the table has an empty slot for every row, and the launch names all its buffers.
            .run(|kernels, stream| unsafe { kernels.build_rows(stream, &build, &table) })?;
        // Freed in stream order after the table is built; this thread does not wait.
        drop(build);

        let counts = session.alloc::<u32>(stream(3), rows, "join counts")?;
        let sums = session.alloc::<u64>(stream(3), tile_sums(rows), "join sums")?;
        session
            .launch("count_rows", stream(3))
            .read(&probe)
            .read(&table)
            .write(&counts)
            .write(&sums)
            .moves(rows * 16)
            .run(|kernels, stream| {
                // SAFETY: there is a count for every row and a sum for every tile, and the launch names all its buffers.
                unsafe { kernels.count_rows(stream, &probe, &table, &counts, &sums) }
            })?;
        session.scan_sums(stream(4), &sums)?;

        let matches = session.read_last(stream(4), &sums)? as usize;
        let pairs = session.alloc::<u64>(stream(5), matches, "join pairs")?;
        session.sample_pool();
        if matches > 0 {
            session
                .launch("write_rows", stream(5))
                .read(&probe)
                .read(&table)
                .read(&counts)
                .read(&sums)
                .write(&pairs)
                .moves(rows * 16 + matches * 8)
                .run(|kernels, stream| {
                    // SAFETY: the buffer has exactly the counted size, and the launch names all its buffers.
                    unsafe { kernels.write_rows(stream, &probe, &table, &counts, &sums, &pairs) }
                })?;
        }
        Ok(pairs)
    }

    #[allow(unsafe_code)]
    fn keys(&self, session: &Session<'_>, step: usize, seed: u64) -> Result<Column<u32>> {
        let stream = session.stream(step);
        let keys = session.alloc::<u32>(stream, self.rows, "join keys")?;
        session.launch("generate_keys", stream).write(&keys).moves(keys.size_bytes()).run(
            // SAFETY: the launch names the buffer.
            |kernels, stream| unsafe { kernels.generate_keys(stream, &keys, seed, self.domain()) },
        )?;
        Ok(keys)
    }

    /// Compares pairs with the host's join, on `threads` threads.
    pub fn verify(&self, pairs: &[u64], threads: usize) -> Verdict {
        let expected = host::join::expected(self, threads);
        let found = host::join::examine(self, pairs, threads);
        let wrong = match found {
            Err(wrong) => Some(wrong),
            Ok(found) if found.count != expected.count => {
                Some(format!("there are {} pairs instead of {}", found.count, expected.count))
            }
            Ok(found) if found != expected => {
                Some("some pairs are there twice, and others are missing".to_owned())
            }
            Ok(_) => None,
        };
        Verdict { rows: pairs.len() as u64, expected: expected.count, wrong }
    }
}
