"""What the lowerings of all devices have in common."""

import pytest

from eqattn._sweep.lowering import Lowering, XLA
from eqattn.kernels import BACKENDS, lowering_for


@pytest.mark.parametrize("backend", ["xla", *BACKENDS])
def test_every_fact_about_a_lowering_is_stated(backend):
    lowering = XLA if backend == "xla" else lowering_for(backend, "pallas")
    facts = [
        name for name, kind in Lowering.__annotations__.items() if "ClassVar[bool]" in str(kind)
    ]
    assert len(facts) >= 4
    assert {type(getattr(lowering, name)) for name in facts} == {bool}
