"""POOLING_ROUTES: the routes for vectors and scores, which the table of all routes (../routes.py) includes.

A model that cannot serve one of them answers 400, and says what it can.
"""

from typing import Any

from quire.frontend.http.api.pooling import tei
from quire.frontend.http.api.pooling.classify import ClassifyRequest, ClassifyResponse, classify
from quire.frontend.http.api.pooling.cohere import CohereEmbedRequest, CohereEmbedResponse
from quire.frontend.http.api.pooling.cohere import embed as cohere_embed
from quire.frontend.http.api.pooling.embeddings import EmbeddingRequest, EmbeddingResponse, embeddings
from quire.frontend.http.api.pooling.pool import PoolingRequest, PoolingResponse, pooling
from quire.frontend.http.api.pooling.rerank import RerankRequest, RerankResponse, rerank
from quire.frontend.http.api.pooling.score import ScoreRequest, ScoreResponse, score
from quire.frontend.http.api.route import Route

_PAIR = {"text_1": "What is a quire?", "text_2": ["A set of pages.", "A choir sings."]}
_RANK = {"query": "What is a quire?", "documents": ["A set of pages.", "A choir sings."]}


POOLING_ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/embeddings", embeddings, "Vectors of texts", "pooling", EmbeddingRequest, EmbeddingResponse,
          example={"input": ["A set of pages."]}, prompt_field="input"),
    Route("POST", "/v2/embed", cohere_embed, "Vectors of texts, as Cohere's API has them", "pooling", CohereEmbedRequest,
          CohereEmbedResponse, example={"texts": ["A set of pages."], "input_type": "search_document"}, prompt_field="texts"),
    Route("POST", "/pooling", pooling, "Results of any task: vectors or scores of texts or tokens", "pooling", PoolingRequest,
          PoolingResponse, example={"input": "A set of pages."}, prompt_field="input"),
    Route("POST", "/classify", classify, "Probabilities of labels", "pooling", ClassifyRequest, ClassifyResponse,
          example={"input": "A set of pages."}, prompt_field="input"),
    *(Route("POST", path, score, "How well pairs of texts fit", "pooling", ScoreRequest, ScoreResponse, example=_PAIR,
            prompt_field="text_2") for path in ("/score", "/v1/score")),
    *(Route("POST", path, rerank, "Documents in the order of their scores for a query", "pooling", RerankRequest,
            RerankResponse, example=_RANK, prompt_field="documents") for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    Route("POST", "/embed", tei.embed, "Vectors of texts, as text-embeddings-inference has them", "pooling",
          tei.TeiEmbedRequest, list[list[float]], example={"inputs": "A set of pages."}, prompt_field="inputs"),
    Route("POST", "/", tei.root, "As /embed, or as /predict of a classifier", "pooling", tei.TeiEmbedRequest,
          list[list[float]], example={"inputs": "A set of pages."}, prompt_field="inputs"),
    Route("POST", "/embed_all", tei.embed_all, "The same of each token", "pooling", tei.TeiEmbedRequest,
          list[list[list[float]]], example={"inputs": "A set of pages."}, prompt_field="inputs"),
    Route("POST", "/predict", tei.predict, "Probabilities of labels, as text-embeddings-inference has them", "pooling",
          tei.PredictRequest, list[tei.Prediction | list[tei.Prediction]], example={"inputs": "A set of pages."},
          prompt_field="inputs"),
    Route("POST", "/similarity", tei.similarity, "Cosines of a text and others, as text-embeddings-inference has them",
          "pooling", tei.SimilarityRequest, list[float], prompt_field="inputs",
          example={"inputs": {"source_sentence": "A set of pages.", "sentences": ["Many pages."]}}),
    Route("GET", "/info", tei.info, "The model, as text-embeddings-inference describes it", "pooling", answer=dict[str, Any]),
    Route("POST", "/embed_sparse", tei.embed_sparse, "Weights of tokens, as text-embeddings-inference has them", "pooling",
          tei.TeiEmbedRequest, list[list[tei.SparseValue]], example={"inputs": "A set of pages."}, prompt_field="inputs"),
)  # fmt: skip
