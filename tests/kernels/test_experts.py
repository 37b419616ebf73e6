"""Experts' products: the CPU path against a loop over tokens in float64, the kernels against the CPU path."""

import itertools

import pytest
import torch
from experts_cases import CLAMPED, DEEPSEEK, GELU, GPT_OSS, NEMOTRON, QWEN, TOLERANCE, check_dependent_launches

from quire.kernels.experts import experts_reference
from quire.kernels.experts.experts_reference import Gelu, Relu2, SwiGLU, Weights, is_gated
from quire.kernels.tuning.configs import PairConfig, TileConfig, TilesConfig
from quire.kernels.tuning.default import EXPERTS

# rows, hidden, intermediate, experts, top k
SHAPES = [(1, 16, 16, 1, 1), (3, 48, 24, 5, 2), (7, 33, 17, 4, 4), (16, 64, 32, 3, 1), (40, 40, 72, 6, 3)]
TILES = TilesConfig(16, True, TileConfig(16, 32, 4, 2), TileConfig(32, 16, 4, 2))
LARGE = TilesConfig(32, False, TileConfig(32, 16, 4, 2), TileConfig(16, 32, 4, 3))
PAIRS = PairConfig(2, 4, 32, 4)


def operands(shape, dtype=torch.float32, device="cpu", has_bias=False, skewed=False, has_gate=True):
    rows, hidden, inner, num_experts, top_k = shape
    height = (2 if has_gate else 1) * inner
    g = torch.Generator().manual_seed(sum(shape))
    x = torch.randn(rows, hidden + 8, generator=g).to(device, dtype)[:, :hidden]  # rows apart
    sizes = (num_experts, height, hidden), (num_experts, hidden, inner), (num_experts, height), (num_experts, hidden)
    scales = (hidden**-0.5, inner**-0.5, 0.5, 0.5)
    made = [(torch.randn(*s, generator=g) * scale).to(device, dtype) for s, scale in zip(sizes, scales, strict=True)]
    w = Weights(made[0], made[1], *(made[2:] if has_bias else (None, None)))
    ids = torch.stack([torch.randperm(num_experts, generator=g)[:top_k] for _ in range(rows)])
    if skewed:  # everybody wants the same, some experts get nothing
        ids = torch.arange(top_k).expand(rows, -1)
    weights = torch.rand(rows, top_k, generator=g).to(device)
    shared = torch.randn(rows, hidden, generator=g).to(device, dtype)
    return x, w, ids.int().contiguous().to(device), weights, shared


def by_loops(x, w, ids, weights, act, shared):
    x, shared, weights = x.double(), shared.double(), weights.double()
    w = Weights(*(None if t is None else t.double() for t in w))
    rows = []
    for t in range(len(x)):
        total = shared[t].clone()
        for e, weight in zip(ids[t].tolist(), weights[t], strict=True):
            h = w.gate_up[e] @ x[t] + (0 if w.gate_up_bias is None else w.gate_up_bias[e])
            if not is_gated(act):
                y = w.down[e] @ (h.relu().square() if act == Relu2() else torch.nn.functional.gelu(h))
                total += weight * (y + (0 if w.down_bias is None else w.down_bias[e]))
                continue
            gate, up = h.chunk(2)
            if act.limit:
                gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
            inner = (
                gate * torch.sigmoid(act.alpha * gate) if act != GELU else torch.nn.functional.gelu(gate, approximate="tanh")
            )
            y = w.down[e] @ (inner * (up + act.offset))
            total += weight * (y + (0 if w.down_bias is None else w.down_bias[e]))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("act", [SwiGLU(), CLAMPED, GELU, Relu2(), Gelu()])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_cpu_path_is_the_formula(shape, act):
    x, w, ids, weights, shared = operands(shape, has_bias=shape[0] % 2 == 1, has_gate=is_gated(act))
    got = experts_reference.experts(x, w, ids, weights, act, shared)
    torch.testing.assert_close(got.double(), by_loops(x, w, ids, weights, act, shared), rtol=1e-5, atol=1e-5)
    alone = experts_reference.experts(x, w, ids, weights, act)
    torch.testing.assert_close(alone + shared, got, rtol=1e-5, atol=1e-5)


