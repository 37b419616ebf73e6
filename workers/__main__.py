"""A worker process: its life is tied to the core's, its configuration comes over the control pipe."""

import contextlib
import faulthandler
import gc
import os
import signal
import threading
from typing import TYPE_CHECKING

from quire.ipc.process.children import child_main_config
from quire.ipc.process.logs import set_up_logging
from quire.ipc.worker_config import WorkerConfig
from quire.kernels.triton_support.triton_key import read_triton_in_background
from quire.workers.devices.cuda_context import make_context_in_background

if TYPE_CHECKING:
    from quire.workers.worker import Worker

# How often a thread of libgomp looks for work before it sleeps: a tenth of a millisecond or so. It would look for several, and
# where another process wants a core, all threads wait for the one that lost its own to somebody who only looks: on two busy
# cores a 0.5B model's step took 230 to 600 ms, with this 140 to 160, and on idle ones 36 either way.
SPIN_COUNT = "8000"

ENVIRONMENT = {  # read when torch is loaded, before it is known for which device
    "THP_MEM_ALLOC_ENABLE": "1",  # huge pages: on a CPU 2 GB of weights are there 2 s sooner
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # or every start on a GPU warns that blas.py's choice is experimental
    # Products that oneDNN, and torch's binding of it, keep ready: 1,024 by default, at 0.4 to 1 MB each. A model has some five
    # shapes of weights, so 256 are 50 numbers of rows (layers/formats/packed_cpu.py pads to few).
    "LRU_CACHE_CAPACITY": "256",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
    "CUDA_MODULE_LOADING": "LAZY",  # as torch sets it, which is too late for a context that was made before
}


def main() -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    threading.Thread(target=load_in_background, name="loader", daemon=True).start()
    config = child_main_config(WorkerConfig)
    if config.engine.device == "cuda":
        make_context_in_background(config.gpu_index)
        read_triton_in_background()
    set_up_logging(config.engine.log_level, config.engine.log_format)
    faulthandler.register(signal.SIGUSR1)  # the core asks a stuck worker for its stacks before it kills it
    load()(config).run()
    gc.freeze()  # at its end the interpreter would look through all that torch has made again and again: 0.5 s


def load() -> "type[Worker]":
    """Load torch and all else; seconds, if it was not done before."""
    from quire.workers.worker import Worker

    return Worker


def load_in_background() -> None:
    """Load while the configuration is waited for."""
    with contextlib.suppress(Exception):  # the main thread will meet it, too
        load()


if __name__ == "__main__":
    main()
