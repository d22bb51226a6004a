# Sourced from the repository's root by the scripts: the virtual environment, and commbench installed into it.
# VENV names the environment (default .venv), PYTHON the interpreter that makes it (default python3).
VENV=${VENV:-.venv}

fail() {
    echo "$(basename "$0"): $1" >&2
    exit 2
}

make_venv() {
    local python=${PYTHON:-python3}
    if [ -x "$VENV/bin/python" ]; then
        "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || fail "$VENV has no pip, as if its making was cut short: delete it and try again"
        return
    fi
    command -v "$python" >/dev/null || fail "$python not found: install Python 3.10 or later"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$("$python" --version) is too old: commbench needs 3.10 or later; name one with PYTHON=python3.11 $0"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make a virtual environment: install its venv module (Debian, Ubuntu: apt-get install python3-venv)"
    echo "Making the virtual environment $VENV"
    "$python" -m venv "$VENV"
}

# install_commbench EXTRAS: editable, with the tested versions. Nothing to do while neither they nor the dependencies change.
install_commbench() {
    local stamp="$VENV/.commbench-$1" wanted
    make_venv
    wanted=$(cat pyproject.toml constraints.txt | sha256sum)
    if [ -x "$VENV/bin/commbench" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    echo "Installing commbench[$1] into $VENV (the first time takes some minutes: torch is large)"
    "$VENV/bin/python" -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[$1]"
    echo "$wanted" >"$stamp"
}
