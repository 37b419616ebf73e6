"""Notes on the fields of the routes for vectors and scores, by struct, for field_notes.py, which includes them."""

from note import Note

_RUN = {
    "model": Note("one of the served names; 404 for another", "the first"),
    "request_id": Note("part of the answer's id", "made up"),
    "priority": Note("lower runs first, with --scheduling-policy priority", "0"),
    "cache_salt": Note("only requests of equal salt share cached prefixes", "none"),
    "timeout": Note("seconds until the request fails with 504", "--request-timeout-s"),
}
_PROMPT = {
    **_RUN,
    "truncate_prompt_tokens": Note("cut prompts to so many tokens; -1: to what fits the context", "a long prompt is a 400"),
    "truncation_side": Note("left or right: the side that is cut off", "right"),
    "add_special_tokens": Note("the special tokens that the tokenizer puts around a text", "true"),
}
_POOL = {
    **_PROMPT,
    "dimensions": Note("elements of a vector, cut and normalized again", "all", bounds="what the model was trained for"),
    "use_activation": Note("vectors are normalized, and scores pass the model's activation", "the model's"),
    "normalize": Note("an older name of use_activation", "use_activation"),
    "activation": Note("an older name of use_activation", "use_activation"),
}
_FORMAT = {
    "encoding_format": Note("float, base64, bytes (a header `metadata` says where each result is) or bytes_only", "float"),
    "embed_dtype": Note("float32, float16 or bfloat16, of base64 and bytes", "float32"),
    "endianness": Note("native, big or little, of base64 and bytes", "native"),
}
_INPUT = Note("a text, texts, token ids, or lists of token ids", bounds="1 to 2,048 inputs")
_CONVERSATION = {
    "input": Note("a text, texts, token ids, or lists of token ids", "messages", bounds="1 to 2,048 inputs"),
    "messages": Note("in the place of input: a conversation, which the chat template makes a prompt of", "input"),
    "add_generation_prompt": Note("the template opens an answer", "false"),
    "continue_final_message": Note("the last message stays open", "false"),
    "chat_template": Note("a template of the request's own, with --trust-request-chat-template", "the model's"),
    "chat_template_kwargs": Note("variables of the template", "none"),
}
_CUT = {
    "truncate": Note("cut prompts to what fits the context", "false"),
    "truncation_direction": Note("Left or Right: the side that is cut off", "Right"),
}
_ANSWER = {
    "id": Note("the request's id"),
    "created": Note("seconds since the Unix epoch"),
    "model": Note("the served name"),
    "data": Note("in the order of the inputs"),
    "usage": Note("tokens of all prompts"),
    "object": Note("list"),
}
_INDEX = {"index": Note("of the input"), "object": Note("the kind of this entry")}
_COUNTS = {
    "prompt_tokens": Note("of all prompts"),
    "total_tokens": Note("the same"),
    "completion_tokens": Note("0"),
    "prompt_tokens_details": Note("null"),
}
_PROMPT_NAME = Note("a prompt of config_sentence_transformers.json, which is put before each text", "the model's default")

