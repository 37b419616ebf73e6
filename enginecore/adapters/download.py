"""A process that downloads one adapter from the hub: `python -m quire.enginecore.adapters.download`. hub.py starts it.

It takes the two files of an adapter and nothing else, and ends after its answer: huggingface_hub never comes into the core.
"""

import socket

import msgspec

from quire.enginecore.loading.hub import ModelFilesError, RepositoryMissing, download
from quire.ipc.process.children import child_main_config, own_fds
from quire.ipc.process.framing import receive, send

FILES = ["adapter_config.json", "adapter_model.safetensors"]


class DownloadConfig(msgspec.Struct, frozen=True):
    socket_fd: int


class DownloadQuestion(msgspec.Struct, frozen=True):
    repository: str
    cache: str | None
    token: str | None


class DownloadAnswer(msgspec.Struct, frozen=True):
    """error: empty if `folder` is the snapshot."""

    error: str
    folder: str = ""
    is_missing: bool = False  # there is no such repository


def main() -> None:
    config = child_main_config(DownloadConfig)
    sock = socket.socket(fileno=own_fds([config.socket_fd])[0])
    send(sock, b"ready")
    if question := receive(sock):
        send(sock, msgspec.msgpack.encode(answer(msgspec.msgpack.decode(question, type=DownloadQuestion))))


def answer(question: DownloadQuestion) -> DownloadAnswer:
    name = question.repository
    try:
        folder = download(name, None, question.cache, FILES, question.token, kind="an adapter")
    except ModelFilesError as error:
        return DownloadAnswer(str(error), is_missing=isinstance(error, RepositoryMissing))
    lacking = [file for file in FILES if not (folder / file).is_file()]
    return DownloadAnswer(f"the repository {name} has no {lacking[0]}") if lacking else DownloadAnswer("", str(folder))


if __name__ == "__main__":
    main()
