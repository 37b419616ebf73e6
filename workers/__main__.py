"""A worker process: it ends with the core; its configuration comes over the control pipe."""

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

# How often a thread of libgomp looks for work before it sleeps: for about a tenth of a millisecond, by default for several. If
# another process wants a core, all threads wait for the one that lost its core to a thread that only looks for work: on two
# busy cores a 0.5B model's step took 230 to 600 ms, with this 140 to 160, and on idle cores 36 either way.
SPIN_COUNT = "8000"

ENVIRONMENT = {  # read when torch is loaded, before the device is known
    "THP_MEM_ALLOC_ENABLE": "1",  # huge pages: on a CPU 2 GB of weights load 2 s faster
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # otherwise every start on a GPU warns that blas.py's choice is experimental
    # Compiled products that oneDNN, and torch's binding of it, cache: 1,024 by default, of 0.4 to 1 MB each. A model has about
    # five shapes of weights, so 256 are enough for 50 numbers of rows (layers/formats/packed_cpu.py pads to few).
    "LRU_CACHE_CAPACITY": "256",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
    "CUDA_MODULE_LOADING": "LAZY",  # torch sets this too, but too late for a context made before
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
    gc.freeze()  # otherwise the interpreter's exit collects garbage among all of torch's objects several times: 0.5 s


def load() -> "type[Worker]":
    """Import torch and everything else; takes seconds the first time."""
    from quire.workers.worker import Worker

    return Worker


def load_in_background() -> None:
    """Import while the main thread waits for the configuration."""
    with contextlib.suppress(Exception):  # the main thread will get the same error
        load()


if __name__ == "__main__":
    main()
