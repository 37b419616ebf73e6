"""All kernels on one GPU against the roofline, beside torch's own: kernels_attention, kernels_small, kernels_quantized.py.

python benchmarks/kernels.py                                     every kernel, at the shapes of Llama-3.1-8B and Qwen3-0.6B
python benchmarks/kernels.py attention --only decode             one of the three with its own options: see `--help` of each
python benchmarks/kernels.py small --only linear --model 8B
"""

import subprocess
import sys
from pathlib import Path

PARTS = ("attention", "small", "quantized")


def main() -> int:
    """The exit code: that of the first part that fails."""
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    parts, options = PARTS, sys.argv[1:]
    if options and options[0] in PARTS:
        parts, options = (options[0],), options[1:]
    elif options:
        print(
            f"{options[0]!r}: options belong to one part, `attention`, `small` or `quantized`, which comes first",
            file=sys.stderr,
        )
        return 2
    for part in parts:
        script = Path(__file__).with_name(f"kernels_{part}.py")
        print(f"\n#### {script.name}", flush=True)
        if code := subprocess.run([sys.executable, str(script), *options], check=False).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
