"""`quire.v1.engine.async_llm`: vLLM's path to the engine behind asyncio, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
