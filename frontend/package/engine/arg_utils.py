"""`quire.engine.arg_utils`: vLLM's path to an engine's options, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.engine_args import AsyncEngineArgs, EngineArgs
from quire.frontend.client.vllm_modules import names_of

__all__ = ["AsyncEngineArgs", "EngineArgs"]

__getattr__ = names_of(__name__)
