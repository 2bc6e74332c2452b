//! The join on the host, by a counting sort on the keys instead of a hash table.

use super::super::join::Join;
use super::super::numbers::{Fingerprint, key};
use super::parts;

/// Returns the fingerprint of all pairs of rows with equal keys.
///
/// Each thread handles a range of keys: it scans all rows of both tables and uses those whose key is in its range.
#[must_use]
pub fn expected(join: &Join, threads: usize) -> Fingerprint {
    let rows = 0..join.rows as u64;
    let domain = join.domain();
    let found = parts(domain as usize, threads, |range| {
        let place = |seed: u64, row: u64| {
            let key = key(seed, row, domain) as usize;
            range.contains(&key).then(|| key - range.start)
        };
        // Start of each key's rows; after they are placed, their end.
        let mut ends = vec![0_u32; range.len() + 1];
        for key in rows.clone().filter_map(|row| place(join.build_seed(), row)) {
            ends[key + 1] += 1;
        }
        for key in 0..range.len() {
            ends[key + 1] += ends[key];
        }
        let mut placed = vec![0_u32; ends.last().map_or(0, |end| *end as usize)];
        for row in rows.clone() {
            if let Some(key) = place(join.build_seed(), row) {
                placed[ends[key] as usize] = row as u32;
                ends[key] += 1;
            }
        }
        let mut print = Fingerprint::default();
        for row in rows.clone() {
            if let Some(key) = place(join.probe_seed(), row) {
                let start = if key == 0 { 0 } else { ends[key - 1] as usize };
                for build in &placed[start..ends[key] as usize] {
                    print.add((u64::from(*build) << 32) | row);
                }
            }
        }
        print
    });
    found.into_iter().sum()
}

/// Checks that the rows of every pair exist and have equal keys. Returns the fingerprint of all pairs, or the first fault.
pub fn examine(join: &Join, pairs: &[u64], threads: usize) -> Result<Fingerprint, String> {
    let (rows, domain) = (join.rows as u64, join.domain());
    let (first, second) = (join.build_seed(), join.probe_seed());
    let found = parts(pairs.len(), threads, |range| {
        let mut print = Fingerprint::default();
        for pair in &pairs[range] {
            let (build, probe) = (pair >> 32, pair & 0xffff_ffff);
            if build >= rows || probe >= rows {
                return Err(format!("a pair has rows {build} and {probe} of {rows}"));
            }
            let keys = (key(first, build, domain), key(second, probe, domain));
            if keys.0 != keys.1 {
                return Err(format!(
                    "rows {build} and {probe} are a pair, but their keys are {} and {}",
                    keys.0, keys.1
                ));
            }
            print.add(*pair);
        }
        Ok(print)
    });
    found.into_iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    type Damage = fn(&mut Vec<u64>);

    #[test]
    fn the_host_join_is_that_of_two_loops_whatever_the_threads() {
        for (rows, seed) in [(1, 1), (2, 5), (37, 2), (300, 3)] {
            let join = Join { rows, seed };
            let mut pairs = Vec::new();
            for build in 0..rows as u64 {
                for probe in 0..rows as u64 {
                    let domain = join.domain();
                    if key(join.build_seed(), build, domain)
                        == key(join.probe_seed(), probe, domain)
                    {
                        pairs.push((build << 32) | probe);
                    }
                }
            }
            for threads in [1, 3, 500] {
                let verdict = join.verify(&pairs, threads);
                assert_eq!((verdict.rows, verdict.wrong), (pairs.len() as u64, None));
            }
            let damage: [(&str, Damage); 4] = [
                ("instead of", |pairs| pairs.truncate(pairs.len() - 1)),
                ("keys are", |pairs| pairs[0] ^= 3),
                ("twice", |pairs| pairs[0] = pairs[1]),
                ("of 300", |pairs| pairs[0] |= 1 << 31),
            ];
            for (words, damage) in damage.iter().filter(|_| rows == 300) {
                let mut pairs = pairs.clone();
                damage(&mut pairs);
                let wrong = join.verify(&pairs, 2).wrong.unwrap();
                assert!(wrong.contains(words), "{wrong} does not say {words}");
            }
        }
    }
}
