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
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zipfile

FOLDER = pathlib.Path(__file__).resolve().parent
LIMIT_SECONDS = 100
AT_ONCE = 5
LINES = 15
TURNS = 5
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


class Worker:
    """A process of `compare.py`."""

    def __init__(self, allocator, program, environment, cores):
        self.name = f"{program} {allocator}"
        self.errors = tempfile.TemporaryFile("w+")
        command = [sys.executable, str(FOLDER / "compare.py"), allocator, program]
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            cwd=tempfile.gettempdir(),
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()
        self.errors.close()

    def read(self):
        """Reads an answer; a process that ended or printed something else is an error."""
        watch = threading.Timer(LIMIT_SECONDS, self.process.kill)
        watch.start()
        line = self.process.stdout.readline()
        watch.cancel()
        try:
            return json.loads(line)
        except ValueError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            self.process.kill()
            status = self.process.wait()
            if status == 77:
                raise MissingFramework(line.strip()) from None
            self.errors.seek(0)
            raise RuntimeError(f"{self.name}: {reason(status, line + self.process.stdout.read(), self.errors.read())}") from None

    def ask(self, line):
        # The reader says why a process has ended.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        return self.read()


class MissingFramework(Exception):
    pass


def compare(environment, rounds):
    """Runs each program on all allocators by turns, so that all have the same clock and the same load, and prints the table.

    Each round has new processes, which share four cores. They take turns of one step; a step is compared with the native one of the same turn.
    """
    cores = sorted(os.sched_getaffinity(0))[:4]
    failed = False
    print("\n| program | allocator | peak requested MiB | peak reserved MiB | reserved / requested | median step ms | step / native, by rounds |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for program in ("training", "generation"):
        try:
            print_rows(program, [measured(program, environment, cores, first) for first in range(rounds)])
        except MissingFramework as missing:
            print(f"SKIP compare: {missing}")
        except RuntimeError as error:
            print(f"FAIL compare {error}", flush=True)
            failed = True
    return failed


def measured(program, environment, cores, first):
    """Runs a program on all allocators; for each its peaks and the times of its steps in the turns after the first."""
    with contextlib.ExitStack() as stack:
        workers = [(name, stack.enter_context(Worker(name, program, environment, cores))) for name in ALLOCATORS]
        steps = [worker.read() for _, worker in workers][0]
        times = {name: [] for name in ALLOCATORS}
        for turn in range(TURNS):
            for step in range(steps):
                begins = (first + turn + step) % len(workers)
                for name, worker in [*workers[begins:], *workers[:begins]]:
                    took = worker.ask(step)
                    if turn > 0:
                        times[name].append(took)
        return {name: (*worker.ask("memory"), times[name]) for name, worker in workers}


def print_rows(program, rounds):
    """Prints the rows of a program: the largest peaks, the median of all steps, and the median of the ratios to native steps of each round."""
    for name in ALLOCATORS:
        requested = max(figures[name][0] for figures in rounds) / 2**20
        reserved = max(figures[name][1] for figures in rounds) / 2**20
        step = statistics.median(took for figures in rounds for took in figures[name][2])
        ratios = [statistics.median(own / native for own, native in zip(figures[name][2], figures["native"][2])) for figures in rounds]
        print(
            f"| {program} | {name} | {requested:.0f} | {reserved:.0f} | {reserved / requested:.3f} | {step:.2f} | "
            f"{statistics.median(ratios):.3f} ({', '.join(f'{ratio:.3f}' for ratio in ratios)}) |",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", nargs="?", help="the wheel of xlogmem")
    parser.add_argument("parts", nargs="*", metavar="PART", help="some parts; all, and the comparison, by default")
    parser.add_argument("--list", action="store_true", help="print the names of the parts")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the comparison, each with new processes")
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
