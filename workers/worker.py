"""One worker: loads the model, reports how many KV blocks it can hold, then runs the plans from the ring until it is stopped.

    config -> weights -> largest step, measured -> WorkerProfile -> AllocateKV -> graphs -> WorkerReady -> plans

Started by the core through __main__.py. Every failure is reported to the core and ends the process: the core decides what next.
"""

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from quire.ipc.links.core_and_workers import WorkerToCore
from quire.ipc.messages.group import PeerSilent, ReportExpertLoad
from quire.ipc.messages.media import MediaInfo
from quire.ipc.messages.workers import (
    MAX_CONTROL_PAYLOAD,
    AllocateKV,
    CaptureMaskedSamplingGraphs,
    CheckParams,
    ControlReply,
    ControlRequest,
    DumpStacks,
    ForgetAdapter,
    ItemFailed,
    ItemsEncoded,
    KVGroup,
    LoadAdapter,
    StartProfiler,
    StopProfiler,
    WorkerFailed,
    WorkerProfile,
    WorkerReady,
)
from quire.ipc.process.children import own_fds
from quire.ipc.process.cpus import cpu_share
from quire.ipc.process.stacks import stacks
from quire.ipc.step.control import decode_control
from quire.ipc.step.plan_ring import KIND_CONTROL, KIND_ITEM, KIND_PLAN, KIND_SHUTDOWN, PlanReader
from quire.ipc.step.result_ring import ResultRing
from quire.ipc.step.sections import HEADER
from quire.ipc.worker_config import WorkerConfig
from quire.workers.adapters.loads import AdapterLoads
from quire.workers.adapters.start import make_adapters, planned_bytes
from quire.workers.attention.kv_cache import KVCache
from quire.workers.devices.context import context_of
from quire.workers.devices.cpu import CpuDevice
from quire.workers.devices.device import Device, DeviceContext
from quire.workers.devices.threads import choose_num_threads
from quire.workers.fixed_order import fix_order
from quire.workers.group.group import Group
from quire.workers.group.join import join
from quire.workers.group.place import ExchangeFailed
from quire.workers.layers.kv_scales import warn_of_scales
from quire.workers.loading.prepare_cpu import quicken_attributes
from quire.workers.loading.weights import dummy_weights, load_weights
from quire.workers.logits_processors.batch import CustomProcessors
from quire.workers.logits_processors.engine import vllm_config
from quire.workers.logits_processors.load import load_classes
from quire.workers.memory import Budget, budget_before_loading, gpu_budget, graphs_bytes, largest_plan, state_needs
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfig, ModelConfigError
from quire.workers.models.language_model import LanguageModel
from quire.workers.models.media.info import media_info
from quire.workers.numerics import choose_dtype, numerics_of
from quire.workers.outputs.pooling_outputs import pooling_outputs
from quire.workers.outputs.side_results import SideResultSender
from quire.workers.parallel import Parallel
from quire.workers.pooling.choice import PoolingChoice
from quire.workers.pooling.start import read_served
from quire.workers.profiler import Profiler, ProfilerError
from quire.workers.records import MASK_SPIN_S, Records
from quire.workers.recurrent.state_cache import state_cache_of
from quire.workers.runner import ModelRunner, no_masks
from quire.workers.speculation.loaded import DraftModel, build_draft_model
from quire.workers.start_failures import in_words

log = logging.getLogger("quire.workers")

READ_TIMEOUT_S = 1.0
IDLE_S = 0.2  # without a plan, before graphs are captured ahead: a client that asks again at once never waits for one
CAPTURE_PAUSE_S = 0.01  # between one capture and the next, while no plan comes
GPU_SPIN_S = 2e-2  # spin for the next plan, given enough cores: a step may take 10 ms, waking from sleep took 0.04 to 0.5
SHORT_SPIN_S = 2e-4
GPU_SWITCH_S = 1e-4  # the longest that a spinning main thread keeps the interpreter from the thread that wakes the core
STEP, WORLD_SIZE, NUM_MASK_ROWS = (HEADER.at[name] for name in ("step", "world_size", "num_mask_rows"))


