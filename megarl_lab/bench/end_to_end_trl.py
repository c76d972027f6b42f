"""One run of TRL's GRPOTrainer for `megarl_lab.bench.end_to_end`, in an environment with trl:

    python end_to_end_trl.py JOB

JOB is JSON with the fields of `end_to_end.TrainingJob`. Imports nothing of megarl. A step's time goes to JOB's `log`.
"""

import json
import sys
import time
from typing import Any


def share_of_digits(completions: list[Any], **_: Any) -> list[float]:
    """The reward of both contenders, which differs within groups whatever the model knows: digits per character."""
    texts = [each if isinstance(each, str) else each[0]["content"] for each in completions]
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in texts]


def _arguments(job: dict[str, Any]) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=f"{job['log']}.trl",
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=job["rows_per_pass"],
        gradient_accumulation_steps=job["prompts_per_step"] * job["num_samples"] // job["rows_per_pass"],
        num_generations=job["num_samples"],
        max_completion_length=job["max_response_tokens"],
        temperature=1.0,
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        max_steps=job["num_steps"],
        # By default it computes activations twice, which these sizes do not need.
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main() -> None:
    import torch
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["num_cores"])
    arguments = _arguments(job)
    data = load_dataset("parquet", data_files=job["data"], split="train").select_columns(["prompt"])
    trainer = GRPOTrainer(model=job["model"], reward_funcs=share_of_digits, args=arguments, train_dataset=data)

    class Writer(TrainerCallback):
        """Writes the time of a step when the trainer logs the step."""

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "num_tokens" in logs:
                with open(job["log"], "a", encoding="utf-8") as file:
                    print(time.time(), file=file)

    open(job["log"], "w", encoding="utf-8").close()
    trainer.add_callback(Writer())
    trainer.train()


if __name__ == "__main__":
    main()
