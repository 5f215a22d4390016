"""List the stores in a folder."""

from dataclasses import dataclass
from pathlib import Path

from midlayer_encoders.sweeping.store import read_head, read_label


@dataclass(frozen=True)
class StoreInfo:
    """What a store holds."""

    folder: Path
    texts: int
    layers: tuple[int, ...]
    dim: int
    dtype: str

    @property
    def key(self) -> str:
        return self.folder.name


def list_stores(root: Path) -> list[StoreInfo]:
    """Return the stores in a folder, by name."""
    return [_info(path.parent) for path in sorted(root.glob("*/store.json"))]


def _info(folder: Path) -> StoreInfo:
    heads = [read_head(path) for path in folder.glob("*.safetensors")]
    texts = {key for _, keys in heads for key in keys}
    layers = {layer for shard, _ in heads for layer in shard.layers}
    label = read_label(folder / "store.json")
    return StoreInfo(folder, len(texts), tuple(sorted(layers)), label["dim"], label["dtype"])
