"""LlamaIndex's classes for OpenAI's route and for text-embeddings-inference. Arguments: URL, key, model, texts as JSON."""

import json
import sys
from importlib.metadata import version

from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.embeddings.text_embeddings_inference import TextEmbeddingsInference
from llama_index.postprocessor.tei_rerank import TextEmbeddingInference

url, key, model, texts = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
of_openai = OpenAILikeEmbedding(model_name=model, api_base=f"{url}/v1", api_key=key)
of_tei = TextEmbeddingsInference(model_name=model, base_url=url, auth_token=key)
ranker = TextEmbeddingInference(model_name=model, base_url=url, auth_token=f"Bearer {key}", top_n=2)
nodes = [NodeWithScore(node=TextNode(text=text)) for text in texts]
ranked = [texts.index(each.node.text) for each in ranker.postprocess_nodes(nodes, query_str=texts[0])]
vectors = {"embed": of_openai.get_text_embedding_batch(texts), "tei": of_tei.get_text_embedding_batch(texts)}
print(json.dumps({"version": version("llama-index-core"), **vectors, "rerank": ranked}))
