"""Images of replies: each is kept once, and the policy reads it where its mark stands, whoever showed it."""

import asyncio
import base64
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest

from megarl.config.environments import EnvironmentConfig, EnvironmentEntry
from megarl.config.load import with_overrides
from megarl.config.schema import Config
from megarl.data.images import DataImages
from megarl.environments import Action, Environment, Reply
from megarl.environments.worker import EnvironmentWorker, WorkerSpec
from megarl.errors import ConfigError, DataError
from megarl.rollout.conversations import reading
from megarl.run.first_checks import check_prompts
from megarl.types import Episode, FinishReason, Message, Prompt, RowImage, Sample, SegmentSource, prompt_segment
from megarl.types.episodes import EpisodeReply, StartRequest, TurnRequest
from tests.helpers.agent_talk import converse
from tests.unit.data import test_images as rows

TOKENIZER: Any = rows.tokenizer()
A, B, LARGE = rows.png(1), rows.png(2), rows.png(0, 20, 11)
SHOWN = [9, rows.MARK_ID, rows.MARK_ID]
images = rows.images


def ids(text: str) -> list[int]:
    """Tokens of a text in which <A> and <B> stand for images."""
    parts = text.replace("<B>", "<A>").split("<A>")
    return [
        token
        for i, part in enumerate(parts)
        for token in [*(SHOWN if i else []), *TOKENIZER(part, add_special_tokens=False)["input_ids"]]
    ]


class Board(Environment):
    """Replies with what a test wants."""

    said: Sequence[Reply] = ()

    async def start(self, prompt: Prompt) -> Sequence[Message]:
        self.asked = prompt
        return (Message(role="user", content="now <image>", images=(B,)),)

    async def reply(self, action: Action) -> Reply:
        return self.said[action.turn]


def talk(
    images: DataImages, monkeypatch: pytest.MonkeyPatch, *said: Reply, marks_texts: bool = False, **config: Any
) -> list[EpisodeReply]:
    """Lead a conversation in which the policy says `ok` each time."""
    monkeypatch.setattr(DataImages, "of", lambda *_: images)
    monkeypatch.setattr(Board, "said", said)
    images.keeps = True
    spec = WorkerSpec(
        model_path="",
        chat_template={},
        names=("board",),
        config=EnvironmentConfig(entries={"board": EnvironmentEntry(type=f"{__name__}:Board")}, **config),
        marks_texts=marks_texts,
        store="RUN",
    )
    shown = Message(role="user", content="see <image>", images=(images.read(A),))
    prompt = Prompt(uid="a", token_ids=(5,), data_source="d", ground_truth="", environment="board", messages=(shown,))

    async def lead() -> list[EpisodeReply]:
        worker = EnvironmentWorker(spec, TOKENIZER)
        found = [await worker.start(7, StartRequest(prompt=prompt))]
        for turn in range(len(said)):
            found.append(await worker.act(7, TurnRequest(token_ids=[*ids("ok"), 2], turn=turn)))
        await worker.close(7)
        return found

    return asyncio.run(lead())


def digests(reply: EpisodeReply) -> list[str]:
    return [each.digest for each in reply.images]


def places(reply: EpisodeReply) -> list[int]:
    return [place for each in reply.images for place in each.places.tolist()]


