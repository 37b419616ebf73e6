"""Haystack's components for OpenAI's route and for text-embeddings-inference. Arguments: URL, key, model, texts as JSON."""

import json
import sys
from importlib.metadata import version

from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder
from haystack.utils import Secret
from haystack_integrations.components.embedders.huggingface_api import HuggingFaceAPIDocumentEmbedder
from haystack_integrations.components.rankers.huggingface_api import HuggingFaceTEIRanker

url, key, model, texts = sys.argv[1], Secret.from_token(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])


def documents() -> list[Document]:
    return [Document(content=text) for text in texts]


where = {"api_type": "text_embeddings_inference", "api_params": {"url": url}, "token": key, "normalize": True}
of_tei = HuggingFaceAPIDocumentEmbedder(**where, progress_bar=False).run(documents=documents())["documents"]
of_openai = OpenAIDocumentEmbedder(api_key=key, api_base_url=f"{url}/v1", model=model, progress_bar=False)
vectors = of_openai.run(documents=documents())["documents"]
ranked = HuggingFaceTEIRanker(url=url, top_k=2, token=key).run(query=texts[0], documents=documents())["documents"]
found = {"embed": [each.embedding for each in vectors], "tei": [each.embedding for each in of_tei]}
both = f"{version('haystack-ai')}, {version('huggingface-api-haystack')}"
print(json.dumps({"version": both, **found, "rerank": [texts.index(each.content) for each in ranked]}))
