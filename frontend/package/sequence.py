"""`quire.sequence`: vLLM's path to log-probabilities and times of requests, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.outputs import Logprob, PromptLogprobs, RequestMetrics, SampleLogprobs
from quire.frontend.client.vllm_modules import names_of

__all__ = ["Logprob", "PromptLogprobs", "RequestMetrics", "SampleLogprobs"]

__getattr__ = names_of(__name__)
