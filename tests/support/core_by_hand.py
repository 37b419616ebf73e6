"""An EngineCore with fake_worker.py as its worker; tests turn its loop by hand, and frontends are RawFrontends."""

import os
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
from fake_worker import VOCAB_SIZE, FakeWorker
from ipc_cores import RawFrontend
from kv_kinds import FULL

from quire.enginecore.core import CoreConfig, EngineCore
from quire.enginecore.preparation import Preparer
from quire.enginecore.scheduling.config import SchedulerConfig
from quire.enginecore.worker_supervisor import WorkerSupervisor
from quire.enginecore.workers import WorkerGroup
from quire.ipc.adapters import HOST_ONLY, AdapterLimits
from quire.ipc.config import EngineConfig
from quire.ipc.links.core_and_workers import CoreToWorkers
from quire.ipc.links.core_to_frontends import CoreToFrontends
from quire.ipc.messages.frontend import (
    PROTOCOL_VERSION,
    AddRequest,
    CoreMessage,
    EngineLimits,
    Generate,
    Hello,
    TokenInputs,
    Welcome,
)
from quire.ipc.messages.workers import ControlReply, ControlRequest, ForgetAdapter, LoadAdapter
from quire.ipc.sampling import SamplingParams
from quire.ipc.step.control import decode_control
from quire.ipc.step.masks import decode_masks
from quire.ipc.step.plan import StepPlan, decode_plan
from quire.ipc.step.plan_ring import KIND_CONTROL, KIND_MASK, KIND_PLAN, PlanReader, PlanRing
from quire.ipc.step.result_ring import ResultRing
from quire.ipc.step.sections import MASKS_NONE, NO_TOKEN
from quire.ipc.worker_config import WorkerConfig, resolved

EPOCH = 77
MAX_MODEL_LEN, MAX_NUM_SEQS, BLOCK_SIZE, NUM_BLOCKS = 64, 4, 4, 60
decode = msgspec.msgpack.Decoder(CoreMessage).decode


