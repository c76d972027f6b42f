"""Measure the processor time of an environment worker while many samples' agents ask it at once.

`python -m tests.helpers.endpoint_load --samples 500 --turns 6 --kib 0.25 8` prints, for each dialect and size of new
messages, milliseconds of a request, and beside it those that 30,000 additions took meanwhile, as processors that
others use, too, are slower. Clients run in a process of their own; turns of the policy are short texts.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import multiprocessing as mp
import os
import resource
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import httpx
import uvloop

from megarl.config.environments import EnvironmentConfig, EnvironmentEntry
from megarl.environments.agent import AgentEnvironment
from megarl.environments.base import ENVIRONMENTS
from megarl.environments.worker import EnvironmentWorker, WorkerSpec
from megarl.host.device.platform import COMMON_ENVIRONMENT
from megarl.types import Prompt
from megarl.types.episodes import StartRequest, TurnRequest
from megarl_lab.recipes.tiny_model import make_byte_tokenizer

PATHS = {"chat": "chat/completions", "messages": "messages", "responses": "responses", "responses by id": "responses"}
_TOKENIZER, _END = make_byte_tokenizer(), 2
_OPEN: dict[str, asyncio.Future[None]] = {}


async def _wait(prompt: Prompt, base_url: str, api_key: str) -> float:
    """An agent whose requests another process sends."""
    _OPEN[base_url] = asyncio.get_running_loop().create_future()
    await _OPEN[base_url]
    return 1.0


def _next_body(dialect: str, body: dict[str, Any], answer: Mapping[str, Any] | None, text: str) -> dict[str, Any]:
    """Return a client's next request, which repeats all earlier ones unless it goes on by id."""
    message = {"role": "user", "content": text}
    if dialect == "chat":
        said = [] if answer is None else [answer["choices"][0]["message"]]
        return {"messages": [*body.get("messages", []), *said, message]}
    if dialect == "messages":
        said = [] if answer is None else [{"role": "assistant", "content": answer["content"]}]
        return {"max_tokens": 90, "messages": [*body.get("messages", []), *said, message]}
    if dialect == "responses":
        return {"input": [*body.get("input", []), *(answer or {"output": []})["output"], message]}
    return {"input": [message]} | ({} if answer is None else {"previous_response_id": answer["id"]})


async def _ask(url: str, dialect: str, num_turns: int, text: str) -> None:
    body: dict[str, Any] = {}
    answer: Mapping[str, Any] | None = None
    # However slow the machine is, the connection is kept. A client for all of them would look through all for each.
    limits = httpx.Limits(keepalive_expiry=500.0)
    async with httpx.AsyncClient(limits=limits, timeout=500.0, trust_env=False, verify=False) as client:
        for turn in range(num_turns):
            body = _next_body(dialect, body, answer, f"{turn} {text}")
            answer = None
            while answer is None:
                # A loop with so many clients may be later with a request than connections of strangers are kept.
                with contextlib.suppress(httpx.TransportError):
                    answer = (await client.post(f"{url}/{PATHS[dialect]}", json=body)).raise_for_status().json()


def _clients(jobs: Connection) -> None:
    async def work(urls: list[str], dialect: str, num_turns: int, text: str) -> None:
        await asyncio.gather(*(_ask(url, dialect, num_turns, text) for url in urls))

    while (job := jobs.recv()) is not None:
        asyncio.run(work(*job))
        jobs.send(None)


async def _add(took: list[float]) -> None:
    """Note, again and again, the seconds of 30,000 additions."""
    while True:
        began, total = time.process_time(), 0
        for i in range(30_000):
            total += i
        took.append(time.process_time() - began)
        await asyncio.sleep(1.0)


async def _serve(
    clients: Connection, dialect: str, num_samples: int, num_turns: int, text: str
) -> tuple[float, float, float]:
    """Return seconds of this process, those of 30,000 additions meanwhile, and MiB that it grew by."""
    config = EnvironmentConfig(
        entries={"mine": EnvironmentEntry(type="load", arguments={})}, reply_timeout_s=500.0, max_turns=num_turns + 1
    )
    worker = EnvironmentWorker(WorkerSpec(model_path="", chat_template={}, names=("mine",), config=config), _TOKENIZER)
    said = (*_TOKENIZER("A short answer.", add_special_tokens=False)["input_ids"], _END)

    async def lead(key: int) -> None:
        row = Prompt(uid=str(key), token_ids=(5,), data_source="d", ground_truth="", environment="mine")
        reply = await worker.start(key, StartRequest(prompt=row))
        for turn in range(num_turns):
            assert not reply.failure, reply
            if turn == num_turns - 1:
                asyncio.get_running_loop().call_later(0.5, _OPEN[urls[key]].set_result, None)
            reply = await worker.act(key, TurnRequest(token_ids=said, turn=turn))
        assert (reply.done, reply.failure, reply.details) == (True, "", {}), reply

    _OPEN.clear()
    samples = [asyncio.create_task(lead(key)) for key in range(num_samples)]
    while len(_OPEN) < num_samples:
        await asyncio.sleep(0.05)
    urls = list(_OPEN)
    clients.send((urls, dialect, num_turns, text))
    began, before, additions = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, list[float]()
    adding = asyncio.create_task(_add(additions))
    await asyncio.gather(*samples)
    adding.cancel()
    grew = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    seconds = time.process_time() - began - sum(additions)
    await asyncio.to_thread(clients.recv)
    for key in range(num_samples):
        await worker.close(key)
    return seconds, sum(additions) / len(additions), grew / 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--kib", type=float, nargs="+", default=[0.25, 8.0])
    parser.add_argument("--dialects", nargs="+", choices=PATHS, default=[*PATHS])
    asked = parser.parse_args()
    # As hosts run: their variables, uvloop, and a collector that leaves aside what is imported.
    os.environ.update(COMMON_ENVIRONMENT)
    gc.freeze()
    ENVIRONMENTS.register("load")(lambda: AgentEnvironment(agent=_wait))
    mine, theirs = mp.Pipe()
    # Before any loop runs, and without importing all of it once more.
    mp.get_context("fork").Process(target=_clients, args=(theirs,), daemon=True).start()
    theirs.close()
    for dialect in asked.dialects:
        for kib in asked.kib:
            text = "So it goes. " * round(kib * 1024 / 12)
            seconds, additions, mib = uvloop.run(_serve(mine, dialect, asked.samples, asked.turns, text))
            ms = round(seconds * 1000 / asked.samples / asked.turns, 3)
            found = {"dialect": dialect, "new KiB": kib, "ms per request": ms, "MiB": round(mib)}
            print(json.dumps({**found, "ms of 30,000 additions": round(additions * 1000, 2)}), flush=True)


if __name__ == "__main__":
    main()
