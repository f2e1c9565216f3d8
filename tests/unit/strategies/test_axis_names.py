"""What names a mesh axis: one name, or None."""

import pytest

from eqattn import AllGather, Ragged, Ring, Ulysses


@pytest.mark.parametrize("name", ["", 0, ("sp", "hd"), ["sp"]], ids=repr)
@pytest.mark.parametrize(
    "strategy, field",
    [(Ring, "axis_name"), (Ring, "head_axis"), (Ulysses, "axis_name"), (AllGather, "axis_name")]
    + [(Ragged, "axis_name")],
)
def test_an_axis_has_one_name(strategy, field, name, unchecked):
    """An empty one and 0 were passed over, and that of the metadata was taken."""
    with pytest.raises(TypeError, match=f"{field} is the name of one mesh axis, got "):
        strategy(**{field: name})
