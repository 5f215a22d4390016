"""What a reader of the pages has on the desk: the files that commands name, and tiny models in the place of real ones."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import transformers as tf
from scipy.io import wavfile

from tests.docs.printed import Command
from tests.support.families import VOCAB
from tests.support.made_media import IMAGES, WAVEFORMS
from tests.support.tiny_folders import joint_image_processor, processor, save_tiny, tokenizer

MODELS = {
    "MODEL": "decoder",
    "BASE": "decoder",
    "runs/my-model": "steps",
    "TUNED": "tuned",
    "built-in": "decoder",
    "EleutherAI/pythia-410m": "decoder",
    "EleutherAI/pythia-410m@step16000": "tuned",
    "HuggingFaceTB/SmolLM2-135M": "decoder",
    "sentence-transformers/all-MiniLM-L6-v2": "bert",
    "facebook/dinov2-base": "vit",
    "facebook/hubert-base-ls960": "wav2vec2",
    "openai/clip-vit-base-patch32": "clip",
    "facebook/esm2_t12_35M_UR50D": "esm",
}
"""Models that pages name, and the tiny ones that stand for them; as deep as the layers that pages ask for."""

FILES = {
    ("--texts", "FILE"): "texts.txt",
    ("--pairs", "FILE"): "pairs.jsonl",
    ("--images", "FOLDER"): "photos",
    ("--audio", "FOLDER"): "recordings",
    ("--data", "FOLDER"): "classes",
    ("--tasks", "STSBenchmark"): "./mine",  # mteb would fetch it
    ("--tasks", "CIFAR10ZeroShot"): "./mine",
    ("--tasks", "Flickr30kT2IRetrieval"): "./mine",
    ("--tasks", "./my_data"): "./mine",
    ("--dims", "64"): "4",  # the tiny models have 16
    ("--dims", "128"): "8",
    ("--truncate-dim", "64"): "4",
}
"""What stands behind an option in a page, and in the test. Names of files, as ``texts.txt``, are those of the desk."""

SUBJECTS = ("cats", "markets", "cards", "rain", "trains", "music")
SENTENCES = [
    f"{start} {subject} {rest}"
    for subject in SUBJECTS
    for start, rest in (
        ("the", "are here today"),
        ("some", "came in the night"),
        ("no", "could be seen"),
        ("all", "went"),
    )
]


def here(command: Command, models: Path) -> list[str]:
    """Return a command's words with what is on the desk in the place of what the page names."""
    words = [word for word in command.words if word != "[MORE]"]  # optional, as the brackets say
    made = []
    for before, word in zip(["", *words], words, strict=False):
        parts = [_file(words, before, part) or _model(part, words, models) for part in word.split(",")]
        made.append(",".join(dict.fromkeys(parts)) if before == "--tasks" else ",".join(parts))
    return made


def _file(words: list[str], option: str, part: str) -> str | None:
    return FILES.get((" ".join([*words[1:2], option]), part)) or FILES.get((option, part))


def _model(word: str, words: list[str], models: Path) -> str:
    name = MODELS.get(word)
    if name is None:
        return word
    if words[1:2] == ["progression"]:
        return str(models / "steps")
    name = "vit" if "--images" in words and name == "decoder" else name
    return str(models / ("wav2vec2" if "--audio" in words and name == "decoder" else name))


