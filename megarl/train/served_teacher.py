"""Ask a teacher behind OpenAI-compatible servers: for its log-probs of rows, as vLLM answers them for prompts, and for
answers of its own. At the start of a run, each sample must have a teacher, and all share some of the vocabulary.
"""

import asyncio
import itertools
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import httpx
import numpy as np

from megarl.algos.policy_losses import POLICY_LOSSES
from megarl.cluster import offloading
from megarl.config.algo import AlgoConfig, DistillConfig
from megarl.config.generation import Sampling
from megarl.config.schema import TeacherConfig
from megarl.data.answers import Answers
from megarl.data.teacher_tokens import TeacherTokens, compare_tokens
from megarl.errors import ConfigError, RunError
from megarl.host.http_replies import BOUNDED
from megarl.rewards.background import BackgroundLoop
from megarl.rewards.llm.endpoint import is_whole
from megarl.types import FinishReason, FloatArray, Prompt, Row
from megarl.types.messages import Role, RoleSpec, Teaching
from megarl.types.rows import paths_of
from megarl.weights.families import ModelSpec, read_hf_config, read_model_spec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


T = TypeVar("T")
# The first choice of an answer.
Choice: TypeAlias = Mapping[str, Any]

# Requests under way at each server, which batches them, and times that a failed one is sent again.
_AT_ONCE, _RETRIES = 16, 3
# How many of the likeliest tokens vLLM tells by default.
_TOLD = 20


class TeacherServers:
    """Servers of a teacher, which are asked in turn. Requests proceed while the caller works."""

    def __init__(self, cfg: TeacherConfig, which: Literal["servers", "writers"], *, key: str, remedy: str) -> None:
        """Open the client, without asking anything; ConfigError if the key for the servers is not there.

        which: the setting that lists them. key: the section of the configuration. remedy: for servers that do not
        answer as they should.
        """
        secret = "" if cfg.api_key_env is None else os.environ.get(cfg.api_key_env, "")
        if cfg.api_key_env is not None and not secret:
            raise ConfigError(f"{key}.api_key_env: {cfg.api_key_env} is not set; export the key of the servers")
        headers = {"authorization": f"Bearer {secret}"} if secret else {}
        self.background = BackgroundLoop(key)
        self._client = httpx.AsyncClient(headers=headers, timeout=cfg.timeout_s, trust_env=False, event_hooks=BOUNDED)
        self._model, self._urls = cfg.served_name or cfg.model_path, getattr(cfg, which)
        self._key, self._remedy = f"{key}.{which}", remedy
        self._turns, self._under_way = itertools.count(), asyncio.Semaphore(_AT_ONCE * len(self._urls))

    async def complete(self, body: Mapping[str, Any], read: Callable[[Choice], T], label: str) -> T:
        """Return what `read` finds in the completion of a prompt; RunError, which names its `label`, if no server has
        one.
        """
        asked = {"model": self._model, "add_special_tokens": False, **body}
        failures: list[str] = []
        async with self._under_way:
            for _ in range(_RETRIES * len(self._urls)):
                server = self._urls[next(self._turns) % len(self._urls)]
                try:
                    reply = await self._client.post(f"{server.rstrip('/')}/completions", json=asked)
                    if reply.is_success:
                        return read(reply.json()["choices"][0])
                    failures.append(f"{server}: status {reply.status_code}: {reply.text:.200}")
                except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                    failures.append(f"{server}: {type(error).__name__}: {error}")
        raise RunError(
            f"{self._key}: no answer for {label} in {len(failures)} tries, the last {failures[-1]}; {self._remedy}"
        )


