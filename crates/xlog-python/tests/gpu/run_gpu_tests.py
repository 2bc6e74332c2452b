#!/usr/bin/env python3
"""Runs the tests of the Python package that need a GPU and the frameworks.

    python3 run_gpu_tests.py WHEEL              every part whose framework is installed, then the comparison
    python3 run_gpu_tests.py WHEEL graph oom    some parts
    python3 run_gpu_tests.py --list             their names

The wheel is unpacked into a temporary folder: nothing is installed, and no network is needed. Each part is a process of its own with a time
limit, and prints PASS, SKIP (the framework is missing) or FAIL with the last lines of its output. The comparison prints a table of peak memory
and median step time of PyTorch's own allocator, expandable segments and ours. Exit status 1 if a part failed.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import zipfile

FOLDER = pathlib.Path(__file__).resolve().parent
LIMIT_SECONDS = 100
AT_ONCE = 5
LINES = 15
ALLOCATORS = ("native", "expandable", "xlogmem")


def unpacked(wheel, folder):
    """Unpacks a wheel as `pip install --target` does."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    commands = folder / "bin"
    commands.mkdir()
    for script in folder.glob("*.data/scripts/*"):
        target = commands / script.name
        script.rename(target)
        target.chmod(0o755)
    # What the caller has unpacked elsewhere, such as RMM, stays importable.
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}


def run(script, arguments, environment):
    """Runs a part; its status (0, 77 for a missing framework, or a failure) and its output."""
    command = [sys.executable, str(FOLDER / script), *arguments]
    begin = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False, cwd=tempfile.gettempdir()
        )
        status, output, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as expired:
        text = lambda part: (part or b"").decode(errors="replace") if isinstance(part, bytes) else part or ""
        status, output, errors = "timeout", text(expired.stdout), text(expired.stderr)
    return status, output, errors, time.monotonic() - begin


def reason(status, output, errors):
    """The status and the last lines of a part that failed, what it printed before what it wrote to standard error."""
    lines = [line for line in [*output.splitlines(), *errors.splitlines()] if line.strip()]
    return "\n    ".join([f"status {status}", *lines[-LINES:]])


def run_parts(names, environment):
    failed = False
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as workers:
        runs = {workers.submit(run, "parts.py", [name], environment): name for name in names}
        for done in concurrent.futures.as_completed(runs):
            status, output, errors, seconds = done.result()
            if status == 0:
                print(f"PASS {runs[done]} ({seconds:.0f} s) {output.strip().splitlines()[-1] if output.strip() else ''}", flush=True)
            elif status == 77:
                print(f"SKIP {runs[done]}: {output.strip()}", flush=True)
            else:
                failed = True
                print(f"FAIL {runs[done]}: {reason(status, output, errors)}", flush=True)
    return failed


def compare(environment, rounds):
    """Runs the programs on each allocator, one at a time, and prints the table."""
    figures, failed = {}, False
    for name in ALLOCATORS * rounds:
        status, output, errors, seconds = run("compare.py", [name], environment)
        if status == 77:
            print(f"SKIP compare: {output.strip()}")
            return failed
        try:
            measured = json.loads(output.splitlines()[-1]) if status == 0 else None
        except (IndexError, ValueError):
            measured = None
        if measured is None:
            print(f"FAIL compare {name}: {reason(status, output, errors)}", flush=True)
            failed = True
            continue
        for program, figure in measured.items():
            best = figures.setdefault((program, name), figure)
            best["milliseconds"] = min(best["milliseconds"], figure["milliseconds"])
        print(f"PASS compare {name} ({seconds:.0f} s)", flush=True)
        print_table(figures)
    return failed


def print_table(figures):
    """Prints the figures that there are. It is printed after each allocator, so that a run cut short has those of the others."""
    print("\n| program | allocator | peak requested MiB | peak reserved MiB | reserved / requested | median step ms | step / native |")
    print("|---|---|---|---|---|---|---|")
    for (program, name), figure in sorted(figures.items()):
        native = figures.get((program, "native"))
        ratio = f"{figure['milliseconds'] / native['milliseconds']:.3f}" if native else "-"
        print(
            f"| {program} | {name} | {figure['requested'] / 2**20:.0f} | {figure['reserved'] / 2**20:.0f} | "
            f"{figure['reserved'] / figure['requested']:.3f} | {figure['milliseconds']:.2f} | {ratio} |",
            flush=True,
        )
    print(flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", nargs="?", help="the wheel of xlogmem")
    parser.add_argument("parts", nargs="*", metavar="PART", help="some parts; all, and the comparison, by default")
    parser.add_argument("--list", action="store_true", help="print the names of the parts")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of the comparison; the best time counts")
    arguments = parser.parse_args()
    listed = subprocess.run([sys.executable, str(FOLDER / "parts.py"), "--list"], capture_output=True, text=True, check=True)
    names = listed.stdout.split()
    if arguments.list:
        print("\n".join([*names, "compare"]))
        return 0
    if arguments.wheel is None:
        parser.error("the wheel is missing")
    unknown = sorted(set(arguments.parts) - {*names, "compare"})
    if unknown:
        parser.error(f"unknown part '{unknown[0]}'; accepted are {', '.join([*names, 'compare'])}")
    with tempfile.TemporaryDirectory() as folder:
        environment = unpacked(arguments.wheel, pathlib.Path(folder))
        wanted = arguments.parts or [*names, "compare"]
        failed = run_parts([name for name in names if name in wanted], environment)
        if "compare" in wanted:
            failed |= compare(environment, arguments.rounds)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
