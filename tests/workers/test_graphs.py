"""Captured steps, as far as they can be seen without a GPU: what sizes are padded to, and what is compiled before serving."""

import gc
import itertools
import weakref
from collections import deque
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quire.ipc.step.plan import DTYPES, StepPlan
from quire.ipc.step.sections import SAMPLING_FILTER, SAMPLING_PROCESSORS, SAMPLING_RANDOM, SAMPLING_WINDOWS
from quire.kernels.attention.decode_schedule import DecodeWorkspace
from quire.kernels.triton_support import dependent_launch
from quire.kernels.tuning.configs import DecodeConfig
from quire.kernels.tuning.current import using
from quire.kernels.tuning.h200 import H200
from quire.workers.attention.cuda import CudaModelAttention
from quire.workers.devices.cuda import CudaDevice
from quire.workers.graph_sizes import (
    MAX_ROWS_AHEAD,
    PROMPT_ROWS,
    START_TOKENS,
    BatchDescriptor,
    GraphSizes,
    batches_ahead,
    batches_at_start,
    decode_sizes,
    mixed_batches,
    mixed_row_sizes,
    mixed_specializations,
    mixed_token_sizes,
    most_tokens,
    unmixed_batches,
)
from quire.workers.graphs import COMMON_KINDS, WARM_KINDS, WARM_WINDOW_KINDS, StepGraphs
from quire.workers.parallel import Parallel
from quire.workers.speculation.drafter import Drafter

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
def test_every_kernel_of_a_mixed_step_is_met_before_serving(max_rows, kv_heads, streamed_rows, monkeypatch):
    monkeypatch.setattr(dependent_launch, "_max_rows", lambda: streamed_rows)
    workspace = SimpleNamespace(num_kv_heads=kv_heads, configs=[(c, 132 * c.programs_per_sm) for c in CONFIGS])
    decode = SimpleNamespace(launch=lambda rows, has_drafts: DecodeWorkspace.launch(workspace, rows))
    attention = SimpleNamespace(workspaces={"shape": decode}, _latent_heads=set())
    device = SimpleNamespace(ctx=SimpleNamespace(config=SimpleNamespace(layers=[]), parallel=Parallel(0, 2)))

    def specialization(tokens, rows):
        kernels = CudaModelAttention.kernel_specialization(attention, tokens, rows)
        return CudaDevice.kernel_specialization(device, tokens), kernels

    tokens, rows = mixed_token_sizes(8192), mixed_row_sizes(max_rows)
    warm = {specialization(batch.tokens, batch.rows) for batch in mixed_specializations(tokens, rows, specialization)}
    steps = itertools.product(range(1, max_rows + 1), (0, 1, 15, 31, 500))
    met = {specialization(padded(tokens, r + more), padded(rows, r)) for r, more in steps}
    assert met <= warm
    assert all(batch.mixed for batch in mixed_specializations(tokens, rows, specialization)) and len(warm) <= 20


def test_no_mixed_step_is_captured_where_the_budget_is_too_small():
    assert mixed_specializations(mixed_token_sizes(8), mixed_row_sizes(4), lambda t, r: 0) == []


