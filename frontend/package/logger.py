"""`quire.logger`: vLLM's path to loggers, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.script_tools import init_logger

__all__ = ["init_logger"]
