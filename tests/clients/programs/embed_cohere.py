"""Cohere's package: vectors and a ranking by its second version of both routes. Arguments: URL, key, model, texts as JSON."""

import json
import sys
from importlib.metadata import version

import cohere

url, key, model, texts = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
client = cohere.ClientV2(api_key=key, base_url=url)
vectors = client.embed(model=model, texts=texts, input_type="search_document", embedding_types=["float"]).embeddings.float_
ranked = client.rerank(model=model, query=texts[0], documents=texts, top_n=2).results
found = {"embed": vectors, "rerank": [each.index for each in ranked]}
print(json.dumps({"version": version("cohere"), **found}))
