//! Stream-ordered memory: what the driver's pools have reserved on the device.
//!
//! A pool grows by more than a request and keeps freed memory, so its reserved bytes are charged, not its blocks. If a request exceeds the
//! pool's free memory, the missing part is charged first, in steps of the pool's growth, and corrected afterwards to what the pool has
//! reserved. Before a refusal all pools of the device return unused memory. A free takes effect later in stream order, even of a block by
//! which a pool grew beyond the limit. So the next request and synchronisations correct the charge until one covers the free, see
//! `outstanding`.
//!
//! A pool's lock is held during its requests and its destruction, so a correction sees no partial request and never uses a destroyed
//! handle. A thread locks at most one pool, and inside takes only the account's locks.
//!
//! A request that the charge covers queries the reserved bytes only after the call. That query is needed: fragmentation, or frees pending
//! on other streams, may make a pool grow although its free memory covers the request.
//!
//! A request on a captured stream allocates no memory: it becomes a graph node and is passed on. See `graphs`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use xlog_base::{Mutex, MutexGuard};

use crate::account::{Account, Refusal, rounded};
use crate::blocks::{Request, Space, after_success, around, give, written};
use crate::driver::{CuResult, Driver, OUT_OF_MEMORY, SUCCESS, device_of};
use crate::graphs;
use crate::messages::{Kind, guarded, say_once};
use crate::outstanding::{MISSED, stream_of};
use crate::state::{State, existing, state};
use xlog_base::IntMap;

/// The usual and the minimum step in which the driver's pools grow.
const GROWTH: u64 = 32 << 20;
const SMALLEST_GROWTH: u64 = 2 << 20;

/// A pool of the driver.
pub(crate) struct Pool {
    handle: u64,
    /// `None` for a pool of host memory, which is not counted.
    device: Option<u32>,
    /// The bytes of live blocks. Outside `charge`, so that a free waits for no request.
    live: AtomicU64,
    /// Set with the charge locked, or once the driver has reused the handle. A destroyed pool keeps the memory of its live blocks.
    is_destroyed: AtomicBool,
    charge: Mutex<PoolCharge>,
}

#[derive(Default)]
struct PoolCharge {
    bytes: u64,
}

impl Pool {
    fn new(handle: u64, device: Option<u32>) -> Self {
        let (live, is_destroyed) = (AtomicU64::new(0), AtomicBool::new(false));
        Self { handle, device, live, is_destroyed, charge: Mutex::default() }
    }

    fn is_destroyed(&self) -> bool {
        self.is_destroyed.load(Ordering::SeqCst)
    }

    /// Corrects the charge to what the pool has reserved. An error leaves the charge unchanged.
    fn correct(
        &self,
        driver: &Driver,
        account: &Account,
        charge: &mut PoolCharge,
    ) -> Result<(), Refusal> {
        let reserved = self.lower(driver, account, charge);
        if reserved > charge.bytes {
            account.try_charge(reserved - charge.bytes)?;
            charge.bytes = reserved;
        }
        Ok(())
    }

    /// Lowers the charge to what the pool has reserved, and returns that. Does not wait for the ledger.
    fn lower(&self, driver: &Driver, account: &Account, charge: &mut PoolCharge) -> u64 {
        let reserved = if self.is_destroyed() {
            self.live.load(Ordering::SeqCst)
        } else {
            driver.pool_reserved(self.handle).unwrap_or(charge.bytes)
        };
        let reserved = rounded(reserved);
        if reserved < charge.bytes {
            account.release(charge.bytes - reserved);
            charge.bytes = reserved;
        }
        reserved
    }

    /// Makes the pool return unused memory, and corrects its charge.
    fn shrink(
        &self,
        driver: &Driver,
        account: &Account,
        charge: &mut PoolCharge,
    ) -> Result<(), Refusal> {
        if !self.is_destroyed() {
            driver.trim_pool(self.handle, 0);
        }
        self.correct(driver, account, charge)
    }

