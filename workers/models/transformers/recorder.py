"""Records a forward pass of a transformers model: it runs once on the meta device, where nothing is computed.

The recording has the attention calls (one a layer: heads, sizes, scale, mask), the causal model's call of its body, and the
input tensors of linear layers. A model that cannot run a step of mixed sequences is refused with the reason (ModelConfigError):
recurrences, cross attention, masks that are not causal, unknown arguments of attention, branches on data. Called by read.py for
the model's config, and by model.py for its construction.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from quire.workers.models.config import ModelConfigError, RopeConfig
from quire.workers.models.transformers.counting import Counting
from quire.workers.models.transformers.interface import ATTENTION, EXPERTS, NAME
from quire.workers.models.transformers.mixing import OnlyAttentionMixes, choose_length
from quire.workers.models.transformers.rotary import RotaryWatch
from quire.workers.models.transformers.skeleton import Model, one_line, text_config

IDS, POSITIONS = "input_ids", "position_ids"
# arguments of attention without effect: known from elsewhere, or asking for outputs that are not read
INERT = frozenset(
    [
        "position_ids",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_router_logits",
        "output_hidden_states",
        "return_dict",
        "dropout",
        "is_causal",
        "past_key_values",
        "position_embeddings",
        "logits_to_keep",
        "training",
        "layer_idx",
    ]
)
FAR = 1 << 17  # a position at which masks are checked: no window is that wide


class AttentionCall(NamedTuple):
    """The attention call of one layer."""

    module: str  # the name of the attention module
    num_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    scale: float
    window: int  # 0: there is none
    softcap: float
    has_sinks: bool
    rope: RopeConfig | None = None  # if our attention rotates queries and keys (rotary.py)


class LinearCall(NamedTuple):
    """A linear layer's call; `input` numbers the tensor that it took."""

    module: str
    input: int


class Recording(NamedTuple):
    attention: tuple[AttentionCall, ...]
    body: str  # the name of the module between embedding and head
    body_arguments: dict[str, Any]  # constants, and IDS or POSITIONS for these tensors
    linears: tuple[LinearCall, ...]  # those that ours may replace, in the order of their calls
    experts: tuple[str, ...]
    hidden_size: int
    vocab_size: int
    first_position: int  # the number of a sequence's first position
    counting: int | None  # number of the torch.arange call that counts positions (counting.py)
    rotations: tuple[str, ...]  # Python modules in which apply_rotary_pos_emb must do nothing: our attention rotates


class _Mask(NamedTuple):
    """A mask that transformers asked for; the tensor stands for it until attention is called."""

    tensor: torch.Tensor
    function: Any  # (batch, head, query, key) -> whether the key is seen


