"""Whether programs that a model wrote can be shut in here."""

from collections.abc import Iterator

from megarl.doctor.finding import Finding, Status
from megarl.errors import ConfigError, WorkerError
from megarl.sandbox import Sandbox


def check_sandbox() -> Iterator[Finding]:
    """Try it: rewards from tests of programs need it, nothing else does."""
    try:
        with Sandbox() as sandbox, sandbox.program(""):
            yield Finding(subject="code sandbox", found="namespaces, limits and the filter of system calls work")
    except (ConfigError, WorkerError) as error:
        yield Finding(
            subject="code sandbox",
            found="programs cannot be shut in, so rewards from tests of programs refuse to run",
            status=Status.WARN,
            advice=str(error),
        )
