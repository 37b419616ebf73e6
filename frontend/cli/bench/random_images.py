"""Prompts of random texts with random images, for `quire bench serve --dataset-name random-mm`.

Images are JPEG files as data: URLs, each different, of smooth noise: they compress about as photos do.
"""

import base64
import io

import numpy as np

from quire.frontend.cli.bench.datasets import Request


def with_images(requests: list[Request], number: int, width: int, height: int, seed: int) -> list[Request]:
    """The requests, each with so many images."""
    rng = np.random.default_rng((seed, 3))
    return [each._replace(images=tuple(image_url(rng, width, height) for _ in range(number))) for each in requests]


def image_url(rng: np.random.Generator, width: int, height: int) -> str:
    from PIL import Image  # here: only this dataset needs it

    coarse = rng.integers(0, 256, (max(height // 16, 1), max(width // 16, 1), 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
