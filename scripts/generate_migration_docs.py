"""Writes docs/migration_from_verl.md from the tables of translations: python scripts/generate_migration_docs.py [--check]"""

import sys
from collections.abc import Mapping
from pathlib import Path

from verl_rc.config.migration import migrate
from verl_rc.config.refused import REFUSED_SECTIONS, RENAMED

PAGE = Path(__file__).resolve().parents[1] / "docs" / "migration_from_verl.md"

_HEAD = """\
# Coming from verl

An override taken from a verl recipe for FSDP and vLLM means here what it means there, or is refused at the start with what to
write instead; nothing is read and ignored. Three tools:

```bash
verl-rc migrate run.yaml +algorithm.rollout_is_threshold=2.0    # overrides of any release, translated, with notes
verl-rc explain algorithm.adv_estimator=grpo                     # what a configuration will do, in words
verl-rc presets                                                  # presets by every name they have had
```

A refused key ends the run with exit code 2 before anything starts; the message holds the line to write. `+key=value` of verl
recipes is taken as `key=value` where the key is known. Column names of data files, names of metrics (`rollout_corr/*`,
`actor/*`, `critic/*`, `timing_s/*`) and the signature of reward functions are verl's.

`scripts/generate_migration_docs.py` writes this page from `verl_rc/config/refused.py` and by translating the examples below.
"""

SAME_KEYS: Mapping[str, tuple[str, str]] = {
    "trainer.n_gpus_per_node": ("GPUs of a node", "the same; on a CPU the number of trainer ranks"),
    "trainer.device": ("`cuda` or `npu`", "`auto`, `cuda` or `cpu`"),
    "actor_rollout_ref.actor.strategy": ("`fsdp` is FSDP1", "both names mean FSDP2"),
    "actor_rollout_ref.actor.clip_ratio": (
        "without effect: the two sides have defaults of their own",
        "the clip range of every side that is null",
    ),
    "actor_rollout_ref.rollout.val_kwargs.do_sample": ("without effect: the temperature decides", "False is greedy"),
    "data.truncation": ("without effect: prompts are cut on the left", "`error` stops at a prompt too long, `left` cuts it"),
    "algorithm.rollout_correction.rollout_rs_threshold": (
        "bounds of k1 rules are executed on rollout/train",
        "they bound train/rollout, as the documents of both projects say",
    ),
    "algorithm.rollout_correction.bypass_mode": ("switches the loss in the driver's copy only", "switches driver and actor"),
}
"""Keys that both projects read, and not quite alike: in verl, here."""

_CORRECTION_HEAD = """
## Rollout correction of every release

What `verl-rc migrate` makes of typical settings. Presets are accepted by all their names ([presets.md](presets.md)); for metrics
that were renamed see [rollout_correction.md](rollout_correction.md#coming-from-verl).
"""

CORRECTION_EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "August 2025 (era A)": ("actor_rollout_ref.actor.tis_imp_ratio_cap=2.0",),
    "October 2025, truncated weights (era B)": (
        "algorithm.rollout_is=True",
        "algorithm.rollout_is_level=sequence",
        "algorithm.rollout_is_mode=truncate",
        "algorithm.rollout_is_threshold=2.0",
    ),
    "October 2025, masked tokens (era B3)": (
        "algorithm.rollout_is=True",
        "algorithm.rollout_is_level=token",
        "algorithm.rollout_is_mode=mask",
        "algorithm.rollout_is_threshold=2.0",
        "algorithm.rollout_is_threshold_lower=0.5",
    ),
    "November 2025 (era C)": (
        "algorithm.rollout_correction.rollout_is=token",
        "algorithm.rollout_correction.rollout_is_threshold=2.0",
        "algorithm.rollout_correction.rollout_rs=geometric",
        "algorithm.rollout_correction.rollout_rs_threshold=1.001",
        "algorithm.rollout_correction.rollout_rs_threshold_lower=0.999",
        "algorithm.rollout_correction.bypass_old_logprob_for_rollout=False",
    ),
    "November 2025, two policies (era C)": (
        "algorithm.rollout_correction.rollout_is=sequence",
        "algorithm.rollout_correction.bypass_old_logprob_for_rollout=True",
        "algorithm.rollout_correction.use_pure_rollout_correction=True",
    ),
    "since January 2026 (era D)": (
        "algorithm.rollout_correction.rollout_rs=seq_mean_k1",
        "algorithm.rollout_correction.rollout_rs_threshold=0.99_1.001",
    ),
}
"""Settings of rollout correction as each release had them."""


def render() -> str:
    """The whole page."""
    return "".join([_HEAD, _renamed(), _refused(), _same_keys(), _correction()])


def _renamed() -> str:
    rows = (f"| `{key}` | {_as_code(replacement)} |\n" for key, replacement in sorted(RENAMED.items()))
    return "\n## Keys by another name\n\n| verl | write |\n|---|---|\n" + "".join(rows)


def _refused() -> str:
    rows = (f"| `{section}` | {reason} |\n" for section, reason in sorted(REFUSED_SECTIONS.items()))
    return "\n## Sections and keys that are refused\n\n| verl | why, and what instead |\n|---|---|\n" + "".join(rows)


def _same_keys() -> str:
    rows = (f"| `{key}` | {there} | {here} |\n" for key, (there, here) in SAME_KEYS.items())
    return "\n## Same key, another meaning\n\n| key | in verl | here |\n|---|---|---|\n" + "".join(rows)


def _correction() -> str:
    parts = [_CORRECTION_HEAD]
    for release, settings in CORRECTION_EXAMPLES.items():
        migration = migrate(settings)
        given, made = "\n".join(settings), "\n".join(migration.overrides) or "(nothing)"
        notes = "".join(f"- {note}\n" for note in migration.notes)
        parts.append(f"\n### {release}\n\n```text\n{given}\n```\n\nbecomes\n\n```text\n{made}\n```\n\n{notes}")
    return "".join(parts)


def _as_code(replacement: str) -> str:
    """A key or override as code, a sentence as it is."""
    return replacement if " " in replacement else f"`{replacement}`"


def main() -> None:
    """Write the page, or fail when it is not current."""
    if "--check" in sys.argv[1:]:
        raise SystemExit(0 if PAGE.read_text(encoding="utf-8") == render() else f"{PAGE.name} is not current; run this script")
    PAGE.write_text(render(), encoding="utf-8")


if __name__ == "__main__":
    main()
