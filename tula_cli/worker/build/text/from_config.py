"""`model: transformers:CLASS`: a model of the package transformers, built from a configuration; nothing is downloaded."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from tula_cli.errors import SpecError
from tula_cli.plugins import nearest
from tula_cli.worker.build.construct import refused_arguments

PREFIX = "transformers:"
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id")
_SETTINGS_OF_TULA = ("attn_implementation",)
"""Taken by every configuration, and no attribute of any."""


@contextmanager
def one_sequence_a_sample() -> Iterator[None]:
    """Have transformers take it that each sample is one sequence, where tensors have no values to read that from.

    It otherwise makes ready for several that are packed into one, with a mask of length x length that no training holds.
    """
    masking = sys.modules.get("transformers.masking_utils")
    name = "find_packed_sequence_indices"
    find = getattr(masking, name, None)
    if masking is None or find is None:  # older versions look for none
        yield
        return
    setattr(masking, name, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(masking, name, find)


def is_transformers_name(name: str) -> bool:
    """Return whether a model's name is one of these."""
    return name.startswith(PREFIX)


class FromConfig:
    """Builds one class of transformers from the settings of its configuration.

    An Auto class needs `model_type` (gpt2, llama, bert ...), which says whose configuration it is; any other class knows its
    own. What is not given is that configuration's default, but for two: there is no cache of keys and values, which training
    would fill for nothing, and special tokens that lie beyond `vocab_size` are none.

    Args:
        name: `transformers:CLASS`.

    Raises:
        SpecError: transformers is not installed, or has no such class of models.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.package = _import_transformers(name)
        attribute = name.removeprefix(PREFIX)
        self.target: Any = getattr(self.package, attribute, None)
        if not isinstance(self.target, type) or not (self._is_auto_class or hasattr(self.target, "config_class")):
            auto_classes = [n for n in dir(self.package) if n.startswith("AutoModel")]
            raise SpecError(
                f"model {name!r}: transformers has no class of models {attribute!r}",
                nearest(attribute, auto_classes)
                or "for example transformers:AutoModelForCausalLM with args {model_type: gpt2}",
            )

    @property
    def _is_auto_class(self) -> bool:
        return hasattr(self.target, "from_config")

    def __call__(self, num_classes: int | None = None, model_type: str | None = None, **settings: Any) -> nn.Module:
        """Return the model, initialised from torch's current random state.

        Args:
            num_classes: of the dataset: `num_labels` of a class for classification.
            model_type: of an Auto class.
            settings: of the configuration.

        Raises:
            SpecError: a setting is unknown or refused.
        """
        kind = self._config_class(model_type)
        default = kind()
        self._check_known(settings, default)
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
        # Each model checks its sizes in its own way, and newer versions of transformers have errors of their own for it.
        except Exception as error:
            raise refused_arguments(error, settings, path="model.args", name=self.name) from error
        assert isinstance(model, nn.Module)
        return model

    def _config_class(self, model_type: str | None) -> Any:
        if not self._is_auto_class:
            if model_type is not None:
                raise SpecError(f"model.args.model_type: {self.name} is of one type", "leave model_type out")
            return self.target.config_class
        configurations = self.package.CONFIG_MAPPING
        if model_type is None:
            raise SpecError(
                f"model.args: {self.name} needs model_type, which says what kind of transformer to build",
                "for example model_type: gpt2 (llama, bert, distilbert ...), with the settings of its configuration beside it",
            )
        if model_type not in configurations:
            raise SpecError(
                f"model.args.model_type: transformers has no {model_type!r}",
                nearest(model_type, list(configurations.keys())),
            )
        return configurations[model_type]

    def _check_known(self, settings: dict[str, Any], default: Any) -> None:
        """Refuse what the configuration would keep and nothing would read."""
        known_keys = [
            key for key in {*vars(default), *default.to_dict(), *default.attribute_map} if not key.startswith("_")
        ]
        for key in settings:
            if key not in (*known_keys, *_SETTINGS_OF_TULA) and not hasattr(default, key):
                raise SpecError(
                    f"model.args.{key}: the configuration {type(default).__name__} of {self.name} has no such setting",
                    nearest(key, known_keys),
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