def compare(shape, dtype, device, config, act=None, **options):
    from quire.kernels.experts import experts

    x, w, ids, weights, shared = operands(shape, dtype, device, has_gate=act is None or is_gated(act), **options)
    act = act or (CLAMPED if shape[0] % 2 else GELU if shape[0] == SHAPES[-1][0] else SwiGLU())
    for add in (None, shared):
        got = experts.experts(x, w, ids, weights, act, add, config=config)
        want = experts_reference.experts(x, w, ids, weights, act, add)
        assert got.dtype == dtype
        assert (got - want).abs().max() <= TOLERANCE[dtype] * max(1.0, want.abs().max().item())


@pytest.mark.interpret
@pytest.mark.parametrize("config", [TILES, LARGE, None])
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_in_the_interpreter(shape, config):
    compare(shape, torch.float32, "cpu", config, has_bias=shape[0] % 2 == 1)


@pytest.mark.interpret
@pytest.mark.parametrize("shape", [*SHAPES[:2], (3, 20, 9, 4, 4)])
def test_pairs_in_the_interpreter(shape):
    compare(shape, torch.float32, "cpu", PAIRS, has_bias=shape[0] % 2 == 1)


@pytest.mark.interpret
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("shape", "config"), [*((shape, TILES) for shape in SHAPES), (SHAPES[1], PAIRS), (SHAPES[2], PAIRS)])
def test_experts_without_a_gate_in_the_interpreter(shape, config, has_bias):
    compare(shape, torch.float32, "cpu", config, Gelu() if shape[0] == 3 else Relu2(), has_bias=has_bias)


@pytest.mark.interpret
@pytest.mark.parametrize("config", [TILES, PAIRS])
def test_experts_that_nobody_wants_in_the_interpreter(config):
    compare((5, 32, 16, 7, 2), torch.float32, "cpu", config, skewed=True)


@pytest.mark.interpret
@pytest.mark.parametrize("config", [TILES, LARGE, PAIRS])
@pytest.mark.parametrize("shape", [(5, 32, 16, 7, 3), (1, 16, 16, 4, 2), (16, 24, 20, 5, 1), (3, 16, 16, 2, 2)])
def test_some_of_the_experts_in_the_interpreter(shape, config):
    assert_parts_add_up(shape, torch.float32, "cpu", config)


def held(w, ids, first, stop):
    """What a rank has that these experts were assigned to, and its ids."""
    own = Weights(*(None if t is None else t[first:stop] for t in w))
    return own, torch.where((ids >= first) & (ids < stop), ids - first, stop - first).int()


