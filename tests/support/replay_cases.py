"""What tests of replay share: what a frontend is told, and requests of many kinds for a core with a model."""

import json

import numpy as np
from core_by_hand import CoreByHand
from core_with_model import CoreWithModel
from fake_worker import VOCAB_SIZE, solo_output
from ipc_cores import RawFrontend

from quire.ipc.messages.frontend import RequestError, StepOutputs
from quire.ipc.sampling import SamplingParams
from quire.ipc.structured_outputs import StructuredOutputs


class Outputs:
    """What a frontend is told: tokens by request, requests that have ended, and those that have failed."""

    def __init__(self, by_hand: CoreByHand, frontend: RawFrontend) -> None:
        self._by_hand, self._frontend = by_hand, frontend
        self.tokens: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.failed: dict[int, RequestError] = {}
        self.seeds: dict[int, int] = {}

    def take(self) -> None:
        message = self._by_hand.answer(self._frontend, StepOutputs | RequestError)
        if isinstance(message, RequestError):
            self.failed[message.id] = message
            return
        keys, tokens = np.frombuffer(message.keys, np.int64).tolist(), np.frombuffer(message.tokens, np.int32).tolist()
        for key, token in zip(keys, tokens, strict=True):
            assert key not in self.ended, "a token after the end"
            self.tokens.setdefault(key, []).append(token)
        self.ended |= {end.key for end in message.finished}
        self.seeds |= {start.key: start.seed for start in message.started}

    def until_ended(self, *requests: int) -> None:
        """Of one child each, unless a key is given."""
        keys = {request if request > 1 << 8 else request << 8 for request in requests}
        while not all(key in self.ended or key >> 8 in self.failed for key in keys):
            self.take()


def alone(num_tokens: int = 4, max_tokens: int = 16) -> list[int]:
    """The output of `add` if nothing happens."""
    return solo_output([i % VOCAB_SIZE for i in range(num_tokens)], num_tokens + max_tokens, set(), VOCAB_SIZE)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON = StructuredOutputs("json", json.dumps(SCHEMA))
REQUESTS = [
    SamplingParams(max_tokens=24, temperature=0.0),
    SamplingParams(max_tokens=24, temperature=1.0, seed=3, top_p=0.9),
    SamplingParams(max_tokens=24, temperature=0.7, seed=4, repetition_penalty=1.3, min_tokens=20),
    SamplingParams(max_tokens=48, temperature=0.0, structured_outputs=JSON),
    SamplingParams(max_tokens=48, temperature=1.0, seed=5, structured_outputs=JSON, n=2),
]


def unkilled(engine: CoreWithModel) -> list[list[list[int]]]:
    results = engine.run_all([("Once upon a time", params) for params in REQUESTS])
    return [[output.ids for output in result] for result in results]
