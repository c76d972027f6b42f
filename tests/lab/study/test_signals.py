"""The signal study's signals and tables, on hand-made scores."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from megarl.algos.cpo import CpoInputs
from megarl.config.load import load_config
from megarl.errors import ConfigError
from megarl_lab.recipes.tasks.mistakes import ReadAnswer
from megarl_lab.study.hinted import SampledAnswer
from megarl_lab.study.signal import (
    EARLIER,
    FIRST,
    LATER,
    STEP,
    ModelResult,
    Signal,
    SignalStudy,
    cells_of,
    load_signal_study,
    signals_of,
    token_kinds,
)
from megarl_lab.study.signal_output import write_results
from megarl_lab.study.warm_starts import WarmStart

REPOSITORY = Path(__file__).parents[3]
STUDY = SignalStudy(dir="unused", tasks=(), num_draws=10)
PLAIN = Signal(place="system", estimator="pmi", shuffled=False, excluded=False)


def answer(group: int, mistake: slice | None, span: list[int]) -> SampledAnswer:
    return SampledAnswer(
        group=group,
        token_ids=tuple(range(len(span))),
        correct=mistake is None,
        read=ReadAnswer(lines=(), mistake=None, worked=False),
        mistake=mistake,
        answer_span=np.array(span, dtype=bool),
    )


def scores(old: float, hint: float, shuffled: float, *, num_rows: int = 1) -> CpoInputs:
    """Two tokens per row: one with these probabilities and a divergence of 0.5, and one that nothing changes."""

    def rows(p: float) -> torch.Tensor:
        return torch.tensor([[p, 0.1]]).log().repeat(num_rows, 1)

    return CpoInputs(
        advantages=torch.zeros(num_rows, 2),
        loss_mask=torch.ones(num_rows, 2, dtype=torch.bool),
        correct=torch.zeros(num_rows, dtype=torch.bool),
        difficulty=torch.zeros(num_rows, dtype=torch.long),
        vocab_size=8,
        old_logprobs=rows(old),
        hint_logprobs=rows(hint),
        shuffled_hint_logprobs=rows(shuffled),
        hint_kl=torch.tensor([[0.5, 0.0]]).repeat(num_rows, 1),
    )


def test_signals_by_hand() -> None:
    """−MI of one token: hint log-prob ln ½, without the hint ln ¼, with another one ln ⅛."""
    signals = list(signals_of("system", scores(0.25, 0.5, 0.125)))
    found = {(signal.estimator, signal.shuffled): values[0, 0].item() for signal, values in signals}
    assert all(values[0, 1] == 0 for _, values in signals)
    ln2 = float(np.log(2))
    expected = {
        ("p_weighted", False): -0.5 * ln2,
        ("p_weighted", True): -0.5 * 2 * ln2,
        ("pmi", False): -ln2,
        ("pmi", True): -2 * ln2,
        ("kl_is", False): -2 * ln2,
        # d = 2 ln 2 is below the bound, ln 5.
        ("kl_is", True): -4 * 2 * ln2,
        ("full_kl", False): -0.5,
    }
    assert found == pytest.approx(expected)


def test_what_closes_a_wrong_answer_is_not_wrong() -> None:
    """`<answer>4+9</answer>`: without the answer no mistake is left, least of all in the closing tag."""
    row = answer(0, slice(2, 5), [0, 1, 1, 1, 0, 0])
    assert token_kinds(row).tolist() == [EARLIER, EARLIER, FIRST, STEP, LATER, LATER]


def test_what_is_compared() -> None:
    """Two wrong rows and a right one: what follows the mistake counts nowhere, and the answer may be left out."""
    rows = [
        answer(0, slice(1, 2), [0, 1, 0]),  # the mistake is the answer
        answer(1, slice(2, 3), [0, 0, 0, 1]),
        answer(2, None, [0, 1]),
    ]
    values = torch.tensor([[0.0, 9.0, 50.0, -1.0], [3.0, 1.0, 2.0, 70.0], [8.0, 9.0, -1.0, -1.0]])
    areas = {(c.signal.excluded, c.positive, c.negative): c.area for c in cells_of(STUDY, rows, [(PLAIN, values)])}
    # Mistakes 9, 2 against 0, 3, 1: 9 exceeds all, 2 exceeds 0 and 1.
    same = areas[False, "step", "same rows"]
    assert same is not None
    assert (same.value, same.num_positive, same.num_negative) == (pytest.approx(5 / 6), 2, 3)
    # Against 8, 9 of the right row: 9 exceeds 8 and equals 9; 2 exceeds none.
    right = areas[False, "step", "right rows"]
    assert right is not None
    assert right.value == pytest.approx(1.5 / 4)
    # Without answers: 2 against 0, 3, 1.
    outside = areas[True, "step", "same rows"]
    assert outside is not None
    assert (outside.value, outside.num_positive) == (pytest.approx(2 / 3), 1)


def test_tables_and_picture(tmp_path: Path) -> None:
    rows = [answer(0, slice(1, 2), [0, 1]), answer(1, slice(1, 2), [0, 1])]
    alike = scores(0.5, 0.5, 0.5, num_rows=2)
    surprise = Signal(place="", estimator="surprise", shuffled=False, excluded=False)
    cells = [
        *cells_of(STUDY, rows, [(surprise, -alike.need("old_logprobs"))]),
        *cells_of(STUDY, rows, signals_of("system", alike)),
    ]
    result = ModelResult(
        task="sums",
        model=WarmStart(name="full", steps=800),
        num_answers=3,
        num_right=0,
        num_wrong=2,
        num_odd=1,
        num_in_answer=2,
        accuracy=0.25,
        hinted_accuracy={"system": 0.5},
        cells=tuple(cells),
    )
    paths = write_results(tmp_path, [result])
    table = paths[1].read_text().splitlines()
    assert table[2] == "| sums | full | 800 | 0 | 2 | 2 | 1 | 0.25 | 0.50 |"
    # The mistake is the less likely token in both rows, and an answer; the hint says nothing.
    assert "| sums | full | surprise | 1.00 ± 0.00 |  |  |  |  |" in table
    assert "| none | surprise | 1.00 ± 0.00 |  |  |  |" in table
    assert "| system | pmi | 0.50 ± 0.00 | 0.50 ± 0.00 |  |  |" in table
    assert json.loads(paths[0].read_text())[0]["num_odd"] == 1
    assert paths[2].read_bytes().startswith(b"\x89PNG")


def test_the_study_of_the_repository(tmp_path: Path) -> None:
    study = load_signal_study(REPOSITORY / "configs/study/signal.yaml")
    assert [task.task for task in study.tasks] == ["sums", "countdown"]
    for task in study.tasks:
        whole = load_config(REPOSITORY / f"configs/run/{task.task}-sft.yaml").sft.total_steps
        steps = [start.steps for start in task.warm_starts]
        assert steps == [whole // 4, whole // 2, whole, whole]
    bad = tmp_path / "bad.yaml"
    bad.write_text("dir: x\ntasks: [{task: chess, warm_starts: []}]")
    with pytest.raises(ConfigError, match=r"bad.yaml: task: unknown task 'chess'"):
        load_signal_study(bad)
