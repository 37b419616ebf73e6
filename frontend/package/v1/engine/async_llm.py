"""`quire.v1.engine.async_llm`: vLLM's path to the engine behind asyncio, for scripts whose imports name it.

Nothing of ours imports from here: each name comes from the file that defines it.
"""

from quire.frontend.client.async_llm import AsyncLLM

__all__ = ["AsyncLLM"]
