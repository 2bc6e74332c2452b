//! One opening of a ledger: its slot, and the fast path without lock or system call.
//!
//! Only the owner increases what its slot uses. Under the file lock another opener may recall the unused grant of a living slot, or empty a
//! dead slot. All changes of a word are compare-and-swap, so none is lost. A ledger belongs to the process that opened it: it refuses a
//! forked child and keeps the parent's slot.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant, SystemTime};

use xlog_base::Mutex;

use super::claim::{Claims, Inode};
use super::exit;
use super::file::{OpenFile, failed, open_or_create, read_header, read_start, rehearse_creation};
use super::fork::{Registration, lock_table};
use super::lock::{FileLockGuard, Gate, Opened, UPGRADED};
use super::mapping::{
    ForkSentinel, Mapping, SlotCell, Standing, is_locked, store_bytes, try_lock, unlock,
};
use super::quotas::clear_quota;
use super::upgrade::upgrade;
use crate::config::LedgerConfig;
use crate::error::{LedgerError, LedgerResult};
use crate::format::{
    AT_WATCH, SLOT_NAME_SIZE, UNIT, VERSION_1, check_limit_word, file_size, slot_offset, units_of,
};
use crate::snapshot::Snapshot;
use crate::tags;
use crate::word::{Keep, Word};

/// The maximum number of retries if the file is upgraded during the open.
const UPGRADES: usize = 4;
/// How long `leave` waits for this process's threads.
const LEAVE_DEADLINE: Duration = Duration::from_millis(100);
/// How long `leave` waits for this process's listener to return memory.
const ANSWER_DEADLINE: Duration = Duration::from_secs(2);

/// One process's membership in the ledger of a device. Dropping it releases everything.
///
/// Threads share one by reference. Two openings in one process are two openers with a slot each.
#[must_use = "the slot is given back when the ledger is dropped"]
#[derive(Debug)]
pub struct Ledger {
    /// Dropped before the files and the mapping that it registers.
    _registration: Registration,
    pub(super) mapping: Mapping,
    pub(super) file: File,
    pub(super) path: PathBuf,
    pub(super) own: usize,
    pub(super) keep: Keep,
    inode: Inode,
    claims: Claims,
    sentinel: ForkSentinel,
    gate: Gate,
    pub(super) opener: u32,
    created: bool,
    publish_lock: Mutex<()>,
    /// The latest ask of this opener, which its own listener need not answer.
    pub(super) own_ask: AtomicU32,
    /// True while this opener's listener returns memory.
    pub(super) is_answering: AtomicBool,
    /// The last time this opener emptied the slot of a dead process that held bytes.
    pub(super) reclaimed_at: Mutex<Option<Instant>>,
}

impl Ledger {
    /// Joins the ledger of a device. Creates it if there is none and the configuration has a limit.
    ///
    /// An existing ledger keeps its limit; see [`Ledger::set_limit`].
    pub fn open(config: LedgerConfig) -> LedgerResult<Self> {
        config.check()?;
        for _ in 0..UPGRADES {
            match Self::open_once(&config) {
                Err(LedgerError::Removed { how: UPGRADED, .. }) => {}
                opened => return opened,
            }
        }
        Self::open_once(&config)
    }

