"""Rows of figures in, bars and tables out. Starts no process and reads no file.

A figure is the best over the rounds: clocks of shared hosts change by a factor of two, and the best of several rounds is what the
code costs. The spread over the rounds stands beside it. A bar that cannot be judged, for want of a figure, is not met.
"""

import csv
import io
from dataclasses import dataclass

COLUMNS = ["peer", "variant", "workload", "parameter", "value", "unit"]
OURS = ("xlog", "pool")
# Host memory: shown as the limit, never compared with.
LIMIT = ("glibc", "malloc")
MIB = 1 << 20
PAIR_SIZES = [256, 1 << 10, 64 << 10, MIB, 64 * MIB]
RANDOM_SIZES = [1, 4, 64, 256, 1024, 4096]
HOLES = [4 << 10, 16 << 10, 64 << 10]
THREADS = [1, 2, 4, 8, 16]
# Most reserved memory for each byte live at the peak; sizes above are reported without a bar.
RESERVED = {1: 1.08, 4: 1.08, 64: 1.20, 256: 1.30}
WORKLOADS = {"pair": PAIR_SIZES, "random": RANDOM_SIZES, "holes": HOLES, "threads": THREADS}


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
    """A row over all rounds."""

    best: float
    worst: float
    rounds: int
    unit: str

    def __str__(self):
        digits = 2 if self.unit in ("Mops/s", "ratio") and self.best < 100 else 1
        low, high = sorted((self.best, self.worst))
        spread = f" ({low:.{digits}f} to {high:.{digits}f})" if self.rounds > 1 else " (one round)"
        return f"{self.best:.{digits}f} {self.unit}{spread}".replace(" ratio", "")

    def overlaps(self, other):
        low, high = sorted((self.best, self.worst))
        other_low, other_high = sorted((other.best, other.worst))
        return low <= other_high and other_low <= high


@dataclass(frozen=True)
class Bar:
    """One line of the table. `met` is None where there is no goal."""

    name: str
    ours: str
    peer: str
    ratio: str
    goal: str
    met: bool | None
    note: str = ""

    @property
    def verdict(self):
        return self.note or {None: "", True: "met", False: "MISSED"}[self.met]


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
    for row in (row for rows in rounds for row in rows):
        if row.value is not None:
            key = (row.workload, row.parameter)
            values.setdefault(key, {}).setdefault((row.peer, row.variant), (row.unit, []))[1].append(row.value)
    result = {}
    for key, by_peer in values.items():
        for peer, (unit, seen) in by_peer.items():
            best, worst = (max(seen), min(seen)) if unit == "Mops/s" else (min(seen), max(seen))
            result.setdefault(key, {})[peer] = Figure(best, worst, len(seen), unit)
    return result


def best_peer(table, workload, parameter):
    """The best peer of a row and its figure, or None."""
    peers = [(peer, figure) for peer, figure in table.get((workload, parameter), {}).items() if peer not in (OURS, LIMIT)]
    if not peers:
        return None
    higher = peers[0][1].unit == "Mops/s"
    return (max if higher else min)(peers, key=lambda item: item[1].best)


def hopeless(table, workload, parameter, peer, factor=4.0):
    """Whether a peer is so far behind the best one that more rounds cannot make it the best."""
    best = best_peer(table, workload, parameter)
    figure = table.get((workload, parameter), {}).get(peer)
    if figure is None or best is None:
        return True
    if figure.unit == "Mops/s":
        return figure.best * factor < best[1].best
    return figure.best > factor * best[1].best


def size(count):
    if count % MIB == 0:
        return f"{count // MIB} MiB"
    return f"{count // 1024} KiB" if count % 1024 == 0 else f"{count} B"


def judge(table, workloads, cores):
    """Every bar of the asked workloads."""
    bars = []
    for workload in workloads:
        for parameter in WORKLOADS[workload]:
            bars.append(_against_peers(table, workload, parameter))
        bars.extend(_own(table, workload, cores))
    return bars


