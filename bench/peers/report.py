"""Rows of figures in, ratios and tables out. Starts no process and reads no file.

A figure is the best over the rounds: clocks of shared hosts change by a factor of two, and the best of several rounds is what the
code costs; the least and the most stand beside it. A ratio is taken within each round, where both sides met the same clock, and is
the median over the rounds; beside it stands the spread in which nineteen of twenty further rounds are expected. Where 1 lies in
that spread, the two are called equal.
"""

import csv
import functools
import io
import math
import re
import statistics
from dataclasses import dataclass

COLUMNS = ["peer", "variant", "workload", "parameter", "value", "unit"]
OURS = ("xlog", "pool")
# The peers of "the best peer" in a goal, which is judged only if all of them took part.
PEERS = ("rmm", "torch", "cupy", "cudarc", "published", "driver")
# Host memory: shown as the limit, never compared.
LIMIT = ("glibc", "malloc")
MIB = 1 << 20
RANDOM_SIZES = [1, 4, 64, 256, 1024, 4096]
HOLES = [4 << 10, 16 << 10, 64 << 10]
THREADS = [1, 2, 4, 8, 16]
LIVE = [1_000, 1_000_000]
RECORDS = 100_000
# Streams and threads of the shapes, and the largest block in KiB.
SHAPES = [f"shape-{streams}-{threads}" for threads in (1, 4, 16, "migrating") for streams in (1, 4, 16, 64)]
SHAPE_SIZES = [64, 1 << 10, 4 << 10, 16 << 10]
# Ratios below this are about equal.
NEAR = 1.3
# Two ratios within this factor are equal.
SAME = 1.01
# The minimum number of rounds of a settled row: if its rounds differ, and if they are equal.
ENOUGH, ENOUGH_ALIKE = 3, 2
# The minimum number of rounds of a spread.
FEWEST = 3
# A peer slower than the best by this factor is left out of later rounds: after one round, and after several. One round says little,
# since clocks differ by 1.8.
HOPELESS_AT_ONCE, HOPELESS = 3.0, 2.0
# The text of a row that exceeded its time limit.
GIVEN_UP = re.compile(r"(\d+) of (\d+) operations done")
# A row that exceeded its limit with this fraction done would have finished on a fast clock.
NEARLY_DONE = 0.55
# In the order of measurement: workloads with a goal come first.
WORKLOADS = {
    "pair": [256, 1 << 10, 64 << 10, MIB, 16 * MIB, 64 * MIB],
    "random": RANDOM_SIZES,
    "holes": HOLES,
    "threads": THREADS,
    "live": LIVE,
    "small-uniform": [100_000],
    "small-log": [100_000],
    "kernels-cold": [1, 2, 4],
    "kernels-warm": [1, 2, 4],
    "random-10000": RANDOM_SIZES,
    "random-1000": RANDOM_SIZES,
    "handoff": [1],
    "replay-dataframe": [RECORDS],
    "replay-llm": [RECORDS],
    "replay-datalog": [RECORDS],
    "churn": [200_000],
    "threads-shared": THREADS,
    **{shape: SHAPE_SIZES for shape in SHAPES},
}
# xlog's own parts, measured by their own benches.
OWN = ("budget", "logging", "ordering")


@dataclass(frozen=True)
class Row:
    """One line of one program; `value` is None where the unit says why there is none."""

    peer: str
    variant: str
    workload: str
    parameter: int
    value: float | None
    unit: str


@dataclass(frozen=True)
class Figure:
    """A row over all rounds. `values` has an entry for every round, None where it was not measured."""

    values: tuple
    unit: str

    @property
    def seen(self):
        return [value for value in self.values if value is not None]

    @property
    def is_rate(self):
        return self.unit == "Mops/s"

    @property
    def best(self):
        return max(self.seen) if self.is_rate else min(self.seen)

    @property
    def worst(self):
        return min(self.seen) if self.is_rate else max(self.seen)

    @property
    def rounds(self):
        return len(self.seen)

    def __str__(self):
        digits = 2 if self.unit in ("Mops/s", "ratio") and self.best < 100 else 1
        low, high = sorted((self.best, self.worst))
        spread = f" ({low:.{digits}f} to {high:.{digits}f})" if self.rounds > 1 else " (one round)"
        return f"{self.best:.{digits}f} {self.unit}{spread}".replace(" ratio", "")


