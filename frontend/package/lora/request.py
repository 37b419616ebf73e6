"""`quire.lora.request`: vLLM's path to the request's adapter, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.lora_request import LoRARequest
from quire.frontend.client.vllm_modules import names_of

__all__ = ["LoRARequest"]

__getattr__ = names_of(__name__)
