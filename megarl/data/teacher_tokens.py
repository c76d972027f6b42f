"""Check that a teacher can read the policy's tokens: compare vocabularies, stop tokens and chat templates."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.data.answers import Answers
from megarl.data.chat import load_tokenizer, render_chats
from megarl.data.stop_tokens import QUESTION, declared_stop_tokens
from megarl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTokens:
    """The tokens that a teacher has in common with the policy.

    common: ids below this are the same tokens in both; None: all of both are. warnings: what is probably a mistake.
    """

    common: int | None
    warnings: tuple[str, ...] = ()


def compare_tokens(tokenizer: "PreTrainedTokenizerBase", answers: Answers, path: str, key: str) -> TeacherTokens:
    """Compare the policy's tokenizer and ends of answers with those of the teacher at `path`, set by `key`.

    The vocabularies may differ in tokens that were added at the end, which are then left out of divergences.

    Raises:
        ConfigError: texts have other tokens for the teacher, or it ends answers with none of the policy's ends, so that
            it could only teach never to end.
    """
    own = load_tokenizer(path, key)
    ours, theirs = tokenizer.get_vocab(), own.get_vocab()
    differing = sorted(
        (min(id for id in (ours.get(token), theirs.get(token)) if id is not None), token)
        for token in ours.keys() | theirs.keys()
        if ours.get(token) != theirs.get(token)
    )
    added = {*tokenizer.get_added_vocab(), *own.get_added_vocab()}
    if learned := [token for _, token in differing if token not in added]:
        raise ConfigError(
            f"{key}: the tokenizer in {path} differs from that of model.path in {len(learned)} learned tokens, such as "
            f"{learned[0]!r}, and a teacher reads the policy's tokens, not its text; use a teacher of the same family"
        )
    common = differing[0][0] if differing else None
    warnings = []
    if common is not None:
        lost = [token for id, token in differing]
        warnings.append(
            f"{key}: {len(lost)} added tokens, such as {lost[0]!r}, are not those of model.path; divergences are over "
            f"the {common} tokens that both have"
        )
    stop_tokens, its = answers.stop_tokens, Answers(own, declared=declared_stop_tokens(Path(path))).stop_tokens
    known = set(its.declared) if common is None else {id for id in its.declared if id < common}
    if not known & set(stop_tokens.stop_token_ids):
        raise ConfigError(
            f"{key}: the model in {path} ends answers with {', '.join(map(repr, its.names))}, and the policy with "
            f"{', '.join(map(repr, stop_tokens.names))}, so that it would teach never to end; give model.path the "
            "teacher's chat template and generation_config.json, or set rollout.stop_token_ids to its end"
        )
    if stop_tokens.token_ids and stop_tokens.token_ids[-1] not in known:
        warnings.append(
            f"{key}: the policy's template ends answers with {stop_tokens.names[0]!r}, which does not end them for the "
            "teacher; answers may be taught to go on after it"
        )
    if render_chats(tokenizer, [[QUESTION]]) != render_chats(own, [[QUESTION]]):
        warnings.append(
            f"{key}: the chat template in {path} is not that of model.path, in which the teacher reads its prompts"
        )
    return TeacherTokens(common=common, warnings=tuple(warnings))
