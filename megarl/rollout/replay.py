"""Record a step's rollout as parquet, and replay it bit for bit: same tokens, log-probs, seeds and versions."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from megarl.errors import DataError
from megarl.host.reading import reading
from megarl.host.unicode import plain
from megarl.host.writing import replacing
from megarl.rollout.source import Group, RolloutSource
from megarl.types import (
    ChatPart,
    Episode,
    FinishReason,
    LikelyTokens,
    Message,
    Prompt,
    RolloutBatch,
    Sample,
    Segment,
    SegmentSource,
    version_spans,
)
from megarl.types.forks import Fork
from megarl.types.images import first_other, row_image
from megarl.types.turns import Tries

# [n, k], end to end.
_NUCLEUS = pa.struct([("shape", pa.list_(pa.int64())), ("values", pa.list_(pa.int32()))])
# Bytes of int32 and float32, since a list would become an object for each of many numbers.
_HEAD = pa.struct([("width", pa.int64()), ("ids", pa.large_binary()), ("logprobs", pa.large_binary())])
_SEGMENT = pa.struct(
    [
        ("source", pa.string()),
        ("token_ids", pa.list_(pa.int64())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("weight_versions", pa.list_(pa.int64())),
        ("rollout_logprobs", pa.list_(pa.float32())),
        ("nucleus", _NUCLEUS),
    ]
)
# Rows of all dimensions, end to end.
_EXPERTS = pa.struct([("shape", pa.list_(pa.int64())), ("values", pa.list_(pa.int16()))])
_IMAGE = pa.struct(
    [("places", pa.list_(pa.int32())), ("digest", pa.string()), ("grid", pa.list_(pa.int64()))],
)
_SCHEMA = pa.schema(
    [
        ("uid", pa.string()),
        ("sample_index", pa.int64()),
        ("seed", pa.int64()),
        ("finish_reason", pa.string()),
        ("segments", pa.list_(_SEGMENT)),
        ("prompt", pa.string()),
        ("routed_experts", _EXPERTS),
        # Those of the segments, where there are any.
        ("heads", pa.list_(_HEAD)),
        # The environment's reward of each segment, and an `Episode` as JSON; null without an environment.
        ("rewards", pa.list_(pa.float64())),
        ("episode", pa.string()),
        # The start of each fork and the token that it follows; none in records of earlier versions.
        ("forks", pa.list_(pa.list_(pa.int64()))),
        # Those of the prompt, and of each segment; null without images.
        ("prompt_images", pa.list_(_IMAGE)),
        ("images", pa.list_(pa.list_(_IMAGE))),
    ]
)
# The tokens of each segment that an environment said, in records of runs that predict them.
_OBSERVED = pa.field("observed", pa.list_(pa.list_(pa.bool_())))


def record_path(directory: Path, step: int) -> Path:
    """Return the file that records the rollout of a step."""
    return directory / f"step_{step:06d}.parquet"


def write_record(path: Path, batch: RolloutBatch) -> None:
    """Write everything that a replay of the rollout needs to a parquet file."""
    rows: list[dict[str, Any]] = []
    is_observed = any(s.observed is not None for sample in batch.samples for s in sample.segments)
    for sample in batch.samples:
        prompt = batch.prompts[sample.uid]
        experts = sample.routed_experts
        rows.append(
            {
                "uid": sample.uid,
                "sample_index": sample.sample_index,
                "seed": sample.seed,
                "finish_reason": sample.finish_reason.value,
                "segments": [
                    {
                        "source": s.source.value,
                        "token_ids": s.token_ids,
                        "loss_mask": s.loss_mask,
                        "weight_versions": s.weight_versions,
                        "rollout_logprobs": s.rollout_logprobs,
                        "nucleus": None
                        if s.nucleus is None
                        else {"shape": s.nucleus.shape, "values": s.nucleus.ravel()},
                    }
                    for s in sample.segments
                ],
                "rewards": None if sample.episode is None else [s.reward for s in sample.segments],
                "episode": None if sample.episode is None else json.dumps(plain(asdict(sample.episode))),
                "forks": sample.forks,
                "prompt_images": [*map(asdict, prompt.images)] or None,
                "images": [[*map(asdict, s.images)] for s in sample.segments] if sample.images else None,
                "prompt": json.dumps(
                    {
                        "token_ids": prompt.token_ids,
                        "environment": prompt.environment,
                        "data_source": prompt.data_source,
                        "ground_truth": prompt.ground_truth,
                        "extra_info": plain(prompt.extra_info),
                        "messages": [
                            each.as_dict() | ({"images": each.images} if each.images else {})
                            for each in prompt.messages
                        ],
                        "demonstration_ids": prompt.demonstration_ids,
                        "demonstration_probs": prompt.demonstration_probs,
                        "target": prompt.target,
                    }
                ),
                "heads": None if sample.head is None else [_head_fields(s.head) for s in sample.segments],
                "routed_experts": None if experts is None else {"shape": experts.shape, "values": experts.ravel()},
            }
        )
        if is_observed:
            rows[-1]["observed"] = [s.observed for s in sample.segments]
    table = pa.Table.from_pylist(rows, schema=_SCHEMA.append(_OBSERVED) if is_observed else _SCHEMA)
    with replacing(path) as partial:
        pq.write_table(table, partial)


def _head_fields(head: LikelyTokens | None) -> dict[str, Any] | None:
    if head is None:
        return None
    return {"width": head.ids.shape[1], "ids": head.ids.tobytes(), "logprobs": head.logprobs.tobytes()}


def _read_head(fields: Mapping[str, Any] | None) -> LikelyTokens | None:
    """Return a head; raise ValueError for one that no engine can have recorded."""
    if fields is None:
        return None
    ids = np.frombuffer(fields["ids"], np.int32).reshape(-1, fields["width"])
    logprobs = np.frombuffer(fields["logprobs"], np.float32).reshape(ids.shape)
    ordered, there = np.sort(ids, axis=1), ids >= 0
    if ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any():
        raise ValueError("the likeliest tokens name one twice")
    if not (logprobs[there] <= 0).all() or not np.isfinite(logprobs[there]).all():
        raise ValueError("the likeliest tokens have log-probs above 0 or that are not finite")
    return LikelyTokens(ids=ids, logprobs=logprobs)


def require_records(directory: Path, num_steps: int) -> None:
    """Raise DataError unless there is a record of every step from 1 to `num_steps`."""
    for path in (record_path(directory, step) for step in range(1, num_steps + 1)):
        if not path.is_file():
            raise DataError(f"{path} does not exist; record it with rollout.record=true, or lower trainer.total_steps")


def read_record(path: Path) -> RolloutBatch:
    """Read a rollout that `write_record` wrote."""
    with reading(path, "a recorded rollout", remedy="record it again with rollout.record=true"):
        return _parse_record(pq.read_table(path, schema=_SCHEMA.append(_OBSERVED)).to_pylist())


def _parse_record(rows: Sequence[dict[str, Any]]) -> RolloutBatch:
    prompts: dict[str, Prompt] = {}
    samples = []
    for row in rows:
        fields = json.loads(row["prompt"])
        # JSON has no tuples.
        # Records of earlier versions lack some of them; their samples begin with the prompt's own tokens.
        fields.setdefault("token_ids", row["segments"][0]["token_ids"])
        given = ("token_ids", "demonstration_ids", "demonstration_probs")
        fields |= {name: tuple(fields.get(name, ())) for name in given}
        fields["messages"] = tuple(map(_read_message, fields.get("messages", ())))
        prompts[row["uid"]] = Prompt(
            uid=row["uid"], images=tuple(row_image(**each) for each in row["prompt_images"] or ()), **fields
        )
        experts, segments, nothing = row["routed_experts"], [], [None] * len(row["segments"])
        beside = (row[name] or nothing for name in ("rewards", "heads", "images", "observed"))
        for each, reward, head, images, observed in zip(row["segments"], *beside, strict=True):
            logprobs, nucleus = each["rollout_logprobs"], each["nucleus"]
            segments.append(
                Segment(
                    source=SegmentSource(each["source"]),
                    token_ids=np.asarray(each["token_ids"], dtype=np.int32),
                    loss_mask=np.asarray(each["loss_mask"], dtype=np.bool_),
                    versions=version_spans(each["weight_versions"]),
                    rollout_logprobs=None if logprobs is None else np.asarray(logprobs, dtype=np.float32),
                    nucleus=None
                    if nucleus is None
                    else np.asarray(nucleus["values"], dtype=np.int32).reshape(nucleus["shape"]),
                    head=_read_head(head),
                    reward=reward or 0.0,
                    images=tuple(row_image(**each) for each in images or ()),
                    observed=None if observed is None else np.asarray(observed, dtype=np.bool_),
                )
            )
        samples.append(
            Sample(
                uid=row["uid"],
                sample_index=row["sample_index"],
                seed=row["seed"],
                finish_reason=FinishReason(row["finish_reason"]),
                routed_experts=None
                if experts is None
                else np.asarray(experts["values"], dtype=np.int16).reshape(experts["shape"]),
                segments=tuple(segments),
                episode=None if row["episode"] is None else _read_episode(row["episode"]),
                forks=tuple(Fork(*fork) for fork in row["forks"] or ()),
            )
        )
    return RolloutBatch(prompts=prompts, samples=tuple(samples))


def _read_message(fields: Mapping[str, Any]) -> Message:
    # Those of earlier versions say whether a message has images, which none of theirs has.
    given = {name: value for name, value in fields.items() if name != "has_images"}
    return Message(**{**given, "images": tuple(given.get("images", ()))})


def _read_episode(text: str) -> Episode:
    fields = json.loads(text)
    # Records of earlier versions have none.
    chat = tuple(
        ChatPart(**{**part, "messages": tuple(map(_read_message, part["messages"]))}) for part in fields.pop("chat", ())
    )
    # Those of earlier versions have no place.
    tries = tuple(
        Tries(first, count, after, tuple(cut), *place) for first, count, after, cut, *place in fields.pop("tries", ())
    )
    return Episode(**fields, chat=chat, tries=tries)


class ReplaySource(RolloutSource):
    """A rollout source that answers at once with recorded samples of a group's prompt and step.

    The record may have samples of more prompts, which later groups of the same step ask for.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        # The step that was read last, with its samples by prompt.
        self._step, self._prompts, self._samples = -1, dict[str, Prompt](), dict[str, list[Sample]]()

    async def sample(self, group: Group) -> None:
        uid, step, num_samples = group.prompt.uid, group.plan.step, group.plan.num_samples
        path = record_path(self._directory, step)
        if step != self._step:
            recorded, self._samples = read_record(path), {}
            self._step, self._prompts = step, dict(recorded.prompts)
            for sample in recorded.samples:
                self._samples.setdefault(sample.uid, []).append(sample)
        known, asked = self._prompts.get(uid), group.prompt
        if known is None or known.token_ids != asked.token_ids or first_other(known.images, asked.images) is not None:
            raise DataError(
                f"{path}: its prompts are not those of this step (first difference: {uid}); "
                f"replay with the data and run.seed of the recorded run"
            )
        samples = self._samples.get(uid, [])
        if (count := len(samples)) != num_samples:
            raise DataError(f"{path}: has {count} samples of {uid}; replay with rollout.num_samples={count}")
        group.prompt = known
        for sample in samples:
            await group.finish(sample)
