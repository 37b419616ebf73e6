"""The child's patches and positions equal those of the checkpoint's processor and model."""

import json

import numpy as np
import pytest
from PIL import Image

from quire.frontend.media.images import ImageError
from quire.frontend.media.processing import Processor, grid_positions

QWEN3 = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "size": {"shortest_edge": 4096, "longest_edge": 1 << 17},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.2, 0.3],
}
QWEN25 = {"image_processor_type": "Qwen2VLImageProcessorFast", "min_pixels": 3136, "max_pixels": 100352}
INTERNVL = {
    "image_processor_type": "GotOcr2ImageProcessor",
    "size": {"height": 28, "width": 28},
    "min_patches": 1,
    "max_patches": 6,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}
PIXTRAL = {"image_processor_type": "PixtralImageProcessor", "patch_size": 14, "size": {"longest_edge": 140}}
GLM = {"image_processor_type": "Glm4vImageProcessor", "size": {"shortest_edge": 12544, "longest_edge": 200704}}


def _processor(folder, settings, **options):
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return Processor(folder, options)


def _image(width, height):
    return Image.fromarray(np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("settings", [QWEN3, QWEN25, GLM], ids=["qwen3", "qwen2.5", "glm"])
@pytest.mark.parametrize("size", [(1, 1), (64, 64), (201, 97), (640, 480), (33, 999)])
def test_pixels_on_the_device_are_the_processors(tmp_path, settings, size):
    from transformers import AutoImageProcessor

    image = _image(*size)
    made = _processor(tmp_path, settings)(image)
    theirs = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")(image, return_tensors="np")
    pixels = made.tensors["pixel_values"]
    assert pixels.dtype == np.uint8
    scale, offset = (np.asarray(each, np.float32)[None, :, None] for each in made.rescale)
    on_device = pixels.reshape(len(pixels), 3, -1).astype(np.float32) * scale + offset
    repeated = np.repeat(on_device[:, :, None], 2, 2)  # as the next frame
    assert np.abs(repeated.reshape(len(pixels), -1) - theirs["pixel_values"]).max() <= 1e-6
    assert np.array_equal(made.tensors["image_grid_thw"], theirs["image_grid_thw"])
    assert made.num_tokens == theirs["image_grid_thw"].prod() // 4


def test_options_reach_the_processor(tmp_path):
    few = _processor(tmp_path, QWEN25, max_pixels=56 * 56)(_image(640, 480))
    assert few.num_tokens == 4 or few.num_tokens < _processor(tmp_path, QWEN25)(_image(640, 480)).num_tokens


@pytest.mark.parametrize(
    ("settings", "model", "options"),
    [
        (QWEN3, {}, {"max_pixels": 8192}),
        (QWEN25, {}, {"min_pixels": 3136, "max_pixels": 6272}),
        (QWEN25, {}, {"size": {"longest_edge": 6272}}),
        (GLM, {}, {"size": {"longest_edge": 30_000}}),
        (PIXTRAL, {"model_type": "mistral3"}, {"size": {"longest_edge": 56}}),
        (INTERNVL, {"model_type": "internvl"}, {"max_patches": 2}),
    ],
)
def test_settings_of_one_image_are_as_those_of_the_start(tmp_path, settings, model, options):
    (tmp_path / "config.json").write_text(json.dumps(model))
    image, processor = _image(320, 240), _processor(tmp_path, settings)
    before = processor(image)
    made = processor.with_options(options)(image)
    assert 0 < made.num_tokens < before.num_tokens
    size = {name: value for name, value in settings.get("size", {}).items() if name not in options.get("size", {})}
    given = {**options, **({"size": {**size, **options["size"]}} if "size" in options else {})}
    if settings is QWEN25 and "size" in options:
        given["size"].setdefault("shortest_edge", 3136)
    want = _processor(
        tmp_path, {k: v for k, v in settings.items() if "pixels" not in k} if "size" in given else settings, **given
    )
    assert np.array_equal(made.tensors["pixel_values"], want(image).tensors["pixel_values"])
    assert np.array_equal(processor(image).tensors["pixel_values"], before.tensors["pixel_values"])  # of no other image


def test_a_processor_that_does_not_normalize_is_left_to_itself(tmp_path):
    made = _processor(tmp_path, QWEN3 | {"do_normalize": False})(_image(64, 64))
    assert made.tensors["pixel_values"].dtype == np.float32 and made.rescale is None


def test_images_of_extreme_shape_are_refused(tmp_path):
    processor = _processor(tmp_path, QWEN3)
    assert processor(_image(16384, 100)).num_tokens
    with pytest.raises(ImageError, match="16384 x 1"):
        processor(_image(16384, 1))


@pytest.mark.parametrize("module", ["qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VL", "qwen3_vl.modeling_qwen3_vl:Qwen3VL",
                                    "qwen3_5.modeling_qwen3_5:Qwen3_5", "glm4v.modeling_glm4v:Glm4v"])  # fmt: skip
def test_positions_are_those_of_get_rope_index(module):
    import importlib
    import types

    import torch

    path, _, name = module.partition(":")
    model = getattr(importlib.import_module(f"transformers.models.{path}"), f"{name}Model")
    own = types.SimpleNamespace(
        config=types.SimpleNamespace(vision_config=types.SimpleNamespace(spatial_merge_size=2, tokens_per_second=2))
    )
    own.get_vision_position_ids = types.MethodType(model.get_vision_position_ids, own)
    for grid in ([1, 4, 6], [1, 2, 2], [1, 10, 4]):
        positions, advance = grid_positions(grid, 2)
        kinds = torch.tensor([[0, *[1] * len(positions[0]), 0]])
        theirs, _ = model.get_rope_index(own, torch.zeros_like(kinds), kinds, image_grid_thw=torch.tensor([grid]))
        assert (theirs[:, 0, 1:-1] - 1).tolist() == positions
        assert theirs[:, 0, -1].tolist() == [1 + advance] * 3


@pytest.mark.parametrize("size", [(1, 1), (64, 64), (201, 97), (640, 480)])
@pytest.mark.parametrize("kind", ["internvl", "mistral3"])
def test_other_layouts(tmp_path, kind, size):
    from transformers import AutoImageProcessor

    config = {
        "internvl": {"model_type": "internvl", "image_seq_length": 4},
        "mistral3": {"model_type": "mistral3", "vision_config": {"patch_size": 14}, "spatial_merge_size": 2},
    }[kind]
    (tmp_path / "config.json").write_text(json.dumps(config))
    image = _image(*size)
    made = _processor(tmp_path, INTERNVL if kind == "internvl" else PIXTRAL)(image)
    options = {"crop_to_patches": True} if kind == "internvl" else {"patch_size": {"height": 28, "width": 28}}
    theirs = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")(image, return_tensors="np", **options)
    pixels = made.tensors["pixel_values"]
    scale, offset = (np.asarray(each, np.float32)[None, :, None, None] for each in made.rescale)
    assert pixels.dtype == np.uint8 and made.positions == [] and made.advance == 0
    assert np.abs(pixels.astype(np.float32) * scale + offset - np.asarray(theirs["pixel_values"])).max() <= 1e-6
    if kind == "internvl":
        assert made.pieces == [("<img>", 1), ("", 4 * len(pixels)), ("</img>", 1)]
    else:
        assert np.array_equal(made.tensors["image_sizes"], np.asarray(theirs["image_sizes"]))
        height, width = (np.asarray(theirs["image_sizes"])[0] // 28).tolist()
        assert made.num_tokens == height * width and made.pieces[-1] == ("[IMG_END]", 1)
        assert made.pieces.count(("[IMG_BREAK]", 1)) == height - 1


@pytest.mark.parametrize("size", [(1, 1), (64, 64), (201, 97), (640, 480)])
def test_images_of_gemma_3(tmp_path, size):
    from transformers import AutoImageProcessor

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "mm_tokens_per_image": 9}))
    image, settings = _image(*size), {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 84, "width": 84}}
    made = _processor(tmp_path, settings)(image)
    theirs = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")(image, return_tensors="np")
    scale, offset = (np.asarray(each, np.float32)[None, :, None, None] for each in made.rescale)
    pixels = made.tensors["pixel_values"]
    assert pixels.dtype == np.uint8 and made.pieces == [("<start_of_image>", 1), ("", 9)] and made.num_tokens == 9
    assert np.abs(pixels.astype(np.float32) * scale + offset - np.asarray(theirs["pixel_values"])).max() <= 1e-6
    with pytest.raises(ValueError, match="do_pan_and_scan"):
        _processor(tmp_path, settings, do_pan_and_scan=True)