    /// Opens the file as it is. Fails with [`UPGRADED`] if this or another process upgraded it just now.
    fn open_once(config: &LedgerConfig) -> LedgerResult<Self> {
        let (opened, mapping, registration) = open_registered(config)?;
        let OpenFile { file, path, header, created, inode, claims } = opened;
        // Bound last so that an error drops it first: descriptors are unregistered before they are closed, because a forked child replaces
        // whatever has the registered numbers.
        let registration = registration;
        let sentinel = ForkSentinel::new().map_err(|error| {
            failed(&path, "madvise(MADV_WIPEONFORK), new in Linux 4.14,", error)
        })?;
        let gate = Gate::new(config.lock_deadline);
        let name = config.name.clone().unwrap_or_else(command_name);
        let own = {
            let opened =
                Opened { file: &file, path: &path, mapping: &mapping, sentinel: &sentinel, inode };
            let lock = gate.lock(opened, None)?;
            if header.version == VERSION_1 && upgrade(&file, &path, &header)? {
                return Err(LedgerError::Removed { path: path.clone(), how: UPGRADED });
            }
            let own = claim_slot(&file, &path, &mapping, &name)?;
            drop(lock);
            own
        };
        let keep = Keep::of_chunk(units_of(config.chunk).unwrap_or(u32::MAX));
        let opener = std::process::id();
        let publish_lock = Mutex::new(());
        let ledger = Self {
            _registration: registration,
            mapping,
            file,
            path,
            own,
            keep,
            inode,
            claims,
            sentinel,
            gate,
            opener,
            created,
            publish_lock,
            own_ask: AtomicU32::new(0),
            is_answering: AtomicBool::new(false),
            reclaimed_at: Mutex::new(None),
        };
        if let Some(quota) = config.quota.as_ref().filter(|quota| !quota.is_empty()) {
            ledger.set_quota(quota)?;
        }
        Ok(ledger)
    }

    /// Checks that a missing ledger of `config` could be created, and leaves nothing behind.
    pub fn rehearse_creation(config: &LedgerConfig) -> LedgerResult<()> {
        config.check()?;
        rehearse_creation(config)
    }

    /// Charges `bytes` before they are allocated on the device. An error charges nothing.
    ///
    /// Bytes are rounded up to [`UNIT`]. A charge that the own grant covers costs one compare-and-swap. Otherwise dead slots and unused
    /// grants of others are reclaimed before the request is refused.
    #[inline]
    pub fn charge(&self, bytes: u64) -> LedgerResult<()> {
        self.check_process()?;
        let slot = self.slot_cell()?;
        if let (Some(units), Some(limit)) = (units_of(bytes), self.quota_units())
            && let Some(word) = replace(slot, |word| word.charge(units, limit))
        {
            note_peak(slot, word);
            self.yield_to_pressure(slot);
            return Ok(());
        }
        self.charge_shared(slot, bytes)
    }

    /// Releases `bytes` after they were freed on the device, in the portions in which they were charged: each is rounded up separately.
    ///
    /// Takes no lock. Up to two chunks stay in the own grant; all bytes return to the ledger if others need them.
    #[inline]
    pub fn release(&self, bytes: u64) -> LedgerResult<()> {
        if !self.sentinel.is_owner() {
            return self.release_after_leaving();
        }
        let slot = self.slot_cell()?;
        // With a damaged quota no grant is kept.
        let limit = self.quota_units().unwrap_or(0);
        let given = units_of(bytes).and_then(|units| {
            replace(slot, |word| Some(word.release(units, self.keep)?.within(limit)))
        });
        if given.is_none() {
            // Another thread may have left the ledger meanwhile.
            return match self.sentinel.is_owner() {
                true => Err(LedgerError::Overdrawn { released: bytes, used: self.used() }),
                false => self.release_after_leaving(),
            };
        }
        if self.yield_to_pressure(slot) {
            self.announce_return();
        }
        Ok(())
    }

    /// Returns the unused grant to the ledger, for example before a long pause, and returns its bytes.
    pub fn return_grant(&self) -> LedgerResult<u64> {
        self.check_process()?;
        Ok(drop_grant(self.slot_cell()?) * UNIT)
    }

    /// Releases everything the slot holds. The slot's byte stays locked until the drop or the process's end, so that no thread in the
    /// middle of a call can change the slot of another owner. Later calls fail with [`LedgerError::Closed`], except a release, which has no
    /// effect.
    ///
    /// Returns false if another thread holds or awaits the file lock for over a tenth of a second. The slot's bytes are then reclaimed like
    /// those of a killed process.
    pub fn leave(&self) -> bool {
        // A forked child may inherit the gate locked by a thread that does not exist there.
        if !self.sentinel.is_owner() {
            return true;
        }
        self.sentinel.leave();
        // Waits even if the gate is held, because the process may be ending.
        self.await_own_answer();
        self.gate.without_lock(LEAVE_DEADLINE, || self.empty_slot())
    }

