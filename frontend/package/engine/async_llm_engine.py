"""`quire.engine.async_llm_engine`: vLLM's older path to the engine behind asyncio, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.async_llm import AsyncLLMEngine
from quire.frontend.client.vllm_modules import names_of

__all__ = ["AsyncLLMEngine"]

__getattr__ = names_of(__name__)