GEMMA4 = {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}


@pytest.mark.parametrize("size", [(1, 1), (64, 64), (201, 97), (640, 480), (33, 999)])
def test_images_of_gemma_4(tmp_path, size):
    from transformers import AutoImageProcessor

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4", "vision_config": {"pooling_kernel_size": 2}}))
    image = _image(*size)
    made = _processor(tmp_path, GEMMA4)(image)
    theirs = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")(image, return_tensors="np")
    pixels, places = made.tensors["pixel_values"], made.tensors["image_position_ids"]
    count = theirs["num_soft_tokens_per_image"][0]
    assert made.pieces == [("<|image>", 1), ("", count), ("<image|>", 1)] and pixels.dtype == np.uint8
    assert places.shape[1] == 4 * count and np.array_equal(places, theirs["image_position_ids"][:, : 4 * count])
    assert (theirs["image_position_ids"][:, 4 * count :] == -1).all()  # padding, which is left out
    (scale,), (offset,) = made.rescale
    assert np.abs(pixels.astype(np.float32) * scale + offset - theirs["pixel_values"][:, : 4 * count]).max() <= 1e-6
    few = _processor(tmp_path, GEMMA4, max_soft_tokens=280)(image)
    assert few.num_tokens > made.num_tokens


@pytest.mark.parametrize("size", [(64, 64), (201, 97), (97, 201)])
def test_the_unified_form_joins_squares_of_patches(tmp_path, size):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "gemma4", "vision_config": {"pooling_kernel_size": 2}}))
    image = _image(*size)
    small = _processor(tmp_path, GEMMA4)(image)
    config.write_text(json.dumps({"model_type": "gemma4_unified", "vision_config": {}}))
    joined = _processor(tmp_path, GEMMA4 | {"image_processor_type": "Gemma4UnifiedImageProcessor"})(image)
    assert joined.pieces == small.pieces and joined.rescale == small.rescale
    both = [_picture(each.tensors["pixel_values"][0], each.tensors["image_position_ids"][0]) for each in (small, joined)]
    assert np.array_equal(*both)
    places = joined.tensors["image_position_ids"][0]
    assert np.array_equal(places, sorted(places.tolist(), key=lambda place: place[::-1]))


def _picture(patches, places):
    """The image that these patches [n, side x side x 3] are of."""
    side = int((patches.shape[1] // 3) ** 0.5)
    columns, rows = places.max(0) + 1
    found = np.zeros((rows * side, columns * side, 3), np.uint8)
    for patch, (x, y) in zip(patches, places, strict=True):
        found[side * y : side * (y + 1), side * x : side * (x + 1)] = patch.reshape(side, side, 3)
    return found
