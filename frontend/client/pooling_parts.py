"""Results of several tasks that one computation of a prompt has served: its row of numbers, taken apart."""

import numpy as np

from quire.ipc.pooling import PoolingInfo, PoolingTask, PoolRow


def split_tasks(result: np.ndarray, row: PoolRow, info: PoolingInfo, num_tokens: int) -> dict[PoolingTask, np.ndarray]:
    """A result of several tasks as those of each: float32 [columns] or [n, columns]. num_tokens: of the prompt."""
    num_vectors = num_tokens - ("embed_sparse" in info.tasks)  # BGE-M3's first token has none
    found: dict[PoolingTask, np.ndarray] = {}
    at = 0
    for task in (row.task, *row.more):
        if task == "embed_sparse":  # it is the last of TASKS
            found[task] = result[at:].reshape(-1, 2)
        elif task == "token_embed":
            columns = row.dimensions or info.token_size or info.embedding_size
            found[task] = result[at : at + num_vectors * columns].reshape(num_vectors, columns)
            at += num_vectors * columns
        else:
            size = (row.dimensions or info.embedding_size) if task == "embed" else len(info.labels)
            found[task] = result[at : at + size]
            at += size
    return found
