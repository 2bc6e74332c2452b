"""Allocation logs turned into plans: what every peer can replay without knowing a log format.

A plan is lines of `stream slot bytes`; 0 bytes free the block of the slot. Streams and slots are numbers from 0.
"""

import csv
import subprocess

KINDS = ("dataframe", "llm", "datalog")


def plan_of(lines):
    """The steps of a log in RMM's CSV form. A free of what is not live, or a header that is another one, raises ValueError."""
    reader = csv.DictReader(lines)
    if reader.fieldnames != ["Thread", "Time", "Action", "Pointer", "Size", "Stream"]:
        raise ValueError(f"not RMM's header: {reader.fieldnames}")
    streams, live, free, used = {}, {}, [], 0
    for row in reader:
        stream = streams.setdefault(row["Stream"], len(streams))
        pointer, size = row["Pointer"], int(row["Size"])
        if row["Action"] == "allocate" and size > 0:
            if pointer in live:
                raise ValueError(f"{pointer} is allocated twice")
            slot = free.pop() if free else used
            used = max(used, slot + 1)
            live[pointer] = slot
            yield stream, slot, size
        elif row["Action"] == "free" and size > 0:
            if pointer not in live:
                raise ValueError(f"{pointer} is freed and not live")
            slot = live.pop(pointer)
            free.append(slot)
            yield stream, slot, 0
    # A plan ends without live blocks.
    for slot in live.values():
        yield 0, slot, 0


def make(xlogmem, folder, records):
    """Writes the plans of every kind into the folder; returns why not, or nothing."""
    if not xlogmem.is_file():
        return f"no {xlogmem}: build it with scripts/gpu-bundle"
    for kind in KINDS:
        log = folder / f"{kind}.rmm.csv"
        command = [str(xlogmem), "generate", kind, "--output", str(log), "--records", str(records)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            if done.returncode != 0:
                return f"xlogmem generate {kind}: {(done.stderr.strip() or done.stdout.strip())[-120:]}"
            with open(log, encoding="utf-8", newline="") as lines, open(folder / f"{kind}.plan", "w", encoding="ascii") as out:
                out.writelines(f"{stream} {slot} {size}\n" for stream, slot, size in plan_of(lines))
        except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
            return f"the {kind} log: {error}"
    return None
