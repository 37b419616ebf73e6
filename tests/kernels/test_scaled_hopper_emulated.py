"""The source of Hopper's ring for 8-bit weights (`scaled_hopper`), run on the CPU by `gluon_emulator`."""

import pytest
import torch
from gluon_emulator import Emulator, tensor

triton = pytest.importorskip("triton")

from quire.kernels.linear import scaled_hopper  # noqa: E402
from quire.kernels.linear.scaled import Scaled  # noqa: E402
from quire.kernels.linear.scaled_hopper import Config  # noqa: E402

KERNEL = scaled_hopper._kernel
E4M3 = torch.float8_e4m3fn


def silu_times(gate, up, dtype):
    gate = gate.to(dtype).float()
    return tensor((gate / (1 + torch.exp(-gate))).to(dtype).float() * up.to(dtype).float())


def operand(rows, k, dtype, per):
    g = torch.Generator().manual_seed(rows + k)
    data = torch.randint(-100, 100, (rows, k), generator=g).to(dtype)
    return Scaled(data, (torch.rand(-(-rows // per), k // 128 if per > 1 else 1, generator=g) + 0.5) / 300 / k**0.25, per)


# tiles of as many columns as a power of two, and of others, one program's and several, of which some end before
@pytest.mark.parametrize(
    "config",
    [
        Config(64, 2, 3, 5),
        Config(64, 2, 3, 5, 1, 24),
        Config(128, 2, 3, 5, 1, 48),
        Config(32, 1, 2, 3, 1, 12),
        Config(64, 2, 2, 4, 2),
    ],
)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, torch.int8], ids=str)
@pytest.mark.parametrize("rows", [1, 9])
def test_source_on_the_cpu(rows, dtype, is_gated, config, monkeypatch):
    if is_gated and config.parts > 1:
        return
    n, k = 96, 768
    x, weight = operand(rows, k, dtype, 1), operand(2 * n if is_gated else n, k, dtype, 1)
    monkeypatch.setattr(
        scaled_hopper, "_kernel", Emulator(KERNEL, {"_wait_for_previous": lambda pdl: None, "_gated": silu_times})
    )
    out = torch.full((rows, n), float("nan"), dtype=torch.bfloat16)
    if config.parts > 1:
        out = torch.full((config.parts, rows, n), float("nan"))
    scaled_hopper.launch(x, weight, None, out, config, is_gated=is_gated)
    wanted = (x.dequantized(torch.float64) @ weight.dequantized(torch.float64).T).float()
    if is_gated:
        wanted = silu_times(*wanted.chunk(2, -1), torch.bfloat16)
    found = out.float().sum(0) if config.parts > 1 else out.float()
    assert (found - wanted).abs().max() <= 0.01 * wanted.abs().max()


def test_tiles_must_make_the_columns():
    x, weight = operand(1, 256, E4M3, 1), operand(96, 256, E4M3, 1)
    with pytest.raises(ValueError, match="tiles of 40 columns do not make 96"):
        scaled_hopper.launch(x, weight, None, torch.empty(1, 96, dtype=torch.bfloat16), Config(64, 2, 2, 4, 1, 40))


def test_widths():
    def choose(rows, n, k, **how):
        config = scaled_hopper.choose(rows, n, k, 132, varies=True, **how)
        return config.tile, config.width, config.programs

    assert choose(64, 14336, 4096, is_gated=True) == (128, 56, 132)
    assert choose(32, 14336, 4096, is_gated=True) == (64, 0, 264)
    assert choose(64, 6144, 4096) == (64, 48, 132)
    assert choose(64, 4096, 4096) == (32, 0, 132)
    assert choose(64, 5166, 4096) == (64, 0, 132)  # 41 x 126 columns: no multiple of 4 makes them
    assert choose(64, 8448, 4096) == (64, 0, 132)  # 132 tiles of 64
    assert choose(64, 4096, 14336, split_k=True) == (64, 0, 132)
    assert scaled_hopper.choose(64, 14336, 4096, 132, is_gated=True).width == 0
