"""Pack a checkpoint once, then load it like any other: python examples/pack_and_load.py [MODEL] [FOLDER]

The same as `nf4linear pack MODEL FOLDER` and a from_pretrained.
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import nf4linear
from nf4linear.checkpoint import pack_checkpoint

source = sys.argv[1] if len(sys.argv) > 1 else "demo/smollm2-bnb-nf4"
folder = sys.argv[2] if len(sys.argv) > 2 else "demo/smollm2-nf4-example"

if Path(folder, "config.json").is_file():
    print(f"{folder} is there already and is loaded as it is; delete it to pack again")
else:
    pack_checkpoint(source, folder)

# Importing nf4linear is what makes transformers read the format.
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
print(f"nf4linear {nf4linear.__version__}: {model.get_memory_footprint() / 1e6:.1f} MB, first layer:")
print(next(module for module in model.modules() if isinstance(module, nf4linear.NF4Linear)))

inputs = tokenizer("The capital of France is", return_tensors="pt").to(model.device)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=20, do_sample=False)[0]))
