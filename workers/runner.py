"""ModelRunner: executes step plans on one device. Owns the tables by slot, the step's buffers and the captured graphs.

A step: apply the plan's changes and build the inputs -> forward to the logits -> (masks, if some follow) -> sample, update the
tables, write the results. On a GPU most steps replay two graphs, forward and sampling. Nothing here waits for the device.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import torch

from quire.ipc.messages.workers import PromptLogprobsOfRow
from quire.ipc.process.cpus import cpu_share
from quire.ipc.step.masks import RowsAndMasks
from quire.ipc.step.plan import StepPlan, decode_logits_processors, decode_plan
from quire.ipc.step.sections import HEADER, PREFILL_CANDIDATES, PREFILL_PROMPT_LOGPROBS, SAMPLING_CUSTOM, SAMPLING_MASK
from quire.kernels.sampling.logits_processors import apply_logits_processors
from quire.kernels.sampling.sampler_cpu import prompt_logprobs
from quire.kernels.step.tables import SlotTables, StepBuffers
from quire.workers.devices.device import Device, DeviceContext
from quire.workers.devices.masks import ReadMasks
from quire.workers.graphs import StepGraphs
from quire.workers.logits_processors.batch import CustomProcessors
from quire.workers.models.language_model import LanguageModel
from quire.workers.models.step_context import step_context
from quire.workers.pipeline import Links, Pipeline, advance

NO_ROWS = np.zeros(0, np.int32)
MICRO_BATCH = HEADER.at["micro_batch"]
PROMPT_LOGPROB_ROWS = 512  # rows of logits computed at once for prompt logprobs
CANDIDATE_ROWS = 64  # rows of logits copied at once for candidates


def no_masks(plan: StepPlan) -> Iterable[RowsAndMasks]:
    """For plans without masks."""
    raise RuntimeError(f"step {plan.step} waits for masks that nobody will send")


class PromptRow(NamedTuple):
    """Log-probabilities of one chunk's next tokens; tensors on the CPU, [positions] or [positions, num_top]."""

    row: int
    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def message(self) -> PromptLogprobsOfRow:
        arrays = self.logprobs.float(), self.ranks.int(), self.top_ids.int(), self.top_logprobs.float()
        return PromptLogprobsOfRow(self.row, *(a.contiguous().numpy().tobytes() for a in arrays))


