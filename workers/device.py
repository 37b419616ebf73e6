"""What every device's code is given: the model's shape, the step's limits and the memory that stays for the worker's life."""

from dataclasses import dataclass

import torch

from quire.kernels.tables import FeaturePool
from quire.workers.kv_cache import KVCache
from quire.workers.model_config import ModelConfig

FEATURE_POOL_BYTES = 256 << 20
MIN_FEATURE_ROWS = 8


def num_feature_rows(vocab_size: int, max_num_seqs: int) -> int:
    """Rows of the pool of rare sampling state: 8 bytes a token and row, within FEATURE_POOL_BYTES."""
    return min(max_num_seqs, max(FEATURE_POOL_BYTES // (8 * vocab_size), MIN_FEATURE_ROWS))


@dataclass
class DeviceContext:
    config: ModelConfig
    cache: KVCache
    pool: FeaturePool
    cos_sin: torch.Tensor  # float32 [max_model_len, rotary_dim]
    device: torch.device
    dtype: torch.dtype
    max_tokens: int  # of a step
    max_rows: int
    max_blocks: int  # of a block table
    max_plan_words: int

    @property
    def scale(self) -> float:
        return self.config.head_dim**-0.5