@dataclass(frozen=True)
class Ratio:
    """How many times better ours is than the best peer: the median over the rounds, where nineteen of twenty further rounds are
    expected (low to high), and the least and the most of those that were measured; these are also low and high of fewer rounds than
    have a spread."""

    peer: tuple
    median: float
    low: float
    high: float
    least: float
    most: float
    rounds: int

    @property
    def is_equal(self):
        return self.low <= 1 <= self.high

    def __str__(self):
        few = {1: " (one round)", 2: f" ({self.least:.1f} and {self.most:.1f})"}
        spread = few.get(self.rounds, f" ({self.low:.1f} to {self.high:.1f})")
        if self.is_equal:
            return "equal" + spread
        return (f"{self.median:.1f} x better" if self.median > 1 else f"{1 / self.median:.1f} x worse") + spread


def parse(text):
    """The rows in a program's output. A line that is not a row raises ValueError with the line."""
    rows = []
    for fields in csv.reader(io.StringIO(text)):
        if not fields or fields == COLUMNS:
            continue
        if len(fields) != len(COLUMNS):
            raise ValueError(f"not a row: '{','.join(fields)}'; expected {','.join(COLUMNS)}")
        peer, variant, workload, parameter, value, unit = fields
        rows.append(Row(peer, variant, workload, int(parameter), float(value) if value else None, unit))
    return rows


def figures(rounds):
    """{(workload, parameter): {(peer, variant): Figure}} over the rows of every round."""
    values = {}
    for number, rows in enumerate(rounds):
        for row in rows:
            if row.value is not None:
                by_peer = values.setdefault((row.workload, row.parameter), {})
                unit, seen = by_peer.setdefault((row.peer, row.variant), (row.unit, [None] * len(rounds)))
                seen[number] = row.value
    return {
        key: {peer: Figure(tuple(seen), unit) for peer, (unit, seen) in by_peer.items()} for key, by_peer in values.items()
    }


