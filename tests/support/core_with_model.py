"""An EngineCore with a real ModelRunner on the CPU as its worker, both in the test's process and turned by hand.

It runs a request with a grammar from its message to its tokens. The model is the bundled one in float32. A step begins when it
has all its masks; if they depend on its drafts, they come while it runs, and the core's loop is turned for them.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from core_by_hand import EPOCH, decode, worker_template
from inline_engine import InlineEngine
from ipc_cores import RawFrontend

from quire.enginecore.core import CoreConfig, EngineCore
from quire.enginecore.grammar.compiler import GrammarCompiler
from quire.enginecore.loading.model_files import BUNDLED, frontend_files, model_summary
from quire.enginecore.scheduling.config import SchedulerConfig
from quire.enginecore.workers import WorkerGroup
from quire.ipc.links.core_and_workers import CoreToWorkers
from quire.ipc.links.core_to_frontends import CoreToFrontends
from quire.ipc.messages.frontend import (
    PROTOCOL_VERSION,
    AddRequest,
    EngineLimits,
    Finished,
    Generate,
    Hello,
    RequestError,
    StepOutputs,
    TokenInputs,
    Welcome,
)
from quire.ipc.sampling import SamplingParams
from quire.ipc.step.masks import RowsAndMasks, decode_masks, rows_and_places
from quire.ipc.step.plan import StepPlan, decode_plan
from quire.ipc.step.plan_ring import KIND_CONTROL, KIND_MASK, KIND_PLAN, PlanReader, PlanRing
from quire.ipc.step.result_ring import ResultRing
from quire.ipc.step.sections import MASKS_NONE


class ModelWorkers(WorkerGroup):
    """Real rings, and a real runner in this process, which runs a plan when it is told to and has all its masks."""

    def __init__(self, engine: InlineEngine) -> None:
        super().__init__(worker_template())
        self.engine = engine
        self.controls = 0
        self.mask_rows = 0  # of all plans
        self.any_token_rows = 0
        self.most_masks = 0  # of one plan
        self.window_masks = 0  # behind drafts, of all plans
        self.pump: Callable[[], None] = lambda: None  # lets the core send masks
        self._num_masks = 0  # of this plan

    def start(self) -> None:
        self.generation += 1
        self.plan_ring = PlanRing.create(1 << 20, 1)
        ctx, device = self.engine.runner.ctx, self.engine.runner.device
        self.result_ring = ring = ResultRing.create(ctx.max_rows, max_samples=ctx.max_samples)
        device.results = torch.from_numpy(np.frombuffer(ring.buffer, np.int64).reshape(ring.depth, ring.words_per_step))
        self._link = CoreToWorkers(self.generation)
        self._reader = PlanReader.attach([os.dup(fd) for fd in self.plan_ring.fds(0)])
        self._decode_rows = np.zeros(0, np.int32)
        self._plan: tuple[StepPlan, np.ndarray] | None = None
        self._due: set[int] = set()
        self._masks: list[RowsAndMasks] = []
        self.is_ready = True

    def answer(self) -> bool:
        """Take what there is: run a plan, or keep it until all its masks are here. Whether there was something."""
        if self._plan is None or (self._due and not self._needs_drafts):
            record = self._reader.read(0.0)
            if record is None:
                return False
            self._take(record[0], record[1].copy())
        if self._plan is not None and (not self._due or self._needs_drafts):
            self._run()
        return True

    @property
    def _needs_drafts(self) -> bool:
        return self._plan is not None and self._plan[0].mask_window > 1

    def _masks_of_drafts(self) -> Iterator[RowsAndMasks]:
        """Called when the drafts have been written."""
        given = 0
        while True:
            yield from self._masks[given:]
            given = len(self._masks)
            if not self._due:
                return
            self.pump()
            while self._due and (record := self._reader.read(0.0)) is not None:
                self._take(record[0], record[1].copy())

    def _take(self, kind: int, words: np.ndarray) -> None:
        if kind == KIND_CONTROL:
            self.controls += 1
        elif kind == KIND_MASK:
            come = decode_masks(words, self._reader.area)
            assert self._plan is not None and come.step == self._plan[0].step
            rows, places = come.rows, np.zeros_like(come.rows)
            if self._plan[0].window > 1 and come.masks is not None:
                rows, places = rows_and_places(rows)
            assert set(rows.tolist()) <= self._due
            self._due -= set(rows.tolist())
            self.any_token_rows += len(rows) * (come.kind != MASKS_NONE and come.masks is None)
            self.window_masks += int((places > 0).sum())
            self._num_masks += len(places)
            self.most_masks = max(self.most_masks, self._num_masks)
            if come.kind != MASKS_NONE:
                # the area is used again once the next record is read
                self._masks.append((come.rows, None if come.masks is None else come.masks.copy()))
        else:
            assert kind == KIND_PLAN and self._plan is None, "a plan came where masks were due"
            plan = decode_plan(words, self._decode_rows)
            self._decode_rows = plan.decode_rows.copy()
            self._plan, self._due, self._masks = (plan, words), set(plan.mask_rows.tolist()), []
            self._num_masks = 0
            self.mask_rows += len(plan.mask_rows)

    def _run(self) -> None:
        assert self._plan is not None
        plan, words = self._plan
        with torch.inference_mode():
            self.engine.runner.step(words, lambda _: self._masks_of_drafts())
        self._plan = None
        assert self.result_ring.ready(plan.step, plan.num_rows, plan.draft_tokens), "a result word of another step"
        self.result_ring.ring_doorbell()

    def check_stopped(self, meanwhile: str) -> None:
        """There are no processes."""

    def keep_spares(self) -> None:
        """There are no processes."""

    def kill(self) -> bool:
        self._reader.close()
        return super().kill()


class Output:
    """What came back for one sequence."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.finished: Finished | None = None


