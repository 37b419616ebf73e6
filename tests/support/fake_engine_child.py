"""An engine process without an engine, for tests of its launcher: a FakeCore where it is told to listen.

`model` names a file; if it exists, its text is why the engine cannot start.
"""

import select
import signal
import sys
from pathlib import Path

from fake_core import FakeCore, echo

from quire.ipc.config import EngineConfig
from quire.ipc.process.children import beat, child_main_config, tell_parent


def main() -> None:
    config = child_main_config(EngineConfig)
    why_not = Path(config.model or "/nowhere")
    if why_not.exists():
        tell_parent({"error": why_not.read_text()})
        sys.exit(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    with FakeCore(echo, address=config.listen) as core:
        tell_parent({"ready": core.address})
        while signal.SIGTERM not in signal.sigpending():
            beat()
            select.select([], [], [], 0.02)


if __name__ == "__main__":
    main()
