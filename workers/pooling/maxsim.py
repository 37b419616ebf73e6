"""MaxSim on the device: scores of documents for a query, both by the vectors of their tokens (arXiv:2004.12832, section 3.2).

    score(q, d) = sum over the query's tokens of the greatest <q_i, d_j> over the document's tokens

Bytes moved for documents of T tokens in all, a query of q tokens and D elements: 4 (T D + q D + 2 T q). A document without
tokens has 0.
"""

import numpy as np
import torch


def maxsim(vectors: torch.Tensor, lengths: np.ndarray, kept: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor:
    """float32 [n, 1]. vectors: [T, D] of all documents, one after the other; lengths: [n], their tokens. kept: bool [T], of
    tokens that count; None: all. query: [q, D]."""
    products = vectors @ query.T  # [T, q]
    if kept is not None:
        products = products.masked_fill(~kept[:, None], -torch.inf)
    own = torch.from_numpy(lengths.astype(np.int64)).to(vectors.device)
    best = torch.segment_reduce(products, "max", lengths=own, initial=-torch.inf)  # [n, q]; NaN stays NaN
    return torch.where(best == -torch.inf, 0.0, best).sum(1, keepdim=True)
