# Two commands matter: `make demo` and `make test`. Both need only Python >= 3.11 and make.

PYTHON ?= python3
PORT ?= 8000
SEED ?= 1
SEEDS ?= 2000
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := $(VENV)/.clients
PROTO := paceline/rpc/v1/speculation.proto

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo serve models browser test test-long lint protos bench chaos chaos-sim clean

help: ## show this list
	@echo "Paceline: speculative decoding as a distributed service. Usage: make TARGET"
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' \
		| awk -F'|' '{ printf "  %-9s %s\n", $$1, $$2 }'

demo: $(STAMP) ## stream a chat with accepted / recovered / bonus tokens in color
	@$(BIN)/paceline demo --method auto

serve: $(STAMP) ## serve SmolLM2-135M on 127.0.0.1 (PORT=8000) until Ctrl-C
	@$(BIN)/paceline serve deploy/serve/smollm2.yaml --port $(PORT)

models: $(STAMP) ## download and convert the demo models into the cache folder
	@$(BIN)/paceline models fetch

browser: ## install Chromium for the page's tests, where there is none (Debian, Ubuntu; as root)
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null \
		|| { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq -y install chromium >/dev/null; } \
		|| { echo "no Chromium, and apt-get cannot install it: install one by hand" >&2; exit 1; }

# Three: Playwright keeps an event loop running in its thread, and Ray forks its daemons, which is not
# safe beside the gRPC threads of other tests. The last two read only the folders that have such
# tests (test_tidy holds it): to read all of them takes half a minute.
test: $(STAMP) $(CLIENTS) ## run the tests
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "not serve and not browser and not long"
	@$(BIN)/python -m pytest tests/browser -m "browser and not long"
	@$(BIN)/python -m pytest tests/e2e tests/serve -m "serve and not long"

test-long: $(STAMP) ## what takes longest: tensor parallel and autoscaling on a live service, lookups beside transformers, a law (~6 min)
	@$(BIN)/python -m pytest -m long

lint: $(STAMP) ## ruff, mypy, import contracts, buf
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/buf lint protos
	@$(BIN)/buf breaking protos --against protos/v1.binpb

protos: $(STAMP) ## regenerate services/paceline/rpc/v1 from protos/
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -Iprotos \
		--python_out=services --pyi_out=services --grpc_python_out=services \
		--mypy_grpc_out=services $(PROTO)

bench: $(STAMP) ## the orchestration benchmark, a few settings (< 3 min): four schemes and their ceiling
	@mkdir -p out
	@$(BIN)/paceline bench orchestration --quick --json out/orchestration.json --markdown out/orchestration.md

chaos: $(STAMP) ## break a real cluster in every listed way and print what clients saw (~15 min)
	@$(BIN)/python -m chaos --scenario all --seed $(SEED) --seeds 3

chaos-sim: $(STAMP) ## simulated schedules with faults (SEEDS=2000), two processes
	@$(BIN)/python -m chaos.simulate --seeds $(SEEDS) --start $(SEED)

clean: ## remove .venv, caches and build output (the model cache stays)
	@rm -rf $(VENV) build dist out services/*.egg-info .*_cache .hypothesis
	@find services tests chaos -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an interrupted installation is simply done again.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Paceline needs Python 3.11 or newer: make PYTHON=python3.11 ..." >&2; exit 1; }
	@echo "Installing Paceline into $(VENV) (torch and ray are large: some minutes the first time)"
	@$(PYTHON) -m venv $(VENV) \
		|| { echo "python3 -m venv failed: install the python3-venv package" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

$(CLIENTS): pyproject.toml $(STAMP)
	@$(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --editable '.[clients]'
	@touch $@
