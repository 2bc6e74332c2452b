"""PyTorch on our memory."""

import gc
import os
import sys
import tempfile
import threading

from registry import MIB, check, equal, part, step


def enabled(**options):
    """PyTorch on our pool."""
    import torch

    import xlogmem

    xlogmem.torch.enable(**options)
    return torch, xlogmem


def filled(tensor, value, text):
    """Checks that every element is `value`, without a copy: a sum as int64 would first convert the whole tensor."""
    equal((tensor.min().item(), tensor.max().item()), (value, value), text)


@part
def part_torch_basics():
    torch, xlogmem = enabled()
    matrix = torch.randn(1024, 1024, device="cuda", dtype=torch.float64)
    expected = matrix.cpu() @ matrix.cpu()
    check(torch.allclose((matrix @ matrix).cpu(), expected), "a product on our memory is wrong")
    check(matrix.data_ptr() % 512 == 0, "an address is not a multiple of 512")
    before = torch.cuda.memory_allocated()
    tensor = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    check(torch.cuda.memory_allocated() - before >= 5 * MIB, "memory_allocated does not count")
    check(torch.cuda.memory_reserved() >= torch.cuda.memory_allocated(), "less is reserved than allocated")
    del tensor
    equal(torch.cuda.memory_allocated(), before, "memory_allocated after a free")
    torch.cuda.reset_peak_memory_stats()
    equal(torch.cuda.max_memory_allocated(), before, "the peak after a reset")
    check("PyTorch CUDA memory summary" in torch.cuda.memory_summary(), "there is no summary")
    with xlogmem.tag("weights"):
        weights = torch.zeros(MIB, device="cuda")
    check(xlogmem.shared(0).statistics()["by_tag"]["weights"]["current_bytes"] >= weights.nbytes, "the tag does not count")
    torch.cuda.empty_cache()
    empty = torch.empty(0, device="cuda")
    equal(empty.sum().item(), 0.0, "the sum of an empty tensor")
    try:
        torch.cuda.memory._record_memory_history()
    except RuntimeError as error:
        check("xlogmem" in str(error), str(error))
    else:
        raise AssertionError("memory history of PyTorch should be refused")
    torch.nn.functional.conv2d(torch.randn(4, 8, 64, 64, device="cuda"), torch.randn(8, 8, 3, 3, device="cuda")).sum().item()


@part
def part_too_late():
    import torch

    import xlogmem

    torch.zeros(1, device="cuda")
    try:
        xlogmem.torch.enable()
    except RuntimeError as error:
        check("initialised" in str(error), str(error))
    else:
        raise AssertionError("enable() after CUDA was initialised should be refused")


@part
def part_record_stream():
    torch, _ = enabled()
    side = torch.cuda.Stream()
    for step in range(30):
        size = 4 * MIB + 4096 * step
        tensor = torch.full((size,), step, dtype=torch.uint8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            total = tensor.sum(dtype=torch.int64)
        tensor.record_stream(side)
        del tensor
        # The memory must not serve these while the side stream sleeps.
        others = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for _ in range(4)]
        side.synchronize()
        equal(total.item(), size * step, f"step {step}: the side stream read memory that was handed out again")
        del others


