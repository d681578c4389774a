# make venv    .venv with the package, its tools and, beside a GPU, CuPy; then what works here,
#              unless DOCTOR=later: make doctor
# make train   trains ResNet-50 on photographs, plain and in half the memory it needs: three
#              minutes; options in TRAIN_ARGS
# make test    lint, then the tests, with and without a GPU (on an emulated one, where it can be
#              built); options for pytest in PYTEST_ARGS, number of processes in TEST_JOBS;
#              CHECKED=yes where lint and site have just been made
# make quick   lint, the tests that need no Chainer, and the bits of every small network: while
#              you work
# make test-all  the same with all cases of every matrix (tests/support/matrices.py), every
#              command of README and guide, those that take minutes, too, more orders of work,
#              networks and drawn cases on the GPU, also without cuDNN, where only its
#              deterministic algorithms give the same bits, and with CuPy 13; and the wheels
# make lint    ruff, mypy, the order of buildings and rooms (setup.cfg, importlinter)
# make changelog   moves the news of docs/news into CHANGELOG.md
# make docs    writes the pages of docs/ that follow from result files and code, then the site
# make figures  the same, with what commands predict in them, and the README's picture: minutes
# make site    builds the documentation site in .site/html, without a warning
# make release-check  builds sdist and wheel, checks them, and tries the wheel in empty
#              environments of RELEASE_PYTHONS, outside of the source tree
# make cuda-emulator   builds CuPy without a GPU in .cuda-emulator (docs/internals/cuda_emulator.md)
# make test-cuda       runs the tests that need a GPU on the emulator
#              both: CUPY=13 for CuPy 13.6 with cuDNN 8.9, the pair of chainer and cupy-cuda12x
# make try-cudnn       compares what calls cuDNN 9 with its real libraries and headers, for CUDA
#              12 and 13, on a machine without a GPU: fetches 1.2 GB into .cudnn
# make gpu-wheels      collects in .gpu-wheels what a GPU machine without network lacks, for
#                      benchmarks/gpu/run.sh; GPU_PYTHON is the Python version of that machine
# make fuzz    trains drawn networks under drawn plans and compares them with plain Chainer;
#              FUZZ_SEED, FUZZ_MINUTES, FUZZ_ARGS; with FUZZ_DEVICE=cuda on a GPU or, where there
#              is none, on the emulator if it is built
# make clean   removes .venv and what the tools left behind

PYTHON ?= python3
TRAIN_ARGS ?=
PYTEST_ARGS ?=
TEST_JOBS ?= 2
FUZZ_SEED ?= 0
FUZZ_MINUTES ?= 10
FUZZ_ARGS ?=
RELEASE_PYTHONS ?= 3.10 3.13

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# Chainer is built from source, and its build needs setuptools < 81. Older
# versions of pip hand PIP_CONSTRAINT to that build, newer ones PIP_BUILD_CONSTRAINT. pip
# splits both at blanks: a relative name works in a folder with a blank in its path too.
PIP = PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip
# Python compiles a module when it first imports it; to compile all takes longer.
PIP_INSTALL = $(PIP) install --quiet --no-compile

# CuPy for the driver's CUDA version, where a GPU answers and no CuPy is installed.
GPU_EXTRA = extra=; \
	if nvidia-smi >/dev/null 2>&1 && \
	! $(BIN)/python -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("cupy"))'; \
	then \
		cuda=$$(nvidia-smi | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9]*\).*/\1/p' | head -n 1); \
		if [ "$${cuda:-0}" -ge 13 ]; then extra=,cuda13; else extra=,cuda12; fi; \
	fi

CUPY ?= 14
EMULATOR := .cuda-emulator/$(CUPY)
EMULATED = $(BIN)/python tests/cuda_emulator/run.py $(EMULATOR)
PYTEST = $(BIN)/python -m pytest -q -n $(TEST_JOBS) --dist worksteal
# In front of a command that needs a GPU, where there is none but the emulator.
ON_EMULATOR = $(if $(filter cuda,$(FUZZ_DEVICE)),$(shell nvidia-smi >/dev/null 2>&1 || \
	test ! -d $(EMULATOR) || echo $(EMULATED)))

# Chainer's wheel is for any Python. Of the others, what does not run everywhere is for
# the Python of the GPU machine.
WHEELS := .gpu-wheels
GPU_PYTHON ?= 3.12
GPU_NEEDS = six protobuf filelock typing_extensions \
	pytest pluggy iniconfig packaging pygments hypothesis sortedcontainers

# Rooms that need no Chainer, and every network of tests/support/zoo.py bit by bit.
QUICK = ground_tests records_tests simulation_tests planners_tests/test_conformance.py \
	pools_tests reporting_tests session_tests/test_zoo.py test_public.py test_rooms.py

SITE := .site

