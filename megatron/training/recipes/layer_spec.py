"""--spec: the layers of the model from a function of the user's."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron.core.errors import ConfigError

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig


def layer_spec(words: Sequence[str] | None, config: TransformerConfig) -> ModuleSpec:
    """The ModuleSpec of one transformer layer.

    words: of --spec: a module and the name of a function in it, without parameters or with one for the config, or of a
    ModuleSpec; None or `local`: our own layer. Raises ConfigError where they lead nowhere.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec

    if words is None or list(words) == ["local"]:
        return get_gpt_layer_local_spec()
    found = _named(*words)
    if callable(found) and not isinstance(found, ModuleSpec):
        found = found(config) if inspect.signature(found).parameters else found()
    if not isinstance(found, ModuleSpec):
        raise ConfigError(f"--spec {' '.join(words)} gives a {type(found).__name__}; it must give a ModuleSpec")
    return found


def _named(module_name: str, name: str) -> Any:
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that the user's module itself imports
        raise ConfigError(
            f"--spec {module_name} {name}: there is no module {error.name}; "
            "add its directory to the environment variable PYTHONPATH"
        ) from None
    if not hasattr(module, name):
        raise ConfigError(f"--spec {module_name} {name}: {module.__file__} has no {name}")
    return getattr(module, name)
