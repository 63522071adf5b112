"""pip's settings in uv's words."""

from pip_settings_for_uv import read_pip_settings, uv_arguments


def test_the_environment_wins_over_files_and_the_install_section_over_global():
    listing = "\n".join(
        [
            ":env:.find-links='https://env.example/wheels'",
            "global.find-links='https://global.example/wheels'",
            "install.index-url='https://install.example/simple'",
            "global.index-url='https://global.example/simple'",
            "list.format='columns'",
        ]
    )
    assert read_pip_settings(listing) == {
        "find-links": "https://env.example/wheels",
        "index-url": "https://install.example/simple",
    }


def test_lists_become_repeated_options(tmp_path):
    settings = {
        "extra-index-url": "https://a.example https://b.example",
        "find-links": f"{tmp_path}\n/no/such/folder",
    }
    assert uv_arguments(settings) == [
        *("--index", "https://a.example", "--index", "https://b.example"),
        *("--find-links", str(tmp_path)),
        *("--index-strategy", "unsafe-best-match"),
    ]


def test_nothing_configured_needs_no_arguments():
    assert uv_arguments({}) == []


def test_a_replaced_index_and_no_index():
    assert uv_arguments({"index-url": "https://a.example", "no-index": "true"}) == [
        "--default-index",
        "https://a.example",
        "--no-index",
    ]
