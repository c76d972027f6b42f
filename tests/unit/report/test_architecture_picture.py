"""The committed picture of the architecture is the one that its script draws."""

from pathlib import Path

from tools import draw_architecture


def test_the_committed_picture_is_what_the_script_writes(tmp_path: Path) -> None:
    drawn = tmp_path / "architecture.svg"
    draw_architecture.main([str(drawn)])
    assert drawn.read_bytes() == draw_architecture.OUTPUT.read_bytes()
