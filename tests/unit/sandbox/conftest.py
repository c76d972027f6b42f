"""Sandboxes whose limits are low."""

from collections.abc import Iterator

import pytest

from megarl_sandbox import Isolation, Sandbox, SandboxOptions
from tests.helpers.sandboxes import BRIEF, LIMITS


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """Where namespaces are missing, every test that uses it fails with what is missing."""
    with Sandbox(SandboxOptions(limits=LIMITS, isolation=Isolation.NAMESPACES)) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def brief_sandbox() -> Iterator[Sandbox]:
    with Sandbox(SandboxOptions(limits=BRIEF, isolation=Isolation.NAMESPACES)) as sandbox:
        yield sandbox
