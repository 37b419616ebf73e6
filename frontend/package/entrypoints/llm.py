"""`quire.entrypoints.llm`: vLLM's path to the engine for a script's prompts, for scripts whose imports name it.

Nothing of ours imports from here: each name comes from the file that defines it.
"""

from quire.frontend.client.llm import LLM

__all__ = ["LLM"]