def assert_parts_add_up(shape, dtype, device, config):
    """Experts distributed over two ranks, one of which may have none that are wanted; what others have is never looked at."""
    from quire.kernels.experts import experts

    x, w, ids, weights, shared = operands(shape, dtype, device, has_bias=shape[0] % 2 == 1)
    want, num_experts = experts_reference.experts(x, w, ids, weights, CLAMPED, shared), shape[3]
    for middle in sorted({1, num_experts // 2, num_experts - 1}):
        total = torch.zeros_like(want, dtype=torch.float32)
        for first, stop, add in ((0, middle, shared), (middle, num_experts, None)):
            own, own_ids = held(w, ids, first, stop)
            reference = experts_reference.experts(x, own, own_ids, weights, CLAMPED, add, num_routed=num_experts)
            got = experts.experts(x, own, own_ids, weights, CLAMPED, add, num_routed=num_experts, config=config)
            assert (got - reference).abs().max() <= TOLERANCE[dtype] * max(1.0, reference.abs().max().item())
            total += got
        assert (total - want).abs().max() <= 2 * TOLERANCE[dtype] * max(1.0, want.abs().max().item())


@pytest.mark.interpret
def test_a_row_in_a_batch_equals_the_row_alone_in_the_interpreter():
    assert_rows_are_independent("cpu", (12, 32, 16, 5, 2))


def assert_rows_are_independent(device, shape):
    from quire.kernels.experts import experts

    x, w, ids, weights, _ = operands(shape, torch.float32, device)
    batch = experts.experts(x, w, ids, weights, SwiGLU())
    for t in range(len(x)):
        one = slice(t, t + 1)
        assert torch.equal(experts.experts(x[one], w, ids[one], weights[one], SwiGLU())[0], batch[t])


@pytest.mark.interpret
@pytest.mark.parametrize("tile", [16, 32])
@pytest.mark.parametrize(("rows", "top_k", "num_experts"), [(1, 1, 1), (1, 4, 8), (33, 2, 3), (300, 4, 60), (17, 8, 8)])
def test_alignment_in_the_interpreter(rows, top_k, num_experts, tile):
    assert_aligned("cpu", rows, top_k, num_experts, tile)


def assert_aligned(device, rows, top_k, num_experts, tile):
    from quire.kernels.experts.align import align

    g = torch.Generator().manual_seed(rows)
    ids = torch.randint(num_experts, (rows, top_k), generator=g).int()
    order, tiles = (x.cpu() for x in align(ids.to(device), num_experts, tile))
    assert torch.equal(order, experts_reference.align(ids))
    flat, places = ids.flatten()[order.long()], []
    for expert, begin, size in tiles.T.tolist():
        assert size <= tile and 0 <= expert < num_experts
        own = range(begin, begin + max(size, 0))
        places += own
        assert all(flat[p] == expert for p in own)
    assert sorted(places) == list(range(rows * top_k))  # every pair is in one tile


@pytest.mark.interpret
def test_what_does_not_fit_is_refused():
    from quire.kernels.experts import experts

    x, w, ids, weights, _ = operands((3, 16, 16, 4, 2))
    with pytest.raises(ValueError, match="fit"):
        experts.experts(x[:, :8], w, ids, weights, SwiGLU())
    with pytest.raises(ValueError, match="dtype"):
        experts.experts(x.half(), w, ids, weights, SwiGLU())
    with pytest.raises(ValueError, match="contiguous"):
        experts.experts(x, w._replace(down=w.down.transpose(1, 2).contiguous().transpose(1, 2)), ids, weights, SwiGLU())
    many = operands((17, 16, 16, 4, 2))
    with pytest.raises(ValueError, match="too many"):
        experts.experts(*many[:4], SwiGLU(), config=PAIRS)
    assert experts.experts(x[:0], w, ids[:0], weights[:0], SwiGLU()).shape == (0, 16)


# -------------------------------------------------------------------------------------------------------------- a GPU
REAL = [(5, *QWEN), (64, *QWEN), (300, *QWEN), (33, *GPT_OSS), (70, *DEEPSEEK)]
ALL_TILES = [config for _, config in EXPERTS.tiles]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [*SHAPES, *REAL])
def test_experts(shape, dtype):
    compare(shape, dtype, "cuda", None, has_bias=shape[0] % 2 == 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("act", [Relu2(), Gelu()])
@pytest.mark.parametrize("shape", [*SHAPES, *((rows, *NEMOTRON) for rows in (1, 2, 16, 64, 600))])
def test_experts_without_a_gate(shape, act, dtype):
    """This holds for many rows on a Hopper, too, where the kernel knows Relu2 alone."""
    compare(shape, dtype, "cuda", None, act)


@pytest.mark.gpu
@pytest.mark.parametrize("config", ALL_TILES, ids=lambda config: f"{config.rows} rows")
@pytest.mark.parametrize("shape", [*SHAPES, *REAL, (1000, 512, 256, 8, 2)])
def test_every_tile(shape, config):
    compare(shape, torch.bfloat16, "cuda", config, has_bias=shape[0] % 2 == 1, skewed=shape[0] == 70)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES[:4], *((rows, *QWEN) for rows in (1, 2, 16)), (1, *GPT_OSS)])
def test_pairs(shape, dtype):
    compare(shape, dtype, "cuda", EXPERTS.pair, has_bias=shape[0] % 2 == 1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "config"), [(1, EXPERTS.pair), (16, EXPERTS.pair), (64, None), (777, None)])
