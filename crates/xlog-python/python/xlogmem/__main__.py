"""`python -m xlogmem` is the command `xlogmem`."""

import os
import sys

from ._command import executable

path = executable()
os.execv(path, [path, *sys.argv[1:]])
