"""Kernels of recurrent layers: each against its reference, rows side by side, and states that were cut against uncut ones.

The CPU's path always; the Triton kernels in the interpreter and on a GPU.
"""

from functools import partial

import pytest
import torch
from recurrent_cases import (
    CASES,
    ON_GPU,
    ROUNDED,
    TOLERANCE,
    WRITTEN,
    Row,
    assert_rounded,
    interpreted,
    num_tokens,
    on,
    random,
    rows_of,
    states_of,
)

from quire.kernels.recurrent import convolution_cpu, convolution_reference, delta_cpu, delta_reference
from quire.kernels.recurrent.convolution_reference import Gates
from quire.kernels.recurrent.delta_reference import DeltaHeads, DeltaInputs, DeltaWeights

HEADS = [DeltaHeads(2, 4, 16, 8), DeltaHeads(1, 3, 12, 20), DeltaHeads(3, 3, 8, 40)]
BY_CHANNEL = [DeltaHeads(2, 2, 16, 16, by_channel=True), DeltaHeads(1, 3, 12, 20, by_channel=True)]
GPU_HEADS = [DeltaHeads(16, 32, 128, 128), DeltaHeads(2, 6, 64, 96), DeltaHeads(3, 3, 24, 40)]
GPU_HEADS += [DeltaHeads(32, 32, 128, 128, by_channel=True), DeltaHeads(3, 3, 24, 40, by_channel=True)]


def convolution_case(rows, channels, window, dtype, has_bias):
    tokens = max(num_tokens(rows), len(rows.own))
    x, before, after = random(tokens, 3 * channels + 5, dtype=dtype)[:, 5:].split(channels, 1)
    bias = random(channels, dtype=dtype, seed=3) if has_bias else None
    tensors = x, random(window, channels, dtype=dtype, seed=2), bias
    return tensors, Gates(before, after), states_of(WRITTEN, 12, window - 1, channels, dtype=dtype)


def compare_convolution(
    function, rows, channels=11, window=4, dtype=torch.float32, device="cpu", has_bias=False, is_gated=False
):
    inputs, gates, tails = convolution_case(rows, channels, window, dtype, has_bias)
    wanted, real = tails.clone(), int(rows.query_start[-1])
    want = convolution_reference.causal_convolution(*inputs, wanted, rows, gates if is_gated else None)
    found, gates = tails.to(device), moved(gates, device) if is_gated else None
    got = function(*(None if t is None else t.to(device) for t in inputs), found, on(device, rows), gates)
    torch.testing.assert_close(got[:real].cpu(), want[:real], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(found.cpu().nan_to_num(7.0), wanted.nan_to_num(7.0))


def delta_case(rows, heads, dtype):
    tokens = max(num_tokens(rows), len(rows.own))
    sizes = heads.channels, heads.value_size, heads.num_values, heads.num_decays
    joined = random(tokens, sum(sizes), dtype=dtype)
    weights = DeltaWeights(
        random(heads.num_values, seed=5),
        random(heads.num_decays, seed=6),
        1 + 0.2 * random(heads.value_dim, seed=7).to(dtype),
        1e-6,
    )
    return DeltaInputs(*joined.split(sizes, 1)), weights


def moved(tensors, device):
    return type(tensors)(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in tensors))


def compare_delta(function, rows, heads, dtype=torch.float32, device="cpu", state_dtype=torch.float32, tolerance=TOLERANCE):
    (inputs, weights), real = delta_case(rows, heads, dtype), int(rows.query_start[-1])
    states = states_of(WRITTEN, 12, heads.num_values, heads.key_dim, heads.value_dim, dtype=state_dtype)
    wanted, found = states.clone(), states.to(device)
    want = delta_reference.gated_delta(inputs, weights, heads, wanted, rows)
    got = function(moved(inputs, device), moved(weights, device), heads, found, on(device, rows)).cpu()
    error = tolerance[dtype if state_dtype == torch.float32 else torch.bfloat16]
    torch.testing.assert_close(got[:real], want[:real], rtol=error, atol=error)
    torch.testing.assert_close(found.cpu(), wanted, rtol=error, atol=error, equal_nan=True)
    if rows.num_decode_rows != 0 and device != "cpu":
        assert not got.isnan().any()  # tokens of no row have zeros