def test_some_of_the_experts(rows, config, dtype):
    assert_parts_add_up((rows, *QWEN), dtype, "cuda", config)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [16, 128])
@pytest.mark.parametrize(
    ("rows", "top_k", "num_experts"), [(1, 8, 128), (64, 8, 128), (512, 8, 256), (777, 6, 64), (8192, 8, 128), (4096, 2, 8)]
)
def test_alignment(rows, top_k, num_experts, tile):
    assert_aligned("cuda", rows, top_k, num_experts, tile)


@pytest.mark.gpu
def test_a_row_in_a_batch_equals_the_row_alone():
    assert_rows_are_independent("cuda", (100, 256, 96, 16, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_dependent_launches_and_graphs_change_nothing(rows):
    from quire.kernels.elementwise.norm import rms_norm
    from quire.kernels.experts import experts

    x, w, ids, weights, shared = operands((rows, *QWEN), torch.bfloat16, "cuda")
    x = x.contiguous()

    ones = torch.ones(x.shape[1], dtype=x.dtype, device="cuda")

    def chain(pdl):
        y = x
        for _ in range(10):
            y = rms_norm(experts.experts(y, w, ids, weights, SwiGLU(), shared, pdl=pdl), ones, 1e-6, pdl=pdl)
        return y

    check_dependent_launches(chain, early=rows == 1)


@pytest.mark.gpu
def test_a_captured_graph_follows_the_ids_on_the_device():
    from quire.kernels.experts import experts

    for rows, some in ((48, 0), (48, 64), (4, 64)):
        x, w, ids, weights, _ = operands((rows, *QWEN), torch.bfloat16, "cuda")
        if some:  # every second one is another rank's
            w, ids = Weights(w.gate_up[:some], w.down[:some]), ids.clamp(max=some)
        options = {"num_routed": 128 if some else 0}
        experts.experts(x, w, ids, weights, SwiGLU(), **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = experts.experts(x, w, ids, weights, SwiGLU(), **options)
        for step in range(3):
            now = (ids + 31 * step) % 128 if step < 2 else torch.arange(8, device="cuda").expand(rows, -1)
            ids.copy_(now.clamp(max=some) if some else now)
            graph.replay()
            assert torch.equal(captured, experts.experts(x, w, ids, weights, SwiGLU(), **options))


@pytest.mark.gpu
def test_a_shape_beyond_32_bits():
    """Offsets into the weights of 128 experts of a large model are beyond 2^31 elements."""
    rows, hidden, inner, num_experts, top_k = 3, 4096, 2048, 160, 2
    g = torch.Generator("cuda").manual_seed(0)
    w = Weights(
        torch.empty(num_experts, 2 * inner, hidden, dtype=torch.bfloat16, device="cuda").normal_(0, hidden**-0.5, generator=g),
        torch.empty(num_experts, hidden, inner, dtype=torch.bfloat16, device="cuda").normal_(0, inner**-0.5, generator=g),
    )
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    ids = torch.tensor([[0, 159], [158, 3], [131, 159]], dtype=torch.int32, device="cuda")
    weights = torch.full((rows, top_k), 0.5, device="cuda")
    from quire.kernels.experts import experts

    want = experts_reference.experts(x, w, ids, weights, SwiGLU())
    for config in (EXPERTS.pair, ALL_TILES[0]):
        torch.testing.assert_close(experts.experts(x, w, ids, weights, SwiGLU(), config=config), want, rtol=2e-2, atol=2e-2)


def test_the_table_has_a_configuration_for_every_number_of_rows():
    from quire.kernels.experts.experts import choose

    for rows, (top_k, num_experts) in itertools.product((1, 2, 16, 64, 256, 2048, 8192), ((8, 128), (4, 32), (2, 8), (8, 256))):
        assert isinstance(choose(rows, top_k, num_experts), PairConfig if rows <= EXPERTS.pair_rows else TilesConfig)
        assert choose(rows, top_k, num_experts, 4) == EXPERTS.exact
