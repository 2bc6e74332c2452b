"""Rows of figures in, ratios and tables out. Starts no process and reads no file.

A figure is the best over the rounds: clocks of shared hosts change by a factor of two, and the best of several rounds is what the
code costs. A ratio is taken within each round, where both sides met the same clock, and is the median over the rounds. The spread
over the rounds stands beside both. What lies inside the spread is called equal.
"""

import csv
import io
import statistics
from dataclasses import dataclass

COLUMNS = ["peer", "variant", "workload", "parameter", "value", "unit"]
OURS = ("xlog", "pool")
# Host memory: shown as the limit, never compared with.
LIMIT = ("glibc", "malloc")
MIB = 1 << 20
RANDOM_SIZES = [1, 4, 64, 256, 1024, 4096]
HOLES = [4 << 10, 16 << 10, 64 << 10]
THREADS = [1, 2, 4, 8, 16]
LIVE = [1_000, 1_000_000]
RECORDS = 100_000
# Nearer to each other than this, two are about equal.
NEAR = 1.3
# In the order in which they are measured: what has a goal comes first.
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
}
# Our own parts, measured by their own benches.
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
    """How many times better ours is than the best peer: the median over the rounds, and the least and the most of them."""

    peer: tuple
    median: float
    low: float
    high: float
    rounds: int

    @property
    def is_equal(self):
        return self.low <= 1 <= self.high

    def __str__(self):
        spread = f" ({self.low:.1f} to {self.high:.1f})" if self.rounds > 1 else ""
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


def find(table, workload, parameter, peer=OURS):
    return table.get((workload, parameter), {}).get(peer)


def best_peer(table, workload, parameter):
    """The best peer of a row and its figure, or None. Our own variants are no peers."""
    peers = [
        (peer, figure)
        for peer, figure in table.get((workload, parameter), {}).items()
        if peer[0] not in (OURS[0], LIMIT[0])
    ]
    if not peers:
        return None
    return (max if peers[0][1].is_rate else min)(peers, key=lambda item: item[1].best)


def ratio(table, workload, parameter):
    """Ours against the best peer, or None where either has no figure."""
    ours, best = find(table, workload, parameter), best_peer(table, workload, parameter)
    if ours is None or best is None:
        return None
    peer, theirs = best
    # A cost below that of doing nothing is no cost; a nanosecond stands for it.
    least = 1e-6 if ours.is_rate else 1.0 if ours.unit == "ns" else 1e-6
    times = []
    for own, other in zip(ours.values, theirs.values):
        if own is not None and other is not None:
            own, other = max(own, least), max(other, least)
            times.append(own / other if ours.is_rate else other / own)
    if not times:
        own, other = max(ours.best, least), max(theirs.best, least)
        times = [own / other if ours.is_rate else other / own]
    return Ratio(peer, statistics.median(times), min(times), max(times), len(times))


def ratios(table):
    """{(workload, parameter): Ratio} of everything that ours and a peer measured."""
    found = ((key, ratio(table, *key)) for key in table if not key[0].endswith("-best"))
    return {key: value for key, value in found if value is not None}


def is_settled(table, workload, parameter):
    """Whether more rounds say nothing more: after three, ours and the best peer are about equal in all of them."""
    against = ratio(table, workload, parameter)
    return against is not None and against.rounds >= 3 and against.high <= NEAR and against.low >= 1 / NEAR


def hopeless(table, workload, parameter, peer, factor=2.0):
    """Whether a peer is so far behind the best one that more rounds cannot make it the best."""
    best = best_peer(table, workload, parameter)
    figure = find(table, workload, parameter, peer)
    if figure is None or best is None:
        return True
    if figure.is_rate:
        return figure.best * factor < best[1].best
    return figure.best > factor * best[1].best


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
