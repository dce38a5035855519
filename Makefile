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

TESTS_TPU := tests/xla tests/contracts tests/devices -k 'xla or tpu_info' -o cache_dir=$(VENV_TPU)/.pytest_cache

BUILD := build/notebooks
BIN := $(VENV)/bin
BIN_TPU := $(VENV_TPU)/bin
# Each step says what it installs; pip itself speaks only of what goes wrong.
PIP := -m pip --disable-pip-version-check install --quiet

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-tpu lint bench bench-tpu clean

help: ## list the commands
	@echo "make demo    execute notebooks/01_first_run.ipynb on two processes, and say where the result is"
	@echo "make test    check the code (ruff, mypy), then run every test but the benchmarks"
	@echo "make lint    check the code only"
	@echo "make bench   measure the speeds that README.md gives"
	@echo "make clean   remove the virtual environments and what was built"
	@echo
	@echo "make test-tpu    run the tests of torch_xla on its CPU backend, in an environment of their own (Linux on x86_64, gcc, 6 GiB)"
	@echo "make bench-tpu   measure what computes through torch_xla, there too"
	@echo
	@echo "Variables: PYTHON=$(PYTHON)  VENV=$(VENV)  TORCH=$(TORCH)  TORCH_INDEX=$(TORCH_INDEX)"
	@echo "           PYTHON_TPU=$(PYTHON_TPU)  VENV_TPU=$(VENV_TPU)"

demo: $(VENV)/.demo
	@mkdir -p $(BUILD)
	@echo "== executing notebooks/01_first_run.ipynb on two processes"
	$(BIN)/python -m nbconvert --to notebook --execute notebooks/01_first_run.ipynb --output-dir $(BUILD) --log-level ERROR
	$(BIN)/python -m nbconvert --to html $(BUILD)/01_first_run.ipynb --output-dir $(BUILD) --log-level ERROR \
	  --CoalesceStreamsPreprocessor.enabled=True
	@echo
	@echo "The executed notebook:  $(CURDIR)/$(BUILD)/01_first_run.ipynb"
	@echo "The same as a page:     $(CURDIR)/$(BUILD)/01_first_run.html"

# What fails is run once more by itself: kernels and ranks are real processes, which a busy machine can starve for seconds. What is
# broken fails again.
test: lint
	$(BIN)/python -m pytest || $(BIN)/python -m pytest --last-failed --last-failed-no-failures none

# The tests set PJRT_DEVICE themselves. They are those that need torch_xla or tpu-info, wherever they stand.
test-tpu: $(VENV_TPU)/.test-tpu
	$(BIN_TPU)/python -m pytest $(TESTS_TPU) || $(BIN_TPU)/python -m pytest $(TESTS_TPU) --last-failed --last-failed-no-failures none

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.test
	@for bench in tests/bench/bench_*.py; do \
	  echo "== $$bench"; PYTHONPATH=. $(BIN)/python $$bench || exit 1; echo; done

bench-tpu: $(VENV_TPU)/.test-tpu
	PYTHONPATH=. $(BIN_TPU)/python tests/bench/bench_tpu.py

clean: ## only what the commands above made
	rm -rf $(VENV) $(VENV_TPU) build .mypy_cache .ruff_cache .pytest_cache

# One stamp for each extra: newer than pyproject.toml means installed.
$(VENV)/.demo $(VENV)/.test: $(VENV)/.%: $(VENV)/.torch pyproject.toml
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

$(VENV_TPU)/.test-tpu: $(VENV_TPU)/.made pyproject.toml
	@echo "== installing this package, and what its extra 'test-tpu' names in pyproject.toml"
	$(BIN_TPU)/python $(PIP) --editable '.[test-tpu]'
	@touch $@

# Made as a whole, and again as a whole where that was interrupted.
$(VENV_TPU)/.made: .ci/make_tpu_environment.py .ci/stand_in_for_cuda.py .ci/install_cpu_torch.py
	@echo "== making the virtual environment $(VENV_TPU) with torch_xla: two or three minutes"
	@$(PYTHON_TPU) .ci/make_tpu_environment.py $(VENV_TPU) '$(TORCH_INDEX)'
	@touch $@

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "Python 3.10 or newer is needed, and $(PYTHON) is not: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv module. On Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	@echo "== making the virtual environment $(VENV)"
	$(PYTHON) -m venv $(VENV)
	@touch $@
