"""Each committed picture that a script draws without data is the one that its script draws."""

from pathlib import Path
from types import ModuleType

import pytest

from tools import draw_architecture, draw_forks


@pytest.mark.parametrize("script", [draw_architecture, draw_forks])
def test_the_committed_picture_is_what_the_script_writes(script: ModuleType, tmp_path: Path) -> None:
    drawn = tmp_path / "picture.svg"
    script.main([str(drawn)])
    assert drawn.read_bytes() == script.OUTPUT.read_bytes()
