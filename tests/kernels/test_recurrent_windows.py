"""Recurrent layers of decode rows with windows: kernels against references, and windows against tokens one by one, to the bit.

The CPU's path always; the Triton kernels in the interpreter and on a GPU.
"""

import inspect
from functools import partial

import pytest
import torch
from guarded import guarded
from recurrent_cases import ON_GPU, TOLERANCE, Row, interpreted, random, rows_of, states_of
from window_cases import CASES, NUM_INPUTS, WRITTEN, WindowRow, keeping, window_rows_of, windows_on

from quire.kernels.recurrent import (
    convolution_cpu,
    convolution_reference,
    delta_cpu,
    delta_reference,
    mamba_cpu,
    mamba_reference,
)
from quire.kernels.recurrent.convolution_reference import Gates
from quire.kernels.recurrent.delta_reference import DeltaHeads, DeltaInputs, DeltaWeights
from quire.kernels.recurrent.mamba_reference import MambaHeads, MambaInputs, MambaWeights

DELTA = [DeltaHeads(2, 4, 16, 8), DeltaHeads(1, 3, 12, 20), DeltaHeads(1, 3, 12, 20, by_channel=True)]
MAMBA = [MambaHeads(2, 4, 16, 24), MambaHeads(1, 3, 12, 8)]
GPU_DELTA = [DeltaHeads(16, 32, 128, 128), DeltaHeads(3, 3, 24, 40), DeltaHeads(8, 8, 128, 128, by_channel=True)]
GPU_MAMBA = [MambaHeads(8, 64, 128, 64), MambaHeads(1, 3, 12, 24)]
STATES = 14


class Convolution:
    """A layer's inputs, its function, and what it keeps; each kind has this interface."""

    def __init__(self, function, channels=11, window=4, *, dtype=torch.float32, is_gated=False, keeps_y=True, **_):
        self.function, self.channels, self.dtype = function, channels, dtype
        self.weight, self.bias = random(window, channels, dtype=dtype, seed=2), random(channels, dtype=dtype, seed=3)
        self.is_gated, self.kept_sizes = is_gated, (channels, channels) if keeps_y else (channels,)
        self.state, self.state_dtype = (window - 1, channels), dtype

    def inputs(self, tokens):
        return random(tokens, 3 * self.channels + 5, dtype=self.dtype)[:, 5:].split(self.channels, 1)

    def run(self, inputs, states, rows, device="cpu", function=None):
        x, before, after = (part.to(device) for part in inputs)
        gates = Gates(before, after) if self.is_gated else None
        return (function or self.function)(x, self.weight.to(device), self.bias.to(device), states, rows, gates)

    def reference(self, inputs, states, rows):
        return self.run(inputs, states, rows, function=convolution_reference.causal_convolution)


class Recurrence:
    def __init__(self, function, heads, *, dtype=torch.float32, state_dtype=torch.float32):
        self.function, self.heads, self.dtype, self.state_dtype = function, heads, dtype, state_dtype
        self.is_delta = isinstance(heads, DeltaHeads)
        if self.is_delta:
            self.sizes = heads.channels, heads.value_size, heads.num_values, heads.num_decays
            self.state, gates = (heads.num_values, heads.key_dim, heads.value_dim), heads.num_values + heads.num_decays
            norm = 1 + 0.2 * random(heads.value_dim, seed=7).to(dtype)
            self.weights = DeltaWeights(random(heads.num_values, seed=5), random(heads.num_decays, seed=6), norm, 1e-6)
        else:
            self.sizes, gates = (heads.channels, heads.size, heads.num_heads), heads.num_heads
            self.state = heads.num_heads, heads.state_size, heads.head_dim
            norm = 1 + 0.2 * random(heads.size, seed=7).to(dtype)
            self.weights = MambaWeights(*(random(heads.num_heads, seed=i) for i in (4, 5, 6)), norm, 1e-6, heads.size)
        self.kept_sizes = heads.channels, heads.channels, gates

    def inputs(self, tokens):
        return random(tokens, sum(self.sizes), dtype=self.dtype).split(self.sizes, 1)

    def run(self, inputs, states, rows, device="cpu", function=None):
        kind = DeltaInputs if self.is_delta else MambaInputs
        moved = kind(*(x.to(device) for x in inputs))
        weights = type(self.weights)(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in self.weights))
        return (function or self.function)(moved, weights, self.heads, states, rows)

    def reference(self, inputs, states, rows):
        function = delta_reference.gated_delta if self.is_delta else mamba_reference.mamba
        return self.run(inputs, states, rows, function=function)


