"""The forward passes of a step: who is asked, when, about which rows, and where the answers go.

Scorers are fakes. What they say of a row depends on the call and the place in it, so that nothing but the right answer
in the right place passes; rows, hints and answers are those of the byte tokenizer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from megarl.algos.build import build_algorithm
from megarl.cluster.offloading import Phase, forward
from megarl.config.algo import AlgoConfig, CorrectionConfig, HintConfig, PolicyLossConfig
from megarl.data.chat import encode_chats
from megarl.data.hints import hinted_rows
from megarl.data.records import Message
from megarl.errors import DataError
from megarl.record.metrics import Timers
from megarl.train.forward import ForwardStage, needed_quantities
from megarl.train.hinted import HintWriter
from megarl.train.passes import RolePasses
from megarl.types import FloatArray, Prompt, Row, TokenQuantity
from megarl.types.messages import Role
from megarl_lab.recipes.tiny_model import make_byte_tokenizer

HINTED = frozenset({TokenQuantity.OLD_LOGPROBS, TokenQuantity.HINT_LOGPROBS})


class FakePasses(RolePasses):
    """Says k + i/100 of the i-th row of its k-th call, with names of its own; `log` is shared by all of a test."""

    def __init__(self, role: Role, names: Sequence[str], log: list[str]) -> None:
        self.role, self.names, self.log = role, names, log
        self.rows: list[list[Row]] = []
        self.pairs: list[tuple[list[Row], list[Row]]] = []
        self.steps: list[int] = []

    @property
    def phase(self) -> Phase:
        return forward(self.role)

    def forward(self, rows: Sequence[Row], *, step: int) -> dict[str, list[FloatArray]]:
        self.log.append(f"{self.role} passes {len(rows)} rows")
        self.rows.append(list(rows))
        self.steps.append(step)
        return {
            name: [self.said(i, row, offset) for i, row in enumerate(rows)] for offset, name in enumerate(self.names)
        }

    def forward_pairs(self, rows: Sequence[Row], others: Sequence[Row], *, step: int) -> dict[str, list[FloatArray]]:
        """Divergences 0.5 + i of the i-th pair; log-probs and entropies 100 + i of row i, 200 + i of its twin."""
        self.log.append(f"{self.role} compares {len(rows)} pairs")
        self.pairs.append((list(rows), list(others)))
        self.steps.append(step)
        first, twins = (
            [np.full(row.num_response_tokens, offset + i, np.float32) for i, row in enumerate(rows)]
            for offset in (100, 200)
        )
        kl = [np.full(row.num_response_tokens, 0.5 + i, np.float32) for i, row in enumerate(rows)]
        return {"logprobs": [*first, *twins], "entropy": [*first, *twins], "kl": kl}

    def said(self, place: int, row: Row, offset: int = 0) -> FloatArray:
        return np.full(row.num_response_tokens, 10 * offset + len(self.rows) + place / 100, np.float32)


@dataclass(slots=True)
class Bench:
    """Passes over fake passes, and what happened in them."""

    hints: HintWriter | None = None
    log: list[str] = field(default_factory=list)
    passes: dict[Role, FakePasses] = field(init=False)
    timers: Timers = field(default_factory=Timers)

    def __post_init__(self) -> None:
        names = {Role.ACTOR: ("logprobs", "entropy"), Role.REFERENCE: ("logprobs", "entropy"), Role.CRITIC: ("values",)}
        self.passes = {role: FakePasses(role, said, self.log) for role, said in names.items()}

    def run(
        self, rows: list[Row], prompts: Mapping[str, Prompt], needed: frozenset[TokenQuantity], *, seed: int = 0
    ) -> tuple[list[Row], dict[str, float]]:
        stage = ForwardStage(passes=self.passes, hints=self.hints, enter=self._enter, timers=self.timers)
        return stage.add_quantities(rows, prompts, needed, seed=seed, step=4)

    def _enter(self, phase: Phase) -> None:
        self.log.append(f"phase {phase.name}")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return make_byte_tokenizer()


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> dict[str, Prompt]:
    """Three questions with a solution and one without."""
    solutions = {"a": "It is 2.", "b": "Six.", "c": "Think of nine.", "none": None}
    return {
        uid: Prompt(
            uid=uid,
            token_ids=tuple(encode_chats(tokenizer, [(Message(role="user", content=f"{uid}?"),)])[0]),
            data_source="q",
            ground_truth="",
            extra_info={} if solution is None else {"gold_solution": solution},
            messages=(Message(role="user", content=f"{uid}?"),),
        )
        for uid, solution in solutions.items()
    }


@pytest.fixture(scope="module")
def rows(tokenizer: PreTrainedTokenizerBase, prompts: dict[str, Prompt]) -> list[Row]:
    """A row of each prompt, two of b, whose answers are in a box."""
    made = []
    for place, uid in enumerate(["a", "b", "none", "c", "b"]):
        prompt, response = prompts[uid], encode(tokenizer, f"r{place} \\boxed{{{place}}}.")
        made.append(
            Row(
                uid=uid,
                sample_index=place,
                token_ids=np.array([*prompt.token_ids, *response]),
                num_prompt_tokens=len(prompt.token_ids),
                loss_mask=np.ones(len(response), dtype=np.bool_),
                quantities={"rollout_logprobs": np.full(len(response), -7.0, np.float32)},
            )
        )
    return made


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def writer(
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int = 200,
    hint: HintConfig | None = None,
    exclude_answer: bool = False,
) -> HintWriter:
    return HintWriter(
        tokenizer,
        hint or HintConfig(template="{hint}"),
        exclude_answer=exclude_answer,
        max_prompt_tokens=max_prompt_tokens,
    )


def prompt_text(tokenizer: PreTrainedTokenizerBase, row: Row) -> str:
    text: str = tokenizer.decode(row.token_ids[: row.num_prompt_tokens])
    return text


def response_of(row: Row) -> list[int]:
    ids: list[int] = row.token_ids[row.num_prompt_tokens :].tolist()
    return ids


def missing(*, no_text: float = 0.0, no_room: float = 0.0) -> dict[str, float]:
    """The shares of rows without a hint, by reason."""
    return {"cpo/hint_no_text_frac": no_text, "cpo/hint_no_place_frac": 0.0, "cpo/hint_no_room_frac": no_room}


def constant(values: FloatArray) -> float:
    """The one number of an array."""
    assert len(set(values.tolist())) == 1
    return round(float(values[0]), 4)


# --- without hints


def test_roles_compute_in_turn_the_actor_last(rows: list[Row]) -> None:
    """The update follows, and finds the actor where it is."""
    bench = Bench()
    needed = frozenset({TokenQuantity.OLD_LOGPROBS, TokenQuantity.REF_LOGPROBS, TokenQuantity.VALUES})
    got, metrics = bench.run(rows, {}, needed)
    assert bench.log == [
        "phase score reference",
        "reference passes 5 rows",
        "phase score critic",
        "critic passes 5 rows",
        "phase score actor",
        "actor passes 5 rows",
    ]
    assert metrics == {}
    assert set(bench.timers.pop()) == {"timing_s/ref", "timing_s/values", "timing_s/old_log_prob"}
    assert {step for of_role in bench.passes.values() for step in of_role.steps} == {4}
    for place, row in enumerate(got):
        assert row.label == rows[place].label
        quantities = {name: constant(value) for name, value in row.quantities.items()}
        assert quantities == {
            "rollout_logprobs": -7.0,
            "ref_logprobs": 1 + place / 100,
            "values": 1 + place / 100,
            "old_logprobs": 1 + place / 100,
            # The pass that answers log-probs answers entropies too.
            "old_entropy": 11 + place / 100,
        }
    # What came in is as it was.
    assert [set(row.quantities) for row in rows] == [{"rollout_logprobs"}] * 5


@pytest.mark.parametrize(
    ("needed", "asked"),
    [
        ({TokenQuantity.REF_LOGPROBS}, ["reference"]),
        ({TokenQuantity.VALUES}, ["critic"]),
        ({TokenQuantity.OLD_LOGPROBS}, ["actor"]),
        ({TokenQuantity.OLD_ENTROPY}, ["actor"]),
        ({TokenQuantity.VALUES, TokenQuantity.OLD_ENTROPY}, ["critic", "actor"]),
    ],
)
def test_only_roles_that_are_needed_are_asked(rows: list[Row], needed: set[TokenQuantity], asked: list[str]) -> None:
    bench = Bench()
    got, _ = bench.run(rows, {}, frozenset(needed))
    assert [entry.split()[0] for entry in bench.log if "passes" in entry] == asked
    assert needed <= set(got[0].quantities)


# --- with hints


def test_plain_hinted_and_shuffled_rows_share_one_pass(
    tokenizer: PreTrainedTokenizerBase, rows: list[Row], prompts: dict[str, Prompt]
) -> None:
    bench = Bench(writer(tokenizer))
    got, metrics = bench.run(rows, prompts, HINTED | {TokenQuantity.SHUFFLED_HINT_LOGPROBS})
    assert bench.log == ["phase score actor", "actor passes 15 rows"]
    asked = bench.passes[Role.ACTOR].rows[0]
    plain, hinted, shuffled = asked[:5], asked[5:10], asked[10:]
    for part in (plain, hinted, shuffled):
        assert [response_of(row) for row in part] == [response_of(row) for row in rows]
    assert [row.token_ids.tolist() for row in plain] == [row.token_ids.tolist() for row in rows]
    for row, own, other in zip(rows, hinted, shuffled, strict=True):
        hints = {uid: str(p.extra_info["gold_solution"]) for uid, p in prompts.items() if uid != "none"}
        if row.uid == "none":
            assert own.token_ids.tolist() == other.token_ids.tolist() == row.token_ids.tolist()
            continue
        # The hint stands between the tag and the question.
        place = prompt_text(tokenizer, row).index(f"{row.uid}?")
        assert prompt_text(tokenizer, own)[place:].startswith(hints.pop(row.uid) + f"{row.uid}?")
        assert any(prompt_text(tokenizer, other)[place:].startswith(hint + f"{row.uid}?") for hint in hints.values())
    quantities = [{name: constant(value) for name, value in row.quantities.items()} for row in got]
    # The row without a hint keeps its advantages, whatever else a method reads.
    assert [of_row.pop("cpo_excluded") for of_row in quantities] == [0, 0, 1, 0, 0]
    for place, of_row in enumerate(quantities):
        old = 1 + place / 100
        without = rows[place].uid == "none"
        assert of_row == {
            "rollout_logprobs": -7.0,
            "old_logprobs": old,
            "old_entropy": 10 + old,
            # A row without a hint has its old log-probs, not those of another pack.
            "hint_logprobs": old if without else round(old + 0.05, 4),
            "shuffled_hint_logprobs": old if without else round(old + 0.10, 4),
        }
    # Eight characters of a, four of each b and fourteen of c; one row of five has none.
    assert metrics == pytest.approx(
        {"cpo/hint_len_mean": (8 + 4 + 14 + 4) / 4, "cpo/hint_truncated_frac": 0.0, **missing(no_text=0.2)}
    )


def test_without_a_baseline_no_hint_is_shuffled(
    tokenizer: PreTrainedTokenizerBase, rows: list[Row], prompts: dict[str, Prompt]
) -> None:
    bench = Bench(writer(tokenizer))
    got, _ = bench.run(rows, prompts, HINTED)
    assert bench.log == ["phase score actor", "actor passes 10 rows"]
    assert set(got[0].quantities) == {
        "rollout_logprobs",
        "old_logprobs",
        "old_entropy",
        "hint_logprobs",
        "cpo_excluded",
    }


def test_the_seed_decides_whose_hint_it_is(
    tokenizer: PreTrainedTokenizerBase, rows: list[Row], prompts: dict[str, Prompt]
) -> None:
    def shuffled(seed: int) -> list[str]:
        bench = Bench(writer(tokenizer))
        bench.run(rows, prompts, HINTED | {TokenQuantity.SHUFFLED_HINT_LOGPROBS}, seed=seed)
        return [prompt_text(tokenizer, row) for row in bench.passes[Role.ACTOR].rows[0][10:]]

    assert shuffled(0) == shuffled(0)
    # Two cycles of three hints.
    assert len({tuple(shuffled(seed)) for seed in range(8)}) == 2


@pytest.mark.parametrize(
    ("correction", "staleness", "mini_batches", "gate_passed", "needed"),
    [
        # One optimizer step on fresh samples: the current log-probs are the old ones.
        ("none", 0, 1, True, False),
        ("none", 0, 2, True, True),
        ("none", 0, 1, False, True),
        ("tis_upper", 1, 1, True, True),
        # The ratio is to the engine's log-probs.
        ("rollout_ratio", 1, 1, True, False),
        ("rollout_ratio", 0, 2, True, False),
        ("rollout_ratio", 1, 1, False, True),
        # Ranks keep the policy.
        ("kept", 0, 2, True, False),
        ("kept", 0, 2, False, True),
    ],
)
def test_old_logprobs_are_computed_where_the_ratio_needs_them(
    correction: str, staleness: int, mini_batches: int, gate_passed: bool, needed: bool
) -> None:
    algo = AlgoConfig(correction=CorrectionConfig(name=correction))
    if correction == "kept":
        algo = AlgoConfig(policy_loss=PolicyLossConfig(name="score_centering", compared_with="trainer"))
    algorithm = build_algorithm(algo, max_response_tokens=8, vocab_size=None)
    found = needed_quantities(algorithm, algo, staleness=staleness, num_updates=mini_batches, gate_passed=gate_passed)
    assert (TokenQuantity.OLD_LOGPROBS in found) is needed


def test_each_teacher_passes_once_over_its_own_rows(rows: list[Row], prompts: dict[str, Prompt]) -> None:
    bench, needed = Bench(), frozenset({TokenQuantity.TEACHER_LOGPROBS})
    names = {Role("teachers.math"): ("logprobs", "entropy"), Role.TEACHER: ("logprobs",)}
    teachers = {role: FakePasses(role, said, bench.log) for role, said in names.items()}
    stage = ForwardStage(
        passes=bench.passes,
        teachers=teachers,
        teacher_of=lambda prompt: Role("teachers.math") if prompt.uid in ("a", "c") else Role.TEACHER,
        hints=None,
        enter=bench._enter,
        timers=bench.timers,
    )
    found, _ = stage.add_quantities(rows, prompts, needed, seed=0, step=4)
    own = [row for row in rows if row.uid in ("a", "c")]
    assert sorted(line for line in bench.log if "passes" in line) == [
        f"teacher passes {len(rows) - len(own)} rows",
        f"teachers.math passes {len(own)} rows",
    ]
    assert [row.label for row in found] == [row.label for row in rows]
    places = {row.label: i for i, row in enumerate(own)}
    for row in found:
        # Every first row of a pass is told 1.0, the next 1.01.
        if row.label in places:
            assert row.quantities["teacher_logprobs"][0] == np.float32(1 + places[row.label] / 100)
        # One of the teachers does not know it.
        assert "teacher_entropy" not in row.quantities


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_teacher_with_hints_reads_other_prompts_and_teaches_no_row_without_a_hint(
    tokenizer: PreTrainedTokenizerBase, rows: list[Row], prompts: dict[str, Prompt], shuffled: bool
) -> None:
    bench = Bench(writer(tokenizer, exclude_answer=True))
    teacher = FakePasses(Role.ACTOR, ("logprobs", "entropy"), bench.log)
    stage = ForwardStage(
        passes=bench.passes,
        teachers={Role.TEACHER: teacher},
        hints=bench.hints,
        hinted_teacher=True,
        enter=bench._enter,
        timers=bench.timers,
    )
    needed = {TokenQuantity.TEACHER_LOGPROBS, *([TokenQuantity.TEACHER_BASELINE_LOGPROBS] if shuffled else [])}
    found, metrics = stage.add_quantities(rows, prompts, frozenset(needed), seed=0, step=4)
    assert bench.log == ["phase score actor", f"actor passes {len(rows) * (1 + shuffled)} rows"]
    (read,) = teacher.rows
    for place, (row, own) in enumerate(zip(found, rows, strict=True)):
        # The policy trains on its own prompt.
        assert row.token_ids.tolist() == own.token_ids.tolist()
        hint = prompts[row.uid].extra_info.get("gold_solution")
        assert prompt_text(tokenizer, read[place]) == prompt_text(tokenizer, own).replace(
            f"user\n{row.uid}?", f"user\n{hint or ''}{row.uid}?"
        )
        assert read[place].token_ids.tolist() == row.as_taught.token_ids.tolist()
        assert row.quantities["teacher_logprobs"][0] == np.float32(1 + place / 100)
        # "r0 \\boxed{0}.": the eleventh byte token is the answer.
        excluded = [10] if hint else list(range(row.num_response_tokens))
        assert np.flatnonzero(row.quantities["cpo_excluded"]).tolist() == excluded
        if shuffled:
            assert row.quantities["teacher_baseline_logprobs"][0] == np.float32(1 + (len(rows) + place) / 100)
            other = prompt_text(tokenizer, read[len(rows) + place])
            assert (hint is None) is (other == prompt_text(tokenizer, own))
            assert hint is None or hint not in other
    assert metrics["cpo/hint_no_text_frac"] == 1 / len(rows)


def test_divergences_are_of_rows_and_their_hinted_twins(
    tokenizer: PreTrainedTokenizerBase, rows: list[Row], prompts: dict[str, Prompt]
) -> None:
    bench = Bench(writer(tokenizer))
    got, _ = bench.run(rows, prompts, HINTED | {TokenQuantity.HINT_KL})
    # Where there is no hint nothing diverges; what a pair's pass says of its two is not asked again.
    assert bench.log == ["phase score actor", "actor passes 2 rows", "actor compares 4 pairs"]
    actor, with_hint = bench.passes[Role.ACTOR], [0, 1, 3, 4]
    ((plain, hinted),) = actor.pairs
    assert [row.token_ids.tolist() for row in plain] == [rows[i].token_ids.tolist() for i in with_hint]
    written = hinted_rows(rows, bench.hints.placer.place_all(prompts)).rows
    assert [row.token_ids.tolist() for row in hinted] == [written[i].token_ids.tolist() for i in with_hint]
    assert [row.token_ids.tolist() for row in actor.rows[0]] == [rows[2].token_ids.tolist()] * 2
    assert [constant(row.quantities["hint_kl"]) for row in got] == [0.5, 1.5, 0.0, 2.5, 3.5]
    # 1.00 is the first row of the first call.
    assert [constant(row.quantities["old_logprobs"]) for row in got] == [100, 101, 1.00, 102, 103]
    assert [constant(row.quantities["hint_logprobs"]) for row in got] == [200, 201, 1.00, 202, 203]


def test_a_row_that_does_not_fit_twice_is_no_pair(
    tokenizer: PreTrainedTokenizerBase, rows: list[Row], prompts: dict[str, Prompt]
) -> None:
    """A limit of half a micro-batch for hinted rows leaves rows beyond it without a hint, whatever they measure."""
    bench = Bench(writer(tokenizer, max_prompt_tokens=7))
    got, metrics = bench.run(rows, prompts, HINTED | {TokenQuantity.HINT_KL})
    assert bench.log == ["phase score actor", "actor passes 10 rows"]
    assert metrics["cpo/hint_no_text_frac"] + metrics["cpo/hint_no_room_frac"] == 1.0
    assert not any(row.quantities["hint_kl"].any() for row in got)


def test_answers_are_marked_if_they_are_to_keep_their_advantage(
    tokenizer: PreTrainedTokenizerBase, rows: list[Row], prompts: dict[str, Prompt]
) -> None:
    for exclude in (False, True):
        bench = Bench(writer(tokenizer, exclude_answer=exclude))
        got, _ = bench.run(rows, prompts, HINTED)
        for place, row in enumerate(got):
            # "r0 \boxed{0}.": the eleventh byte token is the answer. A row without a hint keeps all its advantages.
            assert tokenizer.decode(response_of(row)[10:11]) == str(place)
            marked = [10] * exclude if row.uid != "none" else list(range(row.num_response_tokens))
            assert np.flatnonzero(row.quantities["cpo_excluded"]).tolist() == marked


def test_of_a_conversation_only_the_last_turn_has_an_answer(
    tokenizer: PreTrainedTokenizerBase, rows: list[Row], prompts: dict[str, Prompt]
) -> None:
    """What a tool wrote is no answer, also where the policy gave none."""
    parts = ["\\boxed{1}", "\\boxed{2}", "\\boxed{3}"]
    first, reply, last = (encode(tokenizer, part) for part in parts)
    nothing = encode(tokenizer, "so be it")
    before = rows[0].token_ids[: rows[0].num_prompt_tokens]
    talks = [
        replace(
            rows[0],
            token_ids=np.concatenate([before, first, reply, ending]),
            loss_mask=np.repeat([True, False, True], [len(first), len(reply), len(ending)]),
            quantities={},
        )
        for ending in (last, nothing)
    ]
    bench = Bench(writer(tokenizer, exclude_answer=True))
    got, _ = bench.run(talks, {"a": replace(prompts["a"], environment="game")}, HINTED)
    place = len(first) + len(reply) + len("\\boxed{")
    assert np.flatnonzero(got[0].quantities["cpo_excluded"]).tolist() == [place]
    assert not got[1].quantities["cpo_excluded"].any()


def test_a_conversation_that_its_environment_opened_cannot_have_a_hint(
    tokenizer: PreTrainedTokenizerBase, rows: list[Row], prompts: dict[str, Prompt]
) -> None:
    opened = replace(
        rows[0], token_ids=np.concatenate([[5], rows[0].token_ids]), num_prompt_tokens=rows[0].num_prompt_tokens + 1
    )
    talking = {"a": replace(prompts["a"], environment="game")}
    with pytest.raises(DataError, match="row a/0: its environment 'game' opens conversations with messages of its own"):
        Bench(writer(tokenizer)).run([opened], talking, HINTED)


def test_no_hint_reaches_what_is_trained(
    tokenizer: PreTrainedTokenizerBase, rows: list[Row], prompts: dict[str, Prompt]
) -> None:
    got, _ = Bench(writer(tokenizer)).run(rows, prompts, HINTED)
    assert [row.token_ids.tolist() for row in got] == [row.token_ids.tolist() for row in rows]
    assert [row.num_prompt_tokens for row in got] == [row.num_prompt_tokens for row in rows]