    /// The bytes of a request that the charge does not cover beside live blocks. The driver's count of used bytes is not suitable: it does
    /// not fall when `cuMemFree` frees a block.
    fn missing(&self, charge: &PoolCharge, bytes: u64) -> u64 {
        let live = self.live.load(Ordering::SeqCst);
        bytes.saturating_sub(charge.bytes.saturating_sub(live))
    }

    /// Charges the part of a request that the pool's free memory does not cover.
    fn admit(
        &self,
        driver: &Driver,
        account: &Account,
        charge: &mut PoolCharge,
        bytes: u64,
    ) -> Result<(), Refusal> {
        if self.missing(charge, bytes) == 0 {
            return Ok(());
        }
        self.correct(driver, account, charge)?;
        let missing = self.missing(charge, bytes);
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
        charge.bytes = charge.bytes.saturating_add(charged);
        Ok(())
    }
}

#[derive(Default)]
pub(crate) struct Pools {
    /// All known pools by handle, including destroyed ones.
    by_handle: IntMap<u64, Arc<Pool>>,
    /// The pools that `cuMemAllocAsync` uses, by device, until the program may have changed them.
    current: IntMap<u32, Arc<Pool>>,
    /// The number of such possible changes.
    changes: u64,
}

/// Makes all pools and the graphs of a device return unused memory, before a request is refused. Waits for requests in progress.
pub(crate) fn reclaim(state: &State, device: u32) {
    let Some(account) = state.account(device) else { return };
    let pools = all(state);
    for pool in pools.iter().filter(|pool| pool.device == Some(device)) {
        // If raising the charge is refused, the next request does it.
        let _ = pool.shrink(&state.driver, account, &mut pool.charge.lock());
    }
    graphs::reclaim(state, device);
}

fn all(state: &State) -> Vec<Arc<Pool>> {
    state.pools.lock().by_handle.values().cloned().collect()
}

fn known(state: &State, handle: u64) -> Option<Arc<Pool>> {
    state.pools.lock().by_handle.get(&handle).cloned()
}

/// The pool with a handle, possibly destroyed. An unknown pool is assumed to be on the current device.
fn named(state: &State, handle: u64) -> Option<Arc<Pool>> {
    known(state, handle).or_else(|| Some(noted(state, handle, state.driver.current_device()?)))
}

fn noted(state: &State, handle: u64, device: u32) -> Arc<Pool> {
    let mut pools = state.pools.lock();
    let pool = || Arc::new(Pool::new(handle, Some(device)));
    Arc::clone(pools.by_handle.entry(handle).or_insert_with(pool))
}

/// The pool of the current device. It is cached unless the program may have changed it while the driver was queried.
fn current(state: &State) -> Option<Arc<Pool>> {
    let device = state.driver.current_device()?;
    let pools = state.pools.lock();
    let (kept, changes) = (pools.current.get(&device).cloned(), pools.changes);
    drop(pools);
    if kept.is_some() {
        return kept;
    }
    let pool = noted(state, state.driver.current_pool(device)?, device);
    let mut pools = state.pools.lock();
    if pools.changes == changes {
        pools.current.insert(device, Arc::clone(&pool));
    }
    Some(pool)
}

/// `cuDeviceSetMemPool` and `cuMemSetMemPool`, which change a current pool. A concurrent request may be charged to the previous pool; the next synchronisation corrects
/// all charges.
pub(crate) fn change_current(call: impl FnOnce() -> CuResult) -> CuResult {
    guarded(|| existing().map(forget_current));
    let result = call();
    guarded(|| {
        existing().map(|state| {
            forget_current(state);
            state.outstanding.note([MISSED]);
        })
    });
    result
}

/// Removes the cached current pools. Called after every call that may change one.
pub(crate) fn forget_current(state: &State) {
    let mut pools = state.pools.lock();
    pools.current.clear();
    pools.changes += 1;
}

/// The result of [`admit`].
enum Admission<'a> {
    /// Charged. The pool stays locked during the driver's call.
    Admitted(MutexGuard<'a, PoolCharge>),
    /// The pool was destroyed after the request found it.
    Destroyed,
}

