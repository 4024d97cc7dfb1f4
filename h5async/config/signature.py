"""Shows the options of a reader in help(), ? and completion.

Editors, which do not run the program, get the same from `ReaderOptions`.
"""

from __future__ import annotations

from inspect import Parameter, Signature, signature
from typing import Any, TypeVar, cast

from h5async.config.frozen import with_descriptions
from h5async.config.readerconfig import ReaderConfig

Class = TypeVar("Class", bound=type)


def takes_options(cls: Class) -> Class:
    """Add the options of `ReaderConfig` to the docstring and the signature of a class.

    Its ``__init__`` takes them as ``**options``. Both are made on access.
    """
    if cls.__doc__ is not None:  # python -OO
        cls.__doc__ = cast("str", _Docstring(cls.__doc__))
    described: Any = cls
    described.__signature__ = _Signature(cls)
    return cls


class _Docstring:
    def __init__(self, text: str) -> None:
        self._text = text

    def __get__(self, _: object, cls: type) -> str:
        return with_descriptions(self._text, "Other Parameters", ReaderConfig)


class _Signature:
    def __init__(self, cls: type) -> None:
        self._of = cls

    def __get__(self, _: object, cls: type) -> Signature:
        if cls is not self._of:
            raise AttributeError("a subclass has a signature of its own")
        of_init: Any = cls
        own = list(signature(of_init.__init__).parameters.values())[1:-1]
        options = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=... if f.is_required() else f.default)
            for name, f in ReaderConfig.model_fields.items()
        ]
        return Signature([*(p.replace(annotation=Parameter.empty) for p in own), *options])
