"""Templates of rerankers: a query and a document as one prompt. The texts are those of the models' cards."""

from quire.ipc.pooling import ScoreTemplate

QWEN3_RERANKER = ScoreTemplate(  # Qwen/Qwen3-Reranker-0.6B
    instruction="Given a web search query, retrieve relevant passages that answer the query",
    parts=[
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: ',
        "\n<Query>: ",
        "\n<Document>: ",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ],
)
