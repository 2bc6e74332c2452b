"""Tests of how rows are measured: the clock, the rounds, the limits and the programs; no GPU needed."""

import ast
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import types
import unittest
import unittest.mock

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import clock  # noqa: E402
import programs  # noqa: E402
import python_peers  # noqa: E402
import report  # noqa: E402
from session import Session  # noqa: E402


class Asked:
    """Options of a run."""

    limit, begin, seconds, out = 1.0, 0.0, 0.01, None


def rounds(*texts):
    return [report.parse(text) for text in texts]


class Rounds(unittest.TestCase):
    def test_a_row_that_was_nearly_done_is_asked_for_once_more(self):
        (rows,) = rounds(
            "a,near,pair,256,,skipped: over 0.4 s; 120 of 200 operations done; 9 ns each so far\n"
            "a,far,pair,256,,skipped: over 0.4 s; 100 of 200 operations done\na,died,pair,256,,skipped: ended\na,fine,pair,256,9,ns\n"
        )
        found = {name: report.nearly_done(rows, "pair", 256, ("a", name)) for name in ("near", "far", "died", "fine", "none")}
        self.assertEqual(found, {"near": True, "far": False, "died": False, "fine": False, "none": False})
        session = Session(Asked, [], None)
        session.rounds = [rows, []]
        table = report.figures(session.rounds)
        self.assertTrue(session.is_wanted(2, "a", "near", "pair", 256, table))
        self.assertFalse(session.is_wanted(2, "a", "far", "pair", 256, table))
        self.assertFalse(session.is_wanted(3, "a", "near", "pair", 256, table))

    def test_who_holds_the_least_is_measured_again_even_where_it_is_slow(self):
        text = "xlog,pool,random,1,10,ns\na,b,random,1,50,ns\na,c,random,1,900,ns\na,d,random,1,900,ns\n"
        held = "xlog,pool,random-held,1,1.1,ratio\na,c,random-held,1,1.0,ratio\na,d,random-held,1,1.2,ratio\n"
        table = report.figures(rounds(text + held))
        session = Session(Asked, [], None)
        self.assertEqual([session.is_wanted(3, "a", name, "random", 1, table) for name in "bcd"], [True, True, False])

    def test_later_rounds_put_our_pool_beside_those_who_can_be_the_best_peer(self):

        class Fake:
            def __init__(self, peer, variants):
                self.peer, self.name, self.variants = peer, peer, variants

        programs = [Fake("xlog", ["pool", "stack", "guard"]), Fake("a", ["next", "near", "far"]), Fake("glibc", ["malloc"])]
        session = Session(Asked, programs, None)
        session.rounds = [[], []]
        text = "xlog,pool,pair,1024,1,ns\nxlog,stack,pair,1024,2,ns\nxlog,guard,pair,1024,9,ns\n"
        peers = "a,near,pair,1024,10,ns\na,next,pair,1024,29,ns\na,far,pair,1024,31,ns\nglibc,malloc,pair,1024,1,ns\n"
        table = report.figures(rounds(text + peers))

        def order(number):
            return [f"{program.peer} {variant}" for program, variant in session.contenders(number, "pair", 1024, table)]

        self.assertEqual(order(1), ["xlog pool", "a next", "a near", "a far", "glibc malloc", "xlog stack", "xlog guard"])
        self.assertEqual(order(2), ["xlog stack", "a next", "a near", "xlog pool"])
        self.assertEqual(order(3), ["xlog pool", "a near", "a next", "xlog stack"])


    def test_after_a_run_with_everybody_those_who_are_near_begin_and_what_is_equal_is_measured_once(self):
        class Fake:
            def __init__(self, peer, variants):
                self.peer, self.name, self.variants = peer, peer, variants

        text = "xlog,pool,{0},4096,1,ns\na,near,{0},4096,{1},ns\na,far,{0},4096,99,ns\n"
        far = text.format("churn", 1.2) + text.format("churn-time", 2)
        near = report.figures(rounds(text.format("holes", 10) + text.format("live", 1.2) + far))
        programs = [Fake("xlog", ["pool"]), Fake("a", ["near", "far", "gone"])]
        known = {(name, 4096, ("a", variant)) for name in ("holes", "live", "churn") for variant in ("near", "far", "gone")}
        known |= {(name, 4096, ("xlog", "pool")) for name in ("holes", "live", "churn")}
        session = Session(Asked, programs, None, (near, known))
        session.rounds = [[]]

        def order(workload, parameter=4096):
            return [f"{program.peer} {variant}" for program, variant in session.contenders(1, workload, parameter, {})]

        self.assertEqual(order("holes"), ["xlog pool", "a near"])
        self.assertEqual(order("pair", 256), ["xlog pool", "a near", "a far", "a gone"], "nobody was asked, so everybody is")
        self.assertEqual([session.is_about_equal(name, 4096) for name in ("holes", "live", "churn", "pair")], [False, True, False, False])
        self.assertFalse(Session(Asked, programs, None).is_about_equal("live", 4096), "no run before")


    def test_nothing_to_measure_is_a_round_all_the_same_and_what_was_measured_is_kept(self):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

        class Options(Asked):
            rounds, limit, begin, out = 3, 1000.0, time.monotonic(), folder / "out"

        class Workshop:
            def clock(self):
                raise programs.Missing("none")

        session = Session(Options, [], None)
        session.measure(Workshop(), [], [])
        self.assertEqual(session.rounds, [[]])
        session.rounds = rounds("xlog,pool,pair,256,1,ns\n", "xlog,pool,pair,256,,skipped: no; none\na,b,pair,256,2.5,ns\n")
        session.keep()
        self.assertEqual(report.read_rows(Options.out / "raw.csv"), session.rounds)
        (folder / "raw.csv").write_text("something,else\n", encoding="utf-8")
        with self.assertRaises(ValueError):
            report.read_rows(folder / "raw.csv")

    def test_an_attempt_in_which_a_program_failed_does_not_replace_one_with_figures(self):
        # Three slow clocks, each better than the previous: a figure, none, and another figure.
        attempts = [(5.0, 0.5), (None, 0.7), (6.0, 0.6)]

        class Told(Session):
            def attempt(self, wanted, workload, parameter, threads, patience):
                value, rate = attempts.pop(0)
                return [report.Row("a", "b", workload, parameter, value, "ns")], rate, 0.0

            def left(self):
                return 100.0

            to_lose = left

        session = Told(Asked, [], None)
        session.clock = types.SimpleNamespace(is_slow=lambda rate: rate < 0.9)
        session.rounds = [[]]
        session.run_row(2, "pair", 256, {})
        self.assertEqual(([row.value for row in session.rounds[-1]], attempts), ([6.0], []))


