"""Quantize a plain model in memory and use it: python examples/patch_model.py [MODEL] [nf4|fp4|w8_s8]"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import nf4linear

path = sys.argv[1] if len(sys.argv) > 1 else "demo/smollm2"
format = sys.argv[2] if len(sys.argv) > 2 else "nf4"

model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
tokenizer = AutoTokenizer.from_pretrained(path)
model = nf4linear.patch_model(model, format=format)
print(nf4linear.report(model))

inputs = tokenizer("The capital of France is", return_tensors="pt").to(model.device)
tokens = model.generate(**inputs, max_new_tokens=20, do_sample=False)
print(tokenizer.decode(tokens[0]))
