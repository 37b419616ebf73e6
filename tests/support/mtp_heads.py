"""MTP layers for tests: random ones in tiny models' checkpoints, and a plain torch reference of what they compute.

A folder has a tiny model's file, a second file of the MTP layers, and an index of both. The layers are those of a small
transformers model of the target's family; what is around them is computed here.
"""

import copy
import functools
import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import reference, root, tiny_model
from torch.nn.functional import rms_norm

FULL = "full_attention"
# name -> (the tiny model, fields of config.json, of its MTP layers)
MODELS = {
    "deepseek-v3": ("deepseek-v3", {"num_nextn_predict_layers": 1}, {"first_k_dense_replace": 0}),
    "glm4-moe": ("glm4-moe", {"num_nextn_predict_layers": 1}, {"first_k_dense_replace": 0}),
    "mimo": (
        "qwen2",
        {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "mimo",
            "attention_bias": True,
            "num_nextn_predict_layers": 1,
            "layer_types": None,
        },
        {"layer_types": [FULL]},
    ),
    "qwen3.5": ("qwen3.5", {"mtp_num_hidden_layers": 1}, {"layer_types": [FULL]}),
    "qwen3-next": ("qwen3-next", {}, {"layer_types": [FULL], "mlp_only_layers": []}),
    "nemotron-h": (
        "nemotron-h",
        {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E", "mtp_layers_block_type": None},
        {"layers_block_type": [FULL, "moe"]},
    ),
}
HYBRIDS = ("qwen3.5", "qwen3-next", "nemotron-h")


class MTP:
    """The MTP layers of `name`, and a function that computes them for one sequence. on_gpu: the target has heads for a GPU."""

    def __init__(self, name, on_gpu=False):
        base, self.fields, own = MODELS[name]
        self.name, self.base = name, f"gpu-{base}" if on_gpu and base != "deepseek-v3" else base
        self.target = reference(self.base)
        config = copy.deepcopy(self.target.config)
        for key, value in {"num_hidden_layers": 1, **own}.items():
            if key != "num_hidden_layers" or "layers_block_type" not in own:
                setattr(config, key, value)
        generator, self.size = torch.Generator().manual_seed(3), config.hidden_size

        def new(shape, std=0.15):
            return torch.randn(shape, generator=generator) * std

        self.plus = 1.0 if name.startswith("qwen3") else 0.0  # norms are 1 + w
        self.eps = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
        self.layers = type(self.target)(config).eval()
        with torch.no_grad():
            for key, x in self.layers.named_parameters():
                std = 0.4 if key.endswith("gate.weight") else 0.15
                x.copy_(new(x.shape, std) + (1.0 - self.plus if "norm" in key else 0.0))
            for key, x in self.layers.named_buffers():
                if key.endswith("e_score_correction_bias"):
                    x.copy_(new(x.shape, 0.3))
        self.enorm, self.hnorm = (1.0 - self.plus + new((self.size,), 0.2) for _ in range(2))
        self.fc = new((self.size, 2 * self.size), 0.1)

    def _norm(self, x, weight):
        return rms_norm(x, x.shape[-1:], weight + self.plus, self.eps)

    @property
    def end(self):
        """The norm behind the layers."""
        inner = self.layers.model
        return inner.norm_f if hasattr(inner, "norm_f") else inner.norm

    def tensors(self):
        """By their names in a checkpoint."""
        with tempfile.TemporaryDirectory() as folder:
            self.layers.save_pretrained(folder)
            saved = load_file(Path(folder) / "model.safetensors")
        of_layers = {name.partition("layers.")[2]: x for name, x in saved.items() if "layers." in name}
        around = {"enorm": self.enorm, "hnorm": self.hnorm, "fc": self.fc, "norm": self.end.weight.detach()}
        named = {f"{name}.weight": x for name, x in around.items()}
        first = f"model.layers.{self.target.config.num_hidden_layers}."
        parts = {"enorm": "enorm", "hnorm": "hnorm", "fc": "eh_proj", "norm": "shared_head.norm"}
        if self.name == "mimo":
            first = "model.mtp_layers.0."
            parts = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "fc": "input_proj", "norm": "final_layernorm"}
        elif self.name == "nemotron-h":
            place = {"enorm": "0.enorm", "hnorm": "0.hnorm", "fc": "0.eh_proj", "norm": "1.final_layernorm"}
            ours = {f"mtp.layers.{place[name.removesuffix('.weight')]}.weight": x for name, x in named.items()}
            return ours | {f"mtp.layers.{name}": x for name, x in of_layers.items()}
        elif self.plus:
            parts = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "fc": "fc", "norm": "norm"}
            ours = {f"mtp.{parts[name.removesuffix('.weight')]}.weight": x for name, x in named.items()}
            return ours | {f"mtp.layers.{name}": x for name, x in of_layers.items()}
        ours = {f"{first}{parts[name.removesuffix('.weight')]}.weight": x for name, x in named.items()}
        if self.name != "mimo":  # copies of the model's, as they are published
            ours[f"{first}embed_tokens.weight"] = torch.zeros(3, 3)
            ours[f"{first}shared_head.head.weight"] = torch.zeros(3, 3)
        return ours | {f"{first}{name.removeprefix('0.')}": x for name, x in of_layers.items()}

    def save(self, folder, without=()):
        """The target's checkpoint with these layers, but for tensors with names that end with one of `without`."""
        shutil.copytree(tiny_model(self.base), folder, dirs_exist_ok=True)
        tensors = {name: x.contiguous().clone() for name, x in self.tensors().items() if not name.endswith(tuple(without))}
        save_file(tensors, folder / "mtp.safetensors", {"format": "pt"})
        names = {
            **dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors"),
            **dict.fromkeys(tensors, "mtp.safetensors"),
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        path = folder / "config.json"
        config = {**json.loads(path.read_text()), **self.fields}
        path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
        return folder

    def hidden(self, ids):
        """The target's hidden states [T, H], as the layers read them."""
        seen = []
        hook = self.target.model.norm.register_forward_pre_hook(lambda _, x: seen.append(x[0])) if self.name == "mimo" else None
        out = self.target.model(torch.tensor([ids])).last_hidden_state
        if hook is None:
            return out[0]
        hook.remove()
        return seen[0][0]

    @torch.inference_mode()
    def drafts(self, ids, drafts):
        """Logits [1 + len(drafts), vocab] behind `ids`, and behind each of `drafts`."""
        features, tokens, logits = [*self.hidden(ids)[: len(ids) - 1]], list(ids[1:]), []
        for draft in [*drafts, None]:
            embedded = self.target.get_input_embeddings()(torch.tensor(tokens))
            both = self._norm(embedded, self.enorm), self._norm(torch.stack(features), self.hnorm)
            x = torch.cat(both[::-1] if self.name == "mimo" else both, 1) @ self.fc.T
            out = self.layers.model(inputs_embeds=x[None]).last_hidden_state[0]
            logits.append(self.target.lm_head(out[-1]))
            tokens.append(draft)
            features.append(out[-1])
        return torch.stack(logits)


@functools.cache
def mtp_of(name, on_gpu=False):
    return MTP(name, on_gpu)


@functools.cache
def mtp_model(name, on_gpu=False):
    """The folder of a tiny model with MTP layers."""
    return mtp_of(name, on_gpu).save(root() / f"mtp-{name}-{on_gpu}")


def assert_mtp_right(found, mtp, most=25):
    """found: of eagle3_heads.note_drafts."""
    assert len(found) > 30
    for ids, drafts, logits in found[:: max(len(found) // most, 1)]:
        torch.testing.assert_close(logits.cpu(), mtp.drafts(ids, drafts)[-1], atol=2e-4, rtol=1e-4)
