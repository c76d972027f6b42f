"""Inspect the hints of a run before it starts: which prompts have one, how they look, and what they tell a model."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from megarl.algos.cpo import CpoInputs
from megarl.algos.cpo.information import MI_ESTIMATORS
from megarl.config import load_config
from megarl.config.batches import max_hinted_row_tokens
from megarl.config.rewards import RewardsConfig
from megarl.config.schema import ModelConfig, RolloutConfig
from megarl.data.answers import Answers
from megarl.data.chat import load_tokenizer, token_texts
from megarl.data.hints import HintPlacer, HintSurvey, Missing, donors, hint_text, hinted_rows, survey_hints
from megarl.data.prompts import PromptDataset
from megarl.data.sampler import train_files
from megarl.errors import ConfigError
from megarl.host.device.platform import platform
from megarl.host.streams import print_lines
from megarl.host.writing import replacing
from megarl.report.hint_page import HintedAnswer, HintedExample, HintReport, Table, answer_tokens, to_html, to_text
from megarl.rewards.build import open_rewards
from megarl.rewards.routes import without_training
from megarl.run.evaluation.hint_signal import hint_inputs, mutual_information
from megarl.train.hinted import open_hints
from megarl.types import FinishReason, Prompt, Sample, Segment, SegmentSource, VersionSpan, prompt_segment
from megarl.types.rows import row_from_sample
from megarl.types.seeds import batch_seed
from megarl.weights.families import read_hf_config
from megarl.weights.hub import local_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUM_EXAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectRequest:
    """The request of the command line to an inspection.

    model: a Hugging Face directory, to measure how hints change its log-probs; None: only look at the prompts. answers:
    whose log-probs are measured, those of the model's own samples or of the hints used as answers.
    """

    run_file: Path
    overrides: tuple[str, ...] = ()
    model: Path | None = None
    out: Path | None = None
    num_prompts: int = 8
    answers: Literal["sampled", "solutions"] = "sampled"


def inspect_hints(request: InspectRequest) -> HintReport:
    """Print how many of a run's training prompts have a hint and, given a model, how much hints change its log-probs.

    If the request names a model or `out`, the report is also written as an HTML page, by default to hints.html.
    Raises DataError if no prompt has a hint.
    """
    if request.num_prompts < 1:
        raise ConfigError(f"--num-prompts: got {request.num_prompts}, expected >= 1")
    config = load_config(request.run_file, request.overrides)
    if not config.data.train:
        raise ConfigError("data.train: got no files, expected the training prompts whose hints are inspected")
    named, key = (config.model.path, "model.path") if request.model is None else (str(request.model), "--model")
    path = local_model(named, key, weights=request.model is not None)
    config = replace(config, model=replace(config.model, path=path))
    tokenizer = load_tokenizer(config.model.path, arguments=config.data.chat_template)
    prompts = PromptDataset(train_files(config.data.train), tokenizer, config.data, cpo=config.algo.cpo)
    positions = int(read_hf_config(Path(config.model.path)).get("max_position_embeddings", sys.maxsize))
    room = max_hinted_row_tokens(config, positions) - config.rollout.max_response_tokens
    placer = open_hints(config.algo, config.environment, tokenizer, room).placer
    survey = survey_hints(placer, (prompts[i] for i in range(len(prompts))))
    placed = ((prompt, placer.place(prompt)) for prompt in (prompts[i] for i in range(len(prompts))))
    chosen = list(islice(((prompt, hinted) for prompt, hinted in placed if not hinted.missing), request.num_prompts))
    report = HintReport(
        title=f"Hints of {config.run.name}",
        details=f"{', '.join(train_files(config.data.train))}; algo.cpo.hint: place {config.algo.cpo.hint.place}, "
        f"template {config.algo.cpo.hint.text!r}",
        tables=(_coverage(survey),),
        examples=tuple(
            HintedExample(title=f"{prompt.uid}, {len(found.token_ids)} tokens", before=before, hint=hint, after=after)
            for prompt, found in chosen[:NUM_EXAMPLES]
            for before, hint, after in [found.text]
        ),
        answers=(),
    )
    if request.model is not None and chosen:
        report = _with_signal(
            report,
            request,
            config.rollout,
            config.rewards,
            config.model,
            tokenizer,
            placer,
            [prompt for prompt, _ in chosen],
            micro_batch_tokens=config.actor.micro_batch_tokens,
            run_seed=config.run.seed,
        )
    print(to_text(report, with_colors=sys.stdout.isatty()))
    for warning in survey.warnings(placer):
        print_lines(f"warning: {warning}")
    if request.out is not None or request.model is not None:
        out = request.out or Path("hints.html")
        with replacing(out) as file:
            file.write_text(to_html(report), encoding="utf-8")
        print_lines(f"wrote {out}")
    survey.require_some(placer)
    return report


def _coverage(survey: HintSurvey) -> Table:
    columns = ("prompts", "placed", "cut", *Missing)
    counts = {**survey.counts, **({"all": survey.total} if len(survey.counts) > 1 else {})}
    return Table(
        title="Coverage",
        note="Number of prompts by data source: those whose hint is placed, those of them whose hint is cut, and those "
        "without one, because the data has no text, the chat no place, or the row no room.",
        rows=(
            ("source", *(column.replace("_", " ") for column in columns)),
            *((source, *(str(of_source[column]) for column in columns)) for source, of_source in counts.items()),
        ),
    )


def _with_signal(
    report: HintReport,
    request: InspectRequest,
    rollout: RolloutConfig,
    rewards: RewardsConfig,
    policy: ModelConfig,
    tokenizer: "PreTrainedTokenizerBase",
    placer: HintPlacer,
    prompts: Sequence[Prompt],
    *,
    micro_batch_tokens: int,
    run_seed: int,
) -> HintReport:
    """Measure the model's log-probs of answers with and without hints, and add their differences to the report."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        policy.path, dtype=getattr(torch, policy.dtype), trust_remote_code=False, use_safetensors=True
    )
    model = model.to(platform().device()).eval()
    encoder = Answers.of(policy, rollout, tokenizer)
    by_uid = {prompt.uid: prompt for prompt in prompts}
    if request.answers == "sampled":
        samples = _sample(model, rollout, encoder.stop_tokens.stop_token_ids, prompts, seed=batch_seed(run_seed, 0))
    else:
        samples = [
            _as_sample(prompt, encoder.demonstration(prompt.messages, hint, where=f"prompt {prompt.uid}: hint"), 0)
            for prompt, hint in ((prompt, hint_text(prompt, placer.cfg) or "") for prompt in prompts)
        ]
    sources = {prompt.data_source for prompt in prompts}
    with closing(open_rewards(without_training(rewards, sources), sources, tokenizer)) as manager:
        judging = manager.begin()
        for sample in samples:
            judging.add(by_uid[sample.uid], sample)
        correct = [reward.correct for reward in manager.finish([judging], samples).rewards]
    rows = [row_from_sample(sample) for sample in samples]
    own = placer.place_all(by_uid)
    shuffled = hinted_rows(rows, placer.place_all(by_uid, donors(own, seed=0))) if len(by_uid) > 1 else None
    x = hint_inputs(
        model,
        rows,
        hinted_rows(rows, own),
        shuffled,
        correct=correct,
        temperature=rollout.temperature,
        micro_batch_tokens=micro_batch_tokens,
    )
    read = "sampled answers" if request.answers == "sampled" else "solutions as answers"
    return replace(
        report,
        details=f"{report.details}; {request.model}, {len(rows)} {read} to {len(by_uid)} prompts",
        tables=(*report.tables, _signal(x)),
        answers=_hinted_answers(x, samples, by_uid, tokenizer),
    )


