"""Options and metrics that the verdict's code names exist: what a user is told can be typed."""

import ast
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from types import ModuleType

import pytest

import verl_rc.algorithm.health
import verl_rc.insight
from verl_rc.config.run import RunConfig
from verl_rc.config.schema import has_key
from verl_rc.metrics.catalog import CATALOG

_OPTION = re.compile(r"\b(?:actor_rollout_ref|algorithm|async_training|critic|data|trainer)(?:\.[a-z_]\w*)+")
_METRIC = re.compile(
    r"(?:actor|async|critic|env|ledger|perf|prompt_length|response_length|rollout_corr|sync|timing_s)/"
    r"[\w/@-]*\w(?<!_)"
)
_OF_VERL = {"actor_rollout_ref.rollout.calculate_log_probs"}
_FILES = {"trainer.pt", "data.pkl"}
MODULES = [
    info.name
    for package in (verl_rc.insight, verl_rc.algorithm.health)
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if ".hooks." not in info.name
]


def texts_of(module: ModuleType) -> Iterator[str]:
    """Texts of the code without docstrings; of an f-string with the module's constants filled in."""
    constants = vars(module)
    tree = ast.parse(inspect.getsource(module))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            docs |= {id(part) for part in node.values}
            names = {
                id(part): constants.get(part.value.id, "\0")
                for part in node.values
                if isinstance(part, ast.FormattedValue) and isinstance(part.value, ast.Name)
            }
            yield "".join(
                str(part.value if isinstance(part, ast.Constant) else names.get(id(part), "\0"))
                for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


@pytest.mark.parametrize("name", MODULES)
def test_what_it_names_exists(name: str) -> None:
    texts = list(texts_of(importlib.import_module(name)))
    options = {option for text in texts for option in _OPTION.findall(text)} - _OF_VERL - _FILES
    assert [option for option in options if not has_key(RunConfig, option)] == []
    assert [text for text in texts if _METRIC.fullmatch(text) and CATALOG.find(text) is None] == []
