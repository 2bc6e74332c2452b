"""The goals, and whether they are met. A bar that cannot be judged, for want of a figure, is not met.

A goal against the best peer is judged only where every peer of `report.PEERS` took part: the best of those that happened to run is not
the best peer.
"""

import statistics
from dataclasses import dataclass, replace

import report
from report import HOLES, LIVE, MIB, OURS, RANDOM_SIZES, WORKLOADS, find, label

UNJUDGED = "NOT JUDGED"
# The maximum memory held per byte live at the peak.
HELD = {1: 1.08, 4: 1.08, 64: 1.20, 256: 1.30}


@dataclass(frozen=True)
class Bar:
    """One line of the table."""

    name: str
    ours: str
    peer: str
    ratio: str
    goal: str
    met: bool
    note: str = ""

    @property
    def verdict(self):
        return self.note or ("met" if self.met else "MISSED")

    @property
    def is_judged(self):
        return not self.note.startswith(UNJUDGED)


def table_of(bars):
    return report.markdown(
        ["row", "ours", "best peer", "ratio", "goal", "verdict"],
        [[bar.name, bar.ours, bar.peer, bar.ratio, bar.goal, bar.verdict] for bar in bars],
    )


def summary(bars, present):
    """One line: how many bars are met, and which peers ran. `present` is what `report.took_part` found."""
    met, unjudged = sum(bar.met for bar in bars), sum(not bar.is_judged for bar in bars)
    everywhere = set().union(*present.values())
    ran = [peer for peer in report.PEERS if peer in everywhere]
    absent = [peer for peer in report.PEERS if peer not in everywhere]
    text = f"{met} of {len(bars)} bars met, {unjudged} not judged; peers that ran: {', '.join(ran) or 'none'}"
    return text + (f"; without {', '.join(absent)}" if absent else "")


def judge(table, present, workloads, own, cores):
    """Every bar of the asked workloads and of our own parts. `present` is what `report.took_part` found."""
    makers = {
        "pair": lambda table: _pairs(table, present),
        "random": lambda table: [*_random(table, present, "random"), *_held(table)],
        "random-10000": lambda table: _random(table, present, "random-10000"),
        "random-1000": lambda table: _random(table, present, "random-1000"),
        "holes": _holes,
        "live": _live,
        "threads": lambda table: _threads(table, present, cores),
        "threads-shared": lambda table: [_against(table, present, "threads-shared", count, 1) for count in (8, 16)],
        "small-uniform": lambda table: [_most(table, "small-uniform", 100_000, 1.15)],
        "small-log": lambda table: [_most(table, "small-log", 100_000, 1.40)],
        "kernels-cold": _kernels,
        "budget": lambda table: [_most(table, "budget-added", 1024, 15, "budget", "a budget adds to a pair")],
        "logging": _logging,
        "ordering": _ordering,
    }
    bars = []
    for part in [*workloads, *own]:
        bars += makers[part](table) if part in makers else []
    return bars


def _most(table, workload, parameter, most, variant=OURS[1], name=None):
    """Ours is at most so much."""
    figure = find(table, workload, parameter, (OURS[0], variant))
    text = f"<= {most:.2f}" if isinstance(most, float) else f"<= {most} {figure.unit if figure else 'ns'}"
    note = "" if figure else f"{UNJUDGED}: no figure of ours"
    return Bar(name or label(workload, parameter), str(figure or ""), "", "", text, bool(figure and figure.best <= most), note)


def _against(table, present, workload, parameter, times, most=None):
    """Ours is so many times better than the best peer and, where `most` is given, at most that."""
    ours, best = find(table, workload, parameter), report.best_peer(table, workload, parameter)
    against = report.ratio(table, workload, parameter)
    goals = [f"{times} x the best peer" if workload.startswith("threads") else f"1/{times} of the best peer"]
    met = against is not None and against.median >= times
    if most is not None:
        goals.append(f"<= {most} ns")
        met = met and ours.best <= most
    absent = [peer for peer in report.PEERS if peer not in present.get((workload, parameter), ())]
    note = ""
    if ours is None:
        note = f"{UNJUDGED}: no figure of ours"
    elif best is None:
        note = f"{UNJUDGED}: no peer"
    elif absent:
        note = f"{UNJUDGED}: no figure of {', '.join(absent)}"
    met = met and not note
    theirs = f"{' '.join(best[0])} {best[1]}" if best else ""
    return Bar(label(workload, parameter), str(ours or ""), theirs, str(against or ""), ", ".join(goals), met, note)


