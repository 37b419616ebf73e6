"""Outputs of requests for vectors and scores: vLLM's classes, with numpy arrays where vLLM has tensors."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class PoolingOutput:
    """data: float32 [columns], or [tokens, columns] of a task with a result for each token; of several tasks a dict."""

    data: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PoolingOutput) or not isinstance(self.data, dict):
            return isinstance(other, PoolingOutput) and np.array_equal(self.data, other.data)
        same = isinstance(other.data, dict) and self.data.keys() == other.data.keys()
        return same and all(np.array_equal(mine, other.data[task]) for task, mine in self.data.items())


@dataclass
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """probs: one for each label, after the model's activation."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass
class ScoringOutput:
    score: float


@dataclass
class PoolingRequestOutput:
    """A prompt and its result."""

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass
class EmbeddingRequestOutput(PoolingRequestOutput):
    outputs: EmbeddingOutput


@dataclass
class ClassificationRequestOutput(PoolingRequestOutput):
    outputs: ClassificationOutput


@dataclass
class ScoringRequestOutput(PoolingRequestOutput):
    outputs: ScoringOutput


@dataclass
class RerankResult:
    """A document's score for the query. index: its place among the documents that were given."""

    index: int
    relevance_score: float
    document: str = field(default="", repr=False)
