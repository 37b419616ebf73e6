"""`quire.sequence`: vLLM's path to log-probabilities and times of requests, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.outputs import Logprob, RequestMetrics

__all__ = ["Logprob", "RequestMetrics"]
