"""Turns of gpt-oss in channels: read as OpenAI's own parser reads them, and rendered as the model's template does."""

import json
import random
from pathlib import Path

import openai_harmony as openai
import pytest

from megarl.config.schema import SftConfig
from megarl.data.answers import Answers, response_decoder
from megarl.data.chat import encode_chats, render_chats
from megarl.data.demonstrations import SftDataset
from megarl.data.harmony import called_tool, read_channels
from megarl.data.special_tokens import SpelledSpecialTokens
from megarl.data.thoughts import split_thought
from megarl.data.turns import InterTurnTokens
from megarl.errors import DataError
from megarl.types import Message
from megarl_answers import after_thoughts
from tests.helpers.harmony import HEAD, make_harmony_tokenizer

TOKENIZER = make_harmony_tokenizer()
ASKED = Message(role="user", content="1+2?")
# A call, first as the policy often writes it, then as templates repeat it; what is between is the template's.
THOUGHT, NEXT = "<|channel|>analysis<|message|>Sum.<|end|>", "<|start|>assistant"
CALLS = (
    f'{THOUGHT}{NEXT}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{"a": 1}}',
    f'{THOUGHT}{NEXT} to=functions.add<|channel|>commentary json<|message|>{{"a": 1}}',
)
RESULT = Message(role="tool", content='"3", é')
SENT = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"\\"3\\", é"<|end|>'
ANSWER = f"{THOUGHT}{NEXT}<|channel|>final<|message|>It is 3."
WORDS = ("2+2", " ", "\n", "é", "😀", "<", "|>", "to=functions.f", "final", "assistant", "<think>", "{}", '{"a": [1]}')


def said(text: str) -> Message:
    return Message(role="assistant", content=text)


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return ids


def token(mark: str) -> int:
    (found,) = ids_of(mark)
    return found


def drawn_turn(draw: random.Random) -> list[str]:
    """Messages of a turn, each with its mark at the end: thoughts, words, answers, and at last perhaps a call."""
    messages = []
    for _ in range(draw.randint(1, 3)):
        channel, text = draw.choice(("analysis", "commentary", "final")), "".join(draw.choices(WORDS, k=4))
        messages.append(f"<|channel|>{channel}<|message|>{text}<|end|>")
    if draw.random() < 0.6:
        tool, kind = (
            draw.choice(("functions.f", "functions.g_2", "f.g")),
            draw.choice(("", " json", " <|constrain|>json")),
        )
        header = draw.choice(
            (
                f"<|channel|>commentary to={tool}{kind}",
                f" to={tool}<|channel|>commentary{kind.replace('<|constrain|>', '')}",
            )
        )
        messages.append(f"{header}<|message|>{json.dumps({'a': ''.join(draw.choices(WORDS, k=2))})}<|call|>")
    return messages


def test_turns_are_read_as_openais_parser_reads_them() -> None:
    oracle, draw = openai.load_harmony_encoding(openai.HarmonyEncodingName.HARMONY_GPT_OSS), random.Random(64)
    for _ in range(300):
        written = NEXT.join(drawn_turn(draw))
        expected = oracle.parse_messages_from_completion_tokens(
            oracle.encode(written, allowed_special="all"), openai.Role.ASSISTANT
        )
        # The policy's tokens are decoded without the one that ended the turn.
        turn = response_decoder(TOKENIZER)(ids_of(written))
        assert turn == written.removesuffix("<|end|>").removesuffix("<|call|>")
        assert [(each.channel, each.tool, each.text) for each in read_channels(turn)] == [
            (each.channel, (each.recipient or "").removeprefix("functions."), each.content[0].text) for each in expected
        ]
        assert "".join(each.source for each in read_channels(turn)) == turn