class FakeWorkers(WorkerGroup):
    """Real rings, and a fake worker in this process that takes a plan when it is told to."""

    loads: list[tuple[int, int]]  # all of (number, slot)
    forgotten: list[int]
    adapter_errors: dict[int, str]  # by number: why it cannot be loaded
    kept: list[ControlRequest] | None = None  # control requests that it does not answer before `control`; None: it does at once
    from_outside = False  # whether their next death is the work of a signal

    def start(self) -> None:
        self.generation += 1
        self.plan_ring = PlanRing.create(1 << 16, 1)
        self.result_ring = ResultRing.create(MAX_NUM_SEQS)
        self._link = CoreToWorkers(self.generation)
        self._reader = PlanReader.attach([os.dup(fd) for fd in self.plan_ring.fds(0)])
        self._worker = FakeWorker(MAX_NUM_SEQS + 1, MAX_MODEL_LEN // BLOCK_SIZE + 1, BLOCK_SIZE, (0,), VOCAB_SIZE)
        self.loads, self.forgotten, self.adapter_errors = [], [], {}
        self._decode_rows = np.zeros(0, np.int32)
        self._waiting: tuple[StepPlan, set[int], set[int]] | None = None  # for masks: rows not named yet, rows that get none
        self.is_ready = True
        self.from_outside = False

    def answer(self) -> None:
        """Take the next record, if there is one: run a plan, or keep it until all its masks are here."""
        record = self._reader.read(0.0) if self.is_ready else None
        if record is None:
            return
        kind, words = record[0], record[1].copy()
        if kind == KIND_CONTROL:
            request = decode_control(words)
            return self.kept.append(request) if self.kept is not None else self.control(request)
        if kind == KIND_MASK:
            assert self._waiting is not None
            plan, due, without = self._waiting
            masks = decode_masks(words, self._reader.area)
            assert masks.step == plan.step and set(masks.rows.tolist()) <= due
            due -= set(masks.rows.tolist())
            if masks.kind == MASKS_NONE:
                without |= set(masks.rows.tolist())
        else:
            assert kind == KIND_PLAN and self._waiting is None, "a plan came where masks were due"
            plan = decode_plan(words, self._decode_rows)
            self._decode_rows = plan.decode_rows.copy()
            self._waiting = plan, set(plan.mask_rows.tolist()), set()
        plan, due, without = self._waiting
        if not due:
            tokens = self._worker.run(plan)
            tokens[sorted(without)] = NO_TOKEN
            self.result_ring.write(plan.step, tokens)
            self._waiting = None

    def control(self, request: ControlRequest) -> None:
        """Do at once what a worker does in a thread."""
        error = ""
        if isinstance(request, LoadAdapter):
            self.loads.append((request.number, request.slot))
            error = self.adapter_errors.get(request.number, "")
            if request.slot != HOST_ONLY and not error:
                self._worker.adapters[request.slot] = request.number
        elif isinstance(request, ForgetAdapter):
            self.forgotten.append(request.number)
        self._replied(ControlReply(0, request.id, error, b""))

    def check_stopped(self, meanwhile: str) -> None:
        return  # there is no process

    @property
    def worker(self) -> FakeWorker:
        return self._worker

    def keep_spares(self) -> None:
        """There are no processes."""

    def kill(self) -> bool:
        self._reader.close()
        super().kill()
        return self.from_outside


def worker_template(world_size: int = 1, model_dir: str = "") -> WorkerConfig:
    engine = EngineConfig(load_format="dummy", cpu_kv_cache_gib=1.0, tensor_parallel_size=world_size)
    numbers = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": 16}
    return WorkerConfig(
        engine=resolved(engine, device="cpu", block_size=BLOCK_SIZE, **numbers),
        rank=0,
        generation=1,
        model_dir=model_dir,
        control_address="",
        plan_ring_fds=[],
        result_ring_fds=[],
    )


class CoreByHand:
    """`workers`: a group of worker processes; without, a FakeWorkers."""

    def __init__(
        self,
        workers: WorkerGroup | None = None,
        preparers: Iterable[Preparer] = (),
        replay: bool = True,
        adapters: AdapterLimits | None = None,
        max_queue_s: float = 0.0,
        max_num_waiting: int = 100,
    ) -> None:
        num_slots = adapters.max_loras if adapters is not None else 0
        scheduler = SchedulerConfig(
            MAX_NUM_SEQS,
            16,
            MAX_MODEL_LEN,
            BLOCK_SIZE,
            NUM_BLOCKS,
            FULL,
            vocab_size=VOCAB_SIZE,
            num_adapter_slots=num_slots,
            max_queue_s=max_queue_s,
        )
        limits = EngineLimits(MAX_MODEL_LEN, VOCAB_SIZE, MAX_NUM_SEQS, 20, adapters=adapters)
        config = CoreConfig(
            scheduler,
            limits,
            max_num_waiting,
            0,
            60.0,
            spins=False,
            log_requests=False,
            log_stats=False,
            replay=replay,
            max_queue_s=max_queue_s,
        )
        welcome = Welcome(EPOCH, PROTOCOL_VERSION, ["tiny"], limits, [], [0], "0", 1, 60.0)
        self.link = CoreToFrontends(None, epoch=EPOCH, welcome=welcome)
        self.workers = workers or FakeWorkers(worker_template())
        self.workers.start()
        self.core = EngineCore(config, self.link, self.workers, preparers=preparers)
        self._frontends: list[RawFrontend] = []

    def turn(self) -> None:
        """The loop's body, without its wait, with a worker that has always just finished."""
        self.begin()
        if isinstance(self.workers, FakeWorkers):
            self.workers.answer()
        self.core._collect()
        self.core._heartbeat()
        self.link.check()
        self.core.check()

    def begin(self) -> None:
        """The beginning of a turn: steps go to the workers."""
        self.core._take_messages()
        self.core._watch_workers()
        self.core._fill()

    def until(self, condition: Any, turns: int = 100_000) -> None:
        for _ in range(turns):
            if condition():
                return
            self.turn()
        raise AssertionError("it has not happened in time")

    def frontend(self) -> RawFrontend:
        """A new one that has been welcomed."""
        frontend = RawFrontend(self.link.address)
        self._frontends.append(frontend)
        frontend.send(Hello(PROTOCOL_VERSION))
        assert isinstance(self.answer(frontend, Welcome), Welcome)
        return frontend

    def frontend_with_welcome(self) -> Welcome:
        """The message that a new frontend gets."""
        frontend = RawFrontend(self.link.address)
        self._frontends.append(frontend)
        frontend.send(Hello(PROTOCOL_VERSION))
        return self.answer(frontend, Welcome)  # type: ignore[no-any-return]

    def answer(self, frontend: RawFrontend, kind: Any) -> Any:
        """The frontend's next message of this kind; others are dropped."""
        while True:
            self.until(frontend.ready)
            message = decode(frontend.socket.recv())
            if isinstance(message, kind):
                return message

    def close(self) -> None:
        for frontend in self._frontends:
            frontend.close()
        self.core.close()
        self.workers.kill()
        self.workers.stop()  # and spares
        self.link.close(linger_s=0)


def kill(core: EngineCore) -> None:
    """The workers die, and others start at once."""
    core.supervisor = WorkerSupervisor(core.workers, 60.0)  # a new one has no reason to pause
    core._replace_workers("the test kills them")


def add(request_id: int, num_tokens: int = 4, **params: Any) -> AddRequest:
    prompt = (np.arange(num_tokens) % VOCAB_SIZE).astype(np.int32)
    return AddRequest(EPOCH, request_id, TokenInputs(prompt.tobytes()), Generate(SamplingParams(**params)))
