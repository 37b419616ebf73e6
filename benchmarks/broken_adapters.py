"""Folders with broken LoRA adapters: every way in which an adapter's files can be wrong, as far as there are words for it.

`broken_folders(shapes, ...)` yields one `Broken` after the other. `write` makes the folder, and `says` is a text that the error
must contain: the field, the tensor or the file that is at fault. `shapes` are those of a model's linear layers. The config,
the header and the tensors are written by hand, as no library writes broken ones. soak_adapters.py sends such folders to a
server, and tests/enginecore/adapters/test_broken_folders.py reads them without one.
"""

import json
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
RANK = 4
BAD_FLOATS = {"F32": (b"\0\0\xc0\x7f", b"\0\0\x80\x7f"), "F16": (b"\0\x7e", b"\0\x7c"), "BF16": (b"\xc0\x7f", b"\x80\x7f")}
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}

Shapes = Mapping[str, tuple[int, int]]  # the weight of each linear layer: [out, in]
Json = Any


class Broken(NamedTuple):
    """A broken folder. is_late: the folder alone looks good; it is broken for the model, or in the values of its tensors."""

    name: str
    says: str
    write: Callable[[Path], object]
    is_late: bool = False


class Tensor(NamedTuple):
    dtype: str
    shape: list[int]
    data: bytes


# ------------------------------------------------------------------------------------------------------------ good folders
def shapes_of(model_dir: Path) -> dict[str, tuple[int, int]]:
    """The linear layers of the blocks of a checkpoint in model.safetensors."""
    with (model_dir / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    shapes = {name.removesuffix(".weight"): entry["shape"] for name, entry in header.items() if name.endswith("_proj.weight")}
    return {name: (shape[0], shape[1]) for name, shape in shapes.items()}


def config_of(**fields: Json) -> dict[str, Json]:
    plain = {"peft_type": "LORA", "peft_version": "0.18.0", "r": RANK, "lora_alpha": 8, "base_model_name_or_path": "quire-tiny"}
    return plain | fields


def tensors_of(shapes: Shapes, seed: int = 0, dtype: str = "F32", std: float = 0.5) -> dict[str, Tensor]:
    """Random A and B for each layer. Another dtype than F32 has the bytes of other values, which are finite, too."""
    numbers, made = random.Random(seed), {}
    for layer, (out, size) in shapes.items():
        for half, shape in (("A", [RANK, size]), ("B", [out, RANK])):
            values = struct.pack(f"<{shape[0] * shape[1]}f", *(numbers.gauss(0.0, std) for _ in range(shape[0] * shape[1])))
            if dtype != "F32":
                values = b"".join(values[i + 2 : i + 4] for i in range(0, len(values), 4))  # BF16: the upper half
            made[f"{PREFIX}{layer}.lora_{half}.weight"] = Tensor(dtype, shape, values)
    return made


def header_of(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Json]]:
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    return header


