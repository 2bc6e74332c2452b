//! The calls that safe Rust does not have: the shared mapping, the fork sentinel, byte-range locks, room in a file, the user id.
//!
//! The mapped memory is only ever seen as atomics, since other processes write to it at any time. It is mapped
//! only after the file's size was checked; truncating the file later ends its users by SIGBUS. Locks belong
//! to the open file description: two openings of a file in one process exclude each other, a forked child shares.

use std::fs::File;
use std::io;
use std::mem::{offset_of, size_of};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::format::{
    AT_HOLDER, AT_LIMIT, AT_PRESSURE, FIXED_SIZE, HEADER_SIZE, SLOT_NAME, SLOT_NAME_SIZE,
    SLOT_PEAK, SLOT_PID, SLOT_SIZE, SLOT_STARTED, SLOT_TAGS, SLOT_WORD,
};
use crate::tags;

/// The words of the header that change at run time, each on a cache line of its own.
#[derive(Debug)]
#[repr(C)]
pub(super) struct HeaderCell {
    fixed: [AtomicU64; FIXED_SIZE / 8],
    pub(super) limit: AtomicU64,
    after_limit: [AtomicU64; 7],
    /// Slot number plus one in the low half, process id in the high half, 0 when the lock is free. For display.
    pub(super) holder: AtomicU64,
    after_holder: [AtomicU64; 7],
    /// Not 0: owners keep no unused grant.
    pub(super) pressure: AtomicU64,
}

/// One slot. `word` is the truth; the rest is for display.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct SlotCell {
    pub(super) word: AtomicU64,
    pub(super) peak: AtomicU64,
    pub(super) pid: AtomicU64,
    pub(super) started: AtomicU64,
    pub(super) name: [AtomicU64; SLOT_NAME_SIZE / 8],
    /// The owner's record of its tags: see `tags`.
    pub(super) tags: [AtomicU64; tags::SIZE / 8],
}

const _: () = {
    assert!(offset_of!(HeaderCell, limit) == AT_LIMIT);
    assert!(offset_of!(HeaderCell, holder) == AT_HOLDER);
    assert!(offset_of!(HeaderCell, pressure) == AT_PRESSURE);
    assert!(size_of::<HeaderCell>() <= HEADER_SIZE);
    assert!(offset_of!(SlotCell, word) == SLOT_WORD);
    assert!(offset_of!(SlotCell, peak) == SLOT_PEAK);
    assert!(offset_of!(SlotCell, pid) == SLOT_PID);
    assert!(offset_of!(SlotCell, started) == SLOT_STARTED);
    assert!(offset_of!(SlotCell, name) == SLOT_NAME);
    assert!(offset_of!(SlotCell, tags) == SLOT_TAGS);
    assert!(size_of::<SlotCell>() == SLOT_SIZE);
};

/// The value of the sentinel's cell; 0 after a fork.
const OWNER: u64 = 1;
const LEFT: u64 = 2;

/// Pages of this process, returned to the system on drop.
#[derive(Debug)]
struct Pages {
    start: NonNull<libc::c_void>,
    length: usize,
}

// SAFETY: the pages belong to the process, not to a thread, and are reached only through shared references to
// atomics.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Maps `length` bytes, of `file` shared with other processes, or else private zeroes.
    fn map(length: usize, file: Option<&File>) -> io::Result<Self> {
        let (flags, descriptor) = match file {
            Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
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

/// A ledger file in memory.
#[derive(Debug)]
pub(super) struct Mapping {
    pages: Pages,
    slots: usize,
}

impl Mapping {
    /// Maps the header and `slots` slots of `file`, which the caller found to be that long.
    pub(super) fn of_file(file: &File, slots: u32) -> io::Result<Self> {
        let slots = slots as usize;
        let length = HEADER_SIZE + slots * SLOT_SIZE;
        Ok(Self { pages: Pages::map(length, Some(file))?, slots })
    }

    /// The mapped addresses.
    pub(super) fn addresses(&self) -> Range<usize> {
        let start = self.pages.start.addr().get();
        start..start + self.pages.length
    }

    /// The header's words.
    pub(super) fn header(&self) -> &HeaderCell {
        // SAFETY: the mapping is page aligned, at least HEADER_SIZE long, and lives as long as self. Every bit
        // pattern is a valid atomic, and this process sees the memory through atomics alone.
        unsafe { self.pages.start.cast::<HeaderCell>().as_ref() }
    }

    /// All slots.
    pub(super) fn slots(&self) -> &[SlotCell] {
        // SAFETY: as for the header; `of_file` mapped `slots` cells behind the header, whose size keeps them aligned.
        unsafe {
            let first = self.pages.start.cast::<u8>().add(HEADER_SIZE).cast::<SlotCell>();
            std::slice::from_raw_parts(first.as_ptr(), self.slots)
        }
    }
}

/// The relation of a process to an opening.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Standing {
    /// It opened it and takes part.
    Owner,
    /// It opened it and has given its slot back.
    Left,
    /// It is a forked child of the process that opened it.
    Forked,
}

/// Tells the process that made it from its forked children, without a system call: the kernel hands a child this
/// page zeroed.
#[derive(Debug)]
pub(super) struct ForkSentinel {
    page: Pages,
}

impl ForkSentinel {
    /// A sentinel of this process. Needs Linux 4.14.
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

    /// Whether this is a forked child of the process that made it.
    #[inline]
    pub(super) fn forked(&self) -> bool {
        self.cell().load(Ordering::Relaxed) == 0
    }

    /// Whether this process made it and has not left.
    #[inline]
    pub(super) fn is_owner(&self) -> bool {
        self.cell().load(Ordering::Relaxed) == OWNER
    }

    /// The standing of this process, in full.
    pub(super) fn standing(&self) -> Standing {
        match self.cell().load(Ordering::Relaxed) {
            0 => Standing::Forked,
            OWNER => Standing::Owner,
            _ => Standing::Left,
        }
    }

    /// Ends the part of the process that made it.
    pub(super) fn leave(&self) {
        self.cell().store(LEFT, Ordering::SeqCst);
    }

    fn cell(&self) -> &AtomicU64 {
        // SAFETY: the page is mapped, aligned, lives as long as self, and is seen through this atomic alone.
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

/// Locks one byte for this open file description. `false` if another one has it.
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

/// Whether another open file description has one byte locked. Works on a file opened for reading.
pub(super) fn is_locked(file: &File, offset: usize) -> io::Result<bool> {
    is_any_locked(file, offset, 1)
}

/// Whether another open file description has a byte of this range locked. An empty range has none.
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

/// Makes `systemd-tmpfiles` pass a directory over as long as it is open here. Best effort: one that cleans it right now wins.
pub(super) fn keep_from_cleaners(directory: &File) {
    // SAFETY: the descriptor is open as long as `directory` is borrowed.
    unsafe { libc::flock(directory.as_raw_fd(), libc::LOCK_SH | libc::LOCK_NB) };
}

/// Gives every page of a file its room, so that writing to a mapped page needs none.
pub(super) fn fill_holes(file: &File, length: u64) -> io::Result<()> {
    // SAFETY: the descriptor is open as long as `file` is borrowed.
    let refused = unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, length as libc::off_t) };
    if refused == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    // Without that call, a file without holes is as good.
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
