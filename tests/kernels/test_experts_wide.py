"""Experts of 16 and of 4 bits for many rows on Hopper: what their source says on the CPU, on a GPU against the reference."""

import pytest
import torch
from experts_cases import CLAMPED, DEEPSEEK, GELU, GPT_OSS, QWEN, TOLERANCE, made

from quire.kernels.experts import experts_reference
from quire.kernels.experts.experts_reference import Gelu, Relu2, SwiGLU, Weights, is_gated
from quire.kernels.tuning.configs import TilesConfig, WideConfig, WideTile
from quire.kernels.tuning.default import EXPERTS

pytest.importorskip("triton")

from gluon_emulator import Emulator, tensor

from quire.kernels.experts import four_bits_wide, wide
from quire.kernels.experts.four_bits_weight import FourBitWeights
from quire.kernels.experts.grouped import Work

BF16 = torch.bfloat16


def bits(x):
    return torch.as_tensor(x).to(torch.int32).view(torch.int16).unflatten(-1, (-1, 2))


def pairs_of(halves):
    return tensor(halves.contiguous().view(torch.int32).squeeze(-1))


def times(pairs, factors):
    return pairs_of((bits(pairs).view(BF16) * bits(factors)[:, None].view(BF16)).view(torch.int16))


def less_zeros(words, magic, zero, t, dtype, has_zeros):
    q = (torch.as_tensor(words)[..., None] >> torch.tensor([4 * t, 4 * t + 16])) & 15
    z = torch.as_tensor(zero).to(torch.int32)[:, None, None] if has_zeros else 8
    return pairs_of((q - z).to(torch.as_tensor(dtype_of(dtype)).dtype).view(torch.int16))


def dtype_of(dtype):
    return torch.empty(0, dtype=getattr(dtype, "torch", dtype))


def halves(pairs, dtype):
    low, high = bits(pairs).view(dtype_of(dtype).dtype).unbind(-1)
    return tensor(low), tensor(high)


def scaled(pairs, scale, dtype):
    low, high = halves(pairs, dtype)
    factor = torch.as_tensor(scale).float()[:, None]
    return tensor((low.float() * factor).to(low.dtype)), tensor((high.float() * factor).to(low.dtype))


ASSEMBLY = {"_times": times, "less_zeros": less_zeros, "halves": halves, "scaled": scaled, "_prefetch": lambda at: None}


@pytest.fixture
def emulated(monkeypatch):
    for module in (four_bits_wide, wide):
        monkeypatch.setattr(module, "_kernel", Emulator(module._kernel, ASSEMBLY))


def work_of(ids, num_experts, tile):
    """What `grouped` makes on the device; `order` behind the last pair of these experts' points nowhere."""
    flat = ids.flatten()
    order, counts = experts_reference.align(ids), torch.bincount(flat, minlength=num_experts + 1)[:num_experts]
    live, first = [], 0
    for expert, count in enumerate(counts.tolist()):
        live += [(expert, first + at, min(tile, count - at)) for at in range(0, count, tile)]
        first += count
    slots = flat.numel() // tile + num_experts
    places = torch.zeros(4, slots, dtype=torch.int32)
    places[0] = num_experts - 1
    if live:
        places[:3, : len(live)] = torch.tensor(live, dtype=torch.int32).T
    places[3, 0] = len(live)
    order[first:] = 2**30
    return Work(places, order, tile)


