//! Running a program on a simulated device.

use std::collections::BTreeMap;
use std::sync::Arc;

use xlog_driver::{
    Access, AsyncPools, Driver, MapAccess, MemoryHandle, PoolOptions, StreamHandle, VirtualMemory,
};
use xlog_sim::{SimDevice, SimKernel};

use super::model::mix;
use super::program::{Program, Step};

impl Program {
    /// Runs the program and returns what the live blocks hold, read after everything completed.
    pub fn run(&self, device: &Arc<SimDevice>, options: &PoolOptions) -> BTreeMap<usize, Vec<u8>> {
        let streams: Vec<StreamHandle> =
            (0..self.streams).map(|_| device.stream_create(0).unwrap()).collect();
        let pools: Vec<_> = (0..self.pools).map(|_| device.pool_create(options).unwrap()).collect();
        let events: Vec<_> = (0..4).map(|_| device.event_create().unwrap()).collect();
        let mut next_event = 0;
        let mut gates = Vec::new();
        let mut blocks: BTreeMap<usize, (u64, usize)> = BTreeMap::new();
        let mut mapped: BTreeMap<usize, MemoryHandle> = BTreeMap::new();
        let unit = device.granularity();
        for (at, step) in self.steps.iter().enumerate() {
            match step {
                Step::Alloc { block, stream, bytes, pool } => {
                    let ptr = device.alloc_async(*bytes, pools[*pool], streams[*stream]).unwrap();
                    device.tag_memory(ptr, *bytes, &format!("b{block}")).unwrap();
                    // Reused memory holds what was there; the model starts from zero.
                    super::memset(device, ptr, 0, *bytes, streams[*stream]);
                    blocks.insert(*block, (ptr, *bytes));
                }
                Step::Free { block, stream } => {
                    let (ptr, _) = blocks.remove(block).unwrap();
                    // SAFETY: the block is live; whether it is in use is what the test is about.
                    unsafe { device.free_async(ptr, streams[*stream]) }.unwrap();
                }
                Step::Work { stream, reads, writes, salt } => {
                    let salt = *salt;
                    let inputs: Vec<usize> =
                        reads.iter().filter(|block| !writes.contains(block)).copied().collect();
                    let count = inputs.len();
                    let mut kernel = SimKernel::new(format!("k{at}"), move |args| {
                        let (reads, writes) = args.slices().split_at_mut(count);
                        let inputs: Vec<&[u8]> = reads
                            .iter()
                            .map(|slice| match slice {
                                xlog_sim::KernelSlice::Read(bytes) => *bytes,
                                xlog_sim::KernelSlice::Write(bytes) => bytes,
                            })
                            .collect();
                        for slice in writes {
                            if let xlog_sim::KernelSlice::Write(bytes) = slice {
                                mix(&inputs, salt, bytes);
                            }
                        }
                    });
                    for block in &inputs {
                        kernel = kernel.arg(blocks[block].0, blocks[block].1, Access::Read);
                    }
                    for block in writes {
                        kernel = kernel.arg(blocks[block].0, blocks[block].1, Access::ReadWrite);
                    }
                    device.launch(streams[*stream], kernel).unwrap();
                }
                Step::Memset { stream, block, value } => {
                    super::memset(
                        device,
                        blocks[block].0,
                        *value,
                        blocks[block].1,
                        streams[*stream],
                    );
                }
                Step::Copy { stream, to, from } => {
                    let bytes = blocks[to].1.min(blocks[from].1);
                    // SAFETY: both blocks are live and at least this long.
                    unsafe {
                        device.copy_dtod(blocks[to].0, blocks[from].0, bytes, streams[*stream])
                    }
                    .unwrap();
                }
                Step::Nothing { stream } => {
                    device.host_fn(streams[*stream], Box::new(|| {})).unwrap();
                }
                Step::Edge { from, to } => {
                    // Few events, recorded again and again.
                    let event = events[next_event % events.len()];
                    next_event += 1;
                    device.event_record(event, streams[*from]).unwrap();
                    device.stream_wait_event(streams[*to], event).unwrap();
                }
                Step::HostSync { stream } => {
                    let _ = device.stream_synchronize(streams[*stream]);
                }
                Step::Hold { stream } => gates.push(device.hold(streams[*stream]).unwrap()),
                Step::ReleaseAll => gates.clear(),
                Step::Map { block, bytes } => {
                    let (range, memory) =
                        (device.reserve(unit, 0).unwrap(), device.create(unit).unwrap());
                    // SAFETY: a fresh reservation.
                    unsafe {
                        device.map(range, unit, memory).unwrap();
                        device.set_access(range, unit, MapAccess::ReadWrite).unwrap();
                    }
                    device.tag_memory(range, *bytes, &format!("b{block}")).unwrap();
                    blocks.insert(*block, (range, *bytes));
                    mapped.insert(*block, memory);
                }
                Step::Unmap { block } => {
                    let (range, _) = blocks.remove(block).unwrap();
                    // SAFETY: mapped; whether it is in use is what the test is about.
                    unsafe { device.unmap(range, unit) }.unwrap();
                    // SAFETY: as above.
                    unsafe { device.destroy(mapped.remove(block).unwrap()) }.unwrap();
                    // SAFETY: nothing is mapped there any more.
                    unsafe { device.release(range, unit) }.unwrap();
                }
                Step::Trim { pool, keep } => device.pool_trim(pools[*pool], *keep).unwrap(),
            }
        }
        let _ = device.synchronize();
        let _ = device.synchronize();
        blocks
            .iter()
            .map(|(&block, &(ptr, bytes))| {
                let mut out = vec![0; bytes];
                // SAFETY: the block is live.
                let _ = unsafe { device.copy_dtoh(&mut out, ptr, streams[0]) };
                (block, out)
            })
            .collect()
    }
}
