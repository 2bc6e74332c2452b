"""One measurement: rounds of rows, who measures which, on which processor, and when a row is measured again."""

import math
import os
import statistics
import subprocess
import sys
import time

import report
from clock import Clock
from programs import Missing

# xlog's stacks above the pool are measured only where their layers can be distinguished.
LAYERS = ["budget", "null-log", "stack", "stack-log", "stack-csv", "guard"]
LAYER_ROWS = [("pair", 1 << 10), ("pair", 1 << 20), ("random", 4), ("threads", 1), ("threads", 16)]
# Slow and in no ratio: measured only in the first round.
ONCE = ["direct", "async", "stack-log", "stack-csv", "guard"]
# Not implemented in Python, where a million operations take seconds.
NOT_IN_PYTHON = ["small-uniform", "small-log", *report.SHAPES]
# The maximum number of measurements of a row on a slow clock, and the total wait for a fast processor in seconds.
ATTEMPTS, PATIENCE = 3, 0.5
# The maximum fraction of the time for repeated measurements, and the maximum seconds at once: rounds matter more.
AGAIN, AT_ONCE = 0.25, 5.0
# xlog's own benches use two threads at most, and the driver has some.
OWN_PROCESSORS = 4
# Determined by a GPU or a count, not by a clock.
NOT_TIMED = ("kernels-", "small-")


def say(text):
    print(text, file=sys.stderr, flush=True)


def asked(program, workload, parameter):
    """The variants of a program that measure a row."""
    if program.peer == "xlog":
        # One driver call per block is equally slow everywhere.
        few = LAYERS if workload in ("pair", "handoff") or workload.startswith("kernels-") else [*LAYERS, "direct"]
        found = [name for name in program.variants if name not in few or (workload, parameter) in LAYER_ROWS]
        # The thrifty variant differs only if streams reuse what others have freed.
        return found if workload.startswith("replay-") else [name for name in found if name != "thrifty"]
    if program.peer == report.LIMIT[0] and workload != "threads":
        return [report.LIMIT[1]]
    if program.name.endswith("-python") and workload in NOT_IN_PYTHON:
        return []
    return program.variants


