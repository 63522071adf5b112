"""Translating rollout-correction settings of any verl release since August 2025 to today's fields, with
notes.

Eras: A (August 2025, one cap in the actor), B1 to B3 (October 2025, flat keys under ``algorithm``), C
(November 2025 to January 2026, ``algorithm.rollout_correction``), D (since January 2026).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from verl_rc.config.errors import nearest_key, shortened
from verl_rc.config.rejection_rules import Threshold, parse_rules, parse_threshold, threshold_specs

Era = Literal["A", "B1", "B2", "B3", "C", "D"]
BoundConvention = Literal["documented", "inverse"]

_CAPS = ("tis_imp_ratio_cap", "behav_imp_weight_cap", "imp_ratio_cap")
_ERA_B = ("rollout_is_level", "rollout_is_mode", "rollout_is_threshold_lower", "rollout_is_veto_threshold")
_ERA_C = (
    "rollout_rs_threshold_lower",
    "bypass_old_logprob_for_rollout",
    "use_pure_rollout_correction",
    "use_policy_gradient",
)
VERLS_FIELDS = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
    "rollout_token_veto_threshold",
    "bypass_mode",
    "loss_type",
)
"""Fields of verl's newest releases, era D."""
_IMPORT_OPTIONS = ("era", "k1_bound_convention")
_NEEDLESS = {
    "calculate_log_probs": "log-probs of the rollout are always taken",
    "use_rollout_log_probs": "no release ever read it",
    "loss_mode": "bypass_mode alone decides about the actor's loss here",
}
_KNOWN = (*_CAPS, *_ERA_B, *_ERA_C, *VERLS_FIELDS, *_NEEDLESS, *_IMPORT_OPTIONS)
_SECTIONS = ("actor_rollout_ref", "actor", "rollout", "policy_loss", "algorithm", "rollout_correction")
_RULE_OF_LEVEL = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
_DEFAULT_VETO = {"B1": 1e-4, "B2": 1e-4}
_NO_LOWER_BOUND = 1e-9

Fields = dict[str, object]


def import_legacy(mapping: Mapping[str, object]) -> tuple[Fields, list[str]]:
    """Fields of today, and notes in words, from settings of any era.

    Keys may be full (``algorithm.rollout_is_level``), nested, or the last part alone. Two more are read:
    ``era`` where the keys do not tell (``mask`` of era B meant zero weights in B2, rejection in B3), and
    ``k1_bound_convention``: ``documented`` takes the k1 bounds of era D as bounds on train/rollout,
    ``inverse`` as verl executed them, on rollout/train. Raises ``ValueError`` for unknown keys, keys of
    several eras at once, and values no era accepted.
    """
    leaves = dict(_leaves(mapping))
    era, convention = _options(leaves)
    notes = [f"{key}={leaves.pop(key)} is dropped: {why}." for key, why in _NEEDLESS.items() if key in leaves]
    fields = _TRANSLATIONS[era](leaves, era, notes)
    if era == "D":
        _apply_convention(fields, convention, notes)
    return fields, [f"read as settings of era {era}.", *notes]


def is_legacy_key(key: str) -> bool:
    """Whether a full key sets rollout correction as an earlier release did, and is none of today's."""
    *sections, leaf = key.lstrip("+").split(".")
    if leaf in (*_CAPS, *_ERA_B, *_ERA_C):
        return all(section in _SECTIONS for section in sections)
    return leaf in VERLS_FIELDS and sections in (
        ["algorithm"],
        ["actor_rollout_ref", "actor", "policy_loss", "rollout_correction"],
    )