class Clocks(unittest.TestCase):
    """A host of two processors whose rates are told in advance; time goes on with every look."""

    def make(self, *rates):
        self.told, self.at, self.asked = rates, 0.0, []

        def meter(text):
            self.asked.append(text)
            now = self.told[min(len(self.asked), len(self.told)) - 1]
            self.at += 0.05
            return [report.Row("host", "cores", "alone", at, rate, "M/s") for at, rate in enumerate(now) if text in ("each", at)]

        def sleep(seconds):
            self.at += seconds

        return clock.Clock(meter, lambda: self.at, sleep)

    def test_it_stays_where_it_is_fast_and_moves_when_that_is_over(self):
        found = self.make((90, 100), (90, 86), (90, 84), (90, 84))
        self.assertEqual(found.choose(0.5), 1)
        found.forget()
        self.assertEqual((found.choose(0.5), self.asked), (1, ["each", 1]))
        found.forget()
        self.assertEqual((found.choose(0.5), self.asked), (0, ["each", 1, 1, "each"]))
        self.assertEqual(found.usual, 100)

    def test_it_waits_for_a_fast_one_and_not_for_long(self):
        found = self.make((100, 50), (50, 50), (50, 50), (50, 99))
        found.choose(0.5)
        found.forget()
        self.assertEqual((found.choose(0.5), found.rate), (1, 99))
        found = self.make((100, 50), (50, 51))
        found.choose(0.5)
        found.forget()
        began = self.at
        self.assertEqual((found.choose(0.5), found.is_slow(found.rate)), (1, True))
        self.assertTrue(0.5 < self.at - began < 0.7, self.at)
        count = len(self.asked)
        found.choose(0.0)
        self.assertEqual(len(self.asked), count, "no time to look")

    def test_many_looks_tell_what_is_usual(self):
        found = self.make((200,), *[(100,)] * (clock.MANY - 1))
        for _ in range(clock.MANY - 1):
            found.several(1)
        self.assertEqual((found.usual, found.is_slow(100)), (200, True))
        found.several(1)
        self.assertEqual((found.usual, found.is_slow(100), found.is_slow(80)), (100, False, True))

    def test_several_are_the_fastest(self):
        self.assertEqual(self.make((3, 9)).several(1), {1})
        self.assertEqual(self.make((3, 9)).several(5), {0, 1})

    def session(self, rates, number, to_lose=math.inf):
        """A row of two contenders, whose values tell which request they answered, under a clock with these rates."""
        answers = []

        class Fake:
            peer = name = "a"
            variants = ["b", "c"]
            failures = 0

            def ask(self, variant, workload, parameter, options, log, timeout, processors):
                answers.append(processors)
                return [report.Row("a", variant, workload, parameter, float(len(answers)), "ns")]

        class Told(Session):
            def to_lose(self):
                return to_lose

            def left(self):
                return 100.0

            def contenders(self, *_):
                return [(program, variant) for program in self.programs for variant in program.variants]

        session = Told(Asked, [Fake()], None)
        session.clock = self.make(*rates)
        session.rounds = [[]]
        self.answers = answers
        session.run_row(number, "pair", 256, {})
        return session, [row.value for row in session.rounds[-1]]

    def test_a_row_that_met_a_slow_clock_is_measured_again_as_a_whole(self):
        # The clock falls after the second contender and recovers for the second attempt.
        session, values = self.session([(100,), (100,), (60,), (100,)], 2)
        self.assertEqual((values, session.again, session.slow), ([3.0, 4.0], 1, 0))

    def test_the_attempt_with_the_best_clock_is_kept_and_there_are_three(self):
        slow = [(60,)] * 20
        session, values = self.session([(100,), (100,), (80,), *slow], 2)
        self.assertEqual((values, len(self.answers), session.slow, session.rows), ([1.0, 2.0], 6, 1, 1))

    def test_the_first_round_and_a_spent_budget_measure_once(self):
        for number, to_lose in [(1, math.inf), (2, -1.0)]:
            session, values = self.session([(100,), (60,)], number, to_lose)
            self.assertEqual((values, session.slow, session.again), ([1.0, 2.0], 1, 0))
            self.assertRegex(session.about_clock(), "^1 of 1 rows of one thread met a slow clock to the end, 0 were measured again")

    def test_threads_get_the_fastest_processors_and_one_more_than_they_are(self):
        session = Session(Asked, [], None)
        session.clock = self.make((3, 9, 5, 7, 1))
        answers = []

        class Fake:
            peer, name, failures = "a", "a", 0

            def ask(self, variant, workload, parameter, options, log, timeout, processors):
                answers.append(processors)
                return []

        for workload, parameter in [("threads", 1), ("threads-shared", 2), ("handoff", 1), ("threads", 16), ("pair", 256)]:
            session.attempt([(Fake(), "b")], workload, parameter, session.threads_of(workload, parameter), 0.5)
        self.assertEqual(answers, [{1, 3}, {1, 2, 3}, {1, 2, 3}, {0, 1, 2, 3, 4}, {1}])

    def test_waiting_and_measuring_again_have_a_budget(self):
        session = Session(Asked, [], None)
        session.since -= 100
        session.lost = 29.0
        self.assertAlmostEqual(session.to_lose(), 1.0, places=1)

    def test_a_clock_that_dies_leaves_the_rows(self):
        class Gone:
            def __call__(self, text):
                raise OSError("gone")

            def stop(self):
                pass

        session = Session(Asked, [], None)
        session.clock = clock.Clock(Gone())
        self.assertEqual((session.processor(0.1), session.clock), (session.everywhere, None))


