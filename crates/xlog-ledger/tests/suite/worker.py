"""The Python process of the multi-process test: the same protocol as the Rust workers, see worker.rs.

worker.py LEDGER_FILE CELLS_FILE INDEX SEED [LARGEST_REQUEST]
"""

import os
import random
import struct
import sys
import time

import xlog_ledger

RUN, PAUSE, HOLD, QUIT = range(4)
COMMAND, ANSWER, STEPS, REFUSED, BUSY, QUOTA = 1, 2, 4, 5, 6, 7

path, cells_path, index, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
largest = int(sys.argv[5]) if len(sys.argv) > 5 else 1024 * 256
cells = os.open(cells_path, os.O_RDWR | os.O_CLOEXEC)
dice = random.Random(seed)


def load(field):
    return struct.unpack("<Q", os.pread(cells, 8, (index * 8 + field) * 8))[0]


def store(field, value):
    os.pwrite(cells, struct.pack("<Q", value), (index * 8 + field) * 8)


def count(field):
    store(field, load(field) + 1)


def units_of(size):
    return (size + 255) // 256


class Truth:
    """What this process really holds: units below, the number of changes above."""

    def __init__(self):
        self.units, self.changes = 0, load(0) >> 32

    def add(self, units):
        self.units += units
        self.changes = self.changes + 1 & 0xFFFFFFFF
        store(0, self.changes << 32 | self.units)


def attach():
    while True:
        try:
            return xlog_ledger.Ledger(path, deadline=0.01, patience=0.002, name="python worker")
        except xlog_ledger.Busy:
            count(BUSY)


def wait_for_another(command):
    while load(COMMAND) == command:
        time.sleep(0.0002)


def step(ledger, truth, held):
    count(STEPS)
    if not held or dice.random() < 0.55:
        size = dice.randint(1, largest)
        quota = load(QUOTA)
        try:
            ledger.charge(size)
        except xlog_ledger.Full:
            count(REFUSED)
        except xlog_ledger.Busy:
            count(BUSY)
        else:
            truth.add(units_of(size))
            held.append(size)
            # One that did not change during the call holds for it.
            if quota & 0xFFFFFFFF and quota == load(QUOTA) and truth.units > (quota & 0xFFFFFFFF) - 1:
                sys.exit(5)
    else:
        size = held.pop(dice.randrange(len(held)))
        truth.add(-units_of(size))
        ledger.release(size)


def main():
    ledger, truth, held = attach(), Truth(), []
    while True:
        command = load(COMMAND)
        kind = command & 0xFF
        if kind == RUN:
            store(ANSWER, command)
            step(ledger, truth, held)
            if dice.random() < 0.5:
                time.sleep(dice.random() * 0.0002)
        elif kind == PAUSE:
            store(ANSWER, command)
            wait_for_another(command)
        elif kind == HOLD:
            try:
                with ledger.hold_file_lock():
                    store(ANSWER, command)
                    wait_for_another(command)
            except xlog_ledger.Busy:
                count(BUSY)
        else:
            for size in held:
                truth.add(-units_of(size))
                ledger.release(size)
            sys.exit(0 if ledger.used == 0 and truth.units == 0 else 4)


main()