def assert_float16_is_rounded(function, heads, dtype=torch.float32, device="cpu"):
    inputs, weights = (moved(tensors, device) for tensors in delta_case(ROUNDED, heads, dtype))
    sizes = heads.num_values, heads.key_dim, heads.value_dim
    assert_rounded(lambda states, rows: function(inputs, weights, heads, states, rows), sizes, device)


def assert_gated_cut_is_uncut(convolution, dtype=torch.float32, device="cpu", tokens=150, channels=70):
    """As assert_cut_is_uncut, of a convolution with gates alone."""
    uncut = rows_of([], [Row(tokens, 1)])
    (x, window, _), gates, tails = convolution_case(uncut, channels, 3, dtype, False)
    x, window, gates, tails = x.to(device), window.to(device), moved(gates, device), tails.to(device)
    want = convolution(x, window, None, tails, on(device, uncut), gates)[:tokens]
    got = []
    for start, stop, own, first in ((0, 64, 2, 0), (64, 128, 2, 2), (128, tokens, 4, 2)):
        part = slice(start, stop + 1)  # the next row is a stranger's
        rows = on(device, rows_of([], [Row(stop - start, own, first), Row(1, 7)]))
        got.append(convolution(x[part], window, None, tails, rows, Gates(*(gate[part] for gate in gates)))[: stop - start])
    assert torch.equal(torch.cat(got), want) and torch.equal(tails[1], tails[4])


def assert_cut_is_uncut(convolution, delta, heads, dtype=torch.float32, state_dtype=torch.float32, device="cpu", tokens=150):
    """A prompt in one step; and in three, cut at multiples of 64, beside strangers: equal bits of outputs and states."""
    whole_row = rows_of([], [Row(tokens, 1)])
    (inputs, weights), window = delta_case(whole_row, heads, dtype), random(4, heads.channels, dtype=dtype, seed=2)
    inputs, weights, window = moved(inputs, device), moved(weights, device), window.to(device)
    stranger = random(2, heads.channels, dtype=dtype, device=device, seed=4)

    def run(part, rows, tails, states, before=0):
        pieces = [x[part] for x in inputs]
        if before:  # a decode row of another sequence comes first
            pieces = [torch.cat((x[:1], x)) for x in pieces]
            pieces[0][:1] = stranger[:1]
        rows = on(device, rows)
        qkv = convolution(pieces[0], window, None, tails, rows)
        return delta(DeltaInputs(qkv, *pieces[1:]), weights, heads, states, rows)[before : before + part.stop - part.start]

    def memory():
        sizes = (3, heads.channels), (heads.num_values, heads.key_dim, heads.value_dim)
        kinds = dtype, state_dtype
        return [states_of([9], 12, *size, dtype=kind).to(device) for size, kind in zip(sizes, kinds, strict=True)]

    one, three = memory(), memory()
    want = run(slice(0, tokens), whole_row, *one)
    got = [
        run(slice(0, 64), rows_of([9], [Row(64, 2, 0, 3)]), *three, before=1),
        run(slice(64, 128), rows_of([], [Row(64, 2, 3, 0, 64)]), *three),
        run(slice(128, tokens), rows_of([9], [Row(tokens - 128, 4, 2, 0, 128)]), *three, before=1),
    ]
    assert torch.equal(torch.cat(got), want)
    for a, b in zip(one, three, strict=True):
        assert torch.equal(a[1], b[4])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_convolution_on_the_cpu(case, has_bias):
    for is_gated in (False, True):
        more = {"has_bias": has_bias, "is_gated": is_gated}
        compare_convolution(convolution_cpu.causal_convolution, CASES[case], **more)
        compare_convolution(convolution_cpu.causal_convolution, CASES[case], window=3, dtype=torch.bfloat16, **more)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", [*HEADS, *BY_CHANNEL])