def write_rows(path, rounds):
    """Every number of every round."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["round", *COLUMNS])
        for number, rows in enumerate(rounds, 1):
            for row in rows:
                value = "" if row.value is None else f"{row.value:.4f}"
                writer.writerow([number, row.peer, row.variant, row.workload, row.parameter, value, row.unit])


def read_rows(path):
    """The rounds that `write_rows` wrote. What is not such a file raises ValueError."""
    rounds = {}
    with open(path, newline="", encoding="utf-8") as file:
        for fields in csv.reader(file):
            if fields[1:] != COLUMNS:
                if not fields or not fields[0].isdigit():
                    raise ValueError(f"not a row with its round: '{','.join(fields)}'")
                rounds.setdefault(int(fields[0]), []).append(fields[1:])
    text = {number: io.StringIO() for number in rounds}
    for number, rows in rounds.items():
        csv.writer(text[number], lineterminator="\n").writerows(rows)
    return [parse(text[number].getvalue()) for number in sorted(rounds)]


def find(table, workload, parameter, peer=OURS):
    return table.get((workload, parameter), {}).get(peer)


@functools.cache
def student(freedom):
    """What a draw from Student's distribution exceeds, to either side, one time in twenty."""
    low, high = 0.0, math.pi / 2
    while high - low > 1e-12:
        angle = (low + high) / 2
        sine, cosine = math.sin(angle), math.cos(angle)
        # The probability within the angle, in closed form for integer degrees of freedom.
        if freedom % 2:
            term, total = cosine, 0.0
            for at in range(3, freedom + 1, 2):
                total += term
                term *= cosine * cosine * (at - 1) / at
            share = 2 / math.pi * (angle + sine * total)
        else:
            term, total = 1.0, 0.0
            for at in range(2, freedom + 1, 2):
                total += term
                term *= cosine * cosine * (at - 1) / at
            share = sine * total
        low, high = (angle, high) if share < 0.95 else (low, angle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def spread(times):
    """Where nineteen of twenty further rounds are expected, around the median, if the logarithms of the rounds are normal; the least and
    the most of too few."""
    median, count = statistics.median(times), len(times)
    if count < FEWEST:
        return min(times), max(times)
    deviation = statistics.stdev([math.log(value) for value in times])
    factor = math.exp(min(student(count - 1) * deviation * math.sqrt(1 + 1 / count), 100.0))
    return median / factor, median * factor


def paired(ours, theirs):
    """How many times better ours is in each round in which both were measured; where there is none, the best against the best."""
    # A cost at or below that of doing nothing counts as one nanosecond.
    least = 1.0 if ours.unit == "ns" else 1e-6

    def times(own, other):
        own, other = max(own, least), max(other, least)
        return own / other if ours.is_rate else other / own

    both = [times(own, other) for own, other in zip(ours.values, theirs.values) if own is not None and other is not None]
    return both or [times(ours.best, theirs.best)]


def peers_of(table, workload, parameter):
    """{(peer, variant): Figure} of those that ours is compared with. Our own variants are no peers."""
    return {
        peer: figure for peer, figure in table.get((workload, parameter), {}).items() if peer[0] not in (OURS[0], LIMIT[0])
    }


def took_part(*runs):
    """{(workload, parameter): the peers that were measured there} over the rounds of each run.

    A peer that was given up because it took too long was measured: it is slower than the limit of the row. One that failed, or is
    missing, was not.
    """
    found = {}
    for row in (row for rounds in runs for rows in rounds for row in rows):
        if row.value is not None or GIVEN_UP.search(row.unit):
            found.setdefault((row.workload, row.parameter), set()).add(row.peer)
    return found


def best_peer(table, workload, parameter):
    """The best peer of a row and its figure, or None: the one against which the median of the rounds is the least.

    One that was measured in fewer than half of the rounds is not the best, unless the row is of memory, which no clock changes.
    """
    peers = peers_of(table, workload, parameter)
    if not peers:
        return None
    most = max(figure.rounds for figure in peers.values())
    known = {peer: figure for peer, figure in peers.items() if 2 * figure.rounds >= most or figure.unit == "ratio"}
    ours = find(table, workload, parameter)
    if ours is None:
        return (max if known[next(iter(known))].is_rate else min)(known.items(), key=lambda item: item[1].best)
    return min(known.items(), key=lambda item: statistics.median(paired(ours, item[1])))


def ratio(table, workload, parameter):
    """Ours against the best peer, or None where either has no figure."""
    ours, best = find(table, workload, parameter), best_peer(table, workload, parameter)
    if ours is None or best is None:
        return None
    times = paired(ours, best[1])
    return Ratio(best[0], statistics.median(times), *spread(times), min(times), max(times), len(times))


def ratios(table):
    """{(workload, parameter): Ratio} of everything that ours and a peer measured."""
    found = ((key, ratio(table, *key)) for key in table if not key[0].endswith(("-best", "-idle")))
    return {key: value for key, value in found if value is not None}


def is_settled(table, workload, parameter):
    """Whether more rounds say nothing more: after three, ours and the best peer are about equal in all of them, or what is held is the same
    in two."""
    against, ours = ratio(table, workload, parameter), find(table, workload, parameter)
    beside = ratio(table, f"{workload}-time", parameter)
    if against is None or (beside is not None and beside.median > NEAR):
        return False
    is_same = ours.unit == "ratio" and against.rounds >= ENOUGH_ALIKE and against.most <= SAME * against.least
    return is_same or (against.rounds >= ENOUGH and against.most <= NEAR and against.least >= 1 / NEAR)


def in_order(table, keys):
    """The rows in the order in which a round measures them: what has a ratio above 1.3 first, and of these what has the fewest rounds."""

    def rank(key):
        against = ratio(table, *key)
        if against is None:
            return True, 0
        return against.median <= NEAR, against.rounds

    return sorted(keys, key=rank)


def hopeless(table, workload, parameter, peer):
    """Whether a peer is so far behind the best figure of a row that more rounds cannot make it the best peer."""
    figure = find(table, workload, parameter, peer)
    if figure is None:
        return True
    others = [other.best for other in peers_of(table, workload, parameter).values()]
    factor = HOPELESS_AT_ONCE if figure.rounds < 2 else HOPELESS
    if figure.is_rate:
        return figure.best * factor < max(others)
    return figure.best > factor * min(others)


def is_best_beside(table, workload, parameter, peer):
    """Whether a peer is the best one in what is measured beside a row: what it holds."""
    best = best_peer(table, f"{workload}-held", parameter)
    return best is not None and best[0] == peer


def nearly_done(rows, workload, parameter, peer):
    """Whether a peer was given up on a row, in these rows, when most of it was done."""
    for row in rows:
        if (row.peer, row.variant) == peer and (row.workload, row.parameter) == (workload, parameter) and row.value is None:
            found = GIVEN_UP.search(row.unit)
            return found is not None and int(found[1]) >= NEARLY_DONE * int(found[2])
    return False


def size(count):
    if count % MIB == 0:
        return f"{count // MIB} MiB"
    return f"{count // 1024} KiB" if count % 1024 == 0 else f"{count} B"


def label(workload, parameter):
    """What a row is called in a table."""
    if workload.endswith("-held"):
        return label(workload.removesuffix("-held"), parameter) + ": held / peak live"
    if workload == "pair":
        return f"pair, {size(parameter)}"
    if workload.startswith("random"):
        count = {"random": "100 000", "random-10000": "10 000", "random-1000": "1 000"}.get(workload, workload)
        return f"random, {count} of up to {parameter} MiB"
    if workload == "holes":
        return f"pair, {parameter} holes"
    if workload == "live":
        return f"pair, {parameter} live blocks"
    if workload in ("threads", "threads-shared"):
        where = "one stream" if workload == "threads-shared" else "a stream each" if parameter > 1 else "one stream of its own"
        return f"{parameter} thread{'s' if parameter > 1 else ''}, {where}"
    if workload in SHAPES:
        _, streams, threads = workload.split("-")
        who = "a migrating task" if threads == "migrating" else f"{threads} thread{'s' if threads != '1' else ''}"
        return f"{who}, {streams} stream{'s' if streams != '1' else ''}, up to {size(parameter << 10)}"
    if workload.startswith("kernels-"):
        return f"kernels, {parameter} {workload.removeprefix('kernels-')} stream{'s' if parameter > 1 else ''}"
    if workload.startswith("replay-"):
        return f"replay, {workload.removeprefix('replay-')} log"
    names = {
        "small-uniform": "4 B to 4 KiB, uniform: held / peak live",
        "small-log": "4 B to 4 KiB, log-uniform: held / peak live",
        "handoff": "handoff between two streams",
        "churn": "churn: most held / peak live",
        "churn-time": "churn",
    }
    return names.get(workload, f"{workload} {parameter}")


def markdown(header, lines):
    text = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    text += ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines]
    return "\n".join(text) + "\n"


