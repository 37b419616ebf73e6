"""Hundreds of broken images through a process that decodes them: each is answered or refused, and nothing stays behind."""

import asyncio
import random

import mutated_images


def test_each_file_is_answered_or_refused():
    found = asyncio.run(mutated_images.run(400, seed=7, workers=1))
    assert found.wrong == [] and {outcome for _, outcome in found.outcomes} == {"answered", "refused"}
    assert found.outcomes.total() == 400 and len(found.outcomes) > 30
    assert found.replaced == 0 and found.peak_mib < 1024


def test_the_seed_decides_the_files():
    def files(seed):
        draw = random.Random(seed)
        return [mutated_images.mutated(draw, originals) for _ in range(300)]

    originals = mutated_images.originals()
    first = files(1)
    assert first == files(1) != files(2)
    sound = {data for some in originals.values() for data in some}
    assert sum(data not in sound for _, data in first) > 250
