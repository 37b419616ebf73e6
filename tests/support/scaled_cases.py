"""Random scaled 8-bit operands, and their expected products."""

import torch

from quire.kernels.linear.scaled import Scaled

SCALINGS = ["row", "block"]
KINDS = [torch.float8_e4m3fn, torch.int8]


def drawn(rows, k, dtype, generator):
    if dtype == torch.int8:
        return torch.randint(-128, 128, (rows, k), generator=generator, dtype=torch.int8)
    return (torch.randn(rows, k, generator=generator) * 100).clamp(-448, 448).to(dtype)


def operands(rows, n, k, scaling, dtype, device):
    g = torch.Generator().manual_seed(rows + n + k)
    blocks = -(-k // 128)
    shape, of = ((n, 1), 1) if scaling == "row" else ((-(-n // 128), blocks), 128)
    of_x = (rows, blocks if scaling == "block" else 1)
    x = Scaled(drawn(rows, k, dtype, g).to(device), (torch.rand(of_x, generator=g) / 100).to(device))
    return x, Scaled(drawn(n, k, dtype, g).to(device), (torch.rand(shape, generator=g) / 100).to(device), of)


def expected(x, weight, bias, gated):
    """In float64."""
    y = x.dequantized(torch.float64) @ weight.dequantized(torch.float64).T + (0 if bias is None else bias.double())
    if not gated:
        return y
    gate, up = y.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def compare(run, rows, shape, scaling, dtype, device, out_dtype, gated=False, tolerance=1e-5):
    n, k = shape
    columns = 2 * n if gated else n
    x, weight = operands(rows, columns, k, scaling, dtype, device)
    bias = torch.randn(columns, device=device).to(out_dtype) if rows % 2 else None
    out = torch.full((rows + 1, n), 7.0, dtype=out_dtype, device=device)
    run(x, weight, bias, out[:rows], gated)
    want = expected(x, weight, bias, gated)
    assert (out[:rows].double() - want).abs().max() <= tolerance * (4 if gated else 1) * want.abs().max() + 1e-6
    assert (out[rows] == 7).all()
