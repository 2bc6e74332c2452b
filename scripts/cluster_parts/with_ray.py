"""Parts of scripts/check-cluster with Ray."""

import os
import pathlib
import subprocess
import sys
import urllib.request

from .common import KINDS, MIB, OUT_OF_MEMORY, ROOT, Watch, check, top, wait_for


def actor_class():
    import ray

    @ray.remote
    class Holder:
        def take(self, size):
            import memory

            return memory.take(size)

        def fill(self, step):
            import memory

            return memory.fill(step)

        def churn(self, step, note):
            """Takes and returns memory without end; the note is there once it has begun."""
            import memory

            while True:
                memory.drop()
                memory.fill(step)
                pathlib.Path(note).touch()

        def drop(self):
            import memory

            memory.drop()

        def take_cards(self, size):
            """Takes memory of two simulated cards."""
            import xlogmem

            self.cards = [xlogmem.shared(card).allocate(size) for card in range(2)]

        def pid(self):
            return os.getpid()

    return Holder


def ray_env(kind, ledger, **options):
    import xlogmem.ray

    return xlogmem.ray.runtime_env(ledger=str(ledger) if ledger else None, env_vars=kind.variables(), **options)


def start_ray(kind, ledger, cpus=8, dashboard=False):
    import ray

    port = {"dashboard_port": 0} if dashboard else {}
    ray.init(num_cpus=cpus, num_gpus=1, include_dashboard=dashboard, log_to_driver=False, runtime_env=ray_env(kind, ledger), **port)


def refused(result):
    return result == OUT_OF_MEMORY


