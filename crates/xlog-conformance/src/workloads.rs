//! The workloads of RMM's shared suite, with the bytes written and verified.
//!
//! The head and the tail of each block are written, on alternating streams if there are several, and verified just before the free.
use std::collections::VecDeque;

use xlog_base::Random;
use xlog_cuda::DeviceStream;
use xlog_cuda::device_runtime::{Access, BlockId, DeviceBlock, DeviceMemoryResource, StreamLease};
use xlog_cuda::driver::sync::Mutex;

use crate::bytes;
use crate::fixture::{Fixture, Stop};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// The bytes written at each end.
const END: usize = 2 * KIB;

/// A block whose ends hold a value.
struct Marked {
    block: DeviceBlock,
    bytes: usize,
    value: u8,
}

impl Marked {
    fn new(
        fixture: &Fixture,
        own: &DeviceStream,
        writer: &DeviceStream,
        bytes: usize,
        value: u8,
    ) -> Result<Self, Stop> {
        let block = fixture.allocate(bytes, own.id())?;
        let id = BlockId::from_block(&block);
        fixture.work(id, writer, Access::Write, || {
            bytes::fill(writer, id, value, bytes.min(END))?;
            let tail = bytes.saturating_sub(END);
            bytes::fill_at(writer, id, tail, value, bytes - tail)
        })?;
        if !fixture.tracks() && own.id() != writer.id() {
            own.wait_for(writer)?;
        }
        Ok(Self { block, bytes, value })
    }

    fn check_and_free(self, fixture: &Fixture, reader: &DeviceStream) -> Result<(), Stop> {
        let id = BlockId::from_block(&self.block);
        fixture.work(id, reader, Access::Read, || {
            bytes::expect(reader, id, 0, self.value, self.bytes.min(END))?;
            let tail = self.bytes.saturating_sub(END);
            bytes::expect(reader, id, tail, self.value, self.bytes - tail)
        })?;
        Ok(fixture.resource.deallocate(self.block)?)
    }
}

/// The stream of the nth block.
fn pick(streams: &[StreamLease], n: usize) -> &DeviceStream {
    &streams[n % streams.len()]
}

pub(crate) fn sizes_of_the_shared_suite(fixture: &Fixture) -> Result<(), Stop> {
    let [stream] = fixture.leases()?;
    for (value, bytes) in [4, KIB, MIB].into_iter().enumerate() {
        let marked = Marked::new(fixture, &stream, &stream, bytes, value as u8 + 1)?;
        marked.check_and_free(fixture, &stream)?;
    }
    Ok(())
}

/// Allocates 100 blocks of 1 byte to 5 MiB, then frees them in order.
fn random_kept(fixture: &Fixture, streams: &[StreamLease], seed: u64) -> Result<(), Stop> {
    let mut random = Random::new(seed);
    let mut kept = Vec::new();
    for n in 0..100 {
        let (own, writer) = (pick(streams, n), pick(streams, n / 2));
        let bytes = 1 + random.below(5 * MIB);
        kept.push(Marked::new(fixture, own, writer, bytes, random.next_u64() as u8)?);
    }
    for (n, marked) in kept.into_iter().enumerate() {
        marked.check_and_free(fixture, pick(streams, n / 3))?;
    }
    Ok(())
}

/// Makes 200 steps: an allocation with 53 % chance while fewer than 100 blocks live, otherwise a free of a random one.
fn random_mixed(fixture: &Fixture, streams: &[StreamLease], seed: u64) -> Result<(), Stop> {
    let mut random = Random::new(seed);
    let mut live: Vec<Marked> = Vec::new();
    for step in 0..200 {
        if live.is_empty() || (live.len() < 100 && random.below(100) < 53) {
            let (own, writer) = (pick(streams, step), pick(streams, random.below(7)));
            let bytes = 1 + random.below(5 * MIB);
            live.push(Marked::new(fixture, own, writer, bytes, random.next_u64() as u8)?);
        } else {
            let marked = live.swap_remove(random.below(live.len()));
            marked.check_and_free(fixture, pick(streams, random.below(5)))?;
        }
    }
    live.into_iter().try_for_each(|marked| marked.check_and_free(fixture, pick(streams, 0)))
}

type Workload = fn(&Fixture, &[StreamLease], u64) -> Result<(), Stop>;

fn by_four_threads(fixture: &Fixture, workload: Workload) -> Result<(), Stop> {
    let leases = fixture.leases::<4>()?;
    let bodies = (0..4).map(|thread: u64| {
        let leases = &leases;
        Box::new(move || workload(fixture, leases, thread)) as Box<_>
    });
    fixture.threads(bodies.collect())
}

pub(crate) fn random_kept_then_freed(fixture: &Fixture) -> Result<(), Stop> {
    random_kept(fixture, &fixture.leases::<1>()?, 1)
}

pub(crate) fn random_on_several_streams(fixture: &Fixture) -> Result<(), Stop> {
    random_kept(fixture, &fixture.leases::<4>()?, 2)
}

pub(crate) fn random_by_four_threads(fixture: &Fixture) -> Result<(), Stop> {
    by_four_threads(fixture, random_kept)
}

pub(crate) fn mixed(fixture: &Fixture) -> Result<(), Stop> {
    random_mixed(fixture, &fixture.leases::<1>()?, 3)
}

pub(crate) fn mixed_on_several_streams(fixture: &Fixture) -> Result<(), Stop> {
    random_mixed(fixture, &fixture.leases::<4>()?, 4)
}

pub(crate) fn mixed_by_four_threads(fixture: &Fixture) -> Result<(), Stop> {
    by_four_threads(fixture, random_mixed)
}

/// One thread allocates and writes on one stream; another reads and frees on a second stream.
pub(crate) fn producer_and_consumer(fixture: &Fixture) -> Result<(), Stop> {
    const BLOCKS: usize = 100;
    let [a, b] = fixture.leases()?;
    // The flag is set once the producer has ended, successfully or not.
    let queue: Mutex<(VecDeque<Marked>, bool)> = Mutex::default();
    let produce = || {
        let mut random = Random::new(5);
        for _ in 0..BLOCKS {
            let bytes = 1 + random.below(MIB);
            let marked = Marked::new(fixture, &a, &a, bytes, random.next_u64() as u8)?;
            queue.lock().0.push_back(marked);
        }
        Ok(())
    };
    let consume = || {
        let mut consumed = 0;
        loop {
            let (next, ended) = {
                let mut queue = queue.lock();
                (queue.0.pop_front(), queue.1)
            };
            match next {
                Some(marked) => {
                    marked.check_and_free(fixture, &b)?;
                    consumed += 1;
                }
                None if ended => break,
                None => std::thread::yield_now(),
            }
        }
        crate::fixture::ensure(consumed == BLOCKS, || format!("{consumed} blocks arrived"))
    };
    fixture.threads(vec![
        Box::new(|| {
            let outcome = produce();
            queue.lock().1 = true;
            outcome
        }),
        Box::new(consume),
    ])
}
