"""List the files of this machine that Python needs to import its standard library."""

import os
import sys
import sysconfig
from collections.abc import Sequence

from megarl_sandbox.errors import OptionError

_SYSTEM_PREFIX = "/usr"
# Library directories of systems that have none per architecture.
_PLAIN = ["/lib64", "/usr/lib64", "/usr/lib"]


def python_paths(import_paths: Sequence[str]) -> list[str]:
    """List the files and directories to show to programs, without nested ones; OptionError if one lies in /tmp."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    libraries = ["/lib64", "/usr/lib64", f"/lib/{multiarch}", f"/usr/lib/{multiarch}"] if multiarch else _PLAIN
    wanted = {
        *(path for path in libraries if os.path.exists(path)),
        *(path for path in ("/lib",) if os.path.islink(path)),
        *(path for path in ("/etc/ld.so.cache",) if os.path.exists(path)),
        sysconfig.get_path("stdlib"),
        # A virtual environment has no standard library of its own.
        sysconfig.get_path("platstdlib", vars={"platbase": sys.base_exec_prefix}),
        *(os.path.realpath(path) for path in import_paths),
    }
    # A Python that does not belong to the system has the shared libraries that it came with beside its own.
    if sys.base_prefix != _SYSTEM_PREFIX:
        wanted.add(os.path.join(sys.base_prefix, "lib"))
    shown: list[str] = []
    for path in sorted(wanted):
        if not any(path.startswith(f"{above}/") for above in shown):
            shown.append(path)
    if hidden := [path for path in shown if path.startswith("/tmp/")]:
        raise OptionError(
            f"import_paths: programs in the sandbox need {hidden[0]}, but their own files take the place of /tmp; keep "
            "Python and these packages elsewhere"
        )
    return shown
