"""A block's products behind attention in one launch (`scaled_block`): the kernel's source on the CPU (`gluon_emulator`), and
on a GPU against the kernels that do the same one after the other.
"""

import threading

import pytest
import torch
from deadlines import DEADLINE_S
from gluon_emulator import Emulator, copy, tensor

triton = pytest.importorskip("triton")

from quire.kernels.elementwise.norm_reference import rms_norm  # noqa: E402
from quire.kernels.linear import fp8, int8, quantize  # noqa: E402
from quire.kernels.linear.quantize import LARGEST, quantize_reference  # noqa: E402
from quire.kernels.linear.scaled import BLOCK, Scaled  # noqa: E402
from quire.kernels.persistent import plan, scaled_block  # noqa: E402
from quire.kernels.persistent.plan import Block, Config, Next, Weight  # noqa: E402
from quire.kernels.triton_support import hopper  # noqa: E402
from quire.kernels.triton_support.dependent_launch import LATE, PLAIN  # noqa: E402
from quire.workers.layers.formats import scaled as formats  # noqa: E402
from quire.workers.layers.norm import LayerNorm, RMSNorm  # noqa: E402
from quire.workers.models import fusion  # noqa: E402
from quire.workers.models.fusion import find_kernel  # noqa: E402

EPS = 1e-5
E4M3 = torch.float8_e4m3fn
# dtype, squares of scales, scales of inputs: of the token, of blocks, static
SCALINGS = [
    (E4M3, False, "token"), (E4M3, False, "static"), (E4M3, True, "block"), (E4M3, True, "token"), (E4M3, True, "static"),
    (torch.int8, False, "token"), (torch.int8, False, "static"), (torch.int8, True, "block"),
]  # fmt: skip


def ids(scaling):
    return "-".join(map(str, scaling)).replace("torch.", "")


