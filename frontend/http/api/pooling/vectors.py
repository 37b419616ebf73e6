"""How vectors travel: as lists of floats, as base64 of their bytes, or as the bytes themselves."""

import base64
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.protocol.exchange import Response

FORMATS = ("float", "base64", "bytes", "bytes_only")
DTYPES = ("float32", "float16", "bfloat16")
ENDIANNESS = ("native", "big", "little")
OCTETS = b"application/octet-stream"


def numbers(data: np.ndarray) -> Any:
    """An array's numbers, rows as lists, to put into an answer: JSON already, typed as what a client reads there.

    Each row is encoded by itself: a thread that encodes millions of numbers at once keeps the interpreter's lock meanwhile, and
    the event loop waits for it.
    """
    if data.ndim == 1:
        return msgspec.Raw(json_bytes(data.tolist()))
    return msgspec.Raw(b"[%b]" % b",".join([json_bytes(row.tolist()) for row in data]))


def sparse_json(data: np.ndarray) -> list[dict[str, float]]:
    """A sparse vector, float32 [n, 2], as text-embeddings-inference writes it: by token ids."""
    found = sorted(zip(data[:, 0].astype(int).tolist(), data[:, 1].tolist(), strict=True))
    return [{"index": token, "value": weight} for token, weight in found]


class VectorFormat:
    """encoding_format, embed_dtype and endianness of a body, checked. Raises ApiError 400."""

    def __init__(self, encoding: str | None, dtype: str | None, endianness: str | None, is_for_batch: bool = False) -> None:
        self.encoding, self.dtype = encoding or "float", dtype or "float32"
        self.endianness = endianness or "native"
        for name, value, known in (
            ("encoding_format", self.encoding, FORMATS),
            ("embed_dtype", self.dtype, DTYPES),
            ("endianness", self.endianness, ENDIANNESS),
        ):
            if value not in known:
                raise invalid(f"{name} must be one of {', '.join(known)}, got {value[:40]}", name)

        if is_for_batch and self.is_binary:
            raise invalid("encoding_format: bytes are not possible in a batch, a file of JSON; base64 is", "encoding_format")

    @property
    def is_binary(self) -> bool:
        return self.encoding in ("bytes", "bytes_only")

    def octets(self, data: np.ndarray) -> bytes:
        """A result's bytes, row by row."""
        order = {"native": "=", "big": ">", "little": "<"}[self.endianness]
        if self.dtype == "bfloat16":
            words = np.ascontiguousarray(data, np.float32).view(np.uint32)
            rounded = (words + 0x7FFF + (words >> 16 & 1)) >> 16  # to nearest, ties to even
            return rounded.astype(f"{order}u2").tobytes()
        return data.astype(f"{order}f{2 if self.dtype == 'float16' else 4}").tobytes()

    def json(self, data: np.ndarray, task: str = "embed") -> Any:
        """A result of a task as a value in JSON: a list, or base64."""
        if self.encoding == "base64":
            return base64.b64encode(self.octets(data)).decode()
        return sparse_json(data) if task == "embed_sparse" else numbers(data)

    def send_binary(self, response: Response, data: Sequence[np.ndarray], about: dict[str, Any]) -> None:
        """All results' bytes; about: what the header `metadata` says besides where each is, unless they are bytes_only."""
        parts = [self.octets(each) for each in data]
        headers: tuple[tuple[bytes, bytes], ...] = ()
        if self.encoding == "bytes":
            at, places = 0, []
            for i, (part, each) in enumerate(zip(parts, data, strict=True)):
                places.append(
                    {
                        "index": i,
                        "embed_dtype": self.dtype,
                        "endianness": self.endianness,
                        "start": at,
                        "end": at + len(part),
                        "shape": list(each.shape),
                    }
                )
                at += len(part)
            headers = ((b"metadata", json.dumps({**about, "data": places}).encode()),)
        response.send(200, b"".join(parts), content_type=OCTETS, headers=headers)
