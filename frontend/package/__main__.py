"""`python -m quire`: the command line, if its script is not on the path, or to choose the Python that runs it."""

import sys

from quire.frontend.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
