# Sourced by scripts that need several versions of Python.

# What works of a command or of pyenv's for a version, such as 3.12, if anything.
find_python() {
  local candidate
  for candidate in "python$1" "$(pyenv root 2>/dev/null || true)"/versions/"$1".*/bin/python; do
    if "$candidate" -c "" 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
}
