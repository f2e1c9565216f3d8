"""Users' functions as PyTrees of what they close over."""

from .closure import (
    Closure as Closure,
    function_of as function_of,
    opened as opened,
)
