"""docs/presets.md, from the presets of rollout correction."""

from collections import defaultdict

from verl_rc.config.rollout_correction import PRESETS, RolloutCorrectionConfig

_HEAD = """\
# Presets of rollout correction

`algorithm.rollout_correction.preset=NAME` stands for the fields below, all of `algorithm.rollout_correction`; fields that you
give win over the preset's. In Python: `RolloutCorrectionConfig.from_preset("NAME", rollout_is_threshold=3.0)`. `verl-rc presets`
prints the same list. `verl-rc docs` writes this page from `verl_rc/config/rollout_correction_presets.py`.

[Which preset](rollout_correction.md#which-preset) has the reasons. Most runs want `decoupled_token_is` (long responses),
`decoupled_seq_is` (short ones), or `bypass_pg_is` (no forward pass for old log-probs).
"""


def render() -> str:
    """The whole page: one table for each origin of names, in the order of the presets."""
    names_by_origin: dict[str, list[str]] = defaultdict(list)
    for name, preset in PRESETS.items():
        names_by_origin[preset.origin].append(name)
    parts = [_HEAD]
    for origin, names in names_by_origin.items():
        parts.append(f"\n## {origin}\n\n| preset | what it does | fields |\n|---|---|---|\n")
        parts += [f"| `{name}` | {_cell(PRESETS[name].summary)} | {fields_in_words(name)} |\n" for name in names]
    return "".join(parts)


def fields_in_words(name: str) -> str:
    """What a preset decides, as overrides."""
    decided = RolloutCorrectionConfig.from_preset(name).decided_fields()
    return f"`{' '.join(f'{field}={value}' for field, value in decided.items())}`" if decided else "none"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")
