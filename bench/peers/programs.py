"""The programs of the comparison: how each is built on a GPU host, and how it is asked for a row.

A program answers `VARIANT:WORKLOAD:PARAMETER` lines on its standard input with rows and a line with a dot. It is started once and
asked again and again, so that peers can take turns row by row and no time goes into starting them. One that dies or takes too
long is started anew for the next row.
"""

import importlib.util
import os
import pathlib
import queue
import shlex
import shutil
import subprocess
import sys
import threading

import report

HERE = pathlib.Path(__file__).resolve().parent
CXX = ["g++", "-O2", "-std=c++17", "-pthread"]
# The first request of a new program; its answer is dropped.
FIRST = ("pair", 1024)


class Missing(Exception):
    """A peer that cannot take part; the text says why."""


class Program:
    """One program that answers requests."""

    def __init__(self, peer, variants, command, environment=None, name=None):
        self.peer = peer
        self.name = name or peer
        self.variants = variants
        self.command = [str(part) for part in command]
        self.environment = {**os.environ, **(environment or {})}
        self.process = None
        self.lines = None
        self.failures = 0

    def start(self, options, log):
        self.stop()
        arguments = ["--serve", "--seconds", str(options.seconds), *options.inputs]
        self.lines = queue.Queue()
        with open(log / f"{self.name}.log", "a", encoding="utf-8") as errors:
            self.process = subprocess.Popen(
                [*self.command, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
                env=self.environment,
            )
        process, lines = self.process, self.lines

        def read():
            with process.stdout:
                for line in process.stdout:
                    lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            try:
                self.process.stdin.close()
            except OSError:
                # The input that was still buffered for an ended program.
                pass
            self.process = None

    def ask(self, variant, workload, parameter, options, log, timeout, processors=()):
        """The rows of one request; a program that fails gives what it had printed and a row that says so.

        The thread that serves is put on one of `processors`, where there are any. A program that was just started first answers a
        request that does not count: threads that begin with it are to be free, and what it does once is nobody's row.
        """
        rows, trouble = [], ""
        try:
            if self.process is None or self.process.poll() is not None:
                self.start(options, log)
                trouble = self._exchange((variant, *FIRST), [], log, timeout)
            if not trouble:
                if processors:
                    os.sched_setaffinity(self.process.pid, processors)
                trouble = self._exchange((variant, workload, parameter), rows, log, timeout)
        except (OSError, ValueError) as error:
            trouble = str(error) or type(error).__name__
            self.stop()
        if not trouble:
            self.failures = 0
        else:
            self.failures += 1
            reason = "skipped: " + " ".join(trouble.replace(",", " ").split())[:160]
            rows.append(report.Row(self.peer, variant, workload, parameter, None, reason))
        return rows

    def _exchange(self, request, rows, log, timeout):
        """Asks once and adds what comes back to `rows`; returns why that ended early, or an empty text."""
        self.process.stdin.write(":".join(map(str, request)) + "\n")
        self.process.stdin.flush()
        while True:
            try:
                line = self.lines.get(timeout=timeout)
            except queue.Empty:
                self.stop()
                return f"took over {timeout:.0f} s"
            if line is None:
                return f"ended with status {self.process.wait()}: {last_line(log / f'{self.name}.log')}"
            if line.strip() == ".":
                return ""
            rows += report.parse(line)


class Meter:
    """A program that answers a line with rows and a dot, in milliseconds."""

    def __init__(self, command):
        self.process = subprocess.Popen([str(part) for part in command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, text):
        """The rows that answer. A program that is gone raises OSError or ValueError."""
        self.process.stdin.write(f"{text}\n")
        self.process.stdin.flush()
        rows = []
        while (line := self.process.stdout.readline()).strip() != ".":
            if not line:
                raise OSError(f"{self.process.args[0]} ended with status {self.process.wait()}")
            rows += report.parse(line)
        return rows

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        try:
            self.process.stdin.close()
        except OSError:
            # The input that was still buffered for an ended program.
            pass


def last_line(path):
    try:
        lines = [line for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    return lines[-1][:120] if lines else "no message"


def output(*command):
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def cuda_home():
    nvcc = shutil.which("nvcc")
    folders = [os.environ.get("CUDA_HOME"), nvcc and pathlib.Path(nvcc).resolve().parent.parent, "/usr/local/cuda"]
    for folder in folders:
        if folder and (pathlib.Path(folder) / "include" / "cuda.h").is_file():
            return pathlib.Path(folder)
    raise Missing("no CUDA toolkit: set CUDA_HOME to a folder with include/cuda.h")


def toolkit_libraries(cuda):
    return [folder for folder in (cuda / "lib64", cuda / "lib") if folder.is_dir()]


def package(name):
    """The folder of an installed Python package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise Missing(f"{sys.executable} has no package {name}")
    return pathlib.Path(next(iter(spec.submodule_search_locations)))


def build(target, source, command):
    """Compiles unless the same command already compiled the same sources."""
    name = target.name
    command = [*command, "-o", str(target)]
    stamp = target.with_suffix(".command")
    sources = [HERE / source, *HERE.glob("*.hpp")]
    if (
        target.is_file()
        and stamp.is_file()
        and stamp.read_text() == shlex.join(command)
        and all(path.stat().st_mtime < target.stat().st_mtime for path in sources)
    ):
        return target
    if shutil.which(command[0]) is None:
        raise Missing(f"no compiler {command[0]}")
    print(f"building {name}", file=sys.stderr)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired as late:
        raise Missing("the compiler took over 300 s") from late
    if done.returncode != 0:
        log = target.with_suffix(".log")
        log.write_text(shlex.join(command) + "\n" + done.stdout + done.stderr)
        errors = [line for line in (done.stderr + done.stdout).splitlines() if "error" in line or "cannot find" in line]
        raise Missing(f"does not compile ({log}): {(errors or ['no message'])[0][:120]}")
    stamp.write_text(shlex.join(command))
    return target


class Workshop:
    """Makes the programs out of what lies in the bundle and on the host."""

    def __init__(self, bundle):
        self.bundle = bundle
        self.bin = bundle / "peers" / "bin"
        self.wheels = bundle / "peers" / "wheels"
        self.bin.mkdir(parents=True, exist_ok=True)

    def ours(self):
        variants = ["pool", "async", "direct", "thrifty", "budget", "null-log", "stack", "stack-log", "stack-csv", "guard"]
        return Program("xlog", variants, [self.bundled("benches/xlog-cuda.peers")])

    def cudarc(self):
        return Program("cudarc", ["tracking", "plain"], [self.bundled("benches/xlog-cuda.peers"), "--peer", "cudarc"])

    def published(self):
        path = self.bundle / "peers" / "published"
        if not path.is_file():
            raise Missing(f"no {path}: build it with bench/peers/published/build where there is Rust and a network")
        return Program("published", ["async"], [path])

    def bundled(self, name):
        path = self.bundle / name
        if not path.is_file():
            raise Missing(f"no {path}: build it with scripts/gpu-bundle")
        return path

    def host(self):
        return Program("glibc", ["malloc", "nothing"], [build(self.bin / "host", "host.cpp", [*CXX, str(HERE / "host.cpp"), "-ldl"])])

    def cores(self):
        """Cores as a test of the multipliers counts them, and how many processors there are."""
        (row,) = self._cores()
        return row.value, row.parameter

    def clock(self):
        """The program that tells how fast each processor is."""
        return Meter([self._cores_program(), "--serve"])

    def _cores(self):
        done = subprocess.run([self._cores_program()], capture_output=True, text=True, timeout=60, check=True)
        return report.parse(done.stdout)

    def _cores_program(self):
        return build(self.bin / "cores", "cores.cpp", [*CXX, str(HERE / "cores.cpp")])

    def driver(self):
        cuda = cuda_home()
        stubs = [f"-L{folder / 'stubs'}" for folder in toolkit_libraries(cuda)]
        command = [*CXX, f"-I{cuda / 'include'}", str(HERE / "driver.cpp"), *stubs, "-ldl", "-lcuda"]
        try:
            target = build(self.bin / "driver", "driver.cpp", command)
        except Missing:
            # A toolkit without stubs: link with the driver itself.
            target = build(self.bin / "driver", "driver.cpp", [*command[:-1], "-l:libcuda.so.1"])
        return Program("driver", ["async"], [target])

    def torch(self):
        cuda = cuda_home()
        folder = package("torch")
        if not (folder / "lib" / "libtorch_cuda.so").is_file():
            raise Missing(f"PyTorch in {folder} is built without CUDA")
        command = [*CXX, f"-I{folder / 'include'}", f"-I{cuda / 'include'}", str(HERE / "torch_allocator.cpp")]
        command += [f"-L{folder / 'lib'}", *(f"-L{libraries}" for libraries in toolkit_libraries(cuda))]
        command += ["-Wl,--no-as-needed", "-ltorch_cuda", "-ltorch_cpu", "-ltorch", "-lc10", "-lc10_cuda", "-lcudart", "-ldl"]
        # PyTorch's libraries precede the toolkit's.
        command += [f"-Wl,-rpath,{path}" for path in (folder / "lib", *toolkit_libraries(cuda))]
        command += ["-Wl,--allow-shlib-undefined"]
        return Program("torch", ["cpp"], [build(self.bin / "torch_allocator", "torch_allocator.cpp", command)])

    def nvcc(self, name, source, *flags):
        """Something that links with RMM, and the environment that it runs in."""
        cuda = cuda_home()
        nvcc = cuda / "bin" / "nvcc"
        if not nvcc.is_file():
            raise Missing(f"no nvcc in {cuda}")
        librmm, logger = self.wheels / "librmm", self.wheels / "rapids_logger"
        if not librmm.is_dir() or not logger.is_dir():
            raise Missing(f"no wheels in {self.wheels}: run bench/peers/fetch where there is a network")
        capability = output("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader").splitlines()
        architecture = "sm_" + (capability[0].replace(".", "") if capability else "90")
        command = [str(nvcc), "-O2", "-std=c++20", f"-arch={architecture}", "-Xcompiler", "-pthread", *flags]
        command += [f"-I{librmm / 'include'}", f"-I{librmm / 'include' / 'rapids'}", f"-I{logger / 'include'}"]
        command += [str(HERE / source), f"-L{librmm / 'lib64'}", f"-L{logger / 'lib64'}"]
        command += [*(f"-L{folder}" for folder in toolkit_libraries(cuda)), "-lrmm", "-lrapids_logger", "-ldl"]
        libraries = [str(librmm / "lib64"), str(logger / "lib64"), *map(str, toolkit_libraries(cuda))]
        libraries += [part for part in os.environ.get("LD_LIBRARY_PATH", "").split(":") if part]
        return build(self.bin / name, source, command), {"LD_LIBRARY_PATH": ":".join(libraries)}

    def rmm(self):
        target, environment = self.nvcc("rmm", "rmm.cu")
        return Program("rmm", ["pool", "arena", "binning", "async", "cuda"], [target], environment)

    def bridge(self):
        """The command that puts RMM behind our trait through the conformance suite, and its environment."""
        test = self.bundled("tests/xlog-rmm.conformance")
        library, environment = self.nvcc("librmm_bridge.so", "rmm_bridge.cu", "-shared", "-Xcompiler", "-fPIC")
        environment |= {"XLOG_RMM_BRIDGE": str(library), "XLOG_TEST_DEVICE": "cuda:0"}
        return [str(test), "rmm_passes", "--nocapture"], {**os.environ, **environment}

    def python(self, name, variants):
        package(name)
        return Program(name, variants, [sys.executable, HERE / "python_peers.py", "--peer", name], name=f"{name}-python")
