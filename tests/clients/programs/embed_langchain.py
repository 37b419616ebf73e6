"""LangChain's classes for OpenAI's route and for text-embeddings-inference. Arguments: URL, key, model, texts as JSON."""

import json
import sys
from importlib.metadata import version

from huggingface_hub import InferenceClient
from langchain_huggingface import HuggingFaceEndpointEmbeddings
from langchain_openai import OpenAIEmbeddings

url, key, model, texts = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
# Without this flag it sends ids of a vocabulary of OpenAI's.
of_openai = OpenAIEmbeddings(base_url=f"{url}/v1", api_key=key, model=model, check_embedding_ctx_length=False)
of_tei = HuggingFaceEndpointEmbeddings(model=model, huggingfacehub_api_token=key)
of_tei.client = InferenceClient(model=url, token=key)  # the class itself takes names of the hub alone
found = {"embed": of_openai.embed_documents(texts), "tei": of_tei.embed_documents(texts)}
print(json.dumps({"version": f"{version('langchain-openai')}, {version('langchain-huggingface')}", **found}))
