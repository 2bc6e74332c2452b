//! Stream-ordered memory: what the driver's pools have taken from the device.
//!
//! A pool grows by more than a request and keeps freed memory, so its reserved bytes are charged, not its blocks. A request that the
//! pool's free memory does not cover is first charged with the rest, in steps of the pool's growth, and corrected to what the pool has
//! reserved afterwards. Before any refusal on a device all its pools return what they do not use. Frees take effect later in stream
//! order, also the one of a block by which a pool grew beyond the limit: the charge is corrected by the next request and by the next
//! synchronisation.
//!
//! A pool's own lock is held over its requests and its destruction, so that a correction sees no half-done request and never uses a
//! destroyed handle. At most one pool is locked by a thread, and no other lock is taken inside except the ones of the account.
//!
//! A request on a stream that is being captured takes no memory: it becomes a node of a graph, and is passed on. See `graphs`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use xlog_base::{Mutex, MutexGuard};

use crate::account::{Account, PressureDeadline, Refusal, rounded};
use crate::blocks::{Request, Space, give, written};
use crate::driver::{CuResult, Driver, OUT_OF_MEMORY, SUCCESS, device_of};
use crate::graphs;
use crate::log::per_thread;
use crate::messages::{Kind, guarded, say_once};
use crate::state::{State, existing, state};

/// The steps in which the driver's pools take memory: usually, and at least.
const GROWTH: u64 = 32 << 20;
const SMALLEST_GROWTH: u64 = 2 << 20;

/// A pool of the driver.
pub(crate) struct Pool {
    handle: u64,
    /// None for a pool of host memory, which is not counted.
    device: Option<u32>,
    /// Bytes of live blocks. Not in the books, so that a free waits for no request.
    live: AtomicU64,
    /// A destroyed pool keeps the memory of its live blocks. Set with the books locked, or once the driver has given the handle again.
    is_destroyed: AtomicBool,
    books: Mutex<Books>,
}

#[derive(Default)]
struct Books {
    charged: u64,
}

impl Pool {
    fn new(handle: u64, device: Option<u32>) -> Self {
        let (live, is_destroyed) = (AtomicU64::new(0), AtomicBool::new(false));
        Self { handle, device, live, is_destroyed, books: Mutex::default() }
    }

    fn is_destroyed(&self) -> bool {
        self.is_destroyed.load(Ordering::SeqCst)
    }

    /// Corrects the charge to what the pool has reserved. An error leaves the charge as it was.
    fn correct(
        &self,
        driver: &Driver,
        account: &Account,
        books: &mut Books,
    ) -> Result<(), Refusal> {
        let reserved = if self.is_destroyed() {
            self.live.load(Ordering::SeqCst)
        } else {
            driver.pool_reserved(self.handle).unwrap_or(books.charged)
        };
        let reserved = rounded(reserved);
        if reserved > books.charged {
            account.try_charge(reserved - books.charged)?;
        } else {
            account.release(books.charged - reserved);
        }
        books.charged = reserved;
        Ok(())
    }

    /// Lets the pool return what it does not use, and corrects its charge.
    fn shrink(&self, driver: &Driver, account: &Account, books: &mut Books) -> Result<(), Refusal> {
        if !self.is_destroyed() {
            driver.trim_pool(self.handle, 0);
        }
        self.correct(driver, account, books)
    }

    /// Charges what the pool's free memory does not cover of a request.
    fn admit(
        &self,
        driver: &Driver,
        account: &Account,
        books: &mut Books,
        bytes: u64,
    ) -> Result<(), Refusal> {
        self.correct(driver, account, books)?;
        let used = driver.pool_used(self.handle).unwrap_or(books.charged);
        let missing = bytes.saturating_sub(books.charged.saturating_sub(used));
        if missing == 0 {
            return Ok(());
        }
        let in_steps =
            |step: u64| rounded(missing.checked_next_multiple_of(step).unwrap_or(u64::MAX));
        let charged = match account.try_charge(in_steps(GROWTH)) {
            Ok(()) => in_steps(GROWTH),
            Err(refusal) if refusal.is_busy() => return Err(refusal),
            Err(_) => {
                account.try_charge(in_steps(SMALLEST_GROWTH))?;
                in_steps(SMALLEST_GROWTH)
            }
        };
        books.charged = books.charged.saturating_add(charged);
        Ok(())
    }
}

