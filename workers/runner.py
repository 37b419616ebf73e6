"""ModelRunner: executes step plans on one device. Owns the tables by slot, the step's buffers and the captured graphs.

A step: apply the plan's changes and build the inputs -> forward -> the outputs that the plan wants (outputs/): vectors, prompt
logprobs, and tokens, which end the step. On a GPU most steps replay two graphs, forward to the logits, and sampling. Nothing
here waits for the device.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from quire.ipc.process.cpus import cpu_share
from quire.ipc.step.masks import RowsAndMasks
from quire.ipc.step.plan import StepPlan, decode_logits_processors, decode_plan
from quire.ipc.step.sections import HEADER
from quire.kernels.sampling.logits_processors import apply_logits_processors
from quire.kernels.step.tables import SlotTables, StepBuffers
from quire.workers.devices.device import Device, DeviceContext
from quire.workers.devices.masks import ReadMasks
from quire.workers.graphs import StepGraphs
from quire.workers.logits_processors.batch import CustomProcessors
from quire.workers.models.language_model import LanguageModel
from quire.workers.models.step_context import step_context
from quire.workers.outputs.candidates import NextTokenCandidates
from quire.workers.outputs.output import Computed, Output, RowResult
from quire.workers.outputs.prompt_logprobs import PromptLogprobs
from quire.workers.outputs.tokens import Tokens
from quire.workers.pipeline import Links, Pipeline, advance

NO_ROWS = np.zeros(0, np.int32)
MICRO_BATCH = HEADER.at["micro_batch"]


def no_masks(plan: StepPlan) -> Iterable[RowsAndMasks]:
    """For plans without masks."""
    raise RuntimeError(f"step {plan.step} waits for masks that nobody will send")


class ModelRunner:
    def __init__(
        self,
        model: LanguageModel,
        ctx: DeviceContext,
        make_device: Callable[[DeviceContext], Device],
        custom_processors: CustomProcessors | None = None,
        more_outputs: Sequence[Output] = (),
    ):
        """more_outputs: besides tokens and log-probabilities; used by the last stage."""
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
        self.buffers = StepBuffers.allocate(ctx.max_tokens, ctx.max_rows, num_groups, ctx.device, samples, *ctx.config.of_items)
        if stage.count > 1:
            model.stage_buffer.hidden = torch.zeros(ctx.max_tokens, ctx.config.hidden_size, dtype=ctx.dtype, device=ctx.device)
        self._decode_rows = [NO_ROWS] * stage.count  # by micro-batch: those last received
        self._appliers = self.device.states.appliers(self.tables, model) | model.appliers(self.buffers)  # on the host
        self.outputs: list[Output] = []
        self.pools = False  # steps may have results that are made of hidden states
        if self.samples:
            self.tokens = Tokens(
                self.device, self.tables, self.buffers, ctx.parallel, ctx.config.vocab_size, custom_processors, model.has_head
            )
            beside = [PromptLogprobs(model, ctx.device), NextTokenCandidates()]
            self.outputs = [*beside, *more_outputs, self.tokens]
            self.pools = bool(more_outputs)
            self._appliers["logits_processors"] = self._apply_logits_processors
            self._appliers["custom_processors"] = self._take_in_custom_processors
        if ctx.device.type == "cuda":
            torch.cuda.synchronize()  # all of this was filled on another stream than the one that steps run on

    def join(self, links: Links) -> None:
        """Connect this stage with those before and after it."""
        stage = self.ctx.parallel.stage
        self.pipeline = Pipeline(stage, links, self.model.stage_buffer.hidden, self.tables, self.buffers)

    @torch.inference_mode()
    def step(self, words: np.ndarray, read_masks: ReadMasks) -> list[RowResult]:
        """Run one plan, int32 words; returns the results that it yields beside its tokens."""
        plan = decode_plan(words, self._decode_rows[words[MICRO_BATCH]])
        if not plan.same_decode_rows:
            self._decode_rows[plan.micro_batch] = plan.decode_rows.copy()
        device_plan, self.device.adapters.is_active = self.device.load_plan(words), plan.has_adapters
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

    def _compute(self, plan: StepPlan, device_plan: torch.Tensor, read_masks: ReadMasks) -> list[RowResult]:
        results = self._replay(plan, device_plan, read_masks)
        if results is None:
            results = self._run(plan, device_plan, read_masks)
        self.device.drafter.follow(plan, self.tables, self.buffers, self.graphs)
        return results

    def _replay(self, plan: StepPlan, device_plan: torch.Tensor, read_masks: ReadMasks) -> list[RowResult] | None:
        """The results of a step that ran as a graph; None if it must run eagerly."""
        graphs, results = self.graphs, list[RowResult]()
        if graphs is None or (plan.wants_vectors and any(output.needs_every_token(plan) for output in self._wanted(plan))):
            return None

        def pool(hidden: torch.Tensor) -> None:
            step = Computed(self.model, self.buffers, self.ctx.parallel, plan, device_plan, hidden, False, read_masks)
            pooled = [output for output in self._wanted(plan) if output is not self.tokens or not self.model.has_head]
            results.extend(result for output in pooled for result in output.compute(step))

        return results if graphs.run(plan, read_masks, pool) else None

    def _wanted(self, plan: StepPlan) -> list[Output]:
        return [output for output in self.outputs if output.is_wanted(plan)]

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
            if graphs and self.model.has_graphs:
                StepGraphs(self, self.device).run_kernels()  # type: ignore[arg-type]
            self._run(decode_plan(words, NO_ROWS), self.device.load_plan(words), no_masks)

    @torch.inference_mode()
    def capture_graphs(self) -> float:
        """Capture the graphs that serving begins with, if the model has any; returns the seconds it took."""
        if not self.model.has_graphs:
            return self.model.begin_graphs(self.ctx.max_tokens, self.ctx.max_rows)
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

    def _run(self, plan: StepPlan, device_plan: torch.Tensor, read_masks: ReadMasks) -> list[RowResult]:
        outputs = self._wanted(plan)
        for output in outputs:
            output.begin(plan)
        every_token = any(output.needs_every_token(plan) for output in outputs)
        sizes = plan.num_tokens, plan.num_samples, len(plan.decode_rows)
        hidden = self.forward(device_plan, *sizes, every_token=every_token, windows=plan.window > 1)
        step = Computed(self.model, self.buffers, self.ctx.parallel, plan, device_plan, hidden, every_token, read_masks)
        return [result for output in outputs for result in output.compute(step)]

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
        sizes = num_tokens, num_rows, num_decode_rows
        self.attention.begin(self.tables, step, *sizes, windows)
        if (load := self.ctx.parallel.expert_load) is not None:
            load.begin(step.query_start[num_rows : num_rows + 1], step.num_rows, num_tokens)
        context = step_context(self.attention.attend, step, *sizes, states, self.device.adapters.is_active)
        logits_indices = None if context.is_decode or every_token else step.logits_indices[:count]
        hidden = self.model(step.input_ids[:num_tokens], context, logits_indices)
        if not self.samples:
            advance(self.tables, step, num_rows)
        return hidden
