"""Captures that PyTorch begins and abandons.

PyTorch tells its allocator that a capture begins before it asks the driver, and that it ends only after the driver has ended it without an
error. So a begin or an end that fails leaves a capture announced that nobody ends.
"""

import functools as _functools

from . import _native


def _begins(method):
    """Wraps a function that begins a capture: if it fails, no capture that it announced stays."""

    @_functools.wraps(method)
    def begin(*arguments, **options):
        before = _native.torch_captures()
        try:
            return method(*arguments, **options)
        except BaseException:
            _native.torch_abandon_captures(before)
            raise

    return begin


def _ends(method):
    """Wraps a function that ends this thread's last capture: the capture is over even if that fails."""

    @_functools.wraps(method)
    def end(*arguments, **options):
        before = _native.torch_captures()
        try:
            return method(*arguments, **options)
        except BaseException:
            _native.torch_abandon_captures(max(before - 1, 0))
            raise

    return end


def patch(graph):
    """Patches `torch.cuda.CUDAGraph`."""
    graph.capture_begin = _begins(graph.capture_begin)
    graph.capture_end = _ends(graph.capture_end)
