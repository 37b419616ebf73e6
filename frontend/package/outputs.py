"""`quire.outputs`: vLLM's path to the outputs of requests, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.outputs import CompletionOutput, RequestOutput
from quire.frontend.client.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.frontend.client.vllm_modules import names_of

__all__ = [
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
]

__getattr__ = names_of(__name__)
