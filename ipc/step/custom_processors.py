"""Records of the section `custom_processors`: sequences with new slots that the operator's own logits processors see.

A record is its length in words, the slot, the numbers of prompt and output ids, the bytes of the SamplingParams, and then these
three. Written by the scheduler (enginecore/scheduling/), read by each worker (workers/logits_processors/batch.py).
"""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
import numpy as np

from quire.ipc.sampling import SamplingParams

_HEAD = 5  # words: length, slot, prompt ids, output ids, bytes of params
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SamplingParams).decode


class CustomProcessorsRecord(NamedTuple):
    slot: int
    prompt_ids: np.ndarray  # int32
    output_ids: np.ndarray  # int32
    params: SamplingParams


def encode_record(record: CustomProcessorsRecord) -> np.ndarray:
    """The record's words, int32."""
    params = _encode(record.params)
    words = np.frombuffer(params + bytes(-len(params) % 4), np.int32)
    length = _HEAD + len(record.prompt_ids) + len(record.output_ids) + len(words)
    head = np.array([length, record.slot, len(record.prompt_ids), len(record.output_ids), len(params)], np.int32)
    return np.concatenate([head, record.prompt_ids, record.output_ids, words])


def decode_records(words: np.ndarray) -> Iterator[CustomProcessorsRecord]:
    """All records of a plan's section; ids are views into `words`."""
    at = 0
    while at < len(words):
        length, slot, num_prompt, num_output, num_bytes = words[at : at + _HEAD].tolist()
        first = at + _HEAD
        middle, end = first + num_prompt, first + num_prompt + num_output
        params = _decode(words[end : at + length].tobytes()[:num_bytes])
        yield CustomProcessorsRecord(slot, words[first:middle], words[middle:end], params)
        at += length
