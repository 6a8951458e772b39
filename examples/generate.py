"""Stream an answer and measure it: python examples/generate.py [MODEL] [PROMPT]"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import nf4linear  # noqa: F401 - makes transformers read packed checkpoints
from nf4linear.generation import Sampling, generate

path = sys.argv[1] if len(sys.argv) > 1 else "demo/smollm2-nf4"
prompt = sys.argv[2] if len(sys.argv) > 2 else "Why is the sky blue? Answer in one sentence."

model = AutoModelForCausalLM.from_pretrained(path)
tokenizer = AutoTokenizer.from_pretrained(path)
result = generate(
    model,
    tokenizer,
    prompt,
    max_new_tokens=100,
    sampling=Sampling(temperature=0.7, top_p=0.9, seed=0),
    write=lambda text: print(text, end="", flush=True),
)
speed = result.decode_tokens_per_second or 0.0
print(f"\n{result.new_tokens} tokens, the first after {result.prefill_seconds:.2f} s, then {speed:.1f} a second")
