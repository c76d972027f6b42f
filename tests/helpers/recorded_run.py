"""Directories of runs with recorded samples, made without training anything."""

import json
import random
from dataclasses import replace
from pathlib import Path

from megarl.record.metrics import JsonlSink, MetricsLogger, RunPaths
from megarl.record.rollouts import JudgedAnswer, RolloutRecord, write_answers, write_rollouts
from megarl.record.turns import Turn

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def write_recorded_run(
    root: Path, *, steps: int, prompts: int, samples: int = 4, hints: bool = False, seed: int = 0
) -> RunPaths:
    """Write a run of sums: in step s, sample i of prompt p is right if (s + i + p) is even, and its tokens are
    characters.

    hints: whether what a hint adds to log-probs was recorded too.
    """
    paths, rng = RunPaths(root), random.Random(seed)
    root.mkdir(parents=True)
    paths.config.write_text("algo: {name: grpo}\n")
    with MetricsLogger([JsonlSink(paths.metrics)]) as log:
        log.log(steps, {"critic/score/mean": 0.5})
    for step in range(1, steps + 1):
        rows = [
            _sample(step, (step - 1) * prompts + p, i, (step + i + p) % 2 == 0, hints, rng)
            for p in range(prompts)
            for i in range(samples)
        ]
        write_rollouts(paths.rollouts(step), rows)
    return paths


def _sample(step: int, prompt: int, index: int, right: bool, hints: bool, rng: random.Random) -> RolloutRecord:
    a, b = prompt % 90 + 10, prompt // 90 % 90 + 10
    answer = a + b if right else a + b + rng.randint(1, 9)
    text = f"{a} and {b}: {a} + {b // 10 * 10} = {a + b // 10 * 10}, so\n#### {answer}"
    tokens = (*text, "<|im_end|>")
    logprobs = tuple(-rng.expovariate(3) for _ in tokens)
    advantage = 1.0 if right else -1.0
    signal = tuple(rng.gauss(0.5 if right else -0.5, 0.8) for _ in tokens)
    return RolloutRecord(
        step=step,
        uid=f"sums:{prompt}",
        sample_index=index,
        data_source="sums",
        prompt=f"<|im_start|>user\n{a}+{b}=?<|im_end|>\n<|im_start|>assistant\n",
        response=f"{text}<|im_end|>",
        ground_truth=str(a + b),
        reward=float(right),
        finish_reason="stop",
        num_prompt_tokens=20,
        num_response_tokens=len(tokens),
        correct=right,
        details=json.dumps({"parse_failed": 0.0}),
        tokens=tokens,
        rollout_logprobs=logprobs,
        old_logprobs=tuple(logprob + rng.gauss(0, 0.003) for logprob in logprobs),
        advantage=tuple(advantage + 0.3 * d for d in signal) if hints else (advantage,) * len(tokens),
        hint_gain=signal if hints else (),
        base_advantage=(advantage,) * len(tokens) if hints else (),
    )


def talk(step: int) -> RolloutRecord:
    """A conversation with a calculator, whose reply the policy only read."""
    parts = (("policy", "calc 37*48<|im_end|>", -0.25), ("environment", "\n1776\n", 0.0), ("policy", "#### 1776", 1.0))
    response = "".join(text for _, text, _ in parts)
    return RolloutRecord(
        step=step,
        uid="calculator:0",
        sample_index=0,
        data_source="calculator",
        prompt="37*48=?",
        response=response,
        ground_truth="1776",
        reward=0.75,
        finish_reason="stop",
        num_prompt_tokens=7,
        num_response_tokens=len(response),
        correct=True,
        tokens=tuple(response),
        rollout_logprobs=tuple(-0.5 for _ in response),
        old_logprobs=tuple(-0.5 for _ in response),
        advantage=tuple(0.5 for _ in response),
        turns=tuple(Turn(author=author, text=text, reward=r, num_tokens=len(text)) for author, text, r in parts),
        num_calls=1,
    )


def forked(step: int) -> RolloutRecord:
    """A conversation of four branches: a turn, one after the call alone, a helper's, and one from within the second."""
    parts: tuple[tuple[str, str, int | None, int], ...] = (
        ("policy", "hm|calc", None, 0),
        ("environment", "calc=1776\n", -1, 7),
        ("policy", "#### 1776", None, 0),
        ("environment", "6*7?", -1, 0),
        ("policy", "42", None, 0),
        ("environment", "once more", 2, 4),
        ("policy", " 1776!", None, 0),
    )
    response = "".join(text for _, text, *_ in parts)
    return replace(
        talk(step),
        uid="forks:0",
        response=response,
        num_response_tokens=len(response),
        tokens=tuple(response),
        rollout_logprobs=tuple(-0.5 for _ in response),
        old_logprobs=tuple(-0.5 for _ in response),
        advantage=tuple(0.5 for _ in response),
        turns=tuple(
            Turn(author=author, text=text, num_tokens=len(text), parent=parent, num_kept=kept)
            for author, text, parent, kept in parts
        ),
    )


def evil(step: int) -> RolloutRecord:
    """A sample all of whose texts try to become part of the page."""
    return RolloutRecord(
        step=step,
        uid=f"q{EVIL}",
        sample_index=0,
        data_source=EVIL,
        prompt=EVIL,
        response=f"{EVIL}\x07\u2028",
        ground_truth=EVIL,
        reward=0.0,
        finish_reason="length",
        num_prompt_tokens=9,
        num_response_tokens=9,
        details=json.dumps({EVIL: EVIL}),
        tokens=(EVIL, "\x07", "\u2028"),
        rollout_logprobs=(-1.0, -2.0, -3.0),
    )


def write_validation(paths: RunPaths, step: int, uids: range, *, correct: bool) -> None:
    """Write the answers of a validation: to each prompt, one greedy and one sampled."""
    write_answers(
        paths.validation(step),
        [
            JudgedAnswer(
                data="val",
                data_source="sums",
                uid=f"sums:{uid}",
                sample_index=0,
                greedy=greedy,
                prompt=f"{uid}+1=?",
                response=f"#### {uid + 1}",
                ground_truth=str(uid + 1),
                reward=float(correct),
                correct=correct,
                finish_reason="stop",
                num_response_tokens=6,
            )
            for uid in uids
            for greedy in (False, True)
        ],
    )
