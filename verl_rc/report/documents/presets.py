"""docs/presets.md, from the presets of rollout correction."""

from verl_rc.config.rollout_correction import PRESETS, RolloutCorrectionConfig

_HEAD = """\
# Presets of rollout correction

`algorithm.rollout_correction.preset=NAME` stands for the fields below, all of
`algorithm.rollout_correction`; fields that you give win over the preset's. In Python:
`RolloutCorrectionConfig.from_preset("NAME", rollout_is_threshold=3.0)`. `verl-rc presets` prints
the same list. `verl-rc docs` writes this page from `PRESETS` in `verl_rc/config`.

[Which preset](rollout_correction.md#which-preset) has the reasons. Most runs want
`decoupled_token_is` (long responses), `decoupled_seq_is` (short ones), or `bypass_pg_is` (no
forward pass for old log-probs).

| preset | what it does | fields | the name comes from |
|---|---|---|---|
"""


def render() -> str:
    """The whole page: one table, in the order of the presets."""
    return _HEAD + "".join(
        f"| `{name}` | {_cell(preset.summary)} | {effective_overrides(name)} | {preset.origin} |\n"
        for name, preset in PRESETS.items()
    )


def effective_overrides(name: str) -> str:
    """The effective fields of a preset as overrides."""
    decided = RolloutCorrectionConfig.from_preset(name).effective_fields()
    return f"`{' '.join(f'{field}={value}' for field, value in decided.items())}`" if decided else "none"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
