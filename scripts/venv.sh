# Sourced by the other scripts: makes .venv once, and installs h5async there with an extra ($1), if
# that was not done since the core or the list of dependencies changed.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "h5async needs Python 3.11 or newer; $python is $("$python" --version 2>&1)." \
        "Name another one: PYTHON=python3.12 $0" >&2
    exit 1
fi
# Tests start many processes, each of which would compile all modules anew without what others kept.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX="$PWD/.venv/pycache"
[ -x .venv/bin/python ] || "$python" -m venv .venv
extra="${1:-}"
[ ! -e .venv/installed-dev ] || extra=dev # which has all that the others have
stamp=".venv/installed-${extra:-alone}"
if [ ! -e "$stamp" ] || [ -n "$(find pyproject.toml h5async/core/src -newer "$stamp" -print -quit)" ]; then
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".${extra:+[$extra]}"
    touch "$stamp"
fi
