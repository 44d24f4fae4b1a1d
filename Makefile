# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Set PYTHON to choose an interpreter (3.11 or newer).

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
RUN := demo-run
INTEROP := .venv-interop

.PHONY: demo test interop lint bench peers world clean

# A marker newer than what it was installed from, so that install runs once.
$(VENV)/installed: pyproject.toml constraints.txt kgshard/native/rows.c
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

# The main job, from triples to answers, on the bundled graph and two ranks.
demo: $(VENV)/installed
	$(BIN)/kgshard train world -o $(RUN) --overwrite --model complex --dim 100 --epochs 40 \
		--batch-size 128 --lr 0.5 --n3 0.05 --nproc-per-node 2
	$(BIN)/kgshard evaluate $(RUN) --split test --nproc-per-node 2
	$(BIN)/kgshard merge-shards $(RUN)
	$(BIN)/kgshard export $(RUN) --format numpy
	$(BIN)/kgshard index $(RUN) --for both
	@echo; echo "Which currency does Austria use? (this triple is in test, not in train)"
	$(BIN)/kgshard predict $(RUN) --head Austria --relation "uses currency" --known -k 5
	@echo; echo "Which countries are like Egypt?"
	$(BIN)/kgshard neighbors $(RUN) Egypt -k 5

test: $(VENV)/installed
	$(BIN)/python -m pytest -q

# Exports read back by PyKEEN, PyTorch-BigGraph and DGL-KE too, in an environment of their own. The last two
# are taken without what they depend on, which would not install beside a current torch; PyTorch-BigGraph needs
# the pkg_resources of an older setuptools.
$(INTEROP)/installed: pyproject.toml constraints.txt
	test -x $(INTEROP)/bin/python || $(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]" pykeen==1.11.1 attrs
	$(INTEROP)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps torchbiggraph==1.0.0 dglke==0.1.2 \
		"setuptools<81"
	touch $@

interop: $(INTEROP)/installed
	KGSHARD_PYKEEN_PYTHON=$(INTEROP)/bin/python $(INTEROP)/bin/python -m pytest -q -rs tests/tools/export \
		tests/tools/importers -m "nightly or not nightly"

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Claims of speed and memory; see docs/benchmarks.md.
bench: $(VENV)/installed
	$(BIN)/python benchmarks/merge.py
	$(BIN)/python benchmarks/export.py
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/exchange_dtype.py
	$(BIN)/python benchmarks/ranking.py
	$(BIN)/python benchmarks/index.py
	$(BIN)/python benchmarks/index.py --synthetic
	$(BIN)/python benchmarks/labels.py
	$(BIN)/python benchmarks/time_to_quality.py

# The same work by kgshard and by other programs, which are installed into ~/.cache/kgshard-benchmarks (5 GB).
peers: $(VENV)/installed
	$(BIN)/python benchmarks/peers.py training growth lookup evaluation traffic --markdown

# Rebuild the bundled graph from Babel's CLDR data.
world: $(VENV)/installed
	$(BIN)/python tools/build_world_graph.py

clean:
	rm -rf $(VENV) $(INTEROP) $(RUN) build dist *.egg-info
