"""Whether a model mixes tokens outside attention: by a convolution, a scan, a recurrence, or positions that it counts itself.

A step has tokens of many sequences side by side, so an operation that mixes neighbors would mix sequences, and there is no
place to keep a state between steps. `OnlyAttentionMixes` checks each operation of a forward pass over T tokens, where T is a
number that no other dimension has: an operation that reduces, shifts, cuts or multiplies along it is refused.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire.workers.models.config import ModelConfigError
from quire.workers.models.transformers.counting import Counting

PRIMES = (37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109, 113, 127, 131, 137, 139, 149)
NEIGHBOURS = 4  # sizes near T, which a convolution's padding may produce
ALONG = ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "flip", "roll", "sort", "topk", "diff", "fft", "unfold")
REDUCTIONS = (
    "sum",
    "mean",
    "amax",
    "amin",
    "max",
    "min",
    "softmax",
    "var",
    "std",
    "norm",
    "logsumexp",
    "prod",
    "argmax",
    "all",
    "any",
)
PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2)}
CUTS = ("slice", "select", "split", "constant_pad_nd", "narrow", "chunk", "unbind", "index_select")


def choose_length(dimensions: Iterable[int]) -> int:
    """A number of tokens that is not equal to one of these dimensions, nor near one."""
    taken = set(dimensions)
    for prime in PRIMES:
        if not any(prime + i in taken for i in range(-NEIGHBOURS, NEIGHBOURS + 1)):
            return prime
    raise ModelConfigError("the model has too many different sizes to be looked through")


class OnlyAttentionMixes(TorchDispatchMode):
    """Raises ModelConfigError in an operation that mixes tokens, of which there are `length`."""

    def __init__(self, length: int, counting: Counting | None = None):
        super().__init__()
        self._length, self._counting = length, counting

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if reason := self._mixes(name, args, kwargs, out):
            raise ModelConfigError(f"tokens meet outside attention: {reason} ({name})")
        return out

    def _mixes(self, name: str, args: Sequence[Any], kwargs: Any, out: Any) -> str:
        length = self._length
        shapes = [x.shape for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        out_shapes = [x.shape for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        if name.startswith("arange") and any(length in shape for shape in out_shapes):
            if self._counting is not None and self._counting.is_counting:
                return ""
            return "positions are counted, not taken from position_ids"
        if any(list(shape).count(length) > 1 for shape in out_shapes):
            return "a matrix of tokens by tokens"
        if not any(length in shape for shape in shapes):
            return ""
        if "conv" in name:
            return "a convolution"
        if name in PRODUCTS:
            x = args[PRODUCTS[name][0]]
            return "a product over tokens" if x.shape[-1] == length else ""
        if name in CUTS:
            before, after = (sum(length in shape for shape in some) for some in (shapes, out_shapes))
            return "some tokens are picked" if after < before else ""
        if any(word in name for word in ALONG):
            return "what is computed from token to token" if self._along(args, kwargs, default=-1) else ""
        if any(name.strip("_").startswith(word) for word in REDUCTIONS):
            return "a sum over tokens" if self._along(args, kwargs, default=None) else ""
        return ""

    def _along(self, args: Sequence[Any], kwargs: Any, default: int | None) -> bool:
        """Whether the operation's dimensions include that of the tokens. If it names none: `default`, where None means all."""
        x = args[0]
        if not isinstance(x, torch.Tensor) or (len(args) > 1 and isinstance(args[1], torch.Tensor)):
            return False
        dims = kwargs.get("dim", args[1] if len(args) > 1 else default)
        if isinstance(dims, float):  # a norm's exponent, which comes first
            dims = kwargs.get("dim", args[2] if len(args) > 2 else None)
        if dims is None or dims == []:
            return self._length in x.shape
        if isinstance(dims, bool) or not isinstance(dims, (int, list, tuple)):
            return False
        dims = [dims] if isinstance(dims, int) else dims
        return any(-x.dim() <= d < x.dim() and x.shape[d] == self._length for d in dims)
