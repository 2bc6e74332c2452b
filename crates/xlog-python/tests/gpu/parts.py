"""The parts of the GPU tests: `parts.py NAME` runs one in this process. Status 77: the framework is missing."""

import sys

import other_parts  # noqa: F401
import torch_parts  # noqa: F401
from registry import PARTS


def main():
    if sys.argv[1] == "--list":
        print("\n".join(PARTS))
        return
    needs = {"cupy": "cupy", "numba": "numba.cuda", "cuda_core": "cuda.core", "rmm": "rmm"}
    name = sys.argv[1]
    module = needs.get(name, "torch" if name not in ("runtime", "jax", "exits") else None)
    if module is not None and name != "numba":
        try:
            __import__(module)
        except ImportError as error:
            print(error)
            sys.exit(77)
    PARTS[name]()


if __name__ == "__main__":
    main()
