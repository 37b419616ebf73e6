"""`quire.engine.async_llm_engine`: vLLM's path to the engine behind asyncio, older name, for scripts whose imports name it.

Nothing of ours imports from here: each name comes from the file that defines it.
"""

from quire.frontend.client.async_llm import AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]
