"""The core knows of which models an image is computed whole, and its size, as the worker does; and a step has room for one."""

import json

import pytest
import tiny_wrappers

from quire.enginecore.loading.model_files import model_summary
from quire.enginecore.whole_texts import step_tokens
from quire.ipc.config import EngineConfig
from quire.ipc.whole_images import image_tokens, sees_ahead, whole_image
from quire.workers.models.family_table import read_model_config
from quire.workers.models.media.sizes import largest_item, run_elements

NAMES = [name for name in tiny_wrappers.SEEING if not name.startswith("gpu-")]


@pytest.mark.parametrize("name", NAMES)
def test_both_tables_agree(name):
    folder = tiny_wrappers.wrapped(name)
    fields = json.loads((folder / "config.json").read_bytes())
    config = read_model_config(folder, sees=True)
    assert sees_ahead(fields) == config.sees_ahead == (name.startswith("gemma") and "causal" not in name)
    tokens = image_tokens(fields, {})
    assert tokens == {"gemma3": 9, "gemma4": 280}.get(name[:6])
    if tokens is not None:
        assert largest_item(config.media, folder) == tokens and run_elements(config.media) > 0
    assert model_summary(folder).whole_image == (tokens if config.sees_ahead else 0)
    assert not read_model_config(folder).sees_ahead


def test_sizes_by_the_processors_file(tmp_path):
    fields = {"model_type": "gemma4", "text_config": {"use_bidirectional_attention": "vision"}, "vision_config": {}}
    assert whole_image(fields, tmp_path) == 280
    (tmp_path / "processor_config.json").write_text('{"image_processor": {"max_soft_tokens": 1120}}')
    assert whole_image(fields, tmp_path) == 1120
    (tmp_path / "preprocessor_config.json").write_text('{"max_soft_tokens": 70}')
    assert whole_image(fields, tmp_path) == 70
    assert whole_image({**fields, "text_config": {}}, tmp_path) == 0
    assert whole_image({**fields, "text_config": {}, "model_type": "gemma4_unified"}, tmp_path) == 70


def test_a_step_has_room_for_an_image():
    def tokens(whole, length=8192, **flags):
        return step_tokens(EngineConfig(**flags), False, False, length, whole)[0]

    assert tokens(0) == tokens(280) == 512 and tokens(1120) == 1120 and tokens(1120, 600) == 600
    assert tokens(1120, max_num_batched_tokens=1120) == 1120
    assert tokens(1120, max_num_batched_tokens=64, language_model_only=True) == 64
    with pytest.raises(ValueError, match="--max-num-batched-tokens 1119 is less than an image's 1120 tokens"):
        tokens(1120, max_num_batched_tokens=1119)
