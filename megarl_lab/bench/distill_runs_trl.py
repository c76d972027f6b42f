"""The peer's half of `megarl_lab.bench.distill_runs`, in an environment with trl: `… distill_runs_trl.py JOB`.

JOB is JSON with `do`: `train` runs TRL's GKDTrainer on a student, `measure` has models answer prompts. Imports nothing
of megarl.
"""

import json
import sys
from typing import Any


def train(job: dict[str, Any]) -> None:
    """Distil with TRL's GKDTrainer: each step has `rows_per_step` rows, in passes of `rows_per_pass`."""
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    data = load_dataset("parquet", data_files=job["data"], split="train")
    # Each prompt as often in a row as megarl samples it, in the order of the file.
    prompts = [i for i in range(job["prompts_per_step"] * job["num_steps"]) for _ in range(job["num_samples"])]
    rows = data.select([i % len(data) for i in prompts])
    rows = rows.map(lambda row: {"messages": [*row["prompt"], *row["target"]]}, remove_columns=rows.column_names)
    rows_per_step = job["prompts_per_step"] * job["num_samples"]
    arguments = GKDConfig(
        output_dir=job["out"],
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": "float32"},
        teacher_model_init_kwargs={"dtype": "float32"},
        per_device_train_batch_size=job["rows_per_pass"],
        gradient_accumulation_steps=rows_per_step // job["rows_per_pass"],
        max_steps=job["num_steps"],
        lmbda=job["lmbda"],
        beta=job["beta"],
        temperature=1.0,
        max_new_tokens=job["max_response_tokens"],
        max_length=job["max_tokens"],
        learning_rate=job["lr"],
        adam_beta1=job["betas"][0],
        adam_beta2=job["betas"][1],
        weight_decay=0.0,
        warmup_steps=job["warmup_steps"],
        lr_scheduler_type="constant_with_warmup",
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=job["seed"],
    )
    tokenizer = AutoTokenizer.from_pretrained(job["student"])
    trainer = GKDTrainer(
        model=job["student"],
        teacher_model=job["teacher"],
        args=arguments,
        train_dataset=rows,
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(job["out"])


def measure(job: dict[str, Any]) -> None:
    """Write, for each model, its answers to the prompts, sampled at temperature 1, and the means over all their tokens
    of the divergences from the teacher, over the whole vocabulary.
    """
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data = load_dataset("parquet", data_files=job["data"], split="train")
    data = data.select([i for i in range(len(data)) for _ in range(job["num_answers"])])
    teacher = AutoModelForCausalLM.from_pretrained(job["teacher"], dtype=torch.float32).eval()
    found = {}
    for name, path in job["models"].items():
        torch.manual_seed(job["seed"])
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        eos = model.generation_config.eos_token_id or tokenizer.eos_token_id
        ends = torch.tensor(eos if isinstance(eos, list) else [eos])
        answers, sums, count = list[str](), torch.zeros(2, dtype=torch.float64), 0
        for first in range(0, len(data), job["rows_per_pass"]):
            prompts = data["prompt"][first : first + job["rows_per_pass"]]
            texts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts]
            given = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
            width = given["input_ids"].shape[1]
            with torch.no_grad():
                whole = model.generate(
                    **given,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    max_new_tokens=job["max_response_tokens"],
                )
                ended = torch.isin(whole[:, width:], ends).cumsum(1)
                # An end token is the last one that counts.
                mask = (ended - torch.isin(whole[:, width:], ends).long()) == 0
                attention = torch.cat([given["attention_mask"], mask.long()], 1)
                positions = (attention.cumsum(1) - 1).clamp(min=0)
                log_p, log_q = (
                    each(input_ids=whole, attention_mask=attention, position_ids=positions)
                    .logits[:, width - 1 : -1]
                    .double()
                    .log_softmax(-1)
                    for each in (model, teacher)
                )
            reverse = (log_p.exp() * (log_p - log_q)).sum(-1)
            forward = (log_q.exp() * (log_q - log_p)).sum(-1)
            sums += torch.stack([reverse[mask].sum(), forward[mask].sum()])
            count += int(mask.sum())
            answers += [
                tokenizer.decode(row[kept], skip_special_tokens=True)
                for row, kept in zip(whole[:, width:], mask, strict=True)
            ]
        found[name] = {"answers": answers, "reverse_kl": float(sums[0]) / count, "forward_kl": float(sums[1]) / count}
    with open(job["log"], "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    work = json.loads(sys.argv[1])
    {"train": train, "measure": measure}[work["do"]](work)
