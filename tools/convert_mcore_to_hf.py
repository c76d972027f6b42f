"""Convert a torch_dist checkpoint to a Hugging Face directory: python tools/convert_mcore_to_hf.py DIR --out MODEL"""

from megarl.convert.cli import script

if __name__ == "__main__":
    script("mcore-to-hf")