@pytest.mark.parametrize("max_rows", [1, 3, 16, 100, 448, 450, 1024])
def test_decode_sizes_take_any_number_of_rows_with_little_padding(max_rows):
    sizes = decode_sizes(max_rows)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_rows
    for rows in range(1, max_rows + 1):
        assert padded(sizes, rows) - rows < max(8, rows // 3)


def test_every_kind_of_sampling_is_compiled_before_serving():
    def kernels(kind):  # as `sampler.sample` chooses them, without masks
        random, processors = bool(kind & SAMPLING_RANDOM), bool(kind & SAMPLING_PROCESSORS)
        filtered = random and bool(kind & SAMPLING_FILTER)
        return {
            ("partial", random, processors),
            ("combine", random, filtered, processors),
            ("filter", filtered and processors, filtered),
        }

    warm = set().union(*map(kernels, WARM_KINDS))
    for kind in range((SAMPLING_RANDOM | SAMPLING_FILTER | SAMPLING_PROCESSORS) + 1):
        assert kernels(kind) <= warm


def test_before_serving_the_largest_step_decode_and_a_few_prompts_are_captured():
    decode = [BatchDescriptor(2, 2, False), BatchDescriptor(1, 1, False)]
    prompts = [BatchDescriptor(64, PROMPT_ROWS, True, True), BatchDescriptor(16, PROMPT_ROWS, True, True)]
    largest = MAX_TOKENS + 1
    assert batches_at_start([1, 2], [16, 64, largest], [16, 64]) == [BatchDescriptor(largest, 16, True), *decode, *prompts]
    assert batches_at_start([1], [16], [2]) == [
        BatchDescriptor(16, 2, True),
        BatchDescriptor(1, 1, False),
        BatchDescriptor(16, 2, True, True),
    ]
    assert batches_at_start([1, 2], [], [16]) == decode


def test_steps_to_capture_ahead_are_those_of_few_rows_the_largest_first():
    ahead = batches_ahead([1, 2], [16, 64, MAX_TOKENS + 1], [16, 64, MAX_ROWS_AHEAD + 1])
    assert ahead == [BatchDescriptor(t, r, True) for t, r in ((64, 16), (16, 16), (64, 64))]  # 16 tokens are of 16 rows at most
    assert sorted(ahead) == sorted(mixed_batches([16, 64], [16, 64]))
    assert batches_ahead([1], [], [16]) == []


@pytest.mark.parametrize("max_rows", [1, 512, 1024])
@pytest.mark.parametrize("max_tokens", [512, 2048, 8192])
def test_what_is_not_captured_at_start_is_captured_ahead(max_rows, max_tokens):
    decode, tokens, rows = decode_sizes(max_rows), mixed_token_sizes(max_tokens), mixed_row_sizes(max_rows)
    start, ahead = batches_at_start(decode, tokens, rows), batches_ahead(decode, tokens, rows)
    assert not {*start[1:]} & {*ahead} and {*unmixed_batches(decode, tokens, rows)} <= {*start, *ahead}
    assert all(shape.tokens <= START_TOKENS for shape in start[1:])


@pytest.mark.parametrize("max_rows", [1, 2, 3, 64, 100, 1000, 1024])
def test_every_mixed_step_has_padded_sizes_that_are_enumerated(max_rows):
    sizes = GraphSizes(max_rows, 2048, 140 * 10**9)
    tokens, rows = sizes.mixed_tokens, sizes.mixed_rows
    assert tokens == mixed_token_sizes(2048) and rows == mixed_row_sizes(max_rows)
    known = {*mixed_batches(tokens, rows), *unmixed_batches([1], tokens, rows)}
    for decode_rows, prompts, length in itertools.product((0, 1, 2, 60, 63, 99, 500), (1, 3, 5, 70), (1, 2, 9, 300)):
        if decode_rows + prompts <= max_rows and decode_rows + prompts * length <= 2048:
            batch = sizes.padded(plan_of(decode_rows, [length] * prompts))
            assert batch in known and batch.rows >= decode_rows + prompts and batch.tokens >= decode_rows + prompts * length
            assert batch.prompts_only == (not decode_rows and prompts <= PROMPT_ROWS)


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


def small_sizes():
    sizes = GraphSizes(16, 64, 10**9)
    sizes.decode, sizes.mixed_tokens, sizes.mixed_rows = [1, 2, 8], [16, 64], [16, 32]
    return sizes


def test_what_a_step_is_padded_to():
    padded_to = small_sizes().padded
    assert padded_to(plan_of(3, [])) == BatchDescriptor(8, 8, False)
    assert padded_to(plan_of(1, [16])) == BatchDescriptor(64, 16, True)
    assert padded_to(plan_of(0, [5, 6])) == BatchDescriptor(16, 4, True, prompts_only=True)
    assert padded_to(plan_of(0, [5] * 7)) == BatchDescriptor(64, 16, True)  # of more rows only one kind is captured
    assert padded_to(plan_of(0, [65])) is None


class Graph:
    """A graph that counts its replays."""

    def __init__(self):
        self.replays = 0

    def replay(self):
        self.replays += 1


@pytest.fixture
def graphs(monkeypatch):
    """StepGraphs without a GPU, with three mixed steps to capture ahead.

    `captured` tells what was captured, `ran` what was run, each with the model's state; `room` is for how many graphs there is
    memory.
    """
    made = StepGraphs.__new__(StepGraphs)
    made.captured, made.ran, made.kinds, made.idle, made.is_short, made.room = [], [], [], True, False, 1000
    made.sizes = small_sizes()
    made._masked = deque()
    made._ahead = deque([BatchDescriptor(64, 16, True), BatchDescriptor(16, 16, True), BatchDescriptor(64, 32, True)])
    made._device = SimpleNamespace(
        drafter=Drafter(),
        states=SimpleNamespace(apply_nothing=lambda tables, model: None),
        is_idle=lambda: made.idle,
        load_plan=lambda words: None,
        kernel_specialization=lambda t: 0,
        plan="plan",
    )
    attention = SimpleNamespace(kernel_specialization=lambda t, r, windows: 0)

    @contextmanager
    def short():
        made.is_short = True
        yield
        made.is_short = False

    state = {"tables": None, "buffers": None, "pools": False}
    model = SimpleNamespace(short=short, has_head=True)
    made._runner = SimpleNamespace(model=model, attention=attention, samples=True, **state)
    made._forward, made._sampling, made._passes, made._hidden = {}, {}, {}, {}
    made._pool, made.pools, made.failed = "first pool", [], None

    def captured(self, run):
        assert made.failed is None or made.failed() is None, "the failed capture holds memory that this one needs"
        self.pools.append(self._pool)
        if len(self._forward) + len(self._sampling) >= self.room:
            graph = Graph()
            made.failed = weakref.ref(graph)
            raise torch.OutOfMemoryError("none is left")
        run()
        return Graph()

    monkeypatch.setattr(StepGraphs, "_captured", captured)
    monkeypatch.setattr(StepGraphs, "_run_forward", lambda self, batch: self.ran.append((batch, made.is_short)))
    monkeypatch.setattr(StepGraphs, "_run_sampling", lambda self, rows, kind: made.kinds.append(kind))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.captured.append("synchronized"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "new pool")
    real = StepGraphs.capture
    monkeypatch.setattr(StepGraphs, "capture", lambda self, b, kind: [self.captured.append((b, kind)), real(self, b, kind)])
    return made


def test_steps_are_captured_ahead_while_the_device_is_idle(graphs):
    batches = list(graphs._ahead)
    graphs.idle = False
    assert graphs.capture_ahead() and not graphs.captured
    graphs.idle = True
    assert [graphs.capture_ahead() for _ in range(4)] == [True, True, False, False]
    assert graphs.captured == [(batch, kind) for batch in batches for kind in COMMON_KINDS]


def test_at_start_the_largest_step_then_decode_and_prompts_of_few_rows_are_captured(graphs):
    graphs.warm_up()
    decode = [BatchDescriptor(8, 8, False), BatchDescriptor(2, 2, False), BatchDescriptor(1, 1, False)]
    batches = [BatchDescriptor(64, 16, True), *decode, BatchDescriptor(64, 4, True, True), BatchDescriptor(16, 4, True, True)]
    assert graphs.captured == [(batch, kind) for batch in batches for kind in COMMON_KINDS]
    assert len(graphs._ahead) == 3
    ran = [
        BatchDescriptor(16, 16, True),
        BatchDescriptor(16, 4, True, True),
        *(BatchDescriptor(n, n, False) for n in (1, 2, 3, 8)),
    ]
    assert graphs.ran[: len(ran)] == [(batch, True) for batch in ran] and not graphs.is_short


def test_steps_with_windows_have_graphs_of_their_own_if_there_may_be_any(graphs):
    assert GraphSizes(16, 64, 10**9).samples == GraphSizes(16, 64, 10**9).mixed_samples == []
    sizes = graphs.sizes = GraphSizes(4, 64, 10**9, max_samples=64)
    assert sizes.samples == decode_sizes(64)[1:] and sizes.mixed_samples == [64] and sizes.decode == decode_sizes(4)
    start, ahead = sizes.at_start(), sizes.ahead()
    assert [b for b in start if b.windows] == [BatchDescriptor(n, n, False, windows=True) for n in reversed(sizes.samples)]
    assert [b for b in ahead if b.windows] == [BatchDescriptor(t, 64, True, windows=True) for t in reversed(sizes.mixed_tokens)]
    without = GraphSizes(4, 64, 10**9)
    assert [b for b in start if not b.windows] == without.at_start() and [b for b in ahead if not b.windows] == without.ahead()
    graphs.warm_up()
    ran, kinds = {batch for batch, _ in graphs.ran}, graphs.kinds
    assert {BatchDescriptor(n, n, False, windows=True) for n in sizes.samples} < ran and not {*WARM_WINDOW_KINDS} - {*kinds}
    assert any(batch.windows and batch.mixed for batch in ran)
    windows = [(batch, kind) for batch, kind in graphs.captured if batch.windows]
    assert windows == [(b, kind | SAMPLING_WINDOWS) for b in start if b.windows for kind in COMMON_KINDS]
    for decode_rows, prompts, batch in ((3, [], (16, 16, False)), (2, [20], (32, 64, True))):
        plan = replace(plan_of(decode_rows, prompts), window=4, draft_tokens=9, sampling_kind=SAMPLING_WINDOWS)
        assert graphs.run(plan, pytest.fail)
        assert (BatchDescriptor(*batch, windows=True), SAMPLING_WINDOWS) in graphs.captured


def test_a_step_runs_with_the_kernels_of_its_kind(graphs, monkeypatch):
    monkeypatch.undo()
    seen = []
    graphs._device.plan, graphs._device.adapters = "plan", SimpleNamespace(is_active=None)
    graphs._logits = torch.zeros(16, 3)
    graphs._runner.forward = lambda *args, windows: seen.append((*args, windows)) or "hidden"
    graphs._runner.model = SimpleNamespace(has_head=True, compute_logits=lambda hidden, out: seen.append((hidden, len(out))))
    shapes = [BatchDescriptor(8, 8, False), BatchDescriptor(64, 4, True), BatchDescriptor(64, 4, True, True)]
    for shape in (*shapes, *(shape._replace(windows=True) for shape in shapes[:2])):
        StepGraphs._run_forward(graphs, shape)
        assert graphs._device.adapters.is_active is False
    plain = [("plan", 8, 8, 8, False), ("plan", 64, 4, None, False), ("plan", 64, 4, 0, False)]
    assert seen[::2] == [*plain, *((*args[:-1], True) for args in plain[:2])]
    assert seen[1::2] == [("hidden", 8), ("hidden", 4), ("hidden", 4), ("hidden", 8), ("hidden", 4)]


def test_without_memory_for_more_graphs_at_start_the_worker_goes_on(graphs):
    graphs.room = 2
    graphs.warm_up()
    assert [batch for batch, _ in graphs.captured] == [BatchDescriptor(64, 16, True)] * 2
    assert not graphs._ahead and not graphs.capture_ahead()


def test_a_step_runs_as_a_graph_whatever_memory_this_rank_has_left(graphs):
    """Another rank has more, and would wait for this one's exchanges."""
    graphs.room = 2
    mixed, decode = plan_of(1, [20]), plan_of(2, [])
    for plan, batch in ((mixed, BatchDescriptor(64, 16, True)), (decode, BatchDescriptor(2, 2, False))):
        assert graphs.run(plan, pytest.fail)
        assert list(graphs._forward) == [batch] and graphs._forward[batch].replays == 1
        assert [graph.replays for graph in graphs._sampling.values()] == [1]
    assert graphs.captured.count("synchronized") == 1  # the first was dropped, when nothing could be replaying it
    assert graphs.pools == ["first pool"] * 3 + ["new pool"] * 2  # a pool ends with its last graph
    assert not graphs._ahead


def test_a_step_without_memory_even_for_its_own_graph_ends_the_worker(graphs):
    graphs.room = 1
    with pytest.raises(torch.OutOfMemoryError):
        graphs.run(plan_of(1, [20]), pytest.fail)
    assert "synchronized" in graphs.captured


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


def test_a_capture_that_fails_is_ended_and_its_own_error_told(monkeypatch):
    graphs = StepGraphs.__new__(StepGraphs)
    graphs._pool = "pool"
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    assert graphs._captured(lambda: made[-1].calls.append("run")) is made[-1]

    def fail():
        assert not gc.isenabled()
        made[-1].calls.append("failed")
        raise torch.OutOfMemoryError("none is left")

    with pytest.raises(torch.OutOfMemoryError):
        graphs._captured(fail)
    assert [graph.calls for graph in made] == [["begin", "run", "end"], ["begin", "failed", "end"]] and gc.isenabled()


def test_of_a_stage_that_does_not_sample_the_forward_is_all(graphs, monkeypatch):
    graphs._runner.samples = False
    graphs.warm_up()
    assert graphs._forward and not graphs._sampling
    graphs.expect_masks()
    assert not graphs._masked
    batch = BatchDescriptor(8, 8, False)
    replayed = []
    graphs._forward[batch] = SimpleNamespace(replay=lambda: replayed.append(batch))
    plan = SimpleNamespace(
        num_tokens=7,
        num_samples=7,
        window=1,
        prefill_rows=[],
        sampling_kind=0,
        has_mask_rows=True,
        has_adapters=False,
        has_items=False,
    )
    assert graphs.run(plan, None) and replayed == [batch]


def test_passes_of_a_draft_model_are_captured_once_and_run_what_they_say(graphs):
    ran = []
    for _ in range(3):
        graphs.replay("a pass", lambda: ran.append(1), 64)
    graphs.prepare("a pass", lambda: ran.append(2))
    assert ran == [1]
    graphs.prepare("another", lambda: ran.append(3))
    assert ran == [1, 3]
