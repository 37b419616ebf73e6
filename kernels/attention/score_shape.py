"""How a layer changes its attention scores besides scaling them: softcap, ALiBi and attention sinks. Formulas: tile.py.

All attention functions, GPU and CPU, take these arguments; kernels are compiled for those in use (`flags`). No Triton here.
"""

from typing import NamedTuple

import torch


class ScoreShape(NamedTuple):
    """`softcap` 0: none. `slopes` float32 [Hq]: ALiBi's; `sinks` [Hq], any float dtype: logits that every query sees."""

    softcap: float = 0.0
    slopes: torch.Tensor | None = None
    alibi_scale: float = 1.0  # of the biases
    rounds_alibi: bool = False  # slope, position and their product are rounded to bfloat16
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        return self.softcap == 0.0 and self.slopes is None and self.sinks is None

    @property
    def flags(self) -> dict[str, bool | int]:
        """The kernels' constants: ALIBI is 0 for none, 2 where it is rounded."""
        alibi = 0 if self.slopes is None else 2 if self.rounds_alibi else 1
        return {"SOFTCAP": self.softcap > 0.0, "ALIBI": alibi, "SINKS": self.sinks is not None}

    def check(self, num_heads: int) -> None:
        """Raise ValueError for arguments that the kernels would misread."""
        for name, tensor in (("slopes", self.slopes), ("sinks", self.sinks)):
            if tensor is not None and (tensor.shape != (num_heads,) or tensor.stride(0) != 1):
                raise ValueError(f"{name} must be dense [{num_heads}], not {tensor.shape}")
        if not self.softcap >= 0.0:
            raise ValueError(f"softcap must be positive, or 0 for none, not {self.softcap}")

    def alibi(self, keys: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """The biases [n, Hq, Q, L] of keys at positions [n, L] for queries at positions own [n, Q], in the slopes' dtype."""
        assert self.slopes is not None
        slopes = self.slopes[:, None, None]
        if self.rounds_alibi:
            of_keys, of_own = (slopes.bfloat16() * x.bfloat16() for x in (keys[:, None, None], own[:, None, :, None]))
            return (of_keys.to(slopes.dtype) - of_own.to(slopes.dtype)) * self.alibi_scale
        return slopes * (keys[:, None, None] - own[:, None, :, None]) * self.alibi_scale


PLAIN_SCORES = ScoreShape()
