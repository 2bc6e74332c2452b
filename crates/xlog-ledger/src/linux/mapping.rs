//! System calls that safe Rust lacks: the shared mapping, the fork sentinel, byte-range locks, futexes, file allocation, the user id.
//!
//! The mapped memory is accessed only as atomics, because other processes write to it at any time. It is mapped only after the file's size
//! was checked; truncating the file later ends its users by SIGBUS. Locks belong to the open file description: two openings in one process
//! exclude each other, and a forked child shares its parent's.

use std::fs::{File, OpenOptions};
use std::io;
use std::mem::{offset_of, size_of};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::claim::Inode;
use crate::format::{
    ANSWER_NUMBER, ANSWER_PENDING, ANSWER_SIZE, ANSWERS, AT_ANSWERS, AT_ASKS, AT_BELL, AT_HOLDER,
    AT_LIMIT, AT_PRESSURE, AT_RETURNS, AT_VERSION, AT_WATCH, FIXED_SIZE, HEADER_SIZE, Header,
    QUOTA_GUARANTEED, QUOTA_LIMIT, QUOTA_NAME, QUOTA_NAME_SIZE, QUOTA_SIZE, SLOT_CACHED, SLOT_NAME,
    SLOT_NAME_SIZE, SLOT_PEAK, SLOT_PID, SLOT_SIZE, SLOT_STARTED, SLOT_TAGS, SLOT_WORD, VERSION_1,
    file_size, u64_at,
};
use crate::tags;

/// The header's words that change at run time, each group on its own cache line.
#[derive(Debug)]
#[repr(C)]
pub(super) struct HeaderCell {
    fixed: [AtomicU64; FIXED_SIZE / 8],
    pub(super) limit: AtomicU64,
    after_limit: [AtomicU64; 7],
    /// The slot number plus one in the low half and the process id in the high half; 0 while the lock is free. For display.
    pub(super) holder: AtomicU64,
    after_holder: [AtomicU64; 7],
    /// If not 0, owners keep no unused grant.
    pub(super) pressure: AtomicU64,
    after_pressure: [AtomicU64; 7],
    watch: [AtomicU64; 8],
    /// Listeners wait on it; it changes with every request to them.
    pub(super) bell: AtomicU32,
    /// The number of asks.
    pub(super) asks: AtomicU32,
    after_asks: [AtomicU64; 7],
    /// Asking processes wait on it; it changes when memory is returned under pressure and when an ask is answered.
    pub(super) returns: AtomicU32,
    after_returns: [AtomicU32; 15],
    /// The answers of the first slots that publish their memory.
    pub(super) answers: [AnswerCell; ANSWERS],
}

/// One listener's answer, for display and for asking processes, which wait for it with a deadline.
#[derive(Debug)]
#[repr(C)]
pub(super) struct AnswerCell {
    /// Units of freed blocks with pending work on streams.
    pub(super) pending: AtomicU32,
    /// Twice the number of the last answered ask, plus 1 if more memory will be returned once work completes.
    pub(super) answered: AtomicU32,
}

/// One slot. Only `word` is authoritative; the rest is for display.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct SlotCell {
    pub(super) word: AtomicU64,
    pub(super) peak: AtomicU64,
    /// In the high half: cached units plus one, 0 if the owner does not publish them.
    pub(super) pid: AtomicU64,
    pub(super) started: AtomicU64,
    pub(super) name: [AtomicU64; SLOT_NAME_SIZE / 8],
    /// The owner's published tags, see `tags`.
    pub(super) tags: [AtomicU64; tags::SIZE / 8],
}

/// The quota of one slot, which changes only under the file lock.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct QuotaCell {
    /// The limit of the owner, packed; 0 if there is none.
    pub(super) limit: AtomicU64,
    /// The units guaranteed to the owner, packed; 0 if there are none.
    pub(super) guaranteed: AtomicU64,
    after_guaranteed: [AtomicU64; 2],
    /// For display.
    pub(super) name: [AtomicU64; QUOTA_NAME_SIZE / 8],
}

