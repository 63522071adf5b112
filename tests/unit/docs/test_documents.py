"""What documents tell people to type exists: configuration keys, presets, commands, anchors. (Links, files,
modules and metrics: tests/architecture/test_documents.py.)"""

import io
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from recipe_arguments import RECIPES, ROOT, arguments_of
from rich.console import Console

from verl_rc import cli
from verl_rc.config.load import load_run_config
from verl_rc.config.load.command_line import parse
from verl_rc.config.load.compose import Composer
from verl_rc.config.rollout_correction import PRESETS
from verl_rc.config.run import RunConfig
from verl_rc.config.schema import fields_of
from verl_rc.config.sft import SftConfig
from verl_rc.config.verl.keys import is_verl_key
from verl_rc.config.verl.migration import is_correction_key
from verl_rc.metrics.sinks import ConsoleSink

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
NAME = [document.relative_to(ROOT).as_posix() for document in DOCUMENTS]
ABOUT_VERL = {"migration_from_verl.md", "rollout_correction.md", "token_record.md", "tasks.md"}
"""Documents that name keys of verl beside those of this project."""

_SECTIONS = "data|actor_rollout_ref|critic|reward|algorithm|trainer|ray_kwargs"
_KEY = re.compile(rf"(?<![\w./-])\+?((?:{_SECTIONS})(?:\.\w+)+)")
_FILE_SUFFIXES = (".py", ".parquet", ".md", ".sh", ".jsonl", ".json", ".yaml")
_PRESET = re.compile(r"(?:preset=|from_preset\(\")(\w+)")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")
_ANCHOR = re.compile(r"\]\(([\w./-]*)#([\w-]+)\)")
_PLACEHOLDERS = re.compile(r"^(?:KEY=VALUE|key=value|OVERRIDE|NAME|JOB|…|\.\.\.|\[override|\.\.\.\])$")
_FREE = (
    "distillation.teacher_models.",
    "actor_rollout_ref.rollout.engine_kwargs.vllm.",
    "ray_kwargs.ray_init.runtime_env.",
    "data.apply_chat_template_kwargs.",
)
_OTHER_PROGRAMS = {
    "source",
    "docker",
    "sudo",
    "wandb",
    "uv",
    "ray",
    "cd",
    "export",
    "hf",
    "grep",
    "pip",
    "pre-commit",
}

_KNOWN = set(fields_of(RunConfig)) | {"algorithm.rollout_correction.preset"}
_COMPOSER = Composer(parse([]), has_groups=True)
_CHOICES = {
    f"{group}={name}" for group in _COMPOSER.groups() for name in _COMPOSER.loader.get_group_options(group)
}
"""Choices of configuration groups, as they are typed."""
_KNOWN_SFT = set(fields_of(SftConfig))


def is_key(key, known=frozenset(_KNOWN)):
    """A leaf, a section, or something below a mapping that takes any key."""
    return key in known or any(name.startswith(f"{key}.") for name in known) or key.startswith(_FREE)


def code_of(text):
    """Everything in code blocks and code spans."""
    spans = _SPAN.findall(_BLOCK.sub("", text))
    return "\n".join([*(body for _, body in _BLOCK.findall(text)), *spans])


def unfields_of(text, about_verl=False):
    """Configuration keys in code that no run would take."""
    found = {match for match in _KEY.findall(code_of(text)) if not match.endswith(_FILE_SUFFIXES)}
    wrong = {key for key in found if not is_key(key)}
    return sorted(key for key in wrong if not (about_verl and (is_verl_key(key) or is_correction_key(key))))


def unknown_presets(text):
    """Names of presets in code that do not exist."""
    return sorted({name for name in _PRESET.findall(code_of(text)) if name not in PRESETS and name != "NAME"})


def commands_of(text):
    """Commands that a reader would type: lines of shell blocks, and code spans that begin like one."""
    blocks = [body for language, body in _BLOCK.findall(text) if language in ("bash", "sh", "shell")]
    lines = [line for body in blocks for line in body.replace("\\\n", " ").splitlines()]
    spans = [
        span
        for span in _SPAN.findall(_BLOCK.sub("", text))
        if re.match(r"(?:\w+=\S+ )*(?:bash|python|verl-rc) \S", span)
    ]
    return [line for line in (line.strip() for line in [*lines, *spans]) if line and not line.startswith("#")]


