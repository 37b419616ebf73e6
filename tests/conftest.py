"""Settings of the whole suite."""

import os
import signal

# A suite that is run in the background is born deaf to it, and so are its children.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The models of the tests are tiny: a second thread would only wait, for long where other processes want the cores, too.
# Set before torch is imported; children inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
