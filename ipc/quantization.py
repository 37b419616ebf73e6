"""The names of --quantization: methods that round weights while they are loaded, and methods of quantized checkpoints.

Names are vLLM's where the meaning is the same. workers/loading/quantized/config_floats.py knows what each does, and
workers/models/family_table.py checks whether a checkpoint agrees with the flag. Called by the flags and by both of these.
"""

# for weights of 16 or 32 bits: name -> their form after rounding, for the help
WHILE_LOADING = {
    "fp8": "8-bit floats with a scale a tensor, inputs too",
    "fp8_per_tensor": "the same as fp8",
    "fp8_per_channel": "8-bit floats with a scale an output, inputs too",
    "fp8_per_block": "8-bit floats with a scale for 128 by 128, inputs too",
    "int8": "8-bit integers with a scale an output, inputs too",
    "int8_per_channel_weight_only": "8-bit integers with a scale an output",
    "int4": "4-bit integers in groups of 128, rounded to nearest: lossy",
}
# values of quantization_config's quant_method
METHODS = ("gptq", "awq", "auto-round", "compressed-tensors", "fp8", "bitsandbytes", "mxfp4", "modelopt")
OTHER_NAMES: dict[str, str | None] = {
    "auto_round": "auto-round",
    "intel/auto-round": "auto-round",
    "compressed_tensors": "compressed-tensors",
    "gptq_marlin": "gptq",  # vLLM's names for its kernels
    "awq_marlin": "awq",
    "modelopt_mixed": "modelopt",
    "None": None,  # as the checkpoint says
    "none": None,
}
NAMES = tuple(dict.fromkeys((*WHILE_LOADING, *METHODS)))
