"""What belongs together under `rewards`, and the message of what does not."""

from typing import Any

import pytest

from megarl.config.check import check_group_scores, check_policy_judges, check_serve_reward
from megarl.config.load import from_dict
from megarl.config.schema import Config
from megarl.errors import ConfigError

URLS = ["http://judge:8000/get_reward"]
RULE = {"manager": "rule"}
ENDPOINT = {"endpoint": {"urls": ["http://judge:8000/v1"]}}


def judge(*, judge_servers: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    return {"manager": "judge", "judges": {"style": {**ENDPOINT, **settings}}, "judge_servers": judge_servers or {}}


def rewards(**section: Any) -> Config:
    return from_dict(Config, {"rewards": section})


def hybrid(parts: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"manager": "hybrid", "hybrid": {"parts": parts}, **others}


def message(**section: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_serve_reward(rewards(**section))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"manager": "remote", "remote": {"urls": URLS}},
        {"manager": "remote", "remote": {"urls": URLS, "on_error": "value", "value": -1}},
        {"custom": {"path": "mine.py"}, "sources": {"a": {"scorer": "gpqa", "wrong": -1}}},
        judge(),
        judge(endpoint={}, use_policy=True),
        judge(endpoint={}, server="big", judge_servers={"big": {"model": "m", "replicas": 4, "num_nodes": 2}}),
        judge(mode="pairwise", opponents=2, verdict={"labels": {"left": 1, "right": 0}}),
        judge(sampling={"votes": 3, "temperature": 1, "combine": "median"}, verdict={"scale": [1, 10]}),
        hybrid(
            {"rule": RULE, "a": {"manager": "judge", "judge": "a"}, "b": {"manager": "judge", "judge": "b"}},
            judges={"a": ENDPOINT, "b": ENDPOINT},
        ),
        hybrid({"right": RULE, "style": {"manager": "remote", "weight": 0.2, "urls": URLS}}),
        hybrid(
            {"rule": RULE, "a": {"manager": "remote", "transform": "clip", "clip": [-1, 1]}},
            remote={"urls": URLS},
        )
        | {"sources": {"q/r": {"scorer": "strict"}}},
    ],
)
def test_sound_sections(section: dict[str, Any]) -> None:
    check_serve_reward(rewards(**section))


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            {"verifier": {"soft_limit_s": 5, "hard_limit_s": 5}},
            "rewards.verifier.hard_limit_s: got 5.0, expected more than rewards.verifier.soft_limit_s=5.0",
        ),
        ({"custom": {"path": "mine"}}, "rewards.custom.path: got 'mine', expected a Python file (.py)"),
        (
            {"custom": {"path": "mine.py"}, "sources": {"a": {"wrong": -1}}},
            "rewards.sources.a: says how a scorer judges this source, but rewards.custom judges it",
        ),
        (
            {"custom": {"functions": {"a": {"path": "mine"}}}},
            "rewards.custom.functions.a.path: got 'mine', expected a Python file (.py)",
        ),
        (
            {"custom": {"path": "a.py", "name": "f", "functions": {"f": {"path": "b.py"}}}},
            "rewards.custom.functions.f: rewards.custom.path has a function of this name; rename this one",
        ),
        (
            {"custom": {"functions": {"f": {"path": "b.py", "sources": ["a"]}}}, "sources": {"a": {"wrong": -1}}},
            "rewards.sources.a: says how a scorer judges this source, but rewards.custom judges it",
        ),
        (
            {"custom": {"path": "mine.py", "on_error": "value"}},
            "rewards.custom.value: is not set, but rewards.custom.on_error=value",
        ),
        ({"hybrid": {"parts": {"rule": RULE}}}, "rewards.hybrid: is set, but rewards.manager=rule does not read it"),
        ({"manager": "hybrid"}, "rewards.hybrid.parts: is empty, but rewards.manager=hybrid"),
        (
            hybrid({"a": {**RULE, "transform": "clip"}}),
            "rewards.hybrid.parts.a.clip: is not set, but rewards.hybrid.parts.a.transform=clip",
        ),
        (
            hybrid({"a": {**RULE, "clip": [0, 1]}}),
            "rewards.hybrid.parts.a.clip: got [0.0, 1.0], but rewards.hybrid.parts.a.transform=identity",
        ),
        (
            hybrid({"a": {**RULE, "transform": "clip", "clip": [1, 1]}}),
            "rewards.hybrid.parts.a.clip: got [1.0, 1.0], expected [low, high] with low < high",
        ),
        (
            hybrid({"a": {**RULE, "urls": URLS}}),
            "rewards.hybrid.parts.a.urls: are set, but rewards.hybrid.parts.a.manager=rule calls no service",
        ),
        (
            hybrid({"a": {**RULE, "api_key_env": "KEY"}}),
            "rewards.hybrid.parts.a.api_key_env: is set, but rewards.hybrid.parts.a.urls is empty",
        ),
        (
            hybrid({"a": RULE, "b": RULE}),
            "rewards.hybrid.parts: a and b both have manager=rule, of which a run has one; merge them",
        ),
        (
            hybrid({"rule": {"manager": "model"}}),
            "rewards.hybrid.parts.rule.manager: got 'model', but rule is the rule's name in metrics; rename it",
        ),
        (
            {"manager": "hybrid", "hybrid": {"parts": {"a": RULE}, "routes": {"q": []}}},
            "rewards.hybrid.routes.q: is empty, so nobody would judge this source",
        ),
        (
            {"manager": "hybrid", "hybrid": {"parts": {"a": RULE}, "routes": {"q": ["b"]}}},
            "rewards.hybrid.routes.q: got 'b', expected parts of rewards.hybrid.parts: a",
        ),
        (
            {"manager": "hybrid", "hybrid": {"parts": {"a": RULE}, "routes": {"q": ["a", "a"]}}},
            "rewards.hybrid.routes.q: got ['a', 'a'], expected each part once",
        ),
        ({"manager": "judge"}, "rewards.manager=judge: asks the only entry of rewards.judges, but there is none"),
        ({"judges": {"a": ENDPOINT}}, "rewards.judges.a: nothing asks this judge; set rewards.manager=judge"),
        (
            hybrid({"a": {"manager": "judge"}}, judges={"a": ENDPOINT, "b": ENDPOINT}),
            "rewards.hybrid.parts.a: asks the only entry of rewards.judges, but there is a, b; name it",
        ),
        (
            hybrid({"a": {"manager": "judge", "judge": "c"}}, judges={"a": ENDPOINT}),
            "rewards.hybrid.parts.a.judge: got 'c', expected an entry of rewards.judges: a",
        ),
        (hybrid({"a": {**RULE, "judge": "c"}}), "rewards.hybrid.parts.a.judge: is set, but manager=rule"),
        (judge(endpoint={}), "rewards.judges.style: got none of endpoint.urls, server, use_policy, expected one"),
        (judge(use_policy=True), "rewards.judges.style: got endpoint.urls and use_policy of endpoint.urls, server"),
        (
            judge(endpoint={}, server="big"),
            "rewards.judges.style.server: got 'big', expected an entry of rewards.judge_servers: none",
        ),
        (
            judge(judge_servers={"big": {"model": "m"}}),
            "rewards.judge_servers.big: no judge asks it; set rewards.judges",
        ),
        (
            judge(endpoint={}, server="big", judge_servers={"big": {"model": "m", "replicas": 3, "num_nodes": 2}}),
            "rewards.judge_servers.big.num_nodes: got 2, expected a divisor of replicas=3",
        ),
        (
            judge(endpoint={}, server="big", judge_servers={"big": {"model": "m", "args": {"api-key": "k"}}}),
            "rewards.judge_servers.big.args: has a secret, and every user of a host can read the command lines",
        ),
        (
            judge(endpoint={}, use_policy=True, budget={"tokens": 1}),
            "rewards.judges.style.use_policy: got true with cache, budget or sampling.extra_body",
        ),
        (judge(endpoint={"urls": ["judge"]}), "rewards.judges.style.endpoint.urls: got 'judge', expected http://"),
        (
            judge(endpoint={"urls": ["ftp://user:pw@judge"]}),
            "rewards.judges.style.endpoint.urls: got 'ftp://***masked***@judge', expected http://",
        ),
        (judge(opponents=2), "rewards.judges.style.opponents: got 2, expected an even number, with mode=pairwise only"),
        (judge(opponents=3, mode="pairwise"), "rewards.judges.style.opponents: got 3, expected an even number"),
        (judge(verdict={"pattern": "("}), "rewards.judges.style.verdict.pattern: got '(': missing ), unterminated"),
        (
            judge(verdict={"pattern": "a|b"}),
            "rewards.judges.style.verdict.pattern: got 0 groups in 'a|b', expected one",
        ),
        (
            judge(verdict={"pattern": "(a)", "form": "json"}),
            "rewards.judges.style.verdict.pattern: is set, but verdict.form=json reads no pattern",
        ),
        (judge(verdict={"scale": [1, 1]}), "rewards.judges.style.verdict.scale: got [1.0, 1.0], expected [low, high]"),
        (judge(mode="pairwise", verdict={"scale": [0, 1]}), "rewards.judges.style.verdict: with mode=pairwise, labels"),
        (judge(mode="pairwise", verdict={"labels": {"x": 2}}), "rewards.judges.style.verdict: with mode=pairwise"),
        (
            judge(sampling={"combine": "median"}),
            "rewards.judges.style.sampling.combine: got 'median', expected 'mean' with mode=pairwise or one vote",
        ),
        (judge(sampling={"votes": 2}), "rewards.judges.style.sampling.votes: got 2 with temperature=0"),
        (judge(value=0), "rewards.judges.style.value: got 0.0, but rewards.judges.style.on_error=drop_rows"),
        ({"manager": "remote"}, "rewards.remote.urls: is empty, but rewards.manager=remote; list reward services"),
        (
            hybrid({"judge": {"manager": "remote"}}),
            "rewards.remote.urls: is empty, but rewards.hybrid.parts.judge.manager=remote",
        ),
        ({"remote": {"urls": URLS}}, "rewards.remote.urls: is set, but nothing asks these services"),
        (
            {"manager": "remote", "remote": {"urls": URLS, "on_error": "value"}},
            "rewards.remote.value: is not set, but rewards.remote.on_error=value",
        ),
        (
            {"manager": "remote", "remote": {"urls": URLS, "value": 0}},
            "rewards.remote.value: got 0.0, but rewards.remote.on_error=drop_rows",
        ),
        (
            {"manager": "remote", "remote": {"urls": ["judge:8000"]}},
            "rewards.remote.urls: got 'judge:8000', expected http://host:port/path, or https",
        ),
        (
            {"manager": "remote", "remote": {"urls": ["http://judge:x/"]}},
            "rewards.remote.urls: got 'http://judge:x/', expected http://host:port/path, or https",
        ),
        (
            hybrid({"a": {"manager": "remote", "urls": ["ftp://judge/"]}}),
            "rewards.hybrid.parts.a.urls: got 'ftp://judge/'",
        ),
    ],
)
def test_unsound_sections(section: dict[str, Any], expected: str) -> None:
    assert expected in message(**section)


