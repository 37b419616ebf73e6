"""`quire.config`: vLLM's path to an engine's configuration, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.model_config import ModelConfig, VllmConfig
from quire.frontend.client.script_tools import CompilationConfig

__all__ = ["CompilationConfig", "ModelConfig", "VllmConfig"]