class ServedTeacher:
    """A teacher that others serve: it takes no memory of the run's devices, and reads whole rows as prompts, each path
    of one that forks.

    Its log-probs are normalised anew without the tokens that the policy lacks, as far as it says how likely they are.
    """

    phase = offloading.Phase(name="score teacher", needs=frozenset())
    room = sys.maxsize

    def __init__(
        self, cfg: TeacherConfig, *, key: str, top_k: int | None, common: int | None = None, num_rows: int = sys.maxsize
    ) -> None:
        """Open the client; ConfigError as in `TeacherServers`.

        top_k: also ask for that many of the likeliest tokens. common: ids below this are the policy's tokens; None: all
        of both are, as far as is known. num_rows: how many rows the policy's embedding has.
        """
        remedy = (
            "check that they serve the model with log-probs of prompts (vllm serve MODEL --max-logprobs K, K >= "
            "algo.distill.top_k)"
        )
        self._servers = TeacherServers(cfg, "servers", key=key, remedy=remedy)
        self._top_k, self._common = top_k, num_rows if common is None else common
        # The tokens that the policy lacks are looked for among these.
        self._num_told = top_k or (0 if common is None else _TOLD)

    def forward(self, rows: Sequence[Row], *, step: int) -> dict[str, list[FloatArray]]:
        """Return log-probs of the rows' tokens under the loss mask and, if they are wanted, the likeliest tokens.

        Raises RunError if no server answers, or one answers something else.
        """
        asked = [self._servers.background.start(self._ask(row)) for row in rows]
        answers = [each.result() for each in asked]
        names = ("logprobs",) if self._top_k is None else ("logprobs", "top_ids", "top_logprobs")
        return {name: [answer[name] for answer in answers] for name in names}

    async def _ask(self, row: Row) -> dict[str, FloatArray]:
        paths, num_tokens, width = paths_of([row]), row.num_response_tokens, self._top_k or 0
        answers = await asyncio.gather(*(self._ask_path(path.row) for path in paths))
        found: dict[str, FloatArray] = {
            "logprobs": np.zeros(num_tokens, np.float32),
            "top_ids": np.full((num_tokens, width), -1, np.float32),
            "top_logprobs": np.full((num_tokens, width), -np.inf, np.float32),
        }
        for path, answer in zip(paths, answers, strict=True):
            for name, values in answer.items():
                found[name][path.columns[path.row.loss_mask]] = values
        return found

    async def _ask_path(self, row: Row) -> dict[str, FloatArray]:
        body = {
            "prompt": row.token_ids.tolist(),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": self._num_told,
        }
        return await self._servers.complete(body, lambda choice: self._read(row, choice), f"row {row.label}")

    def _read(self, row: Row, choice: Choice) -> dict[str, FloatArray]:
        """Return the log-probs of a row's tokens under the loss mask from those of each token of the prompt, by id."""
        given = choice.get("prompt_logprobs")
        if given is None or len(given) != row.num_tokens:
            found = "none" if given is None else f"those of {len(given)} tokens"
            raise ValueError(f"prompt_logprobs: got {found}, expected those of {row.num_tokens} tokens")
        width, places = self._top_k or 0, row.num_prompt_tokens + np.flatnonzero(row.loss_mask)
        logprobs = np.zeros(len(places), np.float32)
        ids = np.full((len(places), width), -1, np.float32)
        top = np.full((len(places), width), -np.inf, np.float32)
        for t, place in enumerate(places.tolist()):
            at = {int(id): entry for id, entry in (given[place] or {}).items()}
            lacking = sum(math.exp(entry["logprob"]) for id, entry in at.items() if id >= self._common)
            kept = math.log(max(1 - lacking, sys.float_info.epsilon))
            logprobs[t] = at[int(row.token_ids[place])]["logprob"] - kept
            # Beside the likeliest tokens, the row's own is there, whatever its rank.
            likely = sorted((entry["rank"], id, entry["logprob"]) for id, entry in at.items() if entry["rank"] <= width)
            for k, (_, id, logprob) in enumerate(each for each in likely[:width] if each[1] < self._common):
                ids[t, k], top[t, k] = id, logprob - kept
        return {"logprobs": logprobs, "top_ids": ids, "top_logprobs": top}