/// Lets all pools and the graphs of a device return what they do not use, before a request is refused. Waits for requests that are under way.
pub(crate) fn reclaim(state: &State, device: u32) {
    let Some(account) = state.account(device) else { return };
    let pools: Vec<Arc<Pool>> = state.pools.lock().values().cloned().collect();
    for pool in pools.iter().filter(|pool| pool.device == Some(device)) {
        // A refusal to raise the charge leaves it to the next request.
        let _ = pool.shrink(&state.driver, account, &mut pool.books.lock());
    }
    graphs::reclaim(state, device);
}

/// The pool with a handle, which may be destroyed; one that was not seen before is on `device`.
fn pool_of(state: &State, handle: u64, device: Option<u32>) -> Arc<Pool> {
    let mut pools = state.pools.lock();
    Arc::clone(pools.entry(handle).or_insert_with(|| Arc::new(Pool::new(handle, device))))
}

fn known(handle: u64) -> Option<(&'static State, Arc<Pool>)> {
    let state = existing()?;
    let pool = state.pools.lock().get(&handle).cloned();
    Some((state, pool?))
}

/// What becomes of a request to a pool.
enum Admission<'a> {
    /// Charged. The pool stays locked over the call of the driver.
    Admitted(MutexGuard<'a, Books>),
    Refused(Refusal),
    /// The pool was destroyed since the request found it.
    Destroyed,
}

/// Charges a request to a pool. The pool is not locked while memory is returned.
fn admit<'a>(request: &Request, pool: &'a Pool) -> Admission<'a> {
    let mut pressure = PressureDeadline::new();
    let mut has_reclaimed = false;
    loop {
        let mut books = pool.books.lock();
        if pool.is_destroyed() {
            return Admission::Destroyed;
        }
        let admitted =
            pool.admit(&request.state.driver, request.account, &mut books, request.bytes);
        let Err(refusal) = admitted else { return Admission::Admitted(books) };
        drop(books);
        let may_fit = if refusal.is_busy() {
            false
        } else if !std::mem::replace(&mut has_reclaimed, true) {
            reclaim(request.state, request.device);
            true
        } else {
            request.account.finds_room(request.bytes, &refusal, &mut pressure)
        };
        if !may_fit {
            return Admission::Refused(refusal);
        }
    }
}

/// Calls the driver for a block of a pool; `None` is the pool of the current device.
fn take(
    pool: Option<u64>,
    out: *mut u64,
    bytes: u64,
    stream: u64,
    caller: usize,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    let begun = guarded(|| {
        let request = Request::begin(None, bytes, Some(stream), caller)?;
        (!request.state.driver.is_capturing(stream)).then_some(request)
    });
    let Some(mut request) = begun.flatten() else { return call() };
    let current_device = request.device;
    let mut destroyed = None;
    loop {
        let found = guarded(|| {
            let handle = pool.or_else(|| request.state.driver.current_pool(current_device));
            // A destroyed pool that is still named is the driver's to refuse.
            let handle = handle.filter(|handle| destroyed != Some(*handle))?;
            let pool = pool_of(request.state, handle, Some(current_device));
            // A pool may be on another device than the current one.
            request.device = pool.device?;
            request.account = request.state.account(request.device)?;
            Some(pool)
        });
        let Some(pool) = found.flatten() else { return call() };
        match guarded(|| admit(&request, &pool)) {
            Some(Admission::Admitted(books)) => {
                return take_admitted(&request, &pool, books, out, call);
            }
            Some(Admission::Refused(refusal)) => {
                guarded(|| request.note_refused(&refusal));
                return OUT_OF_MEMORY;
            }
            // Another thread has made another pool the current one.
            Some(Admission::Destroyed) => destroyed = Some(pool.handle),
            None => return call(),
        }
    }
}