_ALL: dict[str, dict[str, Note]] = {
    "EmbeddingRequest": {
        **_POOL,
        **_FORMAT,
        **_CONVERSATION,
        "prompt_name": _PROMPT_NAME,
        "task": Note("of a model with adapters for tasks and `--enable-lora`: which one", "retrieval"),
        "late_chunking": Note("give each text by itself", treatment="refused"),
    },
    "EmbeddingResponse": _ANSWER,
    "Embedding": {**_INDEX, "embedding": Note("numbers, or base64 of their bytes")},
    "PoolingUsage": _COUNTS,
    "RerankUsage": {name: _COUNTS[name] for name in ("prompt_tokens", "total_tokens")},
    "PoolingRequest": {
        **_POOL,
        **_FORMAT,
        **_CONVERSATION,
        "task": Note("embed, classify, token_embed, token_classify, embed_sparse, or a list", "that of tokens"),
        "prompt_name": Note("as of /v1/embeddings; of a model of token vectors query or document", "document"),
    },
    "PoolingResponse": _ANSWER,
    "PoolingData": {
        **_INDEX,
        "data": Note("numbers, of tokens rows of numbers, or base64; of several tasks an object"),
    },
    "ClassifyRequest": {**_POOL, **_CONVERSATION},
    "ClassifyResponse": _ANSWER,
    "Classification": {
        "index": Note("of the input"),
        "label": Note("the likeliest one"),
        "probs": Note("by label, in the model's order"),
        "num_classes": Note("the number of labels"),
    },
    "ScoreRequest": {
        **_POOL,
        "text_1": Note("one text, or as many as text_2", bounds="up to 65,536"),
        "text_2": Note("the texts on the other side", bounds="up to 65,536"),
        "queries": Note("another name of text_1"),
        "documents": Note("another name of text_2"),
        "data_1": Note("another name of text_1"),
        "data_2": Note("another name of text_2"),
        "instruction": Note("for a reranker with a template that takes one", "the template's"),
        "weights_for_different_modes": Note("of BGE-M3: three weights, of dense, sparse and token vectors", "dense alone"),
    },
    "ScoreResponse": _ANSWER,
    "Score": {
        **_INDEX,
        "score": Note("of the pair: the classifier's, the cosine of two vectors, or MaxSim of the tokens' vectors"),
    },
    "RerankRequest": {
        **_POOL,
        "truncate": Note("cut the longer text of a pair to what fits the context", "false"),
        "query": Note("one text"),
        "documents": Note("texts, or objects with a `text`", bounds="1 to 65,536"),
        "top_n": Note("how many documents are returned; 0: all", "all"),
        "return_documents": Note("with their texts", "true"),
        "max_tokens_per_query": Note("cut the query to so many tokens; 0: no limit", "0"),
        "max_tokens_per_doc": Note("cut documents to so many tokens; 0: no limit", "0"),
        "instruction": Note("for a reranker with a template that takes one", "the template's"),
        "weights_for_different_modes": Note("of BGE-M3: three weights, of dense, sparse and token vectors", "dense alone"),
        "texts": Note("in the place of documents: the answer is text-embeddings-inference's list of index and score"),
        "raw_scores": Note("without the model's activation", "false"),
        "return_text": Note("with texts: their texts", "false"),
    },
    "RerankResponse": {
        "id": Note("the request's id"),
        "model": Note("the served name"),
        "usage": Note("tokens of all prompts"),
        "results": Note("the best first"),
    },
    "RankedDocument": {
        "index": Note("among the documents"),
        "relevance_score": Note("of query and document"),
        "document": Note("its text"),
    },
    "RerankDocument": {"text": Note("as it was given")},
    "CohereEmbedRequest": {
        **_PROMPT,
        "texts": Note("the texts", bounds="1 to 2,048"),
        "input_type": Note("search_query, search_document, classification or clustering: chooses a prompt", "none"),
        "embedding_types": Note("float, int8, uint8, binary, ubinary", "float"),
        "output_dimension": Note("as dimensions", "all"),
        "max_tokens": Note("cut texts to so many tokens", "what fits the context"),
        "truncate": Note("NONE, START or END: the side that is cut off", "END"),
        "images": Note("vectors of images are not made", treatment="refused"),
        "inputs": Note("give texts", treatment="refused"),
    },
    "CohereEmbedResponse": {
        "id": Note("the request's id"),
        "embeddings": Note("by type, a row for each text"),
        "texts": Note("as they were given"),
        "meta": Note("what was counted"),
        "response_type": Note("embeddings_by_type"),
    },
    "CohereMeta": {"billed_units": Note("tokens of all texts"), "api_version": Note("2")},
    "BilledUnits": {"input_tokens": Note("of all texts")},
    "ApiVersion": {"version": Note("2")},
    "TeiEmbedRequest": {
        **_PROMPT,
        **_CUT,
        "inputs": _INPUT,
        "normalize": Note("vectors are normalized; refused on /embed_all, where they are not", "true"),
        "prompt_name": _PROMPT_NAME,
        "dimensions": Note("elements of a vector", "all", bounds="what the model was trained for"),
    },
    "PredictRequest": {
        **_PROMPT,
        **_CUT,
        "inputs": Note("a text, a pair of texts, or a list of lists of one or two texts"),
        "raw_scores": Note("without the model's activation", "false"),
    },
    "SparseValue": {"index": Note("a token's id"), "value": Note("its weight")},
    "Prediction": {"score": Note("of the label"), "label": Note("its name")},
    "SimilarityRequest": {
        **_PROMPT,
        "inputs": Note("a text and others"),
        "parameters": Note("how texts become prompts", "none"),
    },
    "SimilarityInputs": {"source_sentence": Note("one text"), "sentences": Note("those to compare it with")},
    "SimilarityParameters": {**_CUT, "prompt_name": _PROMPT_NAME},
    "OllamaEmbedRequest": {
        **_PROMPT,
        "input": Note("a text, or texts", bounds="up to 2,048"),
        "truncate": Note("cut prompts to what fits the context", "true"),
        "dimensions": Note("elements of a vector", "all", bounds="what the model was trained for"),
        "keep_alive": Note("the model stays loaded", treatment="harmless"),
        "options": Note("they are about sampling", treatment="harmless"),
    },
    "OllamaEmbedResponse": {
        "model": Note("the served name"),
        "embeddings": Note("normalized, in the order of the texts"),
        "total_duration": Note("nanoseconds"),
        "load_duration": Note("0"),
        "prompt_eval_count": Note("tokens of all prompts"),
    },
    "OllamaEmbeddingsRequest": {
        **_PROMPT,
        "prompt": Note("one text"),
        "keep_alive": Note("the model stays loaded", treatment="harmless"),
        "options": Note("they are about sampling", treatment="harmless"),
    },
    "OllamaEmbeddingsResponse": {"embedding": Note("not normalized")},
}

_OF_ANSWERS = (
    "EmbeddingResponse",
    "Embedding",
    "PoolingUsage",
    "RerankUsage",
    "PoolingResponse",
    "PoolingData",
    "ClassifyResponse",
    "Classification",
    "ScoreResponse",
    "Score",
    "RerankResponse",
    "RankedDocument",
    "RerankDocument",
    "CohereEmbedResponse",
    "CohereMeta",
    "BilledUnits",
    "ApiVersion",
    "Prediction",
    "SparseValue",
    "OllamaEmbedResponse",
    "OllamaEmbeddingsResponse",
)
POOLING_FIELDS = {struct: notes for struct, notes in _ALL.items() if struct not in _OF_ANSWERS}
POOLING_ANSWERS = {f"{struct}.{name}": note.text for struct in _OF_ANSWERS for name, note in _ALL[struct].items()}
