"""The backends of `quire bench serve`, under vLLM's names, with their routes. It imports nothing: the flags are made of it."""

CHAT = "openai-chat"
POOLING = {  # vectors and scores
    "openai-embeddings": "/v1/embeddings",
    "openai-embeddings-chat": "/v1/embeddings",
    "infinity-embeddings": "/v1/embeddings",
    "vllm-pooling": "/pooling",
    "vllm-rerank": "/v1/rerank",
}
PATHS = {
    "openai": "/v1/completions",
    CHAT: "/v1/chat/completions",
    "vllm": "/v1/completions",
    "quire": "/v1/completions",
    **POOLING,
}
