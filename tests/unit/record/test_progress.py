"""Progress on a terminal and in a log file."""

import io

from megarl.record.progress import Progress, ProgressValues, format_values

VALUES = ProgressValues(reward=0.4125, response_length=31.4, mismatch=1.23e-6, tokens_per_s=1830.2)


class Clock:
    """A clock the test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_values_read_in_order_and_absent_ones_are_left_out() -> None:
    assert format_values(VALUES) == "reward 0.412  len 31  mismatch 1.2e-06  1,830 tok/s"
    assert format_values(ProgressValues(reward=-1.0, mismatch=0.0)) == "reward -1.000  mismatch 0.0e+00"
    assert format_values(ProgressValues()) == ""


def test_log_file_gets_one_plain_line_per_step() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(total=3, description="train", stream=stream, clock=clock) as progress:
        for step in (1, 2, 3):
            clock.now_s += 60.0
            progress.update(step, ProgressValues(reward=0.5))
            if step == 2:
                progress.note("checkpoint written")
    assert stream.getvalue() == (
        "train 1/3  02:00 left  reward 0.500\n"
        "train 2/3  01:00 left  reward 0.500\n"
        "checkpoint written\n"
        "train 3/3  reward 0.500\n"
    )


def test_time_left_follows_the_last_ten_steps() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(total=100, description="train", stream=stream, clock=clock) as progress:
        # Ten slow steps of 60 s, then five fast ones of 6 s.
        for step in range(1, 16):
            clock.now_s += 60.0 if step <= 10 else 6.0
            progress.update(step, ProgressValues())
    lines = stream.getvalue().splitlines()
    assert lines[9] == "train 10/100  1:30:00 left"  # 90 steps × 60 s
    assert lines[14] == "train 15/100  46:45 left"  # mean of 5 × 60 s and 5 × 6 s is 33 s; 85 × 33 s = 2805 s


def test_resumed_run_counts_only_its_own_steps() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress(total=60, initial=50, description="train", stream=stream, clock=clock) as progress:
        clock.now_s = 8.0
        progress.update(51, ProgressValues())
    assert stream.getvalue() == "train 51/60  01:12 left\n"  # 9 steps × 8 s


def test_terminal_rewrites_one_line_and_keeps_notes() -> None:
    stream, clock = Terminal(), Clock()
    with Progress(total=4, description="train", stream=stream, clock=clock) as progress:
        clock.now_s = 10.0
        progress.update(1, VALUES)
        progress.note("checkpoint written")
        clock.now_s = 20.0
        progress.update(2, ProgressValues(reward=0.75))
    lines = stream.getvalue().split("\n")
    # The note is the only thing that ends a line before the bar is closed.
    assert len(lines) == 3
    assert lines[0].endswith("\rcheckpoint written")
    assert "1/4  00:30 left  reward 0.412" in lines[0]
    last_redraw = lines[1].split("\r")[-1]
    assert last_redraw.startswith("train ")
    assert "2/4  00:20 left  reward 0.750" in last_redraw
    assert "█" in last_redraw or "#" in last_redraw
    assert lines[2] == ""


def test_plain_lines_are_at_least_two_seconds_apart_except_the_last() -> None:
    now = [0.0]
    stream = io.StringIO()
    with Progress(total=6, description="sft", stream=stream, clock=lambda: now[0]) as progress:
        for step in range(1, 7):
            now[0] = step * 0.9
            progress.update(step, ProgressValues(loss=1.0))
    # 0.9 s (first), 3.6 s (2.7 s later) and the last step.
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/6", "4/6", "6/6"]


def test_without_rewards_none_is_shown() -> None:
    metrics = {"critic/rule_score/mean": 0.25}
    assert ProgressValues.of(metrics).reward == 0.25
    # Pure distillation has no rewards.
    taught = ProgressValues.of(metrics | {"distill/reverse_kl": 0.0312}, is_judged=False)
    assert taught.reward is None
    assert format_values(taught) == "reverse KL 0.0312"
