"""What pyproject.toml cannot say: for which Pythons a wheel is, and how to build one of no core.

With H5ASYNC_PURE=1 in the environment nothing is compiled. Such a wheel serves every platform, and
so does one that was built where no compiler works: h5py reads everything then, more slowly.
"""

import os

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class PackageWithCore(Distribution):
    """The package, whose core is compiled unless it is asked for without one."""

    def has_ext_modules(self) -> bool:
        """Tell whether there is anything to compile."""
        return os.environ.get("H5ASYNC_PURE") != "1" and bool(super().has_ext_modules())


class WheelOfAnyPython(bdist_wheel):
    """For all versions and builds of Python; for one platform if the core is in it: `ext-modules`.

    The limited API would say so too, but not to Python without the GIL before 3.15.
    """

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, ABI and platform."""
        # The core is optional: where it could not be compiled, the build went on without it.
        if not self.root_is_pure:
            built = self.get_finalized_command("build_ext").get_outputs()
            self.root_is_pure = not any(map(os.path.exists, built))
        return "py3", "none", "any" if self.root_is_pure else super().get_tag()[2]


setup(distclass=PackageWithCore, cmdclass={"bdist_wheel": WheelOfAnyPython})
