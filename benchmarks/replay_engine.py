"""An engine that replays tokens, in a process of its own, over the real ZeroMQ protocol: to measure frontends alone.

    python benchmarks/replay_engine.py --address ipc:///tmp/replay.sock --step-ms 5 [--vocabulary bundled|128k]

In each step, every running sequence gets one token of a text that is repeated endlessly; a step is one message per frontend, as
with a real engine. With logprobs each token has as many alternatives as were asked for. Prompts are ignored: a sequence starts
in the step after it arrived. It ends by max_tokens, abort or finish. `--step-ms 0` starts a step whenever a sequence runs.
Bias: no request waits for a slot, and there is no prefill, so time to first token is the frontend's own.
"""

import argparse
import functools
import json
import mmap
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from frontend_load import STAMPS, stamp_tokens
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from quire.ipc.links.core_to_frontends import CoreToFrontends
from quire.ipc.links.welcome import file_infos, new_epoch
from quire.ipc.messages.frontend import (
    PROTOCOL_VERSION,
    Abort,
    AddRequest,
    EngineLimits,
    Finish,
    Finished,
    FrontendMessage,
    Heartbeat,
    PromptLogprobs,
    Started,
    StepOutputs,
    TokenLogprobs,
    Welcome,
    sequence_key,
)

ROOT = Path(__file__).parents[1]
BUNDLED = ROOT / "enginecore" / "loading" / "bundled"
MAX_MODEL_LEN = 1 << 17
HEARTBEAT_S = 0.5
NAME = "replay"


def bundled_files() -> dict[str, bytes]:
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    return {name: (BUNDLED / name).read_bytes() for name in names if (BUNDLED / name).exists()}


