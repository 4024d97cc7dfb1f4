"""What pyproject.toml cannot say: for which versions of Python a wheel is."""

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel


class WheelOfAnyPython(bdist_wheel):
    """For one platform, and all versions and builds of Python: see `ext-modules`.

    The limited API would say so too, but not to Python without the GIL before 3.15.
    """

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, ABI and platform."""
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"bdist_wheel": WheelOfAnyPython})
