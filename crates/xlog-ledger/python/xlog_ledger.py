"""Takes part in a device's ledger from Python, by the file format alone (docs/ledger-format.md).

Standard library only; 64-bit little-endian Linux, CPython 3.9 or newer.

    with xlog_ledger.Ledger(xlog_ledger.default_path("GPU-...")) as ledger:
        ledger.take(32 << 20)   # before the memory is taken from the device
        ledger.give(32 << 20)   # after it was returned

Python cannot compare-and-swap in a mapping. This client therefore never holds an unused grant: the format says that
a word without one is written by nobody but its owner while the owner lives. A plain store of eight aligned bytes is
then enough, and a mutex keeps the threads of the process apart. Every take asks for the file lock; no give does.
For the same reason it cannot take away what others were granted and do not use: where that is in its way it sets
the pressure word, on which owners hand it back at their next call, and waits for up to `patience` seconds.
"""

import atexit
import ctypes
import errno
import fcntl
import mmap
import os
import pwd
import re
import stat
import struct
import threading
import time
import weakref

UNIT = 256
MAX_UNITS = 0xFFFFFFFF

_MAGIC = b"XLOGLDGR"
_VERSION = 1
_HEADER_SIZE = 4096
_SLOT_SIZE = 128
_FIXED = struct.Struct("<8sIIQIIII64s16x")  # the 120 bytes that the checksum covers
_AT_LIMIT, _AT_HOLDER, _AT_PRESSURE = 128, 192, 256
_SLOT_PEAK, _SLOT_PID, _SLOT_STARTED, _SLOT_NAME = 8, 16, 24, 32
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_FLOCK = struct.Struct("@hhqqi4x")  # struct flock; the process id must be 0
_IN_PLACE = {0xEF53, 0x58465342, 0x01021994, 0x858458F6, 0x794C7630}  # ext2 to ext4, XFS, tmpfs, ramfs, overlayfs


class LedgerError(Exception):
    """Something about the ledger; the message names the file and what to do."""


class Full(LedgerError):
    """The bytes do not fit. Nothing was counted."""

    def __init__(self, path, requested, available, limit):
        super().__init__(f"{requested} bytes do not fit: {available} of {limit} available ({path})")
        self.requested, self.available, self.limit = requested, available, limit


class Busy(LedgerError):
    """The file lock was not free within the deadline. Nothing was counted."""

    def __init__(self, path, pid):
        holder = f"process {pid}" if pid else "an unknown process"
        super().__init__(f"{path}: file lock held by {holder}; see whether that process is stopped")
        self.pid = pid


def default_directory():
    """The directory of this user's ledgers: the same in every kind of login, whatever the environment says."""
    user = os.geteuid()
    try:
        home = pwd.getpwuid(user).pw_dir
        facts = os.stat(home)
        own = os.path.isabs(home) and stat.S_ISDIR(facts.st_mode) and facts.st_uid == user
        if own and os.access(home, os.W_OK | os.X_OK, effective_ids=True) and _file_system(home) in _IN_PLACE:
            return os.path.join(home, ".local/state/xlog/ledger")
    except (KeyError, OSError):
        pass
    return f"/tmp/xlog-ledger-{user}"


def default_path(key):
    """The ledger of a device, by its key (a GPU's UUID), in the default directory."""
    return os.path.join(default_directory(), f"{key}.ledger")


def _file_system(path):
    """The kind of a file system, as statfs(2) names it in its first word."""
    facts = ctypes.create_string_buffer(512)
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), facts) != 0:
        raise OSError(ctypes.get_errno(), "statfs failed", path)
    return struct.unpack_from("@l", facts)[0]


_open_ledgers = weakref.WeakSet()
_opening = threading.Lock()  # held while a ledger is opened and while the process forks


def _let_go_in_child():
    """A forked child would keep its parent's locks: it closes what holds them."""
    for ledger in list(_open_ledgers):
        ledger._release()
    _opening.release()


