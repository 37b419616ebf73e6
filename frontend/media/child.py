"""`python -P -m quire.frontend.media.child`: decodes and preprocesses one image after the other, for children.py.

It loads transformers and the checkpoint's processor, tries both, and then gives away what it needs no more: memory without
bound, connections, files for writing, programs (sandbox.py). It is asked by framing.py's messages; an answer holds the tensors,
or an error for the client. The frontend itself imports no transformers. torch, which transformers would load if it were
installed, is hidden: processors of the "pil" backend do without it, and the child is ready in one second instead of four.
"""

import socket
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from PIL import Image

from quire.frontend.media.child_messages import Answer, ChildConfig, Question, Ready
from quire.frontend.media.images import ImageError, decode, from_array
from quire.frontend.media.processing import Processor
from quire.frontend.media.sandbox import SandboxError, enter
from quire.ipc.messages.media import MediaTensor
from quire.ipc.process.children import child_main_config, own_fds
from quire.ipc.process.framing import limit_this_process, receive, send

_encode = msgspec.msgpack.Encoder().encode
_decode_question = msgspec.msgpack.Decoder(Question).decode
_TYPES: dict[Any, Literal["uint8", "float32", "int64"]] = {
    np.dtype(np.uint8): "uint8",
    np.dtype(np.float32): "float32",
    np.dtype(np.int64): "int64",
}


def main() -> None:
    sys.modules["torch"] = None  # type: ignore[assignment]
    config = child_main_config(ChildConfig)
    sock = socket.socket(fileno=own_fds([config.socket_fd])[0])
    try:
        processor = _processor(config)
        processor(Image.new("RGB", (640, 480)))  # loads what is loaded late
        decode(_warm_png())
    except Exception as error:  # whatever transformers says of the checkpoint's files, the operator reads it
        send(sock, _encode(Ready(error=f"{type(error).__name__}: {error}"[:2000])))
        return
    limit_this_process(config.max_bytes)
    cage_error = ""
    try:
        enter()
    except SandboxError as error:
        cage_error = str(error)
    send(sock, _encode(Ready(cage_error=cage_error)))
    while data := receive(sock):
        question = _decode_question(data)
        del data
        send(sock, _answer(processor, question))


def _processor(config: ChildConfig) -> Processor:
    with tempfile.TemporaryDirectory(prefix="quire-processor-") as folder:
        for name, data in config.files.items():
            (Path(folder) / name).write_bytes(data)
        return Processor(Path(folder), config.processor_options)


def _warm_png() -> bytes:
    import io

    for form in ("JPEG", "WEBP", "GIF", "BMP", "PNG"):  # PIL imports a format's module at its first use
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, form)
        decode(file.getvalue())
    return file.getvalue()


def _answer(processor: Processor, question: Question) -> bytes:
    try:
        return _encode(_processed(processor, question))
    except ImageError as error:
        return _encode(Answer(error=str(error)))
    except MemoryError:
        return _encode(Answer(error="the image needs more memory than is allowed"))


def _processed(processor: Processor, question: Question) -> Answer:
    low = question.low_detail
    image = decode(question.data, low) if question.shape is None else from_array(question.data, question.shape, low)
    made = processor.with_options(question.options)(image)
    arrays: list[tuple[str, np.ndarray]] = [(name, np.ascontiguousarray(value)) for name, value in made.tensors.items()]
    return Answer(
        size=[image.width, image.height],
        tensors=[MediaTensor(name, _TYPES[array.dtype], list(array.shape)) for name, array in arrays],
        data=[_bytes(array) for _, array in arrays],
        pieces=made.pieces,
        positions=made.positions,
        advance=made.advance,
        rescale=made.rescale,
    )


def _bytes(array: np.ndarray) -> Any:
    return array.reshape(-1).view(np.uint8).data


if __name__ == "__main__":
    main()