class CoreWithModel:
    """`max_num_seqs`, `num_blocks`, `budget`, ... as of InlineEngine; `eos`: other ids than the model's."""

    def __init__(
        self, model_dir: Path = BUNDLED, *, eos: tuple[int, ...] | None = None, num_mask_threads: int = 2, **sizes: Any
    ) -> None:
        summary = model_summary(model_dir)
        self.eos = tuple(summary.eos_token_ids) if eos is None else eos
        self.engine = InlineEngine(model_dir, eos=self.eos, **sizes)
        s: SchedulerConfig = self.engine.scheduler.config
        limits = EngineLimits(s.max_model_len, s.vocab_size, s.max_num_seqs, 20)
        config = CoreConfig(s, limits, 1000, 0, 60.0, spins=False, log_requests=False, log_stats=False)
        welcome = Welcome(EPOCH, PROTOCOL_VERSION, ["tiny"], limits, [], list(self.eos), "0", 1, 60.0)
        self.link = CoreToFrontends(None, epoch=EPOCH, welcome=welcome)
        self.workers = ModelWorkers(self.engine)
        self.workers.start()
        self.workers.pump = self._pump
        tokenizer_json = frontend_files(model_dir)["tokenizer.json"]
        self.grammars = GrammarCompiler(tokenizer_json, s.vocab_size, self.eos, num_mask_threads)
        self.core = EngineCore(config, self.link, self.workers, grammars=self.grammars)
        self.frontend = RawFrontend(self.link.address)
        self.frontend.send(Hello(PROTOCOL_VERSION))
        self.outputs: dict[int, Output] = {}  # by key
        self.errors: dict[int, RequestError] = {}  # by request id
        self.welcomed = False
        self._ids = iter(range(1, 1 << 30))
        self._messages: deque[Any] = deque()
        self.until(lambda: self.welcomed)

    def turn(self) -> None:
        """The loop's body; the wait is for what other threads make ready."""
        core = self.core
        core._take_messages()
        core._watch_workers()
        core._fill()
        answered = self.workers.answer()
        if not (core._collect() or answered) and (core.preparing or core._masks or core._grammar._deferred):
            core._poll(0.02)
        core._heartbeat()
        core.check()
        while self.frontend.ready():
            self._hear(decode(self.frontend.socket.recv()))

    def _pump(self) -> None:
        self.core._watch_workers()
        if self.core._masks:
            self.core._poll(0.005)

    def _hear(self, message: Any) -> None:
        match message:
            case Welcome():
                self.welcomed = True
            case StepOutputs():
                keys, tokens = np.frombuffer(message.keys, np.int64).tolist(), np.frombuffer(message.tokens, np.int32).tolist()
                for key, token in zip(keys, tokens, strict=True):
                    output = self.outputs.setdefault(key, Output())
                    assert output.finished is None, "a token came after the end"
                    output.ids.append(token)
                for end in message.finished:
                    output = self.outputs.setdefault(end.key, Output())
                    assert output.finished is None, "it has ended twice"
                    output.finished = end
            case RequestError():
                self.errors[message.id] = message

    def until(self, condition: Any, turns: int = 200_000) -> None:
        for _ in range(turns):
            if condition():
                return
            self.turn()
        raise AssertionError("it has not happened in time")

    # ------------------------------------------------------------------------------------------------------ requests
    def submit(self, prompt: str | list[int], params: SamplingParams, priority: int = 0) -> int:
        """The request's id."""
        request_id = self.next_id()
        ids = self.encode(prompt) if isinstance(prompt, str) else prompt
        data = np.asarray(ids, np.int32).tobytes()
        self.frontend.send(AddRequest(EPOCH, request_id, TokenInputs(data), Generate(params), priority))
        return request_id

    def next_id(self) -> int:
        return next(self._ids)

    def has_ended(self, request_id: int, n: int = 1) -> bool:
        keys = [request_id << 8 | child for child in range(n)]
        return request_id in self.errors or all(k in self.outputs and self.outputs[k].finished for k in keys)

    def run(self, prompt: str | list[int], params: SamplingParams) -> list[Output] | RequestError:
        """One request to its end: its sequences' outputs, or its error."""
        [result] = self.run_all([(prompt, params)])
        return result

    def run_all(self, requests: list[tuple[str | list[int], SamplingParams]]) -> list[list[Output] | RequestError]:
        ids = [self.submit(prompt, params) for prompt, params in requests]
        self.until(lambda: all(self.has_ended(i, p.n) for i, (_, p) in zip(ids, requests, strict=True)))
        return [
            self.errors.get(i) or [self.outputs[i << 8 | child] for child in range(p.n)]
            for i, (_, p) in zip(ids, requests, strict=True)
        ]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    @property
    def tokenizer(self) -> Any:
        if not hasattr(self, "_tokenizer"):
            from quire.frontend.text.tokenizer import Tokenizer

            self._tokenizer = Tokenizer.from_files(frontend_files(BUNDLED))
        return self._tokenizer

    def text(self, output: Output) -> str:
        """Without the token that ended it."""
        ids = output.ids[:-1] if output.finished is not None and output.finished.stop_token_id is not None else output.ids
        return self.tokenizer.decode(ids)

    def json(self, output: Output) -> Any:
        return json.loads(self.text(output))

    def close(self) -> None:
        self.frontend.close()
        self.core.close()
        self.grammars.close()
        self.workers.kill()
        self.link.close(linger_s=0)
