"""Tests on GPUs compare float32 with transformers: products are IEEE's."""

import pytest
import torch


@pytest.fixture(autouse=True)
def ieee_products():
    torch.backends.cuda.matmul.allow_tf32 = False
