"""Attention over packed rows: the CPU's function and the Triton kernel against the plain reference, that against a mask."""

from itertools import accumulate

import pytest
import torch

from quire.kernels.attention import varlen_cpu, varlen_reference
from quire.kernels.attention.score_shape import ScoreShape
from quire.kernels.attention.varlen_reference import ALL, Reach, row_spans
from quire.workers.models.alibi import alibi_slopes

ROWS = {
    "one": [1],
    "odd": [7, 1, 33, 2],
    "equal": [5, 5, 5],
    "equal but apart": [4, 9, 4],
    "longer than a tile": [70, 3, 40],
    "an empty row": [3, 0, 5],
}
REACHES = {"all": ALL, "causal": Reach(None, 0), "window": Reach(4, 4), "causal window": Reach(5, 0), "ahead": Reach(0, 3)}


def scores(kind: str, heads: int) -> dict[str, object]:
    relative = torch.randn(heads, 2 * 6 + 1, generator=torch.Generator().manual_seed(5))
    return {
        "plain": {},
        "alibi": {"shape": ScoreShape(slopes=torch.tensor(alibi_slopes(heads)))},
        "relative": {"relative": relative},
        "softcap": {"shape": ScoreShape(softcap=3.0)},
        "all": {"shape": ScoreShape(3.0, torch.tensor(alibi_slopes(heads)), 0.5), "relative": relative},
    }[kind]


def packed(lengths: list[int], heads: int = 4, kv_heads: int = 4, head_dim: int = 16, padding: int = 0):
    """q, k, v as views of one product, and the rows' bounds."""
    generator = torch.Generator().manual_seed(sum(lengths))
    tokens = sum(lengths) + padding
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, generator=generator).unflatten(1, (-1, head_dim))
    return (*qkv.split([heads, kv_heads, kv_heads], 1), [0, *accumulate(lengths)])


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


def test_the_oracle_is_torchs_attention_with_a_mask():
    q, k, v, bounds = packed([6, 9], kv_heads=2)
    of_token = torch.tensor([0] * 6 + [1] * 9)
    at = torch.tensor([*range(6), *range(9)])
    seen = (of_token[:, None] == of_token[None]) & ((at[None] - at[:, None]).abs() <= 2)
    parts = (x.transpose(0, 1)[None] for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=seen, enable_gqa=True, scale=0.3)
    close(varlen_reference.varlen_attention(q, k, v, bounds, scale=0.3, reach=Reach(2, 2)), expected[0].transpose(0, 1))


@pytest.mark.parametrize("kind", ["plain", "alibi", "relative", "softcap", "all"])
@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)
@pytest.mark.parametrize("lengths", ROWS.values(), ids=ROWS)
def test_cpu_equals_reference(lengths, reach, kind):
    q, k, v, bounds = packed(lengths, kv_heads=2, padding=3)
    how = {"scale": 0.25, "reach": reach, **scores(kind, 4)}
    got = varlen_cpu.varlen_attention(q, k, v, bounds, **how)
    close(got, varlen_reference.varlen_attention(q, k, v, bounds, **how))
    assert not got[bounds[-1] :].any()


@pytest.mark.parametrize("reach", [ALL, Reach(20, 20), Reach(None, 0)])
def test_cpu_slices_long_rows(reach, monkeypatch):
    monkeypatch.setattr(varlen_cpu, "_QUERY_SLICE", 16)
    q, k, v, bounds = packed([90, 16, 41])
    for kind in ("plain", "all"):
        how = {"scale": 0.25, "reach": reach, **scores(kind, 4)}
        close(varlen_cpu.varlen_attention(q, k, v, bounds, **how), varlen_reference.varlen_attention(q, k, v, bounds, **how))


def test_spans_of_rows_and_padding():
    firsts, ends = row_spans(torch.tensor([0, 2, 2, 5], dtype=torch.int32), 7)
    assert firsts.tolist() == [0, 0, 2, 2, 2, 5, 5] and ends.tolist() == [2, 2, 5, 5, 5, 5, 5]
    assert firsts.dtype == ends.dtype == torch.int32


