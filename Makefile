# Everything one does with this project. `make` prints the menu.
PYTHON ?= python3
CONFIG ?= speed94
NUM_GPUS ?= 0
ARGS ?=
TARGET := $(patsubst speed%,--target=0.%,$(filter speed93 speed94 speed95 speed96,$(CONFIG)))
BIN := .venv/bin
NVIDIA := $(wildcard /proc/driver/nvidia/version /usr/lib/wsl/lib/libcuda.so.1)
comma := ,
EXTRAS := $(if $(NVIDIA),dev$(comma)gpu,dev)

.PHONY: help setup train test test-long test-browser faults faults-long compare lint format evaluate predict export bench speedrun tensorboard clean
.DEFAULT_GOAL := help

help:  ## this menu
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */|/' | awk -F'|' '{printf "  make %-13s %s\n", $$1, $$2}'
	@echo
	@echo "  make train CONFIG=resnet56 NUM_GPUS=4 ARGS='--seed=3'   any flag of scripts/train.py --help"

setup: .venv/ready  ## make .venv with all that is needed; other targets do so themselves

.venv/ready: setup.cfg pyproject.toml
	@echo "setting up .venv (a minute or two, once)"
	@$(BIN)/python -c 'import pip, sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -e '.[$(EXTRAS)]'
	@# byte code of what every start imports, and of no more: half of a start's time, where Python may not write it itself
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import keras.src.backend.tensorflow, tensorflow, tensorflow_datasets, tensorboard.main' 2>/dev/null || true
	@touch $@

train: .venv/ready  ## train CONFIG (speed94) on NUM_GPUS towers; CIFAR-10 if it can be had, else a synthetic set
	@$(BIN)/python scripts/train.py --dataset=auto --flagfile=configs/$(CONFIG).cfg --num_gpus=$(NUM_GPUS) $(ARGS)

evaluate: .venv/ready  ## score a checkpoint of a run: ARGS='--train_dir=runs/speed94-seed0 --tta=2'
	@$(BIN)/python scripts/evaluate.py $(ARGS)

predict: .venv/ready  ## classify images: ARGS='--train_dir=runs/speed94-seed0 picture.jpg folder/'
	@$(BIN)/python scripts/predict.py $(ARGS)

export: .venv/ready  ## write a trained net for use elsewhere: ARGS='--train_dir=runs/speed94-seed0 --format=onnx'
	@$(BIN)/python scripts/export.py $(ARGS)

bench: .venv/ready  ## measure placements, strategies and numbers of towers for CONFIG, in 15 minutes
	@$(BIN)/python scripts/benchmark.py --dataset=auto --flagfile=configs/$(CONFIG).cfg $(ARGS)

speedrun: .venv/ready  ## time CONFIG (speed93 to speed96: to their accuracy) over five seeds, against this machine's limit and beside others' steps (hours)
	@$(BIN)/python scripts/speedrun.py --dataset=auto --flagfile=configs/$(CONFIG).cfg --num_gpus=$(NUM_GPUS) $(TARGET) $(ARGS)

tensorboard: .venv/ready  ## open runs/ at http://localhost:6006
	@$(BIN)/tensorboard --logdir runs --samples_per_plugin=images=50 $(ARGS)

test: .venv/ready  ## the tests, in ten minutes or less on two cores; with ARGS='-s -k ...' in one process
	@$(BIN)/python -m pytest -m 'not slow and not browser' $(or $(ARGS),-n 2 --dist worksteal)

test-long: .venv/ready  ## all tests, with whole recipes
	@$(BIN)/python -m pytest -m 'not browser' $(ARGS)

test-browser: .venv/ready  ## test TensorBoard and the report in a browser (chromium), with screenshots
	@$(BIN)/python -c 'import playwright' 2>/dev/null || $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -e '.[browser]'
	@$(BIN)/python -m pytest -m browser tests/browser $(ARGS)

faults: .venv/ready  ## inject faults: kill runs, lose power, damage files, fill disks (minutes; Linux, root, strace)
	@$(BIN)/python -m tests.faults $(ARGS)

faults-long: .venv/ready  ## as many trials as docs/faults.md (two hours); can be interrupted and repeated
	@$(BIN)/python -m tests.faults --long $(ARGS)

compare: .venv/ready  ## train small runs at REV and at HEAD: are losses and weights the same to the bit?
	@$(BIN)/python scripts/compare_revisions.py $(REV) $(ARGS)

lint: .venv/ready  ## check style (ruff)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

format: .venv/ready  ## fix style (ruff)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:  ## remove .venv and caches, never runs/
	rm -rf .venv .pytest_cache .ruff_cache build dist *.egg-info
	find cifar_towers tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
