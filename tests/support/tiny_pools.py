"""Tiny checkpoints that pool, and the vectors and scores that transformers' models give for them, pooled plainly."""

import functools
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from tiny_models import reference, tiny_model

PROMPTS = [np.random.default_rng(n).integers(4, 500, n).tolist() for n in (1, 2, 7, 33, 64, 100, 16, 48)]


@functools.cache
def hidden_states(name: str, prompt: tuple[int, ...]) -> torch.Tensor:
    """float32 [tokens, H] behind the final norm."""
    with torch.no_grad():
        return reference(name).model(torch.tensor([prompt])).last_hidden_state[0].float()


def vector(name: str, prompt: list[int], pooling: str = "LAST", normalizes: bool = True, dimensions: int | None = None):
    states = hidden_states(name, tuple(prompt))
    places = torch.arange(1, len(states) + 1)[:, None]
    of_type = {
        "LAST": states[-1],
        "MEAN": states.mean(0),
        "CLS": states[0],
        "MAX": states.amax(0),
        "WEIGHTED_MEAN": (states * places).sum(0) / places.sum(),
        "SQRT_MEAN": states.sum(0) / len(states) ** 0.5,
    }
    found = of_type[pooling][:dimensions]
    return (found / found.norm() if normalizes else found).numpy()


@functools.cache
def classifier(name: str, kind: str, labels: int = 3, **fields) -> tuple[str, torch.nn.Module]:
    """A checkpoint of this kind (ForSequenceClassification, ...) in the family of a tiny model, and transformers' model."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(tiny_model(name))
    config.pad_token_id = 0
    config.id2label = {i: f"kind {i}" for i in range(labels)}
    config.label2id = {label: i for i, label in config.id2label.items()}
    torch.manual_seed(3)
    model = getattr(transformers, f"AutoModel{kind}").from_config(config).eval()
    folder = tempfile.mkdtemp(prefix="quire-tiny-pools-")
    model.save_pretrained(folder)
    for file in Path(tiny_model(name)).glob("tokenizer*"):
        shutil.copy(file, folder)
    change_config(folder, **fields)
    return folder, model


def change_config(folder: str, **fields) -> None:
    path = Path(folder) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def logits(model: torch.nn.Module, prompt: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0].float().numpy()


def as_sentence_transformer(
    name: str, mode: str = "lasttoken", modules: tuple[str, ...] = ("Pooling", "Normalize"), **settings
) -> str:
    """The tiny model's folder with sentence-transformers' files."""
    folder = tempfile.mkdtemp(prefix="quire-tiny-pools-")
    shutil.copytree(tiny_model(name), folder, dirs_exist_ok=True)
    listed = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for i, kind in enumerate(modules, 1):
        listed.append({"idx": i, "name": str(i), "path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"})
        (Path(folder) / f"{i}_{kind}").mkdir()
    modes = ("cls_token", "mean_tokens", "lasttoken", "max_tokens", "weightedmean_tokens", "mean_sqrt_len_tokens")
    pooling = {"word_embedding_dimension": 64, **{f"pooling_mode_{each}": each == mode for each in modes}}
    for place in Path(folder).glob("*_Pooling"):
        (place / "config.json").write_text(json.dumps(pooling))
    (Path(folder) / "modules.json").write_text(json.dumps(listed))
    (Path(folder) / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder
