"""Users' functions as PyTrees of what they close over."""

from .closure import (
    Closure as Closure,
    closure_of as closure_of,
    function_of as function_of,
    held as held,
)
