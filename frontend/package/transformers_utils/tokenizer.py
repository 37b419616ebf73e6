"""`quire.transformers_utils.tokenizer`: vLLM's path to a model's tokenizer, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.script_tools import get_tokenizer
from quire.frontend.client.vllm_modules import names_of

__all__ = ["get_tokenizer"]

__getattr__ = names_of(__name__)
