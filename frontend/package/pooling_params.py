"""`quire.pooling_params`: vLLM's path to the parameters of requests for vectors, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.ipc.pooling import PoolingParams

__all__ = ["PoolingParams"]
