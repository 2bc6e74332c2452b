//! What a launch costs in allocations of the host.
//!
//! Measured per thread, in the steady state. On a simulated device: naming buffers to a launch, preparing and finishing their uses, on
//! one stream. The simulated driver allocates for each operation it is told of, blocks of a pool among them, so all that is left
//! out. On a GPU, where the driver's own memory is not ours: allocating buffers from the pool, launching a kernel, using one of them on
//! another stream, and dropping them.

// Helpers of tests fail tests.
#![allow(clippy::unwrap_used, clippy::panic, unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use xlog_cuda::{Result, StreamId};
use xlog_testing::specs;
use xlog_workloads::relational::{Column, Session, SessionOptions};
use xlog_workloads::stack::{Stack, StackKind};

struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The buffers of a launch.
struct Kept {
    scratch: Column<u64>,
    column: Column<u64>,
    sums: Column<u64>,
}

impl Kept {
    fn new(session: &Session<'_>, stream: StreamId) -> Result<Self> {
        Ok(Self {
            scratch: session.alloc(stream, 4096, "scratch")?,
            column: session.alloc(stream, 1024, "column")?,
            sums: session.alloc(stream, 16, "sums")?,
        })
    }
}

/// One launch with three buffers, of which one is scratch.
fn launch(session: &Session<'_>, step: usize, is_gpu: bool, kept: &Kept) -> Result<()> {
    let stream = session.stream(step);
    let made = if is_gpu { Some(Kept::new(session, stream)?) } else { None };
    let Kept { scratch, column, sums } = made.as_ref().unwrap_or(kept);
    let launch = session.launch("generate", stream).write(scratch).write(column).read_write(sums);
    launch.run(|kernels, stream| match is_gpu {
        // SAFETY: the launch names the buffer.
        true => unsafe { kernels.generate_numbers(stream, scratch, 1) },
        false => Ok(()),
    })?;
    if is_gpu {
        // Used and freed on another stream than its own.
        let next = session.stream(step + 1);
        session.launch("scan", next).read_write(scratch).run(|kernels, stream| {
            // SAFETY: the launch names the buffer.
            unsafe { kernels.scan_sums(stream, scratch) }
        })?;
    }
    Ok(())
}

#[test]
fn a_launch_in_the_steady_state_allocates_nothing_on_the_host() {
    let spec = specs().swap_remove(0).parse().unwrap();
    let stack = Stack::open(spec, StackKind::Pool, None, 4).unwrap();
    let is_gpu = stack.device().sim().is_none();
    let session = Session::open(&stack, 4, SessionOptions::default()).unwrap();
    let step = |turn: usize| if is_gpu { turn } else { 0 };
    let kept = Kept::new(&session, session.stream(0)).unwrap();
    for turn in 0..2000 {
        launch(&session, step(turn), is_gpu, &kept).unwrap();
    }
    let mut made = 0;
    for turn in 0..1064 {
        // Each stream frees once between two waits. Beside other programs on the GPU the host would otherwise get far ahead, and the
        // pool would search and grow.
        if turn % 4 == 0 {
            stack.drain().unwrap();
        }
        let before = COUNT.with(Cell::get);
        launch(&session, step(turn), is_gpu, &kept).unwrap();
        // The first of them are still on the way to the steady state.
        if turn >= 64 {
            made += COUNT.with(Cell::get) - before;
        }
    }
    assert_eq!(made, 0, "in a thousand launches");
    // The counter counts.
    let before = COUNT.with(Cell::get);
    drop(std::hint::black_box(Box::new(made)));
    assert!(COUNT.with(Cell::get) > before);
}