def _leaves(mapping: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Last part and value of every key. Raises ``ValueError`` for unknown keys and contradicting copies."""
    leaves: dict[str, object] = {}
    for key, value in flatten(mapping):
        *sections, leaf = key.lstrip("+").split(".")
        if leaf not in _KNOWN or any(section not in _SECTIONS for section in sections):
            raise ValueError(
                f"{key} is no rollout-correction key of any release; did you mean "
                f"{nearest_key(leaf, _KNOWN)}?"
            )
        if leaf in leaves and leaves[leaf] != value:
            raise ValueError(f"{leaf} is given twice, as {leaves[leaf]!r} and {value!r}; keep one")
        leaves[leaf] = value
    yield from leaves.items()


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of each leaf; a mapping of thresholds is one."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and not str(name).endswith("threshold"):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _options(leaves: Fields) -> tuple[Era, BoundConvention]:
    convention = leaves.pop("k1_bound_convention", "documented")
    if convention not in get_args(BoundConvention):
        raise ValueError(
            f"k1_bound_convention must be one of {', '.join(get_args(BoundConvention))}; got {convention!r}"
        )
    era = leaves.pop("era", None)
    if era is not None and era not in get_args(Era):
        raise ValueError(f"era must be one of {', '.join(get_args(Era))}; got {era!r}")
    era = era or _detect_era(leaves)
    return era, convention  # type: ignore[return-value]  # both were checked against their alternatives


def _detect_era(leaves: Fields) -> Era:
    marks: dict[Era, bool] = {
        "A": any(key in leaves for key in _CAPS),
        "B3": any(key in leaves for key in _ERA_B) or isinstance(leaves.get("rollout_is"), bool),
        "C": any(key in leaves for key in _ERA_C) or str(leaves.get("rollout_rs")) in _RULE_OF_LEVEL,
    }
    eras = [era for era, marked in marks.items() if marked]
    if len(eras) > 1:
        raise ValueError(
            f"the keys {sorted(leaves)} belong to different releases (eras {', '.join(eras)}); keep those "
            "of one"
        )
    if not eras:
        return "D"
    return "B1" if leaves.get("rollout_is_mode") == "clip" else eras[0]


def _from_a(leaves: Fields, era: Era, notes: list[str]) -> Fields:
    caps = {key: leaves.pop(key) for key in _CAPS if key in leaves}
    _refuse_rest(leaves, era)
    values = [_number(value, key) for key, value in caps.items()]
    if len(set(values)) != 1:
        raise ValueError(f"era A has one cap; got {caps}")
    if values[0] <= 0:
        notes.append("a cap <= 0 switched correction off: the gap is measured, nothing is corrected.")
        return {}
    notes.append(
        "weights now apply to every policy loss, not to vanilla alone, and log-ratios are bounded by 20 "
        "before exp."
    )
    return {"rollout_is": "token", "rollout_is_threshold": values[0]}


def _from_b(leaves: Fields, era: Era, notes: list[str]) -> Fields:
    upper = leaves.pop("rollout_is_threshold", None)
    lower = leaves.pop("rollout_is_threshold_lower", None)
    weighted = bool(leaves.pop("rollout_is", False))
    level = str(leaves.pop("rollout_is_level", "token"))
    mode = str(leaves.pop("rollout_is_mode", "truncate"))
    veto = leaves.pop("rollout_is_veto_threshold", _DEFAULT_VETO.get(era))
    _refuse_rest(leaves, era)
    if level not in _RULE_OF_LEVEL or mode not in ("truncate", "clip", "mask"):
        raise ValueError(
            "rollout_is_level must be token, sequence or geometric and rollout_is_mode truncate, clip or "
            f"mask; got {level!r} and {mode!r}"
        )
    if upper is None or _number(upper, "rollout_is_threshold") <= 0:
        notes.append(
            "without rollout_is_threshold nothing was computed; the gap is measured here, nothing is "
            "corrected."
        )
        return {}
    bounds = _bounds(upper, lower)
    rejects = era == "B3"
    fields = _weights_of_b(level, mode, bounds, weighted, rejects, notes)
    if veto is not None and (weighted or rejects):
        fields["rollout_token_veto_threshold"] = _number(veto, "rollout_is_veto_threshold")
        effect = "rejects rows, as it did" if rejects else "rejects rows; it made them weigh 0"
        notes.append(f"the veto at {veto} {effect}.")
    elif veto is not None:
        notes.append("the veto had no effect while rollout_is was false; it is dropped.")
    return fields


def _weights_of_b(
    level: str, mode: str, bounds: Threshold, weighted: bool, rejects: bool, notes: list[str]
) -> Fields:
    """Weights and rejection of one row of era B's table; ``rejects``: mask mode edited the response mask
    (B3)."""
    weights: Fields = {"rollout_is": level, "rollout_is_threshold": bounds.upper} if weighted else {}
    if level == "geometric" and weighted:
        notes.append("geometric weights exist here, though not in verl of today.")
    if mode == "truncate":
        if not weighted:
            notes.append("rollout_is was false: metrics only.")
        return weights
    if not rejects:
        if not weighted:
            notes.append(f"{mode} mode had no effect while rollout_is was false: metrics only.")
            return {}
        notes.append(f"{mode} mode gave weights outside {bounds} the value 0: a band says the same.")
        return {**weights, "rollout_is_threshold": str(bounds)}
    notes.append(
        "mask mode is read as of release B3, which rejected; for B2, which made weights 0, add era=B2. "
        "Losses were divided by the kept tokens of a micro-batch; add rejection_denominator=kept to divide "
        "by those of the mini-batch."
    )
    return {**weights, "rollout_rs": _RULE_OF_LEVEL[level], "rollout_rs_threshold": str(bounds)}


def _from_c(leaves: Fields, era: Era, notes: list[str]) -> Fields:
    fields: Fields = {}
    if "bypass_old_logprob_for_rollout" in leaves:
        fields["bypass_mode"] = bool(leaves.pop("bypass_old_logprob_for_rollout"))
        notes.append("bypass_old_logprob_for_rollout is now bypass_mode.")
    for old in ("use_pure_rollout_correction", "use_policy_gradient"):
        if old in leaves:
            fields["loss_type"] = "reinforce" if leaves.pop(old) else "ppo_clip"
            notes.append(f"{old} is now loss_type={fields['loss_type']}.")
    fields |= _rejection_of_c(leaves, notes)
    if leaves.get("rollout_token_veto_threshold") is not None:
        notes.append(
            "the veto stays one-sided; verl of today has only seq_max_k2, which also rejects large ratios."
        )
    fields |= {key: leaves.pop(key) for key in VERLS_FIELDS if key in leaves}
    _refuse_rest(leaves, era)
    return fields


def _rejection_of_c(leaves: Fields, notes: list[str]) -> Fields:
    level = leaves.pop("rollout_rs", None)
    upper, lower = leaves.pop("rollout_rs_threshold", None), leaves.pop("rollout_rs_threshold_lower", None)
    if level is None:
        if upper is not None or lower is not None:
            notes.append("rollout_rs_threshold without rollout_rs had no effect; it is dropped.")
        return {}
    if str(level) not in _RULE_OF_LEVEL:
        raise ValueError(f"rollout_rs of era C must be token, sequence or geometric; got {level!r}")
    if upper is None:
        raise ValueError(f"rollout_rs={level} needs rollout_rs_threshold, got null; pass its upper bound")
    rule = _RULE_OF_LEVEL[str(level)]
    notes.append(f"rollout_rs={level} is now {rule}, with bounds on train/rollout as before.")
    if lower is None:
        return {"rollout_rs": rule, "rollout_rs_threshold": _number(upper, "rollout_rs_threshold")}
    if _number(lower, "rollout_rs_threshold_lower") == 0:
        notes.append(f"a lower bound of 0 is written {_NO_LOWER_BOUND}.")
    return {"rollout_rs": rule, "rollout_rs_threshold": str(_bounds(upper, lower))}


def _from_d(leaves: Fields, era: Era, notes: list[str]) -> Fields:
    fields = {key: leaves.pop(key) for key in VERLS_FIELDS if key in leaves}
    _refuse_rest(leaves, era)
    if "rollout_is" not in fields:
        notes.append("rollout_is was not given: null, as in verl's YAML (its Python class says sequence).")
    return fields


def _apply_convention(fields: Fields, convention: BoundConvention, notes: list[str]) -> None:
    """Invert k1 bounds under ``inverse``; adds a note where the two conventions differ."""
    rules, value = fields.get("rollout_rs"), fields.get("rollout_rs_threshold")
    if rules is None or value is None:
        return
    text = rules if isinstance(rules, str) else ",".join(map(str, rules))  # type: ignore[call-overload]  # a list of names
    parsed = parse_rules(text, "rollout_rs")
    specs = [parse_threshold(spec, "rollout_rs_threshold") for spec in threshold_specs(value)]
    specs = specs * len(parsed) if len(specs) == 1 else specs
    if len(specs) != len(parsed):
        return  # the schema says what is wrong
    bounds = []
    for rule, bound in zip(parsed, specs, strict=True):
        lopsided = (
            rule.bounds_ratio and bound.lower is not None and abs(bound.lower * bound.upper - 1.0) > 1e-9
        )
        if lopsided and convention == "inverse" and bound.lower is not None:
            bounds.append(Threshold(1.0 / bound.lower, 1.0 / bound.upper))
            notes.append(
                f"{rule.name}: {bound} is turned to {bounds[-1]}, the band of train/rollout that verl "
                "executed."
            )
            continue
        bounds.append(bound)
        if lopsided:
            notes.append(
                f"{rule.name}: {bound} bounds train/rollout, as verl's documents say; verl executed it on "
                "rollout/train. Add k1_bound_convention=inverse to keep what ran."
            )
    if convention == "inverse":
        fields["rollout_rs_threshold"] = ",".join(map(str, bounds))


def _refuse_rest(leaves: Fields, era: Era) -> None:
    if leaves:
        raise ValueError(
            f"{', '.join(sorted(leaves))} does not belong to era {era}; drop it, or pass the era of the "
            "settings"
        )


def _bounds(upper: object, lower: object) -> Threshold:
    """A band from an upper and a lower bound, which is 1/upper when null; a lower bound of 0 becomes the
    smallest allowed."""
    top = _number(upper, "threshold")
    bottom = 1.0 / top if lower is None else _number(lower, "threshold_lower") or _NO_LOWER_BOUND
    return parse_threshold([bottom, top], "threshold")


def _number(value: object, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{key} must be a number; got {shortened(repr(value))}")
    try:
        return float(value)
    except ValueError as error:
        raise ValueError(f"{key} must be a number; got {shortened(repr(value))}") from error


_TRANSLATIONS = {"A": _from_a, "B1": _from_b, "B2": _from_b, "B3": _from_b, "C": _from_c, "D": _from_d}
