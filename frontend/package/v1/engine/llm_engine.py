"""`quire.v1.engine.llm_engine`: vLLM's path to the engine that is stepped, for scripts whose imports name it.

Nothing of ours imports from here: each name comes from the file that defines it.
"""

from quire.frontend.client.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
