"""NVIDIA H100 SXM: the H200's die with less memory, 132 SMs, 80 GB at 3.35 TB/s.

Arithmetic, shared memory and libraries are the H200's, and so are tiles and cuBLAS's ranges until `tune.py` says otherwise.
What a slower memory moves: a product turns from reading W to arithmetic at 1.4 times as many rows.
"""

from msgspec.structs import replace

from quire.kernels.tuning.h200 import H200

H100 = replace(H200, devices=("NVIDIA H100 80GB HBM3",))