class Case:
    """Random weights and inputs of a block, and of what follows it."""

    def __init__(
        self, hidden, attended, inner, outputs, scaling, *, device="cpu", dtype=torch.bfloat16, has_bias=False, seed=0
    ):
        self.kind, self.squares, self.inputs = scaling
        g = torch.Generator(device).manual_seed(seed)
        self.device, self.dtype = device, dtype

        def weight(n, k, typical):
            data = torch.randn(n, k, generator=g, device=device)
            data = (data * 40).round().clamp(-127, 127) if self.kind == torch.int8 else (data * 100).clamp(-448, 448)
            shape = (-(-n // BLOCK), k // BLOCK) if self.squares else (n, 1)
            scales = (torch.rand(shape, generator=g, device=device) + 0.5) / (40 if self.kind == torch.int8 else 100) / k**0.5
            static = None
            if self.inputs == "static":
                static = torch.full((1,), typical / LARGEST[self.kind], device=device)
            return Weight(Scaled(data.to(self.kind), scales, BLOCK if self.squares else 1), static)

        def vector(n):
            return (torch.rand(n, generator=g, device=device) + 0.5).to(dtype)

        by_block = self.inputs == "block"
        products = weight(hidden, attended, 3.0), weight(2 * inner, hidden, 4.0), weight(hidden, inner, 2.0)
        self.block = Block(*products, vector(hidden), EPS, by_block)
        bias = vector(outputs) if has_bias else None
        self.after = Next(weight(outputs, hidden, 4.0), bias, vector(hidden), EPS)
        self.x = torch.randn(1, attended, generator=g, device=device).to(dtype)
        self.residual = torch.randn(1, hidden, generator=g, device=device).to(dtype)

    def config(self, sms):
        hidden, attended = self.block.o.scaled.data.shape
        return plan.fitting(hidden, attended, self.block.down.scaled.data.shape[1], sms, self.squares)[1]

    # --------------------------------------------------------------------------------------------------- the reference
    def _product(self, x, weight):
        q = quantize_reference(x, self.kind, by_block=self.block.by_block, static_scale=weight.input_scale)
        return (q.dequantized(torch.float64) @ weight.scaled.dequantized(torch.float64).T).float()

    def _add(self, y, residual):
        return (y.to(self.dtype).float() + residual.float()).to(self.dtype)

    def expected(self):
        """(residual with o_proj's, down's output, residual with both, q|k|v) in float64 but where values are rounded."""
        first = self._add(self._product(self.x, self.block.o), self.residual)
        normed = rms_norm(first, self.block.norm, EPS)
        gate, up = self._product(normed, self.block.gate_up).to(self.dtype).chunk(2, -1)
        h = (torch.nn.functional.silu(gate.float()).to(self.dtype).float() * up.float()).to(self.dtype)
        down = self._product(h, self.block.down)
        last = self._add(down, first)
        qkv = self._product(rms_norm(last, self.after.norm, EPS), self.after.qkv)
        return first, down, last, (qkv if self.after.bias is None else qkv + self.after.bias.float()).to(self.dtype)


def summed(parts):
    """What a norm's `add` makes of down's parts."""
    if parts.dtype == torch.float32:
        return parts.sum(0)
    scale, x_scale = parts[-2].view(torch.float32), parts[-1].view(torch.float32)[:, :1]
    return parts[:-2].sum(0).float() * x_scale * scale


def close(found, wanted, tolerance):
    assert (found.double() - wanted.double()).abs().max() <= tolerance * wanted.double().abs().max()


# ------------------------------------------------------------------------------------------------------------- emulated
def emulator(config):
    barrier = threading.Barrier(config.programs)
    replaced = {"copy": copy, "meet": lambda state, programs: barrier.wait(DEADLINE_S), "_prefetch": lambda lines: None}
    replaced |= {"_wait_for_previous": lambda pdl: None, "_gated": silu_times}
    return Emulator(scaled_block._kernel, replaced)


def emulated(case, after, config, monkeypatch):
    monkeypatch.setattr(scaled_block, "_kernel", emulator(config))
    return scaled_block.launch(case.x, case.residual, case.block, after, plan.new_state(torch.device("cpu")), config)


def silu_times(gate, up, dtype):
    gate = gate.to(dtype).float()
    return tensor((gate / (1 + torch.exp(-gate))).to(dtype).float() * up.to(dtype).float())


# with tiles of 64 columns, and of 48 of o and down, and 24 of the others
@pytest.mark.parametrize("hidden, width", [(256, 64), (768, 48)])
@pytest.mark.parametrize("scaling", SCALINGS, ids=ids)
@pytest.mark.parametrize("follows", [True, False], ids=["next", "last"])
def test_source_on_the_cpu(hidden, width, scaling, follows, monkeypatch):
    case = Case(hidden, 512, 768, 192, scaling, has_bias=follows)
    width = 64 if case.squares else width
    config = Config(64, 2, 3, programs=11, o_parts=2, down_parts=3, o_width=width, down_width=width, varies=width < 64)
    y = emulated(case, case.after if follows else None, config, monkeypatch)
    first, down, last, qkv = case.expected()
    if follows:
        close(y.residual, last, 0.01)
        close(y.qkv, qkv, 0.02)
    else:
        assert y.qkv is None
        assert torch.equal(y.residual, first)
        close(summed(y.parts), down, 0.01)


def format_of(weight, bias, by_block):
    """A format that has this weight."""
    made = formats.ScaledFormat.__new__(formats.ScaledFormat)
    torch.nn.Module.__init__(made)
    made.dtype, made.device, made.by_block = torch.bfloat16, torch.device("cpu"), by_block
    made.weights = [(formats.Weight(*weight.scaled, weight.input_scale), bias)]
    return made


@pytest.mark.parametrize("scaling", SCALINGS, ids=ids)
def test_formats_have_it_of_what_it_takes(scaling, monkeypatch):
    monkeypatch.setattr(hopper, "available", lambda device: True)
    monkeypatch.setattr(hopper, "num_sms", lambda device: 11)
    monkeypatch.setattr(fusion, "mode_for", lambda rows: PLAIN)
    monkeypatch.setattr(plan, "LARGE", 0)
    monkeypatch.setattr(plan, "LEAST_BUSY", 0)
    case = Case(256, 512, 768, 192, scaling, has_bias=True)
    by_block, block, after = case.block.by_block, case.block, case.after
    o, gate_up, down = (format_of(weight, None, by_block) for weight in (block.o, block.gate_up, block.down))
    qkv = format_of(after.qkv, after.bias, by_block)
    norm, next_norm = (RMSNorm(256, EPS, torch.bfloat16, o.device) for _ in range(2))
    norm.weight.copy_(block.norm)
    next_norm.weight.copy_(after.norm)
    state = plan.new_state(o.device)
    made = find_kernel(o, norm, gate_up, down, (next_norm, qkv), state)
    kernel = emulator(made.config)
    monkeypatch.setattr(scaled_block, "_kernel", kernel)
    projected, residual = made(case.x, case.residual)
    _first, _down, last, wanted = case.expected()
    close(residual, last, 0.01)
    close(projected.qkv, wanted, 0.02)
    others = format_of(block.gate_up, None, not by_block)
    assert find_kernel(o, norm, others, down, None, state) is None
    assert find_kernel(o, norm, None, down, None, state) is None
    assert find_kernel(o, norm, gate_up, down, (next_norm, others), state).following is None
    assert find_kernel(o, norm, gate_up, down, (next_norm, None), state).following is None
    assert find_kernel(format_of(block.o, torch.zeros(256), by_block), norm, gate_up, down, None, state) is None
    assert find_kernel(o, LayerNorm(256, EPS, torch.bfloat16, o.device), gate_up, down, None, state) is None
    monkeypatch.setattr(plan, "LARGE", 256 * 768 + 1)
    assert find_kernel(o, norm, gate_up, down, None, state) is None


@pytest.mark.parametrize("dtype", [E4M3, torch.int8], ids=str)
def test_what_is_beyond_a_static_scale_saturates(dtype, monkeypatch):
    """Infinite activations of float16, too."""
    case = Case(256, 512, 768, 192, (dtype, False, "static"), dtype=torch.float16)
    case.x[0, :3] = torch.tensor([float("inf"), float("-inf"), 6e4], dtype=torch.float16)
    config = Config(tile=64, blocks=2, stages=3, programs=11, o_parts=2, down_parts=3)
    y = emulated(case, case.after, config, monkeypatch)
    assert torch.isfinite(y.qkv).all()
    close(y.residual, case.expected()[2], 0.01)


def test_sizes_that_are_not_taken():
    assert plan.choose(4096, 4096, 14336, 132) == Config(64, 4, 5, 132, 2, 2, varies=True)
    assert plan.choose(4096, 4096, 14336, 132, in_squares=True) == Config(64, 4, 5, 132, 2, 2)
    assert plan.choose(3584, 3584, 18944, 132) is not None
    for sizes in [(576, 576, 1536), (4096, 4096, 14336 + 64), (96, 128, 256), (4096, 4096, 11008), (1024, 2048, 3072)]:
        assert plan.choose(*sizes, 132) is None


def test_tiles_give_all_programs_as_much_to_do():
    config = plan.choose(4096, 4096, 14336, 132)
    assert plan.tile_width(14336, 32, config) == 28  # 512 tiles are 4 each, but for 16 programs; of 32 columns many had 3
    assert plan.tile_width(6144, 64, config) == 48
    assert plan.tile_width(14336, 32, config._replace(varies=False)) == 32
    config = plan.choose(5120, 5120, 13824, 132)  # 128 tiles of 40
    assert (config.o_width, config.o_parts, config.down_width, config.down_parts) == (40, 1, 40, 2)
    assert plan.choose(5120, 5120, 13824, 132, in_squares=True) is None


# ------------------------------------------------------------------------------------------------------------ on a GPU
def one_after_the_other(case):
    """The same by a kernel each: (residual with o_proj's, down's, residual with both, q|k|v)."""
    linear, in_parts = (
        (int8.int8_linear, int8.int8_linear_split_k) if case.kind == torch.int8 else (fp8.fp8_linear, fp8.fp8_linear_split_k)
    )
    block, after, residual, by_block = case.block, case.after, case.residual.clone(), case.block.by_block
    o, gate_up, down, qkv = block.o, block.gate_up, block.down, after.qkv

    def normed(y, norm, weight):
        return quantize.rms_norm_quantize(y, residual, norm, EPS, case.kind, by_block=by_block, static_scale=weight.input_scale)

    def rounded(y, weight):
        return quantize.quantize(y, case.kind, by_block=by_block, static_scale=weight.input_scale)

    y = in_parts(rounded(case.x, o), o.scaled, dtype=case.dtype)
    h = linear(normed(y, block.norm, gate_up), gate_up.scaled, dtype=case.dtype, is_gated=True)
    first = residual.clone()
    y = in_parts(rounded(h, down), down.scaled, dtype=case.dtype)
    found = linear(normed(y, after.norm, qkv), qkv.scaled, after.bias, dtype=case.dtype)
    return first, y.float() if y.dim() == 2 else summed(y), residual, found


BF16, FP16 = torch.bfloat16, torch.float16
GPU_SIZES = [
    (4096, 4096, 14336, 6144, BF16), (1024, 2048, 3072, 4096, BF16), (3584, 3584, 18944, 4608, BF16),
    (5120, 5120, 13824, 15360, BF16), (2048, 2048, 8192, 3072, FP16), (256, 512, 768, 192, BF16), ]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS, ids=ids)
@pytest.mark.parametrize("sizes", GPU_SIZES, ids=str)
def test_gpu_equals_kernels_one_after_the_other(sizes, scaling):
    *sizes, dtype = sizes
    case = Case(*sizes, scaling, device="cuda", dtype=dtype, has_bias=sizes[0] == 3584)
    config, state = case.config(hopper.num_sms(case.x.device)), plan.new_state(case.x.device)
    first, down, last, qkv = one_after_the_other(case)
    exact = case.kind == torch.int8 and not case.squares
    for _ in range(3):
        y = scaled_block.launch(case.x, case.residual, case.block, None, state, config, pdl=LATE)
        close(y.residual, first, 1e-2)
        close(summed(y.parts), down, 0.05)
        z = scaled_block.launch(case.x, case.residual, case.block, case.after, state, config, pdl=PLAIN)
        close(z.residual, last, 0.05)
        close(z.qkv, qkv, 0.05)
        if exact:  # sums are, so only the order of a norm's sum can tell them apart
            assert (y.residual == first).float().mean() > 0.999


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS[:3], ids=ids)
def test_gpu_against_float64(scaling):
    case = Case(4096, 4096, 14336, 6144, scaling, device="cuda")
    y = scaled_block.launch(
        case.x, case.residual, case.block, case.after, plan.new_state(case.x.device), case.config(hopper.num_sms(case.x.device))
    )
    _first, _down, last, qkv = case.expected()
    close(y.residual, last, 0.03)
    close(y.qkv, qkv, 0.04)


@pytest.mark.gpu
def test_gpu_replays_of_a_chain_give_the_same():
    """Launches that begin while the one before ends, 2,000 of them: what each has to wait for, it waits for."""
    cases = [Case(1024, 1024, 3072, 1024, SCALINGS[i % 3], device="cuda", seed=i) for i in range(8)]
    config = cases[0].config(hopper.num_sms(cases[0].x.device))
    states = [plan.new_state(case.x.device) for case in cases]

    def chain():
        x, residual = cases[0].x, cases[0].residual
        for case, state in zip(cases, states, strict=True):
            y = scaled_block.launch(x, residual, case.block, case.after, state, config, pdl=LATE)
            x, residual = y.qkv / 8, y.residual
        return x, residual

    with torch.cuda.stream(torch.cuda.Stream()):
        wanted = [value.clone() for value in chain()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            found = chain()
        for i in range(250):
            graph.replay()
            if i % 50 == 0:
                assert all(torch.equal(*both) for both in zip(found, wanted, strict=True))
    assert all(torch.isfinite(value).all() for value in wanted)