const _: () = {
    assert!(offset_of!(QuotaCell, limit) == QUOTA_LIMIT);
    assert!(offset_of!(QuotaCell, guaranteed) == QUOTA_GUARANTEED);
    assert!(offset_of!(QuotaCell, name) == QUOTA_NAME);
    assert!(size_of::<QuotaCell>() == QUOTA_SIZE);
    assert!(offset_of!(HeaderCell, limit) == AT_LIMIT);
    assert!(offset_of!(HeaderCell, holder) == AT_HOLDER);
    assert!(offset_of!(HeaderCell, pressure) == AT_PRESSURE);
    assert!(offset_of!(HeaderCell, watch) == AT_WATCH);
    assert!(offset_of!(HeaderCell, bell) == AT_BELL);
    assert!(offset_of!(HeaderCell, asks) == AT_ASKS);
    assert!(offset_of!(HeaderCell, returns) == AT_RETURNS);
    assert!(offset_of!(HeaderCell, answers) == AT_ANSWERS);
    assert!(size_of::<HeaderCell>() == HEADER_SIZE);
    assert!(size_of::<AnswerCell>() == ANSWER_SIZE);
    assert!(offset_of!(AnswerCell, pending) == ANSWER_PENDING);
    assert!(offset_of!(AnswerCell, answered) == ANSWER_NUMBER);
    assert!(offset_of!(SlotCell, word) == SLOT_WORD);
    assert!(offset_of!(SlotCell, peak) == SLOT_PEAK);
    assert!(offset_of!(SlotCell, pid) == SLOT_PID);
    assert!(SLOT_CACHED == SLOT_PID + 4);
    assert!(offset_of!(SlotCell, started) == SLOT_STARTED);
    assert!(offset_of!(SlotCell, name) == SLOT_NAME);
    assert!(offset_of!(SlotCell, tags) == SLOT_TAGS);
    assert!(size_of::<SlotCell>() == SLOT_SIZE);
};

/// Stores bytes for display.
pub(super) fn store_bytes(words: &[AtomicU64], bytes: &[u8]) {
    for (part, word) in words.iter().enumerate() {
        word.store(u64_at(bytes, part * 8), Ordering::Relaxed);
    }
}

/// The sentinel's value in the process that made it; 0 after a fork.
const OWNER: u64 = 1;
const LEFT: u64 = 2;

/// Pages mapped by this process, unmapped on drop.
#[derive(Debug)]
struct Pages {
    start: NonNull<libc::c_void>,
    length: usize,
}

// SAFETY: the pages belong to the process, not to a thread, and are accessed only through shared references to atomics.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Maps `length` bytes: of `file`, shared with other processes, or private zeroes without a file.
    fn map(length: usize, file: Option<&File>) -> io::Result<Self> {
        Self::map_as(length, file, libc::PROT_READ | libc::PROT_WRITE)
    }

    fn map_as(length: usize, file: Option<&File>, protection: libc::c_int) -> io::Result<Self> {
        let (flags, descriptor) = match file {
            Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        // SAFETY: a fresh mapping at an address the kernel chooses replaces nothing of this process.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), length, protection, flags, descriptor, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, length })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: start and length are those of a mapping this value owns; references into it borrow the value.
        unsafe { libc::munmap(self.start.as_ptr(), self.length) };
    }
}

#[derive(Debug)]
pub(super) struct Mapping {
    pages: Pages,
    slots: usize,
    /// Equals `slots`, or 0 in a version 1 file.
    quotas: usize,
}

/// Opens `file` a second time; `None` without `/proc`. `inode` is the file's identity when it was first opened. Fails if the descriptor
/// names another file now.
fn reopen(file: &File, inode: Inode) -> io::Result<Option<File>> {
    let path = format!("/proc/thread-self/fd/{}", file.as_raw_fd());
    let again = OpenOptions::new().read(true).write(true).open(path).ok();
    for file in again.iter().chain([file]) {
        if Inode::of_file(file)? != inode {
            return Err(io::Error::other("other code has closed the descriptor of the ledger"));
        }
    }
    Ok(again)
}

impl Mapping {
    /// Maps `file`, whose inode, header and length the caller has checked.
    ///
    /// The mapping uses its own open file description. While another process reads a killed process's files in `/proc`, the mapping
    /// survives it and would keep the lock of its slot.
    pub(super) fn of_file(file: &File, inode: Inode, header: &Header) -> io::Result<Self> {
        let slots = header.slots as usize;
        let quotas = if header.version == VERSION_1 { 0 } else { slots };
        let length = file_size(header.version, header.slots) as usize;
        let apart = reopen(file, inode)?;
        let pages = Pages::map(length, Some(apart.as_ref().unwrap_or(file)))?;
        Ok(Self { pages, slots, quotas })
    }

