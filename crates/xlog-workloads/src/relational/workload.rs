//! The workloads behind one interface: execution, result and verification.

use xlog_cuda::Result;

use super::fixpoint::Fixpoint;
use super::join::Join;
use super::sort::Sort;
use super::{Column, Session, Verdict};

/// A relational workload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Workload {
    /// A hash join.
    Join(Join),
    /// A transitive closure.
    Fixpoint(Fixpoint),
    /// A radix sort.
    Sort(Sort),
}

/// Queued work.
#[derive(Debug)]
#[must_use]
pub struct Executed {
    /// The buffer of the result, which the device may still be writing.
    pub result: Column<u64>,
    /// Input rows, for the throughput.
    pub rows: u64,
    /// The number of rounds of a fixpoint.
    pub rounds: Option<u32>,
}

impl Workload {
    /// Returns its name on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Join(_) => "join",
            Self::Fixpoint(_) => "fixpoint",
            Self::Sort(_) => "sort",
        }
    }

    /// Returns the workload with another seed.
    #[must_use]
    pub fn with_seed(self, seed: u64) -> Self {
        match self {
            Self::Join(work) => Self::Join(Join { seed, ..work }),
            Self::Fixpoint(work) => Self::Fixpoint(Fixpoint { seed, ..work }),
            Self::Sort(work) => Self::Sort(Sort { seed, ..work }),
        }
    }

    /// Returns the seed.
    pub fn seed(&self) -> u64 {
        match self {
            Self::Join(work) => work.seed,
            Self::Fixpoint(work) => work.seed,
            Self::Sort(work) => work.seed,
        }
    }

    /// Runs it from step `first` of the ring of streams on. The device may still be writing the result.
    pub fn execute(&self, session: &Session<'_>, first: usize) -> Result<Executed> {
        match self {
            Self::Join(work) => {
                let result = work.run(session, first)?;
                Ok(Executed { result, rows: 2 * work.rows as u64, rounds: None })
            }
            Self::Fixpoint(work) => {
                let (result, rounds) = work.run(session, first)?;
                let rows = result.len() as u64;
                Ok(Executed { result, rows, rounds: Some(rounds) })
            }
            Self::Sort(work) => {
                let result = work.run(session, first)?;
                Ok(Executed { result, rows: work.rows as u64, rounds: None })
            }
        }
    }

    /// Compares a result with the host's, on `threads` threads.
    pub fn verify(&self, result: &[u64], threads: usize) -> Verdict {
        match self {
            Self::Join(work) => work.verify(result, threads),
            Self::Fixpoint(work) => work.verify(result, threads),
            Self::Sort(work) => work.verify(result, threads),
        }
    }
}
