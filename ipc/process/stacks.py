"""What every thread of this process does, as text: for the log of somebody who asks why nothing moves.

It needs the interpreter, so a thread that holds it for ever is seen by faulthandler's signal only (workers/__main__.py). Called
by the core's loop and by a worker between steps.
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
