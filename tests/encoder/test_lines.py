"""Printed code recreates the encoder: executed as printed, over a grid of options, it gives the same vectors."""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from typer.testing import CliRunner

from midlayer_encoders import LayerEncoder, sweep
from midlayer_encoders.cli import app
from midlayer_encoders.cli.find import encoder_lines
from midlayer_encoders.encoder.options import python_line, shell_line
from midlayer_encoders.extras.export import serving_line
from tests.support.tiny_folders import TEXTS, Folder

GRID: list[dict[str, Any]] = [
    {},
    {"norm": "none"},
    {"pooling": "last"},
    {"norm": "none", "pooling": "weightedmean", "dtype": "float64"},
    {"max_length": 4},
    {"bidirectional": True},
    {"truncate_dim": 5},
    {"prompts": {"query": "query: ", "document": "it's a text: "}, "default_prompt_name": "document"},
    {"pooling": "cls", "bidirectional": True, "max_length": 6, "trust_remote_code": True},
]


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        pytest.param(
            layer, options, id=f"{layer}-{','.join(options) or 'none'}",
            marks=[pytest.mark.slow] if (layer == 0 or position % 2) and options and options is not GRID[-1] else [],
        )
        for layer in (0, 3)
        for position, options in enumerate(GRID)
    ],
)  # fmt: skip
def test_printed_code_recreates_the_encoder(
    layer: int, options: dict[str, Any], tiny_folder: Folder, tmp_path: Path
) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), layer, device="cpu", **options)
    expected = encoder.encode(TEXTS)
    recreated = eval(python_line(encoder.source, layer, encoder.options), {"LayerEncoder": LayerEncoder})
    np.testing.assert_allclose(recreated.encode(TEXTS, device="cpu"), expected, rtol=1e-6)
    assert recreated.spec == encoder.spec
    command = shlex.split(shell_line(encoder.source, layer, encoder.options, out=str(tmp_path / "out")))
    result = CliRunner().invoke(app, command[1:])
    assert result.exit_code == 0, result.output
    np.testing.assert_allclose(
        SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(TEXTS), expected, rtol=1e-5, atol=1e-6
    )


def test_printed_commands_take_a_model_named_like_a_flag(
    tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_folder("Llama"), "-rf")
    encoder = LayerEncoder("-rf", -1, device="cpu")
    lines = encoder_lines(encoder, {"layer": 2, "center": ["a text"]}, Path("-texts.txt"))
    assert lines["shell"] == "midlayer export ./-rf --layer 2 --center ./-texts.txt --out layer-2"
    Path("-texts.txt").write_text("\n".join(f"text {number}" for number in range(16)))
    result = CliRunner().invoke(app, shlex.split(lines["shell"])[1:])
    assert result.exit_code == 0, result.output
    assert Path("layer-2/modules.json").exists()
    assert serving_line(encoder, "-rf").startswith("vllm serve ./-rf --runner")


def test_printed_line_that_loads_a_folder_is_python(tiny_folder: Folder, tmp_path: Path) -> None:
    out = tmp_path / 'a "quoted" \\ folder'
    result = CliRunner().invoke(app, ["export", tiny_folder("Llama"), "--layer", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    *_, line, _, name_line = (line.strip() for line in result.stdout.strip().splitlines())
    assert eval(line, {"SentenceTransformer": str}) == str(out)
    model = SentenceTransformer(str(out), device="cpu")
    exec(name_line, {"model": model})
    assert model.model_card_data.model_name.startswith("local/")


def test_adapters_and_chat_templates_are_in_the_printed_code(tiny_folder: Folder, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    from tests.support.families import tiny

    lora = get_peft_model(tiny("Llama"), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    lora.save_pretrained(str(tmp_path / "adapter"))
    encoder = LayerEncoder(tiny_folder("Llama"), 2, adapters=[str(tmp_path / "adapter")], device="cpu")
    recreated = eval(python_line(encoder.source, 2, encoder.options), {"LayerEncoder": LayerEncoder})
    np.testing.assert_allclose(recreated.encode(TEXTS), encoder.encode(TEXTS), rtol=1e-6)
    assert np.abs(recreated.encode(TEXTS) - LayerEncoder(tiny_folder("Llama"), 2).encode(TEXTS)).max() > 1e-3
    command = shlex.split(shell_line(encoder.source, 2, encoder.options, out=str(tmp_path / "out")))
    assert CliRunner().invoke(app, command[1:]).exit_code == 0
    loaded = SentenceTransformer(str(tmp_path / "out"), device="cpu")
    np.testing.assert_allclose(loaded.encode(TEXTS), encoder.encode(TEXTS), rtol=1e-5, atol=1e-6)


def test_select_and_sweep_print_code_with_every_option(tiny_folder: Folder, tmp_path: Path) -> None:
    flags = ["--norm", "none", "--pooling", "last", "--dtype", "float64", "--max-length", "6", "--bidirectional"]
    (tmp_path / "texts.txt").write_text("\n".join(f"number {n} of the texts" for n in range(20)))
    command = ["select", tiny_folder("Llama"), "--texts", str(tmp_path / "texts.txt"), "--rule", "last"]
    result = CliRunner().invoke(app, [*command, *flags, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    shell = re.search(r"Export it: (midlayer export .*)", result.output)
    python = re.search(r'In Python:\n(.*\n)(LayerEncoder\(.*\))\.save_pretrained\("layer-4"\)', result.output)
    assert shell
    assert python
    exported_command = shlex.split(shell[1])
    assert [flag for flag in flags if flag not in exported_command] == []
    direct = LayerEncoder(
        tiny_folder("Llama"), 4, norm="none", pooling="last", dtype="float64", max_length=6, bidirectional=True
    )
    namespace: dict[str, Any] = {}
    exec(python[1], namespace)
    recreated = eval(python[2], namespace)
    np.testing.assert_allclose(recreated.encode(TEXTS), direct.encode(TEXTS), rtol=1e-6)
    encoder = LayerEncoder(tiny_folder("Llama"), -1, norm="none", pooling="last", dtype="float64", device="cpu")
    options = sweep(encoder, out=tmp_path / "sweep").notes.options
    assert options == {"norm": "none", "pooling": "last", "dtype": "float64"}
