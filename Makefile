# make demo        real SGLang on this machine's CPU: two servers, a benchmark, a table
# make test        lint, unit tests, integration tests on real SGLang
# make clean-demo  stop the demo's servers and remove what the demo made
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PLAYBOOK := $(BIN)/ansible-playbook
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg
# Ansible's modules and the tests find their Python here and not in whatever is activated.
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

.PHONY: demo clean-demo test lint unit integration venv venv-dev

demo: venv
	$(PLAYBOOK) -i inventory/local.yml deploy.yml -e profile=nomtp
	@printf '%s\n' '' 'Two SGLang servers serve on this machine. Try next:' \
	  '  . $(VENV)/bin/activate' \
	  '  ansible-playbook status.yml              state of every server' \
	  '  ansible-playbook benchmark.yml           measure them again' \
	  '  ansible-playbook deploy.yml              changes nothing: they run already' \
	  '  ansible-playbook swap.yml -e settle=5 -e '"'"'{"sglang_server_args": {"max-running-requests": 8}}'"'"'' \
	  '                                           other flags, one server at a time; -e rollback=true goes back' \
	  '  ansible-playbook history.yml             who changed what when' \
	  '  ansible-playbook stop.yml --limit local-cpu0' \
	  '  make clean-demo                          stop them and remove what this made'

clean-demo:
	@if [ -d .demo/run ]; then $(MAKE) --no-print-directory venv && $(PLAYBOOK) -i inventory/local.yml stop.yml; fi
	rm -rf .demo $(VENV)

test: lint unit integration

lint: venv-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/yamllint --strict .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/ansible-lint --offline -q

unit: venv-dev
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest tests/unit

integration: venv-dev
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pytest tests/integration

venv: $(VENV)/.installed
venv-dev: $(VENV)/.installed-dev

$(VENV)/.installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'make: $(PYTHON) is older than 3.11: name a newer one with PYTHON=…, such as make demo PYTHON=python3.12'; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { echo 'make: $(PYTHON) can make no venv: apt-get install python3-venv'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements.txt
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt requirements-report.txt $(VENV)/.installed
	$(BIN)/pip install --quiet --disable-pip-version-check --requirement requirements-dev.txt
	@touch $@
