"""The GPU made ready while Python loads torch: neither needs the other, and both take their time.

Asked of the driver itself, in a thread: what it does there does not hold the interpreter. torch finds the context and uses it.
"""

import ctypes
import threading


def make_context_in_background(index: int) -> threading.Thread:
    """Begin to make a device's primary context. Whatever fails is left for torch to find and to tell."""
    thread = threading.Thread(target=_make_context, args=(index,), name="cuda-context", daemon=True)
    thread.start()
    return thread


def _make_context(index: int) -> None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
