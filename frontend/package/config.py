"""`quire.config`: vLLM's path to an engine's configuration, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.model_config import (
    CacheConfig,
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from quire.frontend.client.script_tools import CompilationConfig, CompilationLevel, CompilationMode
from quire.frontend.client.vllm_modules import names_of

__all__ = [
    "CacheConfig",
    "CompilationConfig",
    "CompilationLevel",
    "CompilationMode",
    "DeviceConfig",
    "LoadConfig",
    "ModelConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "VllmConfig",
]

__getattr__ = names_of(__name__)
