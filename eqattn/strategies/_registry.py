"""`AttentionRegistry`, which finds strategies by name."""

import inspect
from typing import ClassVar, TypeVar

from .._config.metadata import AttentionMetadata
from ._base import AttentionImpl


_Impl = TypeVar("_Impl", bound="type[AttentionImpl]")


class AttentionRegistry:
    """Finds strategies by the names that their `get_impl_name` returns.

    !!! example

        ```python
        @AttentionRegistry.register
        class Mine(AttentionImpl):
            @classmethod
            def get_impl_name(cls):
                return "mine"

            def forward_native(
                self, q, k, v, mask=None, bias=None, init_bias=None, deterministic=False,
                dropout_rng=None, causal=True,
            ):
                ...  # uses each of them, or raises

        strategy = AttentionRegistry.create("mine", AttentionMetadata())
        ```

        A keyword of [`eqattn.attention`][] that `forward_native` does not declare, such as `score`,
        raises where it is used. With `**kwargs` there it would be lost.
    """

    _registry: ClassVar[dict[str, "type[AttentionImpl]"]] = {}

    @classmethod
    def register(cls, impl_cls: _Impl) -> _Impl:
        """Adds a strategy class under its name or names. It may be used as a class decorator.

        Registering the same class again changes nothing.

        **Raises:** `ValueError` if a name is taken by another class, and then no name is added;
        `TypeError` for anything but a concrete strategy class with names.
        """
        if not (isinstance(impl_cls, type) and issubclass(impl_cls, AttentionImpl)):
            raise TypeError(f"Only subclasses of AttentionImpl register, got {impl_cls!r}.")
        if inspect.isabstract(impl_cls):
            missing = sorted(impl_cls.__abstractmethods__)
            raise TypeError(f"{impl_cls.__name__} is abstract: define {missing} first.")
        names = impl_cls.get_impl_name()
        names = tuple(names) if isinstance(names, tuple | list) else (names,)
        if not names or not all(isinstance(name, str) and name for name in names):
            raise TypeError(
                f"{impl_cls.__name__}.get_impl_name() must return a name or names, got {names!r}."
            )
        for name in names:
            other = cls._registry.get(name, impl_cls)
            if other is not impl_cls:
                raise ValueError(
                    f"The name {name!r} of {impl_cls.__module__}.{impl_cls.__qualname__} is taken "
                    f"by {other.__module__}.{other.__qualname__}; return another one from "
                    "get_impl_name()."
                )
        cls._registry.update(dict.fromkeys(names, impl_cls))
        return impl_cls

    @classmethod
    def get(cls, impl_name: str) -> "type[AttentionImpl]":
        """Returns the class with that name. **Raises:** `ValueError` that lists the names."""
        if not isinstance(impl_name, str) or impl_name not in cls._registry:
            raise ValueError(
                f"No strategy has the name {impl_name!r}; there are {cls.list_implementations()}."
            )
        return cls._registry[impl_name]

    @classmethod
    def create(cls, impl_name: str, metadata: AttentionMetadata | None = None) -> "AttentionImpl":
        """Builds the strategy of a name from metadata, by default from `AttentionMetadata()`.

        **Raises:** `ValueError`, as `get` does.
        """
        return cls.get(impl_name)(AttentionMetadata() if metadata is None else metadata)

    @classmethod
    def list_implementations(cls) -> list[str]:
        """Returns all registered names, sorted."""
        return sorted(cls._registry)
