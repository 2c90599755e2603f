"""Models of transformers, built from the settings of their configuration."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from tula_cli.errors import SpecError
from tula_cli.plugins import suggest_nearest
from tula_cli.worker.build.construct import make_refused_arguments_error

TRANSFORMERS_PREFIX = "transformers:"
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id")
_SETTINGS_OF_TULA = ("attn_implementation",)
"""Arguments that every configuration accepts without having such an attribute."""


@contextmanager
def assume_one_sequence_per_sample() -> Iterator[None]:
    """Make transformers assume that each sample is one sequence, which fake tensors have no values to detect.

    Otherwise it prepares for several packed sequences per sample, with a mask of length x length that no training
    holds.
    """
    masking = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    find = getattr(masking, name, None)
    if masking is None or find is None:  # older versions do not detect packed sequences
        yield
        return
    setattr(masking, name, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(masking, name, find)


class FromConfig:
    """Builds a class of transformers from the settings of its configuration.

    An Auto class needs `model_type` (gpt2, llama, bert ...), which selects the configuration; any other class has its
    own. Settings that are not given have that configuration's defaults, with two exceptions: the cache of keys and
    values is off, because training does not use it, and special tokens beyond `vocab_size` are unset.

    Args:
        name: `transformers:CLASS`.

    Raises:
        SpecError: transformers is not installed, or has no such model class.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.package = _import_transformers(name)
        attribute = name.removeprefix(TRANSFORMERS_PREFIX)
        self.target: Any = getattr(self.package, attribute, None)
        if not isinstance(self.target, type) or not (self._is_auto_class or hasattr(self.target, "config_class")):
            auto_classes = [n for n in dir(self.package) if n.startswith("AutoModel")]
            raise SpecError(
                f"model {name!r}: transformers has no model class {attribute!r}",
                suggest_nearest(attribute, auto_classes)
                or "name a class, for example transformers:AutoModelForCausalLM with model.args: {model_type: gpt2}",
            )

    @property
    def _is_auto_class(self) -> bool:
        return hasattr(self.target, "from_config")

    def __call__(self, num_classes: int | None = None, model_type: str | None = None, **settings: Any) -> nn.Module:
        """Return the model, initialised from torch's current random state.

        Args:
            num_classes: classes of the dataset, passed as `num_labels` to a classification model.

        Raises:
            SpecError: a setting is unknown or refused.
        """
        kind = self._find_config_class(model_type)
        default = kind()
        self._refuse_unknown_settings(settings, default)
        if num_classes is not None and "Classification" in self.name:
            settings.setdefault("num_labels", num_classes)
        if hasattr(default, "use_cache"):
            settings.setdefault("use_cache", False)
        vocabulary = settings.get("vocab_size")
        for key in _SPECIAL_TOKENS:
            token = getattr(default, key, None)
            if isinstance(vocabulary, int) and isinstance(token, int) and token >= vocabulary:
                settings.setdefault(key, None)
        try:
            config = kind(**settings)
            model = self.target.from_config(config) if self._is_auto_class else self.target(config)
        # Models check their sizes in different ways, and newer versions of transformers raise their own error classes.
        except Exception as error:
            raise make_refused_arguments_error(error, settings, path="model.args", name=self.name) from error
        assert isinstance(model, nn.Module)
        return model

    def _find_config_class(self, model_type: str | None) -> Any:
        if not self._is_auto_class:
            if model_type is not None:
                raise SpecError(f"model.args.model_type: {self.name} has a fixed type", "remove model_type")
            return self.target.config_class
        configurations = self.package.CONFIG_MAPPING
        if model_type is None:
            raise SpecError(
                f"model.args: {self.name} needs model_type, the type of transformer to build",
                "add model_type, for example gpt2, llama or bert; further arguments are settings of its configuration",
            )
        if model_type not in configurations:
            raise SpecError(
                f"model.args.model_type: transformers has no {model_type!r}",
                suggest_nearest(model_type, list(configurations.keys())),
            )
        return configurations[model_type]

    def _refuse_unknown_settings(self, settings: dict[str, Any], default: Any) -> None:
        """Refuse settings that the configuration would store but nothing would read."""
        known_keys = [
            key for key in {*vars(default), *default.to_dict(), *default.attribute_map} if not key.startswith("_")
        ]
        for key in settings:
            if key not in (*known_keys, *_SETTINGS_OF_TULA) and not hasattr(default, key):
                raise SpecError(
                    f"model.args.{key}: {type(default).__name__} (the configuration of {self.name}) has no such setting",
                    suggest_nearest(key, known_keys),
                )


def _import_transformers(name: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise SpecError(
            f"model {name} needs the package transformers, which is not installed",
            "pip install 'tula-cli[transformers]'",
        ) from None