/// Calls the driver for a block that is charged, and corrects the charge to what the pool has reserved then.
fn take_admitted(
    request: &Request,
    pool: &Arc<Pool>,
    mut books: MutexGuard<'_, Books>,
    out: *mut u64,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    let (driver, account) = (&request.state.driver, request.account);
    let mut result = call();
    guarded(|| {
        if result == SUCCESS {
            pool.live.fetch_add(request.bytes, Ordering::SeqCst);
        }
        let mut corrected = pool.correct(driver, account, &mut books);
        if corrected.as_ref().is_err_and(|refusal| !refusal.is_busy()) {
            // The pool grew by more than was charged. It is unlocked while the others return memory.
            drop(books);
            reclaim(request.state, request.device);
            books = pool.books.lock();
            corrected = pool.correct(driver, account, &mut books);
        }
        if let Err(refusal) = &corrected {
            // Unlocked: the driver may keep the call waiting.
            drop(books);
            if result == SUCCESS {
                driver.free_in_order(written(out), request.stream.unwrap_or_default());
                clear(out);
                pool.live.fetch_sub(request.bytes, Ordering::SeqCst);
            }
            request.state.has_stale_pools.store(true, Ordering::Release);
            if refusal.is_busy() || pool.shrink(driver, account, &mut pool.books.lock()).is_err() {
                let text = "a pool of the driver holds more than was charged for it, until the stream of a refused request is done";
                say_once(Kind::Pool, text);
            }
            request.note_refused(refusal);
            result = OUT_OF_MEMORY;
            return;
        }
        drop(books);
        match result {
            SUCCESS => request.insert(Space::Address, written(out), 0, Some(Arc::clone(pool))),
            _ => request.note_failed(result),
        }
    });
    result
}

/// Clears what the driver wrote for a request that is refused after all.
fn clear(out: *mut u64) {
    // SAFETY: the driver wrote to the caller's pointer and reported success; a null pointer it would have refused.
    if let Some(out) = unsafe { out.as_mut() } {
        *out = 0;
    }
}

/// Notes that a block of a pool was freed in stream order.
pub(crate) fn note_freed(state: &State, pool: &Pool, bytes: u64) {
    pool.live.fetch_sub(bytes, Ordering::SeqCst);
    if !pool.is_destroyed() {
        state.has_stale_pools.store(true, Ordering::Release);
        return;
    }
    // No synchronisation is needed, and no request holds the lock any more.
    if let Some(account) = pool.device.and_then(|device| state.account(device)) {
        let _ = pool.correct(&state.driver, account, &mut pool.books.lock());
    }
}

/// Corrects the charges of all pools, if one may have returned memory. A pool in use corrects itself.
fn correct_stale(result: CuResult) {
    let Some(state) = existing() else { return };
    if result != SUCCESS
        || !state.has_stale_pools.load(Ordering::Acquire)
        || !state.has_stale_pools.swap(false, Ordering::AcqRel)
    {
        return;
    }
    guarded(|| {
        let pools: Vec<Arc<Pool>> = state.pools.lock().values().cloned().collect();
        for pool in pools {
            correct_now(state, &pool);
        }
        graphs::correct_stale(state);
    });
}

fn correct_now(state: &State, pool: &Pool) {
    let account = pool.device.and_then(|device| state.account(device));
    if let (Some(account), Some(mut books)) = (account, pool.books.try_lock())
        && let Err(refusal) = pool.correct(&state.driver, account, &mut books)
        && !refusal.is_busy()
    {
        // A refusal to raise the charge makes the pool smaller, and leaves the rest to the next request.
        let _ = pool.shrink(&state.driver, account, &mut books);
    }
}

type Allocate = unsafe extern "C" fn(*mut u64, usize, u64) -> CuResult;
type AllocateFrom = unsafe extern "C" fn(*mut u64, usize, u64, u64) -> CuResult;
type Free = unsafe extern "C" fn(u64, u64) -> CuResult;

/// `cuMemAllocAsync`.
pub(crate) fn allocate(
    real: Allocate,
    out: *mut u64,
    bytes: usize,
    stream: u64,
    caller: usize,
) -> CuResult {
    // SAFETY: the arguments are the caller's own.
    take(None, out, bytes as u64, stream, caller, || unsafe { real(out, bytes, stream) })
}

/// `cuMemAllocAsync` for per-thread default streams.
pub(crate) fn allocate_per_thread(
    real: Allocate,
    out: *mut u64,
    bytes: usize,
    stream: u64,
    caller: usize,
) -> CuResult {
    // SAFETY: the arguments are the caller's own.
    let call = || unsafe { real(out, bytes, stream) };
    take(None, out, bytes as u64, per_thread(stream), caller, call)
}

/// `cuMemAllocFromPoolAsync`.
pub(crate) fn allocate_from(
    real: AllocateFrom,
    out: *mut u64,
    bytes: usize,
    pool: u64,
    stream: u64,
    caller: usize,
) -> CuResult {
    // SAFETY: the arguments are the caller's own.
    let call = || unsafe { real(out, bytes, pool, stream) };
    take(Some(pool), out, bytes as u64, stream, caller, call)
}

