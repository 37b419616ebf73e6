"""`python -m quire.entrypoints.openai.api_server FLAGS` is `quire serve FLAGS`: vLLM's older way to start a server.

Our own code does not import from here.
"""

import sys

from quire.frontend.cli.main import main
from quire.frontend.client.vllm_modules import names_of

__getattr__ = names_of(__name__)

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
