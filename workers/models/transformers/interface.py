"""The attention and experts that transformers' models call, registered in transformers' interfaces as "quire".

Both call an attribute of the model's module, which recorder.py or model.py has set, so nothing here depends on the model that
runs. No function for masks is registered: then transformers makes no mask, and our attention is causal within each row.
"""

from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import AttentionInterface

NAME = "quire"
ATTENTION, EXPERTS = "quire_attention", "quire_experts"  # attributes of modules


def register() -> None:
    """Register both; it may be called again."""
    AttentionInterface.register(NAME, _attention)
    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, Hq, T, D], key [1, Hkv, T, D], value [1, Hkv, T, D'] -> [1, T, Hq, D']."""
    return getattr(module, ATTENTION)(module, query, key, value, attention_mask, **kwargs), None


def _experts(module: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """hidden states [T, H], ids [T, k], weights [T, k] -> [T, H]."""
    return getattr(module, EXPERTS)(module, *args, **kwargs)  # type: ignore[no-any-return]