def mistake_in(command):
    """Why a command cannot be right; None when nothing speaks against it."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError as error:
        return f"does not parse: {error}"
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    if not words:
        return None
    program = words[0].removeprefix(".venv/bin/")
    arguments = [word for word in words[1:] if not _PLACEHOLDERS.match(word)]
    if program == "bash":
        return _mistake_in_script(arguments)
    if program == "python":
        return _mistake_in_python(arguments)
    if program == "verl-rc":
        return _mistake_in_subcommand(arguments)
    return None if program in _OTHER_PROGRAMS else f"begins with {program}, which this test does not know"


def _mistake_in_script(arguments):
    script, *further = arguments
    if "<" in script or script == "recipes/NAME":
        return None
    if not (ROOT / script).is_file():
        return f"{script} does not exist"
    if script.startswith("scripts/cluster/submit"):
        return _mistake_in_script(further)
    if script.startswith("recipes/"):
        try:
            load_run_config(arguments_of(ROOT / script, *further)[2:])
        except ValueError as error:
            return str(error)
    return None


def _mistake_in_python(arguments):
    if arguments[:1] == ["-m"]:
        module, *overrides = arguments[1:]
        if module in ("pytest", "pip"):
            return None
        path = ROOT / Path(*module.split("."))
        if not (path.with_suffix(".py").is_file() or path.is_dir()):
            return f"module {module} does not exist"
        if module.startswith("scripts.") and path.with_suffix(".py").is_file():
            return _mistake_in_python([path.with_suffix(".py").relative_to(ROOT).as_posix(), *overrides])
        return _mistake_in_overrides(overrides, _KNOWN_SFT if module == "verl_rc.main_sft" else _KNOWN)
    script, *options = arguments
    if not (ROOT / script).is_file():
        return f"{script} does not exist"
    text = (ROOT / script).read_text() + "".join(
        path.read_text() for path in (ROOT / script).parent.glob("conversion.py")
    )
    missing = [
        option for option in options if option.startswith("--") and f'"{option.split("=")[0]}"' not in text
    ]
    return f"{script} has no option {missing[0]}" if missing else None


def _mistake_in_overrides(overrides, known):
    choices = _CHOICES if known is _KNOWN else set()
    keys = [
        word for word in overrides if not word.startswith("-") and not set(_runs_of_a_sweep(word)) <= choices
    ]
    wrong = [word for word in keys if not is_key(word.split("=")[0].lstrip("+"), known)]
    return f"{wrong[0]} is no override" if wrong else None


def _runs_of_a_sweep(word):
    """``group=a,b`` as ``group=a`` and ``group=b``."""
    group, _, values = word.partition("=")
    return [f"{group}={value}" for value in values.split(",")]


def _mistake_in_subcommand(arguments):
    """A subcommand alone is its name, not a call."""
    try:
        parser = cli.build_parser()
        given, words = parser.parse_known_args([*arguments, "--help"] if len(arguments) == 1 else arguments)
    except SystemExit as end:
        return "verl-rc would refuse these arguments" if end.code else None
    if words and cli.SUBCOMMANDS[given.subcommand].takes_configuration:
        recipe, *overrides = words
        if not recipe.endswith(".sh"):
            return _mistake_in_overrides(words, _KNOWN)
        return (
            _mistake_in_script(words)
            if recipe.startswith("recipes/")
            else _mistake_in_overrides(overrides, _KNOWN)
        )
    return None


def too_wide(text):
    """Lines of prose over 100 columns; tables, pictures and code cannot be broken."""
    prose = _BLOCK.sub("", text).splitlines()
    return [line for line in prose if len(line) > 100 and not line.startswith(("|", "!["))]


def headings(text):
    """Anchors of a document's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", _BLOCK.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAME)
def test_keys_exist(document):
    assert unfields_of(document.read_text(), document.name in ABOUT_VERL) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAME)
