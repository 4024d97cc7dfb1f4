"""Pictures of what commands found, drawn by Matplotlib, an extra that is imported only for them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from h5async.config.files import home_path, with_variables
from h5async.errors import ConfigError, MissingPackageError


class Picture:
    """A picture to be written; made before measuring, so that errors come first.

    The suffix of `path` decides its format. Raises `MissingPackageError` without Matplotlib, and
    `ConfigError` for a missing folder or an unknown format.
    """

    def __init__(self, path: str | Path) -> None:
        path = Path(home_path(with_variables(str(path))))
        try:
            figure = importlib.import_module("matplotlib.figure")
        except ImportError as error:
            raise MissingPackageError(
                f"--plot needs Matplotlib ({error}); install it with: pip install 'h5async[plot]',"
                " or pip install matplotlib"
            ) from error
        self._path = path
        self.figure: Any = figure.Figure(layout="constrained")
        kinds = self.figure.canvas.get_supported_filetypes()
        if path.suffix[1:].lower() not in kinds:
            raise ConfigError(
                f"--plot {path}: the name must end in one of:"
                f" {', '.join(f'.{kind}' for kind in sorted(kinds))}"
            )
        if not path.parent.is_dir():
            raise ConfigError(f"--plot {path}: there is no folder {path.parent}; make it first")

    def write(self) -> None:
        """Write the picture, or raise `ConfigError` if it cannot be written."""
        try:
            self.figure.savefig(self._path, dpi=120)
        except OSError as error:
            raise ConfigError(
                f"--plot {self._path} cannot be written: {error.strerror or error}"
            ) from error


def tidy(panel: Any, title: str) -> None:
    """Give a panel a title, and take away what no one looks at."""
    panel.set_title(title, fontsize=10, loc="left", fontweight="bold")
    panel.spines[["top", "right"]].set_visible(False)