def _against_peers(table, workload, parameter):
    name = {
        "pair": f"pair, {size(parameter) if workload == 'pair' else ''}",
        "random": f"random, up to {parameter} MiB",
        "holes": f"pair, {parameter} holes",
        "threads": f"{parameter} thread{'s' if parameter > 1 else ''}",
    }[workload]
    ours = table.get((workload, parameter), {}).get(OURS)
    best = best_peer(table, workload, parameter)
    # How many times better than the best peer, whichever direction is better.
    times = None
    if ours and best and ours.best > 0 and best[1].best > 0:
        times = ours.best / best[1].best if workload == "threads" else best[1].best / ours.best
    goals, met = [], []

    def goal(text, reached):
        goals.append(text)
        met.append(reached)

    if workload == "pair":
        if parameter <= MIB:
            goal("1/6 of the best peer", times and times >= 6)
        most = 40 if parameter <= MIB else 80
        goal(f"<= {most} ns", ours and ours.best <= most)
    elif workload == "random":
        # A cost below that of doing nothing is no cost.
        goal("1/4 of the best peer", ours and best and (ours.best <= 0 or times and times >= 4))
    elif workload == "holes" and parameter != HOLES[0]:
        first = table.get((workload, HOLES[0]), {}).get(OURS)
        goal(f"<= 1.3 of {HOLES[0]} holes", ours and first and ours.best <= 1.3 * first.best)
    elif workload == "threads" and parameter == 16:
        goal("30 x the best peer", times and times >= 30)
    missing = "" if ours else "NOT JUDGED: no figure of ours"
    if goals and any(text.endswith("best peer") for text in goals) and not best:
        missing = missing or "NOT JUDGED: no peer"
    ratio = "" if times is None else f"{times:.1f} x better" if times >= 1 else f"{1 / times:.1f} x worse"
    if times is not None and ours.overlaps(best[1]):
        ratio = "equal"
    return Bar(
        name,
        str(ours) if ours else "",
        f"{' '.join(best[0])} {best[1]}" if best else "",
        ratio,
        ", ".join(goals),
        all(bool(reached) for reached in met) if goals else None,
        missing if goals else "",
    )


def _own(table, workload, cores):
    """Bars that concern ours alone."""

    def ours(name, parameter):
        return table.get((name, parameter), {}).get(OURS)

    def bar(name, figure, goal, met):
        return Bar(name, str(figure) if figure else "", "", "", goal, met, "" if figure else "NOT JUDGED: no figure of ours")

    bars = []
    if workload == "pair":
        figure = ours("stack", 1 << 10)
        bars.append(bar("pair, 1 KiB, budget over pool", figure, "<= 90 ns", bool(figure and figure.best <= 90)))
    if workload == "random":
        for parameter in RANDOM_SIZES:
            figure, most = ours("random-reserved", parameter), RESERVED.get(parameter)
            name = f"random, up to {parameter} MiB: reserved / peak live"
            if most is not None:
                bars.append(bar(name, figure, f"<= {most:.2f}", bool(figure and figure.best <= most)))
            elif figure:
                bars.append(bar(name, figure, "", None))
    if workload == "threads":
        one, all_of_them = ours("threads", 1), ours("threads", 16)
        least = 0.6 * min(cores, 16)
        met = bool(one and all_of_them and all_of_them.best >= least * one.best)
        scaled = f"{all_of_them.best / one.best:.1f} x" if one and all_of_them else ""
        note = "" if scaled else "NOT JUDGED: no figure of ours"
        bars.append(Bar("16 threads against our one", scaled, "", "", f">= {least:.1f} x ({cores} cores)", met, note))
    return bars


def _markdown(header, lines):
    text = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    text += ["| " + " | ".join(cell.replace("|", "/") for cell in line) + " |" for line in lines]
    return "\n".join(text) + "\n"


def bars_table(bars):
    return _markdown(
        ["row", "ours", "best peer", "ratio", "goal", "verdict"],
        [[bar.name, bar.ours, bar.peer, bar.ratio, bar.goal, bar.verdict] for bar in bars],
    )


def figures_table(table, workloads):
    """Every peer beside every other: the best over the rounds."""
    peers = sorted({peer for by_peer in table.values() for peer in by_peer}, key=lambda peer: (peer != OURS, peer == LIMIT, peer))
    lines = []
    for workload in workloads:
        for parameter in WORKLOADS[workload]:
            by_peer = table.get((workload, parameter), {})
            unit = "Mops/s" if workload == "threads" else "ns"
            label = size(parameter) if workload == "pair" else f"{parameter} MiB" if workload == "random" else str(parameter)
            cells = [f"{by_peer[peer].best:.{2 if unit == 'Mops/s' else 1}f}" if peer in by_peer else "-" for peer in peers]
            lines.append([f"{workload} {label}, {unit}", *cells])
    return _markdown(["row", *(" ".join(peer) for peer in peers)], lines)


def left_out(rounds):
    """Why a row has no figure: one line for each row and reason."""
    lines = {}
    for row in (row for rows in rounds for row in rows):
        if row.value is None:
            where = row.peer if row.workload == "-" else f"{row.peer} {row.variant}, {row.workload} {row.parameter}"
            lines.setdefault(f"- {where}: {row.unit}", None)
    return "\n".join(lines)
