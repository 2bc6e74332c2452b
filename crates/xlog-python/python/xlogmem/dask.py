"""Dask workers with a quota each, for everything in the worker, and one view over all of them.

    dask.config.set({"distributed.nanny.pre-spawn-environ": xlogmem.dask.environment()})
    cluster = LocalCluster(n_workers=4)
    client = Client(cluster)
    xlogmem.dask.install(client, share=0.25)

The environment goes to the nannies, which start workers with the preloaded library. The worker plugin sets the quota of its worker
when it starts, also after a restart, and publishes what the worker holds to the scheduler. The scheduler plugin keeps the last report of
each worker, for `view` and for the scheduler's own metrics page.
"""

import dask
from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin

from . import cluster

TOPIC = "xlogmem"
_PERIOD = 2.0


def environment(*, ledger="on", preload=None):
    """The environment of workers, for `distributed.nanny.pre-spawn-environ`, with what is configured there already."""
    present = dask.config.get("distributed.nanny.pre-spawn-environ", {}) or {}
    return present | cluster.environment(ledger=ledger, preload=preload)


class NoShare(ValueError):
    """A worker has neither a share nor the resource GPU."""


class MemoryQuota(WorkerPlugin):
    """Gives each worker its share of the card. Without `share` it is the worker's resource `GPU`.

    rmm_pool: RMM's pool on our runtime becomes the worker's resource of device 0; it needs RMM. The pool starts empty and grows within
    the quota.
    """

    name = "xlogmem"

    def __init__(self, share=None, period=_PERIOD, rmm_pool=False):
        if share is not None and not 0 <= share <= 1:
            raise ValueError(f"share {share!r} is not accepted; expected 0 to 1, or None for the resource GPU of each worker")
        self.share, self.period, self.rmm_pool = share, period, rmm_pool

    def setup(self, worker):
        from tornado.ioloop import PeriodicCallback

        cluster.require_library()
        cluster.apply(self._share_of(worker), str(worker.name)[:31])
        if self.rmm_pool:
            _use_rmm_pool()
        self._callback = PeriodicCallback(lambda: self.publish(worker), self.period * 1000)
        self._callback.start()

    def _share_of(self, worker):
        share = self.share if self.share is not None else worker.state.total_resources.get("GPU")
        if share is None:
            raise NoShare(f"worker {worker.name} has no share; expected share=0.25 or so, or workers with --resources GPU=0.25")
        # More than one card: each of them whole.
        return min(float(share), 1.0)

    def publish(self, worker):
        worker.log_event(TOPIC, {"worker": worker.address, "rows": cluster.rows(own=True)})

    def teardown(self, worker):
        callback = getattr(self, "_callback", None)
        if callback is not None:
            callback.stop()


def _use_rmm_pool():
    """Puts RMM's pool for device 0 on our runtime."""
    import rmm

    from . import rmm as ours

    # Without a size RMM begins with half of the card, which is more than a small share.
    pool = rmm.mr.PoolMemoryResource(ours.upstream(), initial_pool_size=0)
    rmm.mr.set_per_device_resource(0, pool)


class MemoryView(SchedulerPlugin):
    """Keeps the last report of each worker, and adds them to the scheduler's metrics page where prometheus_client is installed."""

    name = "xlogmem-view"
    idempotent = True

    def __init__(self):
        self.reports = {}

    async def start(self, scheduler):
        scheduler.extensions["xlogmem"] = self
        scheduler.handlers["xlogmem_view"] = self.rows
        try:
            import prometheus_client
        except ImportError:
            return
        self._collector = _Collector(self)
        prometheus_client.REGISTRY.register(self._collector)

    async def close(self):
        collector = getattr(self, "_collector", None)
        if collector is not None:
            import prometheus_client

            prometheus_client.REGISTRY.unregister(collector)

    def log_event(self, topic, msg):
        if topic == TOPIC and isinstance(msg, dict):
            self.reports[msg["worker"]] = msg["rows"]

    def remove_worker(self, scheduler, worker, **_):
        self.reports.pop(worker, None)

    def rows(self):
        return [row for rows in self.reports.values() for row in rows]


class _Collector:
    def __init__(self, view):
        self._view = view

    def collect(self):
        from prometheus_client.core import GaugeMetricFamily

        rows = self._view.rows()
        for name, text, key in cluster.METRICS:
            family = GaugeMetricFamily(name, text, labels=cluster.LABELS)
            for row in rows:
                family.add_metric([row[label] for label in cluster.LABELS], row[key])
            yield family


def install(client, share=None, period=_PERIOD, rmm_pool=False):
    """Installs both plugins: workers that come later, or again, get them too. A second call replaces the share."""
    client.register_plugin(MemoryView())
    client.register_plugin(MemoryQuota(share, period, rmm_pool))


def view(client):
    """What all workers hold, one row for each worker and device, as they last published it to the scheduler."""
    return client.sync(client.scheduler.xlogmem_view)
