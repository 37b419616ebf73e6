"""InlineEngine for models that take images: it is a frontend, too, which answers when the core asks for an item's tensors.

`prompt(...)` makes a prompt of ids and images as a frontend does, by transformers' own processor; `reference(...)` are the
tokens that transformers generates from the same ids and images.
"""

import hashlib
from collections import Counter
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from inline_engine import InlineEngine
from tiny_wrappers import reference as model_of

from quire.enginecore.tenants.backlog import Room
from quire.ipc.messages.frontend import AddRequest, Generate, RequestError, TokenInputs
from quire.ipc.messages.media import MediaInfo, MediaItem, MediaTensor
from quire.ipc.step.items import encode_piece

PLACEHOLDER, START, END, BREAK = 500, 501, 502, 504
PLACEHOLDERS = (500, 503)  # of images and videos


class MediaEngine(InlineEngine):
    """arena: bytes of items on their way. is_whole: tokens of an image see each other."""

    def __init__(self, folder, *, rows=64, arena=1 << 20, is_whole=False, make_device=None, **more):
        self.make_device = make_device or super()._make_device
        more.setdefault("model_options", {"sees": True})
        whole = min(rows, more.get("budget", 512)) if is_whole else 0
        self.info, more["max_whole_span"] = MediaInfo(["image"], rows, whole), whole
        super().__init__(folder, encoder_rows=rows, item_bytes=arena, **more)
        self.model.items.num_rows = rows
        self.model.items.allocate()
        self.asked, self.runs, self.tensors = Counter(), 0, {}
        tower, schedule, items = self.model.tower, self.scheduler.schedule, self.model.items
        encode = items.encode

        def counted(arrived):
            self.runs += len(arrived)
            return encode(arrived)

        def with_answers(now=0.0):
            while (made := schedule(now)) is None and self._answer():
                pass
            self._answer()
            return made

        items.encode, self.scheduler.schedule = counted, with_answers
        assert tower is not None

    def _make_device(self, ctx):
        return self.make_device(ctx)

    def _new_intake(self, limits, eos):
        return super()._new_intake(msgspec.structs.replace(limits, media=self.info), eos)

    def _answer(self) -> bool:
        bytes_ = self.scheduler.items.bytes
        questions, bytes_.questions = bytes_.questions, []
        for question in questions:
            item, tensors = self.tensors[question.request_id][question.number]
            self.asked[item.digest] += 1
            assert bytes_.take(question.owner, item.digest, tensors) is None
        sent = False
        for piece in bytes_.pieces():
            words = np.concatenate([part.reshape(-1) for part in encode_piece(piece)])
            self.model.items.take(words)
            words.fill(-1)
            sent = True
        return sent or bool(questions)

    def add(self, prompt, params, adapter=-1):
        """prompt: ids, or (ids, [(item, tensors)])."""
        ids, items = prompt if isinstance(prompt, tuple) else (prompt, [])
        self.count += 1
        self.tensors[self.count] = items
        inputs = TokenInputs(np.asarray(ids, np.int32).tobytes(), items=[item for item, _ in items] or None)
        accepted = self.intake.accept(0, AddRequest(0, self.count, inputs, Generate(params)), Room())
        if isinstance(accepted, RequestError):
            raise ValueError(accepted.message)
        for seq in accepted:
            self.scheduler.add(seq)
        return self.count


class Image(NamedTuple):
    """tensors: as the processor names them; pixels are uint8. runs: rows of each span, with another token between two spans.
    grid: (height, width) of rotary positions; None: they are plain."""

    tensors: dict[str, torch.Tensor]
    runs: tuple[int, ...]
    grid: tuple[int, int] | None = None


def image_of(height, width, seed=0):
    """Random patches of an image of a Qwen encoder with patches of 14 and a merge of 2; sizes in merged patches."""
    grid = torch.tensor([[1, 2 * height, 2 * width]])
    pixels = _random((4 * height * width, 3 * 2 * 14 * 14), height, width, seed)
    return Image({"pixel_values": pixels, "image_grid_thw": grid}, (height * width,), (height, width))


def rows_of(height, width, seed=0):
    """An image of a Pixtral encoder with patches of 14 and a merge of 2: a row of merged patches is a span."""
    sizes = torch.tensor([[28 * height, 28 * width]])
    pixels = _random((1, 3, 28 * height, 28 * width), height, width, seed)
    return Image({"pixel_values": pixels, "image_sizes": sizes}, (width,) * height)