def test_delta_on_the_cpu(case, heads):
    compare_delta(delta_cpu.gated_delta, CASES[case], heads)
    compare_delta(delta_cpu.gated_delta, CASES[case], heads, torch.bfloat16)
    for state_dtype in (torch.bfloat16, torch.float16):
        compare_delta(delta_cpu.gated_delta, CASES[case], heads, state_dtype=state_dtype)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_state_that_is_cut_has_the_same_bits_on_the_cpu(state_dtype):
    for heads in (*HEADS, *BY_CHANNEL):
        assert_cut_is_uncut(convolution_cpu.causal_convolution, delta_cpu.gated_delta, heads, state_dtype=state_dtype)
    assert_gated_cut_is_uncut(convolution_cpu.causal_convolution)


@pytest.mark.parametrize("heads", [*HEADS, *BY_CHANNEL])
def test_float16_states_are_rounded_by_chance_on_the_cpu(heads):
    assert_float16_is_rounded(delta_cpu.gated_delta, heads)


@interpreted
@pytest.mark.parametrize("heads", [HEADS[1], BY_CHANNEL[1]])
def test_float16_states_are_rounded_by_chance_interpreted(heads):
    from quire.kernels.recurrent.delta import gated_delta

    assert_float16_is_rounded(gated_delta, heads)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", GPU_HEADS)
def test_float16_states_are_rounded_by_chance_on_a_gpu(heads):
    from quire.kernels.recurrent.delta import gated_delta

    assert_float16_is_rounded(gated_delta, heads, torch.bfloat16, "cuda")


def test_equal_keys_do_not_lose_digits():
    """Keys that are all alike make the triangular system as bad as it gets."""
    rows, heads = rows_of([], [Row(64, 1)]), HEADS[0]
    inputs, weights = delta_case(rows, heads, torch.float32)
    inputs.qkv[:, : 2 * heads.key_size] = inputs.qkv[:1, : 2 * heads.key_size]
    inputs = inputs._replace(b=inputs.b + 6.0, a=inputs.a - 9.0)
    results = []
    for function in (delta_reference.gated_delta, delta_cpu.gated_delta):
        states = states_of([], 2, heads.num_values, heads.key_dim, heads.value_dim)
        results.append((function(inputs, weights, heads, states, rows), states[1]))
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-4)


