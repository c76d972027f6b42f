"""Ask a teacher behind OpenAI-compatible servers for its log-probs of rows, as vLLM answers them for prompts."""

import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np

from megarl.cluster import residency
from megarl.config.teacher import TeacherConfig
from megarl.errors import ConfigError, RunError
from megarl.types import FloatArray, Row

# Requests under way at each server, which batches them, and times that a failed one is sent again.
_AT_ONCE, _RETRIES = 16, 3


class ServedTeacher:
    """A teacher that others serve: it takes no memory of the run's devices, and reads whole rows as prompts."""

    phase = residency.Phase(name="score teacher", needs=frozenset())
    room = sys.maxsize

    def __init__(self, cfg: TeacherConfig, *, key: str, top_k: int | None) -> None:
        """Open the client, without asking anything; ConfigError if the key for the servers is not there.

        key: the section of the configuration. top_k: also ask for so many of the likeliest tokens.
        """
        secret = "" if cfg.api_key_env is None else os.environ.get(cfg.api_key_env, "")
        if cfg.api_key_env is not None and not secret:
            raise ConfigError(f"{key}.api_key_env: {cfg.api_key_env} is not set; export the key of the servers")
        headers = {"authorization": f"Bearer {secret}"} if secret else {}
        self._client = httpx.Client(headers=headers, timeout=cfg.timeout_s, trust_env=False)
        self._cfg, self._key, self._top_k = cfg, key, top_k
        self._turns = itertools.count()

    def forward(self, rows: Sequence[Row], *, step: int) -> dict[str, list[FloatArray]]:
        """Return log-probs of the rows' tokens under the loss mask and, if they are wanted, the likeliest tokens.

        Raises RunError if no server answers, or one answers something else.
        """
        with ThreadPoolExecutor(_AT_ONCE * len(self._cfg.servers)) as pool:
            answers = list(pool.map(self._ask, rows))
        names = ("logprobs",) if self._top_k is None else ("logprobs", "top_ids", "top_logprobs")
        return {name: [answer[name] for answer in answers] for name in names}

    def _ask(self, row: Row) -> dict[str, FloatArray]:
        body = {
            "model": self._cfg.served_name or self._cfg.model_path,
            "prompt": row.token_ids.tolist(),
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": self._top_k or 0,
            "add_special_tokens": False,
        }
        failures: list[str] = []
        for _ in range(_RETRIES * len(self._cfg.servers)):
            server = self._cfg.servers[next(self._turns) % len(self._cfg.servers)]
            try:
                reply = self._client.post(f"{server.rstrip('/')}/completions", json=body)
                if reply.is_success:
                    return self._read(row, reply.json()["choices"][0].get("prompt_logprobs"), server)
                failures.append(f"{server}: status {reply.status_code}: {reply.text:.200}")
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                failures.append(f"{server}: {type(error).__name__}: {error}")
        raise RunError(
            f"{self._key}.servers: no answer for row {row.label} in {len(failures)} tries, the last {failures[-1]}; "
            "check that they serve the model with log-probs of prompts (vllm serve MODEL --max-logprobs K, K >= "
            "algo.distill.top_k)"
        )

    def _read(self, row: Row, given: Sequence[Mapping[str, Any] | None] | None, server: str) -> dict[str, FloatArray]:
        """Return the log-probs of a row's response tokens from those of each token of the prompt, by id."""
        if given is None or len(given) != row.num_tokens:
            found = "none" if given is None else f"those of {len(given)} tokens"
            raise ValueError(f"prompt_logprobs: got {found}, expected those of {row.num_tokens} tokens")
        width = self._top_k or 0
        logprobs = np.zeros(row.num_response_tokens, np.float32)
        ids = np.full((row.num_response_tokens, width), -1, np.float32)
        top = np.full((row.num_response_tokens, width), -np.inf, np.float32)
        for t in np.flatnonzero(row.loss_mask).tolist():
            place = row.num_prompt_tokens + t
            at = {int(id): entry for id, entry in (given[place] or {}).items()}
            logprobs[t] = at[int(row.token_ids[place])]["logprob"]
            # Beside the likeliest tokens, the row's own is there, whatever its rank.
            likely = sorted((entry["rank"], id, entry["logprob"]) for id, entry in at.items())
            for k, (rank, id, logprob) in enumerate(likely[:width]):
                if rank <= width:
                    ids[t, k], top[t, k] = id, logprob
        return {"logprobs": logprobs, "top_ids": ids, "top_logprobs": top}