def _quotient(name, above, below, goal, is_met):
    """A bar on the quotient of two figures of ours."""
    if above is None or below is None:
        return Bar(name, "", "", "", goal, False, f"{UNJUDGED}: no figure of ours")
    value = above.best / below.best
    return Bar(name, f"{value:.2f} ({above} against {below})", "", "", goal, is_met(value))


def _within_rounds(name, above, below, goal, is_met):
    """A bar on the median of the quotients of two figures of ours that are measured side by side, round by round."""
    if above is None or below is None:
        return Bar(name, "", "", "", goal, False, f"{UNJUDGED}: no figure of ours")
    values = [one / other for one, other in zip(above.values, below.values) if one is not None and other is not None]
    if not values:
        return Bar(name, "", "", "", goal, False, f"{UNJUDGED}: never measured in one round")
    value = statistics.median(values)
    text = f"{value:.2f} ({min(values):.2f} to {max(values):.2f}; {above} against {below})"
    return Bar(name, text, "", "", goal, is_met(value))


def _pairs(table, present):
    for parameter in WORKLOADS["pair"]:
        if parameter <= MIB:
            yield _against(table, present, "pair", parameter, 5, 40)
        else:
            yield _most(table, "pair", parameter, 80)
    yield _most(table, "pair", 1024, 90, "stack", "pair, 1 KiB, the full stack of a shared runtime on the pool")


def _random(table, present, workload):
    return [_against(table, present, workload, parameter, 4) for parameter in RANDOM_SIZES]


def _held(table):
    return [_most(table, "random-held", parameter, most) for parameter, most in HELD.items()]


def _holes(table):
    first = find(table, "holes", HOLES[0])
    for count in HOLES[1:]:
        name = f"pair, {count} holes against {HOLES[0]}"
        yield _quotient(name, find(table, "holes", count), first, "<= 1.3", lambda value: value <= 1.3)


def _live(table):
    few, many = (find(table, "live", count) for count in LIVE)
    yield _quotient(f"pair, {LIVE[1]} live blocks against {LIVE[0]}", many, few, "<= 1.5", lambda value: value <= 1.5)


def _threads(table, present, cores):
    yield _against(table, present, "threads", 16, 30)
    least = 0.6 * min(cores, 16)
    one, many = find(table, "threads", 1), find(table, "threads", 16)
    bar = _quotient("16 threads against our one", many, one, f">= {least:.1f} ({cores} cores)", lambda value: value >= least)
    yield replace(bar, note=bar.note or ("" if bar.met else _scaling(table)))
    under = find(table, "threads", 16, (OURS[0], "budget"))
    yield _within_rounds("16 threads under a budget against none", under, many, ">= 0.65", lambda value: value >= 0.65)


def _scaling(table):
    """How far the host itself goes with 16 threads, where that was measured."""
    said = []
    for variant, what in [("nothing", "the loop without an allocator"), ("malloc", "malloc")]:
        one, many = (find(table, "threads", count, (report.LIMIT[0], variant)) for count in (1, 16))
        if one and many:
            said.append(f"{what} {many.best / one.best:.1f}")
    return f"MISSED; on this host {', '.join(said)}" if said else ""


def _kernels(table):
    cold, warm = find(table, "kernels-cold", 4), find(table, "kernels-warm", 4)
    yield _quotient("kernels, 4 cold streams against warm ones", cold, warm, "<= 1.1", lambda value: value <= 1.1)


def _logging(table):
    yield _most(table, "logging-added", 1024, 10, "null-sink", "a log into nothing adds to an operation, above its clock reads")
    yield _most(table, "logging-added", 1024, 40, "binary-sink", "a binary log adds to an operation, above its clock reads")
    yield _most(table, "statistics-added", 1024, 15, "statistics", "statistics add to a pair")


def _ordering(table):
    for access in ("read", "write"):
        name = f"a {access} on the own stream, prepare and finish"
        yield _most(table, "order-same-stream", 256, 20, access, name)
    yield _most(table, "order-alternating", 256, 1.3, "async", "streams in turn, against bare record and wait")
    for count in (1 << 10, MIB):
        name = f"async pair, {report.size(count)}, against the bare driver"
        yield _most(table, "order-async", count, 1.15, "async", name)
    yield _most(table, "order-overlap", 20, 1.1, "pool", "a pipeline over two streams, against bare events")
