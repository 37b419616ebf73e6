"""Captured steps, as far as they can be seen without a GPU: what sizes are padded to, and what is compiled before serving."""

import dataclasses
import gc
import itertools
from collections import deque
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quire.ipc.step.plan import DTYPES, StepPlan
from quire.ipc.step.sections import VARIANT_FILTER, VARIANT_PROCESSORS, VARIANT_RANDOM
from quire.kernels.attention.decode_schedule import DecodeWorkspace
from quire.kernels.triton_support import dependent_launch
from quire.kernels.tuning.configs import DecodeConfig
from quire.kernels.tuning.current import using
from quire.kernels.tuning.h200 import H200
from quire.workers.devices.cuda import CudaDevice
from quire.workers.graphs import (
    COMMON_VARIANTS,
    MAX_ROWS_AHEAD,
    PROMPT_ROWS,
    START_TOKENS,
    WARM_VARIANTS,
    Shape,
    StepGraphs,
    decode_sizes,
    mixed_row_sizes,
    mixed_shapes,
    mixed_token_sizes,
    mixed_variants,
    most_tokens,
    shapes_ahead,
    shapes_at_start,
    unmixed_shapes,
)

MAX_TOKENS = H200.step.captured_tokens
CONFIGS = [DecodeConfig(64, 4, 4, 1), DecodeConfig(64, 4, 3, 2), DecodeConfig(64, 4, 2, 4)]


@pytest.fixture(autouse=True)
def on_an_h200():
    with using(H200):
        yield


def padded(sizes, n):
    return min(size for size in sizes if size >= n)


@pytest.mark.parametrize("max_rows", [1, 3, 16, 100, 256, 1000, 1024])
@pytest.mark.parametrize("kv_heads", [1, 8, 32])
@pytest.mark.parametrize("streamed_rows", [16, 64])
def test_every_variant_of_a_mixed_step_is_met_before_serving(max_rows, kv_heads, streamed_rows, monkeypatch):
    monkeypatch.setattr(dependent_launch, "_max_rows", lambda: streamed_rows)
    workspace = SimpleNamespace(num_kv_heads=kv_heads, configs=[(c, 132 * c.programs_per_sm) for c in CONFIGS])
    device = SimpleNamespace(_decode=SimpleNamespace(launch=lambda rows: DecodeWorkspace.launch(workspace, rows)))

    def variant(tokens, rows):
        return CudaDevice.kernel_variant(device, tokens, rows)

    tokens, rows = mixed_token_sizes(8192), mixed_row_sizes(max_rows)
    warm = {variant(shape.tokens, shape.rows) for shape in mixed_variants(tokens, rows, variant)}
    steps = itertools.product(range(1, max_rows + 1), (0, 1, 15, 31, 500))
    met = {variant(padded(tokens, r + more), padded(rows, r)) for r, more in steps}
    assert met <= warm
    assert all(shape.mixed for shape in mixed_variants(tokens, rows, variant)) and len(warm) <= 20


def test_no_mixed_step_is_captured_where_the_budget_is_too_small():
    assert mixed_variants(mixed_token_sizes(8), mixed_row_sizes(4), lambda t, r: 0) == []