def _hinted_answers(
    x: CpoInputs, samples: Sequence[Sample], prompts: Mapping[str, Prompt], tokenizer: "PreTrainedTokenizerBase"
) -> tuple[HintedAnswer, ...]:
    """Put together what the report shows of each answer: its text, its verdict and the log-probs of its tokens."""
    answers = []
    for i, sample in enumerate(samples):
        count, others = len(sample.loss_mask), x.shuffled_hint_logprobs
        answers.append(
            HintedAnswer(
                title=f"{sample.uid}/{sample.sample_index}",
                question=prompts[sample.uid].messages[-1].content,
                is_right=bool(x.correct[i]),
                tokens=answer_tokens(
                    token_texts(tokenizer, sample.response_token_ids.tolist()),
                    x.need("old_logprobs")[i, :count].tolist(),
                    x.need("hint_logprobs")[i, :count].tolist(),
                    None if others is None else others[i, :count].tolist(),
                ),
            )
        )
    return tuple(answers)


def _signal(x: CpoInputs) -> Table:
    """Return means over tokens of log-prob gain and MI estimates, for right, wrong and all rows."""
    old, hint, other = x.need("old_logprobs"), x.need("hint_logprobs"), x.shuffled_hint_logprobs
    values = {"gain of the own hint": hint - old}
    if other is not None:
        values["gain of another's hint"] = other - old
    for name in MI_ESTIMATORS:
        values[name] = mutual_information(x, name)
        if other is not None and not MI_ESTIMATORS.get(name).uses_hint_kl:
            values[f"{name}, shuffled baseline"] = mutual_information(x, name, shuffled_baseline=True)
    right = x.correct[:, None]
    masks = {"right": x.loss_mask & right, "wrong": x.loss_mask & ~right, "all": x.loss_mask}
    rows = [("nats per token", *masks)]
    for name, of_token in values.items():
        means = (f"{of_token[mask].mean().item():+.4f}" if mask.any() else "none" for mask in masks.values())
        rows.append((name, *means))
    rows.append(("tokens", *(f"{int(mask.sum())}" for mask in masks.values())))
    rows.append(("rows", *map(str, (int(x.correct.sum()), int((~x.correct).sum()), len(x.correct)))))
    return Table(
        title="Signal",
        note="Means over the tokens of right rows, of wrong rows and of all. The gain is the log-prob with the hint "
        "less that without; the others are estimates of mutual information by algo.cpo.mi_estimator.",
        rows=tuple(rows),
    )


