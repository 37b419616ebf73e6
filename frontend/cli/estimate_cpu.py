"""Bytes of a model's weights on a CPU, for `quire estimate`: as its workers hold them, with second, packed copies."""

from quire.frontend.cli.estimate_model import Model
from quire.frontend.cli.estimate_sizes import cpu_weights_bytes
from quire.ipc import memory_plan as plan
from quire.ipc.config import EngineConfig
from quire.ipc.memory_plan import CpuAsked


def weights_on_cpu(model: Model, config: EngineConfig, dtype: str, plain: int) -> int:
    """As the worker counts them. plain: those of a whole, unquantized model on one worker, which is computed here."""
    asked, ranks = config.quantization, config.tensor_parallel_size
    is_whole = config.world_size == 1 and not config.enable_expert_parallel and not config.language_model_only
    if model.config is None or (is_whole and asked is None and model.quantization is None and dtype == "float32"):
        return plain
    stages, overrides = config.pipeline_parallel_size, config.hf_overrides
    cpu = CpuAsked(model.folder, overrides, dtype, config.model_impl, asked, stages, not config.language_model_only)
    return cpu_weights_bytes(model.name, model.config, cpu, ranks, expert_parallel=config.enable_expert_parallel)


def cpu_packed_bytes(model: Model, item: int) -> int:
    """Bytes of the weights' second, packed copies."""
    if model.packed_elements is None:
        return plan.cpu_packed_bytes(model.sizes, model.is_tied, item)
    of_head, small = model.packed_elements
    return item * of_head + (item * small if item == 4 else 0)
