"""Perplexity of a model on a text: python examples/perplexity.py [MODEL] [FILE]"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import nf4linear  # noqa: F401 - makes transformers read packed checkpoints
from nf4linear.perplexity import perplexity

path = sys.argv[1] if len(sys.argv) > 1 else "demo/smollm2-nf4"
text = sys.argv[2] if len(sys.argv) > 2 else "examples/data/alice.txt"

model = AutoModelForCausalLM.from_pretrained(path).eval()
tokenizer = AutoTokenizer.from_pretrained(path)
token_ids = tokenizer(Path(text).read_text(encoding="utf-8"), return_tensors="pt", verbose=False).input_ids[0, :4096]
score = perplexity(model, token_ids, window=1024, stride=768)
print(f"perplexity {score.perplexity:.3f} ± {score.standard_error:.3f} over {score.tokens} tokens of {text}")
