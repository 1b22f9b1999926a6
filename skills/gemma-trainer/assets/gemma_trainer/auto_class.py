"""Makes transformers' `AutoModelForSequenceClassification` know our reward models once this package is imported,
whichever of the two comes first. Neither transformers nor the models are imported before somebody asks for them."""

from __future__ import annotations

import importlib.util
import sys

MAPPINGS = "transformers.models.auto.modeling_auto"  # where the auto classes look for a config's model


def teach() -> None:
    """Put the reward models where transformers' auto class finds them, now or as soon as it is imported."""
    if MAPPINGS in sys.modules:
        _add_to(sys.modules[MAPPINGS])
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


def _add_to(module) -> None:
    mapping = module.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    mapping._extra_content = _OnDemand(mapping._extra_content)


class _OnDemand(dict):
    """What a mapping has beyond transformers' own, with our models from when it is first asked for a Gemma."""

    def __contains__(self, key) -> bool:
        if ".gemma" in getattr(key, "__module__", ""):
            from . import reward_model  # noqa: F401  adds its classes
        return super().__contains__(key)


class _Waiting:
    """A finder that finds nothing itself: it adds to the mappings when their module has been run."""

    def find_spec(self, name, path=None, target=None):
        if name != MAPPINGS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            _add_to(module)

        spec.loader.exec_module = exec_module
        return spec