def file_of(header: Json, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], config: Json = None) -> Path:
    """Write a folder as PEFT does. The tensors' file is put in place of an earlier one by a rename."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config_of() if config is None else config))
    new = folder / f"{WEIGHTS}.new"
    new.write_bytes(file_of(header_of(tensors), b"".join(tensor.data for tensor in tensors.values())))
    new.rename(folder / WEIGHTS)
    return folder


# ---------------------------------------------------------------------------------------------------------- broken folders
def broken_folders(shapes: Shapes, outside: Path, seed: int = 0) -> Iterator[Broken]:
    """All broken folders; their tensors are those of the first layers. outside: a file that no folder may link to."""
    few = dict(sorted(shapes.items(), key=lambda item: ("self_attn" not in item[0], item[0]))[:3])
    good = tensors_of(few, seed)
    yield from _configs(good)
    yield from _patterns(good)
    yield from _headers(good, seed)
    yield from _names(good)
    yield from _no_files(good, outside)
    yield from _of_the_model(few)
    yield from _not_finite(shapes, seed)


KINDS: tuple[Json, ...] = (None, True, False, 0, 1, -1, 1.5, 1e300, 1 << 70, "", "x", "4", [], [1], ["x"], [[]], {}, {"x": 1},
                           {"x": {}}, {"x": None})  # fmt: skip


def _is_rank(value: Json) -> bool:
    return type(value) is int and 1 <= value <= RANK


def _is_number(value: Json) -> bool:
    return value is not True and value is not False and isinstance(value, int | float) and abs(value) <= 1e30


# The values of KINDS that are good for a field, or have no effect
GOOD: dict[str, Callable[[Json], bool]] = {
    "peft_type": lambda value: False,
    "r": lambda value: False,  # a rank other than the tensors' is at fault, too
    "lora_alpha": _is_number,
    "rank_pattern": lambda value: value is None or (value == {} and isinstance(value, dict)) or value == {"x": 1},
    "alpha_pattern": lambda value: value is None or (value == {} and isinstance(value, dict)) or value == {"x": 1},
    "use_rslora": lambda value: value is None or isinstance(value, bool),
    "alora_invocation_tokens": lambda value: value is None or (value == [1] and isinstance(value, list)),
    "base_model_name_or_path": lambda value: value is None or isinstance(value, str),
    "peft_version": lambda value: value is None or isinstance(value, str),
    "init_lora_weights": lambda value: value is None or isinstance(value, bool),
    "use_dora": lambda value: value is None or value is False,
    "lora_bias": lambda value: value is None or value is False,
    "use_qalora": lambda value: value is None or value is False,
    "use_bdlora": lambda value: value is None or value is False,
    "ensure_weight_tying": lambda value: value is None or value is False,
    "bias": lambda value: value is None,
    "modules_to_save": lambda value: value is None or (value == [] and isinstance(value, list)),
    "layer_replication": lambda value: value is None or (value == [] and isinstance(value, list)),
    "trainable_token_indices": lambda value: value is None or (value in ([], {}) and isinstance(value, list | dict)),
    **dict.fromkeys(
        ("arrow_config", "kasa_config", "velora_config", "monteclora_config", "megatron_config"), lambda value: value is None
    ),
    **dict.fromkeys(
        ("a_new_field", "x" * 300),
        lambda value: value is None or value is False or (isinstance(value, str | list | dict) and not value),
    ),
}


def _configs(good: Mapping[str, Tensor]) -> Iterator[Broken]:
    for field, is_good in GOOD.items():
        for kind, value in enumerate(KINDS):
            if not is_good(value):
                says = "r is" if field == "r" and value != 1 else field[:60]
                yield Broken(
                    f"config-{field[:20]}-{kind}", says, lambda f, c={field: value}: write_adapter(f, good, config_of(**c))
                )
    for name in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "PiSSA", "something"):
        config = config_of(init_lora_weights=name)
        yield Broken(f"config-init-{name}", "init_lora_weights", lambda f, c=config: write_adapter(f, good, c))
    for number, text in enumerate(
        (b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff\xfe{}", b'{"peft_type": NaN}', b"[" * 100_000, b'{"a":' * 50_000,
         b'{"peft_type": "LORA", "r": 1e999}', b" " * ((1 << 20) + 1))
    ):  # fmt: skip
        yield Broken(f"config-text-{number}", CONFIG, lambda f, t=text: (write_adapter(f, good) / CONFIG).write_bytes(t))
    yield Broken("config-no-lora", "peft_type", lambda f: write_adapter(f, good, {"r": RANK}))


def _patterns(good: Mapping[str, Tensor]) -> Iterator[Broken]:
    keys = ("(", "[", "*", "(?P<a", "a{99999999999}", "(?<=a*)b", "\\", "x" * 257)
    for field in ("rank_pattern", "alpha_pattern"):
        made: list[Json] = [{key: RANK} for key in keys]
        made += [{"x": value} for value in ("4", None, [], {}, True)]
        made.append({f"layer{i}": RANK for i in range(4097)})
        made += [{"x": 0}, {"x": -1}, {"x": 1.5}] if field == "rank_pattern" else [{"x": 1e31}]
        made.append({"([a-z0-9._]+)*!": RANK})  # it backtracks for longer than the universe
        for number, value in enumerate(made):
            says = f"{field} has a regular expression that takes more" if number == len(made) - 1 else field
            config = config_of(**{field: value})
            yield Broken(f"{field}-{number}", says, lambda f, c=config: write_adapter(f, good, c))
    yield Broken(
        "rank_pattern-other", "rank", lambda f: write_adapter(f, good, config_of(rank_pattern={"[kv]_proj": RANK + 1}))
    )


def _headers(good: Mapping[str, Tensor], seed: int) -> Iterator[Broken]:
    data, header = b"".join(tensor.data for tensor in good.values()), header_of(good)
    whole = file_of(header, data)

    def of_bytes(name: str, says: str, content: bytes) -> Broken:
        return Broken(name, says, lambda f: (write_adapter(f, good) / WEIGHTS).write_bytes(content))

    for number, length in enumerate((0, 1, 2, 7, len(whole), 1 << 20, (16 << 20) + 1, 1 << 31, 1 << 62, (1 << 64) - 1)):
        yield of_bytes(f"length-{number}", WEIGHTS, struct.pack("<Q", length) + whole[8:])
    numbers = random.Random(seed)
    ends = [0, 1, 7, 8, 9, len(whole) - 1, *(numbers.randrange(10, len(whole) - 1) for _ in range(60))]
    for number, end in enumerate(ends):
        yield of_bytes(f"truncated-{number}", WEIGHTS, whole[:end])
    texts = (
        b"[]",
        b"3",
        b"null",
        b"{}",
        b'{"__metadata__": 3}',
        b'{"x": []}',
        b"\xff\xff",
        b"[" * 50_000,
        b'{"a":{"b":' * 9_000,
    )
    for number, text in enumerate(texts):
        yield of_bytes(f"header-{number}", WEIGHTS, struct.pack("<Q", len(text)) + text + data)
    fields: dict[str, tuple[Json, ...]] = {
        "dtype": (None, 3, [], {}, "", "F64", "I8", "F8_E4M3", "f32", "BOOL", "x" * 1000, True),
        "shape": (None, 3, "4", {}, [4], [], [0, 0], [4, -1], [4, 1.5], [True, 4], [4, "4"], [1] * 5, [1 << 50, 4],
                  [1 << 39] * 3),
        "data_offsets": (None, 3, "4", {}, [], [0], [0, 1], [1, 0], [0, 1, 2], [-4, 0], [0, 1.5], [True, False], [0, 1 << 39],
                         [1 << 41, 1 << 42], [1 << 70, 1 << 71], [7, 7]),
    }  # fmt: skip
    for tensor in good:
        for field, values in fields.items():
            for number, value in enumerate(values):
                changed = header | {tensor: header[tensor] | {field: value}}
                yield of_bytes(f"{field}-{number}-{tensor[-30:]}", tensor, file_of(changed, data))
            without = {key: value for key, value in header[tensor].items() if key != field}
            yield of_bytes(f"no-{field}-{tensor[-30:]}", tensor, file_of(header | {tensor: without}, data))
    first, second, *_ = good
    both = header | {second: header[second] | {"data_offsets": header[first]["data_offsets"], "shape": header[first]["shape"]}}
    yield of_bytes("one-place-for-two", "another tensor's", file_of(both, data))


def _names(good: Mapping[str, Tensor]) -> Iterator[Broken]:
    layer = next(iter(good)).removesuffix(".lora_A.weight")
    one = Tensor("F32", [RANK, RANK], bytes(4 * RANK * RANK))

    def more(name: str, says: str, tensor: Tensor = one) -> Broken:
        return Broken(
            f"name-{name[-40:]}".replace("/", "_").replace("\n", "_"), says, lambda f: write_adapter(f, {**good, name: tensor})
        )

    for kind in ("lora_magnitude_vector", "lora_B.bias", "weight", "lora_A.default.weight", "modules_to_save.weight",
                 "lora_C.weight", "lora_embedding_A", "base_layer.weight", "token_adapter.trainable_tokens_delta"):  # fmt: skip
        yield more(f"{layer}.{kind}", layer)
    for name in ("x", "", "model.layers.0.lora_A.weight", f"{PREFIX}.lora_A.weight", f"{PREFIX}a\nb.lora_A.weight", "x" * 600):
        yield more(name, WEIGHTS if "\n" in name or len(name) > 512 else name or "base_model.model.")
    yield more(f"{PREFIX}lm_head.base_layer.weight", "lm_head")
    for left_out in good:
        rest = {name: tensor for name, tensor in good.items() if name != left_out}
        other = left_out.replace(".lora_A.", ".lora_?.").replace(".lora_B.", ".lora_A.").replace(".lora_?.", ".lora_B.")
        yield Broken(f"half-{left_out[-30:]}", other, lambda f, r=rest: write_adapter(f, r))
    for name, tensor in good.items():
        for rank in (1, RANK - 1, RANK + 1, 64):
            axis = tensor.shape.index(RANK)
            shape = [rank if i == axis else n for i, n in enumerate(tensor.shape)]
            changed = {**good, name: Tensor("F32", shape, bytes(4 * shape[0] * shape[1]))}
            yield Broken(f"rank-{rank}-{name[-30:]}", name.rpartition(".lora_")[0], lambda f, c=changed: write_adapter(f, c))
        flat = {**good, name: tensor._replace(shape=[*tensor.shape, 1])}
        yield Broken(f"convolution-{name[-30:]}", name, lambda f, c=flat: write_adapter(f, c))
        flat = {**good, name: tensor._replace(shape=[tensor.shape[0] * tensor.shape[1]])}
        yield Broken(f"vector-{name[-30:]}", name, lambda f, c=flat: write_adapter(f, c))
    yield Broken("large-rank", "--max-lora-rank", lambda f: write_adapter(
        f, {n: Tensor("F32", [600 if d == RANK else d for d in t.shape], bytes(4 * len(t.data) // RANK // 4 * 600))
            for n, t in good.items()}, config_of(r=600)))  # fmt: skip
    yield Broken("no-tensors", "no tensors", lambda f: write_adapter(f, {}))


def _no_files(good: Mapping[str, Tensor], outside: Path) -> Iterator[Broken]:
    def bind(path: Path) -> None:
        """A socket's file; its path may be too long for an address, so the address is relative to the folder."""
        here = os.open(path.parent, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)

    kinds: dict[str, Callable[[Path], object]] = {
        "fifo": os.mkfifo,
        "folder": os.mkdir,
        "nothing": lambda path: None,
        "socket": bind,
        "loop": lambda path: os.symlink(path, path),
        "link-out": lambda path: os.symlink(outside, path),
        "link-up": lambda path: os.symlink(f"../../{outside.name}", path),
        "link-to-nothing": lambda path: os.symlink("nowhere", path),
        "link-to-zeros": lambda path: os.symlink("/dev/zero", path),
        "link-to-proc": lambda path: os.symlink("/proc/self/environ", path),
        "link-to-a-folder": lambda path: os.symlink(".", path),
    }
    for file in (CONFIG, WEIGHTS):
        for kind, make in kinds.items():

            def write(folder: Path, file: str = file, make: Callable[[Path], object] = make) -> None:
                path = write_adapter(folder, good) / file
                path.unlink()
                make(path)

            yield Broken(f"{kind}-{file}", file, write)

    def pickled(folder: Path) -> None:
        (write_adapter(folder, good) / WEIGHTS).rename(folder / "adapter_model.bin")

    def sparse(folder: Path) -> None:
        os.truncate(write_adapter(folder, {}) / WEIGHTS, 1 << 40)

    yield Broken("pickled", "adapter_model.bin", pickled)
    yield Broken("sparse", WEIGHTS, sparse)


