"""Parts of scripts/check-cluster for a machine with a GPU: PyTorch under the preloaded library in Ray actors, and RMM's pool and buffers."""

import os
import subprocess
import sys

from .common import MIB, check


def torch_part(folder, kind):
    """Four actors at a quarter: three take most of theirs, the fourth takes until PyTorch refuses. It needs Ray and PyTorch."""
    import ray

    import xlogmem.ray

    ledgers = folder / "gpu-torch"
    ledgers.mkdir(mode=0o700)
    ray.init(num_cpus=4, num_gpus=1, include_dashboard=False, log_to_driver=False, runtime_env=xlogmem.ray.runtime_env(ledger=str(ledgers)))
    try:

        @ray.remote(num_gpus=0.25)
        class Holder:
            def fill(self, most):
                import torch

                self.held = []
                try:
                    while len(self.held) < most:
                        self.held.append(torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))
                    return len(self.held), None
                except torch.OutOfMemoryError as error:
                    return len(self.held), str(error)

            def quota(self):
                from xlogmem import cluster

                [row] = cluster.rows(own=True)
                return row["quota"], row["used"], row["limit"]

        actors = [Holder.remote() for _ in range(4)]

        def errors():
            return [text for _, text in ray.get([actor.fill.remote(16) for actor in actors[:3]])]

        check(errors() == [None] * 3, "an actor was refused within its share")
        count, text = ray.get(actors[3].fill.remote(1 << 20))
        check(text is not None, "the greedy actor was not refused")
        found = ray.get([actor.quota.remote() for actor in actors])
        check(all(used <= quota <= limit // 4 for quota, used, limit in found), f"(quota, used, limit) {found}")
        check(count * 64 * MIB > found[3][0] * 0.9, f"the greedy actor got {count * 64} MiB of {found[3][0] // MIB}")
        check(errors() == [None] * 3, "an actor was refused beside the greedy one")
        return f"3 actors at 1/4 kept theirs, the greedy one got {count * 64} MiB of {found[3][0] // MIB} MiB and torch.OutOfMemoryError"
    finally:
        ray.shutdown()


RMM = """
import rmm
from xlogmem import cluster, dask

cluster.apply(0.25, "rmm")
dask._use_rmm_pool()
held = []
try:
    while True:
        held.append(rmm.DeviceBuffer(size=64 << 20))
except MemoryError as error:
    assert "out of budget" in str(error), error
[row] = cluster.rows(own=True)
assert row["used"] <= row["quota"] <= row["limit"] // 4, row
assert len(held) * (64 << 20) > row["quota"] * 0.9, (len(held), row)
print(len(held) * 64, row["quota"] >> 20)
"""


def rmm_buffer_part(folder, kind):
    """RMM's buffers from its pool on our runtime, up to a quarter of the card. It needs RMM and Dask."""
    ledgers = folder / "gpu-rmm"
    ledgers.mkdir(mode=0o700)
    variables = os.environ | {"XLOG_DEVICE_LEDGER": str(ledgers)}
    done = subprocess.run([sys.executable, "-c", RMM], capture_output=True, text=True, timeout=300, env=variables)
    check(done.returncode == 0, f"{done.stdout}{done.stderr}")
    return "RMM's buffers had {} of {} MiB and got MemoryError beyond".format(*done.stdout.split())