@pytest.mark.interpret
@pytest.mark.parametrize("kind", ["plain", "alibi", "relative", "all"])
@pytest.mark.parametrize("reach", REACHES.values(), ids=REACHES)
@pytest.mark.parametrize("lengths", [[1], [7, 1, 33, 2], [70, 3, 40], [3, 0, 5]], ids=str)
def test_interpreted_kernel_equals_reference(lengths, reach, kind):
    from quire.kernels.attention import varlen

    q, k, v, bounds = packed(lengths, kv_heads=2, padding=3)
    how = {"scale": 0.25, "reach": reach, **scores(kind, 4)}
    spans = row_spans(torch.tensor(bounds, dtype=torch.int32), len(q))
    close(varlen.varlen_attention(q, k, v, *spans, **how), varlen_reference.varlen_attention(q, k, v, bounds, **how))


def of_seen_keys(q, k, v, bounds, seen, scale):
    """Each row alone, with the keys that it sees: [T, Hq, D]."""
    parts = []
    for begin, end, last in zip(bounds, bounds[1:], seen, strict=False):
        own = (x.transpose(0, 1)[None] for x in (q[begin:end], k[begin:last], v[begin:last]))
        parts.append(torch.nn.functional.scaled_dot_product_attention(*own, scale=scale, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(parts)


LENGTHS, SEEN = [70, 7, 40, 33], [60, 77, 80, 118]  # each row's tokens, and the end of the keys that they see


@pytest.mark.parametrize("reach", [ALL, Reach(100, 100)], ids=["all", "a window wider than the rows"])
def test_cpu_leaves_out_keys_that_are_not_seen(reach):
    q, k, v, bounds = packed(LENGTHS, kv_heads=2)
    got = varlen_cpu.varlen_attention(q, k, v, bounds, scale=0.25, reach=reach, seen=SEEN)
    close(got, of_seen_keys(q, k, v, bounds, SEEN, 0.25))


@pytest.mark.interpret
def test_interpreted_kernel_leaves_out_keys_that_are_not_seen():
    from quire.kernels.attention import varlen

    q, k, v, bounds = packed(LENGTHS, kv_heads=2)
    firsts, _ = row_spans(torch.tensor(bounds, dtype=torch.int32), len(q))
    ends = torch.tensor(SEEN, dtype=torch.int32).repeat_interleave(torch.tensor(LENGTHS))
    close(varlen.varlen_attention(q, k, v, firsts, ends, scale=0.25), of_seen_keys(q, k, v, bounds, SEEN, 0.25))


@pytest.mark.interpret
def test_interpreted_kernel_pads_heads_and_reads_no_other_row():
    from quire.kernels.attention import varlen

    q, k, v, bounds = packed([9, 40], head_dim=24)
    spans = row_spans(torch.tensor(bounds, dtype=torch.int32), len(q))
    expected = varlen_reference.varlen_attention(q, k, v, bounds, scale=0.2)
    k[9:], v[9:] = 1e30, 1e30  # a sum that a weight of zero leaves: only what is masked does not count
    got = varlen.varlen_attention(q, k, v, *spans, scale=0.2)
    close(got[:9], expected[:9])


@pytest.mark.interpret
def test_wrong_tensors_are_refused():
    from quire.kernels.attention import varlen

    q, k, v, bounds = packed([4])
    spans = row_spans(torch.tensor(bounds, dtype=torch.int32), 4)
    for wrong, text in (
        ({"scale": 0.0}, "scale"),
        ({"scale": 1.0, "relative": torch.zeros(4, 4)}, "relative"),
        ({"scale": 1.0, "shape": ScoreShape(sinks=torch.zeros(4))}, "sinks"),
    ):
        with pytest.raises(ValueError, match=text):
            varlen.varlen_attention(q, k, v, *spans, **wrong)
    with pytest.raises(ValueError, match="shapes"):
        varlen.varlen_attention(q, k[:3], v, *spans, scale=1.0)
