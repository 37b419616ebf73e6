"""`quire.utils`: vLLM's path to small helpers, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.cli.flexible_parser import FlexibleArgumentParser
from quire.frontend.client.script_tools import Counter, random_uuid
from quire.frontend.client.vllm_modules import names_of

__all__ = ["Counter", "FlexibleArgumentParser", "random_uuid"]

__getattr__ = names_of(__name__)