def ray_part(folder, kind):
    import ray

    watch = Watch(folder / f"ray-{kind.name}", kind.limit)
    start_ray(kind, watch.folder, dashboard=True)
    try:
        holder, share = actor_class(), kind.share(0.2)
        actors = [holder.options(num_gpus=0.2, name=f"holder-{number}").remote() for number in range(4)]
        greedy = holder.options(num_gpus=0.2, name="greedy").remote()
        check(ray.get([actor.take.remote(share) for actor in actors]) == [0] * 4, "an actor did not get its share")
        got = ray.get(greedy.fill.remote(kind.step))
        check(got == share // kind.step, f"the greedy actor got {got} steps, and its share has {share // kind.step}")
        for _ in range(3):
            ray.get([actor.drop.remote() for actor in actors])
            check(ray.get([actor.take.remote(share) for actor in actors]) == [0] * 4, "an actor was refused beside the greedy one")
        told = [f"4 actors at 1/5 kept theirs, the greedy one refused at {share // MIB} MiB"]
        without = holder.options(num_cpus=0, name="without").remote()
        check(refused(ray.get(without.take.remote(kind.step))), "an actor without num_gpus got memory")
        ray.kill(without)
        # An actor killed while it allocates returns its bytes.
        note = folder / f"churn-{kind.name}"
        greedy.churn.remote(kind.step, str(note))
        wait_for("it allocates", note.exists)
        ray.kill(greedy)
        wait_for("the bytes of the killed actor are back", lambda: watch.used() <= 4 * share + MIB)
        # A restarted actor gets its share again.
        again = holder.options(num_gpus=0.2, max_restarts=1, max_task_retries=2, name="again").remote()
        check(ray.get(again.take.remote(share)) == 0, "the next actor did not get its share")
        first = ray.get(again.pid.remote())
        os.kill(first, 9)
        check(ray.get(again.fill.remote(kind.step)) == share // kind.step, "the restarted actor has another share")
        check(ray.get(again.pid.remote()) != first, "it was not restarted")
        told.append("one without num_gpus got nothing; one killed while it allocated returned its bytes, a restarted one has its share")
        series = wait_for("all actors are in Ray's metrics", lambda: ray_metrics(watch, 5))
        names = [f"holder-{number}" for number in range(4)] + ["again"]
        check(sorted(series) == sorted(names), f"tags {series} in Ray's metrics")
        told.append(f"{len(series)} series in Ray's metrics")
        # Ray's head lists its nodes' pages in a file, which names those of an earlier Ray until the dashboard is up.
        wait_for("xlogmem top --cluster shows all actors", lambda: all(name in top([], may_fail=True) for name in names))
        told.append("xlogmem top --cluster shows them")
        for actor in [*actors, again]:
            ray.kill(actor)
        wait_for("nothing is held", lambda: watch.used() == 0)
        return "; ".join([*told, watch.end()])
    finally:
        ray.shutdown()


def reuse_part(folder, kind):
    import ray

    watch = Watch(folder / f"reuse-{kind.name}", kind.limit)
    # With one processor Ray keeps one worker.
    start_ray(kind, watch.folder, cpus=1)
    try:

        @ray.remote(num_cpus=1, max_calls=0)
        def step(size, more, keep):
            """Returns what the last task has kept only after the new share holds."""
            import memory

            held = bool(memory.held)
            beyond = memory.take(size if held else size + more)
            memory.drop()
            exact = memory.take(size)
            if not keep:
                memory.drop()
            return os.getpid(), beyond, exact

        def run(part, keep):
            name = f"share-{part}"
            task = step.options(num_gpus=part, name=name).remote(kind.share(part), kind.step, keep)
            pid, beyond, exact = ray.get(task)
            check(refused(beyond), f"a task with num_gpus={part} got more, in worker {pid}")
            check(exact == 0, f"a task with num_gpus={part} did not get it, in worker {pid}")
            seen.setdefault(pid, []).append(part)

        seen = {}
        # The third task starts in a worker that holds three times its share.
        for part, keep in [(0.25, False), (0.75, True), (0.25, False), (0.5, False)]:
            run(part, keep)
        [(pid, parts)] = seen.items()
        check(parts == [0.25, 0.75, 0.25, 0.5], f"worker {pid} had {parts}")
        # The worker may or may not hold cached memory.
        wait_for("only the last task is in Ray's metrics", lambda: ray_metrics(watch, 1, of=0) == ["share-0.5"])
        return f"one worker had {', '.join(map(str, parts))} of the card in turn, refused at three times its third share; {watch.end()}"
    finally:
        ray.shutdown()


def ray_metrics(watch, processes, of=1):
    """The tags in Ray's metrics, once that many living processes have `of` bytes or more."""
    from prometheus_client.parser import text_string_to_metric_families

    import xlogmem.ray

    families = {}
    for target in xlogmem.ray.metrics_targets():
        try:
            text = urllib.request.urlopen(f"http://{target}/metrics", timeout=5).read().decode()
        except OSError:
            return []
        for family in text_string_to_metric_families(text):
            if "xlogmem" in family.name:
                families.setdefault(family.name, []).extend(family.samples)
    names = {"ray_xlogmem_used_bytes", "ray_xlogmem_peak_bytes", "ray_xlogmem_quota_bytes", "ray_xlogmem_guaranteed_bytes"}
    for sample in [sample for samples in families.values() for sample in samples]:
        check(set(sample.labels) >= {"node", "device", "process", "tag"}, f"labels {sample.labels}")
    if not families:
        return []
    check(set(families) == names | {"ray_xlogmem_device_limit_bytes"}, f"names {set(families)}")
    alive = {str(slot.pid) for slot in watch.slots()}
    # A withdrawn series has a limit of 0.
    shown = {tuple(sample.labels.items()) for sample in families["ray_xlogmem_device_limit_bytes"] if sample.value > 0}
    found = [sample for sample in families["ray_xlogmem_used_bytes"] if tuple(sample.labels.items()) in shown and sample.value >= of]
    found = [sample for sample in found if sample.labels["process"] in alive]
    return [sample.labels["tag"] for sample in found] if len({sample.labels["process"] for sample in found}) == processes else []


def nodes_part(folder, kind):
    import ray
    from ray.cluster_utils import Cluster

    import xlogmem.ray

    cards = 2 if kind.name == "sim" else 1
    watches = [Watch(folder / f"node-{kind.name}-{number}", kind.limit) for number in range(2)]
    cluster = Cluster()
    for number, watch in enumerate(watches):
        variables = {"XLOG_EXEC_LEDGER": str(watch.folder), "XLOG_DEVICE_LEDGER": str(watch.folder)}
        cluster.add_node(num_cpus=4, num_gpus=cards, resources={f"node{number}": 1}, env_vars=variables, include_dashboard=False)
    ray.init(address=cluster.address, log_to_driver=False, runtime_env=ray_env(kind, None))
    try:
        holder, half = actor_class(), kind.share(0.5)
        names = [f"on-{number}-{copy}" for number in range(2) for copy in range(2)]
        actors = [holder.options(num_gpus=0.5, resources={f"node{name[3]}": 0.1}, name=name).remote() for name in names]
        check(ray.get([actor.take.remote(half) for actor in actors]) == [0] * 4, "an actor did not get half of its node's card")
        check(ray.get([actor.take.remote(kind.step) for actor in actors]) == [OUT_OF_MEMORY] * 4, "an actor got more than its half")
        held = [watch.used() for watch in watches]
        check(held == [2 * half, 2 * half], f"{held} bytes on the two ledgers")
        targets = ",".join(xlogmem.ray.metrics_targets())
        wait_for("all four are in Ray's metrics", lambda: all(ray_metrics(watch, 2) for watch in watches))
        shown = top([targets])
        check(all(name in shown for name in names), f"xlogmem top --cluster: {shown}")
        print(f"$ xlogmem top --cluster {targets} --once\n{shown}", flush=True)
        told = f"two raylets, 2 x {kind.limit // MIB} MiB, each under its own limit; xlogmem top --cluster shows all four"
        if cards == 2:
            for actor in actors:
                ray.kill(actor)
            both = holder.options(num_gpus=2, resources={"node0": 0.1}, name="both").remote()
            ray.get(both.take_cards.remote(kind.limit))
            told += "; an actor with num_gpus=2 has two cards whole"
        return "; ".join([told, *[watch.end() for watch in watches]])
    finally:
        ray.shutdown()
        cluster.shutdown()


def drivers_part(folder, kind):
    from ray.cluster_utils import Cluster

    watch = Watch(folder / f"drivers-{kind.name}", kind.limit)
    cluster = Cluster()
    cluster.add_node(num_cpus=4, num_gpus=1, include_dashboard=False)
    try:
        command = [sys.executable, str(ROOT / "scripts/check-cluster"), "--driver", f"{cluster.address} {watch.folder} {kind.name}"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        drivers = [subprocess.Popen(command, **pipes) for _ in range(2)]
        quarter = kind.share(0.25)
        for driver in drivers:
            steps = quarter // kind.step
            check(driver.stdout.readline() == f"got {steps} {steps}\n", "a driver's actors have another share")
        check(watch.used() == 4 * quarter, f"{watch.used()} bytes are held")
        for driver in drivers:
            driver.communicate("end\n", timeout=60)
        wait_for("nothing is held", lambda: watch.used() == 0)
        return f"two drivers with two actors at 1/4 each had {quarter // MIB} MiB each; {watch.end()}"
    finally:
        cluster.shutdown()


def driver(address, folder, name):
    """One of two drivers: its actors fill their shares, until it is told to end."""
    import ray

    kind = KINDS[name]
    ray.init(address=address, log_to_driver=False, runtime_env=ray_env(kind, folder))
    actors = [actor_class().options(num_gpus=0.25).remote() for _ in range(2)]
    print("got", *ray.get([actor.fill.remote(kind.step) for actor in actors]), flush=True)
    sys.stdin.readline()


def hook_part(folder, kind):
    import ray

    import xlogmem.ray

    known = xlogmem.ray.START
    xlogmem.ray.START = ("ray._private.utils", "a_function_of_another_version")
    try:
        xlogmem.ray.runtime_env(preload="")
        check(False, "a Ray without the function is accepted")
    except xlogmem.ray.UnsupportedRay as error:
        check(ray.__version__ in str(error) and "apply_share" in str(error), f"{error}")
        env = ray_env(kind, folder / "hook", hook=False)  # needs no function
    finally:
        xlogmem.ray.START = known
    watch, expected = Watch(folder / "hook", kind.limit), (OUT_OF_MEMORY, 0.25, OUT_OF_MEMORY, 0)

    def ask(size, step):
        import memory

        import xlogmem.ray

        before = memory.take(step)
        share = xlogmem.ray.apply_share()
        return before, share, memory.take(size + step), memory.take(size)

    # Ray does not run the hook for the environment of a single task: it has no quota until it requests one.
    alone = {"runtime_env": ray_env(kind, folder / "hook")}
    for of_job, of_task in (({"runtime_env": env}, {}), ({}, alone)):
        ray.init(num_cpus=1, num_gpus=1, include_dashboard=False, log_to_driver=False, **of_job)
        try:
            found = ray.get(ray.remote(num_gpus=0.25, **of_task)(ask).remote(kind.share(0.25), kind.step))
            check(found == expected, f"{found} with an environment of the {'job' if of_job else 'task'}")
        finally:
            ray.shutdown()
    return f"a Ray without the function is UnsupportedRay; apply_share() in a task has its share, and nothing before; {watch.end()}"
