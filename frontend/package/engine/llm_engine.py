"""`quire.engine.llm_engine`: vLLM's path to the engine that a script steps, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.llm_engine import LLMEngine

__all__ = ["LLMEngine"]