@functools.cache
def large_files(size: int = 1 << 17) -> dict[str, bytes]:
    """Byte-level BPE of `size` tokens: trained on this repository's text, then filled up with random merges of its tokens. The
    chat template is the bundled model's."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [
        path.read_text() for folder in ("ipc", "docs", "benchmarks") for path in sorted((ROOT / folder).rglob("*.[pm][yd]"))
    ]
    backend.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=8192, initial_alphabet=sorted(alphabet), show_progress=False)
    )
    whole = json.loads(backend.to_str())
    vocab, merges = whole["model"]["vocab"], whole["model"]["merges"]
    rng, pieces = np.random.default_rng(0), [piece for piece in vocab if piece.strip("Ġ").isalpha()]
    while len(vocab) < size:
        for left, right in rng.integers(0, len(pieces), (4096, 2)).tolist():
            a, b = pieces[left], pieces[right].lstrip("Ġ")
            if b in vocab and a + b not in vocab and len(a + b) <= 16 and len(vocab) < size:
                vocab[a + b] = len(vocab)
                merges.append([a, b])
    config = json.loads((BUNDLED / "tokenizer_config.json").read_text())
    config = {name: value for name, value in config.items() if name == "chat_template"}
    return {"tokenizer.json": json.dumps(whole).encode(), "tokenizer_config.json": json.dumps(config).encode()}


FILES = {"bundled": bundled_files, "128k": large_files}


class Running:
    """The sequences of one frontend, as arrays: key, tokens sent, tokens left, logprobs wanted (-1: none)."""

    def __init__(self) -> None:
        self.rows = np.zeros((4, 0), np.int64)
        self.started: list[Started] = []

    def add(self, keys: list[int], count: int, logprobs: int | None) -> None:
        wanted = -1 if logprobs is None else logprobs
        new = np.array([[key, key * 7919 % 100_003, count, wanted] for key in keys], np.int64).T
        self.rows = np.concatenate((self.rows, new), axis=1)
        self.started += [Started(key, 0, 0.0) for key in keys]

    def drop(self, gone: np.ndarray) -> None:
        self.rows = self.rows[:, ~gone]


class ReplayEngine:
    """One engine. Its loop is `run`."""

    def __init__(
        self,
        address: str | None,
        step_s: float,
        files: dict[str, bytes],
        max_model_len: int = MAX_MODEL_LEN,
        *,
        phases: int = 1,
        stamps: str | None = None,
    ) -> None:
        backend = Tokenizer.from_str(files["tokenizer.json"].decode())
        text = (ROOT / "docs" / "architecture.md").read_text()
        self._said = np.array(backend.encode(text).ids, np.int32)
        self._phases, self._phase = phases, 0
        self._stamps = np.array(list(stamp_tokens(backend).values()), np.int32) if stamps else None
        self._sent_at = _times(stamps) if stamps else None
        self._step_number = 0
        self._vocab_size = backend.get_vocab_size()
        self._step_s = step_s / phases
        self._max_model_len = max_model_len
        self._epoch = new_epoch()
        limits = EngineLimits(max_model_len, self._vocab_size, 4096, 20)
        welcome = Welcome(
            self._epoch, PROTOCOL_VERSION, [NAME], limits, file_infos(files), [], "0", int(time.time()), 60.0, False
        )
        self._link = CoreToFrontends(address, epoch=self._epoch, welcome=welcome, files=files, outbox_bytes=1 << 30)
        self.address = self._link.address
        self._running: dict[bytes, Running] = {}
        self._tops: dict[int, bytes] = {}
        self.stopped = False
        self.tokens = 0

    def run(self) -> None:
        poller = zmq.Poller()
        for source in self._link.sockets():
            poller.register(source, zmq.POLLIN)
        due, heartbeat = time.monotonic(), 0.0
        while not self.stopped:
            now = time.monotonic()
            busy = any(running.rows.shape[1] for running in self._running.values())
            poller.poll(max(0.0, due - now) * 1e3 if busy else 50)
            for identity, message in self._link.receive():
                self._take(identity, message)
            now = time.monotonic()
            if now >= due:
                due = max(due + self._step_s, now) if busy else now + self._step_s
                self._next_stamp()
                for identity, running in self._running.items():
                    self._step(identity, running)
            self._link.flush()
            if now >= heartbeat:
                heartbeat = now + HEARTBEAT_S
                self._link.broadcast(Heartbeat(self._epoch, 0.0, 0, 0, 0.0, 0, 0, self.tokens, 0, 0, True))
            for identity in self._link.lost():
                self._running.pop(identity, None)
        self._link.close(linger_s=0.0)

    def _take(self, identity: bytes, message: FrontendMessage) -> None:
        running = self._running.setdefault(identity, Running())
        match message:
            case AddRequest():
                params = message.task.params
                num_prompt = len(message.inputs.token_ids) // 4
                count = params.max_tokens or self._max_model_len - num_prompt
                if params.prompt_logprobs is not None:
                    self._link.send(identity, self._prompt_logprobs(message.id, num_prompt, params.prompt_logprobs))
                running.add([sequence_key(message.id, child) for child in range(params.n)], count, params.logprobs)
            case Abort():
                running.drop(np.isin(running.rows[0] >> 8, np.array(message.ids, np.int64)))
            case Finish():
                running.drop(running.rows[0] == message.key)

    def _next_stamp(self) -> None:
        self._step_number += 1
        self._phase = self._step_number % self._phases
        if self._sent_at is not None:
            self._sent_at[self._step_number % STAMPS] = time.monotonic()

    def _step(self, identity: bytes, running: Running) -> None:
        mine = (running.rows[0] >> 8) % self._phases == self._phase
        keys, said, _, wanted = running.rows[:, mine]
        if not len(keys):
            return
        if self._stamps is not None:
            tokens = np.full(len(keys), self._stamps[self._step_number % STAMPS])
        else:
            tokens = self._said[said % len(self._said)]
        running.rows[1, mine] += 1
        running.rows[2, mine] -= 1
        done = running.rows[2, mine] <= 0
        finished = [Finished(key, "length") for key in keys[done].tolist()]
        started, running.started = running.started, []
        rows: list[TokenLogprobs] = []
        if (wanted >= 0).any():
            rows = [self._logprobs(token, n) for token, n in zip(tokens.tolist(), wanted.tolist(), strict=True) if n >= 0]
        payload = (keys.astype("<i8").tobytes(), tokens.astype("<i4").tobytes())
        self._link.send(identity, StepOutputs(self._epoch, 0, *payload, finished, started, rows))
        self.tokens += len(keys)
        if finished:
            running.drop(running.rows[2] <= 0)

    def _logprobs(self, token: int, num_top: int) -> TokenLogprobs:
        ids = self._tops.get(token)
        if ids is None:
            ids = self._tops[token] = ((token + 97 * np.arange(20)) % self._vocab_size).astype("<i4").tobytes()
        return TokenLogprobs(-0.731, 1, ids[: 4 * num_top], _VALUES[: 4 * num_top])

    def _prompt_logprobs(self, request_id: int, count: int, num_top: int) -> PromptLogprobs:
        ids = np.random.default_rng(0).integers(0, self._vocab_size, (count - 1, num_top), dtype="<i4")
        values = np.full((count - 1, num_top), -2.345, "<f4")
        ones = np.ones(count - 1, "<i4")
        own = np.full(count - 1, -1.234, "<f4")
        return PromptLogprobs(
            self._epoch, request_id, 1, num_top, own.tobytes(), ones.tobytes(), ids.tobytes(), values.tobytes()
        )


def _times(path: str) -> "memoryview[float]":
    """When each stamp was last sent, in a file that clients map, too."""
    with open(path, "wb+") as file:
        file.truncate(8 * STAMPS)
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("d")


_VALUES = (-0.731 - 0.37 * np.arange(20)).astype("<f4").tobytes()


def main(argv: Any = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--vocabulary", choices=sorted(FILES), default="bundled")
    parser.add_argument("--max-model-len", type=int, default=MAX_MODEL_LEN)
    parser.add_argument("--phases", type=int, default=1, help="steps of a part of all sequences each, evenly in time")
    parser.add_argument("--stamps", help="a file in which to note when steps were sent (frontend_load.py)")
    args = parser.parse_args(argv)
    files = FILES[args.vocabulary]()
    engine = ReplayEngine(args.address, args.step_ms / 1e3, files, args.max_model_len, phases=args.phases, stamps=args.stamps)

    def stop(*_: object) -> None:
        engine.stopped = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    print("ready", flush=True)
    engine.run()


if __name__ == "__main__":
    sys.exit(main())