    /// The size of the mapped file.
    pub(super) fn file_size(&self) -> u64 {
        self.pages.length as u64
    }

    /// The file's current version. A file mapped as version 1 may have been upgraded since.
    pub(super) fn version_now(&self) -> u32 {
        let word = self.header().fixed.get(AT_VERSION / 8);
        word.map_or(0, |word| (word.load(Ordering::SeqCst) & u64::from(u32::MAX)) as u32)
    }

    pub(super) fn addresses(&self) -> Range<usize> {
        let start = self.pages.start.addr().get();
        start..start + self.pages.length
    }

    pub(super) fn header(&self) -> &HeaderCell {
        // SAFETY: the mapping is page aligned, at least HEADER_SIZE long, and lives as long as self. Every bit pattern is a valid atomic,
        // and this process accesses the memory only through atomics.
        unsafe { self.pages.start.cast::<HeaderCell>().as_ref() }
    }

    pub(super) fn slots(&self) -> &[SlotCell] {
        // SAFETY: as for the header; `of_file` mapped `slots` cells behind the header, whose size keeps them aligned.
        unsafe {
            let first = self.pages.start.cast::<u8>().add(HEADER_SIZE).cast::<SlotCell>();
            std::slice::from_raw_parts(first.as_ptr(), self.slots)
        }
    }
}

impl Mapping {
    /// The quotas of all slots; empty in a version 1 file.
    #[inline]
    pub(super) fn quotas(&self) -> &[QuotaCell] {
        // SAFETY: as for the slots; `of_file` mapped `quotas` cells behind them, and all sizes are multiples of eight.
        unsafe {
            let start = HEADER_SIZE + self.slots * SLOT_SIZE;
            let first = self.pages.start.cast::<u8>().add(start).cast::<QuotaCell>();
            std::slice::from_raw_parts(first.as_ptr(), self.quotas)
        }
    }
}

/// The relation of a process to an opening.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Standing {
    /// The process opened it and takes part.
    Owner,
    /// The process opened it and has released its slot.
    Left,
    /// The process is a forked child of the opener.
    Forked,
}

/// Distinguishes the process that made it from its forked children without a system call: the kernel zeroes this page in a child.
#[derive(Debug)]
pub(super) struct ForkSentinel {
    page: Pages,
}

impl ForkSentinel {
    /// Makes a sentinel of this process. Needs Linux 4.14.
    pub(super) fn new() -> io::Result<Self> {
        let page = Pages::map(HEADER_SIZE, None)?;
        // SAFETY: the advice concerns only the private pages just mapped.
        let refused =
            unsafe { libc::madvise(page.start.as_ptr(), page.length, libc::MADV_WIPEONFORK) };
        if refused != 0 {
            return Err(io::Error::last_os_error());
        }
        let sentinel = Self { page };
        sentinel.cell().store(OWNER, Ordering::Relaxed);
        Ok(sentinel)
    }

    /// True in a forked child of the process that made it.
    #[inline]
    pub(super) fn forked(&self) -> bool {
        self.cell().load(Ordering::Relaxed) == 0
    }

    /// True if this process made it and has not left.
    #[inline]
    pub(super) fn is_owner(&self) -> bool {
        self.cell().load(Ordering::Relaxed) == OWNER
    }

    /// The relation of this process to the opening.
    pub(super) fn standing(&self) -> Standing {
        match self.cell().load(Ordering::Relaxed) {
            0 => Standing::Forked,
            OWNER => Standing::Owner,
            _ => Standing::Left,
        }
    }

    /// Marks the process that made it as having left.
    pub(super) fn leave(&self) {
        self.cell().store(LEFT, Ordering::SeqCst);
    }

    fn cell(&self) -> &AtomicU64 {
        // SAFETY: the page is mapped, aligned, lives as long as self, and is accessed only through this atomic.
        unsafe { self.page.start.cast::<AtomicU64>().as_ref() }
    }
}

fn range_of(kind: libc::c_int, offset: usize, length: u64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: offset as libc::off_t,
        l_len: length as libc::off_t,
        l_pid: 0,
    }
}

/// Locks one byte for this open file description. Returns false if another one holds it.
pub(super) fn try_lock(file: &File, offset: usize) -> io::Result<bool> {
    try_lock_as(libc::F_WRLCK, file, offset)
}

