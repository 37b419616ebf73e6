"""The Python stacks of this process's threads as text, for the log, to find out why nothing moves.

This needs the interpreter: if a thread never releases it, only faulthandler's signal shows the stacks (workers/__main__.py).
Called by the core's loop and by a worker between steps.
"""

import sys
import threading
import traceback

MAX_CHARACTERS = 1 << 18


def stacks() -> str:
    """Python stacks of all threads, the innermost call last; at most MAX_CHARACTERS."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    ]
    return "\n".join(parts)[:MAX_CHARACTERS]
