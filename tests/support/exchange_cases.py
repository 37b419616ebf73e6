"""Ranks that sum and normalize rows together, all in one memory: each rank's inputs, and their buffers."""

import torch

EPS = 1e-6


def inputs(size, rows, width, parts, dtype, device):
    g = torch.Generator().manual_seed(rows + width + parts)
    shape = (parts, rows, width) if parts > 1 else (rows, width)
    xs = [torch.randn(shape, generator=g).to(device, torch.float32 if parts > 1 else dtype) for _ in range(size)]
    xs[0].view(-1)[0] = -0.0  # what an empty place holds
    xs[-1].view(-1)[1] = -0.0
    residual = torch.randn(rows, width, generator=g).to(device, dtype)
    return xs, residual, (torch.randn(width, generator=g) + 1).to(device, dtype)


def ends(size, max_rows, width, dtype, device, two_shot=False):
    """Buffers of all ranks, in one memory."""
    from quire.kernels.exchange.all_reduce_norm import Buffers, empty, places_shape, word_dtype

    made = []
    for _ in range(size):
        shape = places_shape(size, max_rows, width, two_shot=two_shot)
        made.append(torch.empty(shape, dtype=word_dtype(dtype), device=device))
        empty(made[-1])
    addresses = torch.tensor([places.data_ptr() for places in made], device=device)
    turns = [torch.zeros(max_rows, dtype=torch.int32, device=device) for _ in range(size)]
    return [Buffers(rank, size, max_rows, two_shot, made[rank], addresses, turns[rank], 5 * 10**9) for rank in range(size)]
