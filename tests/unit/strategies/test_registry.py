import pytest

from eqattn._config.metadata import AttentionMetadata
from eqattn._output import AttentionOutput
from eqattn.strategies._base import AttentionImpl
from eqattn.strategies._registry import AttentionRegistry


pytestmark = pytest.mark.usefixtures("registry")


def strategy(*names):
    class Mine(AttentionImpl):
        @classmethod
        def get_impl_name(cls):
            return names if len(names) != 1 else names[0]

        def forward_native(self, q, k, v, mask=None, **kwargs):
            return AttentionOutput(attention_outputs=v)

    return Mine


def test_register_get_create_list():
    cls = strategy("test-mine")
    assert AttentionRegistry.register(cls) is cls
    assert AttentionRegistry.get("test-mine") is cls
    metadata = AttentionMetadata(blocksize_q=3)
    made = AttentionRegistry.create("test-mine", metadata)
    assert type(made) is cls and made.metadata is metadata
    names = AttentionRegistry.list_implementations()
    assert "test-mine" in names and names == sorted(names) and isinstance(names, list)


@pytest.mark.parametrize("names", [("test-a", "test-b"), ["test-a", "test-b"]])
def test_several_names(names):
    cls = strategy("unused")
    cls.get_impl_name = classmethod(lambda c: names)
    AttentionRegistry.register(cls)
    assert AttentionRegistry.get("test-a") is AttentionRegistry.get("test-b") is cls


def test_works_as_a_decorator_and_keeps_the_class():
    @AttentionRegistry.register
    class Mine(strategy("test-decorated")):
        pass

    assert AttentionRegistry.get("test-decorated") is Mine and Mine.__name__ == "Mine"


def test_a_duplicate_name_raises_and_adds_nothing():
    cls, other = strategy("test-mine"), strategy("test-new", "test-mine")
    AttentionRegistry.register(cls)
    assert AttentionRegistry.register(cls) is cls  # the same class: nothing to do
    with pytest.raises(ValueError, match="'test-mine'.*taken.*Mine"):
        AttentionRegistry.register(other)
    assert AttentionRegistry.get("test-mine") is cls
    assert "test-new" not in AttentionRegistry.list_implementations()
    with pytest.raises(ValueError, match="taken"):
        AttentionRegistry.register(strategy("test-mine"))


def test_unknown_name_lists_the_names():
    AttentionRegistry.register(strategy("test-mine"))
    for ask in (
        lambda: AttentionRegistry.get("rign"),
        lambda: AttentionRegistry.create("rign", AttentionMetadata()),
    ):
        with pytest.raises(ValueError, match="'rign'.*'test-mine'"):
            ask()


@pytest.mark.parametrize("names", [(), ("",), (3,)])
def test_bad_names_raise(names):
    with pytest.raises(TypeError, match="get_impl_name"):
        AttentionRegistry.register(strategy(*names))


def test_only_concrete_strategies_register():
    class Abstract(AttentionImpl):
        @classmethod
        def get_impl_name(cls):
            return "test-abstract"

    with pytest.raises(TypeError, match="Abstract is abstract.*forward_native"):
        AttentionRegistry.register(Abstract)
    for wrong in (int, strategy("x")(AttentionMetadata())):
        with pytest.raises(TypeError):
            AttentionRegistry.register(wrong)  # pyright: ignore