/// `cuMemAllocFromPoolAsync` for per-thread default streams.
pub(crate) fn allocate_from_per_thread(
    real: AllocateFrom,
    out: *mut u64,
    bytes: usize,
    pool: u64,
    stream: u64,
    caller: usize,
) -> CuResult {
    // SAFETY: the arguments are the caller's own.
    let call = || unsafe { real(out, bytes, pool, stream) };
    take(Some(pool), out, bytes as u64, per_thread(stream), caller, call)
}

/// `cuMemFreeAsync`.
pub(crate) fn free(real: Free, address: u64, stream: u64, _caller: usize) -> CuResult {
    // SAFETY: the arguments are the caller's own.
    give(Space::Address, address, Some(stream), || unsafe { real(address, stream) })
}

/// `cuMemFreeAsync` for per-thread default streams.
pub(crate) fn free_per_thread(real: Free, address: u64, stream: u64, _caller: usize) -> CuResult {
    // SAFETY: the arguments are the caller's own.
    let call = || unsafe { real(address, stream) };
    give(Space::Address, address, Some(per_thread(stream)), call)
}

/// `cuMemPoolCreate`.
pub(crate) fn create(
    real: unsafe extern "C" fn(*mut u64, *const i32) -> CuResult,
    out: *mut u64,
    properties: *const i32,
    _caller: usize,
) -> CuResult {
    // SAFETY: the arguments are the caller's own.
    let result = unsafe { real(out, properties) };
    if result == SUCCESS {
        guarded(|| {
            let (state, handle) = (state()?, written(out));
            let pool = Arc::new(Pool::new(handle, device_of(properties)));
            let earlier = state.pools.lock().insert(handle, pool)?;
            // The program may have destroyed it in a way that is not intercepted.
            earlier.is_destroyed.store(true, Ordering::SeqCst);
            correct_now(state, &earlier);
            Some(())
        });
    }
    result
}

/// `cuMemPoolDestroy`.
pub(crate) fn destroy(
    real: unsafe extern "C" fn(u64) -> CuResult,
    handle: u64,
    _caller: usize,
) -> CuResult {
    // SAFETY: the argument is the caller's own.
    let call = || unsafe { real(handle) };
    let Some((state, pool)) = guarded(|| known(handle)).flatten() else { return call() };
    // Locked over the call: another thread may have the pool in hand. It stays in the table until the driver gives the handle again,
    // because a thread may still find the handle that it has read before.
    let books = pool.books.lock();
    let result = call();
    if result == SUCCESS {
        pool.is_destroyed.store(true, Ordering::SeqCst);
    }
    drop(books);
    if result == SUCCESS {
        guarded(|| correct_now(state, &pool));
    }
    result
}

/// `cuMemPoolTrimTo`.
pub(crate) fn trim(
    real: unsafe extern "C" fn(u64, usize) -> CuResult,
    handle: u64,
    keep: usize,
    _caller: usize,
) -> CuResult {
    // SAFETY: the arguments are the caller's own.
    let result = unsafe { real(handle, keep) };
    correct_known(handle);
    result
}

/// `cuMemPoolSetAttribute`.
pub(crate) fn set_attribute(
    real: unsafe extern "C" fn(u64, i32, *mut std::ffi::c_void) -> CuResult,
    handle: u64,
    attribute: i32,
    value: *mut std::ffi::c_void,
    _caller: usize,
) -> CuResult {
    // SAFETY: the arguments are the caller's own.
    let result = unsafe { real(handle, attribute, value) };
    correct_known(handle);
    result
}

fn correct_known(handle: u64) {
    guarded(|| known(handle).map(|(state, pool)| correct_now(state, &pool)));
}

/// `cuStreamSynchronize` and `cuEventSynchronize`.
pub(crate) fn synchronize(
    real: unsafe extern "C" fn(u64) -> CuResult,
    handle: u64,
    _caller: usize,
) -> CuResult {
    // SAFETY: the argument is the caller's own.
    let result = unsafe { real(handle) };
    correct_stale(result);
    result
}

/// `cuCtxSynchronize`.
pub(crate) fn synchronize_context(
    real: unsafe extern "C" fn() -> CuResult,
    _caller: usize,
) -> CuResult {
    // SAFETY: the call takes no arguments.
    let result = unsafe { real() };
    correct_stale(result);
    result
}
