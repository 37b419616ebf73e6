"""How a model is laid out over workers: what sizes there may be. Checked by EngineConfig (config.py), whose fields they are."""

from typing import Any

MAX_RANKS = 64  # that share a model
MAX_ENGINES = 64  # of --data-parallel-size


def check_layout(config: Any) -> None:
    """Of an EngineConfig. Raises ValueError, naming the flag, for sizes that can never work."""

    def need(ok: bool, what: str) -> None:
        if not ok:
            raise ValueError(what)

    need(1 <= config.tensor_parallel_size <= MAX_RANKS, f"--tensor-parallel-size must be between 1 and {MAX_RANKS}")
    need(1 <= config.pipeline_parallel_size <= MAX_RANKS, f"--pipeline-parallel-size must be between 1 and {MAX_RANKS}")
    need(
        config.world_size <= MAX_RANKS,
        f"--tensor-parallel-size {config.tensor_parallel_size} times --pipeline-parallel-size {config.pipeline_parallel_size} "
        f"must be at most {MAX_RANKS}",
    )
    need(0.1 <= config.collective_timeout_s <= 86400, "--collective-timeout-s must be between 0.1 and 86400")
    need(1 <= config.emulate_world_size <= MAX_RANKS, f"--emulate-world-size must be between 1 and {MAX_RANKS}")
    need(
        config.emulate_world_size == 1 or (config.load_format == "dummy" and config.world_size == 1),
        "--emulate-world-size runs one rank alone, whose answers mean nothing: it needs --load-format dummy, and "
        "--tensor-parallel-size and --pipeline-parallel-size 1",
    )
    need(1 <= config.data_parallel_size <= MAX_ENGINES, f"--data-parallel-size must be between 1 and {MAX_ENGINES}")