class Worker:
    group: Group | None = None  # of several ranks, once they have met
    cpu_budget: Budget | None = None  # on a CPU, before weights are loaded
    pooling: PoolingChoice  # from its start on
    draft_model: DraftModel | None = None
    adapter_loads: AdapterLoads | None = None
    media: MediaInfo | None = None  # what the model takes beside text, once it is built

    def __init__(self, config: WorkerConfig):
        self.config, self.engine = config, config.engine
        self.link = WorkerToCore(config.control_address, config.rank, config.generation)
        self.reader = PlanReader.attach(own_fds(config.plan_ring_fds))
        self.ring = ResultRing.attach(own_fds(config.result_ring_fds)) if config.result_ring_fds else None
        self.device = torch.device("cuda", config.gpu_index) if self.engine.device == "cuda" else torch.device("cpu")
        self.parallel = Parallel(device=self.device)  # until ranks have met
        self.custom_processors: CustomProcessors | None = None
        self.profiler = Profiler(self.engine.profile_dir, config.rank, self.engine.device)

    def run(self) -> None:
        """Start up, serve, end. Raises errors that are bugs; others are reported to the core."""
        try:
            self._run()
        except ExchangeFailed as error:
            self.link.send(PeerSilent(self.config.rank, str(error)))
            while True:  # wait to be ended: if we exited first, the core would take us for the cause
                self.link.receive(timeout_s=60.0)

    def _run(self) -> None:
        try:
            runner = self._start()
            with runner.device.stream():
                self._warm_up(runner)
        except ExchangeFailed:
            raise
        except Exception as error:  # a bug is raised with its traceback
            if (why := in_words(error)) is None:
                raise
            return self._fail(why)
        with runner.device.stream():
            if self.ring is not None:
                self._clear_results(runner)
                self.ring.generation = self.config.generation
            self.link.send(WorkerReady(self.config.rank))
            self._serve(runner)
        runner.device.close()
        if self.group is not None:
            self.group.close()

    def _fail(self, message: str) -> None:
        self.link.send(WorkerFailed(self.config.rank, message))
        self.link.close()

    # ----------------------------------------------------------------------------------------------------- start-up
    def _start(self) -> ModelRunner:
        c, engine = self.config, self.engine
        classes = load_classes(engine.logits_processors, engine.logits_processors_path)
        model_config, self.pooling = read_served(
            c.model_dir,
            engine.hf_overrides,
            engine,
            model_impl=engine.model_impl,
            quantization=engine.quantization,
            kv_cache_dtype=engine.kv_cache_dtype,
            kv_cache_dtype_skip_layers=engine.kv_cache_dtype_skip_layers,
            sees=not engine.language_model_only,
        )
        if model_config.longest is not None and engine.max_model_len > model_config.longest:
            raise ModelConfigError(
                f"the model numbers {model_config.longest} tokens of a sequence: --max-model-len {model_config.longest} works"
            )
        dtype = choose_dtype(engine.dtype, model_config, engine.device)
        if engine.device == "cuda":
            torch.cuda.set_device(self.device)
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        if engine.deterministic:
            fix_order(model_config, self.device)
        with logged_if_long("met the other ranks"):
            self.group, self.parallel = join(c, self.link, self.device, model_config, dtype)
        with logged_if_long("weights loaded"):
            model = self._load(model_config, dtype)
        if model_config.quantization is not None:
            log.info("weights are quantized: %s", model_config.quantization.method)
        if engine.load_format != "dummy":
            warn_of_scales(model.kv_scales())
        specs, stage = model_config.attention_specs(self.parallel), self.parallel.stage
        layers = None if stage.count == 1 else stage.layers
        cache = KVCache(specs, engine.block_size, dtype, model.kv_scales(), layers)
        cache.drafter = None if self.draft_model is None else self.draft_model.cache
        weights_bytes = model.weights_bytes
        if classes:
            self.custom_processors = CustomProcessors(classes, vllm_config(c, model_config, dtype, self.device), self.device)
        processors = self.custom_processors if stage.is_last else None
        states = state_cache_of(model_config, self.parallel, dtype, engine.mamba_ssm_cache_dtype)
        self.adapter_loads = make_adapters(c, model, dtype, self.device, self._reply)
        ctx = context_of(engine, model_config, cache, states, dtype, self.parallel, self.draft_model, model.adapters)
        vectors = pooling_outputs(self.pooling, model, engine.max_num_seqs)
        runner = ModelRunner(model, ctx, self._make_device, processors, vectors)
        if self.group is not None:  # graph sizes, and so what ranks exchange, follow from it; all ranks are there now
            runner.weights_bytes = self.group.max_over_ranks("weights_bytes", weights_bytes)
            if stage.count > 1:
                runner.join(self.group.links(runner.ctx.max_tokens, runner.ctx.max_rows))
        budget = self._measure(runner, weights_bytes)
        self._report(runner, budget, weights_bytes)
        command = self._await_allocation()
        cache.allocate(command.num_blocks, self.device)
        states.allocate(command.num_states, self.device)
        return runner

    def _await_allocation(self) -> AllocateKV:
        while (command := self.link.receive(timeout_s=60.0)) is None:
            pass  # other ranks are still loading; if the core is gone, so are we
        if not isinstance(command, AllocateKV):
            raise RuntimeError(f"the core sent {type(command).__name__} where its decision about the KV cache was due")
        return command

    def _load(self, model_config: ModelConfig, dtype: torch.dtype) -> LanguageModel:
        model = build_model(model_config, dtype, self.parallel)
        self.media = media_info(self.engine, model, Path(self.config.model_dir))
        self.draft_model = draft = build_draft_model(self.engine, dtype, self.parallel, model)
        if self.engine.device == "cpu":
            # before weights are packed: how depends on the number of threads
            torch.set_num_threads(choose_num_threads(model.weights_bytes, self.engine.world_size))
            slots = planned_bytes(self.config, model, dtype)
            self.cpu_budget = budget_before_loading(self.engine, model_config, model, dtype, self.parallel, draft, slots)
        if self.engine.load_format == "dummy":
            dummy_weights(model, self.engine.seed)
        else:
            load_weights(model, Path(self.config.model_dir), self.device, progress=self.config.rank == 0)
        if draft is not None:
            draft.load(self.engine, self.device, progress=self.config.rank == 0)
        model.allocate_items(lambda number, fault: self.link.send(ItemFailed(self.config.rank, number, fault)))
        if self.engine.device == "cpu":
            quicken_attributes(model)
        return model

    def _make_device(self, ctx: DeviceContext) -> Device:
        if self.engine.device == "cpu":
            return CpuDevice(ctx, self.ring)
        from quire.workers.devices.cuda import CudaDevice

        device = CudaDevice(ctx, self.ring)
        if ctx.sampled_rows:
            device.masks.read_from(self.reader)
        return device

    def _measure(self, runner: ModelRunner, weights_bytes: int) -> Budget:
        """Compile all kernels, and run the largest step in a cache of two blocks, to measure its memory: 0.2 s for an 8B."""
        engine, cache, states = self.engine, runner.ctx.cache, runner.ctx.states
        if engine.device == "cpu":
            assert self.cpu_budget is not None
            return self.cpu_budget
        cache.allocate(2, self.device)
        states.allocate(2, self.device)
        words = largest_plan(engine, self.pooling.info, has_adapters=self.config.adapters is not None).encode()
        with runner.device.stream():
            begin = time.monotonic()
            runner.compile_kernels(words, graphs=not engine.enforce_eager)
            log.info("kernels compiled, or found in Triton's cache, in %.1f s", time.monotonic() - begin)
            self._meet("compiled")
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            runner.step(words, no_masks)
            if runner.pipeline is not None:
                runner.pipeline.rest()  # compiles the pipeline's kernels, too
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        with runner.device.stream():
            largest = runner.model.run_largest_item(graphs=not engine.enforce_eager)
            runner.model.keep_item_graphs(partial(self._meet, "encoder graphs"))
        if self.custom_processors is not None:  # they may copy a whole batch, as float32, and once more
            peak += engine.max_num_seqs * runner.ctx.config.vocab_size * (runner.ctx.dtype.itemsize + 12)
        cache.release()
        states.release()
        logits = max(engine.max_num_seqs, engine.max_samples) * runner.ctx.config.vocab_size * runner.ctx.dtype.itemsize
        needs = state_needs(engine, runner.ctx.config, states.state_bytes)
        graphs = graphs_bytes(engine, weights_bytes, peak, logits)
        return gpu_budget(engine, cache, weights_bytes, max(peak, largest), graphs, needs)

    def _meet(self, where: str, value: int = 0) -> int:
        """The least of all ranks' values. Waits for all of them, since a wait inside an exchange has a short time limit."""
        return value if self.group is None else -self.group.max_over_ranks(where, -value)

    def _report(self, runner: ModelRunner, budget: Budget, weights_bytes: int) -> None:
        engine, cache = self.engine, runner.ctx.cache
        name = torch.cuda.get_device_name(self.device) if engine.device == "cuda" else "CPU"
        self.link.send(
            WorkerProfile(
                rank=self.config.rank,
                num_blocks=budget.num_blocks,
                block_size=engine.block_size,
                kv_groups=[KVGroup(*group) for group in zip(cache.kinds, (g.layers for g in cache.groups), strict=True)],
                vocab_size=runner.ctx.config.vocab_size,
                device=f"{name}, {str(runner.ctx.dtype).removeprefix('torch.')}",
                weights_bytes=weights_bytes,
                activation_bytes=budget.activation_bytes,
                block_bytes=cache.block_bytes,
                num_states=budget.num_states,
                state_bytes=runner.ctx.states.state_bytes,
                processors=self.custom_processors.info if self.custom_processors is not None else None,
                numerics=numerics_of(engine, runner.ctx.config, runner.ctx.dtype),
                pooling=self.pooling.info,
                media=self.media,
            )
        )

    def _warm_up(self, runner: ModelRunner) -> None:
        if self.engine.device == "cuda" and not self.engine.enforce_eager:
            self._meet("allocated")
            seconds = runner.capture_graphs()
            log.info("graphs captured in %.1f s", seconds)

    def _clear_results(self, runner: ModelRunner) -> None:
        """Clear the results that measuring and warming up have written."""
        if self.engine.device == "cuda":
            torch.cuda.synchronize()
        runner.device.results.fill_(-1)
        if (load := self.parallel.expert_load) is not None:
            load.take()

    # ------------------------------------------------------------------------------------------------------ serving
    def _serve(self, runner: ModelRunner) -> None:
        spin_s = 0.0
        if self.engine.device == "cuda":
            has_cores = cpu_share() > (1 + self.engine.world_size) * self.engine.data_parallel_size
            spin_s = GPU_SPIN_S if has_cores else SHORT_SPIN_S
            sys.setswitchinterval(GPU_SWITCH_S)
        records = Records(self.reader, max(spin_s, MASK_SPIN_S))
        side = SideResultSender(self.link, self.config.rank, self.ring is not None)
        more_to_capture, timeout_s, record = True, IDLE_S, None
        while True:
            spins = spin_s if record is not None else 0.0
            if not side or (record := records.read(0.0, 0.0)) is None:
                side.send()
                record = records.read(timeout_s, spins)
            if record is None:
                if runner.pipeline is not None and runner.pipeline.rest():
                    runner.device.signal()
                self._check_exchange(runner)
                runner.capture_masked_sampling_graph()
                more_to_capture = more_to_capture and runner.capture_ahead()
                timeout_s = CAPTURE_PAUSE_S if more_to_capture else READ_TIMEOUT_S
                continue
            timeout_s = IDLE_S if more_to_capture else READ_TIMEOUT_S
            kind, words = record
            if kind == KIND_SHUTDOWN:
                return
            if kind == KIND_ITEM:
                runner.model.take_item(words)
                continue
            if kind == KIND_CONTROL:
                self._answer(decode_control(words), runner)
                continue
            if kind != KIND_PLAN:
                raise RuntimeError(f"a record of kind {kind} came where a plan was due")
            if words[WORLD_SIZE] != self.engine.world_size:
                return self._refuse_plan(int(words[WORLD_SIZE]))
            step = int(words[STEP])
            if words[NUM_MASK_ROWS]:
                side.send()
            results = runner.step(words, records.masks)
            if runner.model.items is not None and runner.model.items.guarded.settle():
                self.link.send(ItemsEncoded(self.config.rank, step))
            side.send()  # of the step before
            side.add(step, results)
            runner.device.signal()
            if self.profiler.is_active:
                self.profiler.step_done()
            runner.capture_masked_sampling_graph()

    def _check_exchange(self, runner: ModelRunner) -> None:
        """Raise ExchangeFailed if a step waits too long on the GPU: a wait for other ranks happens inside of its kernels."""
        if self.group is None:
            return
        limit_s = self.engine.collective_timeout_s
        if runner.device.waited_s() > limit_s:
            raise ExchangeFailed(f"a step has not come to its end on the GPU for {limit_s:g} s")

    def _refuse_plan(self, world_size: int) -> None:
        """The sender takes this worker for a rank of another group, with other shards. The core will replace this worker."""
        ours = f"worker {self.config.rank} is one of {self.engine.world_size}"
        self._fail(f"{ours} and was sent a plan for a world size of {world_size}")

    def _answer(self, request: ControlRequest, runner: ModelRunner) -> None:
        """Do what the core asks for between two steps. An error is sent as the answer and does not end the worker."""
        error, payload = "", b""
        try:
            match request:
                case DumpStacks():
                    payload = stacks().encode(errors="replace")
                case CaptureMaskedSamplingGraphs():
                    runner.expect_masks()
                case StartProfiler():
                    self.profiler.start()
                case CheckParams() if self.custom_processors is not None:
                    payload = self.custom_processors.check(request.params).encode(errors="replace")
                case ReportExpertLoad() if (load := self.parallel.expert_load) is not None:
                    payload = load.take()
                case StopProfiler():
                    payload = self.profiler.stop().encode()
                case LoadAdapter() | ForgetAdapter() if self.adapter_loads is not None:
                    return self.adapter_loads.take(request)  # which answers later
                case LoadAdapter() | ForgetAdapter():
                    error = "this engine serves no adapters"
        except ProfilerError as failure:
            error = str(failure)
        except Exception as failure:
            log.exception("a control request failed")
            error = f"{type(failure).__name__}: {failure}"
        self._reply(request.id, error, payload[:MAX_CONTROL_PAYLOAD])

    def _reply(self, request_id: int, error: str, payload: bytes = b"") -> None:
        self.link.send(ControlReply(self.config.rank, request_id, error, payload))


@contextlib.contextmanager
def logged_if_long(what: str) -> Iterator[None]:
    """Log how long a part of the start took, if it was a second or more."""
    begin = time.monotonic()
    yield
    if (seconds := time.monotonic() - begin) >= 1.0:
        log.info("%s in %.1f s", what, seconds)
