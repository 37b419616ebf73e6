"""For its cache's key Triton reads all of itself, 400 MB: once in a process, tenths of a second that need no Python."""

import threading

_lock = threading.Lock()


def read_triton_in_background() -> threading.Thread:
    """Start read_triton in a thread, before Triton is needed."""
    thread = threading.Thread(target=read_triton, name="triton-key", daemon=True)
    thread.start()
    return thread


def read_triton() -> None:
    """Compute the key, or wait for the thread that does; the second call is free. Failures are left to the first kernel."""
    with _lock:
        try:
            from triton.runtime.cache import triton_key  # keeps its result

            triton_key()
        except (ImportError, OSError):
            return
