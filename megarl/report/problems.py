"""Show in a report which samples judges could not judge or read: their shares, and examples of each kind."""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from markupsafe import Markup

from megarl.record.problems import ProblemRecord
from megarl.report.marked_text import visible_text
from megarl.report.run import Run

NUM_EXAMPLES = 2
# Metrics of shares → what their samples have in common.
_SHARES = {
    r"reward/parse_failed_frac": "no answer was found",
    r"reward/timeout_frac": "judging took too long",
    r"reward/crashed_frac": "the judge's process died",
    r"reward/failed_frac": "a function raised an exception",
    r"reward/(?P<judge>.+)/unread_frac": "no verdict was found in what {judge} said",
    r"reward/(?P<judge>.+)/unjudged_frac": "{judge} gave no verdict",
    r"reward/dropped_frac": "dropped, does not train",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareRow:
    """A row of the table of shares: a metric, and its mean over the run and value at the last step, as percentages."""

    name: str
    metric: str
    mean: str
    last: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemExample:
    """A sample that was not judged or not read, in the form in which the page shows it."""

    record: ProblemRecord
    response: Markup
    output: Markup


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemGroup:
    """Examples of one kind of problem, under a title that counts what was recorded of this kind."""

    title: str
    examples: tuple[ProblemExample, ...]


def problem_shares(run: Run) -> list[ShareRow]:
    """Return a row for each share that was ever above 0."""
    rows = []
    for pattern, words in _SHARES.items():
        for metric, series in sorted(run.series.items()):
            found = re.fullmatch(pattern, metric)
            if found is not None and any(series.values):
                mean = sum(series.values) / len(series.values)
                rows.append(
                    ShareRow(
                        name=words.format(**found.groupdict()),
                        metric=metric,
                        mean=f"{mean:.2%}",
                        last=f"{series.values[-1]:.2%}",
                    )
                )
    return rows


def problem_groups(run: Run) -> Iterator[ProblemGroup]:
    """Yield the latest examples of each kind of problem, of different reasons as far as there are enough."""
    kinds: dict[tuple[str, str], list[ProblemRecord]] = defaultdict(list)
    for record in run.problems:
        kinds[record.judge, record.outcome].append(record)
    for (judge, outcome), records in sorted(kinds.items()):
        latest = list({record.reason: record for record in records}.values())[-NUM_EXAMPLES:]
        latest = latest if len(latest) == NUM_EXAMPLES else records[-NUM_EXAMPLES:]
        yield ProblemGroup(
            title=f"{judge}: {outcome.replace('_', ' ')}, {len(records)} recorded",
            examples=tuple(
                ProblemExample(record=each, response=visible_text(each.response), output=visible_text(each.output))
                for each in reversed(latest)
            ),
        )
