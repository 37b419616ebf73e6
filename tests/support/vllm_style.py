"""Logits processors as users write them for vLLM, with its imports: loaded by name in workers, which have no vLLM."""

import torch
from vllm import SamplingParams as SameParams
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.logits_process import LogitsProcessor as RequestLogitsProcessor
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

assert SameParams is SamplingParams
logger = init_logger(__name__)


class OnlyToken(LogitsProcessor):
    """extra_args {"only": id}: nothing else is sampled."""

    @classmethod
    def validate_params(cls, params: SamplingParams):
        only = (params.extra_args or {}).get("only")
        if only is not None and not isinstance(only, int):
            raise ValueError(f"only must be a token id, got {only!r}")

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool):
        self.vocab_size = vllm_config.model_config.get_vocab_size()
        assert vllm_config.scheduler_config.max_num_seqs > 0 and vllm_config.model_config.hf_config.model_type
        assert not is_pin_memory and device.type == "cpu"
        self.only: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None):
        process_dict_updates(self.only, batch_update, lambda params, _, __: (params.extra_args or {}).get("only"))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert logits.shape[1] == self.vocab_size
        for row, token in self.only.items():
            kept = logits[row, token].clone()
            logits[row] = float("-inf")
            logits[row, token] = kept
        return logits


class Repeat(AdapterLogitsProcessor):
    """extra_args {"repeat": true}: the prompt again."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        return self.repeat if (params.extra_args or {}).get("repeat") else None

    def repeat(self, prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[prompt[len(output) % len(prompt)]] = 1e4
        return logits


class Unmakeable(OnlyToken):
    def __init__(self, vllm_config, device, is_pin_memory):
        raise RuntimeError("no such file\nand more")


NOT_A_CLASS = 3


class NotAProcessor:
    pass