/// Charges a request to a pool, which is not locked while memory is returned.
fn admit<'a>(request: &Request, pool: &'a Pool) -> Result<Admission<'a>, Refusal> {
    request.admit(request.bytes, || {
        let mut charge = pool.charge.lock();
        if pool.is_destroyed() {
            return Ok(Admission::Destroyed);
        }
        pool.admit(&request.state.driver, request.account, &mut charge, request.bytes)?;
        Ok(Admission::Admitted(charge))
    })
}

/// Allocates a block of `pool`; `None` is the pool of the current device.
pub(crate) fn take(
    pool: Option<u64>,
    out: *mut u64,
    bytes: u64,
    stream: u64,
    caller: usize,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    let mut destroyed = None;
    loop {
        let begun = guarded(|| {
            let state = state().filter(|state| !state.driver.is_capturing(stream))?;
            let pool = pool.map_or_else(|| current(state), |handle| named(state, handle))?;
            // The driver refuses a request to a destroyed pool.
            let pool = Some(pool).filter(|pool| destroyed != Some(pool.handle))?;
            // The pool may be on another device than the current one.
            let device = Some(pool.device?);
            Some((Request::begin(device, bytes, Some(stream), caller)?, pool))
        });
        let Some((request, pool)) = begun.flatten() else { return call() };
        match guarded(|| admit(&request, &pool)) {
            Some(Ok(Admission::Admitted(charge))) => {
                return take_admitted(&request, &pool, charge, out, call);
            }
            Some(Err(refusal)) => {
                guarded(|| request.note_refused(&refusal));
                return OUT_OF_MEMORY;
            }
            // Another thread has changed the current pool.
            Some(Ok(Admission::Destroyed)) => {
                forget_current(request.state);
                destroyed = Some(pool.handle);
            }
            None => return call(),
        }
    }
}

/// Calls the driver for a charged block, and corrects the charge to what the pool has reserved.
fn take_admitted(
    request: &Request,
    pool: &Arc<Pool>,
    mut charge: MutexGuard<'_, PoolCharge>,
    out: *mut u64,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    let (driver, account) = (&request.state.driver, request.account);
    let mut result = call();
    guarded(|| {
        if result == SUCCESS {
            pool.live.fetch_add(request.bytes, Ordering::SeqCst);
        }
        let mut corrected = pool.correct(driver, account, &mut charge);
        if corrected.as_ref().is_err_and(|refusal| !refusal.is_busy()) {
            // The pool grew by more than was charged. It is unlocked while others return memory.
            drop(charge);
            reclaim(request.state, request.device);
            charge = pool.charge.lock();
            corrected = pool.correct(driver, account, &mut charge);
        }
        if let Err(refusal) = &corrected {
            // Unlocked, because the driver may delay the call.
            drop(charge);
            if result == SUCCESS {
                driver.free_in_order(written(out), request.stream.unwrap_or_default());
                clear(out);
                pool.live.fetch_sub(request.bytes, Ordering::SeqCst);
            }
            let stream = stream_of(request.state, request.stream.unwrap_or_default());
            request.state.outstanding.note([stream]);
            if refusal.is_busy() || pool.shrink(driver, account, &mut pool.charge.lock()).is_err() {
                let text = "a pool of the driver holds more than was charged for it, until the stream of a refused request is done";
                say_once(Kind::Pool, text);
            }
            request.note_refused(refusal);
            result = OUT_OF_MEMORY;
            return;
        }
        drop(charge);
        match result {
            SUCCESS => request.insert(Space::Address, written(out), 0, Some(Arc::clone(pool))),
            _ => request.note_failed(result),
        }
    });
    result
}

/// Clears the driver's result of a request that is finally refused.
fn clear(out: *mut u64) {
    // SAFETY: the driver wrote to the caller's pointer and reported success; it would have refused a null pointer.
    if let Some(out) = unsafe { out.as_mut() } {
        *out = 0;
    }
}