def check(module, w, plain, rows, top_k, config, act, dtype=BF16, skewed=False, are_some=False):
    num_experts, hidden, _ = plain.down.shape
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, hidden, generator=g).to(dtype)
    ids = torch.stack([torch.randperm(num_experts + are_some, generator=g)[:top_k] for _ in range(rows)]).int()
    if skewed:
        ids = torch.arange(top_k, dtype=torch.int32).expand(rows, -1).contiguous()
    weights = torch.rand(rows, top_k, generator=g)
    work = work_of(ids, num_experts, config.rows)
    ours = int((ids < num_experts).sum())
    gathered = torch.full((rows * top_k, hidden), torch.nan, dtype=dtype)
    gathered[:ours] = x[(work.order[:ours] // top_k).long()]  # what is behind is never in a result
    h = module.gate_up(gathered, w, act, work, config)
    assert h[:ours].isfinite().all()
    h[ours:] = torch.nan
    y = module.down(h, w, weights, work, config)
    y = torch.where((ids < num_experts).flatten()[:, None], y, 0).unflatten(0, (rows, top_k))
    want = experts_reference.experts(x, plain, ids, weights, act, num_routed=num_experts + are_some)
    assert (y.float().sum(1) - want.float()).abs().max() <= 3e-2 * max(1.0, want.abs().max().item())


def weights16(num_experts, hidden, inner, dtype=BF16, has_bias=False, act=CLAMPED):
    g, up = torch.Generator().manual_seed(hidden), 2 * inner if is_gated(act) else inner
    sizes = (num_experts, up, hidden), (num_experts, hidden, inner), (num_experts, up), (num_experts, hidden)
    scales = (hidden**-0.5, inner**-0.5, 0.5, 0.5)
    made = [(torch.randn(*s, generator=g) * scale).to(dtype) for s, scale in zip(sizes, scales, strict=True)]
    return Weights(*made[: 4 if has_bias else 2])


# rows of a tile, then stripes, blocks and sharing of both products
CONFIGS = [WideConfig(16, WideTile(2, 1, 2), WideTile(1, 1, 2)), WideConfig(32, WideTile(2, 2, 1), WideTile(2, 2, 1)),
           WideConfig(128, WideTile(2, 1, 1), WideTile(2, 1, 1))]  # fmt: skip


@pytest.mark.parametrize(
    "shape,act,options",
    [
        ((3, 48, 24, 5, 2), SwiGLU(), {}),
        ((70, 200, 136, 3, 2), CLAMPED, {"has_bias": True}),
        ((40, 96, 72, 6, 3), GELU, {"skewed": True}),
        ((20, 64, 320, 3, 3), SwiGLU(), {"are_some": True}),
        ((40, 96, 328, 6, 3), Relu2(), {"has_bias": True}),
    ],
)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{config.rows} rows")
def test_sixteen_bits_as_the_source_says(emulated, config, shape, act, options):
    rows, hidden, inner, num_experts, top_k = shape
    w = weights16(num_experts, hidden, inner, has_bias=options.pop("has_bias", False), act=act)
    check(wide, w, w, rows, top_k, config, act, **options)


@pytest.mark.parametrize("form", ["mx", 32, 64, 128])
@pytest.mark.parametrize("config", [CONFIGS[0], *CONFIGS[1:]], ids=lambda config: f"{config.rows} rows")
def test_four_bits_as_the_source_says(emulated, config, form):
    g = torch.Generator().manual_seed(7)
    num_experts, hidden, inner, rows, top_k = 4, 160, 96, 40, 3
    gate_up, gate_up_values = made(form, (num_experts, 2 * inner, hidden), g)
    down, down_values = made(form, (num_experts, hidden, inner), g)
    biases = [(torch.randn(num_experts, n, generator=g) / 2).to(BF16) for n in (2 * inner, hidden)]
    w = FourBitWeights(gate_up, down, *biases)
    plain = Weights(gate_up_values.to(BF16), down_values.to(BF16), *biases)
    check(four_bits_wide, w, plain, rows, top_k, config, CLAMPED, skewed=form == 32)


@pytest.mark.parametrize("form", ["mx", 64])
@pytest.mark.parametrize("config", CONFIGS[:2], ids=lambda config: f"{config.rows} rows")
def test_four_bits_without_a_gate_as_the_source_says(emulated, config, form):
    g = torch.Generator().manual_seed(8)
    num_experts, hidden, inner, rows, top_k = 4, 160, 224, 40, 3
    pairs = [made(form, (num_experts, *size), g) for size in ((inner, hidden), (hidden, inner))]
    biases = [(torch.randn(num_experts, n, generator=g) / 2).to(BF16) for n in (inner, hidden)]
    w = FourBitWeights(*(packed for packed, _ in pairs), *biases)
    check(four_bits_wide, w, Weights(*(values.to(BF16) for _, values in pairs), *biases), rows, top_k, config, Relu2())


def test_the_list_and_the_rows_are_no_longer_than_shapes_say():
    work = work_of(torch.tensor([[0, 3], [3, 1], [4, 4]], dtype=torch.int32), 4, 2)
    assert work.num_slots == 6 // 2 + 4 and work.places[3, 0] == 3


def test_the_table_chooses_by_rows_an_expert_gets(monkeypatch):
    from quire.kernels.experts import experts, four_bits, grouped

    assert experts.choose_wide(EXPERTS.pair_rows, 8, 128) is None and four_bits.choose_wide(four_bits.PAIR_ROWS, 4, 32) is None
    for rules in (EXPERTS.wide, EXPERTS.wide_four_bits):
        limits = [limit for limit, _ in rules]
        assert limits == sorted(limits)
        for limit, config in rules:
            assert grouped.rule(rules, limit) == config
    assert grouped.rule((), 1.0) is None and grouped.rule(((2.0, None),), 1.0) is None
    x, w = torch.empty(8, 64, dtype=BF16), torch.empty(2, 16, 64, dtype=BF16)
    assert not grouped.supports(x, w, w, (BF16,), 64)  # no Hopper
    monkeypatch.setattr(grouped.hopper, "available", lambda device: True)
    assert grouped.supports(x, w, w, (BF16,), 64)
    assert not grouped.supports(x, w, w, (BF16,), 60) and not grouped.supports(x.float(), w, w, (BF16,), 64)
    assert not grouped.supports(x, w.mT, w, (BF16,), 64)
    w = Weights(torch.empty(2, 16, 64, dtype=BF16), torch.empty(2, 64, 16, dtype=BF16))
    many = torch.empty(600, 64, dtype=BF16)
    found = [type(experts.configuration(many, w, act, 2, 2)) for act in (Relu2(), Gelu())]
    assert found == [WideConfig, TilesConfig]  # the kernel for many rows knows no exact GELU


# -------------------------------------------------------------------------------------------------------------- a GPU
SHAPES = [(3, 48, 24, 5, 2), (70, 200, 136, 3, 2), (40, 96, 72, 6, 3), (300, 64, 320, 7, 3)]
REAL = [(64, *QWEN), (300, *QWEN), (33, *GPT_OSS), (70, *DEEPSEEK), (1500, 720, 360, 8, 2)]
WIDE_CONFIGS = [config for _, config in EXPERTS.wide if config]
FOUR_BITS_CONFIGS = [config for _, config in EXPERTS.wide_four_bits if config]


def on_the_gpu(shape, w, plain, dtype, config, pdl, skewed=False, some=0, act=None):
    from quire.kernels.experts import experts

    rows, hidden, _, num_experts, top_k = shape
    g = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(rows, hidden + 8, generator=g).to("cuda", dtype)[:, :hidden]
    ids = torch.stack([torch.randperm(num_experts, generator=g)[:top_k] for _ in range(rows)]).int().cuda()
    if skewed:
        ids = torch.arange(top_k, dtype=torch.int32, device="cuda").expand(rows, -1).contiguous()
    ids, options = (ids.clamp(max=some), {"num_routed": num_experts}) if some else (ids, {})
    weights, shared = torch.rand(rows, top_k, generator=g).cuda(), torch.randn(rows, hidden, generator=g).to("cuda", dtype)
    act = act or (CLAMPED if rows % 2 else GELU if rows == 40 else SwiGLU())
    want = experts_reference.experts(x, plain, ids, weights, act, shared, **options)
    for _ in range(2):
        got = experts.experts(x, w, ids, weights, act, shared, config=config, pdl=pdl, **options)
        assert (got - want).abs().max() <= TOLERANCE[dtype] * max(1.0, want.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [0, 1])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("config", WIDE_CONFIGS, ids=lambda config: f"{config.rows} rows")
@pytest.mark.parametrize("shape", [*SHAPES, *REAL])
def test_sixteen_bits(shape, config, dtype, pdl):
    _, hidden, inner, num_experts, _ = shape
    made_here = weights16(num_experts, hidden, inner, dtype, has_bias=shape[0] % 2 == 1)
    w = Weights(*(each.cuda() for each in made_here if each is not None))
    on_the_gpu(shape, w, w, dtype, config, pdl, skewed=shape[0] == 300)
    some = num_experts // 2
    part = Weights(*(None if each is None else each[:some].contiguous() for each in w))
    on_the_gpu(shape, part, part, dtype, config, pdl, some=some)


@pytest.mark.gpu
@pytest.mark.parametrize("config", WIDE_CONFIGS, ids=lambda config: f"{config.rows} rows")
@pytest.mark.parametrize("shape", [(40, 96, 72, 6, 3), (300, 2688, 1856, 128, 6)])
def test_sixteen_bits_without_a_gate(shape, config):
    _, hidden, inner, num_experts, _ = shape
    w = Weights(*(each.cuda() for each in weights16(num_experts, hidden, inner, act=Relu2())[:2]))
    on_the_gpu(shape, w, w, BF16, config, 1, act=Relu2())


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["mx", 32, 64, 128, 0])
@pytest.mark.parametrize("config", FOUR_BITS_CONFIGS, ids=lambda config: f"{config.rows} rows")
@pytest.mark.parametrize("shape", [(40, 96, 160, 6, 3), (300, 416, 288, 7, 3), (129, 736, 2880, 4, 2)])
def test_four_bits(shape, config, form):
    _, hidden, inner, num_experts, _ = shape
    g = torch.Generator().manual_seed(5)
    gate_up, gate_up_values = made(form, (num_experts, 2 * inner, hidden), g, "cuda")
    down, down_values = made(form, (num_experts, hidden, inner), g, "cuda")
    biases = [(torch.randn(num_experts, n, generator=g) / 2).to("cuda", BF16) for n in (2 * inner, hidden)]
    plain = Weights(gate_up_values.to("cuda", BF16), down_values.to("cuda", BF16), *biases)
    for pdl in (0, 1):
        on_the_gpu(shape, FourBitWeights(gate_up, down, *biases), plain, BF16, config, pdl, skewed=shape[0] == 300)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [WIDE_CONFIGS[0], WIDE_CONFIGS[-1]], ids=lambda config: f"{config.rows} rows")
def test_a_captured_graph_follows_the_ids(config):
    from quire.kernels.experts import experts

    w = Weights(*(each.cuda() for each in weights16(128, 2048, 768)[:2]))
    x, weights = torch.randn(48, 2048, device="cuda", dtype=BF16), torch.rand(48, 8, device="cuda")
    ids = torch.rand(48, 128, device="cuda").topk(8, 1).indices.int()
    experts.experts(x, w, ids, weights, SwiGLU(), config=config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = experts.experts(x, w, ids, weights, SwiGLU(), config=config)
    for step in range(3):
        ids.copy_((ids + 31 * step) % 128 if step < 2 else torch.arange(8, device="cuda").expand(48, -1))
        graph.replay()
        assert torch.equal(captured, experts.experts(x, w, ids, weights, SwiGLU(), config=config))
