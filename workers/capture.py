"""Capturing a CUDA graph on the current stream without waiting for the device. Used by graphs.py and encoder_graphs.py."""

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import torch


def captured(run: Callable[[], None], pool: Any) -> torch.cuda.CUDAGraph:
    """A graph of what `run` launches, in the memory of `pool`. Capturing runs nothing. Raises torch.OutOfMemoryError."""
    # torch.cuda.graph() would first synchronize, so wait for a step in flight, and collect garbage
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()  # the finalizer of collected garbage might call CUDA, which is forbidden during a capture
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        run()
    except BaseException:  # whatever it is, it is raised again: a capture that was begun must be ended
        with contextlib.suppress(RuntimeError):  # ending half a graph fails, too
            graph.capture_end()
        raise
    else:
        graph.capture_end()
    finally:
        if collects:
            gc.enable()
    return graph