    /// Waits for the listener, whose driver calls must not run into the end of the process.
    fn await_own_answer(&self) {
        let began = Instant::now();
        while self.is_answering.load(Ordering::SeqCst) && began.elapsed() < ANSWER_DEADLINE {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Leaves at normal process exit if the ledger is still open then, because a static is never dropped.
    pub fn leave_at_exit(self: &Arc<Self>) {
        exit::leave_at_exit(self);
    }

    /// Returns the bytes this opener uses, in the ledger's rounding.
    pub fn used(&self) -> u64 {
        u64::from(self.word().used) * UNIT
    }

    /// Returns the bytes this opener may charge without the file lock.
    pub fn granted(&self) -> u64 {
        u64::from(self.word().granted) * UNIT
    }

    /// Returns the limit of the device in bytes.
    pub fn limit(&self) -> LedgerResult<u64> {
        self.check_process()?;
        Ok(u64::from(self.limit_units()?) * UNIT)
    }

    /// Reads the slots of all processes. Takes no lock.
    pub fn snapshot(&self) -> LedgerResult<Snapshot> {
        self.check_process()?;
        snapshot_of(&self.file, &self.path, Some(self.own))
    }

    /// Publishes the bytes of this process's tags, largest first, for viewers. Stores as many as fit.
    ///
    /// Cannot fail and makes no system call. Published tags are for display only.
    pub fn publish_tags<'a>(&self, tags: impl IntoIterator<Item = (&'a str, u64)>) {
        // Concurrent publications would tear the record, and one of them suffices.
        let Some(_publishing) = self.publish_lock.try_lock() else { return };
        let Ok(slot) = self.check_process().and_then(|()| self.slot_cell()) else { return };
        let started = slot.started.load(Ordering::Relaxed);
        let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
        let record = tags::encode(tags, started, u64::try_from(now).unwrap_or(started));
        store_bytes(&slot.tags, &record);
    }

    /// Returns true if a viewer watches the tags: see [`LedgerView::watch`](super::LedgerView::watch).
    pub fn is_watched(&self) -> bool {
        self.check_process().is_ok() && is_locked(&self.file, AT_WATCH).unwrap_or(false)
    }

    /// Returns the number of this opener's slot.
    pub fn slot(&self) -> u32 {
        self.own as u32
    }

    /// Returns true if this opening created the file.
    pub fn created(&self) -> bool {
        self.created
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Holds the file lock like a process that was stopped during a request. For tests.
    #[doc(hidden)]
    pub fn hold_file_lock(&self) -> LedgerResult<FileLockGuard<'_>> {
        self.lock()
    }

