"""`quire.distributed.parallel_state`: vLLM's path to the end of a process group, for scripts that import from it.

Our own code does not import from here, but from the files that define the names.
"""

from quire.frontend.client.script_tools import clean_up as cleanup_dist_env_and_memory
from quire.frontend.client.script_tools import clean_up as destroy_distributed_environment
from quire.frontend.client.script_tools import clean_up as destroy_model_parallel
from quire.frontend.client.vllm_modules import names_of

__all__ = ["cleanup_dist_env_and_memory", "destroy_distributed_environment", "destroy_model_parallel"]

__getattr__ = names_of(__name__)