def test_a_reply_shows_images_where_its_marks_stand(images: DataImages, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"data:image/png;base64,{base64.b64encode(A).decode()}"
    board = Message(role="tool", content="a <image>, b <image>", images=(url, B))
    start, reply = talk(
        images, monkeypatch, Reply(messages=(board, Message(role="user", content="<image>"))), marks_texts=True
    )
    opening = "<|im_start|>user\nsee <A><|im_end|>\n<|im_start|>user\nnow <B><|im_end|>\n<|im_start|>assistant\n"
    assert list(start.token_ids) == ids(opening)
    assert digests(start) == [rows.digest(1), rows.digest(2)]
    # The end of the policy's turn is its own token.
    follows = "\n<|im_start|>tool\na <A>, b <B><|im_end|>\n<|im_start|>user\n<image><|im_end|>\n<|im_start|>assistant\n"
    assert list(reply.token_ids) == ids(follows)
    assert digests(reply) == [rows.digest(1), rows.digest(2)]
    assert [reply.token_ids[place] for place in places(reply)] == [rows.MARK_ID] * 4
    # The policy learns to predict texts alone.
    assert reply.observed is not None
    texts = [TOKENIZER.decode(reply.token_ids[start:end]) for start, end in reply.observed]
    assert texts == ["a ", ", b ", "<image>"]
    assert images.reader.store.read(rows.digest(2)) == B


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message(role="user", content="<image> <image>", images=(A,)), "2 marks <image> for 1 images"),
        (Message(role="user", content="<image>", images=(LARGE,)), "more than data.max_image_pixels=200"),
        (Message(role="user", content="<image>", images=("/etc/passwd",)), "neither a data URL nor base64"),
        (Message(role="user", content="<image>", images=("https://a/b.png",)), "a run fetches no images"),
        (Message(role="user", content="<image>", images=("0" * 64,)), "restore the directory images of the run"),
    ],
)
def test_an_image_that_cannot_be_read_fails_the_sample(
    images: DataImages, monkeypatch: pytest.MonkeyPatch, message: Message, reason: str
) -> None:
    *_, reply = talk(images, monkeypatch, Reply(messages=(message,)))
    assert (reply.failure, reason in reply.reason) == ("raised", True), reply.reason


@pytest.mark.parametrize(("image", "num_read"), [(A, 0), (B, len(ids("x <A>")) - 2)])
def test_a_context_goes_on_from_equal_tokens_only_with_the_same_images(image: bytes, num_read: int) -> None:
    """Contexts `x <A> y?`; the tokens after the first place that shows another image are read anew."""

    def shows(digest: str, start: int) -> RowImage:
        return RowImage(places=np.array([start + 1, start + 2], np.int32), digest=digest, grid=(1, 2))

    known, context = ids("x <A> y"), ids("x <A> y?")
    start, digest = len(ids("x ")), {A: rows.digest(1), B: rows.digest(2)}
    sample = Sample(
        uid="a",
        sample_index=0,
        seed=0,
        segments=(prompt_segment(known, (shows(digest[A], start),)),),
        finish_reason=FinishReason.ABORT,
        episode=Episode(environment="e"),
    )
    reply = EpisodeReply(token_ids=tuple(context), images=(shows(digest[image], start),), is_context=True)
    said = reading(sample, reply).segments[-1]
    assert said.source is SegmentSource.ENVIRONMENT
    assert said.token_ids.tolist() == context[num_read or len(known) :]
    assert [each.places.tolist() for each in said.images] == ([[0, 1]] if num_read else [])


def look() -> list[dict[str, object]]:
    """Look at the board."""
    return [{"type": "text", "text": "an <image>: "}, {"type": "image", "image": B}, {"type": "text", "text": "x" * 60}]


def test_a_tool_returns_parts_with_images(images: DataImages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataImages, "of", lambda *_: images)
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    arguments = {"tools": [look], "in_prompt": False, "max_result_chars": 60}
    _, reply = asyncio.run(converse(arguments, call, kind="tools", tokenizer=TOKENIZER)).replies
    assert digests(reply) == [rows.digest(2)]
    follows = f"an < image>: <B>{'x' * 15}\n[30 characters left out]\n{'x' * 15}"
    assert list(reply.token_ids) == ids(f"\n<|im_start|>tool\n{follows}<|im_end|>\n<|im_start|>assistant\n")


def data(image: bytes) -> str:
    return base64.b64encode(image).decode()


def openai_chat(base_url: str, shown: bytes) -> None:
    url: Any = {"url": f"data:image/png;base64,{data(shown)}"}
    parts: Any = [{"type": "text", "text": "see "}, {"type": "image_url", "image_url": url}]
    with openai.OpenAI(base_url=base_url, api_key="k", max_retries=0) as there:
        there.chat.completions.create(model="m", messages=[{"role": "user", "content": parts}])


