"""Embedding rows against torch's."""

import pytest
import torch

triton = pytest.importorskip("triton")

from quire.kernels.elementwise.embedding import embedding  # noqa: E402

SHAPES = [(1, 1, 1), (3, 7, 5), (5, 100, 1024), (2, 9, 5000)]  # tokens, vocabulary, width


def compare(tokens, vocab, width, dtype, device):
    g = torch.Generator().manual_seed(tokens + width)
    ids = torch.randint(0, vocab, (tokens,), generator=g, dtype=torch.int32).to(device)
    weight = torch.randn(vocab, width + 3, generator=g).to(device, dtype)[:, :width]
    rows = torch.nn.functional.embedding(ids, weight)
    assert torch.equal(embedding(ids, weight), rows)
    assert torch.equal(embedding(ids, weight, 11.3125), (rows.float() * 11.3125).to(dtype))


@pytest.mark.interpret
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_in_the_interpreter(shape):
    compare(*shape, torch.float32, "cpu")


@pytest.mark.interpret
def test_ids_are_clamped_and_shapes_checked():
    weight = torch.arange(6.0).view(3, 2)
    ids = torch.tensor([-5, 9], dtype=torch.int32)
    assert torch.equal(embedding(ids, weight), weight[[0, 2]])
    assert embedding(ids[:0], weight).shape == (0, 2)
    with pytest.raises(ValueError, match="ids"):
        embedding(ids.long(), weight)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 151936, 1024)])
def test_kernel(shape, dtype):
    compare(*shape, dtype, "cuda")
