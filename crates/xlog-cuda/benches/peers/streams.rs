//! Several streams: blocks handed from one to the other, and kernels on all of them.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use crate::generators::Xorshift;
use crate::rows::Rows;
use crate::workloads::{MIB, Maker, Peer};

const PLACES: usize = 64;

#[repr(align(64))]
struct Counter(AtomicUsize);

/// A ring between one thread that puts and one that takes.
struct Ring<T> {
    put: Counter,
    taken: Counter,
    items: Vec<UnsafeCell<Option<T>>>,
}

// SAFETY: a place is touched by the thread that puts while it lies in `taken + PLACES > put`, and by the one that takes while
// it lies in `taken..put`; the counters hand it over.
unsafe impl<T: Send> Sync for Ring<T> {}

impl<T> Ring<T> {
    fn new() -> Self {
        Self {
            put: Counter(AtomicUsize::new(0)),
            taken: Counter(AtomicUsize::new(0)),
            items: (0..PLACES).map(|_| UnsafeCell::new(None)).collect(),
        }
    }

    /// Called by one thread only.
    fn put(&self, item: Option<T>) {
        let at = self.put.0.load(Ordering::Relaxed);
        while at - self.taken.0.load(Ordering::Acquire) == PLACES {
            std::thread::yield_now();
        }
        // SAFETY: the place was taken, and the other thread looks at it only after the store below.
        unsafe { *self.items[at % PLACES].get() = item };
        self.put.0.store(at + 1, Ordering::Release);
    }

    /// Called by one other thread only.
    fn take(&self) -> Option<T> {
        let at = self.taken.0.load(Ordering::Relaxed);
        while self.put.0.load(Ordering::Acquire) == at {
            std::thread::yield_now();
        }
        // SAFETY: the place was put, and the other thread writes it only after the store below.
        let item = unsafe { (*self.items[at % PLACES].get()).take() };
        self.taken.0.store(at + 1, Ordering::Release);
        item
    }
}

/// One thread allocates on a stream, another takes the blocks over on another stream and frees them.
pub fn handoff<M: Maker>(rows: &Rows<'_>, maker: &M) -> Result<(), String> {
    const MOST: usize = 200_000;
    let max_bytes = rows.request.parameter * MIB;
    let limit = rows.options.seconds;
    let peer = maker.make(false)?;
    let (from, to) = (peer.stream()?, peer.stream()?);
    let ring = Ring::new();
    let has_failed = AtomicBool::new(false);
    let (mut moved, mut seconds) = (0, 0.0);
    let outcome = std::thread::scope(|scope| {
        let consumer = scope.spawn(|| {
            let mut outcome = Ok(());
            while let Some(block) = ring.take() {
                let this = peer.free_elsewhere(block, &from, &to);
                has_failed.fetch_or(this.is_err(), Ordering::Relaxed);
                outcome = outcome.and(this);
            }
            outcome
        });
        let mut random = Xorshift(7);
        // The first tenth warms up.
        for count in [MOST / 10, MOST] {
            let start = Instant::now();
            moved = 0;
            while moved < count && !has_failed.load(Ordering::Relaxed) {
                if moved % 256 == 255 && start.elapsed().as_secs_f64() > limit {
                    break;
                }
                match peer.allocate(1 + random.below(max_bytes), &from) {
                    Ok(block) => ring.put(Some(block)),
                    Err(_) => has_failed.store(true, Ordering::Relaxed),
                }
                moved += 1;
            }
            seconds = start.elapsed().as_secs_f64();
        }
        ring.put(None);
        consumer.join().unwrap_or_else(|_| Err("the consumer panicked".to_owned()))
    });
    peer.synchronize();
    outcome?;
    if has_failed.into_inner() {
        return Err("an allocation failed".to_owned());
    }
    rows.value(moved as f64 / seconds / 1e6, "Mops/s");
    Ok(())
}

/// Four kernels on several streams, each with a block of 8 bytes that is allocated before and freed after it is queued.
pub fn kernels<M: Maker>(rows: &Rows<'_>, is_warm: bool, maker: &M) -> Result<(), String> {
    const TICKS: u64 = 1_000_000;
    let failed = || "an allocation failed".to_owned();
    let mut times = Vec::new();
    let all = Instant::now();
    while times.len() < 16
        && (times.len() < 4 || all.elapsed().as_secs_f64() < 5.0 * rows.options.seconds)
    {
        let peer = maker.make(false)?;
        let streams: Vec<_> =
            (0..rows.request.parameter).map(|_| peer.stream()).collect::<Result<_, _>>()?;
        if is_warm {
            for stream in &streams {
                peer.free(peer.allocate(8, stream).map_err(|_| failed())?);
            }
        }
        peer.synchronize();
        let start = Instant::now();
        for kernel in 0..4 {
            let stream = &streams[kernel % streams.len()];
            let block = peer.allocate(8, stream).map_err(|_| failed())?;
            peer.spin(stream, &block, TICKS)?;
            peer.free(block);
        }
        peer.synchronize();
        times.push(start.elapsed().as_secs_f64() * 1e6);
    }
    // The first round loads the kernel and wakes the GPU.
    times.remove(0);
    times.sort_unstable_by(f64::total_cmp);
    rows.value(times[times.len() / 2], "us");
    Ok(())
}
