"""Latent attention: entries, decode and prefill against the reference, and that against attention with keys and values made."""

import pytest
import torch

from quire.kernels.attention import latent_reference

# heads, N, R, L, block size
SHAPES = [(4, 24, 16, 32, 16), (3, 8, 6, 20, 8), (16, 8, 64, 48, 16)]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
SCALE = 0.17


def random(*shape, dtype=torch.float32, device="cpu", seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device, dtype)


def case(shape, lengths, queries, dtype=torch.float32, device="cpu"):
    """(q, cache, block_table, rows, query_start, seq_lens) of rows with so many keys and queries, blocks in any order."""
    heads, _, rotary, latent, size = shape
    blocks = [-(-n // size) for n in lengths]
    table = torch.zeros(len(lengths) + 3, max([*blocks, 1]) + 1, dtype=torch.int32)
    ids, at = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(1)) + 1, 0
    rows = torch.arange(len(lengths)).flip(0).int()  # slots, not in order
    for row, count in enumerate(blocks):
        table[rows[row], :count] = ids[at : at + count].int()
        at += count
    cache = random(sum(blocks) + 1, 1, size, rotary + latent, dtype=dtype, device=device)
    cache[0] = float("nan")  # the null block: nobody's
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    q = random(int(starts[-1]) or 1, heads, rotary + latent, dtype=dtype, device=device, seed=3)
    ints = (table, rows, starts, torch.tensor(lengths).int())
    return q, cache, *(x.to(device) for x in ints)


def test_the_reference_is_attention_with_keys_and_values_made():
    heads, nope, rotary, latent, size = SHAPES[0]
    value, length = 12, 21
    q, entries = random(length, heads, nope + rotary), random(length, rotary + latent, seed=5)
    up = random(heads, nope + value, latent, seed=7)
    k = torch.cat(
        (torch.einsum("hnl,sl->shn", up[:, :nope], entries[:, rotary:]), entries[:, None, :rotary].expand(-1, heads, -1)), -1
    )
    v = torch.einsum("hvl,sl->shv", up[:, nope:], entries[:, rotary:])
    scores = torch.einsum("thd,shd->ths", q, k) * SCALE
    scores.masked_fill_(torch.arange(length) > torch.arange(length)[:, None, None], float("-inf"))
    want = torch.einsum("ths,shv->thv", scores.softmax(-1), v)
    cache = torch.zeros(-(-length // size), 1, size, rotary + latent)
    cache.view(-1, rotary + latent)[:length] = entries
    absorbed = torch.cat((q[..., nope:], torch.einsum("thn,hnl->thl", q[..., :nope], up[:, :nope])), -1)
    table, one = torch.arange(len(cache))[None].int(), torch.tensor([0, length]).int()
    out = latent_reference.latent_attention(absorbed, cache, table, one[:1], one, one[1:], scale=SCALE, latent=latent)
    torch.testing.assert_close(torch.einsum("thl,hvl->thv", out, up[:, nope:]), want, rtol=1e-4, atol=1e-4)


def compare_lines(shape, dtype, device, tokens=5):
    from quire.kernels.attention.latent_rope_kv import latent_rope_kv

    of_torch = latent_reference.latent_rope_kv
    heads, nope, rotary, latent, size = shape
    make = {"dtype": dtype, "device": device}
    qkv = random(tokens, heads * (nope + rotary) + latent + rotary, **make)
    q, kv = qkv[:, : heads * (nope + rotary)].unflatten(1, (heads, -1)), qkv[:, heads * (nope + rotary) :]
    q_latent, weight = random(heads, tokens, latent, **make), random(latent, seed=2, **make)
    cos_sin = random(64, rotary, device=device)
    positions = torch.randint(64, (tokens,), generator=torch.Generator().manual_seed(0)).int().to(device)
    blocks = -(-tokens // size) + 2
    mapping = torch.randperm(blocks * size, generator=torch.Generator().manual_seed(0))[:tokens].to(device)
    mapping[tokens // 2] = -1
    caches = [torch.zeros(blocks, 1, size, rotary + latent, **make) for _ in range(2)]
    tolerance = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    q_scales = 1 + random(64, seed=9, device=device).abs()
    for how in ({"interleaved": True}, {"interleaved": False}, {"interleaved": True, "q_scales": q_scales}):
        arguments = (q, q_latent, kv, weight, 1e-6, cos_sin, positions, mapping)
        got = latent_rope_kv(*arguments, caches[0], **how)
        want = of_torch(*arguments, caches[1], **how)
        torch.testing.assert_close(got, want, **tolerance)
        torch.testing.assert_close(caches[0], caches[1], **tolerance)
    arguments = (q, q_latent, kv, weight, 1e-6, cos_sin[:, :0], positions, mapping)  # without a rotation
    got, want = (f(*arguments, cache, interleaved=False) for f, cache in zip((latent_rope_kv, of_torch), caches, strict=True))
    torch.testing.assert_close(got, want, **tolerance)
    torch.testing.assert_close(got[..., :rotary], q[..., -rotary:], rtol=0, atol=0)
    torch.testing.assert_close(caches[0], caches[1], **tolerance)


def check(got, want, dtype):
    assert torch.isfinite(got).all()
    assert (got - want).abs().max() <= TOLERANCE[dtype] * max(1.0, want.abs().max().item())


def compare_decode(shape, lengths, dtype, device, limit=None, queries=None, **how):
    """With queries, rows have several, and are padded to as many rows as there are tokens."""
    from quire.kernels.attention.latent_decode import latent_decode

    given, most = (queries, max(queries)) if queries else ([1] * len(lengths), 1)
    padding = [0] * (sum(given[:limit]) - len(lengths))
    arguments = case(shape, lengths + padding, given + padding, dtype, device)
    out = torch.zeros(len(arguments[0]), shape[0], shape[3], dtype=dtype, device=device)
    on_device = None if limit is None else torch.tensor([limit], dtype=torch.int32, device=device)
    latent_decode(*arguments, out, scale=SCALE, limit=on_device, max_query_len=most, **how)
    want = latent_reference.latent_attention(*arguments, scale=SCALE, latent=shape[3], **how)
    if limit is not None:
        want[sum(given[:limit]) :] = 0
    check(out, want, dtype)


def compare_prefill(shape, lengths, queries, dtype, device, first=None, **how):
    from quire.kernels.attention.latent_prefill import latent_prefill

    arguments = case(shape, lengths, queries, dtype, device)
    out = torch.zeros(len(arguments[0]), shape[0], shape[3], dtype=dtype, device=device)
    on_device = None if first is None else torch.tensor([first], dtype=torch.int32, device=device)
    latent_prefill(*arguments, out, scale=SCALE, first_row=on_device, **how)
    want = latent_reference.latent_attention(*arguments, scale=SCALE, latent=shape[3], **how)
    if first is not None:
        want[: sum(queries[:first])] = 0
    check(out, want, dtype)


@pytest.mark.interpret
@pytest.mark.parametrize("shape", SHAPES)
def test_lines_in_the_interpreter(shape):
    compare_lines(shape, torch.float32, "cpu")


@pytest.mark.interpret
@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize(("lengths", "limit"), [([1], None), ([70, 1, 0, 33], None), ([20, 17, 40], 2)])
def test_decode_in_the_interpreter(shape, lengths, limit):
    compare_decode(shape, lengths, torch.float32, "cpu", limit)


@pytest.mark.interpret
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("lengths", "queries", "limit"), [([16], [16], None), ([70, 3, 33], [7, 3, 1], None), ([20, 17, 40], [2, 5, 30], 2)]
)
@pytest.mark.parametrize("parts", [1, 8])
def test_decode_of_several_queries_in_the_interpreter(shape, lengths, queries, limit, parts, monkeypatch):
    from quire.kernels.attention import latent_decode

    monkeypatch.setattr(latent_decode, "num_splits", lambda rows, heads: parts)
    compare_decode(shape, lengths, torch.float32, "cpu", limit, queries)


@pytest.mark.interpret
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("lengths", "queries", "first"), [([1], [1], None), ([9, 30, 0], [9, 5, 0], None), ([20, 17, 26], [1, 17, 3], 1)]
)
def test_prefill_in_the_interpreter(shape, lengths, queries, first):
    compare_prefill(shape, lengths, queries, torch.float32, "cpu", first)


@pytest.mark.interpret
@pytest.mark.parametrize("parts", [1, 8])
def test_the_first_key_may_be_hidden_in_the_interpreter(parts, monkeypatch):
    from quire.kernels.attention import latent_decode

    monkeypatch.setattr(latent_decode, "num_splits", lambda rows, heads: parts)
    compare_decode(SHAPES[1], [70, 1, 2, 33], torch.float32, "cpu", hides_first=True)
    compare_decode(SHAPES[1], [70, 3, 33], torch.float32, "cpu", None, [7, 3, 1], hides_first=True)
    compare_prefill(SHAPES[1], [20, 17, 26], [1, 17, 3], torch.float32, "cpu", hides_first=True)


@pytest.mark.interpret
def test_what_does_not_fit_is_refused():
    from quire.kernels.attention.latent_rope_kv import latent_rope_kv

    x, cache = torch.zeros(2, 3, 8), torch.zeros(2, 1, 4, 12)
    ids = torch.zeros(2).long()
    with pytest.raises(ValueError, match="fit"):
        latent_rope_kv(x, torch.zeros(3, 2, 9), torch.zeros(2, 12), torch.zeros(8), 1e-6, torch.zeros(4, 4), ids, ids, cache,
                     interleaved=True)  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- a GPU
LITE, LARGE = (16, 128, 64, 512, 64), (128, 128, 64, 512, 64)
BY_DTYPE = pytest.mark.parametrize("dtype", TOLERANCE)


@pytest.mark.gpu
@BY_DTYPE
@pytest.mark.parametrize("shape", [*SHAPES, LITE, LARGE])
def test_lines(shape, dtype):
    compare_lines(shape, dtype, "cuda", 77)


@pytest.mark.gpu
@BY_DTYPE
@pytest.mark.parametrize("shape", [*SHAPES, LITE, LARGE])
@pytest.mark.parametrize(
    ("lengths", "limit"), [([1], None), ([5000], None), ([70, 1, 0, 333, 1025], 4), ([40 + i for i in range(300)], None)]
)
def test_decode(shape, dtype, lengths, limit):
    compare_decode(shape, lengths, dtype, "cuda", limit)


@pytest.mark.gpu
@BY_DTYPE
@pytest.mark.parametrize("shape", [*SHAPES, LITE, LARGE])
@pytest.mark.parametrize(
    ("lengths", "queries", "limit"),
    [
        ([16], [16], None),
        ([5000], [16], None),
        ([70, 3, 333, 1025], [7, 3, 1, 16], None),
        ([200, 170, 260], [2, 16, 200], 2),
        ([40 + i for i in range(60)], [1 + i % 16 for i in range(60)], None),
    ],
)
def test_decode_of_several_queries(shape, dtype, lengths, queries, limit):
    compare_decode(shape, lengths, dtype, "cuda", limit, queries)


@pytest.mark.gpu
@BY_DTYPE
@pytest.mark.parametrize("shape", [*SHAPES, LITE, LARGE])
@pytest.mark.parametrize(
    ("lengths", "queries", "first"),
    [([130], [130], None), ([9, 30, 0, 700], [9, 5, 0, 650], None), ([200, 170, 260], [1, 170, 3], 1)],
)
def test_prefill(shape, dtype, lengths, queries, first):
    compare_prefill(shape, lengths, queries, dtype, "cuda", first)