@part
def part_streams():
    torch, _ = enabled()
    streams = [torch.cuda.Stream() for _ in range(6)]
    errors = []

    def work(seed):
        try:
            stream = streams[seed]
            with torch.cuda.stream(stream):
                for step in range(200):
                    tensors = [torch.full((1000 + 7777 * (step % 13),), seed * 1000 + step, device="cuda") for _ in range(4)]
                    total = sum(tensor.sum(dtype=torch.float64) for tensor in tensors)
                    if step % 50 == 0:
                        expected = 4 * tensors[0].numel() * (seed * 1000.0 + step)
                        equal(total.item(), expected, f"stream {seed}, step {step}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@part
def part_graph():
    torch, _ = enabled()
    weight = torch.randn(512, 512, device="cuda")
    static = torch.randn(512, 512, device="cuda")

    def model(value):
        for _ in range(4):
            # Temporaries that are freed during the capture.
            value = torch.relu(value @ weight) + value
        return value / value.abs().max()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            model(static)
    torch.cuda.current_stream().wait_stream(side)
    before = torch.cuda.memory_reserved()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = model(static)
    for step in range(20):
        static.copy_(torch.randn(512, 512, device="cuda"))
        # Eager work takes and overwrites whatever the allocator thinks is free.
        noise = [torch.full((512, 512), float("nan"), device="cuda") for _ in range(16)]
        graph.replay()
        kept = [torch.full((512, 512), float("nan"), device="cuda") for _ in range(16)]
        check(torch.allclose(output, model(static), atol=1e-3), f"replay {step} is wrong")
        check(all(bool(torch.isnan(tensor).all()) for tensor in kept + noise), f"replay {step} wrote memory of others")
        del noise, kept
    second = torch.cuda.CUDAGraph()
    with torch.cuda.graph(second, pool=graph.pool()):
        again = model(output)
    graph.replay()
    second.replay()
    check(torch.allclose(again, model(output), atol=1e-3), "a second graph in the same pool is wrong")
    # A third graph of the pool, of which nothing but temporaries is left when the others go.
    target, third = torch.empty_like(static), torch.cuda.CUDAGraph()
    with torch.cuda.graph(third, pool=graph.pool()):
        target.copy_(model(static))
    torch.cuda.synchronize()
    del graph, second, output, again
    gc.collect()
    noise = [torch.full((512, 512), float("nan"), device="cuda") for _ in range(64)]
    third.replay()
    check(torch.allclose(target, model(static), atol=1e-3), "the last graph of a pool is wrong")
    check(all(bool(torch.isnan(tensor).all()) for tensor in noise), "the last graph of a pool wrote memory of others")
    del third, noise
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    check(torch.cuda.memory_reserved() <= before + 128 * MIB, "the memory of destroyed graphs was not returned")


def captured_in_every_mode(torch, runtime):
    """Captures in each mode of torch.cuda.graph while another thread works with our runtime, on streams and memory of its own.

    The capture stays open until that thread has done whole rounds of its work meanwhile, so that each of its driver calls met the capture.
    """
    rounds, errors, done = 0, [], threading.Event()
    moved = threading.Condition()

    def work():
        nonlocal rounds
        try:
            stream, other = runtime.stream(), runtime.stream()
            while not done.is_set():
                buffers = [runtime.allocate(size, stream=stream) for size in (4096, MIB, 5 * MIB)]
                buffers[0].copy_from(bytes(4096))
                equal(buffers[0].to_bytes(), bytes(4096), "a copy beside a capture")
                other.wait_for(stream)
                stream.query()
                stream.synchronize()
                del buffers
                runtime.trim()
                other.synchronize()
                with moved:
                    rounds += 1
                    moved.notify_all()
        except BaseException as error:
            errors.append(error)
            with moved:
                moved.notify_all()

    def wait_for_rounds(count):
        with moved:
            target = rounds + count
            check(moved.wait_for(lambda: rounds >= target or errors, timeout=60), "the other thread does not move")
        if errors:
            raise errors[0]

    weight = torch.randn(256, 256, device="cuda")
    static = torch.randn(256, 256, device="cuda")
    for _ in range(2):
        torch.relu(static @ weight)
    torch.cuda.synchronize()
    thread = threading.Thread(target=work)
    thread.start()
    try:
        wait_for_rounds(2)
        for mode in ("global", "thread_local", "relaxed"):
            for use in range(3):
                with step(f"mode {mode}, capture {use}"):
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, capture_error_mode=mode):
                        output = torch.relu(static @ weight) + 1
                        wait_for_rounds(3)
                        output = output * 2
                        wait_for_rounds(1)
                    for _ in range(3):
                        static.copy_(torch.randn(256, 256, device="cuda"))
                        graph.replay()
                        expected = (torch.relu(static @ weight) + 1) * 2
                        check(torch.allclose(output, expected, atol=1e-3), "a replay is wrong")
                        torch.cuda.synchronize()
                    del graph, output
    finally:
        done.set()
        thread.join()
    if errors:
        raise errors[0]


@part
def part_graph_modes():
    """With our allocator, whose streams are PyTorch's."""
    torch, xlogmem = enabled()
    captured_in_every_mode(torch, xlogmem.shared(0))


@part
def part_graph_modes_beside():
    """With PyTorch's own allocator: our runtime only lives in the same process."""
    import torch

    import xlogmem

    captured_in_every_mode(torch, xlogmem.open("cuda:0", limit="256MiB"))


@part
def part_graph_abandoned():
    torch, xlogmem = enabled()
    value, runtime = torch.ones(1024, device="cuda"), xlogmem.shared(0)
    torch.cuda.synchronize()
    for _ in range(3):
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                # The host cannot read inside a capture.
                (value * 2).sum().item()
        except RuntimeError:
            pass
        else:
            raise AssertionError("a read inside a capture should fail")
        equal(xlogmem._native.torch_last_capture(), 0, "captures that are announced after the failure")
        runtime.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        double = value * 2
    graph.replay()
    filled(double, 2, "a capture after three abandoned ones is wrong")


