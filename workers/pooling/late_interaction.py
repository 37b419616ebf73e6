"""Vectors of tokens for late interaction (ColBERT, BGE-M3), and BGE-M3's sparse vectors.

ColBERT: arXiv:2004.12832, section 3; BGE-M3: arXiv:2402.03216, section 3.2. frontend/client/late.py makes queries and
documents of texts, and compares their vectors.
"""

from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from quire.workers.loading.files import checkpoint_files, open_file
from quire.workers.loading.weight_loader import WeightsError
from quire.workers.pooling.poolers import normalized

COLBERT_WEIGHT = "linear.weight"


class ColBERTHead:
    """The product of ColBERT's own checkpoints (HF_ColBERT): hidden states [T, H] -> vectors of length 1, float32 [T, D]."""

    def __init__(self, weight: torch.Tensor):
        self._weight = weight.float()
        self.size = len(weight)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return normalized(functional.linear(hidden.float(), self._weight))


def colbert_size(folder: Path) -> int:
    """Elements of a token's vector. Raises WeightsError if the checkpoint has no such product."""
    with open_file(_colbert_file(folder)) as file:
        return int(file.get_slice(COLBERT_WEIGHT).get_shape()[0])


def colbert_head(folder: Path, hidden_size: int, device: torch.device) -> ColBERTHead:
    """Its weight, without a bias, is the tensor `linear.weight` beside those of the encoder. Raises WeightsError."""
    with open_file(_colbert_file(folder)) as file:
        shape = tuple(file.get_slice(COLBERT_WEIGHT).get_shape())
        if len(shape) != 2 or shape[1] != hidden_size:
            raise WeightsError(f"{COLBERT_WEIGHT} has the shape {shape}, expected is [n, {hidden_size}]")
        return ColBERTHead(file.get_tensor(COLBERT_WEIGHT).to(device, torch.float32, copy=True))


def _colbert_file(folder: Path) -> Path:
    for path in checkpoint_files(folder, torch_files=True):
        with open_file(path) as file:
            if COLBERT_WEIGHT in set(file.keys()):
                return path
    raise WeightsError(f"{folder} has no tensor {COLBERT_WEIGHT}, by which ColBERT makes vectors of tokens")


M3_FILES = ("sparse_linear.pt", "colbert_linear.pt")


class M3Heads:
    """BGE-M3's vectors of tokens and weights of tokens, from the hidden states that its dense vector is of."""

    def __init__(self, folder: Path, hidden_size: int, device: torch.device, unused: tuple[int, ...]):
        """unused: ids of tokens without a weight: [CLS], [SEP], padding and the unknown token. Raises WeightsError."""
        sparse, colbert = (folder / name for name in M3_FILES)
        self._sparse = _linear(sparse, hidden_size, device, rows=1)
        self._colbert = _linear(colbert, hidden_size, device)
        self.unused = frozenset(unused)
        self.token_size = len(self._colbert[0])

    def weights(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [T] of hidden states [T, H]."""
        return functional.linear(hidden.float(), *self._sparse).relu_().squeeze(1)

    def token_vectors(self, hidden: torch.Tensor) -> torch.Tensor:
        """Vectors of length 1, float32 [T, D]; that of a text's first token is not used."""
        return normalized(functional.linear(hidden.float(), *self._colbert))


def greatest_weights(ids: np.ndarray, weights: np.ndarray, unused: frozenset[int]) -> np.ndarray:
    """float32 [n, 2] of a text's tokens: ids and weights above 0, of several equal ids the greatest."""
    found: dict[int, float] = {}
    for token, weight in zip(ids.tolist(), weights.tolist(), strict=True):
        if token not in unused and weight > found.get(token, 0.0):
            found[token] = weight
    return np.array(list(found.items()), np.float32).reshape(-1, 2)


def _linear(path: Path, hidden_size: int, device: torch.device, rows: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight [rows, H] and bias [rows] of a file of torch.save with a linear layer, float32. Raises WeightsError."""
    if not path.exists():
        raise WeightsError(f"{path} is not there: BGE-M3's heads are in files of their own")
    with open_file(path) as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict
        rows = rows or shapes.get("weight", (0,))[0]
        if shapes != {"weight": (rows, hidden_size), "bias": (rows,)} or not rows:
            raise WeightsError(f"{path} holds {shapes}, expected are a weight [n, {hidden_size}] and a bias [n]")
        return tuple(file.get_tensor(name).to(device, torch.float32, copy=True) for name in ("weight", "bias"))  # type: ignore[return-value]
