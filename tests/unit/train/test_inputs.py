"""What is checked of the models of reference and critic before anything starts."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from megarl.cluster.roles import actor_role, reward_role
from megarl.config import Config, from_dict
from megarl.config.lora import LoraConfig
from megarl.data.chat import load_tokenizer
from megarl.errors import ConfigError, DataError
from megarl.host.device.platform import platform
from megarl.parallel import backend
from megarl.train.export import export_model
from megarl.train.inputs import TrainInputs, check_role_models, open_model, open_train_inputs
from megarl.train.supervised_inputs import open_sft_inputs, open_train_preference_inputs, open_train_reward_inputs
from megarl.types import FinishReason, Sample, Segment, SegmentSource, prompt_segment, version_spans
from megarl.types.messages import Head, Role, RoleSpec, StoreResult
from megarl.weights.families import read_model_spec
from megarl.weights.peft_files import create_adapter_files
from tests.helpers.checkpoints import add_value_head, make_checkpoint


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied language model, and a critic of its layers with its tokenizer."""
    directory = tmp_path_factory.mktemp("models")
    make_checkpoint(directory / "policy", tied=False)
    add_value_head(directory / "policy", directory / "critic")
    load_tokenizer(directory / "policy").save_pretrained(directory / "critic")
    return directory


# The models have 512 positions.
LENGTHS = {"data": {"max_prompt_tokens": 64}, "rollout": {"max_response_tokens": 64}}


def checked(
    models: Path, role: Role, name: str, *, layout: dict[str, int] | None = None, trainable: bool = True
) -> None:
    path = str(models / name)
    section = "reference" if role is Role.REFERENCE else "critic"
    own = {"model_path": path, "layout": layout}
    config = from_dict(Config, {**LENGTHS, "model": {"path": str(models / "policy")}, section: own})
    actor = actor_role(config)
    head = Head.SCALAR if role is Role.CRITIC else Head.LM
    model = replace(config.model, path=path)
    spec = RoleSpec(role=role, model=model, settings=actor.settings, head=head, trainable=trainable)
    check_role_models(config, [actor, spec], load_tokenizer(models / "policy"))


