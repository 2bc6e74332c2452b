"""Captures that PyTorch begins and abandons.

PyTorch tells its allocator that a capture begins before it asks the driver, and that it ends only after the driver has ended it without an
error. So a begin or an end that fails can leave a capture announced that nobody ends.
"""

import contextlib as _contextlib
import functools as _functools

from . import _native


def _begins(method, stream):
    """Wraps a function that begins the capture of a graph: if it fails, the capture that it announced does not stay."""

    @_functools.wraps(method)
    def begin(graph, *arguments, **options):
        before = _native.torch_last_capture()
        try:
            result = method(graph, *arguments, **options)
        except BaseException:
            number = _native.torch_last_capture()
            if number > before:
                # Newer versions of PyTorch end here what they have announced, and would do so again later.
                with _contextlib.suppress(RuntimeError):
                    graph.reset()
                _native.torch_abandon_capture(number)
            raise
        number = _native.torch_last_capture()
        graph._xlogmem_capture = (number, stream()) if number > before else None
        return result

    return begin


def _ends(method, stream):
    """Wraps a function that ends the capture of a graph: on the stream of the capture it is over even if that fails."""

    @_functools.wraps(method)
    def end(graph, *arguments, **options):
        number, captured = getattr(graph, "_xlogmem_capture", None) or (0, None)
        # PyTorch refuses another stream before it asks the driver, and the capture stays.
        is_over = number > 0 and stream() == captured
        try:
            return method(graph, *arguments, **options)
        except BaseException:
            if is_over:
                _native.torch_abandon_capture(number)
            raise

    return end


def patch(graph, stream):
    """Patches `torch.cuda.CUDAGraph`; `stream` returns the current stream."""
    graph.capture_begin = _begins(graph.capture_begin, stream)
    graph.capture_end = _ends(graph.capture_end, stream)