def test_what_the_template_writes_of_a_turn_is_read_again() -> None:
    """Thoughts, words and the call; of one that calls, the words before the call are thoughts then."""
    draw, asked = random.Random(66), f"{HEAD}<|end|><|start|>user<|message|>1+2?<|end|>{NEXT}"
    for _ in range(200):
        turn = NEXT.join(drawn_turn(draw))
        (history,) = render_chats(TOKENIZER, [[ASKED, said(turn)]], add_generation_prompt=False)
        assert history.startswith(asked)
        before, after = read_channels(turn), read_channels(history.removeprefix(asked))
        calls, again = ([(each.tool, json.loads(each.text)) for each in m if each.tool] for m in (before, after))
        assert again == calls
        words, rest = (
            [
                "\n".join(each.text for each in m if not each.tool and each.is_thought is kind and each.text)
                for kind in (True, False)
            ]
            for m in (before, after)
        )
        if calls:
            assert rest == ["\n".join(each.text for each in before if not each.tool and each.text), ""]
        else:
            assert rest == words


MARKED = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
PIECES = (*MARKED, *MARKED, *WORDS, "analysis", " to=functions.f", THOUGHT)


def test_no_turn_that_a_policy_writes_breaks_a_conversation() -> None:
    """Whatever its marks are, the template renders it as a history, and the next turn begins as after any other."""
    draw, inter_turn = random.Random(65), InterTurnTokens(TOKENIZER)
    asked = f"<|start|>user<|message|>1+2?<|end|>{NEXT}"
    for _ in range(300):
        text = response_decoder(TOKENIZER)(ids_of("".join(draw.choices(PIECES, k=draw.randint(1, 9)))))
        (history,) = render_chats(TOKENIZER, [[ASKED, said(text), ASKED]])
        assert history.startswith(f"{HEAD}<|end|>{asked}")
        assert history.endswith(f"{'<|call|>' if called_tool(text) else '<|end|>'}{asked}")
        assert "<|return|>" not in history
        assert inter_turn.between([ASKED], last_token=-1, turn=text) == ids_of(f"<|end|>{asked}")


def test_what_is_thought_and_what_is_shown() -> None:
    assert split_thought(ANSWER) == ("Sum.", "It is 3.")
    assert split_thought(f"<|channel|>commentary<|message|>I add.<|end|>{NEXT}{ANSWER}") == ("Sum.", "I add.\nIt is 3.")
    assert split_thought("<|channel|>analysis<|message|>Sum") == ("Sum", "")
    assert split_thought("<|channel|>fin") == ("", "")
    assert after_thoughts(ANSWER) == "It is 3."
    # Scorers and judges, whose prompts have turns too, read no marks.
    read = response_decoder(TOKENIZER, keeps_channels=False)
    assert read(ids_of(f"{ANSWER}<|end|><|start|>user<|message|>Give 1 point.<|return|>")) == (
        "<think>\nSum.\n</think>\n\nIt is 3.\nGive 1 point."
    )
    assert read(ids_of("<|channel|>analysis<|message|>Su")) == "<think>\nSu"
    assert read(ids_of("<|channel|>final<|message|> 3<|return|>")) == " 3"
    assert read(ids_of("3<|end|>4<|return|>")) == "34"


@pytest.mark.parametrize("call", CALLS)
def test_a_conversation_goes_on_after_a_call(call: str) -> None:
    inter_turn = InterTurnTokens(TOKENIZER)
    inter_turn.require_reply("tool")
    follows = ids_of(f"{SENT}{NEXT}")
    assert inter_turn.between([RESULT], last_token=token("<|call|>"), turn=call) == follows
    assert inter_turn.between([RESULT], last_token=-1, turn=call) == [token("<|call|>"), *follows]
    asked = ids_of(f"<|start|>user<|message|>1+2?<|end|>{NEXT}")
    for last in ("<|call|>", "<|return|>", "<|end|>"):
        assert inter_turn.between([ASKED], last_token=token(last), turn=call) == asked
    # Where it is rendered again, the call has the template's form, and its thought until a final answer follows.
    chat = [ASKED, said(call), RESULT]
    head = f"{HEAD}<|end|><|start|>user<|message|>1+2?<|end|>{NEXT}"
    assert TOKENIZER.decode(encode_chats(TOKENIZER, [chat])[0]) == f"{head}{CALLS[1]}<|call|>{SENT}{NEXT}"
    later = (
        f"{head}{CALLS[1].removeprefix(THOUGHT + NEXT)}<|call|>{SENT}{NEXT}<|channel|>final<|message|>It is 3.<|end|>"
    )
    assert render_chats(TOKENIZER, [[*chat, said(ANSWER), ASKED]])[0].startswith(later)