def _leave_all():
    """At the normal end of the process: a slot that stays behind would be shown as a dead process's."""
    for ledger in list(_open_ledgers):
        # A thread that still waits inside a call does not hold up the end.
        if ledger._gate.acquire(timeout=0.1):
            ledger._leave()


atexit.register(_leave_all)
os.register_at_fork(before=_opening.acquire, after_in_parent=_opening.release, after_in_child=_let_go_in_child)


def _checksum(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return value


def _units(count):
    if not isinstance(count, int) or count < 0:
        raise ValueError(f"{count!r} bytes is not accepted; expected an int of 0 or more")
    return -(-count // UNIT)


def _limit_word(units):
    return units | (units ^ MAX_UNITS) << 32


def _new_file(key, slots, limit_units):
    size = _HEADER_SIZE + slots * _SLOT_SIZE
    fixed = _FIXED.pack(
        _MAGIC, _VERSION, _HEADER_SIZE, size, slots, _SLOT_SIZE, UNIT, len(key), key.encode()
    )
    head = fixed + struct.pack("<QQ", _checksum(fixed), _limit_word(limit_units))
    return head.ljust(size, b"\0")


def _check_header(path, head, size):
    """The device key and the number of slots of a file, or what is wrong with it."""
    remove = "stop the processes that use it, then remove it"
    if size < _HEADER_SIZE or len(head) < _AT_LIMIT + 8:
        raise LedgerError(f"{path}: truncated, {size} bytes; {remove}")
    magic, version, header_size, file_size, slots, slot_size, unit, length, key = _FIXED.unpack(head[:120])
    if magic != _MAGIC:
        raise LedgerError(f"{path}: not a valid ledger (it does not begin with XLOGLDGR); {remove}")
    if version > _VERSION:
        raise LedgerError(f"{path}: format version {version}, this client knows {_VERSION}; update it")
    (checksum,) = struct.unpack("<Q", head[120:128])
    sizes = (version, header_size, slot_size, unit) == (_VERSION, _HEADER_SIZE, _SLOT_SIZE, UNIT)
    if checksum != _checksum(head[:120]) or not sizes or not 1 <= slots <= 4096 or length > 64:
        raise LedgerError(f"{path}: not a valid ledger (damaged header); {remove}")
    if file_size != _HEADER_SIZE + slots * _SLOT_SIZE or size != file_size:
        raise LedgerError(f"{path}: {size} bytes of {file_size}; {remove}")
    return key[:length].decode("ascii", "replace"), slots


class Ledger:
    """One opening of a ledger file, with a slot of its own. Close it, or use it in a `with` statement."""

    def __init__(self, path, *, limit=None, slots=256, deadline=2.0, patience=0.1, shared=False, name=None):
        """Joins the ledger at `path` (DIRECTORY/KEY.ledger).

        limit: bytes; creates the file if it is missing. The limit of an existing file rules.
        deadline: seconds for which the file lock is tried.
        patience: seconds for which a request waits for unused grants of others.
        shared: the file belongs to a group (mode 0660) and not to this user alone (0600).
        """
        self.path = os.path.abspath(path)
        self._deadline, self._patience = deadline, patience
        self._gate = threading.Lock()  # one thread at a time asks for the file lock
        self._mutex = threading.Lock()  # for the own word, never held over a wait
        self._opener = os.getpid()
        self._fd = -1
        self._claims = None
        self._slot = None
        directory, base = os.path.split(self.path)
        key = base[: -len(".ledger")] if base.endswith(".ledger") else ""
        if not _KEY.match(key):
            raise ValueError(f"{path!r} is not accepted; expected DIRECTORY/KEY.ledger")
        if limit is not None and not 1 <= limit // UNIT <= MAX_UNITS:
            raise ValueError(f"limit {limit} is not accepted; expected {UNIT} to {MAX_UNITS * UNIT} bytes")
        if not 1 <= slots <= 4096:
            raise ValueError(f"slots {slots} is not accepted; expected 1 to 4096")
        try:
            with _opening:
                _open_ledgers.add(self)
                self._claims = _Claims(directory, base, key)
                self._open(directory, key, limit, slots, shared)
                self._map = mmap.mmap(self._fd, _HEADER_SIZE + self._slots * _SLOT_SIZE)
                self._words = memoryview(self._map).cast("Q")
            self._limit()
            with self._file_lock():
                self._claim(name)
        except BaseException:
            self._release()
            raise

    def _open(self, directory, key, limit, slots, shared):
        """Opens or creates the file, and claims it: see "The claims" in docs/ledger-format.md."""
        displaced = False
        if limit is not None and directory == default_directory():
            os.makedirs(directory, 0o700, exist_ok=True)
            self._claims.reopen()
        for attempt in range(16):
            try:
                self._open_existing(key, shared)
            except FileNotFoundError:
                displaced = self._claims.held_for_another(None)
                if displaced:
                    time.sleep(0.0001 * attempt)
                elif limit is None:
                    raise LedgerError(f"{self.path}: no such ledger; give a limit to create it") from None
                else:
                    self._create(directory, key, limit, slots, shared)
                continue
            self._claims.hold(self._inode)
            displaced = self._claims.held_for_another(self._inode)
            if not displaced and _inode_at(self.path) == self._inode:
                return
            self._claims.release(self._inode)
            os.close(self._fd)
            self._fd = -1
            time.sleep(0.0001 * attempt)
        if displaced:
            raise LedgerError(
                f"{self.path}: the ledger that is in use by living processes is another file; move that file back, or end them:"
                f" grep -l {key}.ledger /proc/[0-9]*/maps names them"
            )
        raise LedgerError(f"{self.path}: removed as often as it was created")

    def _open_existing(self, key, shared):
        self._fd = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        facts = os.fstat(self._fd)
        self._inode = (facts.st_dev, facts.st_ino)
        if not stat.S_ISREG(facts.st_mode):
            raise LedgerError(f"{self.path}: is not a regular file; remove it or choose another directory")
        if not shared and facts.st_uid != os.geteuid():
            raise LedgerError(f"{self.path}: belongs to user {facts.st_uid}, expected {os.geteuid()}")
        if facts.st_mode & (0o002 if shared else 0o022):
            raise LedgerError(f"{self.path}: mode {facts.st_mode & 0o7777:04o} lets others write; use chmod")
        found, self._slots = _check_header(self.path, os.pread(self._fd, _HEADER_SIZE, 0), facts.st_size)
        if found != key:
            raise LedgerError(f"{self.path}: is the ledger of device {found!r}, expected {key!r}; remove it")
        if os.lseek(self._fd, 0, os.SEEK_HOLE) < facts.st_size:
            try:
                os.posix_fallocate(self._fd, 0, facts.st_size)
            except OSError as error:
                raise LedgerError(f"{self.path}: has holes that cannot be filled: {error}; free some space") from error

    def _create(self, directory, key, limit, slots, shared):
        """Whole or not at all: written under another name, then linked, which never replaces."""
        draft = os.path.join(directory, f".{key}.ledger.{os.getpid()}.{time.time_ns():x}.tmp")
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "wb") as file:
                os.fchmod(fd, 0o660 if shared else 0o600)
                file.write(_new_file(key, slots, limit // UNIT))
            try:
                os.link(draft, self.path)
            except FileExistsError:
                pass
        finally:
            os.unlink(draft)

    # Locks: one byte each, of this open file description.

    def _set_lock(self, kind, offset):
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0))

    def _try_lock(self, offset):
        try:
            self._set_lock(fcntl.F_WRLCK, offset)
            return True
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise

    def _file_lock(self):
        return _FileLock(self)

    # Words. An index is an offset over eight.

    def _word_at(self, slot):
        return (_HEADER_SIZE + slot * _SLOT_SIZE) // 8

    def _limit(self):
        raw = self._words[_AT_LIMIT // 8]
        units = raw & MAX_UNITS
        if units == 0 or raw != _limit_word(units):
            raise LedgerError(f"{self.path}: not a valid ledger (limit word {raw:016x} is no limit)")
        return units

    def _others(self):
        """Units that the other slots hold, and how many of these are granted and not used."""
        total = granted = 0
        for slot in range(self._slots):
            word = self._words[self._word_at(slot)]
            if word and slot != self._slot:
                total += (word & MAX_UNITS) + (word >> 32)
                granted += word >> 32
        return total, granted

    def _clear(self, slot):
        at = self._word_at(slot)
        self._words[at] = 0
        for index in range(at + 1, at + 8):
            self._words[index] = 0

    def _claim(self, name):
        for slot in range(self._slots):
            if not self._try_lock(_HEADER_SIZE + slot * _SLOT_SIZE):
                continue
            self._clear(slot)
            at = _HEADER_SIZE + slot * _SLOT_SIZE
            text = (name or "python").encode()[:31].ljust(32, b"\0")
            self._map[at + _SLOT_NAME : at + _SLOT_NAME + 32] = text
            self._words[(at + _SLOT_STARTED) // 8] = time.time_ns()
            self._words[(at + _SLOT_PID) // 8] = os.getpid()
            self._slot = slot
            return
        raise LedgerError(f"{self.path}: all {self._slots} slots are in use")

    def _reclaim(self):
        """Empties the slots of the dead: those whose lock can be had. Under the file lock."""
        for slot in range(self._slots):
            at = _HEADER_SIZE + slot * _SLOT_SIZE
            if slot != self._slot and self._words[at // 8] and self._try_lock(at):
                self._clear(slot)
                self._set_lock(fcntl.F_UNLCK, at)

    def _check(self):
        if os.getpid() != self._opener:
            raise LedgerError(f"this ledger belongs to process {self._opener}, which forked; open one in the child")
        if self._slot is None:
            raise LedgerError(f"{self.path}: this ledger is closed")

    # What users call.

    def take(self, count):
        """Counts `count` bytes as used, or raises Full or Busy and counts nothing."""
        units = _units(count)
        patience = None
        with self._gate:
            self._check()
            while True:
                with self._file_lock():
                    limit = self._limit()
                    if self._grow(units, limit, self._others()[0]):
                        return
                    self._reclaim()
                    total, granted = self._others()
                    if self._grow(units, limit, total):
                        return
                    self._words[_AT_PRESSURE // 8] = 1
                    available = max(limit - total - self._words[self._word_at(self._slot)], 0)
                now = time.monotonic()
                patience = now + self._patience if patience is None else patience
                if units > available + granted or now >= patience:
                    raise Full(self.path, count, available * UNIT, limit * UNIT)
                time.sleep(0.0005)

    def _grow(self, units, limit, others):
        """Takes `units` into use if they fit beside the others. Under the file lock."""
        own = self._word_at(self._slot)
        with self._mutex:
            used = self._words[own] + units
            if used + others > limit:
                return False
            self._words[own] = used
        peak = own + _SLOT_PEAK // 8
        self._words[peak] = max(self._words[peak], used)
        if limit - others - used >= limit // 8:
            self._words[_AT_PRESSURE // 8] = 0
        return True

    def give(self, count):
        """Counts `count` bytes as no longer used. Takes no lock."""
        units = _units(count)
        with self._mutex:
            self._check()
            own = self._word_at(self._slot)
            used = self._words[own]
            if units > used:
                raise ValueError(f"{count} bytes given back of {used * UNIT} in use; give what was taken, once")
            self._words[own] = used - units

    @property
    def used(self):
        """Bytes this opener uses."""
        with self._mutex:
            self._check()
            return self._words[self._word_at(self._slot)] * UNIT

    @property
    def limit(self):
        """The limit of the device in bytes."""
        with self._mutex:
            self._check()
            return self._limit() * UNIT

    def hold_file_lock(self):
        """Holds the file lock in a `with` statement, as a process does that is stopped in the middle. For tests."""
        self._check()
        return self._file_lock()

    def close(self):
        """Gives everything back. In a forked child it only lets go of the file."""
        with self._gate:
            self._leave()

    def _leave(self):
        with self._mutex:
            if self._slot is not None and os.getpid() == self._opener:
                self._clear(self._slot)
                self._set_lock(fcntl.F_UNLCK, _HEADER_SIZE + self._slot * _SLOT_SIZE)
            self._release()

    def _release(self):
        self._slot = None
        words, self._words = getattr(self, "_words", None), None
        if words is not None:
            words.release()
        if getattr(self, "_map", None) is not None:
            self._map.close()
            self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._claims is not None:
            self._claims.close()
            self._claims = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _inode_at(path):
    """Device and number of what a path names; None where it names nothing that can be seen."""
    try:
        facts = os.lstat(path)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


class _Claims:
    """Shared locks on directories that say in which file a living process counts an account."""

    def __init__(self, directory, base, key):
        self._directory, self._anchors = directory, []
        path = os.path.join(os.path.realpath(directory), base)
        names = [os.fsencode(path)]
        if directory == default_directory():
            names.append(f"default {os.geteuid()} {key}".encode())
        self._accounts = [_checksum(name) >> 33 << 32 for name in names]
        self.reopen()

    def reopen(self):
        self.close()
        for place in (self._directory, "/"):
            try:
                anchor = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            except OSError:
                if place == "/":
                    continue
                raise
            self._anchors.append(anchor)
            if place != "/":
                try:
                    fcntl.flock(anchor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # systemd-tmpfiles then passes the directory over
                except OSError:
                    pass

    def _each(self):
        return ((anchor, account) for anchor in self._anchors for account in self._accounts)

    def hold(self, inode):
        for anchor, account in self._each():
            at = account | _inode_offset(inode)
            fcntl.fcntl(anchor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, at, 1, 0))

    def release(self, inode):
        for anchor, account in self._each():
            at = account | _inode_offset(inode)
            fcntl.fcntl(anchor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, at, 1, 0))

    def held_for_another(self, inode):
        """Whether a living process claims an account for another file than this one; for any file, without one."""
        end = 1 << 32
        own = None if inode is None else _inode_offset(inode)
        ranges = [(0, end)] if own is None else [(0, own), (own + 1, end)]
        return any(
            self._is_locked(anchor, account + first, last - first)
            for anchor, account in self._each()
            for first, last in ranges
            if last > first
        )

    @staticmethod
    def _is_locked(anchor, at, length):
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, at, length, 0)
        return _FLOCK.unpack(fcntl.fcntl(anchor, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK

    def close(self):
        while self._anchors:
            os.close(self._anchors.pop())


def _inode_offset(inode):
    return _checksum(struct.pack("<QQ", *inode)) >> 32


class _FileLock:
    def __init__(self, ledger):
        self._ledger = ledger

    def __enter__(self):
        ledger = self._ledger
        end = time.monotonic() + ledger._deadline
        pause = 0.00002
        while not ledger._try_lock(_AT_HOLDER):
            if time.monotonic() >= end:
                raise Busy(ledger.path, ledger._words[_AT_HOLDER // 8] >> 32)
            time.sleep(pause)
            pause = min(pause * 2, 0.002)
        try:
            slot = 0 if ledger._slot is None else ledger._slot + 1
            ledger._words[_AT_HOLDER // 8] = os.getpid() << 32 | slot
            resized = os.fstat(ledger._fd).st_size != _HEADER_SIZE + ledger._slots * _SLOT_SIZE
            if resized or _inode_at(ledger.path) not in (ledger._inode, None):
                raise LedgerError(f"{ledger.path}: was replaced or resized while in use; restart its users")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self._ledger._words[_AT_HOLDER // 8] = 0
        self._ledger._set_lock(fcntl.F_UNLCK, _AT_HOLDER)
