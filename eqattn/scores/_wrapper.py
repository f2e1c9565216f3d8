"""Scores that are made of another one."""

from typing import Any

import equinox as eqx

from ._base import AbstractScore


class AbstractWrapper(AbstractScore):
    """A score whose `transform` calls that of another, and does nothing else that may fail."""

    score: eqx.AbstractVar[AbstractScore]

    @property
    def finite_when_masked(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.score.finite_when_masked

    @property
    def tried_in_kernels(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.score.tried_in_kernels

    @property
    def may_lack_kernels(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.score.may_lack_kernels

    @property
    def weighs(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.score.weighs
