"""Answers of a local model: which tokens are wrong, and what a hint changes, against transformers' own numbers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from megarl_lab.recipes.tasks import SUMS
from megarl_lab.recipes.tasks.sums import pose_sum
from megarl_lab.recipes.tiny_model import TinyModelConfig, make_tiny_model
from megarl_lab.study.hinted import HINTS, LocalModel, SampledAnswer

SUM = pose_sum((5, 7, 3))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    sizes = TinyModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, ffn_size=24)
    make_tiny_model(path, sizes, seed=0)
    return path


@pytest.fixture(scope="module")
def judge(path: Path) -> Callable[[str], SampledAnswer]:
    model, tokenizer = LocalModel(path), transformers.AutoTokenizer.from_pretrained(path)

    def of(text: str) -> SampledAnswer:
        ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        return model.judge(SUMS, SUM, 0, ids)

    return of


def test_an_answer_with_a_mistake(judge: Callable[[str], SampledAnswer]) -> None:
    answer = judge("5+7=13\n13+3=16\n#### 16")
    # Every character is a token.
    assert answer.read.mistake is not None
    assert not answer.correct
    assert answer.answer_span.tolist() == [False] * 20 + [True, True, False]


def test_right_rows_have_no_mistake(judge: Callable[[str], SampledAnswer]) -> None:
    answer = judge("5+7=12\n12+3=15\n#### 15")
    assert answer.correct
    assert answer.read.mistake is None


def test_hints_stand_where_the_model_learned_them(path: Path) -> None:
    model, tokenizer = LocalModel(path), transformers.AutoTokenizer.from_pretrained(path)
    prompts = model.pose([SUM])
    texts = {place: tokenizer.decode(model.hint(prompts, cfg)["0"].token_ids) for place, cfg in HINTS.items()}
    hint, question, end = f"Hint: {SUM.solution}", SUM.question, "<|im_end|>\n<|im_start|>assistant\n"
    assert texts == {
        "before_question": f"<|im_start|>user\n{hint}\n{question}{end}",
        "after_question": f"<|im_start|>user\n{question}\n{hint}{end}",
        "system": f"<|im_start|>system\n{hint}<|im_end|>\n<|im_start|>user\n{question}{end}",
        "user_turn": f"<|im_start|>user\n{question}\n{hint}\n{question}{end}",
    }


def test_scores_are_those_of_the_chats(path: Path, judge: Callable[[str], SampledAnswer]) -> None:
    """Two problems give each other their hints."""
    model, tokenizer = LocalModel(path), transformers.AutoTokenizer.from_pretrained(path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    other = pose_sum((1, 2))
    answers = [judge("#### 20"), judge("5+7=12\n12+3=15\n#### 15")]
    inputs = model.hint_inputs(answers, model.pose([SUM, other]), HINTS["system"], seed=0)
    hinted = [{"role": "system", "content": f"Hint: {SUM.solution}"}]
    shuffled = [{"role": "system", "content": f"Hint: {other.solution}"}]
    question = [{"role": "user", "content": SUM.question}]
    for row, answer in enumerate(answers):
        for name, head in (("old_logprobs", []), ("hint_logprobs", hinted), ("shuffled_hint_logprobs", shuffled)):
            prompt = tokenizer.apply_chat_template([*head, *question], add_generation_prompt=True, return_dict=False)
            with torch.no_grad():
                logits = reference(torch.tensor([[*prompt, *answer.token_ids]])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1)[range(len(answer.token_ids)), list(answer.token_ids)]
            got = getattr(inputs, name)[row, : len(answer.token_ids)]
            assert torch.allclose(got, expected, atol=1e-5)


def test_samples_are_whole_answers_of_their_problems(path: Path) -> None:
    problems = [SUM, pose_sum((1, 2))]
    model = LocalModel(path)
    prompts = [prompt.token_ids for prompt in model.pose(problems)]
    answers = model.sample(SUMS, problems, prompts, num_samples=40, max_tokens=64, seed=1)
    assert answers
    eos = transformers.AutoTokenizer.from_pretrained(path).eos_token_id
    for answer in answers:
        assert answer.token_ids.index(eos) == len(answer.token_ids) - 1
        assert len(answer.answer_span) == len(answer.token_ids)
    again = model.sample(SUMS, problems, prompts, num_samples=40, max_tokens=64, seed=1)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in answers]
