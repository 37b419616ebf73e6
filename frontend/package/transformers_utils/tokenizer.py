"""`quire.transformers_utils.tokenizer`: vLLM's path to a model's tokenizer, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.script_tools import get_tokenizer

__all__ = ["get_tokenizer"]
