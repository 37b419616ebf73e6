"""`quire.transformers_utils.config`: vLLM's path to a model's configuration, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.script_tools import get_config

__all__ = ["get_config"]
