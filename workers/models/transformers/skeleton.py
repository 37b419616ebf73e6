"""config.json's fields -> a model of transformers without weights: parameters on the meta device, buffers computed.

The model's own constructor computes its buffers (rotary frequencies, tables of positions) on the CPU. Parameters are not
initialized, and no code from a checkpoint is run. The model calls attention and experts through interface.py.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.workers.models.config import ModelConfigError
from quire.workers.models.transformers.interface import NAME, register
from quire.workers.models.transformers.rotary import refuse_dynamic, still_longrope

Model = transformers.PreTrainedModel
LARGE = 1 << 28  # elements
_COUNT = re.compile(r"^(num|n)_.*(layer|expert|block)|layers$")
MAX_COUNT = 2048  # of layers, and of experts: one takes 15 ms to make and to record
QUANTIZATION = ("quantization_config", "compression_config")  # not passed on: transformers would change layers by them


def read_config(fields: dict[str, Any]) -> Any:
    """transformers' config. Raises ModelConfigError."""
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        if fields.get("auto_map"):
            raise ModelConfigError(
                f"config.json has an auto_map, and model_type {model_type!r:.80} is not known to transformers "
                f"{transformers.__version__}: code that comes with a checkpoint is not run"
            )
        raise ModelConfigError(f"model_type {model_type!r:.80} is not known to transformers {transformers.__version__}")
    plain = {name: value for name, value in fields.items() if name not in (*QUANTIZATION, "auto_map")}
    _check_counts(plain)
    cls = CONFIG_MAPPING[model_type]
    try:
        return cls.from_dict(cls._decode_special_floats(plain))  # as from a file
    except Exception as error:  # whatever the validators and constructors of any model raise is about config.json
        raise ModelConfigError(f"transformers cannot read config.json: {one_line(error)}") from None


def _check_counts(fields: dict[str, Any]) -> None:
    """Refuse layers and experts without end: transformers makes a module of each. Raises ModelConfigError."""
    for name, value in fields.items():
        if isinstance(value, dict):
            _check_counts(value)
        elif _COUNT.search(str(name)) and isinstance(value, int | float) and not value <= MAX_COUNT:
            raise ModelConfigError(f"config.json: {name} is {value!r:.40}: at most {MAX_COUNT} are supported")


def model_class(config: Any, architectures: object) -> type[Model]:
    """The causal language model of a config. Raises ModelConfigError, also if config.json asks for another class."""
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelConfigError(f"transformers has no causal language model of model_type {config.model_type}")
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    classes: tuple[type[Model], ...] = found if isinstance(found, tuple) else (found,)
    if not isinstance(architectures, list) or not architectures:
        return classes[0]
    asked = {_plain(name) for name in architectures}
    for cls in classes:
        if _plain(cls.__name__) in asked:
            return cls
    if _plain(f"{config.model_type}ForCausalLM") in asked:
        return classes[0]  # published before transformers had it, with another class (InternLM 3 with Llama's)
    raise ModelConfigError(
        f"architecture {architectures[0]!s:.80} is not the causal language model of its model_type, which is "
        f"{classes[0].__name__}"
    )


def _plain(architecture: object) -> str:
    """The name without case and underscores, in which published names may differ from classes: PhiMoEForCausalLM."""
    return str(architecture).replace("_", "").casefold()


def build_skeleton(config_json: str, dtype: torch.dtype) -> Model:
    """The model of a config.json in evaluation mode. Raises ModelConfigError."""
    register()
    fields = json.loads(config_json)
    config = read_config(fields)
    cls = model_class(config, fields.get("architectures"))
    if getattr(cls, "_is_stateful", False):
        raise ModelConfigError("it is recurrent: its layers keep a state that is not keys and values")
    try:
        with no_init_weights(), _LargeOnMeta(), parameters_on_meta(), torch.inference_mode(False):
            model = cls._from_config(config, dtype=dtype, attn_implementation=NAME, experts_implementation=NAME)
    except Exception as error:  # as in read_config
        if isinstance(error, KeyError) and error.args == (NAME,):
            raise ModelConfigError("its attention does not go through transformers' attention interface") from None
        raise ModelConfigError(f"transformers cannot build {cls.__name__} from config.json: {one_line(error)}") from None
    if empty := next((name for name, parameter in model.named_parameters() if not parameter.numel()), None):
        raise ModelConfigError(f"{empty} has no elements")
    for module in model.modules():
        if isinstance(module, Model):  # this reads the ids, to warn of padding; there is none
            module.warn_if_padding_and_no_attention_mask = _nothing  # type: ignore[assignment]
    refuse_dynamic(model)
    still_longrope(model)
    return model.train(False).requires_grad_(False)


def text_config(config: Any) -> Any:
    """The config of the text model, which may be nested. Raises ModelConfigError."""
    try:
        return config.get_text_config(decoder=True)
    except ValueError as error:
        raise ModelConfigError(one_line(error)) from None


def _nothing(*args: object, **kwargs: object) -> None:
    pass


class _LargeOnMeta(TorchFunctionMode):
    """Tensors this large are parameters, and are made on the meta device: one layer's experts may not fit into memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            made = torch.empty(*args, **{**kwargs, "device": "meta"})
            if made.numel() >= LARGE:
                return made
        return func(*args, **kwargs)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """A context in which registered parameters go to the meta device, and the values made by constructors are dropped."""
    register_parameter = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=False)
        register_parameter(module, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]


def one_line(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else text[:297] + "..."
