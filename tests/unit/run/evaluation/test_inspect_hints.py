"""`megarl inspect-hints` on the built-in task and on a file of GSM8K's form, with a model and without."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.cli import main
from megarl.errors import DataError
from megarl.run.evaluation.inspect_hints import InspectRequest, inspect_hints
from megarl_lab.recipes.tasks import TASKS
from megarl_lab.recipes.tasks.generate import GenerateConfig, generate
from megarl_lab.recipes.tiny_model import TinyModelConfig, make_tiny_model

RUN_FILE = Path(__file__).parents[4] / "configs" / "run" / "sums-rl.yaml"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, TinyModelConfig(hidden_size=32, num_layers=2, ffn_size=48), seed=0)
    return path


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = GenerateConfig(seed=0, num_sft=4, num_train=20, num_val=4)
    return Path(generate(TASKS.get("sums"), tmp_path_factory.mktemp("sums"), sizes).train)


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As verl prepares it: the worked solution is extra_info.answer."""
    path = tmp_path_factory.mktemp("gsm8k") / "train.jsonl"
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"Ann has {n} apples and buys 2. How many has she?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(n + 2)},
            "extra_info": {"split": "train", "answer": f"{n}+2 = {n + 2}\n#### {n + 2}", "question": f"Ann has {n}"},
        }
        for n in range(5)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def inspected(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(data: Path, *arguments: str) -> str:
        settings = [f"data.train=[{data}]", f"model.path={model}", "data.max_prompt_tokens=100"]
        main(["inspect-hints", str(RUN_FILE), *settings, *arguments])
        return capsys.readouterr().out

    return run


def test_without_a_model(inspected: Callable[..., str], sums: Path, tmp_path: Path) -> None:
    """Whatever the algorithm of the run file: its hints are those of algo.cpo.hint."""
    text = inspected(sums, "algo.cpo.hint.max_tokens=12")
    header, counts = text.splitlines()[3:6][1:]
    assert header.split() == ["source", "prompts", "placed", "cut", "no", "text", "no", "place", "no", "room"]
    source, *numbers = counts.split()
    assert (source, numbers[:2], numbers[3:]) == ("megarl/sums", ["20", "20"], ["0", "0", "0"])
    assert text.count("Hint: ⟦") == 3
    assert "hints are cut; raise algo.cpo.hint.max_tokens=12" in text
    assert "wrote" not in text
    inspected(sums, "--out", str(tmp_path / "new" / "page.html"))
    assert "Prompts with their hints" in (tmp_path / "new" / "page.html").read_text()


def test_a_file_of_gsm8ks_form(inspected: Callable[..., str], gsm8k: Path, model: Path) -> None:
    settings = (f"data.train=[{gsm8k}]", f"model.path={model}", "data.max_prompt_tokens=100")
    with pytest.raises(
        DataError, match=r"set algo\.cpo\.hint\.field to a field with text, .*: answer, question, split"
    ):
        inspect_hints(InspectRequest(run_file=RUN_FILE, overrides=settings))
    text = inspected(gsm8k, "algo.cpo.hint.field=answer", "algo.cpo.hint.place=after_question")
    assert "openai/gsm8k        5       5    0        0         0        0" in text
    assert "How many has she?Hint: ⟦0+2 = 2\n#### 2⟧\n<|im_end|>" in text


def test_a_models_signal(inspected: Callable[..., str], sums: Path, model: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    options = ["--model", str(model), "--out", str(page), "--num-prompts", "4"]
    text = inspected(sums, *options, "rollout.num_samples=3", "rollout.max_response_tokens=8")
    assert "nats per token" in text
    assert re.search(r"\nrows +0 +12 +12\n", text)
    for name in ("gain of the own hint", "gain of another's hint", "p_weighted", "pmi", "kl_is", "full_kl"):
        assert re.search(rf"\n{name} +none +[+-]\d\.\d{{4}} +[+-]\d\.\d{{4}}\n", text), name
    assert page.read_text().count("<article") == 12
    text = inspected(sums, *options, "--answers", "solutions")
    # Solutions are right, and end in the end token.
    assert re.search(r"\nrows +4 +0 +4\n", text)
    assert page.read_text().count("&lt;|im_end|&gt;</span>") >= 4
