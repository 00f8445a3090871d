#!/usr/bin/env bash
# Creates .venv with halfbyte, its test tools and a torch that fits the machine. Does nothing when that is done.
#
#   PYTHON=python3.12               the interpreter to use (any of 3.10 and later)
#   HALFBYTE_TORCH="torch==2.14.0"  another torch, as a pip requirement
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "setup: $*"; }
fail() {
    echo "setup: $*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.10 or later is needed (${PYTHON:-python3} is none); set PYTHON to one"
}

has_gpu() { nvidia-smi -L >/dev/null 2>&1; }

has_cuda_torch() { "$1" -c 'import torch; assert torch.version.cuda' 2>/dev/null; }

install_torch() {
    local wanted=${HALFBYTE_TORCH:-torch==2.13.0}
    if ! has_gpu && [ "$(uname -s)" = Linux ]; then
        say "installing $wanted for the CPU"
        # One try: where PyTorch's own index cannot be reached, the configured one has to do.
        .venv/bin/pip install -qq --retries 0 --timeout 15 \
            --index-url https://download.pytorch.org/whl/cpu "$wanted" 2>/dev/null && return
        say "PyTorch's CPU index did not give it; taking it from the configured index"
    else
        say "installing $wanted"
    fi
    .venv/bin/pip install -qq "$wanted" || fail "$wanted could not be installed (see above)"
}

python=$(find_python)
wanted=$("$python" - "${HALFBYTE_TORCH:-}" <<'EOF'
import hashlib, pathlib, sys

parts = [pathlib.Path("pyproject.toml").read_bytes(), pathlib.Path("scripts/setup.sh").read_bytes()]
parts += [sys.version.encode(), sys.argv[1].encode()]
print(hashlib.sha256(b"\0".join(parts)).hexdigest())
EOF
)
stamp=.venv/halfbyte-setup
if [ "$(cat "$stamp" 2>/dev/null || true)" = "$wanted" ]; then
    exit 0
fi

"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "$python cannot make environments; install its venv package (Debian, Ubuntu: apt install python3-venv)"

say "creating .venv with $("$python" --version)"
if [ -z "${HALFBYTE_TORCH:-}" ] && has_gpu && has_cuda_torch "$python"; then
    "$python" -m venv --clear --system-site-packages .venv
    # Another environment's python shares its base's packages, not its own.
    if has_cuda_torch .venv/bin/python; then say "keeping the CUDA torch of $python"; else install_torch; fi
else
    "$python" -m venv --clear .venv
    install_torch
fi
say "installing halfbyte and its test tools"
.venv/bin/pip install -qq --editable ".[test]" || fail "halfbyte could not be installed (see above)"
echo "$wanted" >"$stamp"
say "done"
