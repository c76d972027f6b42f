"""Write the results of an evaluation: the table on the terminal, table.parquet and samples.parquet."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from megarl.host.writing import replacing
from megarl.record.rollouts import JudgedAnswer, SourceResult, write_answers
from megarl.record.text_table import align

TABLE, SAMPLES = "table.parquet", "samples.parquet"


def results_lines(results: Sequence[SourceResult]) -> list[str]:
    """Return a table with a row per data source of each file."""
    first, with_turns = results[0], any(result.turns is not None for result in results)
    with_unjudged = any(result.num_unjudged for result in results)
    header = (
        "data",
        "source",
        "prompts",
        f"avg@{first.num_samples}",
        *(f"pass@{k}" for k in first.pass_at),
        f"maj@{first.num_samples}",
        "greedy",
        "tokens",
        "truncated",
        *(("turns", "calls") if with_turns else ()),
        *(("unjudged",) if with_unjudged else ()),
    )
    rows: list[tuple[str, ...]] = [header]
    for result in results:
        error = "" if result.avg_std_error is None else f" ± {result.avg_std_error:.3f}"
        rows.append(
            (
                result.data,
                result.data_source,
                str(result.num_prompts),
                f"{result.avg:.3f}{error}",
                *(f"{value:.3f}" for value in result.pass_at.values()),
                f"{result.maj:.3f}",
                "" if result.greedy is None else f"{result.greedy:.3f}",
                f"{result.response_tokens:.1f}",
                f"{result.truncated_frac:.1%}",
                *(("" if n is None else f"{n:.2f}" for n in (result.turns, result.tool_calls)) if with_turns else ()),
                *((str(result.num_unjudged),) if with_unjudged else ()),
            )
        )
    return align(rows, left=(0, 1))


def write_results(directory: Path, results: Sequence[SourceResult], answers: Sequence[JudgedAnswer]) -> list[Path]:
    """Write both result files, the table last: an existing table means that the evaluation is complete."""
    samples, table = directory / SAMPLES, directory / TABLE
    write_answers(samples, answers)
    # Each pass@k is a column of its own: pass_at_1, pass_at_4, …
    rows = [asdict(r) | {f"pass_at_{k}": value for k, value in r.pass_at.items()} for r in results]
    content = pa.Table.from_pylist([{k: v for k, v in row.items() if k != "pass_at"} for row in rows])
    with replacing(table) as partial:
        pq.write_table(content, partial)
    return [table, samples]
