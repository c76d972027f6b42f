"""Run the `megarl` command: `python -m megarl`."""

import os
import sys

if sys.version_info < (3, 11):  # noqa: UP036 - a Python that is older may well find this file
    raise SystemExit(
        f"error: {sys.executable} is Python {sys.version.split()[0]}, but megarl needs 3.11 or later; use the Python "
        "of the environment in which megarl is installed, such as .venv/bin/python after `make install`"
    )
if sys.path[0] == (here := os.getcwd()):
    # As in `search_here_last`, but before anything else is imported. Python has looked there itself until now.
    sys.path.append(sys.path.pop(0))
    for name in sys.stdlib_module_names & sys.modules.keys():
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(here + os.sep):
            raise SystemExit(
                f"error: {file} takes the place of Python's own module {name}; rename it, or run megarl in place of "
                "python -m megarl"
            )
try:
    from megarl.cli import main

    main()
except ImportError as error:
    raise SystemExit(
        f"error: {sys.executable} (Python {sys.version.split()[0]}) cannot run megarl: {error}; use the Python of the "
        "environment in which megarl is installed, such as .venv/bin/python after `make install`"
    ) from None
