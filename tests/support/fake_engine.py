"""An engine process without an engine, which fails in ways that the test chooses: `python -m fake_engine` instead of the core.

Its behavior depends on the model's name: "cannot-start" reports an error, "dies" ends without a message, "mute" never becomes
ready. With the name of a file, it reports the file's text as the error, or never becomes ready if the file is empty. Any other
model is served by a FakeCore that repeats each prompt. A prompt that begins with token 7 is never answered.
"""

import select
import signal
import sys
from pathlib import Path

from fake_core import FakeCore, echo

from quire.ipc.config import EngineConfig
from quire.ipc.messages.frontend import AddRequest
from quire.ipc.process.children import child_main_config, heartbeat, tell_parent


def script(request: AddRequest, child: int) -> list[int] | None:
    return None if request.inputs.token_ids.startswith(b"\7\0\0\0") else echo(request, child)


def main() -> None:
    config = child_main_config(EngineConfig, death_signal=signal.SIGTERM)
    stop = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    match config.model:
        case "cannot-start":
            tell_parent({"error": "the model is made of cheese: --max-model-len"})
            sys.exit(1)
        case "dies":
            sys.exit(3)
        case "mute":
            signal.sigwait(stop)
        case str(path) if Path(path).is_file():
            if why := Path(path).read_text():
                tell_parent({"error": why})
                sys.exit(1)
            signal.sigwait(stop)
        case _:
            told: list[int] = []
            for number in stop:
                signal.signal(number, lambda number, _: told.append(number))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, stop)
            with FakeCore(script, address=config.listen) as core:
                tell_parent({"ready": core.address})
                while not told:
                    heartbeat()
                    select.select([], [], [], 0.02)


if __name__ == "__main__":
    main()