    pub(super) fn lock(&self) -> LedgerResult<FileLockGuard<'_>> {
        self.check_process()?;
        let Self { file, path, mapping, sentinel, inode, .. } = self;
        #[cfg(feature = "tracing")]
        let _span = tracing::debug_span!("ledger_file_lock", path = %path.display()).entered();
        let inode = *inode;
        self.gate.lock(Opened { file, path, mapping, sentinel, inode }, Some(self.own))
    }

    pub(super) fn limit_units(&self) -> LedgerResult<u32> {
        check_limit_word(&self.path, self.mapping.header().limit.load(Ordering::Acquire))
    }

    #[inline]
    pub(super) fn slot_cell(&self) -> LedgerResult<&SlotCell> {
        self.mapping.slots().get(self.own).ok_or_else(|| LedgerError::Damaged {
            path: self.path.clone(),
            what: format!("there is no slot {}", self.own),
        })
    }

    fn empty_slot(&self) {
        if let Some(slot) = self.mapping.slots().get(self.own) {
            slot.word.store(0, Ordering::SeqCst);
            clear_quota(&self.mapping, self.own);
            clear_display(slot);
            if self.mapping.header().pressure.load(Ordering::SeqCst) != 0 {
                self.announce_return();
            }
        }
    }

    fn word(&self) -> Word {
        if !self.sentinel.is_owner() {
            return Word::default();
        }
        let slot = self.mapping.slots().get(self.own);
        slot.map_or_else(Word::default, |slot| Word::unpack(slot.word.load(Ordering::Acquire)))
    }

    #[inline]
    pub(super) fn check_process(&self) -> LedgerResult<()> {
        if self.sentinel.is_owner() { Ok(()) } else { Err(self.not_the_owner()) }
    }

    /// Handles a release after the process left, which released everything.
    #[cold]
    fn release_after_leaving(&self) -> LedgerResult<()> {
        match self.not_the_owner() {
            LedgerError::Closed { .. } => Ok(()),
            forked => Err(forked),
        }
    }

    #[cold]
    fn not_the_owner(&self) -> LedgerError {
        match self.sentinel.standing() {
            Standing::Forked => LedgerError::Forked { opener: self.opener },
            _ => LedgerError::Closed { path: self.path.clone() },
        }
    }

    /// Drops the unused grant under pressure, and returns true if there is pressure. Pressure is read after the own word changed: an opener
    /// that sets the pressure and then reads the words either finds the grant or is seen here.
    #[inline]
    fn yield_to_pressure(&self, slot: &SlotCell) -> bool {
        let is_pressed = self.mapping.header().pressure.load(Ordering::SeqCst) != 0;
        if is_pressed {
            drop_grant(slot);
        }
        is_pressed
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        // In a forked child the slot and the locks still belong to the parent.
        if self.sentinel.forked() {
            return;
        }
        self.empty_slot();
        // If this fails, the kernel drops the locks with the files and the mapping right afterwards.
        let _ = unlock(&self.file, slot_offset(self.own));
        self.claims.release(self.inode);
    }
}

/// Opens and maps the file, and registers both for forks.
fn open_registered(config: &LedgerConfig) -> LedgerResult<(OpenFile, Mapping, Registration)> {
    let mut table =
        lock_table().map_err(|error| failed(Path::new("fork"), "pthread_atfork", error))?;
    let opened = open_or_create(config)?;
    let mapping = Mapping::of_file(&opened.file, opened.inode, &opened.header)
        .map_err(|error| failed(&opened.path, "map", error))?;
    let files = opened.claims.files().chain([&opened.file]);
    let registration = table.register(files, mapping.addresses());
    Ok((opened, mapping, registration))
}

/// Changes a slot's word atomically. Returns `None` and changes nothing if `change` does.
#[inline]
pub(super) fn replace(slot: &SlotCell, change: impl Fn(Word) -> Option<Word>) -> Option<Word> {
    let mut raw = slot.word.load(Ordering::Acquire);
    loop {
        let next = change(Word::unpack(raw))?;
        match slot.word.compare_exchange_weak(raw, next.pack(), Ordering::SeqCst, Ordering::Acquire)
        {
            Ok(_) => return Some(next),
            Err(now) => raw = now,
        }
    }
}

/// Removes a slot's unused grant and returns its units.
pub(super) fn drop_grant(slot: &SlotCell) -> u64 {
    let mut raw = slot.word.load(Ordering::SeqCst);
    loop {
        let word = Word::unpack(raw);
        if word.granted == 0 {
            return 0;
        }
        let next = word.without_grant().pack();
        match slot.word.compare_exchange_weak(raw, next, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => return u64::from(word.granted),
            Err(now) => raw = now,
        }
    }
}

#[inline]
pub(super) fn note_peak(slot: &SlotCell, word: Word) {
    let used = u64::from(word.used);
    if slot.peak.load(Ordering::Relaxed) < used {
        slot.peak.fetch_max(used, Ordering::Relaxed);
    }
}

