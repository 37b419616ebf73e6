"""What tests of experts' kernels have in common: activations, tolerances by dtype, and shapes of real models."""

import torch

from quire.kernels.experts.experts_reference import SwiGLU

CLAMPED = SwiGLU(limit=1.0, alpha=1.702, offset=1.0)
GELU = SwiGLU(alpha=1.5957691216057308, cubic=0.044715)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
# hidden, intermediate, experts, top k
QWEN, GPT_OSS, DEEPSEEK = (2048, 768, 128, 8), (2880, 2880, 32, 4), (2048, 1408, 64, 6)
