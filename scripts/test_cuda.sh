#!/usr/bin/env bash
# The checks that need a CUDA device, in at most 8 minutes. Works in the checkout's .venv, or with the machine's own
# Python and torch (3.12 and 2.11, for example): what else is needed goes into .venv-cuda beside them.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${VENV:-.venv}/bin/python
if ! "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    system=${PYTHON:-python3}
    if ! "$system" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
        echo "no Python here has a torch that finds a CUDA device" >&2
        exit 1
    fi
    [ -x .venv-cuda/bin/python ] || "$system" -m venv --system-site-packages .venv-cuda
    python=.venv-cuda/bin/python
    "$python" -m pip --disable-pip-version-check install --quiet ${PIP_ARGS:-} -e '.[server,grammar]' \
        pytest pytest-timeout hypothesis
fi
"$python" -c 'import torch, sys; print("Python", sys.version.split()[0], "torch", torch.__version__, torch.cuda.get_device_name(0))'
timeout 460 "$python" -m pytest -q -m cuda --timeout 240 --durations 5 tests/cuda
"$python" -c 'import sys; from octavo.model.load.hub import list_models
sys.exit(not any(m.name == "smollm2" and m.path for m in list_models()))' || echo "not run: smollm2 on CUDA (not in the cache; octavo pull smollm2)"
