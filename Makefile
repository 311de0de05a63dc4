# Everything one does with this project. `make` prints the menu.
PYTHON ?= python3
CONFIG ?= speed94
NUM_GPUS ?= 0
ARGS ?=
BIN := .venv/bin
NVIDIA := $(wildcard /proc/driver/nvidia/version /usr/lib/wsl/lib/libcuda.so.1)
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt -e

# without byte code every start takes twice as long; the first start writes it
unexport PYTHONDONTWRITEBYTECODE

# a flag overrides the recipe wherever it stands, and smoke has data of its own
RECIPE := --recipe=$(CONFIG) $(if $(filter smoke,$(CONFIG)),,--dataset=auto)

.PHONY: help setup train runs evaluate predict export tensorboard bench
.PHONY: test test-quick test-long test-browser test-gpu lint format docs lock compare faults faults-long clean
.DEFAULT_GOAL := help

help:
	@awk -F': .*## ' '/^##@ / {print "\n" substr($$0, 5)} /^[a-z-]+: .*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "ARGS takes any flag of a program, which --helpfull lists:"
	@echo "  make train CONFIG=resnet56 NUM_GPUS=4 ARGS='--seed=3'"
	@echo "When a program fails, make exits with 2; the program's exit code is the number after Error."

##@ Use

setup: .venv/ready  ## install what the programs need into .venv; every other target does so itself

.venv/ready: setup.cfg pyproject.toml constraints.txt
	@echo "setting up .venv (a minute or two, once)"
	@$(BIN)/python -c 'import pip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || $(PYTHON) -m venv --clear .venv
	$(INSTALL) '.$(if $(NVIDIA),[gpu])'
	@touch $@

# what only tests, exports and API pages need is installed when it is needed: it takes half as long again
.venv/dev-ready .venv/export-ready .venv/browser-ready .venv/docs-ready: .venv/%-ready: .venv/ready
	$(INSTALL) '.[$*]'
	@touch $@

train: .venv/ready  ## train CONFIG (speed94) on NUM_GPUS towers, on CIFAR-10, or offline on synthetic images
	@$(BIN)/cifar-towers train $(RECIPE) --num_gpus=$(NUM_GPUS) $(ARGS)

runs: .venv/ready  ## list runs and what they reached: ARGS="'speed94*'"
	@$(BIN)/cifar-towers runs $(ARGS)

evaluate: .venv/ready  ## score a checkpoint of a run: ARGS='--train_dir=runs/speed94-seed0 --tta'
	@$(BIN)/cifar-towers evaluate $(ARGS)

predict: .venv/ready  ## classify images: ARGS='--train_dir=runs/speed94-seed0 picture.jpg folder/'
	@$(BIN)/cifar-towers predict $(ARGS)

# these two formats need more packages
EXPORT_READY := $(if $(filter %onnx %litert,$(ARGS)),.venv/export-ready,.venv/ready)

export: $(EXPORT_READY)  ## write a model for use elsewhere: ARGS='--train_dir=runs/... --format=onnx'
	@$(BIN)/cifar-towers export $(ARGS)

tensorboard: .venv/ready  ## open runs/ at http://localhost:6006
	@$(BIN)/tensorboard --logdir runs --samples_per_plugin=images=50 $(ARGS)

##@ Measure

bench: .venv/ready  ## compare placements, strategies and numbers of towers for CONFIG, a quarter of an hour
	@$(BIN)/python scripts/benchmark.py towers $(RECIPE) $(ARGS)

##@ Develop

# what compiles no net
QUICK = $(addprefix tests/,config data reporting test_architecture.py test_files.py test_signals.py \
  towers/test_gradients.py towers/test_sharding.py runs/test_checkpoint.py runs/test_directory.py runs/test_table.py)

test-quick: .venv/dev-ready  ## run the tests that compile no net, in half a minute
	@$(MAKE) --no-print-directory test ARGS="-n 2 --dist worksteal $(QUICK) $(ARGS)"

test: .venv/dev-ready  ## run the tests, four minutes on two cores (six with AVX2 alone); some: ARGS='-s -k ...'
	@$(BIN)/python -m pytest $(or $(ARGS),-n 2 --dist worksteal)

test-long: .venv/dev-ready  ## run the tests and the slow ones, with whole recipes
	@$(BIN)/python -m pytest -m 'not browser' $(or $(ARGS),-n 2 --dist worksteal)

test-browser: .venv/dev-ready .venv/browser-ready  ## test TensorBoard and the report in a browser (chromium), with screenshots
	@$(BIN)/python -m pytest -m browser tests/browser $(ARGS)

test-gpu: .venv/dev-ready  ## on GPUs: some tests, make bench and speed94; adds a row to docs/gpus.md
	@$(BIN)/python -m tests.on_gpus $(ARGS)

lint: .venv/dev-ready  ## check style and docstrings (ruff) and types (mypy)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

format: .venv/dev-ready  ## fix style (ruff)
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .
	@$(BIN)/ruff check .

docs: .venv/docs-ready  ## write docs/settings.md, and the pages of the Python interface from its docstrings to build/api/
	@$(BIN)/python scripts/settings_page.py > docs/settings.md
	@# a module that has the name of a public function gets no page
	@PDOC_ALLOW_EXEC=1 $(BIN)/python -m pdoc --docformat google --output-directory build/api \
		cifar_towers cifar_towers.towers '!cifar_towers.towers.make_parallel'
	@echo "written to docs/settings.md and build/api/; open build/api/index.html"

lock: .venv/dev-ready .venv/browser-ready .venv/docs-ready  ## install the newest versions and write constraints.txt; run make clean first
	$(BIN)/python -m pip install --quiet --upgrade --upgrade-strategy eager -e '.[dev,browser,docs]'
	@sed -i '/^[^#]/d' constraints.txt
	$(BIN)/python -m pip freeze --exclude-editable >> constraints.txt

compare: .venv/ready  ## train small runs at REV and at HEAD, and compare losses and weights
	@$(BIN)/python scripts/compare.py $(REV) $(ARGS)

faults: .venv/dev-ready  ## inject faults: kill runs, damage files, fill disks (Linux, strace; some need root)
	@$(BIN)/python -m tests.faults $(ARGS)

faults-long: .venv/dev-ready  ## many more trials (hours); the same command resumes
	@$(BIN)/python -m tests.faults --long $(ARGS)

clean:  ## remove .venv and caches, never runs/
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache build dist *.egg-info
	find cifar_towers tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
