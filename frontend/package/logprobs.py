"""`quire.logprobs`: vLLM's path to log-probabilities, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.outputs import Logprob, PromptLogprobs, SampleLogprobs
from quire.frontend.client.outputs import TokenLogprobDict as LogprobsOnePosition

__all__ = ["Logprob", "LogprobsOnePosition", "PromptLogprobs", "SampleLogprobs"]
