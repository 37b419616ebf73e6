"""`quire.entrypoints.llm`: vLLM's path to LLM, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.llm import LLM

__all__ = ["LLM"]
