"""`quire.version`: vLLM's path to the version, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.ipc.version import VERSION as __version__
from quire.ipc.version import VERSION_TUPLE as __version_tuple__

__all__ = ["__version__", "__version_tuple__"]