def openai_responses(base_url: str, shown: bytes) -> None:
    url = f"data:image/png;base64,{data(shown)}"
    parts: Any = [{"type": "input_text", "text": "see "}, {"type": "input_image", "image_url": url, "detail": "auto"}]
    with openai.OpenAI(base_url=base_url, api_key="k", max_retries=0) as there:
        there.responses.create(model="m", input=[{"role": "user", "content": parts}])


def anthropic_messages(base_url: str, shown: bytes) -> None:
    source: Any = {"type": "base64", "media_type": "image/png", "data": data(shown)}
    parts: Any = [{"type": "text", "text": "see "}, {"type": "image", "source": source}]
    with anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="k", max_retries=0) as there:
        there.messages.create(model="m", max_tokens=90, messages=[{"role": "user", "content": parts}])


@pytest.mark.parametrize("ask", [openai_chat, openai_responses, anthropic_messages])
def test_agents_send_images_in_three_dialects(
    images: DataImages, monkeypatch: pytest.MonkeyPatch, ask: Callable[[str, bytes], None]
) -> None:
    """Equal texts with other images are questions of their own; the same image again is the same question."""
    monkeypatch.setattr(DataImages, "of", lambda *_: images)

    def agent(prompt: Prompt, base_url: str, api_key: str) -> Mapping[str, object]:
        for shown in (A, B, A):
            ask(base_url, shown)
        large = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data(LARGE)}"}}
        refused = httpx.post(f"{base_url}/chat/completions", json={"messages": [{"role": "user", "content": [large]}]})
        return {"said": refused.json()["error"]["message"], "status": refused.status_code}

    talk = asyncio.run(converse({"agent": agent}, "one", "two", "three", tokenizer=TOKENIZER))
    asked = ids("<|im_start|>user\nsee <A><|im_end|>\n<|im_start|>assistant\n")
    assert [list(each.token_ids) for each in talk.replies[:3]] == [asked] * 3
    assert [digests(each) for each in talk.replies[:3]] == [[rows.digest(1)], [rows.digest(2)], [rows.digest(1)]]
    details = dict(talk.last.details)
    assert details["status"] == 400
    assert "more than data.max_image_pixels=200" in str(details["said"])
    assert {name: count for name, count in details.items() if name.startswith("branches")} == {
        "branches_other_beginning": 1,
        "branches_asked_again": 1,
    }


SHOWS = """
import base64
from megarl.environments import Environment, Reply
from megarl.types import Message

class Shows(Environment):
    async def start(self, prompt):
        assert prompt.messages[0].images[0].startswith("data:image/png;base64,")
        return ()

    async def reply(self, action):
        image = base64.b64decode("IMAGE")
        assert len(self.read_image(image)) == 64
        return Reply(messages=(Message(role="user", content="now <image>", images=(image,)),))
"""


def test_a_run_with_images_is_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an environment shows is opened in the trial, and what rows show before it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, row = tmp_path / "shows.py", {"prompt": "see <image>", "images": [base64.b64encode(A).decode()]}

    def check(shown: bytes, images: object) -> None:
        code.write_text(SHOWS.replace("IMAGE", base64.b64encode(shown).decode()))
        given = {**row, "images": images, "data_source": "megarl/sums", "reward_model": {"ground_truth": "1"}}
        (tmp_path / "rows.jsonl").write_text(json.dumps(given))
        chosen = (f"data.train=['{tmp_path}/rows.jsonl']", "data.image_key=images", "environment.default=shows")
        check_prompts(with_overrides(Config(), [*chosen, f"environment.entries={{shows: {{type: '{code}:Shows'}}}}"]))

    check(B, row["images"])
    with pytest.raises(ConfigError, match=r"shows\.py.*: environment 'shows': an image of a reply: the image does not"):
        check(b"no image", row["images"])
    with pytest.raises(DataError, match=r"rows\.jsonl.*: images\[0\]: the image does not open"):
        check(B, [base64.b64encode(b"no image").decode()])
    assert not list(tmp_path.glob("megarl-images-*"))