def test_attention_that_is_not_batch_invariant_is_refused(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of megarl, which Transformer Engine's replaces where it can."""
    config = from_dict(Config, {**LENGTHS, "model": {"path": str(models / "policy")}, "run": {"batch_invariant": True}})
    with pytest.raises(
        ConfigError,
        match=r"run\.batch_invariant: got true, but with actor\.layout\.cp=1 and actor\.prefix_attention=null Tr",
    ):
        open_model(config)
    engine = backend.cuda_backend(transformer_engine=True)
    monkeypatch.setitem(backend.BACKENDS, platform().name, engine)
    open_model(config)


@pytest.mark.parametrize("scalar_head", [False, True])
def test_adapters_to_begin_with_are_checked_before_anything_starts(
    models: Path, tmp_path: Path, scalar_head: bool
) -> None:
    """A reward model may begin with those of a policy, too."""
    spec = read_model_spec(models / "policy")
    create_adapter_files(tmp_path / "it", spec, LoraConfig(rank=2), "float32", scalar_head=scalar_head)

    def opened(rank: int, *, reward: bool) -> None:
        lora = {"rank": rank, "path": str(tmp_path / "it"), "alpha": 16.0 * rank}
        tree = {**LENGTHS, "model": {"path": str(models / "policy")}, "actor": {"lora": lora}}
        config = from_dict(Config, tree)
        if reward:
            check_role_models(config, [reward_role(config)], load_tokenizer(models / "policy"))
        else:
            open_model(config)

    opened(2, reward=True)
    if scalar_head:
        with pytest.raises(ConfigError, match=r"it: has score\.weight as a whole, which this role does not train"):
            opened(2, reward=False)
    else:
        opened(2, reward=False)
    for reward in (False, True) if not scalar_head else (True,):
        with pytest.raises(ConfigError, match=r"have rank 2, but lora says 4; set lora\.rank=2"):
            opened(4, reward=reward)


def test_a_critic_is_a_language_model_or_a_model_with_a_scalar_head(models: Path) -> None:
    checked(models, Role.CRITIC, "policy")
    checked(models, Role.CRITIC, "critic")
    checked(models, Role.REFERENCE, "policy")
    with pytest.raises(ConfigError, match=r"missing \['lm_head\.weight'\] \(1\), unknown \['score\.weight'\] \(1\)"):
        checked(models, Role.REFERENCE, "critic")


class Writers:
    """Ranks that claim to have written everything, and write nothing: weights stay 0."""

    def __init__(self, path: Path) -> None:
        self._shapes = read_model_spec(path).expected_tensors(scalar_head=True)

    def store_weights(self, files: list[Path], *, role: Role) -> StoreResult:
        assert role is Role.CRITIC
        sizes = {name: shape[0] * (shape[1] if len(shape) > 1 else 1) for name, shape in self._shapes.items()}
        return StoreResult(num_elements=sizes, checksums={})


def test_an_exported_critic_is_a_model_with_one_label_that_can_be_a_critic_again(models: Path) -> None:
    config = from_dict(Config, {"model": {"path": str(models / "policy"), "dtype": "float32"}})
    critic = RoleSpec(role=Role.CRITIC, model=config.model, settings=config.actor, head=Head.SCALAR)
    export_model(Writers(models / "policy"), critic, models / "export")  # type: ignore[arg-type]
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(models / "export")
    assert (type(loaded).__name__, loaded.config.num_labels) == ("Qwen3ForSequenceClassification", 1)
    assert loaded.score.weight.shape == (1, loaded.config.hidden_size)
    checked(models, Role.CRITIC, "export")


# --- chat templates and hints

GREETING = "{% if greeting is defined %}{{ greeting }}{% endif %}"


def opened(models: Path, directory: Path, **sections: Any) -> TrainInputs:
    """The inputs of a run on one question with a solution; both models have a template with an argument."""
    for name in ("policy", "critic"):
        shutil.copytree(models / name, directory / name)
        template = directory / name / "chat_template.jinja"
        template.write_text(template.read_text() + GREETING)
    row = {
        "prompt": [{"role": "user", "content": "3+5=?"}],
        "data_source": "megarl/sums",
        "reward_model": {"style": "rule", "ground_truth": "8"},
        "extra_info": {"gold_solution": "3+5=8"},
    }
    (directory / "train.jsonl").write_text(json.dumps(row) + "\n")
    data = {**LENGTHS["data"], "train": [str(directory / "train.jsonl")], "chat_template": {"greeting": "Hello"}}
    tree = {
        "model": {"path": str(directory / "policy"), "dtype": "float32"},
        "data": data,
        "actor": {"micro_batch_tokens": 200},
        "rollout": LENGTHS["rollout"],
        "trainer": {"prompts_per_step": 1},
    }
    return open_train_inputs(from_dict(Config, {**tree, **sections}))


def test_the_end_of_answers_is_the_templates_and_engines_stop_at_all(models: Path, tmp_path: Path) -> None:
    """The tokenizer and generation_config.json name <|endoftext|> (0), the template writes <|im_end|> (2)."""
    base = tmp_path / "base"
    shutil.copytree(models, base)
    for name, change in (
        ("tokenizer_config", {"eos_token": "<|endoftext|>"}),
        ("generation_config", {"eos_token_id": 0}),
    ):
        file = base / "policy" / f"{name}.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    inputs = opened(base, tmp_path, rollout={**LENGTHS["rollout"], "stop_token_ids": [7]})
    assert inputs.answers.stop_tokens.token_ids == (2,)
    assert inputs.answers.stop_tokens.stop_token_ids == (2, 0, 7)
    assert any("answers end with '<|im_end|>'" in warning for warning in inputs.warnings)
    turns = {"prompt": "3+5=?", "chosen": "8", "rejected": "9", "response": "8"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(turns) + "\n")
    for section, open_inputs in (("sft", open_sft_inputs), ("train_preference", open_train_preference_inputs)):
        tree = {
            "model": {"path": str(base / "policy"), "dtype": "float32"},
            section: {"train": [str(tmp_path / "pairs.jsonl")], "batch_size": 1},
            **LENGTHS,
        }
        supervised = open_inputs(from_dict(Config, tree))
        # Printable ASCII characters are numbered from 3 on: the digit 8, then the end.
        assert supervised.train.rows([0])[0].token_ids[-2:].tolist() == [ord("8") - 30, 2], section
        assert any("answers end with '<|im_end|>'" in warning for warning in supervised.warnings)
    template = tmp_path / "policy" / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>", "<|done|>"))
    with pytest.raises(ConfigError, match=r"with '<\|done\|>', which is not a token of .*; set rollout\.stop to "):
        open_train_inputs(inputs.config)


def test_a_hub_id_is_resolved_once_for_all_that_follows(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration of the inputs is what ranks, engines and the run's directory see."""
    asked: list[str] = []

    def download(name: str, **_: Any) -> str:
        asked.append(name)
        return str(tmp_path / name.removeprefix("org/"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    inputs = opened(models, tmp_path, model={"path": "org/policy", "dtype": "float32"}, algo={"kl": {"where": "loss"}})
    assert asked == ["org/policy"]
    assert inputs.config.model.path == str(tmp_path / "policy")
    assert {role.model.path for role in inputs.roles} == {str(tmp_path / "policy")}
    turns = {
        name: [{"role": "user" if name == "prompt" else "assistant", "content": text}]
        for name, text in (("prompt", "3+5=?"), ("target", "8"), ("chosen", "8"), ("rejected", "9"))
    }
    (tmp_path / "pairs.jsonl").write_text(json.dumps(turns) + "\n")
    for section, model, open_inputs in (
        ("sft", "policy", open_sft_inputs),
        ("train_preference", "policy", open_train_preference_inputs),
        ("train_reward", "critic", open_train_reward_inputs),
    ):
        tree = {
            "model": {"path": f"org/{model}", "dtype": "float32"},
            section: {"train": [str(tmp_path / "pairs.jsonl")], "batch_size": 1},
            **LENGTHS,
        }
        assert open_inputs(from_dict(Config, tree)).config.model.path == str(tmp_path / model), section


def test_kto_takes_two_held_out_pairs(models: Path, tmp_path: Path) -> None:
    """Its KL is estimated with the responses of other pairs."""
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "a", "chosen": "bb", "rejected": "c"}) + "\n")

    def held_out(objective: str, num_files: int = 1) -> int:
        files = [str(path)] * num_files
        section = {"train": [str(path)] * 2, "val": files, "objective": objective, "batch_size": 2}
        model = {"path": str(models / "policy"), "dtype": "float32"}
        config = from_dict(Config, {"model": model, "train_preference": section, **LENGTHS})
        inputs = open_train_preference_inputs(config)
        assert inputs.val is not None
        return len(inputs.val)

    assert (held_out("dpo"), held_out("kto", 2)) == (1, 2)
    with pytest.raises(DataError, match=r"^train_preference\.val: has one pair, but .*=kto estimates a KL with"):
        held_out("kto")


def test_a_reward_model_with_the_policys_template_has_its_arguments(models: Path, tmp_path: Path) -> None:
    """Otherwise it would read other tokens than those that were sampled."""
    reward_model = {"model_path": str(tmp_path / "critic")}
    inputs = opened(models, tmp_path, rewards={"manager": "model"}, reward_model=reward_model)
    prompt = inputs.train[0]
    assert inputs.tokenizer.decode(prompt.token_ids).endswith("assistant\nHello")
    assert inputs.conversations is not None
    response = np.array([40, 2])
    written = Segment(
        source=SegmentSource.POLICY,
        token_ids=response,
        loss_mask=np.ones(2, dtype=np.bool_),
        versions=version_spans(np.zeros(2, dtype=np.int64)),
    )
    segments = (prompt_segment(prompt.token_ids), written)
    sample = Sample(uid=prompt.uid, sample_index=0, seed=0, segments=segments, finish_reason=FinishReason.STOP)
    read = inputs.tokenizer.decode(inputs.conversations.encode(prompt, sample))
    assert read.endswith("Hello")


def test_a_frozen_critic_needs_a_value_head(models: Path) -> None:
    checked(models, Role.CRITIC, "critic", trainable=False)
    with pytest.raises(ConfigError, match=r"^critic\.freeze: got true, but .*/policy .* has no score\.weight"):
        checked(models, Role.CRITIC, "policy", trainable=False)


def test_a_model_that_is_not_there_is_named_by_its_key(models: Path) -> None:
    with pytest.raises(ConfigError, match=r"^critic\.model_path: .*/nothing/config\.json: no such file"):
        checked(models, Role.CRITIC, "nothing")


def test_the_layout_must_fit_the_roles_model(models: Path) -> None:
    with pytest.raises(ConfigError, match=r"^critic\.layout\.tp: got 3, which does not divide .*num_key_value_heads=2"):
        checked(models, Role.CRITIC, "critic", layout={"tp": 3})
    with pytest.raises(ConfigError, match=r"^reference\.layout: 2 layers do not split over pp=3 stages"):
        checked(models, Role.REFERENCE, "policy", layout={"pp": 3})


def test_dropped_pairs_are_a_warning(models: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": "a", "chosen": text, "rejected": "c"} for text in ("bb", "b" * 200, "bbb")]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    for section, open_inputs in (
        ("train_preference", open_train_preference_inputs),
        ("train_reward", open_train_reward_inputs),
    ):
        settings = {"train": [str(path)], "val": [str(path)], "on_long": "drop", "batch_size": 2}
        model = {"path": str(models / "policy"), "dtype": "float32"}
        inputs = open_inputs(from_dict(Config, {"model": model, section: settings, **LENGTHS}))
        assert len(inputs.train) == 2
        assert inputs.warnings == tuple(
            f"{section}.{name}: dropped 1 of 3 pairs over data.max_prompt_tokens or rollout.max_response_tokens"
            for name in ("train", "val")
        )


def test_epochs_set_the_number_of_steps(models: Path, tmp_path: Path) -> None:
    """Three passes over one prompt, one prompt per step."""
    inputs = opened(models, tmp_path, trainer={"prompts_per_step": 1, "total_epochs": 3})
    assert (inputs.config.trainer.total_steps, inputs.config.trainer.total_epochs) == (3, None)


@pytest.mark.parametrize(("estimator", "room"), [("pmi", 200 - 64), ("full_kl", 100 - 64)])
def test_hints_leave_room_for_the_longest_response(models: Path, tmp_path: Path, estimator: str, room: int) -> None:
    cpo = {"method": "mi", "mi_estimator": estimator}
    inputs = opened(models, tmp_path, algo={"cpo": cpo})
    assert inputs.hints is not None
    assert inputs.hints.placer.max_prompt_tokens == room
    assert inputs.hint_survey is not None
    assert inputs.hint_survey.total == {"prompts": 1, "placed": 1}
    assert inputs.warnings == []


def test_nothing_is_predicted_of_environments_that_no_row_has(models: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algo\.echo_coef: got 0\.1, but no row of data\.train has an environment"):
        opened(models, tmp_path, algo={"echo_coef": 0.1})
