"""Rows of published prompt files, in exactly their form."""

from typing import Any

from megarl.config.schema import DataConfig

# Rows as they are published, with the settings that open them, and what is read: question, data source, ground truth.
PUBLIC_FORMS: dict[str, tuple[dict[str, Any], DataConfig, tuple[str, str, str]]] = {
    "DAPO-Math-17k": (
        {
            "data_source": "math_dapo",
            "prompt": [{"content": "Solve: 3x = 102. The last line should be Answer: $Answer", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
        },
        DataConfig(),
        ("Solve: 3x = 102. The last line should be Answer: $Answer", "math_dapo", "34"),
    ),
    "TinyZero Countdown": (
        {
            "target": 98,
            "nums": [44, 19, 35],
            "data_source": "countdown",
            "prompt": [{"content": "Using the numbers [44, 19, 35], make 98.", "role": "user"}],
            "ability": "math",
            "reward_model": {"ground_truth": {"numbers": [44, 19, 35], "target": 98}, "style": "rule"},
            "extra_info": {"index": 0, "split": "train"},
        },
        DataConfig(),
        ("Using the numbers [44, 19, 35], make 98.", "countdown", '{"numbers": [44, 19, 35], "target": 98}'),
    ),
    "Search-R1": (
        {
            "id": "train_0",
            "question": "total number of death row inmates in the us?",
            "golden_answers": ["2,718"],
            "data_source": "nq",
            "prompt": [{"role": "user", "content": "Question: total number of death row inmates in the us?\n"}],
            "ability": "fact-reasoning",
            "reward_model": {"ground_truth": {"target": ["2,718"]}, "style": "rule"},
            "extra_info": {"index": 0, "split": "train"},
            "metadata": None,
        },
        DataConfig(),
        ("Question: total number of death row inmates in the us?\n", "nq", '{"target": ["2,718"]}'),
    ),
    "OpenRLHF": (
        {"input": "What is 6 times 7?", "label": "42"},
        DataConfig(prompt_key="input", label_key="label", default_source="math500"),
        ("What is 6 times 7?", "math500", "42"),
    ),
    "GSM8K of verl": (
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"content": "Tom has 3 boxes of 24 eggs. How many eggs?", "role": "user"}],
            "ability": "math",
            "reward_model": {"ground_truth": "72", "style": "rule"},
            "extra_info": {
                "answer": "3 * 24 = <<3*24=72>>72\n#### 72",
                "index": 0,
                "question": "Tom",
                "split": "train",
            },
        },
        DataConfig(),
        ("Tom has 3 boxes of 24 eggs. How many eggs?", "openai/gsm8k", "72"),
    ),
}