def test_a_result_without_a_call_is_refused_with_the_remedy() -> None:
    with pytest.raises(DataError, match=r"a result without a call; set environment\.tool_role=user"):
        InterTurnTokens(TOKENIZER).between([RESULT], last_token=-1, turn=ANSWER)


def test_answers_are_encoded_with_the_end_of_their_kind() -> None:
    answers = Answers(TOKENIZER)
    assert list(answers.warnings()) == []
    assert set(answers.stop_tokens.stop_token_ids) == {token("<|return|>"), token("<|call|>")}
    for target, written in (
        ("It is 3.", "<|channel|>final<|message|>It is 3.<|return|>"),
        (ANSWER, f"{ANSWER}<|return|>"),
        (f"{ANSWER}<|return|>", f"{ANSWER}<|return|>"),
        *((call, f"{call}<|call|>") for call in CALLS),
    ):
        assert answers.demonstration([ASKED], target) == ids_of(written)
    # The beginning of an answer stands in its channel, and its end does not name one again.
    begun = [ASKED, said("It is")]
    assert render_chats(TOKENIZER, [begun], prefill=True)[0].endswith(f"{NEXT}<|channel|>final<|message|>It is")
    assert answers.demonstration(begun, " 3.") == ids_of(" 3.<|return|>")


def test_every_turn_of_a_chat_is_trained_where_the_template_repeats_it(tmp_path: Path) -> None:
    def trained(*turns: Message, train_on: str = "all") -> list[str]:
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps({"messages": [turn.as_dict() for turn in turns]}))
        settings = SftConfig(train_on=train_on)  # type: ignore[arg-type]
        data = SftDataset([path], TOKENIZER, max_prompt_tokens=900, max_response_tokens=900, settings=settings)
        assert data.spelled.warnings("sft") == []
        rows = data.rows(range(len(data)))
        return [str(TOKENIZER.decode(row.token_ids[row.num_prompt_tokens :][row.loss_mask])) for row in rows]

    called = [ASKED, said(CALLS[1]), RESULT, said(ANSWER)]
    assert trained(*called) == [f"{CALLS[1]}<|call|>{ANSWER}<|return|>"]
    each = [f"{CALLS[0]}<|call|>", f"{ANSWER}<|return|>"]
    assert trained(ASKED, said(CALLS[0]), RESULT, said(ANSWER), train_on="each") == each
    # An answer that another one follows ends otherwise, and so does a call in a form that is not the template's.
    for chat in ([ASKED, said("3"), ASKED, said("Yes")], [ASKED, said(CALLS[0]), RESULT, said("3")]):
        with pytest.raises(DataError, match=r"set sft\.train_on to each"):
            trained(*chat)
    (whole,) = trained(*called, train_on="every_token")
    assert whole.endswith(f"{CALLS[1].removeprefix(THOUGHT + NEXT)}<|call|>{SENT}{NEXT}{ANSWER}<|return|>")


def test_marks_in_a_question_are_told() -> None:
    looks = SpelledSpecialTokens(TOKENIZER)
    looks.look([Message(role="user", content="What does <|channel|> mean?"), said(ANSWER)], "row 1")
    assert looks.num_rows == {"special": 1}
