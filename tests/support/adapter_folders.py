"""Adapters' folders as small as they can be: for tests of everything that never looks at the tensors. No torch."""

import json


def write_folder(folder, *, layer="model.layers.0.self_attn.q_proj", rank=2, size=4, fill=0, **config):
    """A folder with one layer's tensors, of bytes that are all `fill`."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "base_model_name_or_path": "tiny", **config}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    header, at = {}, 0
    for half, shape in (("A", [rank, size]), ("B", [size, rank])):
        end = at + 4 * rank * size
        header[f"base_model.model.{layer}.lora_{half}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    new = folder / "adapter_model.safetensors.new"
    new.write_bytes(len(text).to_bytes(8, "little") + text + bytes([fill]) * at)
    new.rename(folder / "adapter_model.safetensors")
    return folder
