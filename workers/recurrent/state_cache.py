"""StateCache: the device memory of recurrent states, and each layer's part of it. The core assigns state ids.

A state is what all recurrent layers of this rank keep of one sequence. It is one piece of memory, so that one copy copies all
of it; a layer's tensors are views of all states. State 0 is the dummy, which padded rows read and write.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch

from quire.ipc.memory_plan import STATE_ALIGNMENT
from quire.workers.models.config import ModelConfig, StateTensor
from quire.workers.parallel import Parallel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class StateCache:
    """tensors: of each layer's state, for this stage's layers. dtype: of recurrent tensors; activations: of the others.
    kept_sizes: elements of what a layer keeps of a token of a window, in activations."""

    def __init__(
        self,
        tensors: Mapping[int, tuple[StateTensor, ...]],
        dtype: torch.dtype,
        activations: torch.dtype,
        kept_sizes: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
    ):
        self._kept_sizes, self._activations = kept_sizes, activations
        self._places: dict[int, list[tuple[int, StateTensor, torch.dtype]]] = {}  # layer -> (first byte, tensor, dtype)
        self.state_bytes = 0
        for layer, some in tensors.items():
            self._places[layer] = []
            for tensor in some:
                own = dtype if tensor.is_recurrent else activations
                self._places[layer].append((self.state_bytes, tensor, own))
                num_bytes = own.itemsize * torch.Size(tensor.shape).numel()
                self.state_bytes += -(-num_bytes // STATE_ALIGNMENT) * STATE_ALIGNMENT
        self.num_states = 0
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}

    @classmethod
    def of_nothing(cls) -> "StateCache":
        """For models without recurrent layers."""
        return cls({}, torch.float32, torch.float32)

    def allocate(self, num_states: int, device: torch.device) -> None:
        """Replace the memory. The dummy state is zeroed, so that it contains no NaN; the others hold anything."""
        self.release()
        self.num_states = num_states
        self._memory = torch.empty(num_states, self.state_bytes, dtype=torch.uint8, device=device)
        self._memory[:1].zero_()
        self._views = {layer: tuple(self._view(*place) for place in places) for layer, places in self._places.items()}

    def release(self) -> None:
        """Free the memory."""
        self._memory, self._views, self.num_states = torch.empty(0, dtype=torch.uint8), {}, 0

    def tensors(self, layer: int) -> tuple[torch.Tensor, ...]:
        """The layer's tensors of all states, [num_states, *shape]; only the first dimension is not contiguous. They are valid
        until the memory is replaced."""
        return self._views[layer]

    def new_kept(self, num_tokens: int, device: torch.device) -> dict[int, tuple[torch.Tensor, ...]]:
        """Memory for what layers keep of num_tokens tokens: by layer, each tensor [num_tokens, size]."""

        def new(size: int) -> torch.Tensor:
            return torch.zeros((num_tokens, size), dtype=self._activations, device=device)

        return {layer: tuple(map(new, sizes)) for layer, sizes in self._kept_sizes.items()}

    def copy(self, source: int, target: int) -> None:
        """Copy one state to another."""
        self._memory[target].copy_(self._memory[source])

    def _view(self, first: int, tensor: StateTensor, dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(tensor.shape).numel() * dtype.itemsize
        return self._memory[:, first : first + size].view(dtype).unflatten(1, tensor.shape)


def state_cache_of(config: ModelConfig, parallel: Parallel, activations: torch.dtype, asked: str = "auto") -> StateCache:
    """The cache of this stage's layers. asked: --mamba-ssm-cache-dtype; auto: what the checkpoint says, or float32."""
    name = (config.state_dtype or "float32") if asked == "auto" else asked
    tensors, kept, stage = config.state_tensors(parallel), config.kept_sizes(parallel), parallel.stage
    own = {i: some for i, some in tensors.items() if stage.count == 1 or i in stage.layers}
    return StateCache(own, DTYPES[name], activations, {i: kept[i] for i in own})
