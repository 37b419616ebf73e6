"""`quire.outputs`: vLLM's path to the outputs of requests, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.not_served import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from quire.frontend.client.outputs import CompletionOutput, RequestOutput
from quire.frontend.client.vllm_modules import names_of

__all__ = [
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestOutput",
    "ScoringRequestOutput",
]

__getattr__ = names_of(__name__)
