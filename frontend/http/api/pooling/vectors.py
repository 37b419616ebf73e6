"""How vectors travel: as lists of floats, as base64 of their bytes, or as the bytes themselves."""

import base64
import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np

from quire.frontend.http.api.bodies.json_pieces import JsonPieces, in_list, write_pieces
from quire.frontend.http.api.errors import invalid
from quire.frontend.http.api.sse import json_bytes
from quire.frontend.http.protocol.exchange import Response

FORMATS = ("float", "base64", "bytes", "bytes_only")
DTYPES = ("float32", "float16", "bfloat16")
ENDIANNESS = ("native", "big", "little")
AT_ONCE = 3 << 12  # numbers that are encoded at once: a millisecond or two
NUMBERS_OF_WEIGHT = 8  # a token's weight in JSON takes as long to make as so many numbers
OCTETS = b"application/octet-stream"


def numbers(data: np.ndarray) -> Any:
    """An array's numbers, rows as lists, to put into an answer: JSON already, typed as what a client reads there; of more than
    AT_ONCE numbers in pieces."""
    if data.size <= AT_ONCE:
        return msgspec.Raw(json_bytes(data.tolist()))
    return JsonPieces(lambda: in_list(part.tolist() for part in _slices(data)))


def _slices(data: np.ndarray, numbers_of_row: int = 0) -> Iterator[np.ndarray]:
    """Some rows, or numbers of a vector, at a time: up to AT_ONCE numbers. numbers_of_row: of a row as it is written."""
    step = max(AT_ONCE // max(numbers_of_row or data.size // max(len(data), 1), 1), 1)
    return (data[at : at + step] for at in range(0, len(data), step))


def sparse_json(data: np.ndarray) -> Any:
    """A sparse vector, float32 [n, 2], as text-embeddings-inference writes it: by token ids."""
    ordered = data[np.argsort(data[:, 0], kind="stable")]
    if len(data) <= AT_ONCE // NUMBERS_OF_WEIGHT:
        return _weights(ordered)
    return JsonPieces(lambda: in_list(map(_weights, _slices(ordered, NUMBERS_OF_WEIGHT))))


def _weights(data: np.ndarray) -> list[dict[str, float]]:
    both = zip(data[:, 0].astype(int).tolist(), data[:, 1].tolist(), strict=True)
    return [{"index": token, "value": weight} for token, weight in both]


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
        if self.encoding == "base64" and data.size <= AT_ONCE:
            return base64.b64encode(self.octets(data)).decode()
        if self.encoding == "base64":
            return JsonPieces(lambda: self._base64(data.reshape(-1)))
        return sparse_json(data) if task == "embed_sparse" else numbers(data)

    def _base64(self, data: np.ndarray) -> Iterator[bytes]:
        """The JSON text of a long vector's bytes: all slices but the last have a multiple of 3 bytes."""
        yield b'"'
        for at in range(0, len(data), AT_ONCE):
            yield base64.b64encode(self.octets(data[at : at + AT_ONCE]))
        yield b'"'

    async def send_binary(self, response: Response, data: Sequence[np.ndarray], about: dict[str, Any]) -> None:
        """All results' bytes; about: what the header `metadata` says besides where each is, unless they are bytes_only."""
        size = 4 if self.dtype == "float32" else 2
        headers: tuple[tuple[bytes, bytes], ...] = ()
        if self.encoding == "bytes":
            at, places = 0, []
            for i, each in enumerate(data):
                places.append(
                    {
                        "index": i,
                        "embed_dtype": self.dtype,
                        "endianness": self.endianness,
                        "start": at,
                        "end": at + size * each.size,
                        "shape": list(each.shape),
                    }
                )
                at += size * each.size
            headers = ((b"metadata", json.dumps({**about, "data": places}).encode()),)
        response.start_sized(size * sum(each.size for each in data), OCTETS, headers)
        await write_pieces(response, (self.octets(part) for each in data for part in _slices(each)))
        response.end()
