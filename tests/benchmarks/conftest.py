"""The scripts of benchmarks/ are modules of their own, found from beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
