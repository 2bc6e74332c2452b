"""Parts of scripts/check-cluster with Dask, and with RMM in Dask workers."""

import os
import time
import urllib.request

from .common import MIB, OUT_OF_MEMORY, Watch, check, top, wait_for


def dask_cluster(kind, ledger, workers=4, **options):
    import dask
    from distributed import LocalCluster

    import xlogmem.dask

    variables = xlogmem.dask.environment(ledger=str(ledger)) | kind.variables()
    dask.config.set({"distributed.nanny.pre-spawn-environ": variables})
    return LocalCluster(n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=":0", **options)


def dask_fill(step):
    import memory

    return memory.fill(step), os.getpid()


def dask_take(size):
    import memory

    return memory.take(size)


def dask_part(folder, kind):
    import xlogmem.dask
    from distributed import Client

    watch, share = Watch(folder / f"dask-{kind.name}", kind.limit), kind.share(0.25)
    steps = share // kind.step
    with dask_cluster(kind, watch.folder) as cluster, Client(cluster) as client:
        xlogmem.dask.install(client, share=0.5, period=0.5)
        xlogmem.dask.install(client, share=0.25, period=0.5)  # the second share holds

        def addresses():
            return list(client.scheduler_info(n_workers=-1)["workers"])

        def on(worker, function, argument):
            return client.submit(function, argument, workers=[worker], pure=False).result(timeout=120)

        def view(count):
            rows = xlogmem.dask.view(client)
            return rows if sum(row["used"] > 0 for row in rows) == count == len(rows) else None

        workers = addresses()
        check(len(workers) == 4, f"{len(workers)} workers")
        found = [on(worker, dask_take, share) for worker in workers[:3]]
        check(found == [0] * 3, f"a worker did not get its share: {found}, {watch.slots()}")
        count, pid = on(workers[3], dask_fill, kind.step)
        check(count == steps, f"the greedy worker got {count} steps, and its share has {steps}")
        check([on(worker, dask_take, kind.step) for worker in workers[:3]] == [OUT_OF_MEMORY] * 3, "a worker got more than its share")
        rows = wait_for("all workers are in the view", lambda: view(4))
        check({row["quota"] for row in rows} == {kind.limit // 4}, f"quotas {[row['quota'] for row in rows]}")
        port = cluster.scheduler.http_server.port
        check_scheduler_metrics(port)
        shown = top([f"127.0.0.1:{port}"])
        check(shown.count(f"{share // MIB} MiB" if share < 1 << 30 else "7.75 GiB") >= 8, f"xlogmem top --cluster: {shown}")
        told = [f"4 workers at 1/4, the greedy one refused at {share // MIB} MiB; 4 rows in the view; xlogmem top --cluster shows them"]
        # After a kill, the nanny restarts the worker.
        before = watch.used()
        os.kill(pid, 9)
        wait_for("the bytes of the killed worker are back", lambda: watch.used() <= before - share + MIB)
        wait_for("the worker is back", lambda: len(addresses()) == 4)
        [fresh] = [worker for worker in addresses() if worker not in workers[:3]]
        check(on(fresh, dask_fill, kind.step)[0] == steps, "the restarted worker has another share")
        client.restart()
        wait_for("nothing is held", lambda: watch.used() == 0)
        check([on(worker, dask_fill, kind.step)[0] for worker in addresses()] == [steps] * 4, "a restarted cluster has other shares")
        # After scaling down and up, a new worker joins.
        cluster.scale(2)
        wait_for("two workers have left", lambda: len(addresses()) == 2 and watch.used() <= 2 * share)
        stayed = addresses()
        cluster.scale(3)
        wait_for("a worker has come", lambda: len(addresses()) == 3)
        [late] = [worker for worker in addresses() if worker not in stayed]
        check(on(late, dask_fill, kind.step)[0] == steps, "a worker that came later has another share")
        wait_for("the view follows", lambda: view(3))
        # Adaptive scaling: workers start with work and leave when idle.
        cluster.adapt(minimum=1, maximum=4, interval="100ms", wait_count=2)
        wait_for("idle workers have left", lambda: len(addresses()) == 1)
        [stayed] = addresses()
        work = client.map(time.sleep, [0.5] * 40, pure=False)  # ends with its futures
        came = wait_for("workers have come", lambda: [worker for worker in addresses() if worker != stayed])
        check(on(came[0], dask_fill, kind.step)[0] == steps, "a worker that came by itself has another share")
        client.cancel(work)
        told.append("a killed, a restarted, an added and an adaptive one have their share")
    with dask_cluster(kind, watch.folder, workers=1) as cluster, Client(cluster) as client:
        check(no_share(client), "a worker without a share is no error")
    with dask_cluster(kind, watch.folder, workers=2, resources={"GPU": 0.5}) as cluster, Client(cluster) as client:
        xlogmem.dask.install(client)
        half = kind.share(0.5) // kind.step
        check([count for count, _ in client.run(dask_fill, kind.step).values()] == [half] * 2, "the resource GPU is not the share")
        told.append("the resource GPU=0.5 is a half")
    return "; ".join([*told, watch.end()])


def no_share(client):
    import xlogmem.dask

    try:
        xlogmem.dask.install(client)
    except xlogmem.dask.NoShare:
        return True
    return False


def check_scheduler_metrics(port):
    from prometheus_client.parser import text_string_to_metric_families

    from xlogmem import cluster

    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    families = {family.name: family for family in text_string_to_metric_families(text) if family.name.startswith("xlogmem_")}
    check(list(families) == [name for name, _, _ in cluster.METRICS], f"{list(families)} on the scheduler's page")
    for family in families.values():
        check(family.type == "gauge" and len(family.samples) == 4, f"{family}")
        check(all(set(sample.labels) == set(cluster.LABELS) for sample in family.samples), f"{family}")


def rmm_part(folder, kind):
    """On the simulated device: RMM's pool asks our upstream without a GPU. `set_current_device_resource` would need one."""
    import rmm
    import xlogmem.dask
    from distributed import Client

    watch, share, step = Watch(folder / "rmm", kind.limit), kind.share(0.25), 2 * MIB

    def fill(step):
        import rmm

        pool, held = rmm.mr.get_per_device_resource(0), []
        try:
            while True:
                held.append(pool.allocate(step))
        except MemoryError as error:
            text = str(error)
        for at in held:
            pool.deallocate(at, step)
        return type(pool).__name__, len(held), text

    with dask_cluster(kind, watch.folder) as cluster, Client(cluster) as client:
        xlogmem.dask.install(client, share=0.25, rmm_pool=True)
        found = list(client.run(fill, step).values())
        check({name for name, _, _ in found} == {"PoolMemoryResource"}, f"{found}")
        # RMM's pool grows by sizes that are rounded up to xlog's size classes, so the last step may not fit.
        steps = share // step
        check(all(count in (steps - 1, steps) for _, count, _ in found), f"{found}, and a share has {steps} steps")
        check(all("out of budget" in text for _, _, text in found), f"{found}")
        check(watch.used() <= kind.limit, "above the limit")
    least = min(count for _, count, _ in found) * step // MIB
    return f"RMM {rmm.__version__}: the pools of 4 workers at 1/4 had {least} of {share // MIB} MiB each, MemoryError beyond; {watch.end()}"
