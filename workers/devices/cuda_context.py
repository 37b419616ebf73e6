"""Makes the GPU's context while Python loads torch: neither needs the other, and both take long.

A thread calls the driver itself through ctypes, which releases the interpreter lock. torch finds the context and uses it.
"""

import ctypes
import threading


def make_context_in_background(index: int) -> threading.Thread:
    """Begin to make a device's primary context. Failures are ignored: torch meets them again and reports them."""
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
