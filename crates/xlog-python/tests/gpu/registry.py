"""The parts by name, and their checks."""

import contextlib

PARTS = {}
MIB = 1 << 20


def part(function):
    PARTS[function.__name__.removeprefix("part_")] = function
    return function


def check(condition, text):
    if not condition:
        raise AssertionError(text)


@contextlib.contextmanager
def step(text):
    """Names the step of a part in which an error was raised."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{text}: {type(error).__name__}: {error}") from error


def equal(left, right, text):
    check(left == right, f"{text}: {left!r} is not {right!r}")