def record(model: Model) -> Recording:
    """Run `model`, with parameters on the meta device, over a few tokens. Raises ModelConfigError with the reason."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelConfigError("it is an encoder and a decoder: cross attention is not supported")
    recorder = _Recorder(model)
    try:
        with torch.no_grad(), _buffers_on_meta(model), recorder.looking():
            logits = recorder.run()
    except ModelConfigError:
        raise
    except Exception as error:  # any model's code may raise anything when run like this: then it cannot be served
        raise ModelConfigError(f"its forward pass depends on data, or takes other inputs: {one_line(error)}") from None
    return recorder.recording(logits)


class _Recorder:
    def __init__(self, model: Model):
        self._model = model
        self._names = {module: name for name, module in model.named_modules()}
        sizes = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
        self._length = choose_length(sizes | set(_integers(model.config.to_dict())))
        self._masks: list[_Mask] = []
        self._calls: list[AttentionCall] = []
        self._experts: dict[str, None] = {}
        self._linears = _Linears(self._names)
        self._rotary = RotaryWatch(model)
        self._counting = Counting(self._length)
        self._body: tuple[str, dict[str, Any]] | None = None
        self._hidden_size = 0
        self._inputs = {name: torch.zeros(1, self._length, device="meta", dtype=torch.long) for name in (IDS, POSITIONS)}

    def run(self) -> torch.Tensor:
        out = self._model(**self._inputs, use_cache=False)
        return out.logits  # type: ignore[no-any-return]

    def recording(self, logits: object) -> Recording:
        if self._body is None:
            raise ModelConfigError("it has no base model between embedding and head")
        layers = getattr(text_config(self._model.config), "num_hidden_layers", None)
        if not self._calls:
            raise ModelConfigError("its attention does not go through transformers' attention interface")
        names = [call.module for call in self._calls]
        if len(set(names)) < len(names):
            raise ModelConfigError(f"{names[-1]} attends twice: a layer that is run more than once is not supported")
        if isinstance(layers, int) and len(names) < layers:
            raise ModelConfigError(
                f"{len(names)} of {layers} layers attend: the others would be recurrent, or attend to other inputs"
            )
        if not isinstance(logits, torch.Tensor) or logits.dim() != 3 or logits.shape[1] != self._length:
            raise ModelConfigError("it does not give logits of each token")
        name, arguments = self._body
        ropes = self._rotary.found()
        return Recording(
            tuple(call._replace(rope=ropes.of_layer.get(call.module)) for call in self._calls),
            name,
            arguments,
            self._linears.found(),
            tuple(self._experts),
            self._hidden_size,
            logits.shape[2],
            _first_position(self._model),
            self._counting.place(POSITIONS in inspect.signature(self._model.get_submodule(name).forward).parameters),
            ropes.python_modules,
        )

    @contextlib.contextmanager
    def looking(self) -> Iterator[None]:
        find_packed = masking_utils.find_packed_sequence_indices
        hooks = [
            hook
            for module in self._names
            if isinstance(module, Model) and module is not self._model
            for hook in (
                module.register_forward_pre_hook(self._enter_body, with_kwargs=True),
                module.register_forward_hook(self._leave_body),
            )
        ]
        for module in self._names:
            module.__dict__.update({ATTENTION: self._attention, EXPERTS: self._mixture})
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, self._mask)
        masking_utils.find_packed_sequence_indices = lambda position_ids: None  # the original reads values
        try:
            with (
                OnlyAttentionMixes(self._length, self._counting),
                self._counting.watched(),
                self._linears.watched(),
                self._rotary.watched(),
            ):
                yield
        finally:
            masking_utils.find_packed_sequence_indices = find_packed
            del ALL_MASK_ATTENTION_FUNCTIONS._global_mapping[NAME]
            for module in self._names:
                module.__dict__.pop(ATTENTION), module.__dict__.pop(EXPERTS)
            for hook in hooks:
                hook.remove()

    # --------------------------------------------------------------------------------------------------------- body
    def _enter_body(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = self._names[module]
        if self._body is not None:
            if not name.startswith(f"{self._body[0]}."):
                raise ModelConfigError(f"it runs {name} beside {self._body[0]}")
            return
        self._counting.begin()
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        given = dict(bound.arguments)
        for parameter in bound.signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                given |= given.pop(parameter.name, {})
        self._body = name, {key: self._argument(key, value) for key, value in given.items() if value is not None}

    def _argument(self, name: str, value: object) -> object:
        for known, tensor in self._inputs.items():
            if value is tensor:
                return known
        if isinstance(value, (bool, int, float, str)):
            return value
        raise ModelConfigError(f"its head model computes {name} before its body")

    def _leave_body(self, module: nn.Module, args: object, output: Any) -> None:
        if self._body is not None and self._names[module] == self._body[0]:
            hidden = output[0]
            if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3 or hidden.shape[1] != self._length:
                raise ModelConfigError("its body does not give a hidden state of each token")
            self._hidden_size = hidden.shape[2]

    # ---------------------------------------------------------------------------------------------------- attention
    def _mask(self, *, mask_function: Any, **kwargs: Any) -> torch.Tensor:
        made = _Mask(torch.empty(1, 1, 1, 1, device="meta"), mask_function)
        self._masks.append(made)
        return made.tensor

    def _attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        sliding_window: int | None = None,
        **others: Any,
    ) -> torch.Tensor:
        name, (_, heads, length, qk_dim) = self._names[module], query.shape
        for argument, given in others.items():
            if argument not in INERT and given is not None and given is not False:
                raise ModelConfigError(f"{name} gives attention {argument}, which is not known")
        if query.shape[0] != 1 or length != self._length or key.shape[2] != length or value.shape[2] != length:
            raise ModelConfigError(f"{name} attends to other tokens than its own: cross attention is not supported")
        masks = [made.function for made in self._masks if made.tensor is mask]
        if not masks:
            raise ModelConfigError(f"{name} has a mask of its own" if mask is not None else f"{name} has no causal mask")
        if heads % key.shape[1]:
            raise ModelConfigError(f"{name} has {heads} heads for {key.shape[1]} of keys, which must divide them")
        if s_aux is not None and s_aux.numel() != heads:
            raise ModelConfigError(f"{name} gives attention s_aux of {s_aux.numel()} values for {heads} heads")
        if not isinstance(scaling, (int, float, type(None))) or not isinstance(softcap, (int, float, type(None))):
            raise ModelConfigError(f"{name} gives attention a scaling or softcap that is no number")
        scale = qk_dim**-0.5 if scaling is None else float(scaling)
        self._rotary.attended(name, query, key)
        sizes = heads, key.shape[1], qk_dim, value.shape[3]
        self._calls.append(AttentionCall(name, *sizes, scale, _window(masks[0]), float(softcap or 0.0), s_aux is not None))
        return query.new_zeros(1, length, heads, value.shape[3])

    def _mixture(
        self, module: nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, *more: Any
    ) -> torch.Tensor:
        name = self._names[module]
        if more or hidden.dim() != 2 or ids.dim() != 2 or ids.shape != weights.shape or ids.shape[0] != hidden.shape[0]:
            raise ModelConfigError(f"{name} gives its experts what is not known")
        self._experts[name] = None
        return torch.zeros_like(hidden)


class _Linears:
    """Linear layers that are called, with weights that no other code reads."""

    def __init__(self, names: dict[nn.Module, str]):
        self._names: dict[nn.Module, str] = {m: name for m, name in names.items() if type(m) is nn.Linear}
        self._calls: list[LinearCall] = []
        self._inputs: list[torch.Tensor] = []  # kept alive, so that ids stay unique
        self._touched: set[str] = set()
        self._is_called = False

    def found(self) -> tuple[LinearCall, ...]:
        once = [call.module for call in self._calls]
        return tuple(call for call in self._calls if call.module not in self._touched and once.count(call.module) == 1)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        owner = self

        class Watched(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                owner._called(self, x)
                owner._is_called = True
                try:
                    return super().forward(x)
                finally:
                    owner._is_called = False

            def __getattr__(self, name: str) -> Any:
                if name in ("weight", "bias") and not owner._is_called:
                    owner._touched.add(owner._names[self])
                return super().__getattr__(name)

        for module in self._names:
            module.__class__ = Watched
        try:
            yield
        finally:
            for module in self._names:
                module.__class__ = nn.Linear

    def _called(self, module: nn.Module, x: torch.Tensor) -> None:
        number = next((i for i, known in enumerate(self._inputs) if known is x), None)
        if number is None:
            self._inputs.append(x)
            number = len(self._inputs) - 1
        self._calls.append(LinearCall(self._names[module], number))


def _first_position(model: Model) -> int:
    """0, except in models that count positions from after the padding token's id (such as RoBERTa)."""
    for module in model.modules():
        if (count := getattr(module, "create_position_ids_from_input_ids", None)) is not None:
            padding = int(module.padding_idx)  # type: ignore[arg-type]
            found = count(torch.full((1, 3), padding + 1), padding)[0].tolist()
            if found != list(range(found[0], found[0] + 3)):
                raise ModelConfigError("its positions are not counted one by one")
            return int(found[0])
    return 0


