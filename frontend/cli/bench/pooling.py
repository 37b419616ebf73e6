"""`quire bench serve` for embeddings, reranking and pooling: what its requests hold, and what an answer says of them.

Backends, datasets and flags are those of `vllm bench serve`: --num-prompts counts texts, --random-batch-size is the number of
texts in a request, and a request of vllm-rerank is a query and so many documents. An answer comes in one piece, so its only
times are those of the whole request.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from quire.frontend.cli.bench.datasets import DatasetError, Request, random_requests

WORDS = ("openai-embeddings-chat", "vllm-rerank")  # backends that are sent texts, never token ids
OF_OUTPUT = ("total_output_tokens", "output_throughput", "max_output_tokens_per_s")  # figures that such a load has not


class Usage(msgspec.Struct):
    prompt_tokens: int = 0


class Whole(msgspec.Struct):
    """The fields that are read of an answer."""

    usage: Usage | None = None


_decode = msgspec.json.Decoder(Whole).decode


def fields_of(backend: str, request: Request) -> dict[str, Any]:
    """The fields of a body but for `model`. As in vLLM, texts longer than the model's context are cut."""
    cuts = {} if backend == "infinity-embeddings" else {"truncate_prompt_tokens": -1}
    match backend:
        case "openai-embeddings-chat":
            return {"messages": [{"role": "user", "content": [{"type": "text", "text": request.prompt}]}], **cuts}
        case "vllm-rerank":
            query, *documents = request.prompt
            return {"query": query, "documents": documents, **cuts}
        case _:
            return {"input": request.prompt, **cuts}


def prompt_tokens(body: bytes) -> int:
    """The tokens that the server counted; 0 where the answer does not say it. Raises ValueError for what is not JSON."""
    usage = _decode(body).usage
    return usage.prompt_tokens if usage is not None else 0


def batched(requests: Sequence[Request], size: int) -> list[Request]:
    """Requests of `size` prompts each; the last may have fewer. One prompt stays as it is, without a list around it."""
    if size == 1:
        return list(requests)
    parts = [requests[i : i + size] for i in range(0, len(requests), size)]
    return [Request([r.prompt for r in part], sum(r.prompt_len for r in part), 0) for part in parts]


def random_pairs(count: int, input_len: int, size: int, is_reranker: bool, **options: Any) -> list[Request]:
    """Requests of one query and `size` documents each. prompt_len counts the query once, as in vLLM.

    is_reranker: the query and a document share the input_len tokens of a pair; otherwise each has so many, and the query is
    one of the `count` texts. options: those of `random_requests`. Raises DatasetError.
    """
    if is_reranker and input_len < 4:
        raise DatasetError(f"--random-input-len {input_len}: a pair has at least 4 tokens")
    if not is_reranker and count < 2:
        raise DatasetError("--no-reranker: the query is one of the texts, so --num-prompts is at least 2")
    query_len = input_len // 2 - 1 if is_reranker else input_len
    document_len = input_len - query_len - 1 if is_reranker else input_len
    (query,) = random_requests(1, query_len, 1, **options)
    documents = random_requests(
        count if is_reranker else count - 1, document_len, 1, **{**options, "seed": options["seed"] + 1}
    )
    parts = [documents[i : i + size] for i in range(0, len(documents), size)]
    return [Request([query.prompt, *(d.prompt for d in p)], query.prompt_len + sum(d.prompt_len for d in p), 0) for p in parts]
