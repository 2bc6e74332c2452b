"""What the parts of scripts/check-cluster share: kinds of memory, the program of workers, and a watch over ledgers."""

import os
import pathlib
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
MIB = 1 << 20
OUT_OF_MEMORY = 2


class Kind:
    """What workers take memory of."""

    def __init__(self, name, limit, step):
        self.name, self.limit, self.step = name, limit, step

    def share(self, part):
        """The bytes of a share in whole steps: our pool takes memory of the device in granules."""
        return int(self.limit * part) // self.step * self.step

    def variables(self):
        """The environment of workers, beside the one of the package."""
        names = ("LD_LIBRARY_PATH", "PYTHONPATH")
        return {name: os.environ[name] for name in names} | {"CHECK_MEMORY": self.name, "XLOG_DEVICE": "sim"}


KINDS = {"driver": Kind("driver", 960 * MIB, MIB), "sim": Kind("sim", 31 << 30, 32 * MIB)}


def check(condition, text):
    if not condition:
        raise AssertionError(text)


def wait_for(what, condition, seconds=120):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = condition()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"waited {seconds} s until {what}")


def prepare(folder, *, has_gpu):
    """The program that takes memory and, without a GPU, the driver without a device, in one folder that workers see."""
    (folder / "memory.py").write_text(MEMORY)
    os.environ["PYTHONPATH"] = f"{folder}:{ROOT / 'scripts'}:{os.environ.get('PYTHONPATH', '')}"
    os.environ["RAY_AUTH_MODE"] = "disabled"
    sys.path.insert(0, str(folder))
    if has_gpu:
        return
    source = ROOT / "crates/xlog-preload/tests/suite/fake_cuda.c"
    arguments = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(["cc", str(source), *arguments], check=True)
    os.environ["LD_LIBRARY_PATH"] = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"


# A program that allocates device memory: by driver calls, or with xlog's runtime on the simulated device.
MEMORY = '''
import ctypes
import os

driver = runtime = None
held = []

def driver_take(size):
    """The driver's status."""
    global driver
    if driver is None:
        driver = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        driver.cuInit(0)
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        driver.cuCtxSetCurrent(context)
    at = ctypes.c_uint64()
    status = driver.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(size))
    if status == 0:
        held.append(at)
    return status

def sim_take(size):
    """0, or 2 where the runtime refuses."""
    global runtime
    import xlogmem

    if runtime is None:
        runtime = xlogmem.open()
    try:
        held.append(runtime.allocate(size))
        return 0
    except xlogmem.OutOfBudget:
        return 2

take = sim_take if os.environ["CHECK_MEMORY"] == "sim" else driver_take

def fill(step):
    """Takes until it is refused; the number of steps."""
    count = 0
    while take(step) == 0:
        count += 1
    return count

def drop():
    while held:
        at = held.pop()
        if driver is not None:
            driver.cuMemFree_v2(at)
'''


class Watch:
    """Reads the ledgers of a folder all the time: no sum is ever above the limit."""

    def __init__(self, folder, limit):
        self.folder, self.limit, self.highest, self.above, self.over = folder, limit, 0, [], threading.Event()
        folder.mkdir(mode=0o700)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def read(self):
        import xlog_ledger

        return [xlog_ledger.read(path) for path in self.folder.glob("*.ledger")]

    def run(self):
        while not self.over.wait(0.002):
            for limit, slots in self.read():
                held = sum(slot.used + slot.granted for slot in slots)
                self.highest = max(self.highest, held)
                if held > limit or limit != self.limit:
                    self.above.append((held, limit))

    def slots(self):
        return [slot for _, slots in self.read() for slot in slots if slot.alive]

    def used(self):
        return sum(slot.used for slot in self.slots())

    def end(self):
        self.over.set()
        self.thread.join()
        check(not self.above, f"(held, limit) was {self.above[:3]}, and the limit is {self.limit}")
        return f"at most {self.highest // MIB} of {self.limit // MIB} MiB"


def top(targets, may_fail=False):
    """What `xlogmem top --cluster` prints."""
    from xlogmem._command import executable

    done = subprocess.run([executable(), "top", "--cluster", *targets, "--once"], capture_output=True, text=True, timeout=60)
    check(may_fail or done.returncode == 0, f"xlogmem top --cluster: {done.stdout}{done.stderr}")
    return done.stdout
