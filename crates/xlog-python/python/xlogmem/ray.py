"""Ray tasks and actors with real memory fractions: `num_gpus=0.25` is a quarter of the card, for everything in the worker.

    ray.init(runtime_env=xlogmem.ray.runtime_env())

    @ray.remote(num_gpus=0.25)
    class Model: ...                # beyond a quarter of the card: torch's OutOfMemoryError, CuPy's, JAX's

Workers preload the library of `xlogmem exec` and join the ledger of their card. A worker learns its share when a task or an actor
starts in it; the set-up hook sets the quota then, also in a worker that is used again. Until then it has none of the card.

Ray has no public call at that moment. `worker_process_setup_hook` runs once in a process, before Ray assigns resources to it, and a
`RuntimeEnvPlugin` runs in the agent of the node, which knows no task. So the hook wraps the function by which Ray makes the assigned cards
visible (`START`), and a version of Ray without it is refused (`UnsupportedRay`). `apply_share` is the public way, called by the task itself.

Each worker publishes what it holds through Ray's own metrics, as `ray_xlogmem_used_bytes` and others, labelled by node, device,
process and tag.
"""

import os
import sys
import threading

import ray

from . import cluster

_PERIOD = 2.0
#: The function of Ray that is called when a task or an actor starts in a worker: its module and its name.
START = ("ray._private.utils", "set_visible_accelerator_ids")
#: Versions of Ray that this module was run with.
TESTED = "2.60"


class UnsupportedRay(RuntimeError):
    """This version of Ray does not have the function that the set-up hook needs."""

    def __init__(self):
        super().__init__(
            f"Ray {ray.__version__} has no function {'.'.join(START)}, where xlogmem sets the quota of a task; expected a version such"
            f" as {TESTED}, or runtime_env(hook=False) and a call of xlogmem.ray.apply_share() at the beginning of each task and actor"
        )


def _start():
    """Ray's function that is called when a task starts, or UnsupportedRay."""
    from importlib import import_module

    try:
        module = import_module(START[0])
    except ImportError:
        raise UnsupportedRay from None
    if not callable(getattr(module, START[1], None)):
        raise UnsupportedRay
    return module


def runtime_env(*, ledger="on", preload=None, metrics=True, hook=True, unassigned=0.0, env_vars=None):
    """The runtime environment for `ray.init`: see `xlogmem.cluster.environment` for ledger and preload.

    Ray runs the set-up hook for the environment of a job alone, which tasks and actors with one of their own inherit. In that of a single
    task or actor it is as `hook=False`.

    unassigned: the share of tasks and actors without `num_gpus`.
    hook: False leaves it to tasks to call `apply_share`; until they do, they have the unassigned share.
    """
    if not 0 <= unassigned <= 1:
        raise ValueError(f"unassigned {unassigned!r} is not accepted; expected 0 to 1")
    if hook:
        _start()
    variables = cluster.environment(ledger=ledger, preload=preload)
    variables["XLOGMEM_RAY_METRICS"] = "1" if metrics else "0"
    variables["XLOGMEM_RAY_HOOK"] = "1" if hook else "0"
    variables["XLOGMEM_RAY_UNASSIGNED"] = str(unassigned)
    # Where the hook does not run, a worker has no more than this. Ray puts the node's own variable there.
    outer = "${XLOG_EXEC_LIMIT}"
    variables |= {"XLOGMEM_OUTER_LIMIT": outer} | cluster.share_variables(unassigned, outer)
    return {"env_vars": variables | (env_vars or {}), "worker_process_setup_hook": "xlogmem.ray.setup"}


def apply_share():
    """Gives this worker the share of the card that Ray has assigned to the running task or actor, which is returned."""
    context = ray.get_runtime_context()
    assigned = context.get_assigned_resources().get("GPU")
    # More than one card: each of them whole.
    share = _unassigned() if assigned is None else min(float(assigned), 1.0)
    name = context.get_actor_name() or context.get_task_name() or context.get_worker_id()
    cluster.apply(share, name[:31])
    return share


def _unassigned():
    return float(os.environ.get("XLOGMEM_RAY_UNASSIGNED", "0"))


def setup():
    """The set-up hook of workers: from now on each task and actor that starts here gets its share."""
    cluster.require_library()
    # Until Ray has assigned resources. If the function were never called, tasks would be refused, not unlimited.
    cluster.apply(_unassigned())
    if os.environ.get("XLOGMEM_RAY_HOOK") != "0":
        _wrap(_start())
    if os.environ.get("XLOGMEM_RAY_METRICS") == "1":
        threading.Thread(target=_publish, name="xlogmem-metrics", daemon=True).start()


def _wrap(module):
    start = getattr(module, START[1])

    def started(*arguments, **options):
        result = start(*arguments, **options)
        try:
            apply_share()
        except Exception as error:  # the task runs with the quota that the worker had; it must be visible why
            print(f"xlogmem.ray: the quota of this worker was not changed: {error}", file=sys.stderr, flush=True)
        return result

    setattr(module, START[1], started)


def _publish():
    """Publishes what this process holds, for as long as it lives."""
    from ray.util.metrics import Gauge

    gauges = {key: Gauge(name, description=text, tag_keys=cluster.LABELS) for name, text, key in cluster.METRICS}
    waited, last = threading.Event(), {}
    while not waited.wait(_PERIOD):
        try:
            rows = _series(cluster.rows(own=True, of=ray.get_runtime_context().get_node_id()), last)
            for labels, row in rows.items():
                for key, gauge in gauges.items():
                    gauge.set(row[key], tags=dict(zip(cluster.LABELS, labels)))
            last = rows
        except Exception:  # Ray is going down, or not up yet
            continue


def _series(rows, last):
    """The values by labels. Labels that were published before and are no more get zeroes, once: Ray keeps the last value of a gauge."""
    found = {tuple(row[label] for label in cluster.LABELS): row for row in rows}
    zero = dict.fromkeys((key for _, _, key in cluster.METRICS), 0)
    gone = {labels: zero for labels, row in last.items() if labels not in found and row != zero}
    return found | gone


def metrics_targets():
    """The addresses of the metrics of all nodes, which `xlogmem top --cluster` reads."""
    return [f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}" for node in ray.nodes() if node["Alive"]]
