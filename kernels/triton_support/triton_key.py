"""Triton reads all of itself, 400 MB, for the key of its cache: once in a process, tenths of a second that need no Python."""

import threading

_lock = threading.Lock()


def read_triton_in_background() -> threading.Thread:
    """Begin it in a thread, before Triton is wanted."""
    thread = threading.Thread(target=read_triton, name="triton-key", daemon=True)
    thread.start()
    return thread


def read_triton() -> None:
    """Do it, or wait for who does; nothing more the second time. Failures are left for the first kernel to find."""
    with _lock:
        try:
            from triton.runtime.cache import triton_key  # keeps its result

            triton_key()
        except (ImportError, OSError):
            return
