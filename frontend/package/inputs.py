"""`quire.inputs`: vLLM's path to the prompt types, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.prompt import PromptType, TextPrompt, TokensPrompt
from quire.frontend.client.vllm_modules import names_of

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]

__path__: list[str] = []  # vLLM has modules below it (vllm_modules.py)
__getattr__ = names_of(__name__)