class Limits(unittest.TestCase):
    def test_limits_are_the_same_in_every_program_and_in_the_text(self):
        root = HERE.parent.parent
        text = (root / "docs" / "benchmarks.md").read_text(encoding="utf-8")
        wanted = {name: float(value) for name, value in re.findall(r"^ *\| `(\w+)` \|.*\| ([\d.]+) s \|$", text, re.M)}
        self.assertEqual(set(wanted), {"random", "filling", "small", "replay", "churn"})
        header = (HERE / "measure.hpp").read_text(encoding="utf-8")
        found = re.findall(r"inline constexpr double (\w+) += ([\d.]+);", header)
        self.assertEqual({name: float(value) for name, value in found}, wanted)
        rust = (root / "crates/xlog-cuda/benches/peers/workloads.rs").read_text(encoding="utf-8")
        found = re.findall(r"    pub const (\w+): f64 = ([\d.]+);", rust)
        self.assertEqual({name.lower(): float(value) for name, value in found}, wanted)
        python = re.search(r"^LIMITS = (\{.*\})$", (HERE / "python_peers.py").read_text(encoding="utf-8"), re.M)
        # Small blocks are not measured in Python.
        self.assertEqual(ast.literal_eval(python[1]) | {"small": wanted["small"]}, wanted)

    def test_runs_are_as_many_in_every_program(self):
        header = (HERE / "measure.hpp").read_text(encoding="utf-8")
        rust = (HERE.parent.parent / "crates/xlog-cuda/benches/peers/workloads.rs").read_text(encoding="utf-8")
        for name in ("MOST_RUNS", "FEW_RUNS", "LEAST_IDLE_RUNS"):
            wanted = str(getattr(python_peers, name))
            self.assertEqual(re.search(rf"int {name.lower()} += (\d+);", header)[1], wanted)
            self.assertEqual(re.search(rf"const {name}: usize = (\d+);", rust)[1], wanted)

    def test_as_many_runs_do_nothing_as_were_timed_and_directly_after_them(self):
        for steps, wanted in [(0.001, 25), (0.03, 5)]:
            done, now = [], [0.0]

            def run(peer, *_):
                done.append("idle" if isinstance(peer, python_peers.Nothing) else "timed")
                now[0] += steps
                return steps

            class Peer:
                def stream(self):
                    return None

                def synchronize(self):
                    pass

            row = unittest.mock.Mock(device=None, parameter=1, seconds=0.1, make=Peer)
            with (
                unittest.mock.patch.object(python_peers, "random_run", run),
                unittest.mock.patch.object(python_peers.time, "perf_counter", lambda: now[0]),
            ):
                python_peers.random(row, 1000)
            idle = done.count("idle")
            self.assertEqual((idle, done[-idle:]), (wanted, ["idle"] * wanted))

    def test_three_runs_are_timed_where_they_end_in_four_times_the_time(self):
        for each, wanted in [(0.01, 10), (0.09, 3), (0.11, 3), (0.21, 2), (0.5, 1)]:
            now = [0.0]

            def run():
                now[0] += each
                return each

            with unittest.mock.patch.object(python_peers.time, "perf_counter", lambda: now[0]):
                self.assertEqual(len(python_peers.timed(run, 0.0999)), wanted, each)

    def test_no_limit_follows_the_time_of_a_row(self):
        pattern = re.compile(r"(limit|given_up).*[2-9](\.0)? \* .*seconds")
        for path in [*HERE.glob("*.hpp"), HERE / "python_peers.py", *(HERE.parent.parent / "crates/xlog-cuda/benches/peers").glob("*.rs")]:
            for line in path.read_text(encoding="utf-8").splitlines():
                self.assertIsNone(pattern.search(line), f"{path.name}: {line}")


