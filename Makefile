# The commands of this project. `make` alone lists them.
#
# They need Python 3.10 or newer with its venv module, and make. Everything else goes into the virtual environment $(VENV),
# which is made once, and again whenever pyproject.toml changes.

PYTHON ?= python3
VENV ?= .venv

# torch is installed first, by itself, and from PyTorch's index of CPU builds beside the usual one: the tests need no GPU, and a
# CUDA build would bring gigabytes along. `make TORCH=` leaves torch to pip (take that on a machine with GPUs); another version
# is asked for with TORCH="torch==2.9.1".
TORCH ?= torch==2.13.0
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

# torch_xla loads beside one older version of torch only, so what computes through it has an environment of its own.
VENV_TPU ?= .venv-tpu
PYTHON_TPU ?= $(PYTHON)

# So have DeepSpeed and Megatron-LM, which is built for the torch beside it, and takes minutes. `make test-scale SELECTION=slow` runs what
# takes four ranks, or compiles operators.
VENV_SCALE ?= .venv-scale

# What needs an NVIDIA GPU has an environment of its own, too: pip takes the torch that is built for CUDA there. On a machine
# whose Python has torch and pytest already, or that can reach no package index, GPU_PYTHON=python3 takes that Python as it is
# and makes no environment; tests that need a package which it lacks are skipped, and say which. Results go to GPU_RESULTS.
# Each target takes 15 minutes at most: test-gpu is stopped after 14 and is meant to take 5, bench-gpu divides GPU_SECONDS among
# its sections. The first `make` downloads torch besides.
VENV_GPU ?= .venv-gpu
GPU_PYTHON ?=
GPU_RESULTS ?= build/gpu
GPU_SECONDS ?= 600

# On a machine without a GPU, torch's build for CUDA computes on pretended ones, in an environment of its own: NVIDIA's libraries are those
# of .ci/pretended_gpu/, operators compute on the CPU. Two GPUs first, then four for strategies that need them.
VENV_PRETENDED_GPU ?= .venv-pretended-gpu

GPU_READY := $(if $(GPU_PYTHON),,$(VENV)/.test-gpu)
GPU_RUNS := $(or $(GPU_PYTHON),$(VENV)/bin/python)
# The tests that are marked so, wherever they stand: files without such a test are not even imported.
TESTS_GPU = $(shell grep -rl --include='test_*.py' 'pytest\.mark\.gpu' tests | grep -v '^tests/gpu/')

# Colab and Kaggle have older packages around a notebook than anybody else, and `make test-oldest` runs the tests of notebooks on them: in an
# environment that takes everything else from $(VENV).
VENV_OLDEST ?= .venv-oldest
OLDEST := ipython==7.34.0 ipykernel==6.17.1 ipywidgets==7.7.1 traitlets==5.7.1 jupyter_client==7.4.9 \
  backcall decorator entrypoints ipython-genutils nest-asyncio pickleshare
SITE := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