# Else every process compiles the package, and every process of pytest all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: train test quick test-all test-cuda cuda-emulator gpu-wheels lint changelog docs \
	figures site fuzz venv doctor clean release-check try-cuda-emulator try-cudnn
.DELETE_ON_ERROR:

train: venv
	$(BIN)/python examples/imagenet/demo.py $(TRAIN_ARGS)

test: $(if $(CHECKED),venv,lint site)
	$(PYTEST) $(PYTEST_ARGS)
	@$(BIN)/python tests/cuda_emulator/build.py $(EMULATOR) $(CUPY); case $$? in \
		0) $(MAKE) --no-print-directory test-cuda;; \
		77) echo "SKIPPED: the tests that need a GPU; the reason is above";; \
		*) exit 1;; \
	esac

quick: lint
	$(PYTEST) $(addprefix tests/,$(QUICK)) $(PYTEST_ARGS)

test-all:
	$(MAKE) --no-print-directory release-check
	HYBRIDMEM_MATRICES=full $(MAKE) --no-print-directory test
	HYBRIDMEM_MATRICES=full EMU_MODE=lazy $(MAKE) --no-print-directory test-cuda
	$(MAKE) --no-print-directory fuzz FUZZ_DEVICE=cuda
	EMU_ATOMICS=1 $(MAKE) --no-print-directory test-cuda
	CHAINER_CUDNN=0 $(MAKE) --no-print-directory test-cuda
	$(MAKE) --no-print-directory test-cuda CUPY=13

# 5: PYTEST_ARGS leave no test over.
test-cuda: cuda-emulator
	$(EMULATED) $(PYTEST) -m gpu $(PYTEST_ARGS) || test $$? -eq 5

cuda-emulator: venv
	$(BIN)/python tests/cuda_emulator/build.py $(EMULATOR) $(CUPY)

# 77: something is lacking that it cannot make. It needs none of the packages of the venv.
try-cuda-emulator: $(BIN)/python
	@$(BIN)/python tests/cuda_emulator/build.py $(EMULATOR) $(CUPY) || test $$? -eq 77

try-cudnn: venv
	for cuda in 12 13; do \
		test -d .cudnn/$$cuda/nvidia || $(PIP) install --quiet --no-deps \
			--target .cudnn/$$cuda "nvidia-cudnn-cu$$cuda==9.*" || exit 1; \
		CUDNN_PACKAGE=.cudnn/$$cuda $(PYTEST) -n 0 \
			tests/cudnn_tests/test_real_library.py || exit 1; \
	done

gpu-wheels: venv
	rm -rf $(WHEELS)
	$(PIP) wheel --quiet --no-deps --wheel-dir $(WHEELS) chainer==7.8.1
	$(PIP) download --quiet --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) \
		--implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
		--platform manylinux2014_x86_64 --dest $(WHEELS) $(GPU_NEEDS)
	git rev-parse --short HEAD >$(WHEELS)/commit.txt
	git status --porcelain -- chainer_hybridmem >>$(WHEELS)/commit.txt
	du -sh $(WHEELS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

release-check: venv
	$(BIN)/python tests/release/check.py $(RELEASE_PYTHONS)

changelog: venv
	$(BIN)/python docs/make_changelog.py

docs: venv
	$(BIN)/python -m benchmarks render
	$(BIN)/python docs/make_reference.py
	$(MAKE) --no-print-directory site

figures: venv
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python docs/make_console.py
	$(MAKE) --no-print-directory docs

site: venv
	$(BIN)/sphinx-build -W --keep-going -q -E -c docs . $(SITE)/html
	@echo "$(SITE)/html/index.html"

fuzz: venv
	$(ON_EMULATOR) $(BIN)/python -m tests.fuzz --seed $(FUZZ_SEED) --minutes $(FUZZ_MINUTES) $(FUZZ_ARGS)

venv: $(STAMP)

$(STAMP): $(BIN)/python setup.cfg setup.py pyproject.toml constraints.txt
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || "$(PYTHON)" -m venv --clear $(VENV)
	@$(GPU_EXTRA); set -x; $(PIP_INSTALL) --editable ".[test,docs,examples,plot$$extra]"
	$(if $(filter later,$(DOCTOR)),,$(BIN)/hybridmem doctor)
	@touch $@

$(BIN)/python:
	@command -v "$(PYTHON)" >/dev/null || { \
		echo "$(PYTHON) was not found: install Python 3.10 or newer, or name one: make venv PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "$$("$(PYTHON)" --version) is too old, Python 3.10 or newer is needed: make venv PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	"$(PYTHON)" -m venv --clear $(VENV)

doctor: venv
	$(BIN)/hybridmem doctor

clean:
	rm -rf $(VENV) .cuda-emulator $(WHEELS) $(SITE) build dist *.egg-info .coverage
	rm -rf .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
