"""`python -m quire.entrypoints.openai.api_server FLAGS` is `quire serve FLAGS`: vLLM's older way to start a server.

Our own code does not import from here.
"""

import sys

from quire.frontend.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