def test_group_scores_need_groups() -> None:
    parts = {"rule": {**RULE, "transform": "group_zscore"}}
    tree = {"rewards": hybrid(parts), "rollout": {"num_samples": 1}}
    with pytest.raises(ConfigError, match=r"parts.rule.transform: got 'group_zscore' with rollout.num_samples=1"):
        check_group_scores(from_dict(Config, tree))
    check_group_scores(from_dict(Config, {"rewards": hybrid(parts)}))
    for section in (
        judge(mode="pairwise"),
        hybrid({"a": {"manager": "judge"}}, judges=judge(mode="pairwise")["judges"]),
    ):
        with pytest.raises(ConfigError, match=r"style.mode: got 'pairwise' with rollout.num_samples=1, so there is"):
            check_group_scores(from_dict(Config, {"rewards": section, "rollout": {"num_samples": 1}}))
        check_group_scores(from_dict(Config, {"rewards": section}))


def test_a_replay_has_no_policy_to_ask() -> None:
    tree = {"rewards": judge(endpoint={}, use_policy=True), "rollout": {"source": "replay"}}
    with pytest.raises(ConfigError, match=r"style.use_policy: got true with rollout.source=replay, which may have no"):
        check_policy_judges(from_dict(Config, tree))


def test_names_are_the_users_and_their_settings_are_not() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'rewards.sources.gsm8k.rong'; did you mean '.*gsm8k.wrong"):
        rewards(sources={"gsm8k": {"rong": 0}})
    with pytest.raises(ConfigError, match=r"rewards.hybrid.parts.a.manager: is missing"):
        rewards(hybrid={"parts": {"a": {}}})
    with pytest.raises(ConfigError, match=r"rewards.sources: got \[\] \(list\), expected a mapping from names to"):
        rewards(sources=[])


def test_numbers_of_named_sections_have_ranges() -> None:
    with pytest.raises(ConfigError, match=r"rewards.hybrid.parts.a.weight: got 0.0, expected not 0"):
        check_serve_reward(rewards(**hybrid({"a": {**RULE, "weight": 0}})))
    with pytest.raises(ConfigError, match=r"rewards.sources.q.format_weight: got 1.0, expected in \[0, 1\)"):
        check_serve_reward(rewards(sources={"q": {"format_weight": 1}}))
