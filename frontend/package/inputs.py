"""`quire.inputs`: vLLM's path to the prompt types, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.prompt import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
