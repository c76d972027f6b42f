"""Convert a Hugging Face directory to a torch_dist checkpoint: python tools/convert_hf_to_mcore.py MODEL --out DIR"""

from megarl.convert.cli import script

if __name__ == "__main__":
    script("hf-to-mcore")
