"""The shared runtime of these tests: device 0 on the simulated machine, with a limit."""

import os

LIMIT = 64 << 20

os.environ["XLOG_DEVICE"] = "sim"
os.environ["XLOG_DEVICE_BUDGET"] = str(LIMIT)

import xlogmem  # noqa: E402

runtime = xlogmem.shared(0)
