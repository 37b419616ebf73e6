"""A frontend process, a child of `quire serve --frontends N`: it reads its configuration and reports readiness or an error."""

import asyncio
import signal
import sys

from quire.frontend.client.client import Client
from quire.frontend.http.listener import FrontendError
from quire.frontend.http.server import FrontendConfig, StopSignals, run, serve
from quire.ipc.process.children import child_main_config, heartbeat, tell_parent
from quire.ipc.process.logs import set_up_logging

HEARTBEAT_S = 0.5


def main() -> None:
    config = child_main_config(FrontendConfig, death_signal=signal.SIGTERM)
    set_up_logging(config.log_level, config.log_format)

    def ready(client: Client) -> None:
        tell_parent({"ready": client.welcome.served_model_names[0]})

    async def serve_until_told() -> None:
        heartbeats = asyncio.create_task(_heartbeat())
        await serve(config, StopSignals(), ready)
        heartbeats.cancel()

    try:
        run(serve_until_told)
    except FrontendError as error:
        tell_parent({"error": str(error)})
        sys.exit(1)


async def _heartbeat() -> None:
    while True:
        heartbeat()
        await asyncio.sleep(HEARTBEAT_S)


if __name__ == "__main__":
    main()