@part
def part_graph_training():
    torch, _ = enabled()
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, targets = torch.randn(64, 256, device="cuda"), torch.randn(64, 1, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    graph.replay()
    first = loss.item()
    for _ in range(200):
        graph.replay()
    check(loss.item() < first, "a captured training step does not train")


@part
def part_autograd():
    torch, _ = enabled()
    errors = []

    def work(seed):
        try:
            torch.manual_seed(seed)
            with torch.cuda.stream(torch.cuda.Stream()):
                weight = torch.randn(256, 256, device="cuda", dtype=torch.float64, requires_grad=True)
                for _ in range(20):
                    value = torch.randn(64, 256, device="cuda", dtype=torch.float64)
                    (value @ weight).square().sum().backward()
                    expected = 2 * value.T @ (value @ weight)
                    check(torch.allclose(weight.grad, expected), f"thread {seed}: a gradient is wrong")
                    weight.grad = None
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@part
def part_oom():
    torch, xlogmem = enabled(limit="2GiB")
    kept = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
    for _ in range(5):
        try:
            torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            check("CUDA out of memory" in str(error) and "limit 2 GiB" in str(error), str(error))
        else:
            raise AssertionError("a request beyond the limit should be refused")
        tensor = torch.ones(512 * MIB, dtype=torch.uint8, device="cuda")
        filled(tensor, 1, "a tensor that was made after a refusal")
        del tensor
    # On the thread of autograd.
    value = torch.ones(80 * MIB, device="cuda", requires_grad=True)

    class Large(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            return value.sum()

        @staticmethod
        def backward(context, gradient):
            return torch.empty(3 << 30, dtype=torch.uint8, device="cuda")

    try:
        Large.apply(value).backward()
    except torch.OutOfMemoryError:
        pass
    else:
        raise AssertionError("a request beyond the limit in backward should be refused")
    # A program that halves its batch until it fits.
    batch = 64
    while True:
        try:
            torch.empty(batch, 64 * MIB, dtype=torch.uint8, device="cuda")
            break
        except torch.OutOfMemoryError:
            batch //= 2
    equal(batch, 16, "the batch that fits")
    check(xlogmem.shared(0).last_oom()["requested"] > 0, "there is no report")
    filled(kept, 1, "memory from before the refusals")
    torch.cuda.set_per_process_memory_fraction(0.001)
    try:
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass
    else:
        raise AssertionError("a fraction of the memory is not a limit")
    print(f"type {torch.OutOfMemoryError.__module__}.{torch.OutOfMemoryError.__name__}")


@part
def part_mem_pool():
    import torch

    import xlogmem

    with tempfile.TemporaryDirectory() as folder:
        pool = xlogmem.torch.pool(limit="1GiB", log=os.path.join(folder, "pool.xtrace"))
        with torch.cuda.use_mem_pool(pool):
            with step("a large tensor in the pool"):
                tensor = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
                filled(tensor, 1, "the values of a tensor in the pool")
            with step("a request beyond the limit of the pool"):
                try:
                    torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
                except torch.OutOfMemoryError:
                    check("1 GiB" in pool.last_refusal or "limit" in pool.last_refusal, pool.last_refusal)
                else:
                    raise AssertionError("it was not refused")
            with step("small tensors in the pool"):
                small = [torch.full((1000,), 3.0, device="cuda") for _ in range(100)]
                check(all(value.sum().item() == 3000.0 for value in small), "the values of small tensors in the pool")
        with step("statistics"):
            check(torch.cuda.memory_allocated() >= 256 * MIB, "PyTorch's statistics do not count the pool")
            check(pool.statistics()["reserved_bytes"]["current"] >= 256 * MIB, "the pool's statistics do not count")
            check(256 * MIB <= pool.runtime().bytes_outstanding <= 1 << 30, "the runtime does not count")
        with step("a tensor outside the pool, beyond its limit"):
            outside = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
            del outside
        with step("a graph whose memory is the pool's"):
            graph = torch.cuda.CUDAGraph()
            value = torch.ones(1024, device="cuda")
            with torch.cuda.graph(graph, pool=pool.id):
                doubled = value * 2 + 1
            graph.replay()
            equal(doubled.sum().item(), 3072.0, "the sum after a replay")
        with step("the end of the pool"):
            torch.cuda.synchronize()
            del tensor, small, graph, doubled
            runtime = pool.runtime()
            del pool
            gc.collect()
            torch.cuda.empty_cache()
            equal(runtime.bytes_outstanding, 0, "segments after the pool")


@part
def part_compile():
    import torch

    import xlogmem

    try:
        import triton  # noqa: F401
    except ImportError as error:
        print(error)
        sys.exit(77)
    pool = xlogmem.torch.pool(limit="8GiB")

    @torch.compile(mode="reduce-overhead")
    def work(value):
        return torch.relu(value @ value) + 1

    value = torch.randn(256, 256, device="cuda")
    with torch.no_grad(), torch.cuda.use_mem_pool(pool):
        for _ in range(5):
            result = work(value).clone()
    check(torch.allclose(result, torch.relu(value @ value) + 1, atol=1e-2), "a compiled function with a pool is wrong")


@part
def part_compile_enabled():
    torch, _ = enabled()
    try:
        import triton  # noqa: F401
    except ImportError as error:
        print(error)
        sys.exit(77)
    import torch._inductor.config

    torch._inductor.config.triton.cudagraph_trees = False

    @torch.compile(mode="reduce-overhead")
    def work(value):
        return torch.relu(value @ value) + 1

    value = torch.randn(256, 256, device="cuda")
    with torch.no_grad():
        for _ in range(5):
            result = work(value).clone()
    check(torch.allclose(result, torch.relu(value @ value) + 1, atol=1e-2), "a compiled function on our pool is wrong")
