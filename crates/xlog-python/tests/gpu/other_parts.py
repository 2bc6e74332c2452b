"""The runtime itself, other frameworks, arrays between libraries, and the end of processes."""

import gc
import os
import subprocess
import sys
import tempfile

from registry import MIB, check, equal, part


@part
def part_cupy():
    import cupy

    import xlogmem

    xlogmem.cupy.enable(limit="2GiB")
    array = cupy.arange(1 << 20, dtype=cupy.float64)
    equal(float(array.sum()), (1 << 20) * ((1 << 20) - 1) / 2, "a sum of CuPy")
    check(xlogmem.shared(0).bytes_outstanding >= array.nbytes, "CuPy's memory is not ours")
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    for step in range(100):
        results = []
        for number, stream in enumerate(streams):
            with stream:
                value = cupy.full(1 << 18, step + number, dtype=cupy.float64)
                results.append((value * 2).sum())
                del value
        for number, (stream, result) in enumerate(zip(streams, results)):
            stream.synchronize()
            equal(float(result), 2.0 * (1 << 18) * (step + number), f"step {step}, stream {number}")
    try:
        cupy.zeros(4 << 30, dtype=cupy.uint8)
    except MemoryError as error:
        check(isinstance(error, xlogmem.OutOfBudget), repr(error))
    else:
        raise AssertionError("a request beyond the limit should be refused")
    product = cupy.random.rand(512, 512) @ cupy.random.rand(512, 512)
    check(bool(cupy.isfinite(product).all()), "a product of CuPy is wrong")
    del array, results, result, product, streams, stream
    gc.collect()


# A kernel on Numba's own memory: whether this Numba compiles at all with the NumPy beside it.
NUMBA_KERNEL = (
    "import numpy\n"
    "from numba import cuda\n"
    "@cuda.jit\n"
    "def add(values):\n"
    "    index = cuda.grid(1)\n"
    "    if index < values.size:\n"
    "        values[index] += 1\n"
    "values = cuda.to_device(numpy.zeros(256, dtype=numpy.float32))\n"
    "add[1, 256](values)\n"
    "assert values.copy_to_host().sum() == 256\n"
)


def numba_compile_error():
    """Why Numba without us cannot run a kernel, or `None`."""
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CUDA_MEMORY_MANAGER"}
    command = [sys.executable, "-c", NUMBA_KERNEL]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]


@part
def part_numba():
    os.environ["NUMBA_CUDA_MEMORY_MANAGER"] = "xlogmem.numba"
    try:
        import numpy
        from numba import cuda
    except ImportError as error:
        print(error)
        sys.exit(77)

    import xlogmem

    for step in range(20):
        left = numpy.arange(100_000 + step, dtype=numpy.float32)
        on_device = cuda.to_device(left)
        check(xlogmem.shared(0).bytes_outstanding >= left.nbytes, "Numba's memory is not ours")
        out = cuda.device_array_like(on_device)
        out.copy_to_device(on_device)
        check(numpy.array_equal(out.copy_to_host(), left), f"step {step}: a copy on the device is wrong")
        part_of_it = out[1000:2000]
        part_of_it.copy_to_device(numpy.full(1000, -1.0, dtype=numpy.float32))
        cuda.synchronize()
        # The view keeps the memory; the request that follows must not get it.
        del out
        other = cuda.to_device(numpy.zeros_like(left))
        check(bool((part_of_it.copy_to_host() == -1.0).all()), f"step {step}: a view of a dropped array is wrong")
        stream = cuda.stream()
        on_stream = cuda.to_device(left, stream=stream)
        result = on_stream.copy_to_host(stream=stream)
        stream.synchronize()
        check(numpy.array_equal(result, left), f"step {step}: copies on a stream are wrong")
        check(numpy.array_equal(on_device.copy_to_host(), left), f"step {step}: memory of another array was written")
    check(xlogmem.shared(0).statistics()["allocations"] >= 80, "Numba's memory is not ours")
    info = cuda.current_context().get_memory_info()
    check(0 < info.free <= info.total, repr(info))
    reason = numba_compile_error()
    if reason is None:
        numba_kernel(cuda, numpy)
    del on_device, part_of_it, other, on_stream
    gc.collect()
    cuda.synchronize()
    xlogmem.shared(0).reap()
    equal(xlogmem.shared(0).bytes_outstanding, 0, "bytes after all arrays were dropped")
    if reason is not None:
        print(f"without a kernel, which Numba cannot run on its own memory either: {reason}")


