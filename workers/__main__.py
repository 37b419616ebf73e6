"""A worker process: its life is tied to the core's, its configuration comes over the control pipe."""

import faulthandler
import signal

from quire.ipc.config import WorkerConfig
from quire.ipc.logs import set_up_logging
from quire.ipc.process import child_main_config


def main() -> None:
    config = child_main_config(WorkerConfig)
    set_up_logging()
    faulthandler.register(signal.SIGUSR1)  # the core asks a stuck worker for its stacks before it kills it
    from quire.workers.worker import Worker

    Worker(config).run()


if __name__ == "__main__":
    main()