class ModelRunner:
    def __init__(
        self,
        model: LanguageModel,
        ctx: DeviceContext,
        make_device: Callable[[DeviceContext], Device],
        custom_processors: CustomProcessors | None = None,
    ):
        self.model = model
        self.weights_bytes = model.weights_bytes  # once ranks have met, the most of any rank: graph sizes depend on it
        self.custom_processors = custom_processors
        self.ctx = ctx
        self.device = make_device(ctx)
        self.attention = self.device.new_attention(ctx)
        self.graphs: StepGraphs | None = None
        self.pipeline: Pipeline | None = None  # of a model in stages
        num_groups, stage, samples = len(ctx.cache.groups), ctx.parallel.stage, ctx.max_samples
        self.samples = stage.is_last
        self.tables = SlotTables.allocate(ctx.max_rows, num_groups, ctx.max_blocks, ctx.device, stage.count, samples > 0)
        self.buffers = StepBuffers.allocate(ctx.max_tokens, ctx.max_rows, num_groups, ctx.device, samples)
        if stage.count > 1:
            model.stage_buffer.hidden = torch.zeros(ctx.max_tokens, ctx.config.hidden_size, dtype=ctx.dtype, device=ctx.device)
        self._decode_rows = [NO_ROWS] * stage.count  # by micro-batch: those last received
        self._appliers: dict[str, Callable[[np.ndarray], None]] = self.device.states.appliers(self.tables, model)  # on the host
        if self.samples:
            self._appliers["logits_processors"] = self._apply_logits_processors
            self._appliers["custom_processors"] = self._take_in_custom_processors
        if ctx.device.type == "cuda":
            torch.cuda.synchronize()  # all of this was filled on another stream than the one that steps run on

    def join(self, links: Links) -> None:
        """Connect this stage with those before and after it."""
        stage = self.ctx.parallel.stage
        self.pipeline = Pipeline(stage, links, self.model.stage_buffer.hidden, self.tables, self.buffers)

    @torch.inference_mode()
    def step(self, words: np.ndarray, read_masks: ReadMasks) -> list[PromptRow]:
        """Run one plan, int32 words; returns the prompt logprobs and candidates that it yields besides its tokens."""
        plan = decode_plan(words, self._decode_rows[words[MICRO_BATCH]])
        if not plan.same_decode_rows:
            self._decode_rows[plan.micro_batch] = plan.decode_rows.copy()
        device_plan = self.device.load_plan(words)
        if self.custom_processors is not None:
            self.custom_processors.begin_step(plan)
        for name, apply in self._appliers.items():
            if name in plan.sections:
                apply(plan.sections[name])
        if self.pipeline is None:
            return self._compute(plan, device_plan, read_masks)
        self.pipeline.begin(plan)
        prompt_rows = self._compute(plan, device_plan, read_masks)
        self.pipeline.end(plan)
        return prompt_rows

    def _compute(self, plan: StepPlan, device_plan: torch.Tensor, read_masks: ReadMasks) -> list[PromptRow]:
        prompt_rows = [] if self.graphs and self.graphs.run(plan, read_masks) else self._run(plan, device_plan, read_masks)
        self.device.drafter.follow(plan, self.tables, self.buffers, self.graphs)
        return prompt_rows

    def _apply_logits_processors(self, words: np.ndarray) -> None:
        apply_logits_processors(self.tables, self.ctx.pool, decode_logits_processors(words))

    def _take_in_custom_processors(self, words: np.ndarray) -> None:
        assert self.custom_processors is not None
        self.custom_processors.take_in(words)

    @torch.inference_mode()
    def compile_kernels(self, words: np.ndarray, *, graphs: bool) -> None:
        """Compile, on all cores, the kernels that the plan `words` needs, and those of graphs if there will be `graphs`."""
        from quire.kernels.triton_support.compile_ahead import compile_only

        with compile_only(cpu_share()), self.model.short():
            if graphs:
                StepGraphs(self, self.device).run_kernels()  # type: ignore[arg-type]
            self._run(decode_plan(words, NO_ROWS), self.device.load_plan(words), no_masks)

    @torch.inference_mode()
    def capture_graphs(self) -> float:
        """Capture the graphs that serving begins with; returns the seconds it took."""
        self.graphs = StepGraphs(self, self.device)  # type: ignore[arg-type]
        return self.graphs.warm_up()

    @torch.inference_mode()
    def capture_ahead(self) -> bool:
        """While idle: capture one more step that may come; False if none is left."""
        return self.graphs is not None and self.graphs.capture_ahead()

    def expect_masks(self) -> None:
        """Steps with grammar masks will come."""
        if self.graphs is not None:
            self.graphs.expect_masks()

    @torch.inference_mode()
    def capture_masked_sampling_graph(self) -> None:
        """Between two steps: capture one more sampling graph with masks, if masks are expected and one is missing."""
        if self.graphs is not None:
            self.graphs.capture_masked_sampling_graph()

    def _run(self, plan: StepPlan, device_plan: torch.Tensor, read_masks: ReadMasks) -> list[PromptRow]:
        rows, every_token, sizes = plan.num_samples, plan.wants_prompt_logprobs, (plan.num_tokens, plan.num_samples)
        hidden = self.forward(device_plan, *sizes, len(plan.decode_rows), every_token=every_token, windows=plan.window > 1)
        if not self.samples:
            return []
        prompt_rows = self._prompt_logprobs(plan, hidden) if every_token else []
        if every_token:
            hidden = hidden.index_select(0, self.buffers.logits_indices[:rows])
        logits = self.model.compute_logits(hidden)
        if plan.wants_candidates:
            logits = self._all(logits)
            prompt_rows += self._candidates(plan, logits)
        if plan.sampling_kind & SAMPLING_CUSTOM:
            self.sample_processed(plan, device_plan, logits, read_masks)
        elif plan.has_mask_rows:
            self.sample(device_plan, logits, plan.sampling_kind | SAMPLING_MASK, plan.step, self.load_masks(plan, read_masks))
        else:
            self.sample(device_plan, logits, plan.sampling_kind & ~SAMPLING_MASK)
        return prompt_rows

    def forward(
        self,
        device_plan: torch.Tensor,
        num_tokens: int,
        num_rows: int,
        num_decode_rows: int | None,
        *,
        every_token: bool = False,
        windows: bool = False,
    ) -> torch.Tensor:
        """Build the inputs and compute the hidden states of a step of these padded sizes. num_decode_rows None: on the device.

        Returns [num_rows, H], of each sample, or [num_tokens, H] if every_token. Other stages than the last end here."""
        step = self.buffers
        num_tokens, num_rows, count, states = self.device.prepare(device_plan, self.tables, step, num_tokens, num_rows, windows)
        self.attention.begin(self.tables, step, num_tokens, num_rows, num_decode_rows, windows)
        if (load := self.ctx.parallel.expert_load) is not None:
            load.begin(step.query_start[num_rows : num_rows + 1], step.num_rows, num_tokens)
        context = step_context(self.attention.attend, step, num_tokens, num_rows, num_decode_rows, states)
        logits_indices = None if context.is_decode or every_token else step.logits_indices[:count]
        hidden = self.model(step.input_ids[:num_tokens], context, logits_indices)
        if not self.samples:
            advance(self.tables, step, num_rows)
        return hidden

    def sample(
        self, device_plan: torch.Tensor, logits: torch.Tensor, kind: int, step: int = 0, without: np.ndarray = NO_ROWS
    ) -> None:
        """Sample, update the tables, write the results of step `step`; rows `without` their masks get NO_TOKEN."""
        args = (device_plan, logits, self.tables, self.buffers, kind)
        if len(without):
            self.device.sample_without_masks(*args, step, without)
        else:
            self.device.sample(*args)

    def sample_processed(self, plan: StepPlan, device_plan: torch.Tensor, logits: torch.Tensor, read_masks: ReadMasks) -> None:
        """Sample after the operator's own processors have seen the logits of the first plan.num_rows rows; eager.

        They run before masks are read, since reading these gives back the plan's place in the ring."""
        assert self.custom_processors is not None
        logits = self._all(logits)
        processed, failed = self.custom_processors.process(plan, logits, self.buffers.input_ids)
        kind, step = plan.sampling_kind & ~SAMPLING_CUSTOM & ~SAMPLING_MASK, plan.step
        if plan.has_mask_rows:
            kind, failed = kind | SAMPLING_MASK, np.union1d(failed, self.load_masks(plan, read_masks))
        args = (device_plan, logits, self.tables, self.buffers, kind)
        if len(failed):
            self.device.sample_without_masks(*args, step, failed, processed)
        else:
            self.device.sample(*args, processed=processed)

    def _all(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of the whole vocabulary, gathered if ranks have a shard each."""
        return self.ctx.parallel.all_logits(logits, self.ctx.config.vocab_size)

    def load_masks(self, plan: StepPlan, read_masks: ReadMasks) -> np.ndarray:
        """Load the step's masks as they come; returns the rows that should have one and got none."""
        expected = plan.mask_rows.copy()  # reading the next record gives back the plan's place in the ring
        loaded = self.device.masks.load(expected, read_masks(plan), self.buffers.first_sample if plan.window > 1 else None)
        return NO_ROWS if len(loaded) == len(expected) else np.setdiff1d(expected, loaded)

    def _prompt_logprobs(self, plan: StepPlan, hidden: torch.Tensor) -> list[PromptRow]:
        rows, at, tokens_at = [], len(plan.decode_rows), 0
        prefill = plan.prefill_rows
        columns = (prefill[name].tolist() for name in ("length", "flags", "next_token", "num_prompt_logprobs"))
        for i, (length, flags, next_token, num_top) in enumerate(zip(*columns, strict=True)):
            if flags & PREFILL_PROMPT_LOGPROBS:
                targets = plan.prefill_tokens[tokens_at + 1 : tokens_at + length]
                if next_token >= 0:
                    targets = np.append(targets, np.int32(next_token))
                states = hidden[at : at + len(targets)]
                rows.append(self._prompt_row(len(plan.decode_rows) + i, states, targets, num_top))
            at += length
            tokens_at += length
        return rows

    def _candidates(self, plan: StepPlan, logits: torch.Tensor) -> list[PromptRow]:
        """The likeliest next tokens of the rows that want them, by raw logits: called before sampling changes these."""
        prefill, found = plan.prefill_rows, []
        wanted = np.flatnonzero(prefill["flags"] & PREFILL_CANDIDATES)
        counts = prefill["num_prompt_logprobs"][wanted].tolist()
        rows = torch.from_numpy(wanted + len(plan.decode_rows))
        for at in range(0, len(rows), CANDIDATE_ROWS):
            part = rows[at : at + CANDIDATE_ROWS]
            x = logits.index_select(0, part.to(logits.device))
            columns = prompt_logprobs(x, x.new_zeros(len(part), dtype=torch.int64), max(counts))
            nums = counts[at : at + CANDIDATE_ROWS]
            per_row = zip(part.tolist(), nums, *(column.cpu().split(1) for column in columns), strict=True)
            for row, num, logprob, rank, ids, top in per_row:
                found.append(PromptRow(row, logprob, rank, ids[:, :num], top[:, :num]))
        return found

    def _prompt_row(self, row: int, states: torch.Tensor, targets: np.ndarray, num_top: int) -> PromptRow:
        target_ids = torch.from_numpy(targets.copy()).to(self.ctx.device)
        parts = [
            [x.cpu() for x in prompt_logprobs(self.model.compute_all_logits(s), t, num_top)]
            for s, t in zip(states.split(PROMPT_LOGPROB_ROWS), target_ids.split(PROMPT_LOGPROB_ROWS), strict=True)
        ]
        if not len(targets):
            none = torch.zeros(0)
            return PromptRow(row, none, none.int(), none.int(), none)
        return PromptRow(row, *(torch.cat(columns) for columns in zip(*parts, strict=True)))
