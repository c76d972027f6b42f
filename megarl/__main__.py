"""Run the `megarl` command: `python -m megarl`."""

import sys

try:
    from megarl.cli import main

    main()
except ImportError as error:
    raise SystemExit(
        f"error: {sys.executable} (Python {sys.version.split()[0]}) cannot run megarl: {error}; use the Python of the "
        "environment in which megarl is installed, such as .venv/bin/python after `make install`"
    ) from None
