"""`quire.utils.counter`: vLLM's path to a counter, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.script_tools import Counter

__all__ = ["Counter"]
