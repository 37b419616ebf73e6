"""`python -m quire.workers.sizes`: the sizes of one rank's shard of a model, from its config.json alone, on any machine.

The model is built as a worker builds it, but on torch's meta device, so `quire estimate` supports the same families as workers
without reading configs itself. It runs this as a process of its own, since it imports no torch. A request comes on standard
input and the answer goes to standard output, both as JSON (ipc/memory_plan.py has the structs).
"""

import sys
import tempfile
from pathlib import Path

import msgspec
import torch

from quire.ipc.memory_plan import RankSizes, SizesAsked
from quire.workers.layers.experts import Experts
from quire.workers.layers.formats.packed_cpu import SMALL_BYTES
from quire.workers.layers.linear import Linear
from quire.workers.memory import sizes_of
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfigError
from quire.workers.models.family_table import read_model_config
from quire.workers.models.language_model import LanguageModel
from quire.workers.parallel import Parallel


def rank_sizes(asked: SizesAsked) -> RankSizes:
    """Sizes of the rank that holds most. Raises ModelConfigError."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(msgspec.json.encode(asked.config))
        config = read_model_config(folder)
        parallel = Parallel(0, asked.tensor_parallel_size, "meta", expert_parallel=asked.enable_expert_parallel)
        model = build_model(config, torch.float32, parallel)
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    return RankSizes(
        sizes=sizes_of(config, parallel),
        num_parameters=sum(p.numel() for p in model.parameters()),
        expert_parameters=sum(p.numel() for module in experts for p in module.parameters()),
        packed_elements=_packed(model),
    )


def _packed(model: LanguageModel) -> list[int]:
    """[elements of a head tied to the embedding, elements of weights that are packed twice if they are float32], on a CPU."""
    tied, small = 0, 0
    for module in model.modules():
        weight = getattr(module.format, "weight", None) if isinstance(module, Linear) else None
        if weight is None:
            continue
        if _is_shared(model, weight):
            tied += weight.numel()
        elif 4 * weight.numel() <= SMALL_BYTES:
            small += weight.numel()
    return [tied, small]


def _is_shared(model: LanguageModel, weight: torch.Tensor) -> bool:
    return sum(p is weight for module in model.modules() for p in module._parameters.values()) > 1


def answer(asked: bytes) -> bytes:
    """Encoded SizesAsked -> encoded RankSizes, or the text of an error."""
    try:
        return msgspec.json.encode(rank_sizes(msgspec.json.decode(asked, type=SizesAsked)))
    except ModelConfigError as error:
        return msgspec.json.encode(str(error))


if __name__ == "__main__":
    sys.stdout.buffer.write(answer(sys.stdin.buffer.read()))
