"""The quota of a worker by its share of a card, and the memory of workers as metrics. `xlogmem.ray` and `xlogmem.dask` use it.

A worker has two ways to a quota, and both are set each time its share becomes known:

- Its environment, for a process that has not taken device memory yet: the preloaded library and our runtime read it when they join the
  ledger.
- The ledger, for a process that is on it: this module sets the quota of the slots of its own process. It holds from the next request.
  Runtimes of the process also follow it with the memory that they have cached.

Shares are of the ledger's limit, so that workers whose shares add up to 1 fit together.
"""

import os
import socket
import subprocess
import threading

import xlog_ledger

from ._command import executable
from ._native import refresh_limits

#: The units of a share in the environment.
_WHOLE = 100_000_000
#: The name of the slot of this module, while it sets a quota.
_ADMINISTRATOR = "xlogmem.cluster"
#: Slots begin there in a ledger's file, and have this size (docs/ledger-format.md).
_SLOTS_AT, _SLOT_SIZE = 4096, 128
_changing = threading.Lock()
#: The limit of an `xlogmem exec` around this process. A worker whose environment begins with a share has it beside that.
_outer_limit = os.environ.get("XLOGMEM_OUTER_LIMIT", os.environ.get("XLOG_EXEC_LIMIT", ""))

#: name, type and help of each metric, and the key of its value in a row of `rows`.
METRICS = (
    ("xlogmem_used_bytes", "Device memory that the process holds.", "used"),
    ("xlogmem_peak_bytes", "The most device memory that the process has held.", "peak"),
    ("xlogmem_quota_bytes", "The most device memory that the process may hold.", "quota"),
    ("xlogmem_guaranteed_bytes", "Device memory that other processes leave free for the process.", "guaranteed"),
    ("xlogmem_device_limit_bytes", "The limit of all processes on the device.", "limit"),
)
#: The labels of every metric. The tag is the name of the quota: the task, actor or worker.
LABELS = ("node", "device", "process", "tag")


class NotPreloaded(RuntimeError):
    """The library that a worker should have preloaded is not in it, so that nothing would be limited."""


def require_library():
    """Raises NotPreloaded if the environment names our library and this process has not loaded it: the loader ignores a missing file."""
    for path in os.environ.get("LD_PRELOAD", "").replace(" ", ":").split(":"):
        name = os.path.basename(path)
        if "xlog_preload" not in name:
            continue
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as files:
            if not any(name in line for line in files):
                raise NotPreloaded(
                    f"{path} is not loaded on {node()}; expected the library at the same path on every node: run `xlogmem exec -- true` there as"
                    " this user, or name another path by XLOGMEM_PRELOAD"
                )


def library():
    """The library to preload. `XLOGMEM_PRELOAD` names it; otherwise `xlogmem exec` is asked for its own."""
    named = os.environ.get("XLOGMEM_PRELOAD")
    if named:
        return named
    asked = [executable(), "exec", "--ledger", "off", "--", "/bin/sh", "-c", 'printf %s "$LD_PRELOAD"']
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    done = subprocess.run(asked, capture_output=True, text=True, env=environment, timeout=60, check=True)
    return done.stdout.strip()


def environment(*, ledger="on", preload=None):
    """The environment of workers that join a ledger: `on`, a directory, or a file KEY.ledger; None leaves it to each node.

    preload: the library; None finds it by `library`, "" preloads nothing (our own runtime joins by itself).
    """
    preload = library() if preload is None else preload
    variables = {} if ledger is None else {"XLOG_EXEC_LEDGER": ledger, "XLOG_DEVICE_LEDGER": ledger}
    if preload:
        present = os.environ.get("LD_PRELOAD", "")
        variables["LD_PRELOAD"] = f"{preload}:{present}" if present and preload not in present else preload
    return variables


def ledgers():
    """The files of the ledgers that this process would join."""
    named = {os.environ.get(name) for name in ("XLOG_EXEC_LEDGER", "XLOG_DEVICE_LEDGER")} - {None, ""}
    found = set()
    for place in named or {"on"}:
        if place == "off":
            continue
        if place.endswith(".ledger"):
            found.update([place] if os.path.exists(place) else [])
            continue
        directory = xlog_ledger.default_directory() if place == "on" else place
        try:
            names = os.listdir(directory)
        except (FileNotFoundError, NotADirectoryError):
            continue
        found.update(os.path.join(directory, name) for name in names if name.endswith(".ledger") and not name.startswith("."))
    return sorted(found)