def _sample(
    model: Any, rollout: RolloutConfig, stop_token_ids: Sequence[int], prompts: Sequence[Prompt], *, seed: int
) -> list[Sample]:
    """Sample the configured number of answers to each prompt with the model itself."""
    samples = []
    torch.manual_seed(seed)
    for prompt in prompts:
        ids = torch.tensor([prompt.token_ids], device=model.device)
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=max(rollout.top_k, 0),
            num_return_sequences=rollout.num_samples,
            max_new_tokens=rollout.max_response_tokens,
            eos_token_id=list(stop_token_ids),
            pad_token_id=stop_token_ids[0],
        )[:, ids.shape[1] :]
        for index, response in enumerate(found.tolist()):
            end = next((i for i, token in enumerate(response) if token in stop_token_ids), None)
            kept = response if end is None else response[: end + 1]
            samples.append(_as_sample(prompt, kept, index, is_ended=end is not None))
    return samples


def _as_sample(prompt: Prompt, response: Sequence[int], index: int, *, is_ended: bool = True) -> Sample:
    count = len(response)
    written = Segment(
        source=SegmentSource.POLICY,
        token_ids=np.asarray(response, dtype=np.int32),
        loss_mask=np.ones(count, dtype=np.bool_),
        versions=(VersionSpan(0, count),),
    )
    return Sample(
        uid=prompt.uid,
        sample_index=index,
        seed=0,
        segments=(prompt_segment(prompt.token_ids), written),
        finish_reason=FinishReason.STOP if is_ended else FinishReason.LENGTH,
    )
