"""Run the `megarl` command: `python -m megarl`."""

import os
import sys

if sys.path[0] == os.getcwd():
    # As in `search_here_last`, but before anything else is imported.
    sys.path.append(sys.path.pop(0))
try:
    from megarl.cli import main

    main()
except ImportError as error:
    raise SystemExit(
        f"error: {sys.executable} (Python {sys.version.split()[0]}) cannot run megarl: {error}; use the Python of the "
        "environment in which megarl is installed, such as .venv/bin/python after `make install`"
    ) from None
