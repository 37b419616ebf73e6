"""vllm_config: the settings of this engine, under vLLM's names, that a logits processor's class gets when it is made."""

import json
from pathlib import Path
from types import SimpleNamespace

import torch

from quire.ipc.worker_config import WorkerConfig
from quire.workers.logits_processors.interface import ModelConfig as ProcessorsModelConfig
from quire.workers.logits_processors.interface import VllmConfig
from quire.workers.models.config import ModelConfig


def vllm_config(config: WorkerConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> VllmConfig:
    engine = config.engine
    file = Path(config.model_dir) / "config.json"
    hf_config = SimpleNamespace(**json.loads(file.read_text()))
    return VllmConfig(
        model_config=ProcessorsModelConfig(
            model=config.model_dir,
            tokenizer=config.model_dir,
            max_model_len=engine.max_model_len,
            dtype=dtype,
            seed=engine.seed,
            vocab_size=model.vocab_size,
            hf_config=hf_config,
            hf_text_config=hf_config,
        ),
        scheduler_config=SimpleNamespace(
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_model_len=engine.max_model_len,
            async_scheduling=True,
        ),
        cache_config=SimpleNamespace(block_size=engine.block_size),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=engine.tensor_parallel_size,
            pipeline_parallel_size=engine.pipeline_parallel_size,
            rank=config.rank,
        ),
        device_config=SimpleNamespace(device=device, device_type=device.type),
        speculative_config=None,
        additional_config={},
    )