def numba_kernel(cuda, numpy):
    @cuda.jit
    def add(left, right, out):
        index = cuda.grid(1)
        if index < out.size:
            out[index] = left[index] + right[index]

    for step in range(20):
        left = numpy.arange(100_000 + step, dtype=numpy.float32)
        on_device = cuda.to_device(left)
        out = cuda.device_array_like(on_device)
        add[(left.size + 255) // 256, 256](on_device, on_device, out)
        check(numpy.array_equal(out.copy_to_host(), left + left), f"step {step}: a kernel of Numba is wrong")


@part
def part_cuda_core():
    try:
        from cuda.core import Device
    except ImportError:
        from cuda.core.experimental import Device

    import xlogmem

    device = Device(0)
    device.set_current()
    device.memory_resource = xlogmem.MemoryResource(0)
    stream = device.create_stream()
    for _ in range(50):
        buffer = device.allocate(4 * MIB, stream=stream)
        other = device.allocate(4 * MIB, stream=stream)
        other.copy_from(buffer, stream=stream)
        buffer.close(stream)
        other.close(stream)
    stream.sync()
    counts = xlogmem.shared(0).statistics()
    check(counts["allocations"] >= 100, "cuda.core's memory is not ours")
    xlogmem.shared(0).reap()
    equal(xlogmem.shared(0).bytes_outstanding, 0, "bytes after all buffers were closed")


@part
def part_rmm():
    import numpy
    import rmm

    import xlogmem

    runtime = xlogmem.shared(0)
    before = rmm.mr.get_current_device_resource()
    pool = rmm.mr.PoolMemoryResource(xlogmem.rmm.upstream(), initial_pool_size=64 * MIB, maximum_pool_size=256 * MIB)
    rmm.mr.set_current_device_resource(pool)
    equal(runtime.bytes_outstanding, 64 * MIB, "bytes of RMM's pool in our runtime")
    numbers = numpy.arange(1 << 20, dtype=numpy.int64)
    buffers = [rmm.DeviceBuffer.to_device((numbers + turn).tobytes()) for turn in range(12)]
    for turn, buffer in enumerate(buffers):
        equal(numpy.frombuffer(buffer.tobytes(), dtype=numpy.int64).sum(), (numbers + turn).sum(), f"values of buffer {turn}")
    check(runtime.bytes_outstanding > 64 * MIB, "the growth of RMM's pool is not ours")
    del buffer, buffers
    rmm.mr.set_current_device_resource(before)
    del pool
    runtime.reap()
    equal(runtime.bytes_outstanding, 0, "bytes after RMM's pool has ended")

    # Without a pool: every allocation is ours, on streams too, and a refusal is a MemoryError of RMM's.
    direct = xlogmem.rmm.upstream()
    stream = rmm.pylibrmm.stream.Stream()
    with runtime.scope("rmm", 32 * MIB):
        held = [rmm.DeviceBuffer(size=8 * MIB, stream=stream, mr=direct) for _ in range(4)]
        try:
            rmm.DeviceBuffer(size=8 * MIB, stream=stream, mr=direct)
            check(False, "40 MiB were granted of 32")
        except MemoryError as refused:
            print(f"refused: {type(refused).__name__}")
        held.pop()
        held.append(rmm.DeviceBuffer(size=8 * MIB, stream=stream, mr=direct))
    del held
    stream.synchronize()
    runtime.reap()
    equal(runtime.bytes_outstanding, 0, "bytes after all buffers were dropped")
    print(f"rmm {rmm.__version__}")


@part
def part_exchange():
    import torch

    import xlogmem

    runtime = xlogmem.open("cuda:0")
    buffer = runtime.empty((256, 256), "float32")
    buffer.fill(0)
    tensor = torch.from_dlpack(buffer)
    equal((tuple(tensor.shape), tensor.data_ptr()), ((256, 256), buffer.ptr), "a tensor over our buffer")
    tensor += 1
    buffer.record_use(torch.cuda.current_stream().cuda_stream)
    expected = torch.ones(256, 256).numpy().tobytes()
    equal(buffer.to_bytes(), expected, "values that PyTorch wrote")
    del buffer
    gc.collect()
    equal(float(tensor.sum()), 65536.0, "a tensor that outlives its buffer")
    del tensor
    gc.collect()
    for step in range(50):
        # Work of PyTorch is pending when we take the tensor, and ours when PyTorch gets it back.
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            source = torch.empty(MIB, dtype=torch.uint8, device="cuda")
            torch.cuda._sleep(2_000_000)
            source.fill_(step)
            taken = runtime.from_array(source)
        stream = runtime.stream()
        equal(taken.to_bytes(stream=stream), bytes([step]) * MIB, f"step {step}: values that PyTorch wrote")
        taken.fill(200)
        del taken
        gc.collect()
        equal(int(source[123]), 200, f"step {step}: values that we wrote")
        with torch.cuda.stream(side):
            ours = runtime.allocate(MIB)
            ours.fill(step)
            check(bool((torch.from_dlpack(ours) == step).all()), f"step {step}: values through DLPack on a side stream")
        del ours
    try:
        import cupy
    except ImportError:
        print("without CuPy")
        return
    ours = runtime.empty((1000,), "int64")
    ours.fill(0)
    array = cupy.asarray(ours)
    array += 5
    cupy.cuda.Device().synchronize()
    equal(int(cupy.from_dlpack(ours).sum()), 5000, "values through the CUDA array interface and DLPack of CuPy")
    back = runtime.from_array(cupy.arange(10, dtype=cupy.int32))
    equal((back.shape, back.dtype), ((10,), "int32"), "an array of CuPy")
    equal(back.to_bytes()[4:8], (1).to_bytes(4, "little"), "values of CuPy")


@part
def part_runtime():
    import xlogmem

    runtime = xlogmem.open("cuda:0", limit="1GiB")
    streams = [runtime.stream() for _ in range(4)]
    for step in range(50):
        data = bytes([step]) * MIB
        buffer = runtime.allocate(MIB, stream=streams[step % 4], tag="rows")
        buffer.copy_from(data)
        equal(buffer.to_bytes(stream=streams[(step + 1) % 4]), data, f"step {step}")
    try:
        runtime.allocate(2 << 30)
    except MemoryError as error:
        equal(type(error), xlogmem.OutOfBudget, "the type of a refusal")
    else:
        raise AssertionError("a request beyond the limit should be refused")
    equal(buffer.__cuda_array_interface__["data"], (buffer.ptr, False), "the CUDA array interface")
    try:
        buffer.free()
    except BufferError as error:
        check("__cuda_array_interface__" in str(error), repr(error))
    else:
        raise AssertionError("a buffer that was handed out should not be freed")
    del buffer
    gc.collect()
    runtime.reap()
    equal(runtime.bytes_outstanding, 0, "what is left of a buffer that was handed out")
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "run.xtrace")
        runtime.log_on(log)
        runtime.allocate(MIB, tag="logged")
        runtime.log_off()
        check("logged" in xlogmem.report(log).html, "the report does not name a tag")


