"""Tests of the bars; no GPU needed: python3 -m unittest discover bench/peers"""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import report  # noqa: E402


def rounds(*texts):
    return [report.parse(text) for text in texts]


def bars(text, workload, cores=16):
    return {bar.name: bar for bar in report.judge(report.figures(rounds(text)), [workload], cores)}


class Bars(unittest.TestCase):
    def test_pair_needs_both_the_ratio_and_the_time(self):
        for ours, peer, met in [(30, 180, True), (30, 179, False), (41, 900, False)]:
            text = f"xlog,pool,pair,1024,{ours},ns\nrmm,arena,pair,1024,{peer},ns\nrmm,pool,pair,1024,5000,ns\n"
            bar = bars(text, "pair")["pair, 1 KiB"]
            self.assertEqual(bar.met, met, text)
            self.assertTrue(bar.peer.startswith("rmm arena"), bar.peer)

    def test_large_pair_is_judged_by_time_alone(self):
        for ours, met in [(80, True), (80.5, False)]:
            text = f"xlog,pool,pair,{64 << 20},{ours},ns\nrmm,arena,pair,{64 << 20},100,ns\n"
            self.assertEqual(bars(text, "pair")["pair, 64 MiB"].met, met)

    def test_random_is_a_quarter(self):
        for ours, met in [(50, True), (51, False), (-3, True)]:
            text = f"xlog,pool,random,64,{ours},ns\ndriver,async,random,64,200,ns\n"
            self.assertEqual(bars(text, "random")["random, up to 64 MiB"].met, met)

    def test_reserved_memory_has_its_own_bars(self):
        text = "xlog,pool,random-reserved,4,1.09,ratio\nxlog,pool,random-reserved,64,1.19,ratio\nxlog,pool,random-reserved,1024,9,ratio\n"
        found = bars(text, "random")
        self.assertIs(found["random, up to 4 MiB: reserved / peak live"].met, False)
        self.assertIs(found["random, up to 64 MiB: reserved / peak live"].met, True)
        self.assertIsNone(found["random, up to 1024 MiB: reserved / peak live"].met)

    def test_holes_are_flat_against_the_first(self):
        text = "xlog,pool,holes,4096,20,ns\nxlog,pool,holes,16384,26,ns\nxlog,pool,holes,65536,26.1,ns\n"
        found = bars(text, "holes")
        self.assertIsNone(found["pair, 4096 holes"].met)
        self.assertIs(found["pair, 16384 holes"].met, True)
        self.assertIs(found["pair, 65536 holes"].met, False)

    def test_threads_against_the_best_peer_and_against_one_of_ours(self):
        text = "xlog,pool,threads,1,15,Mops/s\nxlog,pool,threads,16,120,Mops/s\nrmm,arena,threads,16,4,Mops/s\nrmm,pool,threads,16,0.6,Mops/s\n"
        found = bars(text, "threads")
        self.assertIs(found["16 threads"].met, True)
        self.assertIs(found["16 threads against our one"].met, False)
        self.assertIs(bars(text, "threads", cores=13)["16 threads against our one"].met, True)
        slower = bars(text.replace(",120,", ",119,"), "threads")
        self.assertIs(slower["16 threads"].met, False)

    def test_what_is_missing_is_not_met(self):
        for text, why in [
            ("rmm,pool,random,4,100,ns\n", "no figure of ours"),
            ("xlog,pool,random,4,1,ns\n", "no peer"),
            ("xlog,pool,random,4,1,ns\nrmm,pool,random,4,,skipped: slow\n", "no peer"),
            ("xlog,pool,random,4,1,ns\nglibc,malloc,random,4,100,ns\n", "no peer"),
        ]:
            bar = bars(text, "random")["random, up to 4 MiB"]
            self.assertIs(bar.met, False, text)
            self.assertIn(why, bar.verdict)


class Figures(unittest.TestCase):
    def test_the_best_round_counts_and_the_spread_is_kept(self):
        table = report.figures(rounds("a,b,pair,256,10,ns\na,b,threads,4,2,Mops/s\n", "a,b,pair,256,8,ns\na,b,threads,4,3,Mops/s\n"))
        self.assertEqual(table["pair", 256]["a", "b"], report.Figure(8, 10, 2, "ns"))
        self.assertEqual(table["threads", 4]["a", "b"], report.Figure(3, 2, 2, "Mops/s"))

    def test_figures_inside_the_spread_are_equal(self):
        table = report.figures(
            rounds("xlog,pool,holes,4096,10,ns\na,b,holes,4096,11,ns\n", "xlog,pool,holes,4096,12,ns\na,b,holes,4096,13,ns\n")
        )
        self.assertEqual(report.judge(table, ["holes"], 1)[0].ratio, "equal")

    def test_only_hopeless_peers_are_left_out_of_later_rounds(self):
        table = report.figures(
            rounds(
                "a,b,pair,256,100,ns\na,c,pair,256,399,ns\na,d,pair,256,401,ns\nxlog,pool,pair,256,1,ns\n"
                "a,b,threads,4,4,Mops/s\na,c,threads,4,0.9,Mops/s\n"
            )
        )
        self.assertFalse(report.hopeless(table, "pair", 256, ("a", "b")))
        self.assertFalse(report.hopeless(table, "pair", 256, ("a", "c")))
        self.assertTrue(report.hopeless(table, "pair", 256, ("a", "d")))
        self.assertTrue(report.hopeless(table, "pair", 256, ("a", "without a figure")))
        self.assertTrue(report.hopeless(table, "threads", 4, ("a", "c")))

    def test_a_line_that_is_no_row_is_refused(self):
        with self.assertRaisesRegex(ValueError, "on cuda:0"):
            report.parse("on cuda:0 (H200)\n")


if __name__ == "__main__":
    unittest.main()
