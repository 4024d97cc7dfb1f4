"""Packs `comparing.samples`, committing after each block, to be killed: PATH OPTION=VALUE..."""

import json
import sys

from comparing import samples

import h5async
from h5async.packing.safefile import SafeFile

SafeFile.is_due = property(lambda self: True)
path, *typed = sys.argv[1:]
options = {name: json.loads(value) for name, value in (one.split("=") for one in typed)}


def tell(done, count, nbytes):
    print(done, flush=True)


h5async.pack(samples(), path, resume=True, progress=tell, **options)
