"""A process that reads adapters' folders for the core, one after the other: `python -m quire.workers.adapters.reading`.

It has no torch and little memory, and is killed when a folder takes it too long (enginecore/adapters/folders.py).
"""

import os
import socket

import msgspec

from quire.ipc.adapters import AdapterError, FolderAnswer, FolderQuestion, ReadingConfig
from quire.ipc.process.children import child_main_config, own_fds
from quire.ipc.process.framing import limit_this_process, receive, send
from quire.workers.adapters.peft import read_adapter

MAX_BYTES = 1 << 30
NICE = 10  # patterns without end must not take half of a core from steps on a busy machine

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(FolderQuestion).decode


def main() -> None:
    config = child_main_config(ReadingConfig)
    sock = socket.socket(fileno=own_fds([config.socket_fd])[0])
    limit_this_process(MAX_BYTES)
    os.nice(NICE)
    send(sock, _encode(FolderAnswer("")))
    while question := receive(sock):
        send(sock, _encode(answer(_decode(question))))


def answer(question: FolderQuestion) -> FolderAnswer:
    try:
        return FolderAnswer("", read_adapter(question.folder, question.limits))
    except AdapterError as error:
        return FolderAnswer(str(error) or "it cannot be read")
    except (OSError, MemoryError, RecursionError) as error:
        return FolderAnswer(f"it cannot be read: {getattr(error, 'strerror', None) or type(error).__name__}")


if __name__ == "__main__":
    main()
