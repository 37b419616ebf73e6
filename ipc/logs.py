"""Logging of every process of ours: one line a record on stderr, with time, process and level; nothing of requests' texts."""

import logging
import os


def set_up_logging(level: int = logging.INFO) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s %(name)s[{os.getpid()}] %(message)s", "%H:%M:%S"))
    root = logging.getLogger("quire")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False
