"""A process has one session at a time: another one closes it, as where a cell of a notebook is run again."""

import contextlib
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from megarl.config.schema import Config
from megarl.errors import RunError
from megarl.run import session as module
from megarl.run.session import Session
from megarl.run.session_parts import SessionParts


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[type | None]:
    """What ended the processes of each session, in their order: an error's class, or None."""
    ended: list[type | None] = []

    def open_parts(stack: contextlib.ExitStack, *_: Any, **__: Any) -> SessionParts:
        if len(ended) == 3:
            raise RunError("the engines did not start")
        stack.push(lambda kind, *_: ended.append(kind))
        mocks = {name: MagicMock() for name in ("inputs", "workers", "memory", "files")}
        return SessionParts(**mocks, passes={}, supervisor=None, queue=None, canary=None)

    algorithm = SimpleNamespace(initial_state=lambda: None)
    monkeypatch.setattr(module, "open_session_inputs", lambda *_, **__: SimpleNamespace(algorithm=algorithm))
    monkeypatch.setattr(module, "open_parts", open_parts)
    return ended


def opened() -> Session:
    return Session(Config(), with_engines=False)


def test_the_next_session_closes_the_one_that_is_open(
    ends: list[type | None], capsys: pytest.CaptureFixture[str]
) -> None:
    first = opened()
    second = opened()
    # As after a failure, since a cell may have left its processes in the middle of something.
    assert ends == [RunError]
    assert "the session that was open is closed" in capsys.readouterr().out
    with pytest.raises(RunError, match="the session is closed; open another one"):
        first.discard()
    first.close()
    second.close()
    assert ends == [RunError, None]
    with pytest.raises(KeyError, match="mine"), opened():
        raise KeyError("mine")
    assert ends == [RunError, None, KeyError]
    with pytest.raises(RunError, match="did not start"):
        opened()
    assert "is closed" not in capsys.readouterr().out
