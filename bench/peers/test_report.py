"""Tests of the bars, the tables, the plots and the comparison; no GPU needed: python3 -m unittest discover -s bench/peers"""

import importlib.machinery
import importlib.util
import math
import pathlib
import subprocess
import sys
import tempfile
import types
import unittest
import xml.etree.ElementTree

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import bars as goals  # noqa: E402
import plans  # noqa: E402
import plots  # noqa: E402
import report  # noqa: E402


def rounds(*texts):
    return [report.parse(text) for text in texts]


class Everybody:
    """Every peer took part in every row."""

    def get(self, *_):
        return report.PEERS


def bars(text, part, cores=16, present=Everybody()):
    workloads, own = ([part], []) if part in report.WORKLOADS else ([], [part])
    return {bar.name: bar for bar in goals.judge(report.figures(rounds(text)), present, workloads, own, cores)}


def script(name):
    """A program without an ending, as a module."""
    loader = importlib.machinery.SourceFileLoader(name, str(HERE / name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


class Bars(unittest.TestCase):
    def test_pair_needs_both_the_ratio_and_the_time(self):
        for ours, peer, met in [(30, 150, True), (30, 149, False), (41, 900, False)]:
            text = f"xlog,pool,pair,1024,{ours},ns\nrmm,arena,pair,1024,{peer},ns\nrmm,pool,pair,1024,5000,ns\n"
            bar = bars(text, "pair")["pair, 1 KiB"]
            self.assertEqual(bar.met, met, text)
            self.assertTrue(bar.peer.startswith("rmm arena"), bar.peer)

    def test_large_pair_is_judged_by_time_alone(self):
        for ours, met in [(80, True), (80.5, False)]:
            text = f"xlog,pool,pair,{64 << 20},{ours},ns\nrmm,arena,pair,{64 << 20},100,ns\n"
            self.assertEqual(bars(text, "pair")["pair, 64 MiB"].met, met)

    def test_random_is_a_quarter_on_the_whole_grid(self):
        for workload, name in [("random", "100 000"), ("random-10000", "10 000"), ("random-1000", "1 000")]:
            for ours, met in [(50, True), (51, False), (-3, True)]:
                text = f"xlog,pool,{workload},64,{ours},ns\ndriver,async,{workload},64,200,ns\n"
                self.assertIs(bars(text, workload)[f"random, {name} of up to 64 MiB"].met, met)

    def test_held_memory_has_its_own_bars(self):
        text = "xlog,pool,random-held,4,1.09,ratio\nxlog,pool,random-held,64,1.19,ratio\n"
        found = bars(text, "random")
        self.assertIs(found["random, 100 000 of up to 4 MiB: held / peak live"].met, False)
        self.assertIs(found["random, 100 000 of up to 64 MiB: held / peak live"].met, True)
        for workload, most in [("small-uniform", 1.15), ("small-log", 1.40)]:
            for value, met in [(most, True), (most + 0.01, False)]:
                (bar,) = bars(f"xlog,pool,{workload},100000,{value},ratio\n", workload).values()
                self.assertIs(bar.met, met)

    def test_holes_are_flat_against_the_first(self):
        text = "xlog,pool,holes,4096,20,ns\nxlog,pool,holes,16384,26,ns\nxlog,pool,holes,65536,26.1,ns\n"
        found = bars(text, "holes")
        self.assertIs(found["pair, 16384 holes against 4096"].met, True)
        self.assertIs(found["pair, 65536 holes against 4096"].met, False)

    def test_a_million_live_blocks_against_a_thousand(self):
        for many, met in [(60, True), (61, False)]:
            (bar,) = bars(f"xlog,pool,live,1000,40,ns\nxlog,pool,live,1000000,{many},ns\n", "live").values()
            self.assertIs(bar.met, met)

    def test_threads_against_the_best_peer_and_against_one_of_ours(self):
        text = (
            "xlog,pool,threads,1,15,Mops/s\nxlog,pool,threads,16,120,Mops/s\nxlog,budget,threads,16,78,Mops/s\n"
            "rmm,arena,threads,16,4,Mops/s\nrmm,pool,threads,16,0.6,Mops/s\n"
        )
        found = bars(text, "threads")
        self.assertIs(found["16 threads, a stream each"].met, True)
        self.assertIs(found["16 threads against our one"].met, False)
        self.assertIs(found["16 threads under a budget against none"].met, True)
        self.assertIs(bars(text, "threads", cores=13)["16 threads against our one"].met, True)
        slower = bars(text.replace(",120,", ",119,").replace(",78,", ",77,"), "threads")
        self.assertIs(slower["16 threads, a stream each"].met, False)
        self.assertIs(slower["16 threads under a budget against none"].met, False)
        # Each round has its own clock: the best of one side is not compared with the best of the other.
        text = ["xlog,pool,threads,16,100,Mops/s\nxlog,budget,threads,16,70,Mops/s\n", "xlog,pool,threads,16,200,Mops/s\nxlog,budget,threads,16,110,Mops/s\n"]
        rows = report.figures(rounds(text[0], text[1], text[0].replace("70", "90")))
        (bar,) = [bar for bar in goals.judge(rows, Everybody(), ["threads"], [], 16) if "budget" in bar.name]
        self.assertEqual((bar.met, bar.ours.split(";")[0]), (True, "0.70 (0.55 to 0.90"))

    def test_a_host_that_does_not_scale_is_told_beside_the_miss(self):
        text = "xlog,pool,threads,1,15,Mops/s\nxlog,pool,threads,16,120,Mops/s\n"
        limits = "glibc,nothing,threads,1,100,Mops/s\nglibc,nothing,threads,16,900,Mops/s\n"
        self.assertEqual(bars(text, "threads")["16 threads against our one"].verdict, "MISSED")
        bar = bars(text + limits, "threads")["16 threads against our one"]
        self.assertEqual(bar.verdict, "MISSED; on this host the loop without an allocator 9.0")
        self.assertIs(bar.met, False)
        self.assertIn("no peer", bars(text + limits, "threads")["16 threads, a stream each"].verdict)

    def test_threads_on_one_stream_are_as_fast_as_the_best_peer(self):
        text = "xlog,pool,threads-shared,{0},10,Mops/s\nrmm,arena,threads-shared,{0},{1},Mops/s\n"
        for count, peer, met in [(8, 10, True), (8, 10.1, False), (16, 9, True)]:
            found = bars(text.format(count, peer), "threads-shared")
            self.assertIs(found[f"{count} threads, one stream"].met, met)

    def test_every_shape_has_a_label_of_its_own(self):
        labels = [report.label(shape, kib) for shape in report.SHAPES for kib in report.WORKLOADS[shape]]
        self.assertEqual(len(set(labels)), 64)
        self.assertEqual(report.label("shape-16-4", 64), "4 threads, 16 streams, up to 64 KiB")
        self.assertEqual(report.label("shape-1-migrating", 16 << 10), "a migrating task, 1 stream, up to 16 MiB")

    def test_our_own_parts_have_their_bars(self):
        text = (
            "xlog,budget,budget-added,1024,15,ns\nxlog,null-sink,logging-added,1024,10.1,ns\nxlog,binary-sink,logging-added,1024,40,ns\n"
            "xlog,statistics,statistics-added,1024,15,ns\nxlog,read,order-same-stream,256,20,ns\nxlog,write,order-same-stream,256,21,ns\n"
            "xlog,async,order-alternating,256,1.3,ratio\nxlog,async,order-async,1024,1.16,ratio\nxlog,pool,order-overlap,20,1.1,ratio\n"
        )
        verdicts = [bar.verdict for part in report.OWN for bar in bars(text, part).values()]
        lost = "NOT JUDGED: no figure of ours"
        self.assertEqual(verdicts, ["met", "MISSED", "met", "met", "met", "MISSED", "met", "MISSED", lost, "met"])

    def test_the_full_stack_and_cold_streams(self):
        name = "pair, 1 KiB, the full stack of a shared runtime on the pool"
        self.assertIs(bars("xlog,stack,pair,1024,90,ns\n", "pair")[name].met, True)
        self.assertIs(bars("xlog,stack,pair,1024,90.1,ns\n", "pair")[name].met, False)
        text = "xlog,pool,kernels-cold,4,110,us\nxlog,pool,kernels-warm,4,100,us\n"
        (bar,) = bars(text, "kernels-cold").values()
        self.assertIs(bar.met, True)

    def test_what_is_missing_is_not_met(self):
        for text, why in [
            ("rmm,pool,random,4,100,ns\n", "no figure of ours"),
            ("xlog,pool,random,4,1,ns\n", "no peer"),
            ("xlog,pool,random,4,1,ns\nrmm,pool,random,4,,skipped: slow\n", "no peer"),
            ("xlog,pool,random,4,1,ns\nglibc,malloc,random,4,100,ns\n", "no peer"),
            ("xlog,pool,random,4,1,ns\nxlog,async,random,4,100,ns\n", "no peer"),
        ]:
            bar = bars(text, "random")["random, 100 000 of up to 4 MiB"]
            self.assertIs(bar.met, False, text)
            self.assertIn(why, bar.verdict)


class Peers(unittest.TestCase):
    """A goal against the best peer is judged only where all peers took part."""

    def judged(self, *runs):
        """The bar of a row that ours wins by far, and the line that sums the run up."""
        every = [rounds(run) for run in runs]
        present = report.took_part(*every)
        found = goals.judge(report.figures(every[0]), present, ["random"], [], 16)
        (bar,) = [bar for bar in found if bar.name == "random, 100 000 of up to 4 MiB"]
        return bar, goals.summary([bar], present)

    def test_a_goal_without_a_figure_of_every_peer_is_not_judged(self):
        ours, cudarc = "xlog,pool,random,4,1,ns\n", "cudarc,plain,random,4,100,ns\n"
        failed = "".join(f"{peer},x,random,4,,skipped: ended with status 1: no driver\n" for peer in report.PEERS if peer != "cudarc")
        for text in [ours + cudarc, ours + cudarc + failed]:
            bar, line = self.judged(text)
            self.assertIs(bar.met, False)
            self.assertEqual(bar.verdict, "NOT JUDGED: no figure of rmm, torch, cupy, published, driver")
            self.assertEqual(line, "0 of 1 bars met, 1 not judged; peers that ran: cudarc; without rmm, torch, cupy, published, driver")

    def test_a_goal_with_all_of_them_is_judged_and_the_line_names_them(self):
        everybody = "".join(f"{peer},x,random,4,100,ns\n" for peer in report.PEERS)
        for ours, met in [(1, 1), (99, 0)]:
            bar, line = self.judged(f"xlog,pool,random,4,{ours},ns\n{everybody}")
            self.assertEqual((bar.met, bar.is_judged), (bool(met), True))
            self.assertEqual(line, f"{met} of 1 bars met, 0 not judged; peers that ran: rmm, torch, cupy, cudarc, published, driver")
        one_fails = everybody.replace("rmm,x,random,4,100,ns", "rmm,x,random,4,,skipped: ended with status 1: no memory")
        bar, _ = self.judged(f"xlog,pool,random,4,1,ns\n{one_fails}")
        self.assertEqual(bar.verdict, "NOT JUDGED: no figure of rmm")

    def test_a_peer_that_was_given_up_as_too_slow_took_part_and_so_did_one_of_the_earlier_run(self):
        ours = "xlog,pool,random,4,1,ns\n"
        slow = "".join(f"{peer},x,random,4,,skipped: over 0.4 s; 90 of 200 operations done; 9 ns each so far\n" for peer in report.PEERS[1:])
        bar, _ = self.judged(f"{ours}rmm,pool,random,4,100,ns\n{slow}")
        self.assertEqual(bar.verdict, "met")
        # A second run measures only the closest peers again; the others took part in the first.
        everybody = "".join(f"{peer},x,random,4,100,ns\n" for peer in report.PEERS)
        bar, _ = self.judged(f"{ours}rmm,pool,random,4,100,ns\n", everybody)
        self.assertEqual(bar.verdict, "met")


class Figures(unittest.TestCase):
    def test_the_best_round_counts_and_the_spread_is_kept(self):
        table = report.figures(rounds("a,b,pair,256,10,ns\na,b,threads,4,2,Mops/s\n", "a,b,pair,256,8,ns\na,b,threads,4,3,Mops/s\n"))
        pair, threads = table["pair", 256]["a", "b"], table["threads", 4]["a", "b"]
        self.assertEqual((pair.best, pair.worst, pair.rounds), (8, 10, 2))
        self.assertEqual((threads.best, threads.worst, str(threads)), (3, 2, "3.00 Mops/s (2.00 to 3.00)"))

    def test_a_ratio_is_taken_within_the_round(self):
        table = report.figures(
            rounds(
                "xlog,pool,pair,256,10,ns\na,b,pair,256,60,ns\n",
                "xlog,pool,pair,256,20,ns\na,b,pair,256,140,ns\n",
                "xlog,pool,pair,256,10,ns\n",
            )
        )
        found = report.ratio(table, "pair", 256)
        self.assertEqual((found.peer, found.median, found.least, found.most, found.rounds), (("a", "b"), 6.5, 6.0, 7.0, 2))

    @staticmethod
    def rows(ours, **peers):
        """The rounds of a row: a value for each, None where it was not measured."""
        named = {"xlog,pool": ours, **{f"a,{name}": values for name, values in peers.items()}}
        count = max(map(len, named.values()))
        return rounds(
            *(
                "".join(f"{name},pair,256,{values[at]},ns\n" for name, values in named.items() if at < len(values) and values[at] is not None)
                for at in range(count)
            )
        )

    def test_the_spread_holds_nineteen_of_twenty_further_rounds(self):
        # Values from tables of Student's t-distribution.
        for freedom, wanted in [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (9, 2.2622), (19, 2.0930), (100, 1.9840)]:
            self.assertAlmostEqual(report.student(freedom), wanted, places=4)
        found = report.ratio(report.figures(self.rows([10, 10, 10, 10], b=[50, 60, 60, 72])), "pair", 256)
        factor = math.exp(3.18245 * math.log(1.2) * math.sqrt(2 / 3) * math.sqrt(1.25))
        self.assertAlmostEqual(found.low, 6 / factor, places=4)
        self.assertAlmostEqual(found.high, 6 * factor, places=4)
        self.assertEqual((found.least, found.most), (5.0, 7.2))

    def test_few_rounds_have_no_spread_and_the_same_in_all_rounds_has_none_either(self):
        one = report.ratio(report.figures(self.rows([10], b=[60])), "pair", 256)
        self.assertEqual(str(one), "6.0 x better (one round)")
        two = report.ratio(report.figures(self.rows([10, 10], b=[60, 80])), "pair", 256)
        self.assertEqual(str(two), "7.0 x better (6.0 and 8.0)")
        same = report.ratio(report.figures(self.rows([1.5, 1.5, 1.5], b=[3.0, 3.0, 3.0])), "pair", 256)
        self.assertEqual((same.low, same.median, same.high, str(same)), (2.0, 2.0, 2.0, "2.0 x better (2.0 to 2.0)"))

    def test_the_best_peer_has_the_least_median_and_not_the_best_figure(self):
        table = report.figures(self.rows([10, 10, 10], lucky=[90, 40, 90], steady=[60, 60, 60]))
        self.assertEqual(report.best_peer(table, "pair", 256)[0], ("a", "steady"))
        self.assertEqual(report.ratio(table, "pair", 256).median, 6.0)
        # A slow round of both does not change the result.
        table = report.figures(self.rows([10, 18, 10], both=[None, 90, 50], alone=[56, 99, 56]))
        self.assertEqual(report.best_peer(table, "pair", 256)[0], ("a", "both"))

    def test_a_peer_of_fewer_than_half_of_the_rounds_is_not_the_best(self):
        table = report.figures(self.rows([10, 10, 10, 10], once=[50], always=[60, 60, 60, 60]))
        self.assertEqual(report.best_peer(table, "pair", 256)[0], ("a", "always"))
        table = report.figures(self.rows([10, 10, 10, 10], twice=[50, 50], always=[60, 60, 60, 60]))
        self.assertEqual(report.best_peer(table, "pair", 256)[0], ("a", "twice"))
        # The memory held does not depend on a clock.
        text = "xlog,pool,small-log,100000,1,ratio\na,always,small-log,100000,3,ratio\n"
        table = report.figures(rounds(text + "a,once,small-log,100000,2,ratio\n", text, text, text))
        self.assertEqual(report.best_peer(table, "small-log", 100000)[0], ("a", "once"))

    def test_what_lies_in_the_spread_is_equal(self):
        table = report.figures(
            rounds("xlog,pool,holes,4096,10,ns\na,b,holes,4096,11,ns\n", "xlog,pool,holes,4096,14,ns\na,b,holes,4096,13,ns\n")
        )
        self.assertTrue(str(report.ratio(table, "holes", 4096)).startswith("equal"))

    def test_only_hopeless_peers_are_left_out_of_later_rounds(self):
        table = report.figures(
            rounds(
                "a,b,pair,256,100,ns\na,c,pair,256,299,ns\na,d,pair,256,301,ns\nxlog,pool,pair,256,1,ns\n"
                "a,b,threads,4,4,Mops/s\na,c,threads,4,1.3,Mops/s\na,d,threads,4,1.4,Mops/s\n"
            )
        )
        self.assertFalse(report.hopeless(table, "pair", 256, ("a", "b")))
        self.assertFalse(report.hopeless(table, "pair", 256, ("a", "c")))
        self.assertTrue(report.hopeless(table, "pair", 256, ("a", "d")))
        self.assertTrue(report.hopeless(table, "pair", 256, ("a", "without a figure")))
        self.assertTrue(report.hopeless(table, "threads", 4, ("a", "c")))
        self.assertFalse(report.hopeless(table, "threads", 4, ("a", "d")))
        # Two rounds decide what one does not.
        table = report.figures(self.rows([1, 1], b=[100, 100], c=[199, 250], d=[201, 250]))
        self.assertFalse(report.hopeless(table, "pair", 256, ("a", "c")))
        self.assertTrue(report.hopeless(table, "pair", 256, ("a", "d")))

    def test_a_row_is_settled_when_three_rounds_found_it_about_equal_or_two_hold_the_same(self):
        def table(*pairs, unit="ns"):
            return report.figures(rounds(*(f"xlog,pool,holes,4096,{ours},{unit}\na,b,holes,4096,{peer},{unit}\n" for ours, peer in pairs)))

        self.assertFalse(report.is_settled(table((10, 10), (10, 12)), "holes", 4096), "two rounds")
        self.assertTrue(report.is_settled(table((10, 10), (10, 13), (13, 10)), "holes", 4096))
        self.assertFalse(report.is_settled(table((10, 10), (10, 14), (10, 10)), "holes", 4096), "one was above")
        self.assertFalse(report.is_settled(table((10, 10), (14, 10), (10, 10)), "holes", 4096), "one was below")
        self.assertTrue(report.is_settled(table((1, 5), (1, 5.04), unit="ratio"), "holes", 4096), "what is held is the same")
        self.assertFalse(report.is_settled(table((1, 5), (1, 5.1), unit="ratio"), "holes", 4096), "not the same")
        self.assertFalse(report.is_settled(table((1, 5), unit="ratio"), "holes", 4096), "one round")
        timed = report.figures(rounds(*["xlog,pool,churn,1,1,ratio\na,b,churn,1,1,ratio\nxlog,pool,churn-time,1,1,ns\na,b,churn-time,1,9,ns\n"] * 3))
        self.assertFalse(report.is_settled(timed, "churn", 1), "the time beside it has a ratio")
        self.assertFalse(report.is_settled(table((10, 50), (10, 50), (10, 50)), "holes", 4096), "a clock may still change it")
        self.assertFalse(report.is_settled(table((10, 10)), "pair", 256), "nothing measured")

    def test_a_round_begins_with_what_has_the_fewest_rounds_and_ends_with_what_is_about_equal(self):
        def row(parameter, times):
            return f"xlog,pool,pair,{parameter},10,ns\na,b,pair,{parameter},{10 * times},ns\n"

        table = report.figures(rounds(row(1, 5) + row(2, 5) + row(3, 1.2) + row(4, 5), row(1, 5) + row(4, 5), row(1, 5)))
        keys = [("pair", parameter) for parameter in (1, 2, 3, 4, 5)]
        self.assertEqual([key[1] for key in report.in_order(table, keys)], [2, 4, 1, 5, 3])

    def test_a_line_that_is_no_row_is_refused(self):
        with self.assertRaisesRegex(ValueError, "on cuda:0"):
            report.parse("on cuda:0 (H200)\n")

    def test_every_table_has_every_peer(self):
        text = "xlog,pool,pair,1024,10,ns\nrmm,arena,pair,1024,60,ns\nxlog,stack,pair,1024,80,ns\nxlog,pool,churn,200000,1.1,ratio\n"
        table = report.figures(rounds(text))
        page = report.figures_table(table, ["pair", "churn"])
        self.assertIn("| pair, 1 KiB, ns | 10.0 | 80.0 | 60.0 |", page)
        self.assertIn("| pair, 1 KiB | 10.0 ns (one round) | rmm arena 60.0 ns (one round) | 6.0 x better (one round) |", report.ratios_table(table, ["pair"]))
        self.assertIn("| stack | 80.0 ns (one round) |", report.layers_table(table))


class Plots(unittest.TestCase):
    def test_charts_are_well_formed_and_label_their_axes(self):
        lines = [f"{peer},pair,{size},{size / 100 + at},ns" for at, peer in enumerate(["xlog,pool", "rmm,<a&b>"]) for size in report.WORKLOADS["pair"]]
        drawn = plots.charts(report.figures(rounds("\n".join(lines))))
        self.assertEqual(list(drawn), ["pair.svg"])
        root = xml.etree.ElementTree.fromstring(drawn["pair.svg"])
        texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
        for wanted in ["size", "ns for a pair", "64 MiB", "xlog pool", "rmm <a&b>"]:
            self.assertIn(wanted, texts)

    def test_one_point_and_nothing_below_zero(self):
        chart = plots.line_chart("t", "x", "y", {"a": [(1, 5.0), (2, -1.0)]})
        xml.etree.ElementTree.fromstring(chart)
        self.assertEqual(chart.count("<circle"), 1)
        self.assertIsNone(plots.line_chart("t", "x", "y", {"a": [(1, 0.0)]}))


class Comparison(unittest.TestCase):
    def folder(self, text):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        header = "workload,parameter,peer,variant,ratio,low,high,rounds,least,most\n"
        text = "".join(f"{line},1,9\n" for line in text.splitlines())
        (folder / "ratios.csv").write_text(header + text, encoding="utf-8")
        return folder

    def verdicts(self, first, second):
        compare = script("compare")
        lines = compare.compare(compare.read(self.folder(first)), compare.read(self.folder(second)))
        return {key[0]: verdict for key, _, _, verdict in lines}

    def test_each_median_lies_in_the_spread_of_the_other(self):
        one = "pair,256,rmm,arena,6.0,5.0,7.2,3\nholes,4096,rmm,arena,1.2,1.1,1.3,3\n"
        for other, verdict in [
            ("pair,256,rmm,pool,7.0,5.8,8.4,3\nholes,4096,a,b,1.0,0.5,1.0,3\n", "agree"),
            ("pair,256,rmm,pool,7.0,6.5,7.5,3\n", "DIFFER"),
            ("pair,256,rmm,pool,7.5,5.0,11.2,3\n", "DIFFER"),
        ]:
            self.assertEqual(self.verdicts(one, other), {"pair": verdict})
            self.assertEqual(self.verdicts(other, one), {"pair": verdict})

    def test_few_rounds_and_one_run_are_listed_and_not_judged(self):
        one = "pair,256,a,b,6.0,6.0,6.0,2\nlive,1000,a,b,2,1,4,3\nholes,4096,a,b,3,3,3,1\n"
        self.assertEqual(self.verdicts(one, "pair,256,a,b,60,50,70,3\n"), {"pair": "few rounds", "live": "one run", "holes": "one run"})

    def test_what_has_no_spread_agrees_to_a_hundredth(self):
        for other, verdict in [(2.019, "agree"), (1.981, "agree"), (2.03, "DIFFER"), (1.97, "DIFFER")]:
            found = self.verdicts("churn,1,a,b,2,2,2,4\n", f"churn,1,a,b,{other},{other},{other},4\n")
            self.assertEqual(found, {"churn": verdict}, other)

    def test_the_status_says_whether_all_agree(self):
        def status(first, second):
            command = [sys.executable, HERE / "compare", self.folder(first), self.folder(second)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            return done.returncode, done.stdout.strip().splitlines()[-1:]

        rows = "pair,256,a,b,6,5,7,3\nlive,1,a,b,6,6,6,1\nlive,2,a,b,6,6,6,3\n"
        said = "1 of 1 ratios above 1.3 agree; not judged: 1 with too few rounds in a run, 1 in one run only"
        self.assertEqual(status(rows, "pair,256,a,b,6,5,7,3\nlive,1,a,b,6,5,7,3\n"), (0, [said]))
        self.assertEqual(status(rows, "pair,256,a,b,8,7,9,3\n")[0], 1)
        self.assertEqual(status(rows, "live,1,a,b,6,5,7,3\n")[0], 1, "nothing was judged")
        self.assertEqual(status("", "")[0], 2)

    def test_what_run_writes_is_what_compare_reads(self):
        run, compare = script("run"), script("compare")
        session = types.SimpleNamespace(rounds=Figures.rows([10, 10, 10], b=[60, 66, 60]))
        table = report.figures(session.rounds)
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        run.write(folder, session, table, [], ["pair"], [])
        (read,), wanted = compare.read(folder).values(), report.ratio(table, "pair", 256)
        self.assertEqual((read.peer, read.rounds), (wanted.peer, 3))
        for name in ("median", "low", "high", "least", "most"):
            self.assertAlmostEqual(getattr(read, name), getattr(wanted, name), places=3)


class Plans(unittest.TestCase):
    HEADER = "Thread,Time,Action,Pointer,Size,Stream\n"

    def steps(self, text):
        return list(plans.plan_of((self.HEADER + text).splitlines(keepends=True)))

    def test_slots_are_reused_and_what_is_left_is_freed(self):
        log = "1,0,allocate,0x10,100,0x1\n1,0,allocate,0x20,200,0x2\n2,0,free,0x10,100,0x1\n1,0,allocate failure,(nil),9,0x1\n1,0,allocate,0x30,300,0x2\n"
        self.assertEqual(self.steps(log), [(0, 0, 100), (1, 1, 200), (0, 0, 0), (1, 0, 300), (0, 1, 0), (0, 0, 0)])

    def test_a_log_that_is_none_is_refused(self):
        for text in ["1,0,free,0x10,100,0x1\n", "1,0,allocate,0x10,1,0\n1,0,allocate,0x10,1,0\n"]:
            with self.assertRaises(ValueError):
                self.steps(text)
        with self.assertRaises(ValueError):
            list(plans.plan_of(["a,b\n"]))


if __name__ == "__main__":
    unittest.main()
