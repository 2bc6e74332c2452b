"""Quotas of workers by their share, without Ray and Dask; scripts/check-cluster has these."""

import os
import re
import subprocess
import sys
import tempfile
import types
import unittest

import xlog_ledger
import xlogmem
from xlogmem import cluster

MIB = 1 << 20


class InAFolder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        before = dict(os.environ)
        self.addCleanup(lambda: (os.environ.clear(), os.environ.update(before)))
        self.folder = folder.name
        self.path = os.path.join(folder.name, "GPU-0.ledger")
        os.environ["XLOG_EXEC_LEDGER"] = os.environ["XLOG_DEVICE_LEDGER"] = folder.name


class Shares(InAFolder):
    def test_a_share_is_the_quota_of_this_process_and_changes_while_it_runs(self):
        with xlog_ledger.Ledger(self.path, limit=64 * MIB) as ledger:
            self.assertEqual(cluster.apply(0.25, "first"), {"GPU-0": 16 * MIB})
            ledger.charge(16 * MIB)
            self.assertRaises(xlog_ledger.OverQuota, ledger.charge, 1)
            cluster.apply(0.5, "second")
            ledger.charge(16 * MIB)
            self.assertRaises(xlog_ledger.OverQuota, ledger.charge, 1)
            self.assertEqual(ledger.quota, xlog_ledger.Quota(limit=32 * MIB, name="second"))

    def test_a_process_that_is_not_on_a_ledger_yet_finds_its_share_in_the_environment(self):
        self.assertEqual(cluster.apply(1 / 3), {})
        self.assertEqual(os.environ["XLOG_EXEC_LIMIT"], "ledger-share:33333333")
        self.assertEqual(os.environ["XLOG_DEVICE_QUOTA"], "33.333333%")

    def test_shares_that_add_up_to_one_fit_together(self):
        for parts in (3, 6, 7, 9, 11):
            self.assertLessEqual(cluster._units_of(1 / parts) * parts, 100_000_000)
        for share in (0.29, 0.1 + 0.2, 0.57, 1.0):
            self.assertEqual(cluster._units_of(share), round(share * 100_000_000))

    def test_a_share_that_is_none_is_refused_and_changes_nothing(self):
        for share in (-0.1, 1.5):
            self.assertRaises(ValueError, cluster.apply, share)
        self.assertNotIn("XLOG_DEVICE_QUOTA", os.environ)

    def test_the_limit_of_an_exec_around_the_process_holds_too(self):
        before, cluster._outer_limit = cluster._outer_limit, f"ledger-share:50000000,{8 * MIB}"
        self.addCleanup(setattr, cluster, "_outer_limit", before)
        with xlog_ledger.Ledger(self.path, limit=64 * MIB):
            self.assertEqual(cluster.apply(0.25), {"GPU-0": 8 * MIB})
        self.assertEqual(os.environ["XLOG_EXEC_LIMIT"], f"ledger-share:25000000,ledger-share:50000000,{8 * MIB}")

    def test_a_process_of_another_container_with_this_process_id_keeps_its_quota(self):
        program = """if True:
            import sys, xlog_ledger
            ledger = xlog_ledger.Ledger(sys.argv[1], limit=64 << 20)
            slot = ledger._word_at(ledger._slot)
            ledger._words[slot + 2] = int(sys.argv[2])  # the process id, as another namespace numbers it
            print("joined", flush=True)
            sys.stdin.readline()"""
        command = [sys.executable, "-c", program, self.path, str(os.getpid())]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            self.assertEqual(other.stdout.readline(), "joined\n")
            self.assertEqual(cluster.apply(0.25), {})
            self.assertEqual(cluster.rows(own=True), [])
            [slot] = xlog_ledger.read(self.path)[1]
            self.assertEqual((slot.pid, slot.quota), (os.getpid(), xlog_ledger.Quota()))
            other.communicate("end\n")

    def test_a_ledger_that_cannot_be_read_keeps_no_other_card_from_its_quota(self):
        with open(os.path.join(self.folder, "GPU-damaged.ledger"), "w") as damaged:
            damaged.write("damaged")
            damaged.flush()
            descriptor = os.dup(damaged.fileno())
            self.addCleanup(os.close, descriptor)
            with xlog_ledger.Ledger(self.path, limit=64 * MIB) as ledger:
                cluster.apply(0.25)
                self.assertEqual(ledger.quota.limit, 16 * MIB)