pub(super) fn clear_display(slot: &SlotCell) {
    let words = [&slot.pid, &slot.peak, &slot.started].into_iter();
    for cell in words.chain(&slot.name).chain(&slot.tags) {
        cell.store(0, Ordering::Relaxed);
    }
}

/// Locks a slot without a living owner and claims it. The caller holds the file lock.
fn claim_slot(file: &File, path: &Path, mapping: &Mapping, name: &str) -> LedgerResult<usize> {
    for (index, slot) in mapping.slots().iter().enumerate() {
        let free = try_lock(file, slot_offset(index));
        if !free.map_err(|error| failed(path, "lock", error))? {
            continue;
        }
        slot.word.store(0, Ordering::SeqCst);
        clear_quota(mapping, index);
        clear_display(slot);
        if let Some(answer) = mapping.header().answers.get(index) {
            answer.pending.store(0, Ordering::Relaxed);
            answer.answered.store(0, Ordering::Relaxed);
        }
        let started = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_nanos();
        slot.started.store(u64::try_from(started).unwrap_or(0), Ordering::Relaxed);
        // The last byte stays zero; a character that is cut is displayed as damaged.
        let mut letters = name.bytes().take(SLOT_NAME_SIZE - 1).collect::<Vec<u8>>();
        letters.resize(SLOT_NAME_SIZE, 0);
        store_bytes(&slot.name, &letters);
        slot.pid.store(u64::from(std::process::id()), Ordering::Relaxed);
        return Ok(index);
    }
    Err(LedgerError::NoSlot { path: path.to_owned(), slots: mapping.slots().len() as u32 })
}

fn command_name() -> String {
    std::fs::read_to_string("/proc/self/comm")
        .map_or_else(|_| "unknown".into(), |name| name.trim_end().to_owned())
}

/// Reads the current file. `own` is the slot whose lock belongs to `file` itself, and is therefore invisible to it.
pub(super) fn snapshot_of(file: &File, path: &Path, own: Option<usize>) -> LedgerResult<Snapshot> {
    // The file may have been upgraded since it was opened.
    let header = read_header(path, file)?;
    let size = file_size(header.version, header.slots) as usize;
    let bytes = read_start(file, size).map_err(|error| failed(path, "read", error))?;
    let alive = |index: u32| {
        let index = index as usize;
        // If the kernel refuses the query, no process is declared dead.
        own == Some(index) || is_locked(file, slot_offset(index)).unwrap_or(true)
    };
    Ok(Snapshot::of_bytes(path.to_owned(), header, &bytes, alive))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;

    /// An owner's use stays correct while its grant is repeatedly recalled and renewed.
    #[test]
    fn a_recall_in_the_middle_of_a_take_loses_nothing() {
        const TURNS: u32 = 10_000_000;
        let slot = SlotCell::default();
        let done = AtomicBool::new(false);
        let keep = Keep::of_chunk(u32::MAX);
        std::thread::scope(|scope| {
            let owner = scope.spawn(|| {
                let mut lost = 0;
                for turn in 0..TURNS {
                    let taken = replace(&slot, |word| word.charge(1, u32::MAX)).is_some();
                    let used = Word::unpack(slot.word.load(Ordering::SeqCst)).used;
                    lost += u32::from(used != u32::from(taken));
                    let given = taken && replace(&slot, |word| word.release(1, keep)).is_none();
                    lost += u32::from(given);
                    if lost > 0 {
                        done.store(true, Ordering::SeqCst);
                        return Some(turn);
                    }
                }
                done.store(true, Ordering::SeqCst);
                None
            });
            let mut recalled = 0;
            while !done.load(Ordering::SeqCst) {
                replace(&slot, |word| Some(Word { granted: 8, ..word }));
                recalled += drop_grant(&slot);
            }
            assert_eq!(owner.join().expect("no panic"), None, "the turn at which a unit was lost");
            assert!(recalled > 0);
        });
        assert_eq!(Word::unpack(slot.word.load(Ordering::SeqCst)).used, 0);
    }
}