def own_slots(path):
    """The numbers of the slots of this process in a ledger: those whose lock it holds.

    Process ids do not tell: processes of two containers may have the same one.
    """
    try:
        facts = os.stat(path)
        descriptors = os.listdir("/proc/self/fd")
    except OSError:
        return set()
    found = set()
    for descriptor in descriptors:
        try:
            here = os.stat(f"/proc/self/fd/{descriptor}")
            if (here.st_dev, here.st_ino) != (facts.st_dev, facts.st_ino):
                continue
            with open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii", errors="replace") as lines:
                locks = [line.split() for line in lines if line.startswith("lock:") and "OFDLCK" in line]
        except OSError:
            continue  # closed meanwhile
        # lock: 1: OFDLCK ADVISORY WRITE -1 DEVICE:INODE FIRST LAST
        firsts = [int(words[-2]) for words in locks if len(words) > 3 and words[-2].isdigit() and "WRITE" in words]
        found.update((first - _SLOTS_AT) // _SLOT_SIZE for first in firsts if first >= _SLOTS_AT)
    return found


def _is_own(slot, own):
    """Whether a slot is one of a worker in this process."""
    return slot.alive and slot.index in own and slot.name != _ADMINISTRATOR


def _units_of(share):
    # Rounded down, so that shares that add up to 1 fit. The small term is for floats such as 0.29, which are just below.
    return int(share * _WHOLE + 1e-3)


def _quota_of(limit, units):
    """The bytes of a share, within the limit of an `xlogmem exec` around this process."""
    quota = limit * units // _WHOLE
    for text in filter(None, _outer_limit.split(",")):
        kind, _, value = text.rpartition(":")
        if value.isdigit():
            quota = min(quota, limit * int(value) // _WHOLE if kind else int(value))
    return quota


def share_variables(share, outer):
    """The environment of a process with this share, which has not taken device memory yet. `outer` is the limit around it, or empty."""
    units = _units_of(share)
    limit = f"ledger-share:{units}"
    # Zero is no size; one byte is no unit of the ledger, so it grants nothing.
    quota = f"{units // 1_000_000}.{units % 1_000_000:06}%" if units else "1"
    return {"XLOG_EXEC_LIMIT": f"{limit},{outer}" if outer else limit, "XLOG_DEVICE_QUOTA": quota}


def apply(share, name=None):
    """Gives this process `share` (0 to 1) of each card as its quota. Returns the bytes by device for cards that it is on already."""
    if not 0 <= share <= 1:
        raise ValueError(f"share {share!r} is not accepted; expected 0 to 1")
    units = _units_of(share)
    with _changing:
        os.environ.update(share_variables(share, _outer_limit))
        if name:
            os.environ["XLOG_EXEC_NAME"] = os.environ["XLOG_DEVICE_QUOTA_NAME"] = name
        applied, failure = {}, None
        for path in ledgers():
            try:
                applied |= _apply_in(path, units, name)
            except (OSError, xlog_ledger.LedgerError) as error:
                failure = error  # the quotas of other cards are set all the same
        refresh_limits()
        if failure is not None:
            raise failure
        return applied


def _apply_in(path, units, name):
    """Sets the quota of this process in one ledger. Returns the bytes by device, empty if the process is not on it."""
    own = own_slots(path)
    if not own or not any(_is_own(slot, own) for slot in xlog_ledger.read(path)[1]):
        return {}
    applied = {}
    with xlog_ledger.Ledger(path, name=_ADMINISTRATOR) as ledger:
        quota = _quota_of(ledger.limit, units)
        for slot in ledger.slots():
            if _is_own(slot, own):
                guaranteed = min(slot.quota.guaranteed, quota)
                ledger.set_quota(xlog_ledger.Quota(quota, guaranteed, name or slot.quota.name), slot)
                applied[_device_of(path)] = quota
    return applied


def _device_of(path):
    return os.path.basename(path)[: -len(".ledger")]


def node():
    """The name of this machine in labels."""
    return os.environ.get("XLOGMEM_NODE") or socket.gethostname()


def rows(*, own=False, of=None):
    """What processes hold, one row for each process and device: of this process, or of all on this machine's ledgers."""
    found = {}
    for path in ledgers():
        try:
            limit, slots = xlog_ledger.read(path)
        except (OSError, xlog_ledger.LedgerError):
            continue
        mine = own_slots(path) if own else None
        for slot in slots:
            if not slot.alive or slot.name == _ADMINISTRATOR or (mine is not None and slot.index not in mine):
                continue
            labels = (of or node(), _device_of(path), str(slot.pid), slot.quota.name or slot.name)
            row = found.setdefault(labels, dict(zip(LABELS, labels)) | dict.fromkeys(("used", "peak", "quota", "guaranteed"), 0))
            # A process with two runtimes has two slots, and a quota in each.
            row["used"] += slot.used
            row["peak"] += slot.peak
            row["quota"] += slot.quota.limit if slot.quota.limit is not None else limit
            row["guaranteed"] += slot.quota.guaranteed
            row["limit"] = limit
    return list(found.values())


def _escaped(text):
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def openmetrics(all_rows):
    """Rows as OpenMetrics text."""
    lines = []
    for name, text, key in METRICS:
        lines += [f"# TYPE {name} gauge", f"# UNIT {name} bytes", f"# HELP {name} {text}"]
        for row in all_rows:
            labels = ",".join(f'{label}="{_escaped(row[label])}"' for label in LABELS)
            lines.append(f"{name}{{{labels}}} {row[key]}")
    return "\n".join([*lines, "# EOF", ""])
