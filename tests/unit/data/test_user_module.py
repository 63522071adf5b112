from pathlib import Path

import pytest

from verl_rc.config.user_code import load_user_module


def test_a_file_becomes_a_module(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("answer = 6 * 7\n")
    assert load_user_module(str(tmp_path / "mine.py"), "a.path").answer == 42


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("absent.py", None, "a.path must be an existing Python file, got"),
        ("mine.txt", "answer = 1", "a.path must be an existing Python file, got"),
        ("mine.py", "1 / 0", r"a.path must be a file that can be imported; .* raised ZeroDivisionError"),
        ("mine.py", "def (", r"a.path must be a file that can be imported; .* raised SyntaxError"),
    ],
)
def test_what_cannot_be_loaded_is_named(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        load_user_module(str(tmp_path / name), "a.path")


def test_a_module_that_leaves_when_it_is_imported_is_named(tmp_path):
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(ValueError, match=r"data.custom_cls.path must be a file that can be imported; .* raised SystemExit\(0\)"):
        load_user_module(str(tmp_path / "leaves.py"), "data.custom_cls.path")