# What builds the documentation and the distributions needs no torch, and has an environment of its own.
VENV_DOCS ?= .venv-docs
# The notebooks that `make docs` executes before it shows them; `make docs NOTEBOOKS=` executes none, and needs no torch either.
NOTEBOOKS ?= $(notdir $(wildcard notebooks/*.ipynb))

# What starts kernels, browsers and ranks of every engine takes half of the time.
SELECTION := not slow
OF_PROCESSES := $(addprefix tests/,browser cli contracts kernel launching notebooks)
TESTS_SCALE := tests/scale -m '$(SELECTION) and not gpu' -o cache_dir=$(VENV_SCALE)/.pytest_cache
TESTS_TPU := tests/xla tests/contracts tests/devices -k 'xla or tpu_info' -o cache_dir=$(VENV_TPU)/.pytest_cache

# How often `make chaos` makes each fault happen.
ROUNDS ?= 20

BUILD := build/notebooks
BIN := $(VENV)/bin
BIN_TPU := $(VENV_TPU)/bin
BIN_SCALE := $(VENV_SCALE)/bin
BIN_OLDEST := $(VENV_OLDEST)/bin
BIN_PRETENDED_GPU := $(VENV_PRETENDED_GPU)/bin
BIN_DOCS := $(VENV_DOCS)/bin
TRIAL := build/trial
# Each step says what it installs; pip itself speaks only of what goes wrong.
PIP := -m pip --disable-pip-version-check install --quiet

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-of-processes test-of-the-rest test-nodes test-gpu test-gpu-here test-pretended-gpu test-tpu test-scale test-oldest lint layout bench chaos bench-gpu bench-gpu-here bench-tpu docs pictures dist clean

help: ## list the commands
	@echo "make demo    execute notebooks/01_first_run.ipynb on two processes, and say where the result is"
	@echo "make test    check the code (ruff, mypy), then run the tests that take 6 minutes together on two cores"
	@echo "make test-all    run the tests that make test leaves out: whole kernels, browsers, notebooks and faults"
	@echo "make test-nodes  run the tests that make hosts out of network namespaces, and a SLURM of its own, where this machine allows it"
	@echo "make lint    check the code only"
	@echo "make bench   measure the speeds that docs/performance.md gives"
	@echo "make chaos   kill, suspend and flood runs $(ROUNDS) times each at random moments, and write docs/reliability.md: about an hour"
	@echo "make layout  print lines and files by folder, functions, classes, and imports in circles"
	@echo "make docs    build the documentation as a site in build/site; a warning is an error"
	@echo "make pictures    take the pictures of the panel in docs/pictures anew, from runs in JupyterLab and Chromium"
	@echo "make dist    build wheel and sdist in dist/, and run the first notebook from the wheel in a new environment"
	@echo "make clean   remove the virtual environments and what was built"
	@echo
	@echo "make test-gpu    run the tests that need NVIDIA GPUs, on one or on all that are here; elsewhere say so (15 minutes at most)"
	@echo "make test-pretended-gpu    run the same tests on a pretended GPU, in an environment of their own (Linux on x86_64, gcc, 4 GiB)"
	@echo "make bench-gpu   measure the speeds on them, and write them to $(GPU_RESULTS) (15 minutes at most)"
	@echo
	@echo "make test-tpu    run the tests of torch_xla on its CPU backend, in an environment of their own (Linux on x86_64, gcc, 6 GiB)"
	@echo "make bench-tpu   measure what computes through torch_xla, there too"
	@echo
	@echo "make test-oldest    run the tests of notebooks with the IPython, ipykernel and ipywidgets of Colab and Kaggle"
	@echo
	@echo "make test-scale    run the tests of DeepSpeed and Megatron-LM on the CPU, in an environment of their own (Linux, 4 GiB)"
	@echo
	@echo "Variables: PYTHON=$(PYTHON)  VENV=$(VENV)  TORCH=$(TORCH)  TORCH_INDEX=$(TORCH_INDEX)"
	@echo "           VENV_GPU=$(VENV_GPU)  GPU_PYTHON=$(GPU_PYTHON)  GPU_RESULTS=$(GPU_RESULTS)  GPU_SECONDS=$(GPU_SECONDS)"
	@echo "           PYTHON_TPU=$(PYTHON_TPU)  VENV_TPU=$(VENV_TPU)  VENV_DOCS=$(VENV_DOCS)"
	@echo "           VENV_SCALE=$(VENV_SCALE)  VENV_OLDEST=$(VENV_OLDEST)  VENV_PRETENDED_GPU=$(VENV_PRETENDED_GPU)"

demo: $(VENV)/.demo
	@mkdir -p $(BUILD)
	@echo "== executing notebooks/01_first_run.ipynb on two processes"
	$(BIN)/python -m nbconvert --to notebook --execute notebooks/01_first_run.ipynb --output-dir $(BUILD) --log-level ERROR
	$(BIN)/python -m nbconvert --to html $(BUILD)/01_first_run.ipynb --output-dir $(BUILD) --log-level ERROR \
	  --CoalesceStreamsPreprocessor.enabled=True
	@echo
	@echo "The executed notebook:  $(CURDIR)/$(BUILD)/01_first_run.ipynb"
	@echo "The same as a page:     $(CURDIR)/$(BUILD)/01_first_run.html"

# tests/conftest.py has the table of what `test` leaves to `test-all`.
# Both run two halves of the tests at the same time, since much of that waits; each half is printed when it is over.
TOGETHER = +@$(MAKE) --no-print-directory --jobs=3 --keep-going --output-sync=target

test: $(VENV)/.test
	$(TOGETHER) lint test-of-processes test-of-the-rest

test-all: $(VENV)/.test
	$(TOGETHER) SELECTION=slow OF_PROCESSES='$(filter-out tests/notebooks,$(OF_PROCESSES))' test-of-processes test-of-the-rest

test-of-processes: $(VENV)/.test
	$(BIN)/python -m pytest -m '$(SELECTION)' $(OF_PROCESSES)

test-of-the-rest: $(VENV)/.test
	$(BIN)/python -m pytest -m '$(SELECTION)' $(addprefix --ignore=,$(OF_PROCESSES) tests/nodes)

# Hosts are made by root alone; elsewhere the tests are skipped, and say so. They take five minutes, and are stopped after 25.
test-nodes: $(VENV)/.test
	@.ci/install_host_packages
	@$(BIN)/python .ci/install_extra.py ray || echo "Ray can't be installed here: its tests will be skipped"
	$(BIN)/python -m pytest tests/nodes --session-timeout=1500

# Where there is no GPU nothing is installed.
test-gpu bench-gpu:
	@code=0; $(or $(GPU_PYTHON),$(PYTHON)) .ci/find_gpu.py || code=$$?; \
	case $$code in \
	  0) $(MAKE) --no-print-directory $@-here $(if $(GPU_PYTHON),,VENV=$(VENV_GPU) TORCH=) ;; \
	  69) ;; \
	  *) exit $$code ;; \
	esac

test-gpu-here: $(GPU_READY)
	@mkdir -p $(GPU_RESULTS)
	$(GPU_RUNS) -m pytest tests/gpu $(TESTS_GPU) -m gpu --session-timeout=840 --durations=10 --junitxml=$(GPU_RESULTS)/tests.xml

test-pretended-gpu: $(VENV_PRETENDED_GPU)/.test-gpu
	@rm -rf /dev/shm/pretended_nccl_*
	for gpus in 2 4; do \
	  PRETENDED_GPUS=$$gpus LD_LIBRARY_PATH=$$(cat $(VENV_PRETENDED_GPU)/.libraries) $(BIN_PRETENDED_GPU)/python -m pytest -m gpu \
	    $$(test $$gpus = 2 && echo tests/gpu $(TESTS_GPU) || echo tests/gpu/test_strategies.py -k on_four_gpus) \
	    -o cache_dir=$(VENV_PRETENDED_GPU)/.pytest_cache --session-timeout=1500 || exit 1; done

bench-gpu-here: $(GPU_READY)
	PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(GPU_RUNS) tests/bench/bench_gpu.py --seconds $(GPU_SECONDS) \
	  --json $(GPU_RESULTS)/bench.json --markdown $(GPU_RESULTS)/bench.md

# The tests set PJRT_DEVICE themselves. They are those that need torch_xla or tpu-info, wherever they stand.
test-tpu: $(VENV_TPU)/.test-tpu
	$(BIN_TPU)/python -m pytest $(TESTS_TPU)

test-scale: $(VENV_SCALE)/.test-scale
	DS_ACCELERATOR=cpu $(BIN_SCALE)/python -m pytest $(TESTS_SCALE)

test-oldest: $(VENV_OLDEST)/.test
	$(BIN_OLDEST)/python -m pytest -m 'not slow' tests/kernel tests/notebook tests/script -o cache_dir=$(VENV_OLDEST)/.pytest_cache

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

layout:
	@$(PYTHON) -m tests.style.source_files

bench: $(VENV)/.test
	@for bench in tests/bench/bench_*.py; do \
	  echo "== $$bench"; PYTHONPATH=. $(BIN)/python $$bench || exit 1; echo; done

chaos: $(VENV)/.test
	PYTHONPATH=. $(BIN)/python -m tests.launching.detached.faults --rounds $(ROUNDS) --page docs/reliability.md

bench-tpu: $(VENV_TPU)/.test-tpu
	PYTHONPATH=. $(BIN_TPU)/python tests/bench/bench_tpu.py

# Without --quiet, under which MkDocs counts no warnings and --strict lets everything pass.
docs: $(VENV_DOCS)/.docs $(addprefix $(BUILD)/,$(NOTEBOOKS))
	$(BIN_DOCS)/python -m mkdocs build --strict --config-file docs/site/mkdocs.yml
	@echo "The documentation:  $(CURDIR)/build/site/index.html"

pictures: $(VENV)/.test
	PYTHONPATH=$(CURDIR) $(BIN)/python docs/site/pictures.py

$(BUILD)/%.ipynb: notebooks/%.ipynb | $(VENV)/.demo
	@mkdir -p $(BUILD)
	@echo "== executing $<"
	@$(BIN)/python -m nbconvert --to notebook --execute $< --output-dir $(BUILD) --log-level ERROR

# The notebook on the panel keeps the panel's report.
$(BUILD)/04_panel.ipynb: export ACCELERATE_NB_PANEL = html

dist: $(VENV_DOCS)/.dist
	rm -rf dist $(TRIAL)
	$(BIN_DOCS)/python -m build --outdir dist
	$(BIN_DOCS)/python -m twine check --strict dist/*
	@echo "== installing the wheel into a new virtual environment, $(TRIAL)/venv"
	$(PYTHON) -m venv $(TRIAL)/venv
ifneq ($(strip $(TORCH)),)
	@$(TRIAL)/venv/bin/python .ci/install_cpu_torch.py '$(TORCH)' '$(TORCH_INDEX)'
endif
	$(TRIAL)/venv/bin/python $(PIP) "$$(echo dist/*.whl)[demo]"
	cp notebooks/01_first_run.ipynb $(TRIAL)
	cd $(TRIAL) && PYTHONPATH= venv/bin/python -c 'import accelerate_nb, sys; assert accelerate_nb.__file__.startswith(sys.prefix)'
	cd $(TRIAL) && PYTHONPATH= venv/bin/python -m nbconvert --to notebook --execute --inplace 01_first_run.ipynb --log-level ERROR
	@echo "The notebook ran from the wheel. The distributions:"
	@ls -1 dist

clean: ## only what the commands above made
	rm -rf $(VENV) $(VENV_DOCS) $(VENV_GPU) $(VENV_PRETENDED_GPU) $(VENV_TPU) $(VENV_SCALE) $(VENV_OLDEST) build dist .mypy_cache .ruff_cache .pytest_cache

# One stamp for each extra: newer than pyproject.toml means installed.
$(VENV)/.demo $(VENV)/.test $(VENV)/.test-gpu: $(VENV)/.%: $(VENV)/.torch pyproject.toml
	@echo "== installing this package, what it needs, and what its extra '$*' names in pyproject.toml: a minute or two at first"
	$(BIN)/python $(PIP) --editable '.[$*]'
	@touch $@

# pip prefers 2.13.0+cpu to 2.13.0, so the index of CPU builds wins where it can be reached; where it can not, a GPU build is refused
# before any of it is fetched.
$(VENV)/.torch: $(VENV)/.made
ifneq ($(strip $(TORCH)),)
	@echo "== installing $(TORCH), a build for the CPU"
	@$(BIN)/python .ci/install_cpu_torch.py '$(TORCH)' '$(TORCH_INDEX)'
endif
	@touch $@

$(VENV_DOCS)/.docs $(VENV_DOCS)/.dist: $(VENV_DOCS)/.%: $(VENV_DOCS)/.made pyproject.toml
	@echo "== installing what the extra '$*' names in pyproject.toml"
	@$(BIN_DOCS)/python .ci/install_extra.py $*
	@touch $@

# IPython 7 has a package `tests` on the path, which would stand before ours.
$(VENV_OLDEST)/.test: $(VENV)/.test
	@echo "== making the virtual environment $(VENV_OLDEST) with the oldest packages of notebooks, over $(VENV)"
	$(PYTHON) -m venv --clear $(VENV_OLDEST)
	$(BIN_OLDEST)/python $(PIP) --no-deps $(OLDEST)
	@rm -r $$($(BIN_OLDEST)/python $(SITE))/IPython/extensions/tests
	@echo "import site; site.addsitedir('$$($(BIN)/python $(SITE))')" > $$($(BIN_OLDEST)/python $(SITE))/over.pth
	@touch $@

$(VENV_TPU)/.test-tpu: $(VENV_TPU)/.made pyproject.toml
	@echo "== installing this package, and what its extra 'test-tpu' names in pyproject.toml"
	$(BIN_TPU)/python $(PIP) --editable '.[test-tpu]'
	@touch $@

# Made as a whole, and again as a whole where that was interrupted.
$(VENV_TPU)/.made: .ci/make_tpu_environment.py .ci/stand_in_for_cuda.py .ci/install_cpu_torch.py
	@echo "== making the virtual environment $(VENV_TPU) with torch_xla: two or three minutes"
	@$(PYTHON_TPU) .ci/make_tpu_environment.py $(VENV_TPU) '$(TORCH_INDEX)'
	@touch $@

$(VENV_SCALE)/.test-scale: $(VENV_SCALE)/.made pyproject.toml
	@echo "== installing this package, and what its extra 'test-scale' names in pyproject.toml"
	$(BIN_SCALE)/python $(PIP) --editable '.[test-scale]'
	@touch $@

$(VENV_PRETENDED_GPU)/.test-gpu: $(VENV_PRETENDED_GPU)/.made pyproject.toml
	@echo "== installing this package, and what its extra 'test-gpu' names in pyproject.toml"
	$(BIN_PRETENDED_GPU)/python $(PIP) --editable '.[test-gpu]'
	@touch $@

$(VENV_PRETENDED_GPU)/.made: .ci/make_pretended_gpu_environment.py .ci/make_tpu_environment.py .ci/stand_in_for_cuda.py $(wildcard .ci/pretended_gpu/*)
	@echo "== making the virtual environment $(VENV_PRETENDED_GPU) with pretended GPUs: two or three minutes"
	@$(PYTHON) .ci/make_pretended_gpu_environment.py $(VENV_PRETENDED_GPU)
	@touch $@

$(VENV_SCALE)/.made: .ci/make_scale_environment.py .ci/make_tpu_environment.py .ci/install_cpu_torch.py
	@echo "== making the virtual environment $(VENV_SCALE) with DeepSpeed and Megatron-LM: two or three minutes"
	@$(PYTHON) .ci/make_scale_environment.py $(VENV_SCALE) '$(or $(TORCH),torch)' '$(TORCH_INDEX)'
	@touch $@

$(VENV)/.made $(VENV_DOCS)/.made: %/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "Python 3.10 or newer is needed, and $(PYTHON) is not: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module. On Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	@echo "== making the virtual environment $*"
	$(PYTHON) -m venv $*
	@touch $@
