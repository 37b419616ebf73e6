"""The settings that `--deterministic` does not allow, as far as flags alone say; workers/fixed_order.py checks the model."""

from typing import Any

MAX_RANKS = 2  # that share a layer


def check_deterministic(config: Any) -> None:
    """Check an EngineConfig. Raises ValueError, naming the flag, for settings without a fixed order of sums."""
    if not config.deterministic:
        return
    refused = {
        "--device cpu": config.device == "cpu",
        f"--tensor-parallel-size over {MAX_RANKS}": config.tensor_parallel_size > MAX_RANKS,
        "--pipeline-parallel-size": config.pipeline_parallel_size > 1,
        "--enable-expert-parallel": config.enable_expert_parallel,
        "--emulate-world-size": config.emulate_world_size > 1,
        "--quantization": config.quantization is not None,
        "--kv-cache-dtype": config.kv_cache_dtype != "auto",
        "--model-impl transformers": config.model_impl == "transformers",
        "--speculative-config": config.speculative_config is not None,
    }
    if wrong := [flag for flag, is_set in refused.items() if is_set]:
        raise ValueError(
            f"--deterministic does not work with {', '.join(wrong)}: it needs Quire's own model code with 16-bit or 32-bit "
            f"weights and cache, on one GPU or {MAX_RANKS}"
        )