@pytest.mark.parametrize("max_rows", [1, 3, 16, 100, 448, 450, 1024])
def test_decode_sizes_take_any_number_of_rows_with_little_padding(max_rows):
    sizes = decode_sizes(max_rows)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_rows
    for rows in range(1, max_rows + 1):
        assert padded(sizes, rows) - rows < max(8, rows // 3)


def test_every_kind_of_sampling_is_compiled_before_serving():
    def kernels(variant):  # as `sampler.sample` chooses them, without masks
        random, processors = bool(variant & VARIANT_RANDOM), bool(variant & VARIANT_PROCESSORS)
        filtered = random and bool(variant & VARIANT_FILTER)
        return {
            ("partial", random, processors),
            ("combine", random, filtered, processors),
            ("filter", filtered and processors, filtered),
        }

    warm = set().union(*map(kernels, WARM_VARIANTS))
    for variant in range((VARIANT_RANDOM | VARIANT_FILTER | VARIANT_PROCESSORS) + 1):
        assert kernels(variant) <= warm


def test_before_serving_the_largest_step_decode_and_a_few_prompts_are_captured():
    decode = [Shape(2, 2, False), Shape(1, 1, False)]
    prompts = [Shape(64, PROMPT_ROWS, True, True), Shape(16, PROMPT_ROWS, True, True)]
    largest = MAX_TOKENS + 1
    assert shapes_at_start([1, 2], [16, 64, largest], [16, 64]) == [Shape(largest, 16, True), *decode, *prompts]
    assert shapes_at_start([1], [16], [2]) == [Shape(16, 2, True), Shape(1, 1, False), Shape(16, 2, True, True)]
    assert shapes_at_start([1, 2], [], [16]) == decode


def test_steps_to_capture_ahead_are_those_of_few_rows_the_largest_first():
    ahead = shapes_ahead([1, 2], [16, 64, MAX_TOKENS + 1], [16, 64, MAX_ROWS_AHEAD + 1])
    assert ahead == [Shape(t, r, True) for t, r in ((64, 16), (16, 16), (64, 64))]  # 16 tokens are of 16 rows at most
    assert sorted(ahead) == sorted(mixed_shapes([16, 64], [16, 64]))
    assert shapes_ahead([1], [], [16]) == []


@pytest.mark.parametrize("max_rows", [1, 512, 1024])
@pytest.mark.parametrize("max_tokens", [512, 2048, 8192])
def test_what_is_not_captured_at_start_is_captured_ahead(max_rows, max_tokens):
    decode, tokens, rows = decode_sizes(max_rows), mixed_token_sizes(max_tokens), mixed_row_sizes(max_rows)
    start, ahead = shapes_at_start(decode, tokens, rows), shapes_ahead(decode, tokens, rows)
    assert not {*start[1:]} & {*ahead} and {*unmixed_shapes(decode, tokens, rows)} <= {*start, *ahead}
    assert all(shape.tokens <= START_TOKENS for shape in start[1:])


@pytest.mark.parametrize("max_rows", [1, 2, 3, 64, 100, 1000, 1024])
def test_every_mixed_step_has_a_padded_shape_that_is_enumerated(graphs, max_rows):
    tokens, rows = mixed_token_sizes(2048), mixed_row_sizes(max_rows)
    graphs._mixed_tokens, graphs._mixed_rows = tokens, rows
    known = {*mixed_shapes(tokens, rows), *unmixed_shapes([1], tokens, rows)}
    for decode_rows, prompts, length in itertools.product((0, 1, 2, 60, 63, 99, 500), (1, 3, 5, 70), (1, 2, 9, 300)):
        if decode_rows + prompts <= max_rows and decode_rows + prompts * length <= 2048:
            shape = graphs._shape(plan_of(decode_rows, [length] * prompts))
            assert shape in known and shape.rows >= decode_rows + prompts and shape.tokens >= decode_rows + prompts * length
            assert shape.prompts_only == (not decode_rows and prompts <= PROMPT_ROWS)


def test_the_smaller_the_model_the_larger_the_steps_that_are_captured():
    assert [most_tokens(2**n) for n in (24, 30, 34, 40)] == sorted((most_tokens(2**n) for n in (24, 30, 34, 40)), reverse=True)
    assert most_tokens(16 * 10**9) == most_tokens(140 * 10**9) == MAX_TOKENS < 8192 < most_tokens(1_200_000_000)
    for largest in (16, 2000, 2048, 8192, 20_000):
        sizes = mixed_token_sizes(largest)
        assert sizes == sorted(set(sizes)) and sizes[-1] == largest
        assert all(b <= (2 if a < 256 else 1.34) * a for a, b in itertools.pairwise(sizes))


def plan_of(decode_rows, lengths):
    sections = {"decode_rows": np.arange(decode_rows, dtype=np.int32)}
    if lengths:
        sections["prefill_rows"] = np.zeros(len(lengths), DTYPES["prefill_rows"])
        sections["prefill_rows"]["length"] = lengths
        sections["prefill_tokens"] = np.zeros(sum(lengths), np.int32)
    return StepPlan(1, sections)


def test_what_a_step_is_padded_to(graphs):
    assert graphs._shape(plan_of(3, [])) == Shape(8, 8, False)
    assert graphs._shape(plan_of(1, [16])) == Shape(64, 16, True)
    assert graphs._shape(plan_of(0, [5, 6])) == Shape(16, 4, True, prompts_only=True)
    assert graphs._shape(plan_of(0, [5] * 7)) == Shape(64, 16, True)  # of more rows only one kind is captured
    assert graphs._shape(plan_of(0, [65])) is None


@pytest.fixture
def graphs(monkeypatch):
    """StepGraphs without a GPU, with three mixed steps to capture ahead.

    `captured` tells what was captured, `ran` what was run, each with the model's state.
    """
    made = StepGraphs.__new__(StepGraphs)
    made.captured, made.ran, made.idle, made.is_short, made._mixed_rows = [], [], True, False, [16, 32]
    made._ahead = deque([Shape(64, 16, True), Shape(16, 16, True), Shape(64, 32, True)])
    made._device = SimpleNamespace(is_idle=lambda: made.idle, load_plan=lambda words: None, kernel_variant=lambda t, r: 0)
    made._mixed_tokens, made.sizes = [16, 64], [1, 2, 8]

    @contextmanager
    def short_model():
        made.is_short = True
        yield
        made.is_short = False

    made._runner = SimpleNamespace(short_model=short_model)
    made._forward, made._tail, made._eager = {}, {}, set()
    monkeypatch.setattr(StepGraphs, "capture", lambda self, shape, variant: self.captured.append((shape, variant)))
    monkeypatch.setattr(StepGraphs, "_run_forward", lambda self, shape: self.ran.append((shape, made.is_short)))
    monkeypatch.setattr(StepGraphs, "_run_tail", lambda self, rows, variant: None)
    return made


def test_steps_are_captured_ahead_while_the_device_is_idle(graphs):
    shapes = list(graphs._ahead)
    graphs.idle = False
    assert graphs.capture_ahead() and not graphs.captured
    graphs.idle = True
    assert [graphs.capture_ahead() for _ in range(4)] == [True, True, False, False]
    assert graphs.captured == [(shape, variant) for shape in shapes for variant in COMMON_VARIANTS]


def test_at_start_the_largest_step_then_decode_and_prompts_of_few_rows_are_captured(graphs):
    graphs.warm_up()
    decode = [Shape(8, 8, False), Shape(2, 2, False), Shape(1, 1, False)]
    shapes = [Shape(64, 16, True), *decode, Shape(64, 4, True, True), Shape(16, 4, True, True)]
    assert graphs.captured == [(shape, variant) for shape in shapes for variant in COMMON_VARIANTS]
    assert len(graphs._ahead) == 3
    ran = [Shape(16, 16, True), Shape(16, 4, True, True), *(Shape(n, n, False) for n in (1, 2, 3, 8))]
    assert graphs.ran == [(shape, True) for shape in ran] and not graphs.is_short


def test_a_step_runs_with_the_kernels_of_its_kind(graphs, monkeypatch):
    monkeypatch.undo()
    seen = []
    graphs._device.plan = "plan"
    graphs._logits = torch.zeros(16, 3)
    graphs._runner.forward = lambda *args: seen.append(args) or "hidden"
    graphs._runner.model = SimpleNamespace(compute_logits=lambda hidden, out: seen.append((hidden, len(out))))
    for shape in (Shape(8, 8, False), Shape(64, 4, True), Shape(64, 4, True, True)):
        StepGraphs._run_forward(graphs, shape)
    assert seen[::2] == [("plan", 8, 8, 8), ("plan", 64, 4, None), ("plan", 64, 4, 0)]
    assert seen[1::2] == [("hidden", 8), ("hidden", 4), ("hidden", 4)]


def test_without_memory_for_more_graphs_the_worker_goes_on(graphs, monkeypatch):
    calls = []

    def capture(self, shape, variant):
        calls.append(shape)
        raise torch.OutOfMemoryError("none is left")

    monkeypatch.setattr(StepGraphs, "capture", capture)
    graphs.warm_up()
    assert calls == [Shape(64, 16, True)] and not graphs._ahead and not graphs.capture_ahead()
    masked = plan_of(1, [20])
    masked = dataclasses.replace(masked, sections={**masked.sections, "mask_rows": np.arange(2, dtype=np.int32)})
    for plan in (plan_of(1, [20]), plan_of(2, [20]), masked, plan_of(5, [])):  # its masks are still there to be read
        assert not graphs.run(plan, pytest.fail)
    assert calls[1:] == [Shape(64, 16, True), Shape(8, 8, False)]  # asked for once


class FakeGraph:
    """Torch's, of which one cannot be ended after a failure."""

    def __init__(self):
        self.calls = []
        made.append(self)

    def capture_begin(self, **_):
        self.calls.append("begin")

    def capture_end(self):
        self.calls.append("end")
        if "failed" in self.calls:
            raise RuntimeError("operation failed due to a previous error during capture")


made: list[FakeGraph] = []


def test_a_capture_that_fails_is_ended_and_its_own_error_told(graphs, monkeypatch):
    graphs._pool = "pool"
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    assert StepGraphs._captured(graphs, lambda: made[-1].calls.append("run")) is made[-1]

    def fail():
        assert not gc.isenabled()
        made[-1].calls.append("failed")
        raise torch.OutOfMemoryError("none is left")

    with pytest.raises(torch.OutOfMemoryError):
        StepGraphs._captured(graphs, fail)
    assert [graph.calls for graph in made] == [["begin", "run", "end"], ["begin", "failed", "end"]] and gc.isenabled()


def test_what_has_a_forward_graph_and_no_memory_for_a_tail_runs_eagerly(graphs, monkeypatch):
    def capture(self, shape, variant):
        self._forward[shape] = pytest.fail
        raise torch.OutOfMemoryError("none is left")

    monkeypatch.setattr(StepGraphs, "capture", capture)
    for _ in range(2):
        assert not graphs.run(plan_of(2, []), pytest.fail)
