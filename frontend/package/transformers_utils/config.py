"""`quire.transformers_utils.config`: vLLM's path to a model's configuration, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.script_tools import get_config
from quire.frontend.client.vllm_modules import names_of

__all__ = ["get_config"]

__getattr__ = names_of(__name__)