class Programs(unittest.TestCase):
    class Options:
        seconds = 0.01
        inputs = []

    def ask(self, code, requests, timeout=5):
        log = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        program = programs.Program("p", ["v"], [sys.executable, "-c", code])
        self.addCleanup(program.stop)
        return [program.ask("v", "pair", number, self.Options, log, timeout) for number in requests]

    def test_a_program_is_asked_again_and_one_that_dies_is_started_anew(self):
        code = (
            "import sys\n"
            "for line in sys.stdin:\n"
            "    v, w, n = line.strip().split(':')\n"
            "    if n == '2': sys.exit('gone')\n"
            "    print(f'p,{v},{w},{n},1.5,ns', flush=True)\n"
            "    print('.', flush=True)\n"
        )
        first, second, third = self.ask(code, [1, 2, 3])
        self.assertEqual([row.value for row in first + third], [1.5, 1.5])
        self.assertRegex(second[0].unit, "skipped: ended with status 1: gone")

    def test_a_program_that_was_just_started_first_answers_what_does_not_count(self):
        code = (
            "import os, sys\n"
            "for at, line in enumerate(sys.stdin):\n"
            "    v, w, n = line.strip().split(':')\n"
            "    print(f'p,{v},{w},{n},{at},{len(os.sched_getaffinity(0))} processors', flush=True)\n"
            "    print('.', flush=True)\n"
        )
        log = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        program = programs.Program("p", ["v"], [sys.executable, "-c", code])
        self.addCleanup(program.stop)
        (row,) = program.ask("v", "pair", 7, self.Options, log, 5, {min(os.sched_getaffinity(0))})
        self.assertEqual((row.parameter, row.value, row.unit), (7, 1, "1 processors"))

    def test_a_program_that_hangs_loses_the_row_only(self):
        ((row,),) = self.ask("import time; time.sleep(60)", [1], timeout=0.3)
        self.assertIn("took over", row.unit)

    def test_the_programs_in_cpp_and_python_answer_alike(self):
        compiler = shutil.which("g++")
        if compiler is None:
            self.skipTest("no g++")
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        host = folder / "host"
        subprocess.run([compiler, "-O1", "-std=c++17", "-pthread", HERE / "host.cpp", "-ldl", "-o", host], check=True)
        (folder / "llm.plan").write_text("0 0 100\n1 1 200\n0 0 0\n1 1 0\n", encoding="ascii")
        rows = ["pair:256", "holes:64", "live:64", "threads:2", "threads-shared:2", "random-1000:1", "random-1000:4096", "replay-llm:1"]
        seen = []
        for command, variant in [([host], "malloc"), ([sys.executable, HERE / "python_peers.py", "--peer", "nothing"], "python")]:
            asked = [f"{variant}:{row}" for row in rows]
            done = subprocess.run([*command, "--seconds", "2", "--plans", folder, *asked], capture_output=True, text=True, check=True)
            answered = report.parse(done.stdout)
            self.assertTrue(all(row.value is not None for row in answered), done.stdout)
            seen.append([(row.workload, row.parameter, row.unit) for row in answered])
        self.assertEqual(seen[0], seen[1])

    def test_cores_are_counted_and_bad_arguments_are_named(self):
        compiler = shutil.which("g++")
        if compiler is None:
            self.skipTest("no g++")
        cores = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory())) / "cores"
        subprocess.run([compiler, "-O1", "-std=c++17", "-pthread", HERE / "cores.cpp", "-o", cores], check=True)
        done = subprocess.run([cores, "--seconds", "0.005"], capture_output=True, text=True, check=True)
        ((row,)) = report.parse(done.stdout)
        self.assertEqual((row.peer, row.workload, row.unit), ("host", "cores", "cores"))
        self.assertTrue(0 < row.value < 2 * row.parameter, done.stdout)
        alone = report.parse(subprocess.run([cores, "--each", "--seconds", "0.005"], capture_output=True, text=True, check=True).stdout)
        self.assertEqual([row.parameter for row in alone], sorted(os.sched_getaffinity(0)))
        self.assertTrue(all(row.value > 0 for row in alone), alone)
        meter = programs.Meter([cores, "--serve"])
        self.addCleanup(meter.stop)
        last = max(os.sched_getaffinity(0))
        self.assertEqual([row.parameter for row in meter("each")], [row.parameter for row in alone])
        self.assertEqual([row.parameter for row in meter(last)], [last])
        (refused,) = meter("none")
        self.assertIn("accepted are", refused.unit)
        for arguments in (["--second", "1"], ["--seconds", "none"]):
            refused = subprocess.run([cores, *arguments], capture_output=True, text=True, check=False)
            self.assertEqual((refused.returncode, "accepted" in refused.stderr), (2, True), refused.stderr)


if __name__ == "__main__":
    unittest.main()