def test_presets_exist(document):
    assert unknown_presets(document.read_text()) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAME)
def test_commands_could_be_typed(document):
    mistakes = {command: mistake_in(command) for command in commands_of(document.read_text())}
    assert {command: mistake for command, mistake in mistakes.items() if mistake} == {}


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAME)
def test_shell_blocks_parse(document):
    bash = shutil.which("bash")
    for language, body in _BLOCK.findall(document.read_text()):
        if language in ("bash", "sh", "shell"):
            result = subprocess.run([bash, "-n"], input=body, capture_output=True, text=True, check=False)
            assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAME)
def test_anchors_lead_to_headings(document):
    for target, anchor in _ANCHOR.findall(document.read_text()):
        page = document.parent / target if target else document
        assert anchor in headings(page.read_text()), f"{target}#{anchor}"


def test_every_document_is_in_the_reading_order():
    order = (ROOT / "docs" / "README.md").read_text()
    targets = {(ROOT / "docs" / target).resolve() for target in re.findall(r"\]\(([\w./-]+)\)", order)}
    missing = {document for document in DOCUMENTS if document.resolve() not in targets}
    assert missing == {ROOT / "docs" / "README.md"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAME)
def test_prose_is_at_most_100_columns_wide(document):
    assert too_wide(document.read_text()) == []


def test_the_first_page_can_be_read_in_a_minute():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 90
    assert len(_BLOCK.findall(text)[1][1].splitlines()) == 10  # what the quickstart prints


def test_pictures_in_documents_are_small_and_have_a_text():
    shown = [
        (document.parent / path, text)
        for document in DOCUMENTS
        for text, path in _IMAGE.findall(document.read_text())
    ]
    assert ROOT / "docs" / "images" / "quickstart.png" in [path for path, _ in shown]
    for path, text in shown:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size < 150_000
        assert len(text.split()) > 3, f"{path.name} must be described in words for those who cannot see it"


def test_the_first_page_shows_output_as_the_console_writes_it():
    (sample,) = [
        body for language, body in _BLOCK.findall((ROOT / "README.md").read_text()) if language == "text"
    ]
    names = {
        "reward": "critic/score/mean",
        "ESS": "rollout_corr/rollout_is_eff_sample_size",
        "|gap|": "sync/rollout_gap_mean",
    }
    steps = [line for line in sample.splitlines() if re.match(r"step [1-9]", line)]
    assert len(steps) > 3
    for line in steps:
        shown = {name: re.search(rf"{re.escape(label)} ([\d.]+)", line)[1] for label, name in names.items()}
        written = io.StringIO()
        ConsoleSink(120, Console(file=written)).log(
            {name: float(value) for name, value in shown.items()}, step=1
        )
        for label, name in names.items():
            assert f"{label} {shown[name]}" in written.getvalue()


def test_every_recipe_is_in_the_table_with_its_preset():
    table = (ROOT / "docs" / "recipes.md").read_text().splitlines()
    for recipe in RECIPES:
        (row,) = [line for line in table if f"](../recipes/{recipe.name})" in line]
        presets = re.findall(r"^correction=(\w+)", "\n".join(arguments_of(recipe)), re.MULTILINE)
        correction = row.rstrip("| ").rsplit("|", 1)[1]
        named = _SPAN.findall(correction)
        assert named == presets[-1:] or (not named and "rules" in correction), row


def rows_of(page):
    """The cells of every row of the tables in a page, heads left out."""
    lines = [
        line.strip("| ") for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("| ")
    ]
    return [re.split(r" *(?<!\\)\| *", line) for line in lines]


