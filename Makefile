PYTHON ?= python3
SFT = skills/gemma-trainer/assets/sft_train.py

.PHONY: demo test test-newest test-unsloth test-browser pictures verify-newest lint clean

demo: .venv/installed
	.venv/bin/python $(SFT) --max-len 2048

test: .venv/installed-test
	.venv/bin/python -m pytest -n 2 --dist loadfile

test-newest: .venv-newest/installed-test
	.venv-newest/bin/python -m pytest -n 2 --dist loadfile

test-unsloth: .venv-unsloth/installed-test
	.venv-unsloth/bin/python -m pytest -n 2 --dist loadfile tests/with_unsloth

test-browser: .venv-browser/installed-test
	.venv-browser/bin/python -m pytest tests/with_browser

pictures: .venv-browser/installed-test
	.venv-browser/bin/python scripts/pictures.py

verify-newest: .venv/installed .venv-newest/installed-test
	.venv/bin/python skills/gemma-trainer/assets/verify.py --python .venv-newest/bin/python

lint: .venv/installed-test
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install -c constraints.txt -e .
	touch $@

.venv/installed-test: .venv/installed
	.venv/bin/python -m pip install -c constraints.txt -e ".[test]"
	touch $@

.venv-newest/installed-test: pyproject.toml constraints-newest.txt
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install -c constraints-newest.txt -e ".[test]"
	touch $@

.venv-unsloth/installed-test: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-unsloth
	.venv-unsloth/bin/python -m pip install -c constraints.txt -e ".[test,unsloth]"
	touch $@

# gradio takes Pillow up to 12; the Chromium is fetched where the machine has none
.venv-browser/installed-test: pyproject.toml constraints.txt scripts/chromium.py
	$(PYTHON) -m venv .venv-browser
	grep -v "^pillow==" constraints.txt > .venv-browser/constraints.txt
	.venv-browser/bin/python -m pip install -c .venv-browser/constraints.txt -e ".[test,app,browser]"
	.venv-browser/bin/python scripts/chromium.py .venv-browser/chromium
	touch $@

clean:
	rm -rf .venv .venv-browser .venv-newest .venv-unsloth runs build *.egg-info skills/gemma-trainer/assets/*.egg-info
