"""Opens sources of rows by name, and makes memory.

A name and byte ranges enter; bytes in the caller's memory leave. Stamps identify states of sources.
"""

from h5async.io import objectstores  # noqa: F401  # registers schemes, everywhere
