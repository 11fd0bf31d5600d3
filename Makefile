# Two commands do everything: `make demo` and `make test`. Both start from a bare clone.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup demo check test docs docs-test bench results release-check experiments experiments-small torture mutants clean
help:
	@echo "make demo    set up, cook real soups on embedded data, show table and report"
	@echo "make test    set up, run the checks and all tests"
	@echo "make check   format, lint, types, layering"
	@echo "make docs    the documentation site in build/site; a broken link fails it"
	@echo "make docs-test  opens every page of the site, and a report, in Chromium"
	@echo "make release-check  wheel and sdist, built, installed into empty environments and tried"
	@echo "make bench   CPU benchmarks, about four minutes"
	@echo "make results docs/results.md and its figures from experiments/results/"
	@echo "make experiments         all three zoos and docs/results.md, on a GPU; JOBS=4 runs at once"
	@echo "make experiments-small   a real zoo on two CPU cores, under 20 minutes, and whether the default wins"
	@echo "make torture kills, full disks, a soak, mutated files: half an hour; a sample is in make test"
	@echo "make mutants do the tests notice small mistakes in algebra, validation and saving? (mutmut; an hour or more)"
	@echo "make clean   remove the environment"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/stockpot demo --out demo

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

# Two processes of one thread each: most tests are too small for threads to pay.
test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

docs: setup
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Needs Chromium (Debian: apt-get install chromium). The report is that of the demo, made once.
docs-test: docs
	test -f build/demo/run/report.html || $(BIN)/stockpot demo --out build/demo
	$(BIN)/python website/browse.py build/site --report build/demo/run/report.html --shots build/screenshots

# Every Python from 3.10 to 3.13 that is there; each gets an environment of its own with torch: some minutes.
release-check: setup
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[release]'
	$(BIN)/python release/check.py

bench: setup
	$(BIN)/python benchmarks/cpu_step.py
	$(BIN)/python benchmarks/build_uniform.py --repeat 1
	$(BIN)/python benchmarks/ranks.py

results: setup
	$(BIN)/python experiments/results.py

# Everything behind docs/results.md: data, pre-training, pools, every study. Called again, it goes on where it was.
ZOOS := cifar10-efficientnet fashion-vit imdb-minilm
JOBS ?= 4
experiments: setup
	set -e; for zoo in $(ZOOS); do $(BIN)/python experiments/fetch.py $$zoo; done
	$(BIN)/python experiments/study.py $(ZOOS) --pools --jobs $(JOBS)
	set -e; for zoo in $(ZOOS); do $(BIN)/python experiments/collect.py $$zoo; done
	$(BIN)/python experiments/results.py

# The CIFAR-10 zoo in small: fine-tune eight models, cook four soups, check which is best. Downloads 156 MB once.
experiments-small: setup
	test -f experiments/data/cifar10-efficientnet/pretrained.safetensors || $(BIN)/python experiments/fetch.py cifar10-efficientnet
	export OMP_NUM_THREADS=1; $(BIN)/stockpot finetune experiments/small/recipe.yaml & $(BIN)/stockpot finetune experiments/small/recipe.yaml
	OMP_NUM_THREADS=1 $(BIN)/stockpot compare experiments/small/recipe.yaml
	$(BIN)/python experiments/small/check.py experiments/data/small/run

torture: setup
	cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m torture.kills
	cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m torture.rank_kills
	cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m torture.rank_laws
	cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m torture.full_disk
	cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m torture.soak
	cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m torture.mutated_files --count 20000
	cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m torture.mutated_data --count 5000
	cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m torture.mutated_adapters --count 5000
	cd tests && OMP_NUM_THREADS=1 ../$(BIN)/python -m torture.mutated_runs --count 5000

# Which files and tests: [tool.mutmut] in pyproject.toml. Survivors: `mutmut results`, one of them: `mutmut show NAME`.
mutants: setup
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[mutation]'
	OMP_NUM_THREADS=1 $(BIN)/mutmut run --max-children 2
	$(BIN)/mutmut results

clean:
	rm -rf $(VENV)
