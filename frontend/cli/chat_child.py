"""The process of a chat's own server: `quire serve` on a private unix socket, with its output in a pipe to the chat.

chat_server.py starts it, and ipc/process/children.py ends it with the chat.
"""

import os
import signal
import sys

from quire.frontend.cli.chat_server import STOP_S, OwnServerConfig
from quire.frontend.cli.main import main as quire
from quire.ipc.links.paths import private_directory
from quire.ipc.process.children import child_main_config


def main() -> int:
    """The server's process."""
    config = child_main_config(OwnServerConfig, death_signal=signal.SIGTERM, grace_s=STOP_S)
    os.dup2(config.log_fd, 1)
    os.dup2(config.log_fd, 2)
    os.close(config.log_fd)
    os.environ.pop("VLLM_API_KEY", None)  # a key for servers of others; only this user reaches the socket
    folder = os.path.join(private_directory(), "chat")  # the directory itself is locked, and a server locks its socket's
    os.mkdir(folder, 0o700)
    model, *flags = config.words
    return quire(["serve", model, "--uds", os.path.join(folder, "server"), *flags])


if __name__ == "__main__":
    sys.exit(main())