class Session:
    """One measurement: what was asked, and what came back."""

    def __init__(self, options, programs, log, near=None):
        self.options, self.programs, self.log = options, programs, log
        # An earlier run with all peers, if this one is for the closest peers: its figures, and its requested rows.
        self.near, self.known = near or (None, frozenset())
        self.begin = options.begin
        self.rounds = []
        self.given_up = set()
        self.everywhere = os.sched_getaffinity(0)
        self.clock = None
        # Single-threaded rows, those measured again, and those that never met a fast clock.
        self.rows = self.again = self.slow = 0
        # Seconds spent on waiting and repeated measurements, and their start.
        self.lost, self.since = 0.0, time.monotonic()

    def left(self):
        return self.options.limit - (time.monotonic() - self.begin)

    def to_lose(self):
        return AT_ONCE + AGAIN * (time.monotonic() - self.since) - self.lost

    def contenders(self, number, workload, parameter, table):
        """(program, variant) of everybody who measures a row in this round, in the order of the round.

        The first round is for all. Later ones, and the first after a run that had everybody, are for ours and for those who could still be
        the best peer, side by side, the nearest to ours first, so that they meet the same clock.
        """
        found = [(program, variant) for program in self.programs for variant in asked(program, workload, parameter)]
        if number == 1 and self.near is not None:
            table = self.near
        if number > 1 or self.near is not None:
            found = [each for each in found if self.is_wanted(number, each[0].peer, each[1], workload, parameter, table)]
            found.sort(key=lambda each: self.distance(each[0].peer, each[1], workload, parameter, table))
        if number % 2 == 0:
            found.reverse()
        # The pool is measured between its peers, its stacks before or after all.
        layers = [each for each in found if each[0].peer == report.OURS[0] and each[1] != report.OURS[1]]
        others = [each for each in found if each not in layers]
        return others + layers if number % 2 else layers + others

    @staticmethod
    def distance(peer, variant, workload, parameter, table):
        """How far behind ours a peer is."""
        if peer in (report.OURS[0], report.LIMIT[0]):
            return 0.0 if peer == report.OURS[0] else math.inf
        ours, theirs = report.find(table, workload, parameter), report.find(table, workload, parameter, (peer, variant))
        return statistics.median(report.paired(ours, theirs)) if ours and theirs else math.inf

    def is_wanted(self, number, peer, variant, workload, parameter, table):
        """Whether a later round needs a row, or the first one after an earlier run: then also what nobody was asked for."""
        key = (workload, parameter, (peer, variant))
        if number == 1 and key not in self.known:
            return True
        if peer == report.OURS[0]:
            return variant not in ONCE and report.find(table, workload, parameter, (peer, variant)) is not None
        if peer == report.LIMIT[0]:
            return workload == "threads"
        # A slow clock in the first round alone must not decide whether a peer has a figure.
        if number == 2 and self.near is None and report.nearly_done(self.rounds[-2], *key):
            return True
        return not report.hopeless(table, *key) or report.is_best_beside(table, *key)

    def is_about_equal(self, workload, parameter):
        """Whether the earlier run, if there was one, found no ratio above 1.3 in a row, nor in the time that is measured beside it."""
        keys = [(workload, parameter), (f"{workload}-time", parameter)]
        found = [report.ratio(self.near, *key) for key in keys] if self.near else []
        found = [against.median for against in found if against is not None]
        return bool(found) and max(found) <= report.NEAR

    def run_row(self, number, workload, parameter, table):
        """Measures a row, after the first round again if it met a slow clock, and keeps the attempt with the most figures, and of these the
        one with the best clock. Returns the seconds of an attempt."""
        threads = self.threads_of(workload, parameter)
        wanted = self.contenders(number, workload, parameter, table)
        kept, best, least, attempts, patience = [], -1.0, math.inf, 0, PATIENCE
        began = time.monotonic()
        while True:
            start = time.monotonic()
            rows, rate, waited = self.attempt(wanted, workload, parameter, threads, patience)
            attempts, patience, took = attempts + 1, patience - waited, time.monotonic() - start
            if attempts > 1:
                self.lost += took
            # A figure on a slow clock is better than none.
            missing = sum(row.value is None for row in rows)
            if (missing, -rate) < (least, -best):
                kept, best, least = rows, rate, missing
            is_slow = self.clock is not None and self.clock.is_slow(best)
            if not is_slow or number == 1 or attempts == ATTEMPTS or took > min(self.to_lose(), self.left()):
                break
        self.rounds[-1] += kept
        if best < math.inf:
            self.rows, self.again, self.slow = self.rows + 1, self.again + (attempts > 1), self.slow + is_slow
        return (time.monotonic() - began) / attempts

    @staticmethod
    def threads_of(workload, parameter):
        """How many threads a row starts."""
        if workload in report.SHAPES:
            threads = workload.split("-")[2]
            return 16 if threads == "migrating" else int(threads)
        return parameter if workload.startswith("threads") else 2 if workload == "handoff" else 0

    def attempt(self, wanted, workload, parameter, threads, patience):
        """The rows of everybody, the least rate of the processor that one thread ran on (infinite where it was not looked at), and the
        seconds spent on looking for a fast one."""
        rows, least, spent = [], math.inf, 0.0
        # One more processor than threads, for the thread that starts them.
        together = self.processors(threads + 1) if threads else None
        if self.clock:
            self.clock.forget()
        for program, variant in wanted:
            if program.failures >= 3:
                if program.name not in self.given_up:
                    self.given_up.add(program.name)
                    reason = "failed three times in a row: its other rows are left out"
                    self.rounds[-1].append(report.Row(program.peer, "-", "-", 0, None, reason))
                continue
            timeout = max(20.0, 20 * self.options.seconds)
            # A row with threads gets as many processors, a variant with a background thread all, and a single thread the fastest.
            has_own = variant.endswith(("-log", "-csv"))
            processors = together or self.everywhere
            is_single = not together and not has_own
            if is_single:
                start = time.monotonic()
                processors = self.processor(min(patience - spent, self.to_lose()))
                spent += time.monotonic() - start
            rows += program.ask(variant, workload, parameter, self.options, self.log, timeout, processors)
            if is_single and self.clock and not workload.startswith(NOT_TIMED):
                least = min(least, self.tested())
        self.lost += spent
        return rows, least, spent

    def processor(self, patience):
        """The processor for one thread."""
        return self.asked_clock(lambda clock: {clock.choose(patience)}, self.everywhere)

    def processors(self, count):
        """The fastest processors for so many threads."""
        return self.asked_clock(lambda clock: clock.several(count), self.everywhere)

    def tested(self):
        return self.asked_clock(lambda clock: clock.test(), math.inf)

    def asked_clock(self, question, otherwise):
        if self.clock is None:
            return otherwise
        try:
            return question(self.clock)
        except (OSError, ValueError, KeyError) as error:
            say(f"rows run on any processor from here: {error}")
            self.clock.stop()
            self.clock = None
            return otherwise

    def about_clock(self):
        if self.clock is None:
            return "rows of one thread ran on any processor"
        return (
            f"{self.slow} of {self.rows} rows of one thread met a slow clock to the end, {self.again} were measured again for it; "
            f"the fastest processor usually adds {self.clock.usual:.0f} million times a second"
        )

    def keep(self):
        """Writes the rows so far, which must not be lost with what comes."""
        if self.options.out:
            self.options.out.mkdir(parents=True, exist_ok=True)
            report.write_rows(self.options.out / "raw.csv", self.rounds)

    def run_own(self, workshop, own):
        """The benches of our own parts, on processors that are fast when they begin."""
        for name in own:
            try:
                os.sched_setaffinity(0, self.processors(OWN_PROCESSORS))
                path = workshop.bundled(f"benches/xlog-cuda.{name}")
                done = subprocess.run(
                    [path, "--csv"], capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "XLOG_TEST_DEVICE": "cuda:0"}
                )
                self.rounds[-1] += report.parse(done.stdout)
                trouble = done.stderr.strip().splitlines()[-1:] if done.returncode != 0 else []
            except (Missing, OSError, ValueError, subprocess.TimeoutExpired) as error:
                trouble = [str(error)]
            finally:
                os.sched_setaffinity(0, self.everywhere)
            if trouble:
                reason = "skipped: " + trouble[0].replace(",", " ")[:160]
                self.rounds[-1].append(report.Row("xlog", name, "-", 0, None, reason))

    def measure(self, workshop, workloads, own):
        keys = [(workload, parameter) for workload in workloads for parameter in report.WORKLOADS[workload]]
        took = {}
        try:
            self.clock = Clock(workshop.clock())
        except (Missing, OSError) as error:
            say(f"rows run on any processor: {error}")
        for number in range(1, self.options.rounds + 1):
            self.rounds.append([])
            if number < 3:
                # The first rounds save no time budget for the others.
                self.lost, self.since = 0.0, time.monotonic()
            table = report.figures(self.rounds)
            if number == 1 or self.left() > 20:
                self.run_own(workshop, own)
            for key in keys if number < 3 else report.in_order(table, keys):
                if report.is_settled(table, *key) or (number > 1 and self.is_about_equal(*key)):
                    continue
                expected = took.get(key, 0.0) / (3 if number == 2 else 1)
                if self.left() < expected or self.left() < 1:
                    if number == 1:
                        say(f"no time left for {report.label(*key)}: --limit {self.options.limit:.0f}")
                        self.rounds[-1].append(report.Row("xlog", "pool", *key, None, "skipped: no time was left; give a higher --limit"))
                    continue
                slow = self.slow
                took[key] = self.run_row(number, *key, table)
                done = time.monotonic() - self.begin
                say(f"{done:5.0f} s  round {number}  {report.label(*key)}: {took[key]:.1f} s{', slow clock' if self.slow > slow else ''}")
            if number > 1 and not self.rounds[-1]:
                self.rounds.pop()
                break
            self.keep()
        for program in self.programs:
            program.stop()
        if self.clock:
            self.clock.stop()
