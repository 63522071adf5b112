"""A class of the user's own in the place of data files: rows pass through everything that a file's rows do."""

import pytest

from verl_rc.config.task import DataConfig
from verl_rc.data.dataset import build_train_loader, build_validation_rows

SOURCE = """
class Squares:
    def __init__(self, data_files, tokenizer, processor, config):
        self.name = data_files[0]
        self.limit = config.max_prompt_length
    def __len__(self):
        return 9
    def __getitem__(self, index):
        return {KEY: [{"role": "user", "content": str(index) * (9 if index == 8 else 1)}], "data_source": self.name,
                "reward_model": {"ground_truth": str(index**2)}}
"""


@pytest.fixture
def config(tmp_path):
    def build(source, name="Squares", **changes):
        (tmp_path / "own.py").write_text(source)
        own = {"path": str(tmp_path / "own.py"), "name": name}
        given = {"train_files": ["t"], "val_files": ["v"], "train_batch_size": 4, "max_prompt_length": 4, **changes}
        return DataConfig.model_validate({**given, "filter_overlong_prompts": True, "custom_cls": own})

    return build


@pytest.mark.parametrize("key", ["'prompt'", "'raw_prompt'"])
def test_rows_are_tokenised_filtered_and_batched(key, config, tokenizer):
    options = config(SOURCE.replace("KEY", key))
    loader = build_train_loader(options, tokenizer, 1)
    assert loader.dataset.data_sources() == {"t": f"row 0 of Squares of {options.custom_cls.path}"}
    rows = [row for batch in loader for row in batch]
    assert sorted((tokenizer.decode(row.prompt_token_ids), row.ground_truth) for row in rows) == [
        (f"{i}=", str(i * i)) for i in range(8)
    ]
    assert {row.data_source for row in rows} == {"t"}
    assert {row.data_source for row in build_validation_rows(options, tokenizer, 1)} == {"v"}


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        (SOURCE, "Cubes", r"must name a class of .*own.py, got 'Cubes'; its classes are \['Squares'\]"),
        ("import nothing_of_this_name", "Squares", "can be imported; .*ModuleNotFoundError"),
        (SOURCE.replace("__getitem__", "get").replace("KEY", "'prompt'"), "Squares", "lacks one of them"),
        (SOURCE.replace("return 9", "return 0").replace("KEY", "'prompt'"), "Squares", r"at least one row for \['t'\]"),
        (SOURCE.replace("KEY", "'question'"), "Squares", r"row 0 lacks \['prompt'\]; it is \{'question'"),
    ],
)
def test_a_wrong_class_is_named(source, name, message, config, tokenizer):
    with pytest.raises(ValueError, match=message):
        build_train_loader(config(source, name), tokenizer, 1)


def test_its_data_sources_are_found(config, tokenizer):
    loader = build_train_loader(config(SOURCE.replace("KEY", "'prompt'")), tokenizer, 1)
    assert loader.dataset.data_sources() == {"t": f"row 0 of Squares of {config(SOURCE).custom_cls.path}"}