/// Counts a freed block of a pool: freed in stream order, or at once without a stream.
pub(crate) fn note_freed(state: &State, pool: &Pool, bytes: u64, stream: Option<u64>) {
    pool.live.fetch_sub(bytes, Ordering::SeqCst);
    if pool.is_destroyed() {
        // No synchronisation is needed, and no request holds the lock.
        lower(state, pool, &mut pool.charge.lock());
    } else if stream.is_none() {
        match pool.charge.try_lock() {
            Some(mut charge) => lower(state, pool, &mut charge),
            None => state.outstanding.note([MISSED]),
        }
    }
}

fn lower(state: &State, pool: &Pool, charge: &mut PoolCharge) {
    if let Some(account) = pool.device.and_then(|device| state.account(device)) {
        pool.lower(&state.driver, account, charge);
    }
}

/// Corrects the charge of a pool and returns the bytes it may still return. A locked pool is left to the next synchronisation, because its
/// request may have queried the driver before.
fn correct_now(state: &State, pool: &Pool) -> u64 {
    let Some(account) = pool.device.and_then(|device| state.account(device)) else { return 0 };
    let Some(mut charge) = pool.charge.try_lock() else {
        state.outstanding.note([MISSED]);
        return u64::MAX;
    };
    let mut corrected = pool.correct(&state.driver, account, &mut charge);
    if corrected.as_ref().is_err_and(|refusal| !refusal.is_busy()) {
        // If raising the charge is refused, the pool is shrunk, and the rest is left to the next request.
        corrected = pool.shrink(&state.driver, account, &mut charge);
    }
    let rest = charge.bytes.saturating_sub(pool.live.load(Ordering::SeqCst));
    corrected.map_or(u64::MAX, |()| rest)
}

/// Corrects the charges of all pools. Returns true if the driver may still return memory.
pub(crate) fn correct_all(state: &State) -> bool {
    let mut is_left = false;
    for pool in all(state) {
        is_left |= correct_now(state, &pool) >= SMALLEST_GROWTH;
    }
    is_left
}

/// Frees in the order of a stream. The block may belong to a graph.
pub(crate) fn free(address: u64, stream: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    let before = || {
        let state = existing()?;
        let stream = stream_of(state, stream);
        state.outstanding.note([stream]);
        Some((state, stream))
    };
    let call = || give(Space::Address, address, Some(stream), call);
    around(before, call, |(state, stream), result| {
        if result == SUCCESS {
            state.outstanding.note([stream]);
        }
    })
}

/// `cuMemPoolCreate`.
pub(crate) fn create(
    out: *mut u64,
    properties: *const i32,
    call: impl FnOnce() -> CuResult,
) -> CuResult {
    after_success(call, || {
        let (state, handle) = (state()?, written(out));
        let pool = Arc::new(Pool::new(handle, device_of(properties)));
        let earlier = state.pools.lock().by_handle.insert(handle, pool)?;
        // The program may have destroyed the earlier pool by a call that is not intercepted.
        forget_current(state);
        earlier.is_destroyed.store(true, Ordering::SeqCst);
        lower(state, &earlier, &mut earlier.charge.lock());
        Some(())
    })
}

/// `cuMemPoolDestroy`.
pub(crate) fn destroy(handle: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    let found = guarded(|| {
        let state = existing()?;
        Some((state, known(state, handle)?))
    });
    let Some((state, pool)) = found.flatten() else { return call() };
    // Locked during the call, because another thread may use the pool. It stays in the table until the driver reuses the handle, because a
    // thread may still look up a handle it read before.
    let mut charge = pool.charge.lock();
    let result = call();
    if result == SUCCESS {
        pool.is_destroyed.store(true, Ordering::SeqCst);
        guarded(|| lower(state, &pool, &mut charge));
        drop(charge);
        // The default pool becomes the current one.
        guarded(|| forget_current(state));
    }
    result
}

/// `cuMemPoolTrimTo` and `cuMemPoolSetAttribute`: corrects the pool's charge after the call.
pub(crate) fn correct_after(handle: u64, call: impl FnOnce() -> CuResult) -> CuResult {
    let result = call();
    guarded(|| {
        let state = existing()?;
        known(state, handle).map(|pool| correct_now(state, &pool))
    });
    result
}
