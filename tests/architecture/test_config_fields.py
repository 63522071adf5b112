"""Every field of the configuration is documented: meaning, unit, range, what null does."""

import ast

import pytest
from architecture.source_tree import listed, package_files, parse, relative


def is_section(owner: ast.ClassDef) -> bool:
    """Whether a class is part of the configuration: a model, or derived from a section."""
    return any(ast.unparse(base).endswith(("Model", "Config")) for base in owner.bases)


def undocumented_fields(tree: ast.AST, path: str) -> list[str]:
    violations = []
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and is_section(node)):
        for field, successor in zip(owner.body, [*owner.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign) or "ClassVar" in ast.unparse(field.annotation):
                continue
            name = ast.unparse(field.target)
            documented = isinstance(successor, ast.Expr) and isinstance(
                getattr(successor.value, "value", None), str
            )
            if not documented and not name.startswith(("_", "model_config")):
                violations.append(f"{path}:{field.lineno} {owner.name}.{name} has no docstring below it")
    return violations


def test_every_field_has_a_docstring():
    violations = [
        v for path in package_files("config") for v in undocumented_fields(parse(path), relative(path))
    ]
    assert not violations, listed(violations)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ('lr: float = 1e-6\n    """Learning rate."""', 0),
        ('lr: float = 1e-6\n    clip: float = 1.0\n    """Clip."""', 1),
        ("lr: float = 1e-6", 1),
        ("kinds: ClassVar[int] = 3", 0),
        ("model_config: ConfigDict = {}", 0),
        ('lr: float = 1e-6\n    """Learning rate."""\n    class Inner(BaseModel):\n        x: int = 1', 1),
    ],
)
def test_the_check_itself(body, count):
    assert len(undocumented_fields(ast.parse(f"class A(StrictModel):\n    {body}\n"), "planted.py")) == count
