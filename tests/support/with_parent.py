"""`python -P with_parent.py PARENT_PID MODULE ARGUMENTS`: runs `python -m MODULE ARGUMENTS`; it dies with its parent."""

import runpy
import signal
import sys

from quire.ipc.process.children import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), signal.SIGKILL)
    module = sys.argv[2]
    del sys.argv[:2]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