def convolutions(function, channels, **how):
    return [
        Convolution(function, channels, **how),
        Convolution(function, channels, 3, is_gated=True, keeps_y=False, **how),
    ]


def compare(layer, rows, device="cpu", tolerance=TOLERANCE):
    count = max(int(rows.query_start[-1]) + 3 * (rows.num_decode_rows != len(rows.own)), len(rows.own))
    decode, real = int(rows.query_start[rows.decode_limit[0]]), int(rows.query_start[-1])
    inputs, states = layer.inputs(count), states_of(WRITTEN, STATES, *layer.state, dtype=layer.state_dtype)
    kept = [random(NUM_INPUTS, size, dtype=layer.dtype, seed=9 + i) for i, size in enumerate(layer.kept_sizes)]
    wanted, wanted_kept = states.clone(), [x.clone() for x in kept]
    want = layer.reference(inputs, wanted, keeping(rows, *wanted_kept))
    found, moved = states.to(device), windows_on(device, keeping(rows, *(x.clone() for x in kept)))
    got = layer.run(inputs, found, moved, device).cpu()
    error = tolerance[layer.dtype if layer.state_dtype == torch.float32 else torch.bfloat16]
    torch.testing.assert_close(got[:real], want[:real], rtol=error, atol=error)
    torch.testing.assert_close(found.cpu(), wanted, rtol=error, atol=error, equal_nan=True)
    for a, b in zip(moved.windows.inputs, wanted_kept, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=error, atol=error)
    if isinstance(layer, Recurrence) and device != "cpu":
        assert not got.isnan().any()  # tokens of no row have zeros
    return decode


def assert_windows_are_tokens(layer, device="cpu"):
    """A sequence in windows, of which few, all or no drafts are accepted, has the bits that it has token by token."""
    count = 14
    inputs, begun = layer.inputs(count), states_of([1], 4, *layer.state, dtype=layer.state_dtype)
    one, states, outputs = begun.clone().to(device), begun.clone().to(device), []
    behind = [one[1].clone()]  # the state before token t
    for t in range(count):
        rows = rows_of([], [Row(1, 1, 1, 0, 60 + t)])
        rows = rows._replace(decode_limit=torch.tensor([1], dtype=torch.int32), num_decode_rows=1)
        rows = type(rows)(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in rows))
        outputs.append(layer.run([x[t : t + 1] for x in inputs], one, rows, device)[0].clone())
        behind.append(one[1].clone())
    kept = [torch.zeros(2 * NUM_INPUTS, size, dtype=layer.dtype) for size in layer.kept_sizes]
    done, before, base = 0, 0, 0
    for length, accepted in ((5, 3), (4, 4), (3, 1), (1, 1), (5, 5), (0, 0)):
        row = WindowRow(1, length, before, NUM_INPUTS - base, 60 + done, 64, 2)
        rows = windows_on(device, keeping(window_rows_of([row], [], base=base), *kept))
        part = [x[done : max(done + length, done + 1)] if done < count else x[:1] for x in inputs]
        got = layer.run(part, states, rows, device)
        kept = [x.cpu() for x in rows.windows.inputs]
        if isinstance(layer, Recurrence):  # what the convolution keeps
            kept[1][base : base + length] = part[0][:length]
        base = NUM_INPUTS - base
        assert all(torch.equal(got[i], outputs[done + i]) for i in range(length))
        assert torch.equal(states[1], behind[done])
        done, before = done + accepted, accepted
    assert done == count and torch.equal(states[2], behind[4])  # left at 64 tokens, within a window


def test_windows_are_as_tokens_one_by_one_on_the_cpu():
    for layer in convolutions(convolution_cpu.causal_convolution, 11):
        assert_windows_are_tokens(layer)
    for state_dtype in (torch.float32, torch.float16):
        for heads in DELTA:
            assert_windows_are_tokens(Recurrence(delta_cpu.gated_delta, heads, state_dtype=state_dtype))
        for heads in MAMBA:
            assert_windows_are_tokens(Recurrence(mamba_cpu.mamba, heads, state_dtype=state_dtype))


