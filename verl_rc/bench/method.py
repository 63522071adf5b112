"""What is put to the test: a preset, a file of correction keys, a loss, or a function of the user's own."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import ValidationError
from torch import Tensor

from verl_rc.config.algorithms import LOSS_MODES, LossOptions
from verl_rc.config.errors import ConfigError, listed, nearest_key
from verl_rc.config.rollout_correction import PRESETS, RolloutCorrectionConfig, fields_from_text
from verl_rc.config.user_code import import_attribute

WEIGHT_INPUTS = ("train_log_probs", "rollout_log_probs", "response_mask", "advantages")
"""What a weight of the user's own may ask for by the names of its arguments, all ``[B, T]``."""
Weight = Callable[..., Tensor]
LOSS_PREFIX = "loss_mode="
"""How a method that is a loss of the project begins."""
_NEEDS = {
    "proximal": "the updates of a step",
    "rollout_rs_target_acceptance": "the steps of a run",
    "rejected_in_group_baseline": "groups of which some rows are rejected",
}
"""By field of a correction what it needs beside a batch, unless it has its default."""


@dataclass(frozen=True)
class Method:
    """A correction and the loss that it is used with."""

    name: str
    correction: RolloutCorrectionConfig
    loss: str
    """Name of a policy loss, or ``module:function``."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Options of the loss that are not at their defaults."""
    weight: Weight | None = None
    """A function in the place of the correction's weights."""

    @property
    def forwards(self) -> int:
        """Passes over the batch without gradient that it needs before an update."""
        return int(not self.correction.in_actor)


def find_method(text: str) -> Method:
    """The method that ``text`` names.

    ``text`` is a preset; ``loss_mode=NAME`` with options of the loss behind commas; a YAML file of correction
    keys; or ``module:function``: a loss of one argument, or a weight whose arguments are of
    ``WEIGHT_INPUTS``. Raises ``ValueError`` for anything else.
    """
    if text.startswith(LOSS_PREFIX):
        name, *options = text.removeprefix(LOSS_PREFIX).split(",")
        if name not in LOSS_MODES:
            raise ConfigError(
                f"loss_mode must be one of {', '.join(LOSS_MODES)}; got {name!r}, did you mean "
                f"{nearest_key(name, LOSS_MODES)}?"
            )
        return _loss_method(text, name, _loss_options(options))
    if text in PRESETS:
        return correction_method(text, RolloutCorrectionConfig.from_preset(text))
    if text.endswith((".yaml", ".yml")):
        return correction_method(text, _correction_of(Path(text)))
    if ":" in text:
        return _function_method(text)
    nearest = nearest_key(text, [*PRESETS, *LOSS_MODES]).split(" or ")
    names = " or ".join(name if name in PRESETS else LOSS_PREFIX + name for name in nearest)
    raise ConfigError(
        f"a method must be a preset, loss_mode=NAME, a .yaml file of correction keys or module:function; got "
        f"{text!r}, did you mean {names}?"
    )


def correction_method(name: str, correction: RolloutCorrectionConfig) -> Method:
    """The method of a correction, with the loss that the trainer would use."""
    for key, need in _NEEDS.items():
        if (value := getattr(correction, key)) != type(correction).model_fields[key].default:
            raise ConfigError(f"{name}: {key}={value} needs {need}, which the exact track lacks; drop {key}")
    return Method(name, correction, correction.named_loss or "vanilla")


def _loss_method(name: str, loss: str, options: Mapping[str, object]) -> Method:
    # In bypass mode a loss divides by the policy that sampled; else its ratio is 1 at the first update.
    return Method(name, RolloutCorrectionConfig.bypass_ppo_clip(), loss, options)


def _loss_options(words: list[str]) -> dict[str, object]:
    options = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in LossOptions.model_fields:
            raise ConfigError(
                f"an option of a loss must be KEY=VALUE; got {word!r}, did you mean "
                f"{nearest_key(key, list(LossOptions.model_fields))}=VALUE?"
            )
        options[key] = yaml.safe_load(value)
    return options


def read_correction(path: Path) -> tuple[str, dict[str, str]]:
    """The preset that a file of correction keys begins with (``disabled`` where it names none) and the keys
    beside it, as text.

    Raises ``ValueError`` for keys that rollout correction does not have.
    """
    values = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)  # values stay text
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold keys of algorithm.rollout_correction, one a line")
    keys = [*RolloutCorrectionConfig.model_fields, "preset"]
    if unknown := [key for key in values if key not in keys]:
        raise ConfigError(
            f"{path} must hold keys of algorithm.rollout_correction; it has {listed(unknown)}, did you mean "
            f"{nearest_key(unknown[0], keys)}?"
        )
    return str(values.pop("preset", "disabled")), values


def _correction_of(path: Path) -> RolloutCorrectionConfig:
    preset, values = read_correction(path)
    try:
        return RolloutCorrectionConfig.from_preset(preset, **fields_from_text(values))
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            f"{path}: {'.'.join(map(str, first['loc']))} {first['msg'].removeprefix('Value error, ')}"
        ) from error


def _function_method(name: str) -> Method:
    function = import_attribute(name, f"the method {name!r}", "function")
    if not callable(function):
        raise ConfigError(f"the method {name!r} must be a function of a module; it is {function!r}")
    arguments = list(inspect.signature(function).parameters)
    if len(arguments) == 1 and arguments[0] not in WEIGHT_INPUTS:
        return _loss_method(name, name, {})
    if lacking := [argument for argument in arguments if argument not in WEIGHT_INPUTS]:
        raise ConfigError(
            f"the weight {name!r} asks for {listed(lacking)}, which the exact track lacks; it has "
            f"{', '.join(WEIGHT_INPUTS)} (a loss takes one argument: PolicyLossInputs)"
        )
    correction = RolloutCorrectionConfig.model_validate({"bypass_mode": True, "loss_type": "reinforce"})

    def weight(**inputs: Tensor) -> Tensor:
        weights: Tensor = function(**{argument: inputs[argument] for argument in arguments})
        return weights

    return Method(name, correction, "reinforce", weight=weight)
