"""The modules whose weights stage 3 gathers as a whole, such as mixtures of experts."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn import Module

from accelerate_nb.runtime.training.unwrap import requested_class


def set_leaf_modules(model: Module, names: Iterable[str]) -> None:
    """
    Mark all modules of these classes; `ConfigurationError` names a class that the model doesn't have.

    Which experts a batch goes through differs between ranks, and a rank that gathers weights waits for the others.
    """
    from deepspeed.utils import set_z3_leaf_modules

    set_z3_leaf_modules(model, [requested_class(model, name.strip(), "transformer_moe_cls_names") for name in names])
