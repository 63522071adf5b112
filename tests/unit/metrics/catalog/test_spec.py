"""How catalogue entries recognise names and are found, and what is said about names that have none."""

import json
import re
from pathlib import Path

import pytest

from verl_rc.metrics.catalog import CATALOG, Catalog, check_names, describe
from verl_rc.metrics.catalog.spec import MetricSpec, spread
from verl_rc.metrics.catalog.symbols import SYMBOLS


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("actor/lr", "actor/lr", True),
        ("actor/lr", "actor/lrs", False),
        ("perf/mfu/{role}", "perf/mfu/actor", True),
        ("perf/mfu/{role}", "perf/mfu/actor/extra", False),
        ("val-core/{data_source}/acc/mean@{n}", "val-core/openai/gsm8k/acc/mean@16", True),
        ("val-core/{data_source}/acc/mean@{n}", "val-core/openai/gsm8k/acc/mean@many", False),
        ("rollout_corr/rollout_rs_{rule}_max", "rollout_corr/rollout_rs_seq_mean_k1_max", True),
        ("rollout_corr/rollout_rs_{rule}_max", "rollout_corr/rollout_rs_/_max", False),
        ("a.b", "aXb", False),
    ],
)
def test_matches(pattern, name, matches):
    assert MetricSpec(pattern, "1", "").matches(name) is matches


def test_a_spread_is_one_entry_of_three_names():
    spec = spread("critic/score", "reward", "score, over sequences")
    names = ("mean", "max", "min", "std", "score")
    assert [spec.matches(f"critic/score/{name}") for name in names] == [True] * 3 + [False] * 2
    assert spec.formula == "score, over sequences"


@pytest.mark.parametrize(
    ("healthy", "words"),
    [
        (None, ""),
        ((None, None), ""),
        ((None, 0.1), "≤ 0.1"),
        ((0.5, None), "≥ 0.5"),
        ((0, 0), "0"),
        ((0.5, 1.0), "0.5 to 1"),
    ],
)
def test_healthy_ranges_in_words(healthy, words):
    assert MetricSpec("a/b", "1", "", healthy=healthy).healthy_in_words == words


def test_the_ends_of_a_healthy_range_are_numbers_or_refused():
    bounded = MetricSpec("a/b", "1", "f", (None, 0.5))
    assert bounded.highest_healthy == 0.5
    for end in (lambda: bounded.lowest_healthy, lambda: MetricSpec("a/b", "1", "f").highest_healthy):
        with pytest.raises(ValueError, match="'a/b' must have a healthy range that ends on that side"):
            end()


GOLDEN = Path(__file__).parents[3] / "golden"


def metric_names(node):
    """Every key below a ``metrics`` mapping of a golden file."""
    if isinstance(node, dict):
        yield from node.get("metrics", {}) if isinstance(node.get("metrics"), dict) else ()
        for child in node.values():
            yield from metric_names(child)
    elif isinstance(node, list):
        for child in node:
            yield from metric_names(child)


@pytest.mark.parametrize(
    "file", ["rollout_correction.json", "bypass_losses.json", "policy_losses.json", "value_loss.json"]
)
def test_every_name_of_the_golden_files_is_known(file):
    names = set(metric_names(json.loads((GOLDEN / file).read_text())))
    check_names(names)
    assert names or file == "value_loss.json"


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("rollout_corr/rollout_rs_masked_fraction", "rollout_corr/rollout_rs_masked_fraction"),
        ("rollout_corr/rollout_rs_seq_masked_fraction", "rollout_corr/rollout_rs_seq_masked_fraction"),
        (
            "rollout_corr/rollout_rs_token_k1_masked_fraction",
            "rollout_corr/rollout_rs_{rule}_masked_fraction",
        ),
        (
            "rollout_corr/rollout_rs_token_k1_seq_masked_fraction",
            "rollout_corr/rollout_rs_{rule}_seq_masked_fraction",
        ),
        ("val-aux/digits/sort/reward/best@4/mean", "val-aux/{data_source}/{variable}/best@{n}/{statistic}"),
    ],
)
def test_the_most_specific_entry_describes_a_name(name, entry):
    assert describe(name).name == entry


def test_unknown_names_are_listed_with_the_nearest():
    with pytest.raises(ValueError, match=r"'actor/pg_los' is unknown \(nearest: 'actor/pg_loss'\)"):
        check_names(["actor/lr", "actor/pg_los"])
    with pytest.raises(ValueError, match=r"'timing_s/gen_' is unknown"):
        describe("timing_s/gen_")


def test_a_pattern_itself_is_not_a_name():
    assert CATALOG.find("val-core/{data_source}/acc/mean@{n}") is None


def test_one_name_has_one_definition():
    with pytest.raises(ValueError, match="'a' must have one definition"):
        Catalog([MetricSpec("a", "1", ""), MetricSpec("a", "s", "")])


def test_every_entry_says_unit_and_formula():
    for spec in CATALOG:
        assert spec.unit, spec.name
        assert spec.formula, spec.name
        low, high = spec.healthy or (0, 0)
        assert low is None or high is None or low <= high, spec.name


@pytest.mark.parametrize(
    ("ending", "unit"), [("tokens", "tokens"), ("seconds|_s", "s"), ("bytes", "bytes"), ("fraction", "1")]
)
def test_a_name_that_says_its_unit_has_it(ending, unit):
    name = re.compile(rf".*({ending})(/(mean|max|min))?")
    assert {spec.name: spec.unit for spec in CATALOG if name.fullmatch(spec.name) and spec.unit != unit} == {}


SYMBOL = re.compile(r"(?<![\w./{'-])(?!a\b)[a-zA-Zρκ][₂′]?(?![\w.}′₂-])")


def defined_in(text):
    """Symbols that a text itself explains: ``h = …``, ``c: …``, ``h₂ the entropy of …``, ``k of …``."""
    return set(re.findall(rf"({SYMBOL.pattern})(?: =|:| the| of)", text))


def test_every_symbol_of_a_formula_is_explained():
    explained = SYMBOLS.keys() | defined_in(" ".join(SYMBOLS.values()))
    undefined = {
        spec.name: unknown
        for spec in CATALOG
        if (unknown := set(SYMBOL.findall(spec.formula)) - explained - defined_in(spec.formula))
    }
    assert undefined == {}