def make_models(folder: Path) -> Path:
    """Write the tiny models; the texts' decoder has 30 blocks, since pages name its layers."""
    deep = {"num_hidden_layers": 30, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    common = {"vocab_size": VOCAB, "max_position_embeddings": 256, "pad_token_id": 0, **deep}
    for seed, name in enumerate(("decoder", "tuned")):
        tf.set_seed(seed)
        tf.LlamaForCausalLM(tf.LlamaConfig(num_key_value_heads=1, **common)).save_pretrained(folder / name)
    tf.BertModel(tf.BertConfig(**common | {"num_hidden_layers": 6})).save_pretrained(folder / "bert")
    reads = tokenizer()
    reads.model_max_length = 256
    save_esm(folder / "esm")
    for name in ("decoder", "tuned", "bert"):
        reads.save_pretrained(folder / name)
    for seed, step in enumerate(("step1", "step512", "step16000", "step143000")):
        save_tiny("Llama", folder / "steps" / step, seed=seed)
    save_tiny("Wav2Vec2", folder / "wav2vec2")
    small = {"num_hidden_layers": 12, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    image = small | {"image_size": 16, "patch_size": 4}
    tf.ViTModel(tf.ViTConfig(**image)).save_pretrained(folder / "vit")
    processor("ViT").save_pretrained(folder / "vit")
    ids = {"vocab_size": VOCAB, "max_position_embeddings": 64, "eos_token_id": 2, "bos_token_id": 3, "pad_token_id": 0}
    both = tf.CLIPConfig(text_config=small | ids, vision_config=image, projection_dim=16)
    tf.CLIPModel(both).save_pretrained(folder / "clip")
    tf.CLIPProcessor(joint_image_processor(), tokenizer()).save_pretrained(folder / "clip")
    return folder


def save_esm(
    folder: Path, words: Sequence[str] = "LAGVSERTIDPKQNFYMHWCXBUZO.-", eos: str | None = "<eos>", **sizes: int
) -> str:
    """Write a tiny ESM-2 whose tokens are ``words``, and its tokenizer, and return the path."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = ["<cls>", "<pad>", "<eos>", "<unk>", *words, "<mask>", *(f"<null_{n}>" for n in range(2))]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    tf.EsmTokenizer(str(folder / "vocab.txt"), eos_token=eos, model_max_length=128).save_pretrained(folder)
    tf.set_seed(0)
    small = {"num_hidden_layers": 12, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2} | sizes
    config = tf.EsmConfig(
        vocab_size=len(vocabulary), pad_token_id=1, mask_token_id=vocabulary.index("<mask>"), max_position_embeddings=130,
        position_embedding_type="rotary", token_dropout=True, **small,
    )  # fmt: skip
    tf.EsmForMaskedLM(config).save_pretrained(folder)
    return str(folder)


def make_desk(folder: Path) -> None:
    """Write the files that pages name."""
    folder.mkdir(parents=True, exist_ok=True)
    labels = [label for label in SUBJECTS for _ in range(4)]
    long = [" ".join([*SENTENCES[n:], *SENTENCES[:n]][:20]) for n in range(12)]  # 64 words or more
    for name in ("texts.txt", "labels.txt", "wikitext.txt", "wikitext2_raw_test.txt", "my.txt"):
        lines = {"labels.txt": labels, "texts.txt": SENTENCES}.get(name, long)
        (folder / name).write_text("\n".join(lines) + "\n")
    _jsonl(folder / "gsm8k.jsonl", [{"question": "q", "answer": text} for text in long])
    _jsonl(
        folder / "pairs.jsonl", [{"anchor": a, "positive": b} for a, b in zip(SENTENCES, SENTENCES[1:], strict=False)]
    )
    rows = [{"text": text, "label": label} for text, label in zip(SENTENCES, labels, strict=True)]
    for name in ("train", "test"):
        lines = [f"{row['text']} {name},{row['label']}" for row in rows]
        (folder / f"{name}.csv").write_text("\n".join(["text,label", *lines]) + "\n")
        _jsonl(folder / "my_reviews" / f"{name}.jsonl", [row | {"text": f"{row['text']} {name}"} for row in rows])
    scores = [
        {"sentence1": a, "sentence2": b, "score": n % 5}
        for n, (a, b) in enumerate(zip(SENTENCES, SENTENCES[1:], strict=False))
    ]
    _jsonl(folder / "mine" / "test.jsonl", scores)
    (folder / "mine.csv").write_text((folder / "test.csv").read_text())
    _jsonl(folder / "my_texts" / "texts.jsonl", [{"text": text} for text in SENTENCES])
    _jsonl(folder / "my_search" / "corpus.jsonl", [{"_id": f"d{n}", "text": text} for n, text in enumerate(SENTENCES)])
    _jsonl(folder / "my_search" / "queries.jsonl", [{"_id": subject, "text": subject} for subject in SUBJECTS])
    (folder / "my_search" / "qrels").mkdir()
    answers = [f"{subject}\td{4 * n}\t1" for n, subject in enumerate(SUBJECTS)]
    (folder / "my_search" / "qrels" / "test.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *answers]) + "\n")
    proteins = [(f"M{'ACDEFGHIKL'[n % 10] * (n + 1)}WYV", ("kinase", "other")[n % 2]) for n in range(40)]
    (folder / "proteins.fasta").write_text("".join(f">id{n}|{kind}\n{seq}\n" for n, (seq, kind) in enumerate(proteins)))
    (folder / "proteins.csv").write_text("".join(f"{text},{label}\n" for text, label in [("text", "label"), *proteins]))
    for row_number, row in enumerate(rows):
        path = folder / "classes" / row["label"] / f"{row_number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(row["text"])
    for name in ("photos", "recordings"):
        (folder / name).mkdir()
    for number, image in enumerate(IMAGES * math.ceil(12 / len(IMAGES))):
        image.rotate(7 * number).save(folder / "photos" / f"{number}.png")
    for name in ("photo.jpg", "other.png", "bus.jpg"):
        IMAGES[0].save(folder / name)
    wavfile.write(folder / "speech.wav", WAVEFORMS[0][1], WAVEFORMS[0][0])
    for number, (wave, rate) in enumerate(WAVEFORMS):
        wavfile.write(folder / "recordings" / f"{number}.wav", rate, wave)


def _jsonl(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
