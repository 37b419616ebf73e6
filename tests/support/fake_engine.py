"""An engine process without an engine, for tests of LLM and of the launcher: `python -m fake_engine` in the place of the core.

What it does depends on the model's name: "cannot-start" says why, "dies" ends without a word, "mute" never becomes ready; any
other is served by a FakeCore that repeats each prompt. A prompt that begins with token 7 is never answered.
"""

import signal
import sys

from fake_core import FakeCore, echo

from quire.ipc.config import EngineConfig
from quire.ipc.messages import AddRequest
from quire.ipc.process.children import child_main_config, tell_parent


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
        case _:
            with FakeCore(script) as core:
                tell_parent({"ready": core.address})
                signal.sigwait(stop)


if __name__ == "__main__":
    main()
