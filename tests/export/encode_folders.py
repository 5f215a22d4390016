"""A script that any release of sentence-transformers runs: folders and texts in, vectors or errors out, as JSON."""

import json
import sys


def main() -> None:
    import sentence_transformers
    import transformers
    from sentence_transformers import SentenceTransformer

    arguments = json.load(sys.stdin)
    result = {}
    for folder in arguments["folders"]:
        try:
            result[folder] = SentenceTransformer(folder, device="cpu").encode(arguments["texts"]).tolist()
        except Exception as reason:
            result[folder] = f"{type(reason).__name__}: {reason}"
    versions = [sentence_transformers.__version__, transformers.__version__]
    sys.stdout.write("\n" + json.dumps({"versions": versions, "found": result}) + "\n")


if __name__ == "__main__":
    main()
