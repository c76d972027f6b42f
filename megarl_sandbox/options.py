"""Define the options of a sandbox: how a program is isolated, and how much of each resource it may use."""

from dataclasses import dataclass, field, fields
from enum import StrEnum

from megarl_sandbox.errors import OptionError

MIB = 2**20


class Isolation(StrEnum):
    """Choose how a program is isolated.

    `auto` takes namespaces, or else Landlock, and runs nothing if the kernel grants neither; `limits_only` does not
    protect the machine.
    """

    AUTO = "auto"
    NAMESPACES = "namespaces"
    LANDLOCK = "landlock"
    LIMITS_ONLY = "limits_only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The resources that one run of a program may use; sizes are in MiB, times in seconds."""

    cpu_s: int = 5  # CPU time.
    wall_s: float = 15.0  # Wall-clock time.
    memory_mib: int = 1024  # Address space of each process, and resident memory of all processes together.
    processes: int = 16  # Number of processes and threads.
    files_mib: int = 16  # Size of one file, and of all files together.
    files: int = 64  # Number of files that may exist, and that a process may have open.
    output_mib: float = 1.0  # Size of standard output, of standard error and of the answer, each.

    def __post_init__(self) -> None:
        for entry in fields(self):
            if not getattr(self, entry.name) > 0:
                raise OptionError(f"limits.{entry.name}: got {getattr(self, entry.name)}, expected more than 0")

    @property
    def output_bytes(self) -> int:
        """Return the limit of output in bytes."""
        return int(self.output_mib * MIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxOptions:
    """Set the options that apply to all programs of a sandbox.

    `import_paths`: directories of packages that programs may import, read-only, besides the standard library.
    `executables`: files that programs may execute, and then also write anywhere in their own file system, which is in
    memory; only namespaces allow it.
    """

    isolation: Isolation = Isolation.AUTO
    limits: Limits = field(default_factory=Limits)
    import_paths: tuple[str, ...] = ()
    executables: tuple[str, ...] = ()
