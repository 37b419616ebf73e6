"""`quire.pooling_params`: vLLM's path to the parameters of requests for vectors, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.not_served import PoolingParams

__all__ = ["PoolingParams"]
