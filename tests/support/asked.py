"""A child that does what it is asked, for tests of AskedChild: `AskedChild("asked")` with tests/support in PYTHONPATH.

A question is a word and a file's name: "kill", "stop" and "crash" happen while the file has no letter for each time that the
question was asked before, so that the test says how often.
"""

import os
import signal
import socket
import time
from pathlib import Path

import msgspec

from quire.ipc.process.children import child_main_config, own_fds
from quire.ipc.process.framing import receive, send

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "end": signal.SIGTERM, "crash": signal.SIGSEGV}


class AskedConfig(msgspec.Struct, frozen=True):
    socket_fd: int


def main() -> None:
    config = child_main_config(AskedConfig)
    sock = socket.socket(fileno=own_fds([config.socket_fd])[0])
    send(sock, b"ready")
    while question := receive(sock):
        word, times, name = question.decode().split()
        left = int(times) - (len(Path(name).read_text()) if Path(name).exists() else 0)
        if word == "spin":
            while True:
                pass
        if word == "sleep":
            time.sleep(0.5)
        elif left > 0:
            with open(name, "a") as file:
                file.write("x")
            os.kill(os.getpid(), SIGNALS[word])
        send(sock, b"answer")


if __name__ == "__main__":
    main()
