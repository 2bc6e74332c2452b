"""Stream handles of frameworks as ints."""


def handle(stream):
    """The number of a stream: an int, `None` for the legacy default stream, or an object of CuPy, PyTorch, cuda.core, Numba or RMM."""
    if stream is None:
        return 0
    if isinstance(stream, int):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        # A method since cuda.core 0.2, a property before.
        _, number = protocol() if callable(protocol) else protocol
        return int(number)
    for name in ("cuda_stream", "ptr", "handle"):
        number = getattr(stream, name, None)
        if number is not None:
            return int(getattr(number, "value", number) or 0)
    raise TypeError(f"{stream!r} is not accepted; expected a stream, an int or None")
