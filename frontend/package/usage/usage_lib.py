"""`quire.usage.usage_lib`: vLLM's path to what an engine is used by, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.script_tools import UsageContext

__all__ = ["UsageContext"]
