"""Scheduler and runner in one process, without links: a model's outputs under given scheduling, step by step."""

from collections import deque
from dataclasses import replace
from itertools import count
from types import MappingProxyType, SimpleNamespace

import msgspec
import numpy as np
import torch
from recurrent_states import poison

from quire.enginecore.intake import Intake, IntakeConfig
from quire.enginecore.publish import side_messages
from quire.enginecore.scheduling.config import SchedulerConfig
from quire.enginecore.scheduling.scheduler import Scheduler
from quire.enginecore.tenants.backlog import Room
from quire.frontend.client.late import queries_of
from quire.ipc.messages.frontend import AddRequest, EngineLimits, Generate, Pool, Pooled, RequestError, TokenInputs
from quire.ipc.pooling import PoolingParams
from quire.ipc.sampling import SamplingParams
from quire.ipc.step.samples import Samples
from quire.ipc.step.sections import (
    LOGPROBS,
    STEP_MASK,
    StepLimits,
    first_logprob_word,
    max_device_words,
    max_samples_of,
)
from quire.kernels.step.tables import LogitsProcessorPool
from quire.workers.adapters.peft import read_adapter
from quire.workers.adapters.slots import AdapterSlots
from quire.workers.attention.kv_cache import KVCache
from quire.workers.devices.cpu import CpuDevice
from quire.workers.devices.device import DeviceContext
from quire.workers.loading.prepare_cpu import quicken_attributes
from quire.workers.loading.weights import dummy_weights, load_weights
from quire.workers.logits_processors.batch import CustomProcessors
from quire.workers.models.build import build_model
from quire.workers.models.family_table import read_model_config
from quire.workers.outputs.pooling_outputs import pooling_outputs
from quire.workers.parallel import Parallel
from quire.workers.pooling.start import read_served
from quire.workers.recurrent.state_cache import state_cache_of
from quire.workers.runner import ModelRunner
from quire.workers.speculation.loaded import build_draft_model


