"""Microsoft's MS-AMP, which computes in 8-bit floats: its settings, and what is not there yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from accelerate_nb.errors import MissingExtraError, NotYetError
from accelerate_nb.runtime.compat.enums import FP8BackendType
from accelerate_nb.runtime.compat.kwargs_handlers import AutocastKwargs, KwargsHandler
from accelerate_nb.runtime.compat.packages import is_msamp_available
from accelerate_nb.runtime.precision.base import Precision
from accelerate_nb.runtime.precision.fp8_te import TERecipeKwargs, checked_choice
from accelerate_nb.user_warnings import warn_user


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """MS-AMP's level of 8-bit floats: "O1" weights' gradients, "O2" optimizer states, too."""

    package: ClassVar[FP8BackendType] = FP8BackendType.MSAMP

    opt_level: str | None = None

    def _fill(self, environment: Mapping[str, str]) -> None:
        value = environment.get("ACCELERATE_FP8_OPT_LEVEL", "O2") if self.opt_level is None else self.opt_level
        self.opt_level = checked_choice("opt_level", value, ("O1", "O2"))

    def precision_on(self, device: torch.device, autocast: AutocastKwargs | None) -> Precision:
        """The precision of this recipe on a device; `NotYetError`, or `MissingExtraError` without the package."""
        if not is_msamp_available():
            raise MissingExtraError(
                "mixed_precision='fp8' by MS-AMP needs MS-AMP, which is not installed. "
                "Use AORecipeKwargs, which computes in fp8 by torchao."
            )
        raise NotYetError(
            "mixed_precision='fp8' by MS-AMP is not offered here yet. Use AORecipeKwargs, which computes in fp8 by torchao."
        )


@dataclass
class FP8RecipeKwargs(TERecipeKwargs, MSAMPRecipeKwargs):
    """The settings of Transformer Engine and of MS-AMP in one, for `backend` "TE" or "MSAMP"; deprecated, use theirs."""

    backend: str | None = None

    def _fill(self, environment: Mapping[str, str]) -> None:
        warn_user(
            "FP8RecipeKwargs is deprecated. Use TERecipeKwargs, MSAMPRecipeKwargs or AORecipeKwargs.", FutureWarning
        )
        default = "MSAMP" if is_msamp_available() else "TE"
        value = environment.get("ACCELERATE_FP8_BACKEND", default) if self.backend is None else self.backend
        self.backend = checked_choice("backend", value.upper(), ("MSAMP", "TE"))
        TERecipeKwargs._fill(self, environment)
        MSAMPRecipeKwargs._fill(self, environment)

    @property
    def package(self) -> FP8BackendType:  # type: ignore[override]  # known once it is made: one of two
        """The package that computes."""
        return FP8BackendType(self.backend)

    def precision_on(self, device: torch.device, autocast: AutocastKwargs | None) -> Precision:
        """The precision of this recipe on a device; `NotYetError`."""
        recipe = MSAMPRecipeKwargs if self.package == FP8BackendType.MSAMP else TERecipeKwargs
        return recipe.precision_on(self, device, autocast)