@pytest.mark.parametrize("case", CASES)
def test_windows_on_the_cpu(case):
    for dtype in (torch.float32, torch.bfloat16):
        for layer in convolutions(convolution_cpu.causal_convolution, 11, dtype=dtype):
            compare(layer, CASES[case])
        for heads in DELTA:
            compare(Recurrence(delta_cpu.gated_delta, heads, dtype=dtype), CASES[case])
        for heads in MAMBA:
            compare(Recurrence(mamba_cpu.mamba, heads, dtype=dtype), CASES[case])


def kernels():
    from quire.kernels.recurrent import convolution, delta, mamba

    return convolution.causal_convolution, delta.gated_delta, mamba.mamba


@interpreted
def test_nothing_before_the_first_state_is_read():
    """The row's own state is the first, and it is left nowhere: what a warm-up's dummy rows do."""
    rows = keeping(window_rows_of([WindowRow(0, 2, 0, 0, 5)], [], base=0))
    convolution, delta, mamba = kernels()
    for layer in (*convolutions(convolution, 70), Recurrence(delta, DELTA[0]), Recurrence(mamba, MAMBA[0])):
        states = guarded(states_of([0], 4, *layer.state, dtype=layer.state_dtype))
        kept = [guarded(random(NUM_INPUTS, size, dtype=layer.dtype)) for size in layer.kept_sizes]
        layer.run(layer.inputs(2), states, keeping(rows, *kept))
        assert not states[0].isnan().any()


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_windows_interpreted(case):
    convolution, delta, mamba = kernels()
    for layer in convolutions(convolution, 70):
        compare(layer, CASES[case])
    for heads in DELTA:
        compare(Recurrence(delta, heads), CASES[case])
    for heads in MAMBA:
        compare(Recurrence(mamba, heads), CASES[case])


def by_columns():
    """Delta's and Mamba's layers, with programs that have a few columns of a state at a time, the last of them not all."""
    from quire.kernels.recurrent import delta, mamba

    few = partial(delta.gated_delta, config=delta.Config(8, 4))
    assert mamba.DECODE_CHANNELS == 8
    layers = [Recurrence(few, heads) for heads in DELTA] + [Recurrence(few, DELTA[2], state_dtype=torch.float16)]
    return [*layers, *(Recurrence(mamba.mamba, heads) for heads in MAMBA)]


@interpreted
@pytest.mark.slow
def test_states_by_columns_interpreted(monkeypatch):
    _, _, mamba = kernels()
    monkeypatch.setattr(inspect.getmodule(mamba), "DECODE_CHANNELS", 8)
    for layer in by_columns():
        for case in CASES.values():
            compare(layer, case)
        assert_windows_are_tokens(layer)


@interpreted
def test_windows_are_as_tokens_one_by_one_interpreted():
    convolution, delta, mamba = kernels()
    for layer in convolutions(convolution, 70):
        assert_windows_are_tokens(layer)
    for heads, state_dtype in ((DELTA[0], torch.float32), (DELTA[1], torch.float16), (DELTA[2], torch.float16)):
        assert_windows_are_tokens(Recurrence(delta, heads, state_dtype=state_dtype))
    for heads, state_dtype in ((MAMBA[0], torch.float32), (MAMBA[1], torch.float16)):
        assert_windows_are_tokens(Recurrence(mamba, heads, state_dtype=state_dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [0, 1, 2])
def test_states_by_columns_on_a_gpu(pdl):
    """As in steps of many rows, and as dependent launches."""
    _, delta, mamba = kernels()
    few = partial(delta, config=inspect.getmodule(delta).Config(32, 4), pdl=pdl)
    for rows in CASES.values():
        for heads in GPU_DELTA:
            compare(Recurrence(few, heads, dtype=torch.bfloat16), rows, "cuda", ON_GPU)
        for heads in GPU_MAMBA:
            compare(Recurrence(partial(mamba, pdl=pdl), heads, dtype=torch.bfloat16), rows, "cuda", ON_GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_windows_on_a_gpu(dtype):
    convolution, delta, mamba = kernels()
    for rows in CASES.values():
        for layer in convolutions(convolution, 2048, dtype=dtype):
            compare(layer, rows, "cuda", ON_GPU)
        for state_dtype in (torch.float32, torch.float16):
            for heads in GPU_DELTA:
                compare(Recurrence(delta, heads, dtype=dtype, state_dtype=state_dtype), rows, "cuda", ON_GPU)
            for heads in GPU_MAMBA:
                compare(Recurrence(mamba, heads, dtype=dtype, state_dtype=state_dtype), rows, "cuda", ON_GPU)
