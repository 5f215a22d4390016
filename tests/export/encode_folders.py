"""A script that any release of sentence-transformers runs: folders and texts in, vectors or errors out, as JSON."""

from __future__ import annotations

import json
import sys


def main() -> None:
    import sentence_transformers
    import transformers
    from sentence_transformers import SentenceTransformer

    given = json.load(sys.stdin)
    found = {}
    for folder in given["folders"]:
        try:
            found[folder] = SentenceTransformer(folder, device="cpu").encode(given["texts"]).tolist()
        except Exception as reason:
            found[folder] = f"{type(reason).__name__}: {reason}"
    versions = [sentence_transformers.__version__, transformers.__version__]
    sys.stdout.write("\n" + json.dumps({"versions": versions, "found": found}) + "\n")


if __name__ == "__main__":
    main()