class OwnRuntime(InAFolder):
    """Runtimes on the simulated device, whose ledger has 31 GiB."""

    WHOLE = 31 << 30

    def setUp(self):
        super().setUp()
        os.environ["XLOG_DEVICE"] = "sim"

    def refuses(self, runtime, nbytes):
        with self.assertRaises(xlogmem.OutOfBudget):
            runtime.allocate(nbytes)

    def test_a_runtime_that_is_opened_has_the_share_of_the_process(self):
        cluster.apply(0.25, "actor")
        runtime = xlogmem.open()
        [row] = cluster.rows(own=True)
        self.assertEqual((row["device"], row["tag"], row["quota"], row["limit"]), ("sim-0", "actor", self.WHOLE // 4, self.WHOLE))
        self.refuses(runtime, self.WHOLE // 4 + 1)
        block = runtime.allocate(self.WHOLE // 4)
        self.assertEqual(cluster.rows(own=True)[0]["used"], self.WHOLE // 4)
        del block, runtime

    def test_a_smaller_share_holds_for_cached_memory_and_returns_it(self):
        cluster.apply(0.5)
        runtime = xlogmem.open("sim")
        block = runtime.allocate(self.WHOLE // 2)
        cluster.apply(0.25)
        self.refuses(runtime, 1 << 20)  # it holds more than its share
        cluster.apply(0.5)
        del block
        cluster.apply(0.25)
        self.assertLessEqual(runtime.physical_bytes, self.WHOLE // 4)
        self.refuses(runtime, self.WHOLE // 4 + 1)
        block = runtime.allocate(self.WHOLE // 4)
        cluster.apply(1.0)
        more = runtime.allocate(self.WHOLE // 2)
        del block, more

    def test_the_budget_of_the_first_worker_is_no_limit_for_the_others(self):
        cluster.apply(0.5)
        first = xlogmem.open("sim", limit="64MiB")
        self.refuses(first, 65 * MIB)
        second = xlogmem.open("sim")
        block = second.allocate(self.WHOLE // 2)
        del first, second, block

    def test_a_share_of_nothing_refuses_everything_until_there_is_one(self):
        cluster.apply(0)
        runtime = xlogmem.open("sim")
        self.refuses(runtime, 1)
        cluster.apply(1.0)
        del runtime

    def test_a_ledger_that_is_named_in_the_program_is_the_one(self):
        cluster.apply(0.25)
        self.assertEqual(xlogmem.open("sim", ledger="off").limit, self.WHOLE)
        self.assertEqual(os.listdir(self.folder), [])


class Metrics(InAFolder):
    def test_rows_have_this_process_with_its_quota_and_metrics_end(self):
        quota = xlog_ledger.Quota(limit=8 * MIB, guaranteed=MIB, name="job")
        with xlog_ledger.Ledger(self.path, limit=64 * MIB, quota=quota) as ledger:
            ledger.charge(2 * MIB)
            [row] = cluster.rows(own=True, of="node-1")
        self.assertEqual((row["node"], row["device"], row["tag"]), ("node-1", "GPU-0", "job"))
        self.assertEqual((row["used"], row["quota"], row["guaranteed"], row["limit"]), (2 * MIB, 8 * MIB, MIB, 64 * MIB))
        text = cluster.openmetrics([row])
        self.assertIn(f'xlogmem_used_bytes{{node="node-1",device="GPU-0",process="{os.getpid()}",tag="job"}} {2 * MIB}', text)
        self.assertTrue(text.endswith("# EOF\n"))

    def test_two_slots_of_a_process_are_one_series(self):
        quota = xlog_ledger.Quota(limit=8 * MIB, name="job")
        with xlog_ledger.Ledger(self.path, limit=64 * MIB, quota=quota) as one, xlog_ledger.Ledger(self.path, quota=quota) as two:
            one.charge(MIB)
            two.charge(2 * MIB)
            [row] = cluster.rows(own=True)
        self.assertEqual((row["used"], row["quota"], row["limit"]), (3 * MIB, 16 * MIB, 64 * MIB))

    def test_the_text_is_openmetrics_for_another_parser(self):
        try:
            from prometheus_client.openmetrics.parser import text_string_to_metric_families
        except ImportError:
            self.skipTest("prometheus_client is not installed; scripts/check-cluster requires it")
        with xlog_ledger.Ledger(self.path, limit=64 * MIB, quota=xlog_ledger.Quota(name='a "job"\\\n')):
            families = list(text_string_to_metric_families(cluster.openmetrics(cluster.rows(own=True))))
        self.assertEqual([family.name for family in families], [name for name, _, _ in cluster.METRICS])
        self.assertEqual({(family.type, family.unit) for family in families}, {("gauge", "bytes")})


class RayHook(InAFolder):
    """The hook with a stand-in for Ray that has the calls it uses."""

    def setUp(self):
        super().setUp()
        self.assigned, self.name = {}, "a task"
        context = types.SimpleNamespace(
            get_assigned_resources=lambda: self.assigned, get_actor_name=lambda: None, get_task_name=lambda: self.name
        )
        utils = types.ModuleType("ray._private.utils")
        utils.set_visible_accelerator_ids = lambda: {"CUDA_VISIBLE_DEVICES": None}
        ray = types.ModuleType("ray")
        ray.__version__, ray.get_runtime_context = "99.1", lambda: context
        for name, module in (("ray", ray), ("ray._private", types.ModuleType("ray._private")), ("ray._private.utils", utils)):
            self.addCleanup(self.put_back, name, sys.modules.get(name))
            sys.modules[name] = module
        self.addCleanup(self.put_back, "xlogmem.ray", sys.modules.pop("xlogmem.ray", None))
        import xlogmem.ray

        self.ray, self.utils = xlogmem.ray, utils

    @staticmethod
    def put_back(name, module):
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module

    def begin(self, **options):
        """The environment of a worker, in which Ray replaces variables, and its set-up hook."""
        variables = self.ray.runtime_env(**{"preload": "", "metrics": False} | options)["env_vars"]
        os.environ.update({name: re.sub(r"\$\{(\w+)\}", lambda found: os.environ.get(found[1], ""), text) for name, text in variables.items()})
        self.assertEqual(os.environ["XLOG_EXEC_LIMIT"], f"ledger-share:{int(options.get('unassigned', 0) * 100_000_000)},")
        self.ray.setup()

    def start(self, gpus, name="a task"):
        self.assigned, self.name = {} if gpus is None else {"GPU": gpus}, name
        self.assertEqual(self.utils.set_visible_accelerator_ids(), {"CUDA_VISIBLE_DEVICES": None})
        return os.environ["XLOG_EXEC_LIMIT"]

    def test_each_task_has_the_share_that_ray_has_assigned_to_it(self):
        self.begin(ledger=self.folder)
        self.assertEqual(os.environ["XLOG_EXEC_LIMIT"], "ledger-share:0")
        with xlog_ledger.Ledger(self.path, limit=64 * MIB) as ledger:
            for gpus, share in ((0.25, 25_000_000), (None, 0), (2.0, 100_000_000), (0.5, 50_000_000)):
                self.assertEqual(self.start(gpus, f"with {gpus}"), f"ledger-share:{share}")
                self.assertEqual(ledger.quota, xlog_ledger.Quota(64 * MIB * share // 100_000_000, name=f"with {gpus}"))

    def test_tasks_without_num_gpus_may_be_given_a_share(self):
        self.begin(unassigned=0.1)
        self.assertEqual(self.start(None), "ledger-share:10000000")
        self.assertRaises(ValueError, self.ray.runtime_env, preload="", unassigned=2)

    def test_a_ray_without_the_function_is_refused_before_a_worker_starts(self):
        del self.utils.set_visible_accelerator_ids
        with self.assertRaises(self.ray.UnsupportedRay) as refused:
            self.ray.runtime_env(preload="")
        for text in ("99.1", "set_visible_accelerator_ids", "hook=False", "apply_share"):
            self.assertIn(text, str(refused.exception))
        self.begin(hook=False)
        self.assigned = {"GPU": 0.5}
        self.assertEqual(self.ray.apply_share(), 0.5)
        self.assertEqual(os.environ["XLOG_EXEC_LIMIT"], "ledger-share:50000000")

    def test_a_quota_that_cannot_be_set_does_not_end_the_task(self):
        self.begin()
        self.assigned = None  # Ray answers something else
        self.assertEqual(self.utils.set_visible_accelerator_ids(), {"CUDA_VISIBLE_DEVICES": None})
        self.assertEqual(os.environ["XLOG_EXEC_LIMIT"], "ledger-share:0")

    def test_a_worker_without_the_library_does_not_start_unlimited(self):
        with self.assertRaises(cluster.NotPreloaded) as refused:
            self.begin(preload="/nowhere/libxlog_preload.so")
        self.assertIn("/nowhere/libxlog_preload.so", str(refused.exception))
        self.assertIn("xlogmem exec -- true", str(refused.exception))

    def test_labels_that_are_gone_are_published_as_zero_once(self):
        row = dict.fromkeys(("used", "peak", "quota", "guaranteed", "limit"), 5)
        first, second = (row | {"node": "n", "device": "d", "process": "1", "tag": tag} for tag in ("one", "two"))
        before = self.ray._series([first], {})
        after = self.ray._series([second], before)
        self.assertEqual({labels[3]: values["limit"] for labels, values in after.items()}, {"one": 0, "two": 5})
        self.assertEqual([labels[3] for labels in self.ray._series([second], after)], ["two"])


if __name__ == "__main__":
    unittest.main()
