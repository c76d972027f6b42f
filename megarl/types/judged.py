"""Define what judges read, and what they say of samples that they cannot judge."""

from dataclasses import dataclass

from megarl.types.samples import Prompt, Sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinishedSample:
    """A finished sample in the form that judges read, without special tokens in `response`. It equals only itself."""

    prompt: Prompt
    sample: Sample
    prompt_text: str
    response: str

    @property
    def label(self) -> str:
        """Return a name of the sample for log and error messages."""
        return f"{self.sample.uid}/{self.sample.sample_index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A sample that a judge could not judge, or in which it found no answer.

    outcome: `parse_failed` (no answer was found), `timed_out`, `crashed`, `failed` (an exception), `abstained` (no
    function has an opinion), `unanswered` (no service or model replied) or `unread` (a model's reply has
    no verdict). reason: why, in one line. output: what the judge printed or wrote.
    """

    item: FinishedSample
    outcome: str
    reason: str
    output: str = ""
    judge: str = ""
