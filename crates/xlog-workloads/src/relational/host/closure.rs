//! The closure on the host, by a search from every vertex instead of joins.

use super::super::fixpoint::Fixpoint;
use super::super::numbers::{Fingerprint, edge};
use super::parts;

/// Returns the fingerprint of all pairs of vertices with a path from the first to the second. Each thread searches from a
/// range of vertices.
#[must_use]
pub fn expected(work: &Fixpoint, threads: usize) -> Fingerprint {
    let vertices = work.vertices() as usize;
    let made = |row: u64| {
        let edge = edge(work.edge_seed(), row, work.vertices());
        ((edge >> 32) as usize, edge as u32)
    };
    // Start of each vertex's edges; after they are placed, their end.
    let mut ends = vec![0_u32; vertices + 1];
    for (from, _) in (0..work.rows as u64).map(made) {
        ends[from + 1] += 1;
    }
    for vertex in 0..vertices {
        ends[vertex + 1] += ends[vertex];
    }
    let mut targets = vec![0_u32; work.rows];
    for (from, to) in (0..work.rows as u64).map(made) {
        targets[ends[from] as usize] = to;
        ends[from] += 1;
    }
    let of = |vertex: usize| {
        let start = if vertex == 0 { 0 } else { ends[vertex - 1] as usize };
        &targets[start..ends[vertex] as usize]
    };
    let found = parts(vertices, threads, |range| {
        let mut print = Fingerprint::default();
        // The vertex from which each was last reached.
        let mut reached_from = vec![u32::MAX; vertices];
        let mut open: Vec<u32> = Vec::new();
        for start in range {
            open.extend_from_slice(of(start));
            while let Some(vertex) = open.pop() {
                let mark = &mut reached_from[vertex as usize];
                if *mark != start as u32 {
                    *mark = start as u32;
                    print.add(((start as u64) << 32) | u64::from(vertex));
                    open.extend_from_slice(of(vertex as usize));
                }
            }
        }
        print
    });
    found.into_iter().sum()
}

/// Returns the fingerprint of pairs.
#[must_use]
pub fn fingerprint(pairs: &[u64], threads: usize) -> Fingerprint {
    let found = parts(pairs.len(), threads, |range| {
        let mut print = Fingerprint::default();
        pairs[range].iter().for_each(|pair| print.add(*pair));
        print
    });
    found.into_iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_closure_is_that_of_repeated_squaring_whatever_the_threads() {
        for (rows, seed) in [(1, 1), (5, 4), (40, 2), (120, 3)] {
            let work = Fixpoint { rows, seed };
            let vertices = work.vertices() as usize;
            let mut reach = vec![vec![false; vertices]; vertices];
            for row in 0..rows as u64 {
                let edge = edge(work.edge_seed(), row, work.vertices());
                reach[(edge >> 32) as usize][(edge & 0xffff_ffff) as usize] = true;
            }
            for middle in 0..vertices {
                for from in 0..vertices {
                    for to in 0..vertices {
                        reach[from][to] |= reach[from][middle] && reach[middle][to];
                    }
                }
            }
            let mut pairs = Vec::new();
            for (from, row) in reach.iter().enumerate() {
                for to in (0..vertices).filter(|to| row[*to]) {
                    pairs.push(((from as u64) << 32) | to as u64);
                }
            }
            for threads in [1, 3] {
                assert_eq!(work.verify(&pairs, threads).wrong, None, "{work:?}");
            }
            let mut less = pairs.clone();
            less.pop();
            assert!(work.verify(&less, 2).wrong.unwrap().contains("instead of"));
            pairs[0] ^= 1 << 20;
            assert!(work.verify(&pairs, 2).wrong.unwrap().contains("others"));
        }
    }
}
