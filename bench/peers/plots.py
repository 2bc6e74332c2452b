"""Line charts as SVG, from the standard library alone: light background, labelled axes, ours in front."""

import html
import math

import report
from report import HOLES, LIMIT, OURS, RANDOM_SIZES, THREADS, WORKLOADS

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 46, 56
COLOURS = ["#4c78a8", "#f58518", "#54a24b", "#b279a2", "#9d755d", "#72b7b2", "#bab0ac", "#2f6f6f", "#eeca3b", "#6b6b6b"]
OURS_COLOUR = "#d62728"


def _ticks(low, high, is_log):
    """Round numbers between two, both included where they are round."""
    if is_log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        factors = (1,) if last - first > 4 else (1, 2, 5)
        values = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    else:
        rough = (high - low) / 5 or 1
        unit = 10 ** math.floor(math.log10(rough))
        step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
        values = [step * count for count in range(math.floor(low / step), math.ceil(high / step) + 1)]
    return [value for value in values if low * 0.999 <= value <= high * 1.001]


def _number(value):
    return f"{value:,.0f}".replace(",", " ") if value >= 10 else f"{value:g}"


def line_chart(title, x_label, y_label, series, names=None, y_log=True):
    """`series` is {name: [(x, y), ...]}, drawn in order with the first in front; x values are evenly spaced, `names` are their labels."""
    series = {name: [(x, y) for x, y in points if y > 0] for name, points in series.items()}
    series = {name: points for name, points in series.items() if points}
    xs = sorted({x for points in series.values() for x, _ in points})
    ys = [y for points in series.values() for _, y in points]
    if not xs:
        return None
    low, high = (min(ys) / 1.3, max(ys) * 1.3) if y_log else (min(0, *ys), max(ys) * 1.08)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def across(x):
        return LEFT + width * (xs.index(x) + 0.5) / len(xs)

    def up(y):
        part = math.log(y / low) / math.log(high / low) if y_log else (y - low) / (high - low)
        return TOP + height * (1 - part)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="26" font-size="15" fill="#222222">{html.escape(title)}</text>',
    ]
    for value in _ticks(low, high, y_log):
        at = f"{up(value):.1f}"
        out.append(f'<line x1="{LEFT}" y1="{at}" x2="{LEFT + width}" y2="{at}" stroke="#e4e4e4"/>')
        out.append(f'<text x="{LEFT - 8}" y="{at}" dy="4" text-anchor="end" fill="#555555">{_number(value)}</text>')
    for x in xs:
        text = (names or {}).get(x, _number(x))
        out.append(f'<text x="{across(x):.1f}" y="{TOP + height + 18}" text-anchor="middle" fill="#555555">{html.escape(text)}</text>')
    out.append(f'<path d="M{LEFT} {TOP}V{TOP + height}H{LEFT + width}" fill="none" stroke="#888888"/>')
    middle = TOP + height / 2
    out.append(f'<text x="{LEFT + width / 2}" y="{HEIGHT - 14}" text-anchor="middle" fill="#222222">{html.escape(x_label)}</text>')
    out.append(f'<text x="18" y="{middle}" text-anchor="middle" fill="#222222" transform="rotate(-90 18 {middle})">{html.escape(y_label)}</text>')
    # Sorted by the last point, so that the legend follows the ends of the lines.
    legend = sorted(series, key=lambda name: up(series[name][-1][1]))
    colours = {name: COLOURS[at % len(COLOURS)] for at, name in enumerate(name for name in series if name != " ".join(OURS))}
    for name in reversed(series):
        is_ours = name == " ".join(OURS)
        colour, line = (OURS_COLOUR, 3) if is_ours else (colours[name], 1.6)
        points = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in series[name])
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{line}"/>')
        for x, y in series[name]:
            out.append(f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="{3.5 if is_ours else 2.5}" fill="{colour}"/>')
    for at, name in enumerate(legend):
        is_ours = name == " ".join(OURS)
        y = TOP + 10 + 18 * at
        colour = OURS_COLOUR if is_ours else colours[name]
        left = LEFT + width + 16
        out.append(f'<line x1="{left}" y1="{y}" x2="{left + 18}" y2="{y}" stroke="{colour}" stroke-width="{3 if is_ours else 2}"/>')
        weight = ' font-weight="bold"' if is_ours else ""
        out.append(f'<text x="{left + 24}" y="{y + 4}" fill="#222222"{weight}>{html.escape(name)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _series(table, workload, parameters):
    """Ours first, then the peers; of ours only the pool."""
    found = {}
    for parameter in parameters:
        for peer, figure in table.get((workload, parameter), {}).items():
            if peer in (OURS, LIMIT) or peer[0] not in (OURS[0], LIMIT[0]):
                found.setdefault(peer, []).append((parameter, figure.best))
    ordered = sorted(found, key=lambda peer: (peer != OURS, peer == LIMIT, peer))
    return {" ".join(peer): found[peer] for peer in ordered}


def charts(table):
    """{file name: SVG} of everything that has figures."""
    sizes = {count: report.size(count) for count in WORKLOADS["pair"]}
    plans = {
        "pair": ("Allocate and free, one stream", "size", "ns for a pair", WORKLOADS["pair"], sizes, True),
        "random": ("RMM's random allocations, 100 000 blocks", "largest size, MiB", "ns for an operation", RANDOM_SIZES, None, True),
        "holes": ("A 1 KiB pair among holes", "holes", "ns for a pair", HOLES, None, True),
        "threads": ("Threads with a stream each", "threads", "million operations a second", THREADS, None, True),
        "threads-shared": ("Threads on one stream", "threads", "million operations a second", THREADS, None, True),
        "kernels-cold": ("Four kernels on streams that are new to the allocator", "streams", "microseconds", [1, 2, 4], None, True),
        "churn-at": ("Memory held in a long churn", "part done, %", "held / peak live", list(range(20, 101, 10)), None, False),
    }
    drawn = {}
    for workload, (title, x_label, y_label, parameters, names, y_log) in plans.items():
        text = line_chart(title, x_label, y_label, _series(table, workload, parameters), names, y_log)
        if text:
            drawn[f"{workload}.svg"] = text
    return drawn
