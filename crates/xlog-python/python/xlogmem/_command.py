"""The command line `xlogmem`, which the wheel installs as an executable."""

import os
import shutil
import sys
import sysconfig


def executable():
    """The path of the command `xlogmem` of this installation."""
    package = os.path.dirname(os.path.abspath(__file__))
    folders = [
        sysconfig.get_path("scripts"),
        os.path.dirname(sys.executable),
        # Installed by `pip install --target`, `--user` or `--prefix`.
        os.path.join(os.path.dirname(package), "bin"),
        os.path.normpath(os.path.join(package, "..", "..", "..", "..", "bin")),
    ]
    for folder in folders:
        path = os.path.join(folder, "xlogmem")
        if os.access(path, os.X_OK):
            return path
    found = shutil.which("xlogmem")
    if found is None:
        raise FileNotFoundError(f"the command xlogmem is in none of {', '.join(folders)} and not in PATH; install the wheel")
    return found
