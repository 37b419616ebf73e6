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

from quire.ipc.adapters import AdapterError, with_layers_of
from quire.ipc.memory_plan import AdaptersAsked, CpuAsked, RankSizes, SizesAsked
from quire.workers.adapters.peft import read_adapter
from quire.workers.adapters.places import slots_bytes
from quire.workers.layers.experts import Experts
from quire.workers.memory import held_bytes, packed_elements, sizes_of
from quire.workers.models.build import build_model
from quire.workers.models.config import ModelConfigError
from quire.workers.models.decoder import CausalLM
from quire.workers.models.language_model import LanguageModel
from quire.workers.parallel import Parallel, Stage
from quire.workers.pooling.start import AUTO, read_served
from quire.workers.speculation.mtp import MTPHead, mtp_config
from quire.workers.stages import stage_of


def rank_sizes(asked: SizesAsked) -> RankSizes:
    """Sizes of the rank that holds most. Raises ModelConfigError."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(msgspec.json.encode(asked.config))
        config, _ = read_served(folder, {}, AUTO, sees=True)
        parallel = Parallel(0, asked.tensor_parallel_size, "meta", expert_parallel=asked.enable_expert_parallel)
        model: LanguageModel = build_model(config, torch.float32, parallel)
        if asked.is_of_mtp:
            config, spec = mtp_config(config, None)
            assert isinstance(model, CausalLM)  # of a family that has such layers
            model = MTPHead(config, spec, torch.float32, parallel, model)
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    return RankSizes(
        sizes=sizes_of(config, parallel),
        num_parameters=sum(p.numel() for p in model.parameters()),
        expert_parameters=sum(p.numel() for module in experts for p in module.parameters()),
        packed_elements=packed_elements(model),
        items=None if model.items is None else model.items.sizes,
    )


def cpu_weights_bytes(asked: SizesAsked, cpu: CpuAsked) -> int:
    """The number that a worker on a CPU checks before it loads anything, of the stage that holds most. Raises ModelConfigError.

    The model is built on the CPU, as a worker builds it. Its tensors are never written, so they take no memory.
    """
    dtype = getattr(torch, cpu.dtype)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(msgspec.json.encode(asked.config))
        path = Path(cpu.folder or folder)
        config, _ = read_served(
            path, cpu.overrides or {}, AUTO, model_impl=cpu.model_impl, quantization=cpu.quantization, sees=cpu.sees
        )
    count, found = cpu.pipeline_parallel_size, []
    for stage in [stage_of(config, dtype, i, count, path) for i in range(count)] if count > 1 else [Stage()]:
        parallel = Parallel(0, asked.tensor_parallel_size, stage=stage, expert_parallel=asked.enable_expert_parallel)
        found.append(held_bytes(build_model(config, dtype, parallel), dtype))
    return max(found)


def adapters_bytes(asked: SizesAsked, adapters: AdaptersAsked) -> int:
    """Bytes of all adapter slots on a rank. Raises ModelConfigError, AdapterError."""
    limits = with_layers_of(adapters.limits, [read_adapter(folder, adapters.limits) for folder in adapters.folders])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(msgspec.json.encode(asked.config))
        config, _ = read_served(folder, {}, AUTO, sees=True)
    parallel = Parallel(0, asked.tensor_parallel_size, "meta", expert_parallel=asked.enable_expert_parallel)
    return slots_bytes(build_model(config, torch.float32, parallel), limits, getattr(torch, adapters.dtype))


def answer(asked: bytes) -> bytes:
    """Encoded SizesAsked -> encoded RankSizes, or a number of bytes, or the text of an error."""
    try:
        question = msgspec.json.decode(asked, type=SizesAsked)
        if question.adapters is not None:
            return msgspec.json.encode(adapters_bytes(question, question.adapters))
        found = rank_sizes(question) if question.cpu is None else cpu_weights_bytes(question, question.cpu)
        return msgspec.json.encode(found)
    except (ModelConfigError, AdapterError) as error:
        return msgspec.json.encode(str(error))


if __name__ == "__main__":
    sys.stdout.buffer.write(answer(sys.stdin.buffer.read()))
