"""Pages that are tables: the metric catalogue, the presets of rollout correction, the causes of a gap,
charts."""

import textwrap
from collections.abc import Sequence

from documents.markdown import table

from verl_rc.algorithm.health.cause import NO_CORRECTION, Cause
from verl_rc.algorithm.health.cause_table import INVARIANTS, RUN_CAUSES
from verl_rc.algorithm.health.signature_causes import SIGNATURE_CAUSES
from verl_rc.config.algorithms import POLICY_LOSSES
from verl_rc.config.rollout_correction import PRESETS, RolloutCorrectionConfig
from verl_rc.metrics.bounds import LOG_RATIO_BOUND
from verl_rc.metrics.catalog import SECTIONS
from verl_rc.metrics.catalog.symbols import SYMBOLS
from verl_rc.records.token_records.token_record import FIELDS, REQUIRED

_METRICS_HEAD = """\
# Metrics

Every number that a run reports, with its unit and formula. `python -m scripts.documents`
writes this page from `verl_rc/metrics/catalog`; change an entry there.

- *Name*: `{data_source}` stands for the name of a data source, `{n}` for a number, other names in
  braces for one word. `{spread}`, `{extreme}` and most `{statistic}`s are the mean, maximum or
  minimum (`std`: population standard deviation) of what the formula names. Formulas leave out the
  prefix of a name that is their own.
- *Unit*: none for a ratio, a fraction or a count.
- *How it is computed*: `a / b` counts a and b over the batch of one step, where nothing else is
  said.
- *Healthy*: the range in most runs that go well.

## Words and symbols

Besides those of the [glossary](glossary.md):

"""


def metrics_page() -> str:
    """docs/metrics.md: words and symbols, then a table for each section of the catalogue."""
    parts = [
        _METRICS_HEAD,
        *(f"{_wrapped(f'- {symbol}: {meaning}')}\n" for symbol, meaning in SYMBOLS.items()),
    ]
    for section, specs in SECTIONS.items():
        rows = (
            (f"`{spec.name}`", "" if spec.unit == "1" else spec.unit, spec.formula, spec.healthy_in_words)
            for spec in specs
        )
        parts += [f"\n## {section}\n\n", table(("Name", "Unit", "How it is computed", "Healthy"), rows)]
    losses: dict[tuple[str, str, str], list[str]] = {}
    for name, loss in POLICY_LOSSES.items():
        losses.setdefault((loss.clipped or "", loss.clipped_lower or "", _PPO_KL[loss.ppo_kl]), []).append(
            name
        )
    clipping = ((_code(alike), *clipped) for clipped, alike in losses.items())
    head = ("loss", "`actor/pg_clipfrac`", "`actor/pg_clipfrac_lower`", "`actor/ppo_kl`")
    return "".join((*parts, _CLIPPING_HEAD, table(head, clipping)))


def _code(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


_CLIPPING_HEAD = f"""
## Clipping by policy loss

The tokens that `actor/pg_clipfrac` and `actor/pg_clipfrac_lower` count, and what `actor/ppo_kl`
averages (clamped: to ±{LOG_RATIO_BOUND:g} nats); empty: not reported. δ: old − current log-prob of a
token, r = exp(−δ); s: the ratio of its sequence, as the loss defines it; π, π_old: probability of
the token under the current and the old policy; ε_low, ε_high, c: `clip_ratio_low`,
`clip_ratio_high`, `clip_ratio_c` of `actor_rollout_ref.actor`; low, high: `actor/ratio_low`,
`actor/ratio_high`.

"""
_PPO_KL = {
    "clamped": "clamped δ",
    "whole": "δ",
    "distance": "|δ|",
    "none": "",
}


def _wrapped(item: str) -> str:
    return textwrap.fill(item, 100, subsequent_indent="  ")


def presets_table() -> str:
    """The presets in docs/rollout_correction.md: names that stand for the same fields share a row."""
    names: dict[str, list[str]] = {}
    for name in PRESETS:
        names.setdefault(effective_overrides(name), []).append(name)
    rows = (
        (
            _code(alike),
            fields,
            ", ".join(dict.fromkeys(PRESETS[name].origin.partition(",")[0] for name in alike)),
        )
        for fields, alike in names.items()
    )
    return table(("preset", "fields", "source"), rows)


def effective_overrides(name: str) -> str:
    """The effective fields of a preset as overrides."""
    decided = RolloutCorrectionConfig.from_preset(name).effective_fields()
    return f"`{' '.join(f'{field}={value}' for field, value in decided.items())}`" if decided else "none"


def signature_causes_table() -> str:
    """The causes in docs/see_why.md that the signatures of a step name, in the order in which they are
    asked."""
    return _causes(SIGNATURE_CAUSES)


def run_causes_table() -> str:
    """The causes in docs/see_why.md that token records show without statistics, or the course of a run."""
    return _causes((*INVARIANTS, *RUN_CAUSES))


def _causes(causes: Sequence[Cause]) -> str:
    """A table whose dagger stands for "no correction repairs this"; what is to do is said once for a row."""
    said: set[tuple[int, str]] = set()
    rows = []
    for cause in causes:
        test = (cause.row, cause.next_test.replace(NO_CORRECTION, "†"))
        rows.append((str(cause.row), cause.condition, cause.name, "as above" if test in said else test[1]))
        said.add(test)
    return table(("row", "if", "cause", "do"), rows)


def fields_table() -> str:
    """The fields of a row in docs/token_record.md."""
    rows = []
    for name, field in FIELDS.items():
        kind = "text" if field.dtype == "str" else {"bool": "0 or 1"}.get(field.dtype, field.dtype)
        needed = "required: " if name in REQUIRED else ""
        rows.append(
            (f"`{name}`", f"{kind}{' [R]' if field.is_of_tokens else ''}", f"{needed}{field.meaning}")
        )
    return table(("field", "type", "what it is"), rows)