def compare_extreme_decays(function, heads=BY_CHANNEL[0], device="cpu", tolerance=1e-4):
    """Of channels side by side some forget all at once, and some nothing; one token forgets all, and its neighbors do not."""
    rows = rows_of([], [Row(150, 1, 2)])
    inputs, weights = delta_case(rows, heads, torch.float32)
    weights = weights._replace(a_log=torch.full((heads.num_values,), 3.0), dt_bias=5.0 * weights.dt_bias)
    inputs = inputs._replace(a=4.0 * inputs.a)
    inputs.a[40], inputs.a[90] = 400.0, 60.0
    states = states_of(WRITTEN, 12, heads.num_values, heads.key_dim, heads.value_dim)
    wanted, found = states.clone(), states.to(device)
    want = delta_reference.gated_delta(inputs, weights, heads, wanted, rows)
    got = function(moved(inputs, device), moved(weights, device), heads, found, on(device, rows)).cpu()
    torch.testing.assert_close(got[:150], want[:150], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found.cpu(), wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_strong_decays_neither_overflow_nor_lose_digits():
    compare_extreme_decays(delta_cpu.gated_delta)


@interpreted
def test_strong_decays_neither_overflow_nor_lose_digits_interpreted():
    from quire.kernels.recurrent.delta import gated_delta

    compare_extreme_decays(gated_delta)


@pytest.mark.gpu
def test_strong_decays_neither_overflow_nor_lose_digits_on_a_gpu():
    from quire.kernels.recurrent.delta import gated_delta

    compare_extreme_decays(gated_delta, GPU_HEADS[3], "cuda", ON_GPU[torch.float32])


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_convolution_interpreted(case):
    from quire.kernels.recurrent.convolution import causal_convolution

    compare_convolution(causal_convolution, CASES[case], channels=70, has_bias=case == "mixed")
    compare_convolution(causal_convolution, CASES[case], channels=130, window=3, has_bias=case != "mixed")
    compare_convolution(causal_convolution, CASES[case], channels=70, window=3, has_bias=case == "mixed", is_gated=True)


@interpreted
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", [*HEADS, *BY_CHANNEL])
def test_delta_interpreted(case, heads):
    from quire.kernels.recurrent.delta import gated_delta

    compare_delta(gated_delta, CASES[case], heads)
    if case == "mixed":
        compare_delta(gated_delta, CASES[case], heads, state_dtype=torch.float16)


def compare_blocks(heads, width, dtype=torch.float32, device="cpu", tolerance=TOLERANCE):
    """Decode rows whose programs go through their states by blocks of columns."""
    from quire.kernels.recurrent.delta import Config, gated_delta

    by_blocks = partial(gated_delta, config=Config(width, 4))
    for case in ("mixed", "decode"):
        compare_delta(by_blocks, CASES[case], heads, dtype, device, tolerance=tolerance)
        compare_delta(by_blocks, CASES[case], heads, dtype, device, torch.float16, tolerance)


@interpreted
@pytest.mark.parametrize("heads", [HEADS[0], BY_CHANNEL[0]])
def test_delta_by_blocks_of_columns_interpreted(heads):
    compare_blocks(heads, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", GPU_HEADS)
def test_delta_by_blocks_of_columns_on_a_gpu(heads, dtype):
    compare_blocks(heads, 16, dtype, "cuda", ON_GPU)


@interpreted
@pytest.mark.parametrize(
    ("heads", "state_dtype"),
    [
        (HEADS[1], torch.float32),
        (HEADS[0], torch.bfloat16),
        (HEADS[1], torch.float16),
        (BY_CHANNEL[1], torch.float32),
        pytest.param(BY_CHANNEL[1], torch.float16, marks=pytest.mark.slow),
    ],
)
def test_a_state_that_is_cut_has_the_same_bits_interpreted(heads, state_dtype):
    from quire.kernels.recurrent.convolution import causal_convolution
    from quire.kernels.recurrent.delta import gated_delta

    assert_cut_is_uncut(causal_convolution, gated_delta, heads, state_dtype=state_dtype, tokens=140)


@interpreted
def test_a_gated_convolution_that_is_cut_has_the_same_bits_interpreted():
    from quire.kernels.recurrent.convolution import causal_convolution

    assert_gated_cut_is_uncut(causal_convolution, tokens=140)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_convolution_on_a_gpu(case, dtype):
    from quire.kernels.recurrent.convolution import causal_convolution

    compare_convolution(causal_convolution, CASES[case], 8192, dtype=dtype, device="cuda")
    compare_convolution(causal_convolution, CASES[case], 70, window=3, dtype=dtype, device="cuda", has_bias=True)
    compare_convolution(causal_convolution, CASES[case], 2048, window=3, dtype=dtype, device="cuda", is_gated=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", GPU_HEADS)
def test_delta_on_a_gpu(case, heads, dtype):
    from quire.kernels.recurrent.delta import gated_delta

    compare_delta(gated_delta, CASES[case], heads, dtype, "cuda", tolerance=ON_GPU)
    for state_dtype in (torch.bfloat16, torch.float16):
        compare_delta(gated_delta, CASES[case], heads, dtype, "cuda", state_dtype, ON_GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", GPU_HEADS)
def test_a_state_that_is_cut_has_the_same_bits_on_a_gpu(heads, dtype):
    from quire.kernels.recurrent.convolution import causal_convolution
    from quire.kernels.recurrent.delta import gated_delta

    for state_dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_cut_is_uncut(causal_convolution, gated_delta, heads, dtype, state_dtype, "cuda")
    assert_gated_cut_is_uncut(causal_convolution, dtype, "cuda")