# ------------------------------------------------------------------------------- what only the model, or the values, tell
def _of_the_model(shapes: Shapes) -> Iterator[Broken]:
    for layer, (out, size) in shapes.items():
        for number, shape in enumerate(
            ((out + 1, size), (out, size + 1), (1, size), (out, 1), (2 * out, 2 * size), (size, out))
        ):
            if shape != (out, size):
                changed = tensors_of({**shapes, layer: shape})
                yield Broken(f"shape-{number}-{layer[-20:]}", layer, lambda f, c=changed: write_adapter(f, c), is_late=True)
    layer, shape = next(iter(shapes.items()))
    block, _, kind = layer.partition(".self_attn.")
    number = block.rpartition(".")[2]
    others = [f"{block}.{name}" for name in ("self_attn.kv_b_proj", "self_attn.x_proj", "mlp.experts.0.up_proj", kind)]
    others += [layer.replace(f".{number}.", f".{other}.") for other in ("999", "-1")]
    others += [f"vision.{layer}", "lm_head", "model.embed_tokens", f"{block}.input_layernorm", f"{block}.self_attn"]
    for other in others:
        changed = tensors_of({other: shape})
        yield Broken(f"no-layer-{other}", other, lambda f, c=changed: write_adapter(f, c), is_late=True)
    twice = tensors_of({layer: shape, f"language_model.{layer}": shape})
    yield Broken("layer-twice", "", lambda f: write_adapter(f, twice), is_late=True)


def _not_finite(shapes: Shapes, seed: int) -> Iterator[Broken]:
    numbers = random.Random(seed)
    for layer, shape in shapes.items():
        for dtype, values in BAD_FLOATS.items():
            tensors = tensors_of({layer: shape}, seed, dtype if dtype != "F16" else "F32")
            if dtype == "F16":
                tensors = {n: Tensor(dtype, t.shape, bytes(len(t.data) // 2)) for n, t in tensors.items()}
            for name, tensor in tensors.items():
                for number, value in enumerate(values):
                    at = numbers.randrange(len(tensor.data) // ITEM_BYTES[dtype]) * ITEM_BYTES[dtype]
                    data = tensor.data[:at] + value + tensor.data[at + ITEM_BYTES[dtype] :]
                    changed = {**tensors, name: tensor._replace(data=data)}
                    said = f"not-finite-{dtype}-{number}-{name.removeprefix(PREFIX)}"
                    yield Broken(said, name, lambda f, c=changed: write_adapter(f, c), is_late=True)