/// Locks a byte in shared mode. Works on a file opened for reading.
pub(super) fn try_share(file: &File, offset: usize) -> io::Result<bool> {
    try_lock_as(libc::F_RDLCK, file, offset)
}

fn try_lock_as(kind: libc::c_int, file: &File, offset: usize) -> io::Result<bool> {
    let range = range_of(kind, offset, 1);
    // SAFETY: the descriptor is open as long as `file` is borrowed; the kernel only reads the range.
    let refused = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) };
    if refused == 0 {
        return Ok(true);
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EAGAIN | libc::EACCES) => Ok(false),
        _ => Err(error),
    }
}

/// Unlocks one byte for this open file description.
pub(super) fn unlock(file: &File, offset: usize) -> io::Result<()> {
    let range = range_of(libc::F_UNLCK, offset, 1);
    // SAFETY: as for try_lock.
    let refused = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) };
    if refused == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// True if another open file description has locked the byte. Works on a file opened for reading.
pub(super) fn is_locked(file: &File, offset: usize) -> io::Result<bool> {
    is_any_locked(file, offset, 1)
}

/// True if another open file description has locked a byte of this range. False for an empty range.
pub(super) fn is_any_locked(file: &File, offset: usize, length: u64) -> io::Result<bool> {
    if length == 0 {
        return Ok(false);
    }
    let mut range = range_of(libc::F_WRLCK, offset, length);
    // SAFETY: the descriptor is open as long as `file` is borrowed; the kernel writes to the range, which is ours.
    let refused = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut range) };
    if refused != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(libc::c_int::from(range.l_type) != libc::F_UNLCK)
}

/// Makes `systemd-tmpfiles` skip a directory while it is open here. Best effort: a cleaner that is already running is not stopped.
pub(super) fn keep_from_cleaners(directory: &File) {
    // SAFETY: the descriptor is open as long as `directory` is borrowed.
    unsafe { libc::flock(directory.as_raw_fd(), libc::LOCK_SH | libc::LOCK_NB) };
}

/// Waits until a thread of any process wakes the waiters of `word`. Returns at once if its value is not `seen`, and at the latest after
/// `timeout`.
pub(super) fn wait_on(word: &AtomicU32, seen: u32, timeout: Duration) {
    let timeout = libc::timespec {
        tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: timeout.subsec_nanos() as libc::c_long,
    };
    // SAFETY: the word is mapped as long as it is borrowed, and the kernel only reads it and the timeout. The caller checks again after
    // every outcome.
    unsafe {
        libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, seen, &raw const timeout);
    }
}

/// Wakes all waiters of `word`.
pub(super) fn wake(word: &AtomicU32) {
    // SAFETY: the kernel does not access the word; its address identifies the waiters.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, libc::c_int::MAX) };
}

/// Wakes the listeners of a ledger opened for reading. Failures are ignored, because listeners also check periodically.
pub(super) fn wake_listeners_of(file: &File) {
    let Ok(pages) = Pages::map_as(HEADER_SIZE, Some(file), libc::PROT_READ) else { return };
    let bell = pages.start.as_ptr().wrapping_byte_add(AT_BELL);
    // SAFETY: the address is inside the mapping, which lives until the end of this function; the kernel does not access the word.
    unsafe { libc::syscall(libc::SYS_futex, bell, libc::FUTEX_WAKE, libc::c_int::MAX) };
}

/// Allocates every page of a file, so that a write to a mapped page needs no space.
pub(super) fn fill_holes(file: &File, length: u64) -> io::Result<()> {
    // SAFETY: the descriptor is open as long as `file` is borrowed.
    let refused = unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, length as libc::off_t) };
    if refused == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    // A file system without that call is accepted if the file has no holes.
    let is_unknown = matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS));
    if is_unknown && !has_holes(file, length) { Ok(()) } else { Err(error) }
}

fn has_holes(file: &File, length: u64) -> bool {
    // SAFETY: the descriptor is open as long as `file` is borrowed; its position is not used otherwise.
    let hole = unsafe { libc::lseek(file.as_raw_fd(), 0, libc::SEEK_HOLE) };
    // A file system without this query reports no holes.
    u64::try_from(hole).is_ok_and(|hole| hole < length)
}

/// The effective user id.
pub(super) fn effective_user() -> u32 {
    // SAFETY: the call has no arguments and cannot fail.
    unsafe { libc::geteuid() }
}
