"""`python -m quire`: the command line, where its script is not on the path, or of the Python that is meant."""

import sys

from quire.frontend.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
