"""What an installed wheel must do, run by the Python of its environment, outside the source tree: MODEL OUT."""

import json
import sys
from importlib.resources import files
from pathlib import Path


def main(model: str, out: Path) -> None:
    """Import, encode, sweep, write a page; the last line says where the package lies."""
    import midlayer_encoders
    from midlayer_encoders import LayerEncoder, sweep
    from midlayer_encoders.callbacks import LayerMetricsCallback

    home = Path(midlayer_encoders.__file__).parent
    callbacks = home / "callbacks"
    assert Path(sys.modules[LayerMetricsCallback.__module__].__file__ or "").parent == callbacks
    assert not callbacks.is_symlink()
    assert files("midlayer_encoders").joinpath("report", "page.css").read_text()
    assert (home / "py.typed").is_file()
    rows = [{"sentence1": f"text {n}", "sentence2": f"text {n // 2}", "score": n % 5} for n in range(12)]
    task = out / "near.jsonl"
    task.write_text("\n".join(map(json.dumps, rows)))
    assert LayerEncoder(model, 2, device="cpu").encode(["a text", "another"]).shape[0] == 2
    result = sweep(model, str(task), out=out / "swept", device="cpu")
    assert not result.failures, result.failures
    assert "<img" in result.to_html().read_text()
    print(home)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
