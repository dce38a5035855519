"""Microsoft's MS-AMP, which computes in 8-bit floats: its settings, and what is not there yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from accelerate_nb.errors import MissingExtraError, NotYetError
from accelerate_nb.notices import notice
from accelerate_nb.runtime.handlers import AutocastKwargs, KwargsHandler
from accelerate_nb.runtime.installed import is_msamp_available
from accelerate_nb.runtime.kinds import FP8BackendType
from accelerate_nb.runtime.precision.base import Precision
from accelerate_nb.runtime.precision.fp8_te import TERecipeKwargs, one_of


@dataclass
class MSAMPRecipeKwargs(KwargsHandler):
    """How much MS-AMP keeps in 8-bit floats: "O1" weights' gradients, "O2" optimizer states, too."""

    opt_level: str | None = None

    def _fill(self, environment: Mapping[str, str]) -> None:
        asked = environment.get("ACCELERATE_FP8_OPT_LEVEL", "O2") if self.opt_level is None else self.opt_level
        self.opt_level = one_of("opt_level", asked, ("O1", "O2"))

    @property
    def package(self) -> FP8BackendType:
        """Who computes."""
        return FP8BackendType.MSAMP

    def precision_on(self, device: torch.device, autocast: AutocastKwargs | None) -> Precision:
        """What computes so on a device; `NotYetError`, or `MissingExtraError` without the package."""
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
        notice("FP8RecipeKwargs is deprecated. Use TERecipeKwargs, MSAMPRecipeKwargs or AORecipeKwargs.", FutureWarning)
        default = "MSAMP" if is_msamp_available() else "TE"
        asked = environment.get("ACCELERATE_FP8_BACKEND", default) if self.backend is None else self.backend
        self.backend = one_of("backend", asked.upper(), ("MSAMP", "TE"))
        TERecipeKwargs._fill(self, environment)
        MSAMPRecipeKwargs._fill(self, environment)

    @property
    def package(self) -> FP8BackendType:
        """Who computes."""
        return FP8BackendType(self.backend)

    def precision_on(self, device: torch.device, autocast: AutocastKwargs | None) -> Precision:
        """What computes so on a device; `NotYetError`."""
        kind = MSAMPRecipeKwargs if self.package == FP8BackendType.MSAMP else TERecipeKwargs
        return kind.precision_on(self, device, autocast)