EXITS = {
    "live tensors": "tensors = [torch.ones(1 << 20, device='cuda') for _ in range(8)]",
    "work in flight": "x = torch.ones(1 << 20, device='cuda'); torch.cuda._sleep(200_000_000); y = x * 2",
    "a graph": "g = torch.cuda.CUDAGraph(); x = torch.ones(1 << 10, device='cuda')\nwith torch.cuda.graph(g):\n    y = x * 2\ng.replay()",
    "a thread": "import threading\nk = []\nt = threading.Thread(target=lambda: k.append(torch.ones(1 << 20, device='cuda')))\nt.start(); t.join()",
    "a cycle": "class C: pass\nc = C(); c.c = c; c.t = torch.ones(1 << 20, device='cuda'); del c",
    "an exception": "x = torch.ones(1 << 20, device='cuda')\nimport sys\nsys.exit(0)",
    "modules cleared": "import sys\nx = torch.ones(1 << 20, device='cuda')\nsys.modules.pop('xlogmem'); del xlogmem",
}


@part
def part_exits():
    import importlib.util

    if importlib.util.find_spec("torch") is None:
        print("No module named 'torch'")
        sys.exit(77)
    begins = {
        "enable": "import torch, xlogmem\nxlogmem.torch.enable()\n",
        "enable, xlogmem first": "import xlogmem, torch\nxlogmem.torch.enable()\n",
        "pool": "import torch, xlogmem\np = xlogmem.torch.pool()\ncontext = torch.cuda.use_mem_pool(p); context.__enter__()\n",
    }
    # Pairs that together see every beginning and every end.
    programs = [(begin, end) for begin in ("enable", "pool") for end in EXITS] + [("enable, xlogmem first", "live tensors")]
    running = []
    for begin, end in programs:
        if begin == "pool" and end == "a graph":
            continue
        program = begins[begin] + EXITS[end]
        running.append((begin, end, subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)))
        if len(running) % 4 == 0:
            for _, _, process in running[-4:]:
                process.wait(90)
    for begin, end, process in running:
        _, errors = process.communicate(timeout=90)
        check(process.returncode == 0, f"{begin}, {end}: status {process.returncode}: {errors[-400:]}")


@part
def part_jax():
    import importlib.util

    if importlib.util.find_spec("jax") is None:
        print("No module named 'jax'")
        sys.exit(77)
    program = (
        "import jax, jax.numpy as jnp\n"
        "print(jax.devices()[0].platform, float(jnp.ones((1024, 1024)).sum()))\n"
        "try:\n"
        "    x = jnp.ones((3 << 30,), dtype=jnp.uint8); x.block_until_ready(); print('not refused')\n"
        "except Exception as error:\n"
        "    print('refused', type(error).__name__)\n"
    )
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, "-m", "xlogmem", "exec", "--limit", "2GiB", "--", sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    check("1048576.0" in done.stdout, done.stdout + done.stderr[-800:])
    if "gpu" in done.stdout or "cuda" in done.stdout:
        check("refused" in done.stdout and "not refused" not in done.stdout, done.stdout + done.stderr[-800:])