def _window(mask_function: Any) -> int:
    """The window of a causal mask; 0 for none. Raises ModelConfigError for any other mask."""
    counts = set()
    for query in (FAR, FAR + 1):
        seen = mask_function(0, 0, torch.tensor(query), torch.arange(FAR + 64))
        seen = torch.as_tensor(seen).expand(FAR + 64)
        count = int(seen.sum())
        if not count:
            raise ModelConfigError("no token sees any: its window is 0, and must be null where there is none")
        if bool(seen[query + 1 :].any()):
            raise ModelConfigError("its attention sees later tokens: it is not causal")
        if not bool(seen[query + 1 - count : query + 1].all()):
            raise ModelConfigError("it has a mask that is not causal, nor a window")
        counts.add(count if count <= FAR - 1 else 0)
    if len(counts) > 1:
        raise ModelConfigError("it attends within chunks of the sequence")
    return counts.pop()


@contextlib.contextmanager
def _buffers_on_meta(model: nn.Module) -> Iterator[None]:
    kept = [(module, name, b) for module in model.modules() for name, b in module._buffers.items() if b is not None]
    for module, name, buffer in kept:
        module._buffers[name] = buffer.to("meta")
    try:
        yield
    finally:
        for module, name, buffer in kept:
            module._buffers[name] = buffer


def _integers(value: object) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _integers(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _integers(inner)
