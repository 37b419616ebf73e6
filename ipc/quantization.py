"""The names of --quantization: what weights can be rounded to while they are loaded, and what checkpoints are made by.

Names are vLLM's where the meaning is the same. What each does is workers/loading/quantized/config_floats.py's business, and
whether a checkpoint agrees with the flag workers/models/family_table.py's. Called by the flags and by both of these.
"""

# of weights in 16 or 32 bits: name -> what becomes of them, for the help
WHILE_LOADING = {
    "fp8": "8-bit floats with a scale a tensor, inputs too",
    "fp8_per_tensor": "the same as fp8",
    "fp8_per_channel": "8-bit floats with a scale an output, inputs too",
    "fp8_per_block": "8-bit floats with a scale for 128 by 128, inputs too",
    "int8": "8-bit integers with a scale an output, inputs too",
    "int8_per_channel_weight_only": "8-bit integers with a scale an output",
    "int4": "4-bit integers in groups of 128, rounded to nearest: lossy",
}
# what quantization_config's quant_method may be
METHODS = ("gptq", "awq", "auto-round", "compressed-tensors", "fp8", "bitsandbytes", "mxfp4")
OTHER_NAMES: dict[str, str | None] = {
    "auto_round": "auto-round",
    "intel/auto-round": "auto-round",
    "compressed_tensors": "compressed-tensors",
    "gptq_marlin": "gptq",  # vLLM's names for its kernels
    "awq_marlin": "awq",
    "None": None,  # as the checkpoint says
    "none": None,
}
NAMES = tuple(dict.fromkeys((*WHILE_LOADING, *METHODS)))
