"""Make a tiny Qwen3 model directory with random weights: python tools/make_tiny_model.py --out DIR"""

import argparse

from megarl_lab.recipes.tiny_model import TinyModelConfig, make_tiny_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    default = TinyModelConfig()
    parser.add_argument("--out", required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    for name in (
        "hidden_size",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "head_dim",
        "ffn_size",
        "max_positions",
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name), help=" ")
    parser.add_argument("--rope-theta", type=float, default=default.rope_theta, help=" ")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=default.dtype, help="of the weights")
    parser.add_argument("--untied", dest="tied", action="store_false", help="give the output its own embedding")
    options = vars(parser.parse_args())
    out, seed = options.pop("out"), options.pop("seed")
    try:
        num_parameters = make_tiny_model(out, TinyModelConfig(**options), seed=seed)
    except ValueError as error:
        parser.error(str(error))
    print(f"{out}: {num_parameters} parameters")


if __name__ == "__main__":
    main()
