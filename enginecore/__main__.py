"""The engine as a child process of a server or an LLM object. It gets its configuration, and reports readiness or an error."""

import signal
import sys

from quire.ipc.config import EngineConfig
from quire.ipc.process.children import FROM_OUTSIDE, WORKER_MODULE, child_main_config, heartbeat, prespawn, tell_parent
from quire.ipc.process.logs import set_up_logging


def main() -> None:
    worker = prespawn(WORKER_MODULE)  # it loads torch while this process loads its modules and reads the model's files
    config = child_main_config(EngineConfig, death_signal=signal.SIGTERM)
    set_up_logging(config.log_level, config.log_format)
    from quire.enginecore.daemon import StartupError, run_engine
    from quire.enginecore.stop_signals import Stopped
    from quire.enginecore.worker_profiles import WorkersFailed

    has_served = list[bool]()

    def served() -> None:
        if not has_served:  # each generation of workers says so
            has_served.append(True)
            tell_parent({"served": "yes"})

    try:
        run_engine(config, lambda address: tell_parent({"ready": address}), worker, heartbeat, served)
    except (StartupError, Stopped, WorkersFailed) as error:
        from_outside = isinstance(error, Stopped) or (isinstance(error, StartupError) and error.from_outside)
        tell_parent({"error": str(error), **({FROM_OUTSIDE: "yes"} if from_outside else {})})
        sys.exit(1)


if __name__ == "__main__":
    main()