class InlineEngine:
    def __init__(
        self,
        model_dir,
        *,
        device="cpu",
        dtype=torch.float32,
        max_num_seqs=16,
        budget=512,
        block_size=16,
        num_blocks=256,
        max_model_len=None,
        graphs=False,
        depth=2,
        eos=(),
        dummy=False,
        processors=(),
        model_options=MappingProxyType({}),
        parallel=None,
        num_states=None,
        state_dtype="auto",
        speculation=None,
        pooling=None,
        adapters=None,
        **scheduling,
    ):
        self.depth, self.device, self.speculation = depth, torch.device(device), speculation
        parallel = parallel or Parallel(device=self.device)
        config, self.choice = self._read(model_dir, model_options, pooling)
        max_model_len, self._unused = max_model_len or min(config.max_position_embeddings, 512), set()
        self.model = self.load(config, dtype, parallel, None if dummy else model_dir)
        if self.choice and self.choice.info and self.choice.info.is_whole:
            scheduling["has_whole_prompts"] = True
        layers = parallel.stage.layers if parallel.stage.count > 1 else None
        cache = KVCache(config.attention_specs(parallel), block_size, dtype, self.model.kv_scales(), layers)
        self._load_draft(cache, (max_num_seqs, budget, max_model_len), dtype, parallel)
        cache.allocate(num_blocks, self.device)
        self._make_adapters(adapters, dtype, max(budget, max_samples_of(max_num_seqs)))
        states, num_states = self._new_states(config, parallel, dtype, state_dtype, num_states or 2 * max_num_seqs + 1)
        self.processors = CustomProcessors(processors, None, self.device) if processors else None
        self.runner = self._make_runner(config, cache, states, dtype, max_num_seqs, budget, max_model_len, parallel)
        self._capture(graphs)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                max_model_len=max_model_len,
                block_size=block_size,
                num_blocks=num_blocks,
                kv_groups=cache.kinds,
                num_states=num_states,
                num_micro_batches=parallel.stage.count,
                eos_token_ids=tuple(eos),
                vocab_size=config.vocab_size,
                speculation=speculation,
                **scheduling,
            )
        )
        self.intake = self._new_intake(EngineLimits(max_model_len, config.vocab_size, max_num_seqs, 20), eos)
        self.masks, self.pooled = {}, {}  # step -> what a worker's ring would bring; key -> results
        self.count, self.prompt_rows, self.logprobs = 0, [], {}  # the last: key -> those of its output, if it wants them

    def _make_adapters(self, limits, dtype, max_tokens):
        self.adapters = limits and AdapterSlots(self.model, limits, dtype, max_tokens, self.device)
        self.adapted, self.adapter_numbers = [], count(1)  # sequences with an adapter; numbers of loads

    def _new_states(self, config, parallel, dtype, state_dtype, num_states):
        states = state_cache_of(config, parallel, dtype, state_dtype)
        num_states = num_states if config.state_tensors(parallel) else 0
        states.allocate(num_states, self.device)
        return states, num_states

    def _load_draft(self, cache, limits, dtype, parallel):
        names = "max_num_seqs", "max_num_batched_tokens", "max_model_len"
        sizes = dict(zip(names, limits, strict=True)) | {"block_size": cache.block_size, "load_format": "auto", "seed": 0}
        asked = SimpleNamespace(speculative_config=self.speculation, **sizes)
        self.draft = build_draft_model(asked, dtype, parallel, self.model)
        if self.draft is not None:
            self.draft.load(asked, self.device, progress=False)
            cache.drafter = self.draft.cache

    def _new_intake(self, limits, eos):
        limits = msgspec.structs.replace(limits, pooling=self.choice and self.choice.info)
        caching, info = self.scheduler.config.enable_prefix_caching, self.processors and self.processors.info
        return Intake(IntakeConfig(limits, tuple(eos), caching, False, 0, 10_000, info), self.scheduler.kv.hasher)

    def _capture(self, graphs):
        if graphs:
            with self.runner.device.stream():
                self.runner.capture_graphs()

    def _read(self, model_dir, options, pooling):
        """The model's config, and how it pools. pooling: flags about that; None: it only generates."""
        if pooling is None:
            return self.read_config(model_dir, options), None
        flags = SimpleNamespace(**{"runner": "auto", "convert": "auto", "pooler_config": {}, **pooling})
        return read_served(model_dir, options.get("overrides", {}), flags)

    def read_config(self, model_dir, options):
        return read_model_config(model_dir, **options)

    def load(self, config, dtype, parallel, model_dir):
        """The model, with random weights if model_dir is None."""
        model = build_model(config, dtype, parallel).eval()
        if model_dir is None:
            dummy_weights(model, 0)
        else:
            load_weights(model, model_dir, self.device, progress=False)
        if self.device.type == "cpu":
            quicken_attributes(model)
        return model

    def _make_runner(self, config, cache, states, dtype, max_num_seqs, budget, max_model_len, parallel):
        max_blocks = -(-max_model_len // cache.block_size)
        max_samples = max_samples_of(max_num_seqs) if self.speculation else 0
        ctx = DeviceContext(
            config=config,
            cache=cache,
            pool=LogitsProcessorPool.allocate(
                max_num_seqs if parallel.stage.is_last else 0, config.vocab_size, max_model_len, self.device
            ),
            max_model_len=max_model_len,
            device=self.device,
            dtype=dtype,
            max_tokens=max(budget, max_num_seqs),
            max_rows=max_num_seqs,
            max_blocks=max_blocks,
            max_device_words=max_device_words(
                StepLimits(
                    max_num_seqs, budget, cache.block_size, len(cache.groups), max_blocks, max_samples, config.media is not None
                )
            ),
            parallel=parallel,
            states=states,
            max_samples=max_samples,
            speculation=self.speculation,
            draft_model=self.draft,
            adapters=self.adapters and self.adapters.steps,
        )
        vectors = pooling_outputs(self.choice, self.model, max_num_seqs) if self.choice else []
        return ModelRunner(self.model, ctx, self._make_device, self.processors, vectors)

    def _make_device(self, ctx):
        if ctx.device.type == "cpu":
            return CpuDevice(ctx, None)
        from quire.workers.devices.cuda import CudaDevice

        return CudaDevice(ctx, None)

    def load_adapter(self, folder, slot: int) -> None:
        """Put the adapter of a PEFT folder into a slot."""
        self.adapters.load(next(self.adapter_numbers), slot, read_adapter(folder, self.adapters.limits))

    def add(self, prompt, params: SamplingParams, adapter: int = -1, begin: int = 0) -> int:
        """adapter: its slot; begin: the first position that it applies to."""
        self.count += 1
        data = np.asarray(prompt, np.int32).tobytes()
        accepted = self.intake.accept(0, AddRequest(0, self.count, TokenInputs(data), Generate(params)), Room())
        if isinstance(accepted, RequestError):
            raise ValueError(accepted.message)
        for seq in accepted:
            seq.adapter_slot, seq.adapter_from = adapter, begin
            self.adapted += [seq] * (adapter >= 0)
            self.scheduler.add(seq)
        return self.count

    def add_pool(self, prompts, params: PoolingParams | None = None, seconds=(), adapter: int = -1) -> int:
        """A request for vectors or scores; the results, by key, are in `pooled`. adapter: its slot."""
        self.count += 1
        data, lengths = np.concatenate([np.asarray(p, np.int32) for p in prompts]).tobytes(), [len(p) for p in prompts]
        queries, query_of = queries_of(prompts)
        task = Pool(params or PoolingParams(), lengths, seconds=list(seconds), queries=queries, query_of=query_of)
        accepted = self.intake.accept(0, AddRequest(0, self.count, TokenInputs(data), task), Room())
        if isinstance(accepted, RequestError):
            raise ValueError(accepted.message)
        for seq in accepted:
            seq.adapter_slot = adapter
            self.adapted += [seq] * (adapter >= 0)
            self.scheduler.add(seq)
        return self.count

    def pool(self, prompts, params: PoolingParams | None = None, seconds=()) -> list[np.ndarray]:
        """Results of one request, in order. seconds: where second texts begin."""
        name = self.add_pool(prompts, params, seconds)
        self.run()
        return [np.concatenate(self.pooled.pop(name << 8 | i)) for i in range(len(prompts))]

    def _take_pooled(self, step, results) -> None:
        """As the core and a frontend do: parts of a result that begin at 0 replace what came before."""
        messages = side_messages([r.message() for r in results], step.side_rows, 0)
        for message in (m for _, m in messages if isinstance(m, Pooled)):
            at, data = 0, np.frombuffer(message.data, np.float32)
            shapes = np.frombuffer(message.shapes, np.int32).reshape(-1, 4).tolist()
            for key, (rows, columns, start, _) in zip(np.frombuffer(message.keys, np.int64).tolist(), shapes, strict=True):
                part = data[at : at + abs(rows) * columns]  # VECTOR is -1
                at += len(part)
                if start == 0 or rows < 0:
                    self.pooled[key] = []
                self.pooled[key].append(part.reshape(rows, columns) if rows >= 0 else part)

    def run(self, until=None) -> dict[int, list[int]]:
        """Until all have ended, or until(plan): key -> output tokens. Children of one request have keys of their own."""
        in_flight: deque = deque()
        outputs: dict[int, list[int]] = {}
        stopped = False
        with self.runner.device.stream(), torch.inference_mode():
            while True:
                while not stopped and len(in_flight) < self.depth and (made := self.scheduler.schedule()) is not None:
                    plan, step = made
                    if any(seq.slot in step.slots for seq in self.adapted):
                        plan = replace(plan, has_adapters=True)
                    words = plan.encode()
                    results = self.runner.step(words, lambda plan: self.masks[plan.step])
                    self.prompt_rows += results
                    self._take_pooled(step, results)
                    if self.device.type == "cpu":
                        words.fill(-1)  # as a ring's next plan does: nothing of a plan may be kept but copies
                    in_flight.append(step)
                    stopped = until is not None and until(plan)
                if not in_flight:
                    assert stopped or self.scheduler.is_idle
                    return outputs
                step = in_flight.popleft()
                out = self.scheduler.update(step, self._results(step), now=0.0)
                self.scheduler.check()
                self._poison()
                for key, token in zip(out.keys.tolist(), out.tokens.tolist(), strict=True):
                    outputs.setdefault(key, []).append(token)
                self._take_logprobs(step, out)

    def _poison(self) -> None:
        """Recurrent states that were given back are NaN. All steps have run; in stages and on a GPU they may not have."""
        released, self._unused = set(self.scheduler.kv.states.unused) - self._unused, set(self.scheduler.kv.states.unused)
        runners = getattr(self.runner, "runners", [self.runner])
        if self.device.type == "cpu" and runners[0].ctx.parallel.stage.count == 1:
            for runner in runners:
                poison(runner.ctx, released)

    def _results(self, step) -> Samples:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return self.samples_of(step, self.result_words(step).cpu())

    def result_words(self, step) -> torch.Tensor:
        """Where the device writes a step's results."""
        results = self.runner.device.results
        return results[(step.step & STEP_MASK) % len(results)]

    def samples_of(self, step, words: torch.Tensor) -> Samples:
        """words: those of `result_words`, on the CPU."""
        number, rows, entry = step.step & STEP_MASK, len(step.slots), words.numpy()
        at = self.runner.ctx.max_samples
        parts = [entry[: rows + step.draft_tokens], entry[at : at + rows if step.draft_tokens else at]]
        assert all((words >> 32 == number).all() for words in parts), "a result word of another step"
        tokens, first = ((words & 0xFFFFFFFF).astype(np.uint32).view(np.int32) for words in parts)
        return Samples.of_windows(tokens, first) if step.draft_tokens else Samples.one_a_row(tokens)

    def _take_logprobs(self, step, out) -> None:
        ctx, results = self.runner.ctx, self.runner.device.results
        record = results[(step.step & STEP_MASK) % len(results), first_logprob_word(ctx.max_rows, ctx.max_samples) :]
        for key, place in zip(out.keys[out.wants_logprobs].tolist(), out.places[out.wants_logprobs].tolist(), strict=True):
            word = int(record[place * LOGPROBS.width + LOGPROBS.at["logprob"]])
            assert word >> 32 == step.step & STEP_MASK, "a result word of another step"
            value = np.uint32(word & 0xFFFFFFFF).view(np.float32)
            self.logprobs.setdefault(key, []).append(float(value))

    def generate(self, prompts, params, adapters=None) -> list[list[int]]:
        """Outputs of one-child requests, in order; params may be one for all or a list. adapters: slots, -1 for the base."""
        params = params if isinstance(params, list) else [params] * len(prompts)
        adapters = adapters or [-1] * len(prompts)
        names = [self.add(p, q, a) for p, q, a in zip(prompts, params, adapters, strict=True)]
        outputs = self.run()
        return [outputs.get(name << 8, []) for name in names]
