"""The configuration page: what it says of a key, and that it is not stale."""

from pathlib import Path

from megarl.config.document import COMMAND, PAGE, Entry, entries, render

ROOT = Path(__file__).parents[3]


def test_the_page_is_what_the_schema_says() -> None:
    written = (ROOT / PAGE).read_text()
    assert written == render(), f"{PAGE} is stale; renew it in the repository's root: {COMMAND}"


def test_every_key_is_described() -> None:
    undescribed = [entry.key for entry in entries() if not entry.description]
    assert not undescribed, f"add a comment above or beside these fields in megarl/config/schema.py: {undescribed}"


def test_entries() -> None:
    found = {entry.key: entry for entry in entries()}
    assert found["actor.optimizer.betas"] == Entry(
        key="actor.optimizer.betas",
        expects="a list of 2 float; in [0, 1)",
        default="`[0.9, 0.95]`",
        description="Decay of the two moments.",
    )
    assert found["model.vocab_multiple"].description == "Vocabulary rows are padded to a multiple of this × tp."
    assert found["data.train[i].path"].default == "required"
    assert found["sync.verify"].default == "`false`"
    assert found["data.train"].default == "`[]`"
    assert found["logging.profile_steps"].default == "`null`"
    assert found["trainer.mismatch_gate_nats"].description.count("\\|") == 2
