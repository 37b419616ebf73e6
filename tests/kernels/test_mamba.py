"""Mamba 2's kernels against the reference, and a state that was cut against one that was not; as test_recurrent.py."""

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

from quire.kernels.recurrent import mamba_cpu, mamba_reference
from quire.kernels.recurrent.mamba_reference import MambaHeads, MambaInputs, MambaWeights

HEADS = [MambaHeads(2, 4, 16, 8), MambaHeads(1, 3, 20, 12), MambaHeads(3, 3, 8, 40)]
GPU_HEADS = [MambaHeads(8, 64, 128, 64), MambaHeads(1, 6, 96, 80), MambaHeads(3, 3, 24, 40)]
NORMS = {
    "groups": {},
    "first": {"norms_first": True},
    "none": {"norm": None},
    "no gate": {"has_gate": False},
    "clamped": {"dt_min": 0.5, "dt_max": 1.5},
}


def case(rows, heads, dtype, device="cpu", *, has_gate=True, **changes):
    tokens, sizes = max(num_tokens(rows), len(rows.own)), (heads.size, heads.channels, heads.num_heads)
    z, xbc, dt = random(tokens, sum(sizes), dtype=dtype, device=device).split(sizes, 1)
    numbers = (random(heads.num_heads, seed=seed, device=device) for seed in (5, 6, 7))
    norm = 1 + 0.2 * random(heads.size, seed=8, dtype=dtype, device=device)
    weights = MambaWeights(*numbers, norm, 1e-5, heads.size // heads.num_groups)
    return MambaInputs(xbc, z if has_gate else None, dt), weights._replace(**changes)


def compare(
    function, rows, heads, dtype=torch.float32, device="cpu", state_dtype=torch.float32, tolerance=TOLERANCE, **changes
):
    states = states_of(WRITTEN, 12, heads.num_heads, heads.state_size, heads.head_dim, dtype=state_dtype)
    wanted, found, real = states.clone(), states.to(device), int(rows.query_start[-1])
    want = mamba_reference.mamba(*case(rows, heads, dtype, **changes), heads, wanted, rows)
    got = function(*case(rows, heads, dtype, device, **changes), heads, found, on(device, rows)).cpu()
    error = 5 * tolerance[dtype if state_dtype == torch.float32 else torch.bfloat16]
    torch.testing.assert_close(got[:real], want[:real], rtol=error, atol=error)
    torch.testing.assert_close(found.cpu(), wanted, rtol=error, atol=error, equal_nan=True)


def assert_cut_is_uncut(function, heads, dtype=torch.float32, state_dtype=torch.float32, device="cpu", tokens=150):
    inputs, weights = case(rows_of([], [Row(tokens, 1)]), heads, dtype, device)

    def run(part, states, row):
        pieces = MambaInputs(*(x[part] for x in inputs))
        return function(pieces, weights, heads, states, on(device, rows_of([], [row])))

    sizes = heads.num_heads, heads.state_size, heads.head_dim
    one, three = (states_of([], 5, *sizes, dtype=state_dtype).to(device) for _ in range(2))
    want = run(slice(0, tokens), one, Row(tokens, 1))
    parts = (slice(0, 64), Row(64, 2, 0, 3)), (slice(64, 128), Row(64, 2, 3, 0, 64))
    parts += ((slice(128, tokens), Row(tokens - 128, 4, 2, 0, 128)),)
    got = [run(part, three, row)[: part.stop - part.start] for part, row in parts]
    assert torch.equal(torch.cat(got), want[:tokens])
    assert torch.equal(one[1], three[4])


def assert_float16_is_rounded(function, heads, dtype=torch.float32, device="cpu"):
    inputs, weights = case(ROUNDED, heads, dtype, device)
    sizes = heads.num_heads, heads.state_size, heads.head_dim
    assert_rounded(lambda states, rows: function(inputs, weights, heads, states, rows), sizes, device)


def test_float16_states_are_rounded_by_chance_on_the_cpu():
    for heads in HEADS:
        assert_float16_is_rounded(mamba_cpu.mamba, heads)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", CASES)
def test_mamba_on_the_cpu(name, norm):
    for heads in HEADS:
        compare(mamba_cpu.mamba, CASES[name], heads, **NORMS[norm])
    compare(mamba_cpu.mamba, CASES[name], HEADS[0], torch.bfloat16, **NORMS[norm])
    for state_dtype in (torch.bfloat16, torch.float16):
        compare(mamba_cpu.mamba, CASES[name], HEADS[0], state_dtype=state_dtype, **NORMS[norm])


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_state_that_is_cut_has_the_same_bits_on_the_cpu(state_dtype):
    for heads in HEADS:
        assert_cut_is_uncut(mamba_cpu.mamba, heads, state_dtype=state_dtype)


@interpreted
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", CASES)
def test_mamba_interpreted(name, norm):
    from quire.kernels.recurrent.mamba import mamba

    for heads in HEADS:
        compare(mamba, CASES[name], heads, **NORMS[norm])


@interpreted
def test_a_state_that_is_cut_has_the_same_bits_interpreted():
    from quire.kernels.recurrent.mamba import mamba

    assert_cut_is_uncut(mamba, HEADS[1])
    for state_dtype in (torch.bfloat16, torch.float16):
        assert_cut_is_uncut(mamba, HEADS[0], state_dtype=state_dtype)
    assert_float16_is_rounded(mamba, HEADS[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", GPU_HEADS)
def test_mamba_on_a_gpu(heads, dtype):
    from quire.kernels.recurrent.mamba import mamba

    for rows in CASES.values():
        compare(mamba, rows, heads, dtype, "cuda", tolerance=ON_GPU)
        for state_dtype in (torch.bfloat16, torch.float16):
            compare(mamba, rows, heads, dtype, "cuda", state_dtype, ON_GPU)
    assert_float16_is_rounded(mamba, heads, dtype, "cuda")
    for state_dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_cut_is_uncut(mamba, heads, dtype, state_dtype, "cuda")
