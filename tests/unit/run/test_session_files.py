"""What a session's saved directory knows of the files that the session computes from."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from megarl.algos.objectives import SftAlgorithm
from megarl.config import Config, from_dict
from megarl.errors import ConfigError
from megarl.record.inputs import RunInputs, texts_of
from megarl.run.session_parts import SessionParts
from megarl.train.passes import RoleUpdater
from megarl.types import AlgoState
from megarl.types.messages import Role
from tests.unit.train.test_passes import role_of

Open = Callable[..., SessionParts]


@pytest.fixture
def open_parts(tmp_path: Path) -> Open:
    for name in ("train.jsonl", "val.jsonl"):
        (tmp_path / name).write_text("{}")

    def opened(**settings: Any) -> SessionParts:
        data = {"train": [f"{tmp_path}/train.jsonl"], "val": [f"{tmp_path}/val.jsonl"]}
        config = from_dict(Config, {"data": data, **settings})
        return SessionParts(
            inputs=SimpleNamespace(config=config, roles=()),  # type: ignore[arg-type]
            workers=MagicMock(),
            memory=MagicMock(),
            passes={Role.ACTOR: RoleUpdater(MagicMock(), role_of(), SftAlgorithm(), total_steps=1)},
            supervisor=None,
            queue=None,
            canary=None,
            files=RunInputs.of(texts_of(config), "session"),
        )

    return opened


def test_a_session_goes_on_with_the_same_files(tmp_path: Path, open_parts: Open) -> None:
    saved = tmp_path / "saved"
    open_parts().save(saved, num_draws=1, algo=AlgoState())
    # A session reads no held-out prompts.
    (tmp_path / "val.jsonl").write_text("[1]")
    assert open_parts().load(saved, weights_only=False).step == 1
    (tmp_path / "train.jsonl").write_text("[1]")
    with pytest.raises(ConfigError, match=r"data\.train: .*train\.jsonl; restore them, pass weights_only=True, or acc"):
        open_parts().load(saved, weights_only=False)
    open_parts().load(saved, weights_only=True)
    open_parts(checkpoint={"accept_changed": ["data.train"]}).load(saved, weights_only=False)
