//! Threads that allocate, hand over and free at the same time do not touch each other's bytes.

#![allow(clippy::unwrap_used)]

use crate::gpu;

use xlog_cuda::device_runtime::StreamLease;
use xlog_cuda::{GpuMemoryManager, LaunchRecorder, TrackedCudaSlice};
use xlog_kernels::exercise::Exercise;
use xlog_testing::{for_each_device, threads};

const THREADS: usize = 8;
const BLOCKS: usize = 64;
/// How often all blocks are freed and allocated again, so that addresses are reused.
const LIVES: usize = 4;

struct Work {
    manager: GpuMemoryManager,
    kernels: Exercise,
    streams: Vec<StreamLease>,
    rows: usize,
}

impl Work {
    fn salt(thread: usize, life: usize, block: usize) -> u32 {
        ((thread * LIVES + life) * BLOCKS + block) as u32
    }

    /// Blocks of one life, filled on the thread's stream and checked on its neighbour's; the counter of what was wrong.
    fn life(&self, thread: usize, life: usize) -> TrackedCudaSlice<u32> {
        let runtime = self.manager.runtime();
        let own = self.streams[thread].id();
        let other = self.streams[(thread + 1) % THREADS].id();
        let memory = self.manager.on_stream(own);
        let mut wrong = memory.alloc::<u32>(1).unwrap();
        wrong.fill_bytes(0).unwrap();
        let rows_of = |block: usize| self.rows + block * 7;
        let blocks: Vec<_> = (0..BLOCKS)
            .map(|block| {
                let data = memory.alloc::<u32>(rows_of(block)).unwrap();
                let salt = Self::salt(thread, life, block);
                let mut fill = LaunchRecorder::new_strict(own);
                fill.write(&data);
                // SAFETY: the buffer is live and this long, and the recorder orders the kernel.
                fill.run(runtime, |stream| unsafe {
                    self.kernels.fill_pattern(stream, data.ptr(), rows_of(block), salt)
                })
                .unwrap();
                data
            })
            .collect();
        for (block, data) in blocks.into_iter().enumerate() {
            let salt = Self::salt(thread, life, block);
            let mut check = LaunchRecorder::new_strict(other);
            check.read(&data).read_write(&wrong);
            // SAFETY: as above, for both buffers. The data is dropped, and so freed, right after the launch.
            check
                .run(runtime, |stream| unsafe {
                    self.kernels.check_pattern(
                        stream,
                        data.ptr(),
                        rows_of(block),
                        salt,
                        wrong.ptr(),
                    )
                })
                .unwrap();
        }
        wrong
    }

    fn thread(&self, thread: usize) {
        let wrong: Vec<_> = (0..LIVES).map(|life| self.life(thread, life)).collect();
        for (life, wrong) in wrong.into_iter().enumerate() {
            assert_eq!(wrong.to_vec().unwrap(), [0], "thread {thread}, life {life}");
        }
    }
}

#[test]
fn eight_threads_with_64_blocks_each_find_their_patterns_intact() {
    for_each_device(|device| {
        let runtime = gpu::runtime(device, THREADS);
        let pool = runtime.stream_pool().clone();
        let work = Work {
            manager: GpuMemoryManager::with_runtime(runtime.clone()),
            kernels: Exercise::load(device).unwrap(),
            streams: (0..THREADS).map(|_| pool.lease().unwrap()).collect(),
            rows: if device.sim().is_some() { 64 } else { 1 << 16 },
        };
        let body = |thread| -> Box<dyn FnOnce() + Send + '_> {
            let work = &work;
            Box::new(move || work.thread(thread))
        };
        threads(device, (0..THREADS).map(body).collect());
        runtime.reap_pending().unwrap();
        assert_eq!(runtime.bytes_outstanding(), 0);
        assert_eq!(work.manager.failed_frees(), 0);
        let expected = (THREADS * LIVES * (BLOCKS + 1)) as u64;
        assert_eq!(work.manager.total_allocations(), expected);
    });
}

#[test]
fn a_pattern_that_is_not_intact_is_counted() {
    for_each_device(|device| {
        let runtime = gpu::runtime(device, 1);
        let kernels = Exercise::load(device).unwrap();
        let stream = runtime.stream_pool().default_stream().unwrap();
        let manager = GpuMemoryManager::with_runtime(runtime);
        let rows = 1000;
        let mut data = manager.alloc::<u32>(rows).unwrap();
        let mut wrong = manager.alloc::<u32>(1).unwrap();
        wrong.fill_bytes(0).unwrap();
        // SAFETY: both buffers are live and this long, and all work is on their own stream.
        unsafe { kernels.fill_pattern(&stream, data.ptr(), rows, 5).unwrap() };
        let mut words = data.to_vec().unwrap();
        (words[3], words[999]) = (words[3] ^ 1, words[0]);
        data.copy_from_slice(&words).unwrap();
        // SAFETY: as above.
        unsafe { kernels.check_pattern(&stream, data.ptr(), rows, 5, wrong.ptr()).unwrap() };
        assert_eq!(wrong.to_vec().unwrap(), [2]);
    });
}
