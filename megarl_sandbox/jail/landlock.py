"""Confine a process to some files by Landlock, which needs neither namespaces nor privileges (Linux 5.13).

Landlock decides about opening, creating and removing files. It does not see changes of modes, owners and times, which
the filter of system calls refuses; and it does not hide that a file exists.
"""

import os
import struct
from collections.abc import Sequence

from megarl_sandbox.jail import kernel

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
# Rights over files by version of the interface: 13 from the first, then linking, truncating, controlling devices.
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_EXECUTE, _DEVICES = 1 << 0, (1 << 6) | (1 << 11) | (1 << 15)
# Binding and connecting by TCP (version 4); abstract sockets and signals of processes outside (version 6).
_TCP, _SCOPES = 0b11, 0b11
_DEVICE_FILES = ("/dev/null", "/dev/zero", "/dev/urandom")


def version() -> int:
    """Return the version of the kernel's interface; OSError if it has none, or Landlock is off."""
    return kernel.system_call(_CREATE_RULESET, None, 0, _VERSION)


def restrict_files(read_only: Sequence[str], scratch: str) -> None:
    """Let this process and its children only read what lies below `read_only`, and use `scratch`.

    The process must have set no_new_privs before. OSError if the kernel refuses.
    """
    level = version()
    rights = _RIGHTS[min(level, max(_RIGHTS))]
    attributes = struct.pack("=QQQ", rights, _TCP, _SCOPES)[: 8 if level < 4 else 16 if level < 6 else 24]
    rules = kernel.system_call(_CREATE_RULESET, attributes, len(attributes), 0)
    reading = _READ_FILE | _READ_DIR
    allowed = [(path, reading) for path in read_only]
    allowed += [(path, _READ_FILE | _WRITE_FILE) for path in _DEVICE_FILES]
    allowed.append((scratch, rights & ~(_EXECUTE | _DEVICES)))
    for path, access in allowed:
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
        # Files have no rights of directories.
        access &= rights if os.path.isdir(path) else ~_READ_DIR
        kernel.system_call(_ADD_RULE, rules, _PATH_BENEATH, struct.pack("=Qi", access, file), 0)
        os.close(file)
    kernel.system_call(_RESTRICT_SELF, rules, 0)
    os.close(rules)


def is_readable_by_all(paths: Sequence[str]) -> bool:
    """Return whether a user without rights can reach these places, so that programs may run as such a user."""
    parents = {os.path.realpath(path) for path in paths}
    while missing := {os.path.dirname(path) for path in parents} - parents:
        parents |= missing
    return all(os.stat(path).st_mode & 0o001 or not os.path.isdir(path) for path in parents)