def ratios_table(table, workloads):
    """Ours beside the best peer of every row."""
    lines = []
    for key in keys(table, workloads):
        ours, best, against = find(table, *key), best_peer(table, *key), ratio(table, *key)
        if ours or best:
            theirs = f"{' '.join(best[0])} {best[1]}" if best else ""
            lines.append([label(*key), str(ours or "-"), theirs, str(against or "")])
    return markdown(["row", "ours (pool)", "best peer", "ratio"], lines)


def keys(table, workloads):
    """The rows of the asked workloads in order, with what was measured beside them."""
    for workload in workloads:
        for parameter in WORKLOADS[workload]:
            yield workload, parameter
        for beside in ("-held", "-time"):
            yield from sorted(key for key in table if key[0] == workload + beside)


def figures_table(table, workloads):
    """Every peer beside every other: the best over the rounds."""
    shown = [key for key in keys(table, workloads) if key in table]
    peers = sorted({peer for key in shown for peer in table[key]}, key=lambda peer: (peer != OURS, peer[0] != OURS[0], peer[0] == LIMIT[0], peer))
    lines = []
    for key in shown:
        unit = next(iter(table[key].values())).unit
        digits = 1 if unit in ("ns", "us") else 2
        cells = [f"{table[key][peer].best:.{digits}f}" if peer in table[key] else "-" for peer in peers]
        lines.append([f"{label(*key)}{'' if unit == 'ratio' else ', ' + unit}", *cells])
    return markdown(["row", *(" ".join(peer) for peer in peers)], lines)


def layers_table(table):
    """What each layer over the pool costs."""
    asked = [("pair", 1 << 10), ("pair", MIB), ("random", 4), ("threads", 1), ("threads", 16)]
    asked = [key for key in asked if key in table]
    variants = ["pool", "budget", "null-log", "stack", "stack-log", "stack-csv", "guard"]
    lines = []
    for variant in variants:
        found = [find(table, *key, (OURS[0], variant)) for key in asked]
        if any(found):
            lines.append([variant, *(str(figure or "-") for figure in found)])
    return markdown(["stack", *(label(*key) for key in asked)], lines)


def left_out(rounds):
    """Why a row has no figure: one line for each row and reason."""
    lines = {}
    for row in (row for rows in rounds for row in rows):
        if row.value is None:
            where = row.peer if row.workload == "-" else f"{row.peer} {row.variant}, {row.workload} {row.parameter}"
            lines.setdefault(f"- {where}: {row.unit}", None)
    return "\n".join(lines)