def tiles_of(count, tokens, seed=0):
    """An image of `count` tiles of 28 * 28, each of so many tokens."""
    return Image({"pixel_values": _random((count, 3, 28, 28), count, tokens, seed)}, (count * tokens,))


def square_of(seed=0, tokens=9):
    """An image of Gemma 3, which all have one size."""
    return Image({"pixel_values": _random((1, 3, 84, 84), 84, 84, seed)}, (tokens,))


def patches_of(height, width, seed=0, square=2, side=4):
    """An image of Gemma 4 with patches of side * side pixels, of which square * square become a token; sizes in tokens."""
    rows, columns = square * height, square * width
    positions = torch.stack([torch.arange(columns).repeat(rows), torch.arange(rows).repeat_interleave(columns)], 1)
    pixels = _random((1, rows * columns, 3 * side * side), height, width, seed)
    return Image({"pixel_values": pixels, "image_position_ids": positions[None]}, (height * width,))


def _random(shape, height, width, seed):
    generator = torch.Generator().manual_seed(1000 * seed + 37 * height + width)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


RESCALE = ([1 / 127.5] * 3, [-1.0] * 3)
RESCALE_ALL = ([1 / 127.5], [-1.0])
_DTYPES = {torch.uint8: "uint8", torch.int64: "int64", torch.float32: "float32"}


def floats_of(pixels):
    return pixels.float() / 127.5 - 1.0


def item_of(image, begin):
    """(item, its tensors' bytes, ids of its tokens) of an image that has its first token at `begin`."""
    data = [tensor.numpy().tobytes() for tensor in image.tensors.values()]
    tensors = [MediaTensor(name, _DTYPES[tensor.dtype], list(tensor.shape)) for name, tensor in image.tensors.items()]
    spans, ids = [], []
    for run in image.runs:
        ids += [BREAK] * bool(spans) + [PLACEHOLDER] * run
        spans.append((begin + len(ids) - run, run))
    positions, advance = [], 0
    if image.grid is not None:
        rows, columns = np.divmod(np.arange(len(ids)), image.grid[1])
        positions, advance = [[0] * len(ids), rows.tolist(), columns.tolist()], max(image.grid)
    digest = hashlib.sha256(b"".join(data)).digest()
    rescale = RESCALE_ALL if "image_position_ids" in image.tensors else RESCALE
    return MediaItem("image", digest, spans, tensors, positions, advance, rescale), data, ids


def prompt(*parts):
    """(ids, items) of parts: lists of ids, and images."""
    ids, items = [], []
    for part in parts:
        if isinstance(part, list):
            ids += part
            continue
        ids.append(START)
        item, data, own = item_of(part, len(ids))
        items.append((item, data))
        ids += [*own, END]
    return ids, items


def reference(name, parts, count):
    """Tokens that transformers generates greedily; images of several sizes are padded to the largest."""
    ids, _ = prompt(*parts)
    images = [part.tensors for part in parts if not isinstance(part, list)]
    inputs = {"input_ids": torch.tensor([ids])}
    if images:
        pixels = [floats_of(image["pixel_values"]) for image in images]
        if "image_position_ids" in images[0]:
            most = max(p.shape[1] for p in pixels)
            pixels = [torch.nn.functional.pad(p, (0, 0, 0, most - p.shape[1])) for p in pixels]
            positions = [image["image_position_ids"] for image in images]
            images = [
                {**image, "image_position_ids": torch.nn.functional.pad(p, (0, 0, 0, most - p.shape[1]), value=-1)}
                for image, p in zip(images, positions, strict=True)
            ]
        elif pixels[0].dim() == 4:
            height, width = (max(p.shape[axis] for p in pixels) for axis in (2, 3))
            pixels = [torch.nn.functional.pad(p, (0, width - p.shape[3], 0, height - p.shape[2])) for p in pixels]
        inputs |= {key: torch.cat([image[key] for image in images]) for key in images[0] if key != "pixel_values"}
        inputs["pixel_values"] = torch.cat(pixels)
        if "image_grid_thw" in inputs or "gemma4" in name:
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == PLACEHOLDER).int()
    if images and "gemma3" in name:
        inputs["token_type_ids"] = (inputs["input_ids"] == PLACEHOLDER).int()
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if "gemma4" in name:  # to which a sampled placeholder is padding
        options["suppress_tokens"] = list(PLACEHOLDERS)
    if "unified" in name:  # transformers 5.23 masks as Gemma 4 does, in layers with a window alone, only with this cache
        options["cache_implementation"] = "static"
    with torch.inference_mode():
        out = model_of(name).generate(**inputs, **options)
    return out[0, len(ids) :].tolist()
