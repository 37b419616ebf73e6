"""Reward models: a head of two products behind Qwen2's layers, of a text or of the steps of one."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from inline_engine import InlineEngine
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from tiny_pools import PROMPTS

from quire.frontend.client.late import used_rows
from quire.ipc.pooling import PoolingParams


@pytest.fixture(scope="module", params=["Qwen2ForRewardModel", "Qwen2ForProcessRewardModel"])
def reward(request, tmp_path_factory):
    """(folder, rewards of a prompt's tokens by transformers' layers and the formula)."""
    folder, labels = tmp_path_factory.mktemp("reward"), 1 if request.param == "Qwen2ForRewardModel" else 2
    shutil.copytree(tiny_model("qwen2"), folder, dirs_exist_ok=True)
    theirs = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    size, generator = theirs.config.hidden_size, torch.Generator().manual_seed(2)
    shapes = {"0.weight": (size, size), "0.bias": (size,), "2.weight": (labels, size), "2.bias": (labels,)}
    head = {f"score.{name}": torch.randn(shape, generator=generator) / 8 for name, shape in shapes.items()}
    tensors = {n: t for n, t in load_file(folder / "model.safetensors").items() if n != "lm_head.weight"}
    save_file({**tensors, **head}, folder / "model.safetensors")
    fields = {**json.loads((folder / "config.json").read_text()), "architectures": [request.param]}
    (folder / "config.json").write_text(json.dumps(fields))

    @torch.no_grad()
    def rewards(prompt):
        states = theirs(torch.tensor([prompt])).last_hidden_state[0]
        inner = torch.relu(states @ head["score.0.weight"].T + head["score.0.bias"])
        return inner @ head["score.2.weight"].T + head["score.2.bias"]

    return Path(folder), rewards, labels


def test_rewards_equal_the_formula(reward):
    folder, rewards, labels = reward
    pooler = {} if labels == 1 else {"pooler_config": {"step_tag_id": 7}}
    engine = InlineEngine(folder, pooling=pooler, budget=40)
    info = engine.choice.info
    if labels == 1:
        assert info.tasks == ["classify", "token_classify"] and not info.use_activation
        for prompt, found in zip(PROMPTS, engine.pool(PROMPTS), strict=True):
            assert np.abs(found - rewards(prompt)[-1].numpy()).max() < 1e-4
        return
    assert info.tasks == ["token_classify"] and info.step_tag_id == 7
    prompts = [[*prompt, 7, 9, 7] for prompt in PROMPTS]
    for prompt, found in zip(prompts, engine.pool(prompts, PoolingParams(task="token_classify")), strict=True):
        expected = rewards(prompt).softmax(-1).numpy()
        assert np.abs(found - expected).max() < 1e-4
        steps = used_rows(prompt, found, info)
        assert len(steps) == prompt.count(7) and np.abs(steps[-1] - expected[-1]).max() < 1e-4