class TeacherWriter:
    """A teacher whose servers write answers to prompts, sampled as the policy's are."""

    def __init__(
        self, cfg: TeacherConfig, *, key: str, sampling: Sampling, end_ids: tuple[int, ...], num_common: int | None
    ) -> None:
        """Open the client; ConfigError as in `TeacherServers`.

        end_ids: what an answer ends with. num_common: ids below this are the policy's tokens; None: all are.
        """
        remedy = "check that they serve the model, and that they are vLLM's, which return the ids of tokens"
        self._servers = TeacherServers(cfg, "writers" if cfg.writers else "servers", key=key, remedy=remedy)
        self._sampling, self._end_ids, self._num_common = sampling, end_ids, num_common

    async def write(self, prompt: Prompt, *, max_tokens: int, seed: int) -> tuple[int, ...]:
        """Return the tokens of an answer; RunError if no server has one.

        One that the limit cut has no end, nor one that is cut before a token that the policy does not know. One that a
        filter withheld, or the server gave up, has no tokens.
        """
        body = {
            "prompt": list(prompt.token_ids),
            "max_tokens": max_tokens,
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "top_k": self._sampling.top_k,
            "stop_token_ids": list(self._sampling.stop_token_ids),
            "seed": seed,
            "return_token_ids": True,
        }
        answer = self._servers.complete(body, self._read, f"prompt {prompt.uid}")
        return await asyncio.wrap_future(self._servers.background.start(answer))

    def _read(self, choice: Choice) -> tuple[int, ...]:
        ids: list[int] = choice["token_ids"]
        if is_whole(choice["finish_reason"]):
            # Whichever end it was, the policy learns its own.
            ids = [*ids[:-1], *self._end_ids]
        elif choice["finish_reason"] != FinishReason.LENGTH:
            ids = []
        known = sys.maxsize if self._num_common is None else self._num_common
        return tuple(itertools.takewhile(lambda id: id < known, ids))


def open_teachers(
    asked: Mapping[str, TeacherConfig], tokenizer: "PreTrainedTokenizerBase", answers: Answers
) -> tuple[TeacherTokens, ...]:
    """Compare the tokens of all teachers with the policy's; ConfigError as in `compare_tokens`."""
    named = {key: each.model_path for key, each in asked.items()}
    return tuple(
        compare_tokens(tokenizer, answers, path, f"{key}.model_path") for key, path in named.items() if path is not None
    )


def teaching_of(distill: DistillConfig, roles: Sequence[RoleSpec], common: int | None) -> Teaching | None:
    """Return how updates of the actor compare it with a teacher over the vocabulary; None: they do not.

    common: how many tokens both share, as `common_tokens` says.
    """
    if not distill.is_dense:
        return None
    role = next((role.role for role in roles if role.in_update_of is Role.ACTOR), None)
    reads_hints = distill.teacher == "hint" and distill.mode == "exact"
    return Teaching(
        # Nobody else: the policy itself.
        role=Role.ACTOR if reads_hints and role is None else role,
        divergence=distill.divergence,
        beta=distill.beta,
        common=common,
        reads_hints=reads_hints,
    )


def comparison_of(algo: AlgoConfig, roles: Sequence[RoleSpec], common: int | None) -> Teaching | None:
    """Return how updates of the actor compare it over the vocabulary: with what sampled, if the policy loss asks for
    it, or as `teaching_of` says.
    """
    loss = algo.policy_loss
    if (measure := POLICY_LOSSES.get(loss.name).measure) is None:
        return teaching_of(algo.distill, roles, common)
    if loss.compared_with == "trainer":
        return Teaching(role=Role.ACTOR, kept=0, measure=measure(loss))
    return Teaching(measure=measure(loss))


def common_tokens(
    asked: Mapping[str, TeacherConfig], spec: ModelSpec, roles: Sequence[RoleSpec], teachers: Sequence[TeacherTokens]
) -> int | None:
    """Return how many tokens from the first on policy and teachers share, by their tokenizers and embeddings; None: all
    of them. There may be no more than a tokenizer of a teacher behind servers.
    """
    sizes = [read_model_spec(role.model.path).dims.vocab for role in roles if role.role.kind is Role.TEACHER]
    for path in (each.model_path for each in asked.values() if each.servers and each.model_path):
        if (Path(path) / "config.json").is_file():
            described = read_hf_config(Path(path), "teacher.model_path")
            sizes.append(described.get("text_config", described).get("vocab_size", spec.dims.vocab))
    cuts = [each.common for each in teachers if each.common is not None]
    if all(size == spec.dims.vocab for size in sizes) and not cuts:
        return None
    return min([*cuts, *sizes, spec.dims.vocab])