def test_the_glossary_has_a_sentence_for_each_word_and_names_of_the_code():
    words = rows_of("glossary.md")[1:]
    source = "\n".join(path.read_text() for path in (ROOT / "verl_rc").rglob("*.py"))
    assert len(words) >= 20
    for word, meaning in words:
        assert meaning.endswith("."), word
        assert meaning.count(". ") == 0, f"{word}: one sentence"
        names = [
            name
            for span in _SPAN.findall(meaning)
            for name in re.findall(r"\w+", span.split("/")[-1].split("=")[0])
        ]
        assert [name for name in names if not re.search(rf"\b{name}\b", source)] == [], word


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("`trainer.seed=1` and `actor_rollout_ref.rollout.n`, data.ghost outside of code", []),
        (
            "`actor_rollout_ref.rollout.engine_kwargs.vllm.block_size`, "
            "`algorithm.rollout_correction.preset=tis`",
            [],
        ),
        ("`data.parquet`, `verl_rc/config/task.py`, `config.trainer.ghost`", []),
        ("`trainer.sed=1`", ["trainer.sed"]),
        ("```bash\npython -m verl_rc.main_ppo \\\n  algorithm.ghost=1\n```", ["algorithm.ghost"]),
        ("`actor_rollout_ref.actor.grad_clip`", ["actor_rollout_ref.actor.grad_clip"]),
    ],
)
def test_a_key_that_does_not_exist_is_found(text, wrong):
    assert unfields_of(text) == wrong


def test_keys_of_verl_pass_where_verl_is_the_subject():
    assert unfields_of("`actor_rollout_ref.actor.grad_clip`, `trainer.ghost`", about_verl=True) == [
        "trainer.ghost"
    ]


def test_a_preset_that_does_not_exist_is_found():
    assert unknown_presets('`preset=tis`, `preset=NAME`, `from_preset("ghost")`, `preset=decoupled`') == [
        "decoupled",
        "ghost",
    ]


@pytest.mark.parametrize(
    ("command", "mistake"),
    [
        ("bash recipes/quickstart_digits_cpu.sh trainer.total_training_steps=10   # ten steps", None),
        ("SEED=2 bash scripts/quickstart.sh", None),
        ("python -m verl_rc.main_ppo key=value …", None),
        ("python scripts/prepare_data/math_dataset.py --output_dir data/math", None),
        ("verl-rc migrate run.yaml +algorithm.rollout_is_threshold=2.0", None),
        ("bash scripts/cluster/submit.sh recipes/quickstart_digits_cpu.sh", None),
        ("bash scripts/ghost", "does not exist"),
        ("bash recipes/quickstart_digits_cpu.sh trainer.ghost=1", "not a known key"),
        ("bash scripts/cluster/submit.sh recipes/ghost", "does not exist"),
        ("python -m verl_rc.ghost", "does not exist"),
        ("python -m verl_rc.main_ppo trainer.ghost=1", "no override"),
        ("python -m verl_rc.main_ppo task=digits --cfg=job hardware=1gpu,8gpu", None),
        ("python -m verl_rc.main_ppo task=ghost", "task=ghost is no override"),
        ("python -m verl_rc.main_sft task=digits", "task=digits is no override"),
        ("python -m verl_rc.main_sft data.ghost=1", "no override"),
        ("python scripts/prepare_data/math_dataset.py --ghost x", "has no option --ghost"),
        ("python -m scripts.research.study --ghost x", "has no option --ghost"),
        ("verl-rc ghost", "would refuse"),
        ("verl-rc export", None),
        ("verl-rc export runs/1/global_step_20", "would refuse"),
        ("verl-rc explain trainer.ghost=1", "no override"),
        ("verl-rc explain recipes/quickstart_digits_cpu.sh trainer.seed=2", None),
        ("verl-rc explain recipes/quickstart_digits_cpu.sh trainer.ghost=1", "not a known key"),
        ("verl-rc doctor recipes/" + "ghost.sh", "does not exist"),
        ("ghost --help", "begins with ghost"),
        ("bash 'recipes", "does not parse"),
    ],
)
def test_a_command_that_cannot_be_right_is_found(command, mistake):
    found = mistake_in(command)
    assert found is None if mistake is None else mistake in found


def test_anchors_are_made_as_github_makes_them():
    assert headings("# Which preset?\n## explain: what, and why\n```bash\n# no heading\n```\n") == {
        "which-preset",
        "explain-what-and-why",
    }


def test_a_line_of_prose_that_is_too_wide_is_found():
    wide = "x" * 101
    assert too_wide(f"{wide}\n| {wide} |\n```text\n{wide}\n```\n{'x' * 100}\n") == [wide]
